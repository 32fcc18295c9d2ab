"""Teacher-forced scoring through the engine's own cached steps: every row's logits, however the tokens are fed."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from di_jax.engine.batch import Batch, Need, work_of
from di_jax.engine.data_rank import DataRank, data_ranks
from di_jax.engine.runner import LOGITS, TRACE
from di_jax.engine.sequence import Sequence
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import Bucket
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.parallel import processes
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

    @classmethod
    def empty(cls, request_id: str, token_ids: list[int], vocab_size: int) -> Score:
        """Without rows yet. They are kept in place: joined at the end, they would be held twice."""
        return cls(request_id, token_ids, np.empty((len(token_ids), vocab_size), np.float32), {}, {}, {})

    def keep(self, start: int, logits: np.ndarray) -> None:
        """Copies the logits [n, V] of the rows from position `start`."""
        self.logits[start : start + len(logits)] = logits

    def keep_layer(self, kind: str, layer: int, start: int, rows: np.ndarray) -> None:
        """Copies rows [n, ...] of `hidden`, `selected` or `experts` of a layer; streams become fp32."""
        layers: dict[int, np.ndarray] = getattr(self, kind)
        if layer not in layers:
            dtype = np.float32 if kind == "hidden" else rows.dtype
            layers[layer] = np.empty((len(self.token_ids), *rows.shape[1:]), dtype)
        layers[layer][start : start + len(rows)] = rows

    def negative_log_likelihood(self) -> np.ndarray:
        """fp64 [T - 1]: of each token but the first, given those before it. A row at a time: V is large."""
        result = np.empty(len(self.token_ids) - 1)
        for t, token in enumerate(self.token_ids[1:]):
            logits = self.logits[t].astype(np.float64)
            peak = logits.max()
            result[t] = np.log(np.exp(logits - peak).sum()) + peak - logits[token]
        return result


class Scorer:
    """Feeds token lists whole, in chunks, or one token a step through the decode program; several lists at once.

    "whole" cuts where the largest prefill bucket ends, as the engine would.
    """

    def __init__(self, parts: EngineParts, feed: str = "whole", chunk: int = 64, *, trace: bool = False) -> None:
        if feed not in FEEDS:
            raise ValueError(f"feed {feed!r} is not one of {', '.join(FEEDS)}")
        self.parts, self.feed, self.chunk, self.trace = parts, feed, chunk, trace
        self.ranks = data_ranks(parts.runner.local_ranks, parts.ladder, parts.layout)

    def run(self, requests: Iterable[tuple[str, list[int]]]) -> Iterator[Score]:
        """Scores (id, token ids), each non-empty and within the caches; yields as requests finish. Collective: each
        process brings its own, and goes on until all have finished."""
        greedy = SamplingParams(temperature=0.0)
        waiting = deque(Sequence(name, 0, ids, greedy, seed=0, max_tokens=0) for name, ids in requests)
        running: list[Sequence] = []
        scores: dict[str, Score] = {}
        while True:
            while waiting and (rank := self._room_for(waiting[0])) is not None:
                sequence = waiting.popleft()
                rank.admit(sequence)
                running.append(sequence)
                scores[sequence.request_id] = Score.empty(
                    sequence.request_id, sequence.prompt_ids, self.parts.model_config.vocab_size
                )
            if waiting and not running:
                name, ledger = waiting[0].request_id, self.ranks[0].ledgers[0]
                need = ledger.blocks_of(len(waiting[0].prompt_ids))
                raise ValueError(f"request {name}: needs {need} blocks of a pool of {ledger.num_blocks}")
            batch = self._batch()
            bucket = self._bucket(batch)
            if bucket is None:
                return
            self._execute(bucket, batch, scores)
            for work in batch.work:
                work.sequence.num_computed += len(work.chunk.tokens)
            for rank in self.ranks:
                for sequence in [s for s in rank.running if not s.remaining_prompt]:
                    for holding in rank.leave(sequence):
                        rank.release(holding)
                    running.remove(sequence)
                    yield scores.pop(sequence.request_id)

    def _room_for(self, sequence: Sequence) -> DataRank | None:
        """The rank with the most free blocks, if it can take the sequence in."""
        rank = max(self.ranks, key=lambda rank: rank.available)
        return rank if rank.can_admit(sequence) else None

    def _batch(self) -> Batch:
        """The next step: on every rank as many sequences as its largest bucket takes, each with its next tokens."""
        ladder, decode = self.parts.ladder, self.feed == "stepwise"
        most = ladder.decode_rows[-1] if decode else ladder.prefill_rows[-1]
        work = []
        for rank in self.ranks:
            rows = most
            for sequence in rank.running:
                limit = {"whole": rows, "chunked": self.chunk, "stepwise": 1}[self.feed]
                grain = 1 if decode else ladder.prefill_row_cost(1)
                count = min(sequence.remaining_prompt, limit, rows // grain * grain)
                if count == 0:
                    break
                start = sequence.num_computed
                tokens = sequence.prompt_ids[start : start + count]
                work.append(work_of(sequence, tokens, start, sample=False, look_back=ladder.history))
                rows -= count if decode else ladder.prefill_row_cost(count)
        return Batch(DECODE if decode else PREFILL, work)

    def _bucket(self, batch: Batch) -> Bucket | None:
        """The smallest bucket that holds the batches of all processes; None when no process has any work."""
        agreement, ladder = processes.current(), self.parts.ladder
        ledgers = [ledger for rank in self.ranks for ledger in rank.ledgers]
        own = np.array(batch.need(ladder, ledgers).numbers(), np.int32)
        need = Need(*agreement.gather(own, "the bucket of a step").max(axis=0).tolist())
        rows, context = need.rows, need.context_blocks
        agreement.working(f"scoring, {rows} rows and {context} blocks of context" if rows else None)
        return ladder.bucket(batch.kind == DECODE, rows, context) if rows else None  # every row is asked for

    def _execute(self, bucket: Bucket, batch: Batch, scores: dict[str, Score]) -> None:
        """Runs a step and copies each member's rows out of it: the bucket's whole output, which has rows of padding and
        of other requests, is let go here."""
        runner = self.parts.runner
        plans = batch.plans(bucket, runner.local_ranks)
        outputs = runner.execute(plans, TRACE if self.trace else LOGITS).host()
        by_rank = dict(zip(runner.local_ranks, zip(plans, outputs, strict=True), strict=True))
        for rank, place, work in batch.results():
            plan, output = by_rank[rank]
            rows, start, score = plan.rows_of(place), work.chunk.start, scores[work.sequence.request_id]
            score.keep(start, np.asarray(output.logits)[rows])
            if output.trace is None:
                continue
            for run, trace in zip(self.parts.model_config.layer_runs, output.trace, strict=True):
                for at, layer in enumerate(run):
                    score.keep_layer("hidden", layer.layer, start, np.asarray(trace.streams)[at][rows])
                    score.keep_layer("experts", layer.layer, start, np.asarray(trace.experts)[at][rows])
                    if layer.owns_index:
                        score.keep_layer("selected", layer.layer, start, np.asarray(trace.selected)[at][rows])
