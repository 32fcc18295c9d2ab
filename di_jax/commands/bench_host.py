"""`bench`, kind host: what a step costs the host, over a device that answers at once (cli-contract, bench).

The engine, its scheduler, ledgers and prefix cache are the real ones, with the sizes of the model that `model.path`
names; weights are not read and nothing runs on a device. Left out is therefore what jax itself takes to send a step off
and to fetch its tokens; rows of kind engine have that.

With `speculative.enabled` steps draft and verify as on a device: the host chooses rows, books blocks of tokens and
confidences, and nothing is computed. What drafting gains is simulated beside it with the confidences of
`bench.recording` (`bench_speculation`).
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from di_jax.commands.bench_speculation import Simulation, published_profile, recorded_gains
from di_jax.commands.plan import released_config
from di_jax.config import BenchGroup, Config
from di_jax.engine.engine import Engine
from di_jax.engine.memory_sizing import blocks_per_sequence
from di_jax.engine.metrics import StepReport
from di_jax.engine.runner import TOKENS, ModelRunner, StepOutput
from di_jax.engine.setup import EngineParts, build_ladder, cache_layout, draft_settings
from di_jax.engine.state_programs import Snapshot, StateCopies
from di_jax.engine.step_output import DraftOutput
from di_jax.engine.step_plan import Bucket, StepPlan
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.errors import UserError
from di_jax.model.cache import CacheLayout
from di_jax.model.linear import Numerics
from di_jax.parallel.mesh import Parallel
from di_jax.platforms.devices import require_devices
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import Tokenizer

SEED = 20260910
# What planning a step and handling its tokens may take, at 256 running requests.
BUDGET_US = 300.0
NOTE = (
    "microseconds, medians over the steps counted, *_p99 their 99th percentiles; host = schedule + post; launch: "
    "packing the plans, without jax; roofline_fraction = budget_us / host_us, above 1 where the host is fast enough. "
    "With a recording decode rows have what is simulated of a rank's requests, with published step times: drafts "
    "verified (verified_length) and tokens (accepted_length) of a request and step, fixed_* with all drafts verified, "
    "gain in tokens a second over that"
)
ANSWERS = 64  # results that a NullRunner gives in turn
# Of the drafts before which all were accepted, the share that is: so 2.29 of 5, as published of the released model
# (dspark 5).
ACCEPTED = 0.75

Row = dict[str, Any]


@dataclass(frozen=True)
class NullOutput(StepOutput):
    """Results that are on the host already; leading axis of this process's ranks."""

    def host(self) -> list[StepOutput]:
        return [
            StepOutput(token, logprob, None, None, None, draft=draft)
            for token, logprob, draft in zip(self.token, self.logprob, _of_ranks(self.draft, len(self.token)))
        ]


