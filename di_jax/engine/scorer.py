"""Teacher-forced scoring through the engine's own cached steps: every row's logits, however the tokens are fed."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.runner import LOGITS, TRACE, StepOutput
from di_jax.engine.sequence import Sequence
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import Bucket, Chunk, StepPlan, build_plan
from di_jax.sampling_params import SamplingParams

FEEDS = ("whole", "chunked", "stepwise")


@dataclasses.dataclass
class Score:
    """What one request's tokens scored. The trace holds, by layer number, what numerics of the layer are asked for."""

    request_id: str
    token_ids: list[int]
    logits: np.ndarray  # fp32 [T, V] at every position
    hidden: dict[int, np.ndarray]  # [T, hc, D] streams leaving the layer
    selected: dict[int, np.ndarray]  # int32 [T, index_topk], index sources, ascending, -1 padded
    experts: dict[int, np.ndarray]  # int32 [T, k], best biased score first

    def negative_log_likelihood(self) -> np.ndarray:
        """fp64 [T - 1]: of each token but the first, given those before it."""
        logits = self.logits[:-1].astype(np.float64)
        peak = logits.max(axis=-1)
        total = np.log(np.exp(logits - peak[:, None]).sum(axis=-1)) + peak
        return total - np.take_along_axis(logits, np.asarray(self.token_ids[1:])[:, None], axis=-1)[:, 0]


class Scorer:
    """Feeds token lists whole, in chunks, or one token a step through the decode program; several lists at once.

    "whole" cuts where the largest prefill bucket ends, as the engine would.
    """

    def __init__(self, parts: EngineParts, feed: str = "whole", chunk: int = 64, *, trace: bool = False) -> None:
        if feed not in FEEDS:
            raise ValueError(f"feed {feed!r} is not one of {', '.join(FEEDS)}")
        self.parts, self.feed, self.chunk, self.trace = parts, feed, chunk, trace
        self.blocks = BlockManager(parts.layout.num_blocks, parts.layout.num_slots, parts.layout.block_size)

    def run(self, requests: Iterable[tuple[str, list[int]]]) -> Iterator[Score]:
        """Scores (id, token ids), each non-empty and within the caches; yields as requests finish."""
        greedy = SamplingParams(temperature=0.0)
        waiting = deque(Sequence(name, 0, ids, greedy, seed=0, max_tokens=0) for name, ids in requests)
        running: list[Sequence] = []
        results: dict[str, list[tuple[StepPlan, int, StepOutput]]] = {}
        while waiting or running:
            while waiting and self.blocks.can_allocate(waiting[0]):
                sequence = waiting.popleft()
                self.blocks.allocate(sequence)
                running.append(sequence)
                results[sequence.request_id] = []
            if not running:
                name, need = waiting[0].request_id, self.blocks.blocks_of(len(waiting[0].prompt_ids))
                raise ValueError(f"request {name}: needs {need} blocks of a pool of {self.blocks.num_blocks}")
            plan, members = self._plan(running)
            output = self.parts.runner.execute(plan, TRACE if self.trace else LOGITS).host()
            for i, sequence in enumerate(members):
                results[sequence.request_id].append((plan, i, output))
                sequence.num_computed += len(plan.chunks[i].tokens)
            for sequence in [s for s in running if not s.remaining_prompt]:
                self.blocks.free(sequence)
                running.remove(sequence)
                yield self._collect(sequence, results.pop(sequence.request_id))

    def _plan(self, running: list[Sequence]) -> tuple[StepPlan, list[Sequence]]:
        """The next step: as many sequences as its largest bucket takes, each with its next tokens."""
        ladder, decode = self.parts.ladder, self.feed == "stepwise"
        rows = ladder.decode_rows[-1] if decode else ladder.prefill_rows[-1]
        tile = Bucket(decode, rows, 1).tile
        chunks, members = [], []
        for sequence in running:
            limit = {"whole": rows, "chunked": self.chunk, "stepwise": 1}[self.feed]
            count = min(sequence.remaining_prompt, limit, rows)
            if count == 0:
                break
            start = sequence.num_computed
            tokens = sequence.prompt_ids[start : start + count]
            chunks.append(Chunk(tokens, start, sequence.slot, sequence.blocks, sample=False))
            members.append(sequence)
            rows -= -(-count // tile) * tile
        context = max(self.blocks.blocks_of(c.start + len(c.tokens)) for c in chunks)
        return build_plan(ladder.fit(decode, [len(c.tokens) for c in chunks], context), chunks), members

    def _collect(self, sequence: Sequence, steps: list[tuple[StepPlan, int, StepOutput]]) -> Score:
        """Joins the rows that the steps computed for one sequence."""
        config = self.parts.model_config

        def joined(pieces: list[Any]) -> np.ndarray:
            return np.concatenate([np.asarray(piece) for piece in pieces])

        # Host copies of what a step with logits, or with a trace, surely returned.
        rows: list[tuple[slice, Any]] = [(plan.rows_of(i), output) for plan, i, output in steps]
        score = Score(sequence.request_id, sequence.prompt_ids, joined([o.logits[r] for r, o in rows]), {}, {}, {})
        if not self.trace:
            return score
        for at, run in enumerate(config.layer_runs):
            for member, plan in enumerate(run):
                layers = [(r, o.trace[at]) for r, o in rows]
                score.hidden[plan.layer] = joined([t.streams[member][r] for r, t in layers]).astype(np.float32)
                score.experts[plan.layer] = joined([t.experts[member][r] for r, t in layers])
                if plan.owns_index:
                    score.selected[plan.layer] = joined([t.selected[member][r] for r, t in layers])
        return score
