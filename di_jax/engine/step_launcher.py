"""The device programs of one step, in their order: caches restored, the model, tokens drawn, caches copied, drafts.

Programs run over the whole mesh, so all processes launch the same: what each needs of its own is told (`Launches`), and
what any needs all launch. Nothing here waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch
from di_jax.engine.cache_chores import CacheChores, Pending
from di_jax.engine.launch_thread import done, failed
from di_jax.engine.matching import Matching
from di_jax.engine.runner import ModelRunner, StepOutput
from di_jax.engine.sampling_chores import SamplingChores
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.speculation import Outlook, Rounds, Speculation
from di_jax.engine.step_output import DraftOutput, VerifiedOutput
from di_jax.engine.step_plan import Bucket


@dataclass(frozen=True)
class Launches:
    """How many programs of each kind a step needs beside its own, and what it expects of drafts.

    extra: whether a sequence asks for more than a temperature; begins: writes of slots before that; masked: whether one
    has a matcher.
    """

    restores: int = 0
    copies: int = 0
    snapshots: int = 0
    extra: int = 0
    begins: int = 0
    masked: int = 0
    outlook: Outlook = field(default_factory=Outlook)

    def numbers(self) -> list[int]:
        own = [self.restores, self.copies, self.snapshots, self.extra, self.begins, self.masked]
        return own + self.outlook.numbers()

    @classmethod
    def of_all(cls, numbers: np.ndarray) -> Launches:
        """From `numbers` of every process, int [processes, 11]: the most of any."""
        restores, copies, snapshots, extra, begins, masked = numbers[:, :6].max(axis=0).tolist()
        return cls(restores, copies, snapshots, extra, begins, masked, Outlook.of_all(numbers[:, 6:]))


@dataclass(frozen=True)
class Launched:
    """A step on its way. output, draft: or what they will be when the runner's thread has launched them. pending:
    snapshots; rounds: what it is to the books of speculation."""

    number: int
    output: StepOutput | VerifiedOutput | Future[VerifiedOutput]
    pending: Pending
    rounds: Rounds
    draft: DraftOutput | Future[DraftOutput] | None = None

    @property
    def failed(self) -> bool:
        """Whether launching it failed: its results tell how."""
        return failed(self.output) or failed(self.draft)

    def host(self) -> list[StepOutput]:
        """Waits for the results, as `StepOutput.host`."""
        output: Any = done(self.output)
        if self.draft is not None:
            output = dataclasses.replace(output, draft=done(self.draft))
        found: list[StepOutput] = output.host()
        return found


class StepLauncher:
    """Launches the steps of one engine."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        chores: CacheChores,
        sampling: SamplingChores,
        matching: Matching,
        speculation: Speculation | None,
    ) -> None:
        self.runner, self.scheduler, self.chores, self.sampling = runner, scheduler, chores, sampling
        self.matching, self.speculation = matching, speculation

    def launches(self, batch: Batch | DecodeBatch) -> Launches:
        """What this process needs. Call when the batch was scheduled."""
        restores, copies, snapshots = self.chores.launches(self.scheduler.chores)
        extra, begins = self.sampling.launches(batch)
        masked = int(self.matching.concerns(batch))
        outlook = Outlook() if self.speculation is None else self.speculation.outlook(batch)
        return Launches(restores, copies, snapshots, extra | masked, begins, masked, outlook)

    def launch(
        self, batch: Batch | DecodeBatch, bucket: Bucket, agreed: Launches, results_in: Callable[[], None]
    ) -> Launched:
        """Launches the step. agreed: of all processes. results_in: handles the results of the steps before; called
        before the tokens are drawn when a matcher has to see them first."""
        ranks, chores = self.runner.local_ranks, self.scheduler.chores
        self.chores.before(chores, agreed.restores)
        plans = batch.plans(bucket, ranks)
        forward: Any = self.runner.verify(plans) if bucket.drafts else self.runner.execute(plans)
        if isinstance(batch, DecodeBatch):
            batch.advance(bool(bucket.drafts), bucket.bare)
        number = self.scheduler.launched()
        allowed = None
        if agreed.masked:
            results_in()
            allowed = [self.matching.masks(batch, rank, bucket) for rank in ranks]
        output: Any
        if bucket.drafts:
            assert isinstance(batch, DecodeBatch)
            rows = self.sampling.numbers(batch, bucket) if agreed.extra else None
            output = self.runner.accept(forward, rows, allowed)
        else:
            output = self.sampling.after(batch, plans, forward, agreed.begins, allowed) if agreed.extra else forward
        pending = self.chores.after(chores, agreed.copies, agreed.snapshots)
        if self.speculation is None:
            return Launched(number, output, pending, {})
        drafted = self.speculation.drafts(agreed.outlook, bucket)
        rounds = self.speculation.begin(batch, drafted)
        draft = self.runner.draft(self.speculation.rows(rounds, ranks, agreed.outlook)) if drafted else None
        return Launched(number, output, pending, rounds, draft)
