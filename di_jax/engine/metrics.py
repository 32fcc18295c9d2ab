"""What the engine did: one report a step, and a status line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from di_jax.engine.scheduler import PREFILL
from di_jax.engine.sequence import Request
from di_jax.engine.step_plan import Bucket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One executed step. num_sequences, num_tokens: fed, in all processes; seconds: from planning to the last token
    handled on the host.

    requests: those that got a token, or ended, in this step. moe_lb: rows of the busiest expert rank over those of the
    mean one, in the last 128 steps counted; None without EPLB.
    """

    kind: str  # scheduler.PREFILL or DECODE
    bucket: Bucket
    num_sequences: int
    num_tokens: int
    seconds: float
    requests: list[Request]
    moe_lb: float | None = None


class StatusLine:
    """Logs tokens/s since the last line, at most every `interval` seconds; 0 is never."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.interval, self._clock = interval, clock
        self._since = clock()
        self._prefilled = self._decoded = 0

    def observe(self, report: StepReport, running: int, waiting: int, free_blocks: int, num_blocks: int) -> None:
        """Counts a step; the other arguments are the state after it."""
        if report.kind == PREFILL:
            self._prefilled += report.num_tokens
        else:
            self._decoded += report.num_tokens
        now = self._clock()
        if not self.interval or now - self._since < self.interval:
            return
        seconds = now - self._since
        logger.info(
            "prefill %.0f tok/s, decode %.0f tok/s, %d running, %d waiting, %d of %d blocks free%s",
            self._prefilled / seconds,
            self._decoded / seconds,
            running,
            waiting,
            free_blocks,
            num_blocks,
            "" if report.moe_lb is None else f", moe_lb {report.moe_lb:.3f}",
        )
        self.restart()

    def restart(self) -> None:
        """Starts counting anew, such as after an idle time."""
        self._since, self._prefilled, self._decoded = self._clock(), 0, 0
