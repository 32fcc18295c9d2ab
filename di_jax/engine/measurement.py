"""Fills the engine's metrics from what the steps and the scheduler did."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.flops import ModelFlops, peak_flops
from di_jax.engine.metrics import EngineMetrics, StatusLine, StepReport
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.step_output import StepOutput
from di_jax.model.config import ModelConfig


class Measurement:
    """The metrics of one engine and its status line. Counts this process's ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        snapshots: WindowStateCache,
        model: ModelConfig,
        *,
        compact: bool,
        device_kind: str,
        num_devices: int,
        log_interval: float,
    ) -> None:
        self.scheduler, self.snapshots = scheduler, snapshots
        peak = peak_flops(device_kind)
        self.metrics = EngineMetrics(None if peak is None else peak * num_devices)
        self.status = StatusLine(log_interval)
        self.flops = ModelFlops(model, compact=compact)
        self.metrics.blocks_total = sum(ledger.num_blocks for ledger in scheduler.ledgers)
        self._compilations = COMPILATIONS.count

    def ready(self) -> None:
        """Warm-up has ended: what compiles from now on is counted."""
        self._compilations = COMPILATIONS.count

    def begin(self) -> None:
        """A request came after an idle time."""
        self.status.restart()
        self.metrics.restart()

    def launched(self, batch: Batch | DecodeBatch, now: float) -> None:
        """A step was launched: prompts that it begins have left the queue."""
        if isinstance(batch, DecodeBatch):
            return
        m = self.metrics
        for work in batch.work:
            sequence, request = work.sequence, work.sequence.request
            if work.parent is not None or work.chunk.start > sequence.hit.start or request is None:
                continue
            m.prefix_queries += sequence.goal
            m.prefix_hits += sequence.hit.length
            m.replayed_tokens += sequence.hit.length - sequence.hit.start
            if request.started is None:
                request.started = now
                m.queue_time.observe(now - request.arrived)
                m.prompt_tokens += len(request.prompt_ids)
                m.cached_tokens += sequence.hit.length

    def operations(self, batch: Batch | DecodeBatch, outputs: Mapping[int, StepOutput]) -> float:
        """Of the model, in a step, without the draft's. outputs: by rank."""
        if isinstance(batch, DecodeBatch):
            return sum(self.flops.decode(self._contexts(part, outputs[part.rank])) for part in batch.parts)
        chunks = [work.chunk for work in batch.work]
        if not chunks:
            return 0.0
        count = np.array([len(chunk.tokens) for chunk in chunks])
        start, window, decoder = np.array([(c.start, c.window_start, c.decoder_start) for c in chunks]).T
        return self.flops.step(count, start + count, window_start=window, decoder_start=decoder)

    @staticmethod
    def _contexts(part: DecodePart, output: StepOutput) -> np.ndarray:
        """Of each row of a decode step, to within the drafts of its block."""
        if output.verified is None:
            return part.position + 1
        rows = 1 + np.asarray(output.verified)[: len(part.slots)]
        return np.repeat(part.position + 1, np.maximum(rows, 0))

    def completed(
        self,
        report: StepReport,
        batch: Batch | DecodeBatch,
        generated: int,
        emitted: Mapping[int, np.ndarray],
        now: float,
    ) -> None:
        """The results of a step were handled. generated: tokens that it brought; emitted: of each of its sequences, by
        rank, if it verified drafts; now: when, as in what it moved."""
        m, ledgers = self.metrics, self.scheduler.ledgers
        m.generated_tokens += generated
        if isinstance(batch, DecodeBatch):
            for part in batch.parts:
                gaps = now - part.table.told[part.slots]
                part.table.told[part.slots] = now
                if part.rank in emitted:
                    self._spread(gaps, emitted[part.rank])
                    continue
                if gaps.min() == gaps.max():  # as usual: all got their last token from the same step
                    m.inter_token.observe(float(gaps[0]), len(gaps))
                    continue
                for gap, times in zip(*np.unique(gaps[np.isfinite(gaps)], return_counts=True), strict=True):
                    m.inter_token.observe(float(gap), int(times))
        else:
            for request in report.requests:
                if request.first_token == now:
                    m.first_token.observe(now - request.arrived)
        m.running, m.waiting = self.scheduler.num_running, self.scheduler.num_waiting
        m.blocks_used = sum(ledger.num_held_blocks for ledger in ledgers)
        m.blocks_cached = sum(ledger.num_cached_blocks for ledger in ledgers)
        m.blocks_free = sum(ledger.num_free_blocks for ledger in ledgers)
        m.evicted_blocks = sum(ledger.evictions for ledger in ledgers)
        m.preemptions = self.scheduler.preemptions
        m.snapshot_bytes = self.snapshots.nbytes
        m.snapshot_hits, m.snapshot_misses = self.snapshots.hits, self.scheduler.replays
        m.compilations = COMPILATIONS.count - self._compilations
        m.observe_step(report, now)
        self.status.observe(report, m)

    def _spread(self, gaps: np.ndarray, emitted: np.ndarray) -> None:
        """Times between tokens of which several came at once: each is as long after the one before it."""
        counted = np.isfinite(gaps) & (emitted > 0)
        each, index = np.unique(gaps[counted] / emitted[counted], return_inverse=True)
        for gap, times in zip(each.tolist(), np.bincount(index, emitted[counted]).tolist(), strict=True):
            self.metrics.inter_token.observe(gap, int(times))

    def ended(self, request: Request) -> None:
        """A request ended."""
        assert request.ended is not None
        reason = "error" if request.failure is not None else request.sequences[0].finish_reason or "error"
        self.metrics.observe_end(
            reason,
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=request.num_output_tokens,
            preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
            arrived=request.arrived,
            started=request.started,
            first_token=request.first_token,
            ended=request.ended,
        )
