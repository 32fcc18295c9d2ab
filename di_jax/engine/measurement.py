"""Fills the engine's metrics from what the steps and the scheduler did."""

from __future__ import annotations

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.flops import ModelFlops, peak_flops
from di_jax.engine.metrics import EngineMetrics, StatusLine, StepReport
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request
from di_jax.engine.state_cache import WindowStateCache
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

    def operations(self, batch: Batch | DecodeBatch) -> float:
        """Of the model, in a step."""
        if isinstance(batch, DecodeBatch):
            return sum(self.flops.decode(part.position + 1) for part in batch.parts)
        chunks = [work.chunk for work in batch.work]
        if not chunks:
            return 0.0
        count = np.array([len(chunk.tokens) for chunk in chunks])
        start, window, decoder = np.array([(c.start, c.window_start, c.decoder_start) for c in chunks]).T
        return self.flops.step(count, start + count, window_start=window, decoder_start=decoder)

    def completed(self, report: StepReport, batch: Batch | DecodeBatch, generated: int, now: float) -> None:
        """The results of a step were handled. generated: tokens that it brought."""
        m, ledgers = self.metrics, self.scheduler.ledgers
        m.generated_tokens += generated
        if isinstance(batch, DecodeBatch):
            for part in batch.parts:
                gaps = now - part.table.told[part.slots]
                part.table.told[part.slots] = now
                if gaps.min() == gaps.max():  # as usual: all got their last token from the same step
                    m.inter_token.observe(float(gaps[0]), len(gaps))
                    continue
                for gap, times in zip(*np.unique(gaps[np.isfinite(gaps)], return_counts=True), strict=True):
                    m.inter_token.observe(float(gap), int(times))
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

    def ended(self, request: Request) -> None:
        """A request ended."""
        assert request.ended is not None
        reason = "error" if request.failure is not None else request.sequences[0].finish_reason or "error"
        if request.first_token is not None:
            self.metrics.first_token.observe(request.first_token - request.arrived)
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
