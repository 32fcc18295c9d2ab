"""EPLB in the engine: counts what steps route, decides in a host thread, moves one layer's experts between steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from di_jax.config import EplbGroup
from di_jax.engine.interrupts import uninterrupted
from di_jax.engine.runner import ModelRunner, StepOutput
from di_jax.parallel.eplb import Rebalance, initial_slots, moe_lb, rebalance_experts
from di_jax.parallel.expert_moves import MovePlan, plan_moves
from di_jax.parallel.expert_statistics import BalanceStatistic, ExpertWindow

logger = logging.getLogger(__name__)

# Steps from the end of a window to the first move: the policy takes under 100 ms beside them, and a fixed number is the
# same in every process without asking.
STEPS_TO_DECIDE = 16

# Sums an int array over all processes; with one process the identity.
Sum = Callable[[np.ndarray], np.ndarray]


class ExpertBalancer:
    """The backbone's expert group (the draft's is another one, architecture 7.8).

    slot_experts: int32 [L, slots], the expert in every slot now. moe_lb: balance over the last full statistic, 1 when
    even; None before the first. rearrangements: decided so far.
    """

    def __init__(self, runner: ModelRunner, group: EplbGroup, num_experts: int, total: Sum) -> None:
        self.runner, self.total = runner, total
        self.ranks = runner.plan.ep
        load = runner.load_shape
        self.slot_experts = initial_slots(load[0], num_experts, load[1])
        self.window = ExpertWindow(group.value("window"), group.value("interval"), load[0], num_experts)
        self.statistic = BalanceStatistic(load[0], self.ranks)
        self.moe_lb: float | None = None
        self.rearrangements = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb")
        self._decision: Future[tuple[Rebalance, MovePlan]] | None = None
        self._countdown = 0
        self._moves: deque[tuple[int, MovePlan, np.ndarray]] = deque()

    def warm_up(self) -> None:
        """Compiles the program that moves experts, by moving none."""
        self.runner.move_experts(0, plan_moves(self.slot_experts, self.slot_experts, self.ranks), self.slot_experts)

    def after_step(self, outputs: Sequence[StepOutput], slot_experts: np.ndarray | None = None) -> None:
        """Books a step of this process's ranks, and does what is due: at most one layer moves.

        slot_experts: those of its launch, when a layer may have moved since; by default those of now.
        """
        slot_tokens = np.sum([output.load for output in outputs], axis=0)
        self.window.record(slot_tokens, self.slot_experts if slot_experts is None else slot_experts)
        self.statistic.record(slot_tokens)
        if self.statistic.full:
            self.moe_lb = moe_lb(self.total(self.statistic.take()))
        if self.window.due and self._decision is None and not self._moves:
            counts = self.total(self.window.take())
            self._decision = self._thread.submit(self._decide, counts, self.slot_experts.copy())
            self._countdown = STEPS_TO_DECIDE
        elif self._decision is not None:
            self._countdown -= 1
            if self._countdown <= 0:
                decision, self._decision = self._decision, None
                self._adopt(*decision.result())
        elif self._moves:
            self._move(*self._moves[0])
            self._moves.popleft()

    def _decide(self, counts: np.ndarray, slots: np.ndarray) -> tuple[Rebalance, MovePlan]:
        rebalance = rebalance_experts(counts, slots, self.ranks)
        return rebalance, plan_moves(slots, rebalance.slot_experts, self.ranks)

    def _adopt(self, rebalance: Rebalance, moves: MovePlan) -> None:
        self.rearrangements += 1
        changed = np.flatnonzero((rebalance.slot_experts != self.slot_experts).any(axis=1))
        logger.info(
            "eplb: busiest rank over mean %.3f -> %.3f; %d of %d layers move",
            rebalance.balance_before,
            rebalance.balance_after,
            len(changed),
            len(self.slot_experts),
        )
        self._moves.extend((int(layer), moves, rebalance.slot_experts[layer]) for layer in changed)

    def _move(self, layer: int, moves: MovePlan, slots: np.ndarray) -> None:
        after = self.slot_experts.copy()
        after[layer] = slots
        with uninterrupted():  # weights, tables and books change together or not at all
            self.runner.move_experts(layer, moves, after)
            self.slot_experts = after
