"""The points of a slice's sweep: decode steps of so many requests, prefill steps of so many rows; their programs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from di_jax.commands.bench_slice.random_arrays import SEED, random_state, seeds
from di_jax.commands.bench_slice.rank import Program, Rank, tree_bytes
from di_jax.engine.extra_sampling import FLOATS, NEUTRAL, OF_REQUEST
from di_jax.engine.memory_sizing import blocks_per_sequence
from di_jax.engine.runner import parameter_specs, trace_step
from di_jax.engine.sampling_programs import SamplingPrograms
from di_jax.engine.speculative_programs import DRAFT_COLUMNS, SpeculativePrograms
from di_jax.engine.step_plan import FREE_TOKEN, Bucket, BucketLadder, Chunk, build_plan
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout

DECODE, PREFILL = "decode", "prefill"


class Point(abc.ABC):
    """One row of the results: a step of one size, abstract until `begin`."""

    phase = ""
    requests = 0
    warm_up = 1  # steps before those that count

    def __init__(self, rank: Rank, layout: CacheLayout, bucket: Bucket) -> None:
        self.rank, self.layout, self.bucket = rank, layout, bucket
        self.weights: tuple[Any, Any] | None = None
        self.state: Any = None
        self.plan_buffer = np.zeros(0, np.int32)  # what the host sends with every step

    @cached_property
    def programs(self) -> dict[str, Program]:
        """In the order in which a step runs them."""
        return {name: Program(name, trace, self.rank.compiler) for name, trace in self._traces().items()}

    @abc.abstractmethod
    def _traces(self) -> Mapping[str, Callable[[], Any]]:
        """What traces each program."""

    def _trace_step(self) -> Any:
        rank = self.rank
        (target, drafter), (weights, drafts) = rank.graphs, rank.params
        return trace_step(target, weights, rank.mesh, rank.plan, self.layout, self.bucket, draft=(drafter, drafts))

    def planned(self) -> list[Any]:
        """The traced programs that `plan` looks at."""
        return [program.traced for program in self.programs.values()]

    @property
    @abc.abstractmethod
    def start(self) -> int:
        """Tokens in the caches of a sequence before the first step."""

    @property
    def state_bytes(self) -> int:
        return tree_bytes(self.layout.abstract())

    extra_bytes = 0  # of what is on device beside weights and caches

    def begin(self, weights: tuple[Any, Any]) -> None:
        """Makes the caches; raises JaxRuntimeError when they do not fit."""
        self.weights = weights
        shardings = jax.tree.map(lambda _: self.rank.sharding, self.layout.abstract())
        self.state = random_state(self.layout, self.start, shardings)

    def end(self) -> None:
        """Frees what `begin` made."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = self.weights = None

    @abc.abstractmethod
    def launch(self, program: str) -> jax.Array:
        """Runs a program of the step; a result of it."""

    @abc.abstractmethod
    def fault(self) -> str | None:
        """What was wrong with the step launched last; None when it did what is measured."""

    @abc.abstractmethod
    def load(self) -> np.ndarray:
        """Of the step launched last, int32 [L, slots]: rows that the rank sent to each expert slot of all ranks."""

    def step(self) -> jax.Array:
        """Launches a whole step and returns at once; a result of its last program."""
        for name in self.programs:
            result = self.launch(name)
        return result