@dataclass(frozen=True)
class NullVerified:
    """Results of a step that verified drafts, worked out when the host waits for them, which does not count as its own.

    limits: of each rank of this process the drafts of each sequence at most, int32 [R], -1 for none, and in all.
    token, logprob: [ranks, R, k + 1]; accepted: int64 [ranks, R], of drafts if that many are verified.
    """

    limits: list[tuple[np.ndarray, int]]
    token: np.ndarray
    logprob: np.ndarray
    accepted: np.ndarray
    draft: DraftOutput | None = None

    def host(self) -> list[StepOutput]:
        drafts = _of_ranks(self.draft, len(self.limits))
        return [self._rank(rank, *limits, draft) for rank, (limits, draft) in enumerate(zip(self.limits, drafts))]

    def _rank(self, rank: int, cap: np.ndarray, budget: int, draft: DraftOutput | None) -> StepOutput:
        """All sequences verify as many, as far as they may."""
        n, live = len(cap), cap >= 0
        verified = np.where(live, np.minimum(cap, budget // max(1, int(live.sum()))), -1)
        emitted = np.where(live, 1 + np.minimum(self.accepted[rank, :n], verified), 0)[:, None]
        said = np.arange(self.token.shape[-1]) < emitted
        told: Any = dict(
            token=np.where(said, self.token[rank, :n], -1),
            logprob=np.where(said, self.logprob[rank, :n], 0),
            verified=verified,
            error=np.zeros(n, np.float32),
        )
        return StepOutput(logits=None, trace=None, load=None, draft=draft, **told)


def _of_ranks(draft: DraftOutput | None, ranks: int) -> list[DraftOutput | None]:
    return [None] * ranks if draft is None else [DraftOutput(numbers) for numbers in draft.numbers]


class NullRunner(ModelRunner):
    """A device that does nothing: steps return at once with random tokens, never the end token. rows: sequences of a
    step at most."""

    def __init__(self, config: Config, layout: CacheLayout, rows: int) -> None:
        self.layout, self.parallel, self.plan = layout, Parallel(config.mesh.plan), config.mesh.plan
        self.mesh = self.plan.build(require_devices(config))
        self.local_ranks, self.resets = list(range(self.plan.world)), 0
        self._thread = None
        random, places = np.random.default_rng(SEED), 1 + layout.num_drafts
        self._answers = itertools.cycle([self._answer(random, rows) for _ in range(ANSWERS)])
        blocks = [self._block(random, rows, places) for _ in range(ANSWERS * (places > 1))]
        self._verified = itertools.cycle([verified for verified, _ in blocks])
        self._drafts = itertools.cycle([draft for _, draft in blocks])
        self._rings: dict[int, np.ndarray] = {}  # by layers

    def warm_up(self, buckets: Iterable[Bucket], outputs: str = TOKENS, *, workers: int | None = None) -> None:
        """Nothing is compiled."""

    def warm_up_programs(self, snapshot_layers: int | None) -> None:
        """Nothing is compiled."""

    def execute(self, plans: Sequence[StepPlan], outputs: str = TOKENS) -> StepOutput:
        return next(self._answers)

    def _answer(self, random: np.random.Generator, *shape: int) -> NullOutput:
        model, shape = self.layout.config, (self.plan.world, *shape)
        token = random.integers(0, model.vocab_size - 1, shape, np.int32)
        token += token >= model.eos_token_id
        logprob = -random.exponential(1.0, shape).astype(np.float32)
        return NullOutput(cast(Any, token), cast(Any, logprob), None, None, None)

    def _block(self, random: np.random.Generator, *shape: int) -> tuple[NullVerified, DraftOutput]:
        """What a step answers, and what it drafts then."""
        answer = self._answer(random, *shape)
        drafts = np.asarray(answer.token)[:, :, 1:]
        accepted = random.geometric(1 - ACCEPTED, drafts.shape[:2]) - 1
        confidence = random.uniform(2 * ACCEPTED - 1, 1, drafts.shape).astype(np.float32).view(np.int32)
        numbers = cast(Any, np.concatenate([drafts, confidence], axis=-1))
        return NullVerified([], np.asarray(answer.token), np.asarray(answer.logprob), accepted), DraftOutput(numbers)

    def verify(self, plans: Sequence[StepPlan]) -> Any:
        views = [plan.bucket.unpack(plan.buffer) for plan in plans]
        return [(view["cap"].copy(), int(view["budget"][0])) for view in views]

    def accept(self, verification: Any, rows: Any = None, allowed: Any = None) -> Any:
        return replace(next(self._verified), limits=verification)

    def draft(self, rows: Sequence[np.ndarray]) -> DraftOutput:
        return DraftOutput(next(self._drafts).numbers[:, : rows[0].shape[-1]])

    def copy(self, copies: Sequence[StateCopies], launches: int | None = None) -> None:
        """There is nothing to copy."""

    def snapshot(self, slots: Sequence[int], layers: int) -> Snapshot:
        if layers not in self._rings:
            window = self.layout.abstract().window
            self._rings[layers] = np.zeros((1, layers, *window.shape[2:]), window.dtype)
            self._rings[layers].flags.writeable = False  # as what a device sends
        return Snapshot([cast(Any, self._rings[layers]) if slot >= 0 else None for slot in slots])

    def restore(self, slots: Sequence[int], rings: Sequence[np.ndarray | None], layers: int) -> None:
        """There is nothing to restore to."""

    def repair(self) -> None:
        """Nothing was lost."""

    def reset(self) -> None:
        self.resets += 1


def null_engine(config: Config) -> Engine:
    """The engine of `config` over a `NullRunner`, with blocks for engine.max_num_seqs requests at full length.

    Raises ConfigError for a model that is not known without its weights (`plan`), or that cannot draft where
    `speculative` is on, or for more ranks than devices.
    """
    model = released_config(config.model.path, config.model.revision)
    numerics = Numerics.create(config.model.dtype, quantize_caches=config.model.quantize_caches)
    engine, ladder = config.engine, build_ladder(config, model.engram_look_back)
    blocks = engine.num_blocks or blocks_per_sequence(engine) * engine.max_num_seqs
    layout = cache_layout(model, numerics.formats, blocks, engine.max_num_seqs, draft_settings(config, model))
    rows = max(ladder.decode_rows[-1], *(bucket.sequences for bucket in ladder.buckets()))
    runner = NullRunner(config, layout, rows)
    tokenizer = cast(Tokenizer, None)  # answers stay ids
    parts = EngineParts(model, Path(config.model.path), tokenizer, runner, ladder, layout, speculative=config.drafting)
    # A device that does nothing has no times of its own. What steps that verify took so far is looked at as ever, here
    # the host's time.
    return Engine(parts, engine, published_profile(ladder))


@dataclass
class Times:
    """Of one step, in seconds, and how many sequences and tokens it fed."""

    kind: str
    num_sequences: int
    num_tokens: int
    schedule: float
    launch: float
    post: float

    @property
    def host(self) -> float:
        return self.schedule + self.post


@dataclass
class Pauses:
    """Garbage collections: their number by generation, and seconds of each."""

    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    seconds: list[float] = field(default_factory=list)


@dataclass
class Run:
    """What one run over a batch took: of every request to be taken in, of every step, in garbage collections."""

    admissions: list[float]
    steps: list[Times]
    pauses: Pauses


def measure(config: Config, bar: Callable[..., tqdm]) -> list[Row]:
    """The rows of all of `bench.batch_sizes`. bar: makes a progress bar of so many runs.

    Raises ConfigError for a `bench.recording` that cannot be simulated, and UserError when the requests of a row never
    run together.
    """
    simulated, engine, bench = recorded_gains(config), null_engine(config), config.bench
    rows = []
    with bar(total=len(bench.batch_sizes) * (bench.repeats + 1)) as progress:
        for batch in bench.batch_sizes:
            runs = []
            for number in range(bench.repeats + 1):
                runs.append(answer(engine, bench, batch, f"{batch}/{number}"))
                progress.update()
            rows += [_row(engine, phase, bench, batch, runs[1:]) for phase in (PREFILL, DECODE)]
            if simulated is not None:
                rows[-1] |= _simulated(simulated(-(-batch // engine.runner.plan.world)))
    return rows


def answer(engine: Engine, bench: BenchGroup, batch: int, salt: str) -> Run:
    """Answers `batch` prompts that come at once with `bench.output_len` tokens each.

    salt: of the prefix cache; no two runs share prefixes. Lengths are spread over a block, as those of requests that
    come by and by are: else all sequences would complete their blocks in the same steps.
    """
    random, block = np.random.default_rng(SEED), engine.parts.layout.block_size
    sampling = SamplingParams(
        temperature=1.0, max_tokens=bench.output_len, ignore_eos=True, detokenize=False, cache_salt=salt
    )
    lengths = [max(1, bench.prompt_len - index * block // batch) for index in reversed(range(batch))]
    prompts = [random.integers(0, engine.parts.model_config.vocab_size, length).tolist() for length in lengths]
    admissions, calls = [], []
    with _pauses() as pauses:
        for prompt in prompts:
            began = time.perf_counter()
            engine.add_request(prompt, sampling)
            admissions.append(time.perf_counter() - began)
        while True:
            began = time.perf_counter()
            report = engine.step()
            seconds = time.perf_counter() - began
            if report is None:
                break
            calls.append((seconds, report))
    return Run(admissions, _times(calls, ahead=engine.config.async_scheduling), pauses)


def _times(calls: Sequence[tuple[float, StepReport]], ahead: bool) -> list[Times]:
    """Of the steps but the last. A call of `Engine.step` handles the step that it reports, to which metrics belong that
    `post_s` leaves out, after it launched the one that the next call reports (the first call: both), or with ahead
    False the same one."""
    found: list[Times] = []
    for (seconds, report), (_, following) in itertools.pairwise(calls):
        launched = [following] if ahead and found else [report, following] if ahead else [report]
        post = seconds - report.wait_s - sum(one.schedule_s + one.launch_s for one in launched)
        found.append(
            Times(report.kind, report.num_sequences, report.num_tokens, report.schedule_s, report.launch_s, post)
        )
    return found


@contextmanager
def _pauses() -> Iterator[Pauses]:
    """Records garbage collections. One before keeps what earlier runs left from counting."""
    pauses, began = Pauses(), 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.counts[info["generation"]] += 1
            pauses.seconds.append(time.perf_counter() - began)

    gc.collect()
    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)


def _row(engine: Engine, phase: str, bench: BenchGroup, batch: int, runs: Sequence[Run]) -> Row:
    """One row of the results. A decode step counts when all requests take part."""
    full = 1 if phase == PREFILL else batch
    steps = [step for run in runs for step in run.steps if step.kind == phase and step.num_sequences >= full]
    if not steps:
        raise UserError(
            f"bench.output_len: {batch} requests of {bench.prompt_len} + {bench.output_len} tokens never decoded "
            "together: raise bench.output_len, engine.max_num_batched_tokens or engine.num_blocks"
        )
    row: Row = {
        "phase": phase,
        "batch": batch,
        "prompt_len": bench.prompt_len,
        "output_len": bench.output_len,
        "max_model_len": engine.config.max_model_len,
        "num_draft_tokens": engine.parts.layout.num_drafts,
        "steps": len(steps),
        "tokens_per_step": sum(step.num_tokens for step in steps) / len(steps),
    }
    for name in ("schedule", "launch", "post", "host"):
        row |= _quantiles(name, [getattr(step, name) for step in steps])
    if phase == PREFILL:
        row |= _quantiles("admission", [seconds for run in runs for seconds in run.admissions])
    pauses = [run.pauses for run in runs]
    return row | {
        "gc_collections": np.sum([one.counts for one in pauses], axis=0).tolist(),
        "gc_longest_us": 1e6 * max((s for one in pauses for s in one.seconds), default=0.0),
        "budget_us": BUDGET_US,
        "roofline_fraction": BUDGET_US / row["host_us"],
    }


def _quantiles(name: str, seconds: Sequence[float]) -> Row:
    median, p99 = 1e6 * np.quantile(seconds, (0.5, 0.99))
    return {f"{name}_us": float(median), f"{name}_us_p99": float(p99)}


def _simulated(simulation: Simulation) -> Row:
    """Of a decode row."""
    return {
        "verified_length": simulation.verified_length,
        "accepted_length": simulation.accepted_length,
        "fixed_accepted_length": simulation.fixed_accepted_length,
        "simulated_steps": simulation.steps,
        "simulated_step_ms": simulation.step_ms,
        "fixed_step_ms": simulation.fixed_step_ms,
        "gain": simulation.gain,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows for a person to read, in microseconds; of the simulation drafts verified, tokens, ms of a step, gain."""
    simulated = any("gain" in row for row in rows)
    head = f"{'phase':8} {'batch':>5} {'schedule':>9} {'launch':>9} {'post':>9} {'host':>9} {'p99':>9} {'gc max':>9}"
    lines = [head + f" {'verified':>9} {'tokens':>9} {'step ms':>9} {'gain':>9}" * simulated]
    for row in rows:
        cells = (row[f"{name}_us"] for name in ("schedule", "launch", "post", "host"))
        numbers = " ".join(f"{cell:9.1f}" for cell in (*cells, row["host_us_p99"], row["gc_longest_us"]))
        lines.append(f"{row['phase']:8} {row['batch']:5d} {numbers}")
        if "gain" in row:
            found = " ".join(f"{row[name]:9.2f}" for name in ("verified_length", "accepted_length"))
            lines[-1] += f" {found} {row['simulated_step_ms']:9.2f} {row['gain']:9.1%}"
    return "\n".join(lines)