class DecodePoint(Point):
    """A step of `requests` requests that verifies all their drafts, accepts and drafts anew."""

    phase = DECODE
    warm_up = 3  # the first has no drafts to verify

    def __init__(self, rank: Rank, requests: int) -> None:
        drafts = rank.settings.num_drafts
        self.requests = requests
        bucket = Bucket(
            True,
            requests * (1 + drafts),
            blocks_per_sequence(rank.config.engine),
            history=rank.model_config.engram_look_back,
            drafts=drafts,
            requests=requests,
        )
        super().__init__(rank, rank.layout(requests), bucket)
        specs: Any = tuple(parameter_specs(params, rank.plan) for params in rank.params)
        self._speculative = SpeculativePrograms(
            rank.mesh, rank.plan, self.layout, rank.settings, rank.graphs, specs, rank.numerics.dtype
        )
        trees: tuple[Any, Any] = (rank.params[0], specs[0])
        head, spec = (tree["head"]["weight"].get_value() for tree in trees)
        self._sampling = SamplingPrograms(rank.mesh, rank.plan, self.layout, head, spec)
        self._verification: Any = None
        self.plan_buffer = self._make_plan()
        self._rows = self._make_rows()

    def _traces(self) -> Mapping[str, Callable[[], Any]]:
        programs, params, requests = self._speculative, self.rank.params, self.requests
        slots = self._sampling.abstract_state
        return {
            "verify": self._trace_step,
            "accept": partial(programs.trace_accept, params, slots, requests, self.bucket.rows, True),
            "draft": partial(programs.trace_draft, params, requests),
        }

    @property
    def start(self) -> int:
        """Such that every step of the run stays within the context."""
        config = self.rank.config
        steps = self.warm_up + 2 * config.bench.repeats + 8
        return max(1, self.rank.context - steps * (1 + self.rank.settings.num_drafts))

    @property
    def extra_bytes(self) -> int:  # type: ignore[override]
        """Of what sampling keeps of each request."""
        return tree_bytes(self._sampling.abstract_state)

    def planned(self) -> list[Any]:
        """`plan` knows of no top-p: its `accept` is the plain one."""
        plain = self._speculative.trace_accept(self.rank.params, None, self.requests, self.bucket.rows)
        return [self.programs["verify"].traced, plain, self.programs["draft"].traced]

    def begin(self, weights: tuple[Any, Any]) -> None:
        super().begin(weights)
        self._sampling.reset()

    def end(self) -> None:
        for leaf in jax.tree.leaves(self._sampling.state):
            leaf.delete()
        self._sampling.state = self._verification = None
        super().end()

    def launch(self, program: str) -> jax.Array:
        run, put = self.programs[program].executable, self.rank.put
        if program == "verify":
            self._verification, self.state = run(self.weights, self.state, put(self.plan_buffer))
            return self._verification.verified
        if program == "draft":
            output, self.state = run(self.weights, self.state, put(self._rows["draft"]))
            return output.numbers
        v, head = self._verification, self.weights[0]["head"]["weight"].get_value()  # type: ignore[index]
        answer, self.state, self._sampling.state = run(
            head, self.state, self._sampling.state, v.hidden, v.verified, v.sequences, put(self._rows["accept"])
        )
        return answer.numbers

    def fault(self) -> str | None:
        verified, drafts = np.asarray(self._verification.verified), self.rank.settings.num_drafts
        if (verified != drafts).any():
            return f"{np.sum(verified != drafts)} of {self.requests} requests did not verify {drafts} drafts"
        return _not_finite(self._verification.hidden)

    def load(self) -> np.ndarray:
        return np.asarray(self._verification.load)[0]

    def _make_plan(self) -> np.ndarray:
        """What the host sends with every step, int32 [size]."""
        buffer, requests = np.zeros(self.bucket.size, np.int32), np.arange(self.requests, dtype=np.int32)
        view, drafts = self.bucket.unpack(buffer), self.rank.settings.num_drafts
        view["budget"][:] = self.requests * drafts
        view["cap"][:] = drafts
        view["slot"][:] = requests
        view["origin"][:] = self.start
        view["capacity"][:] = self.rank.context
        view["temperature"].view(np.float32)[:] = self.rank.config.sampling.temperature
        view["seed_low"][:], view["seed_high"][:] = seeds(self.requests)
        view["forced"][:] = FREE_TOKEN
        # Blocks of a request lie apart, as they do after a while.
        blocks = self.bucket.context_blocks
        view["block_table"][:] = requests[:, None] + self.requests * np.arange(blocks, dtype=np.int32)
        return buffer

    def _make_rows(self) -> dict[str, np.ndarray]:
        """Sampling of the requests, for `accept` and for `draft`."""
        sampling, (low, high) = self.rank.config.sampling, seeds(self.requests)
        given: dict[str, Any] = {
            "chosen": 1,
            "slot": np.arange(self.requests),
            "origin": self.start,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed_low": low,
            "seed_high": high,
        }

        def packed(names: tuple[str, ...]) -> np.ndarray:
            rows = np.zeros((len(names), self.requests), np.int32)
            for row, name in zip(rows, names):
                if name in FLOATS and name in given:
                    row.view(np.float32)[:] = given[name]
                else:
                    row[:] = given.get(name, NEUTRAL[OF_REQUEST.index(name)] if name in OF_REQUEST else 0)
            return rows

        return {"accept": packed(OF_REQUEST), "draft": packed(DRAFT_COLUMNS)}


class PrefillPoint(Point):
    """The last chunk of a prompt as long as the context; of its rows the decoder layers run `replay.keep_tokens`."""

    phase, requests = PREFILL, 1

    def __init__(self, rank: Rank, rows: int) -> None:
        keep, engine = rank.config.engine.replay.keep_tokens, rank.config.engine
        if rows > rank.context:
            raise ConfigError(
                f"bench.slice.prefill_rows: {rows} rows are more than engine.max_model_len = {rank.context}"
            )
        kept = BucketLadder.derive(
            max_num_batched_tokens=keep, max_num_seqs=1, max_context_blocks=1, prefill=[keep]
        ).prefill_rows[0]
        kept = kept if kept < rows else 0
        blocks = blocks_per_sequence(engine)
        bucket = Bucket(False, rows, blocks, kept_rows=kept, history=rank.model_config.engram_look_back)
        if rows % bucket.grain:
            raise ConfigError(f"bench.slice.prefill_rows: {rows} is not a multiple of {bucket.grain} rows, its tiles")
        super().__init__(rank, rank.layout(1), bucket)
        tokens = np.random.default_rng(SEED).integers(0, rank.model_config.vocab_size, rank.context)
        chunk = Chunk(
            tokens[self.start :].tolist(),
            self.start,
            0,
            range(blocks),
            temperature=rank.config.sampling.temperature,
            seed=SEED,
            decoder_start=rank.context - min(keep, rows),
            history=tokens[max(0, self.start - bucket.history) : self.start].tolist(),
        )
        self.plan_buffer = build_plan(bucket, [chunk]).buffer
        self._output: Any = None

    def _traces(self) -> Mapping[str, Callable[[], Any]]:
        return {"prefill": self._trace_step}

    @property
    def start(self) -> int:
        return self.rank.context - self.bucket.rows

    def launch(self, program: str) -> jax.Array:
        run = self.programs[program].executable
        self._output, self.state = run(self.weights, self.state, self.rank.put(self.plan_buffer))
        return self._output.token

    def end(self) -> None:
        self._output = None
        super().end()

    def fault(self) -> str | None:
        return _not_finite(self._output.hidden)

    def load(self) -> np.ndarray:
        return np.asarray(self._output.load)[0]


def _not_finite(hidden: jax.Array) -> str | None:
    bad = int(np.sum(~np.isfinite(np.asarray(hidden.astype(np.float32))).all(axis=-1)))
    return f"{bad} of {hidden.shape[-2]} hidden rows are not finite" if bad else None
