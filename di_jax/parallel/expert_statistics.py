"""What rearranging experts is decided on: the window of tokens per expert, and the balance statistic (engine.md 7.3).

Plain NumPy on the host, for one expert group. Each executed step brings its tokens per physical slot; with several
processes each records the slots of its own ranks, and the counts of the same step are summed, and the loads of the
ranks put side by side, when they are taken: all processes record every step, so all are due at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from di_jax.parallel.eplb import MAX_INTERVALS, pooled_interval

BALANCE_STEPS = 128


class ExpertWindow:
    """Tokens per expert over the last `window` of every `interval` steps; interval 0 records nothing.

    The first rearrangement comes after a quarter of the interval; when that is shorter than the window, on what there
    is. Steps are pooled as they come into at most 16 intervals, so 40 layers of 384 experts take 2 MB whatever the
    window.
    """

    def __init__(self, window: int, interval: int, num_layers: int, num_experts: int) -> None:
        if interval and not 0 < window <= interval:
            raise ValueError(
                f"a window of {window} steps does not fit an interval of {interval}: 0 < window <= interval"
            )
        self.window, self.interval = window, interval
        self._num_pooled = min(window, MAX_INTERVALS)
        self._counts = np.zeros((self._num_pooled, num_layers, num_experts), np.int64)
        self._recorded = np.zeros(self._num_pooled, bool)
        self._step = interval - max(1, interval // 4) if interval else 0

    @property
    def due(self) -> bool:
        """Whether the window is complete, and waits for `take`."""
        return 0 < self.interval == self._step

    def record(self, slot_tokens: NDArray, slot_experts: NDArray[np.int32]) -> None:
        """Counts a step: tokens of every slot [L, slots], and the expert that the slot held, int32 [L, slots]. Steps
        between the window's end and `take` count towards neither window."""
        if not self.interval or self.due:
            return
        self._step += 1
        step_of_window = self._step - 1 - (self.interval - self.window)
        if step_of_window < 0:
            return
        pooled = int(pooled_interval(step_of_window, self.window))
        self._counts[pooled] += expert_tokens(slot_tokens, slot_experts, self._counts.shape[2])
        self._recorded[pooled] = True

    def take(self) -> NDArray[np.int64]:
        """The window's counts, int64 [at most 16, L, E] in order of time, for `rebalance_experts`; the next interval
        begins. Raises RuntimeError when none is due."""
        if not self.due:
            raise RuntimeError(f"the window is due after {self.interval} steps, of which {self._step} have passed")
        counts = self._counts[self._recorded]
        self._counts[:] = 0
        self._recorded[:] = False
        self._step = 0
        return counts


class BalanceStatistic:
    """Tokens of every rank over the last 128 steps, the base of `moe_lb` in the metrics."""

    def __init__(self, num_layers: int, num_ranks: int, num_steps: int = BALANCE_STEPS) -> None:
        self._loads = np.zeros((num_steps, num_layers, num_ranks), np.int64)
        self._recorded = 0

    @property
    def full(self) -> bool:
        """Whether as many steps were recorded as the statistic is made of."""
        return self._recorded >= len(self._loads)

    def record(self, slot_tokens: NDArray) -> None:
        """Counts a step: tokens of every slot of these ranks, [L, slots]. When full, the oldest step makes room."""
        num_layers, num_ranks = self._loads.shape[1:]
        self._loads[self._recorded % len(self._loads)] = slot_tokens.reshape(num_layers, num_ranks, -1).sum(axis=2)
        self._recorded += 1

    def take(self) -> NDArray[np.int64]:
        """Loads int64 [steps, L, R] of what was recorded, for `moe_lb`, in an order of steps that all processes share;
        the statistic begins anew."""
        loads = self._loads[: self._recorded].copy()
        self._recorded = 0
        return loads


def expert_tokens(slot_tokens: NDArray, slot_experts: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """Tokens of every expert, int64 [L, E], from those of its slots, [L, slots]: exact below 2^53."""
    num_layers = len(slot_experts)
    flat = slot_experts + np.arange(num_layers)[:, None] * num_experts
    tokens = np.bincount(flat.reshape(-1), slot_tokens.reshape(-1), num_layers * num_experts)
    return tokens.reshape(num_layers, num_experts).astype(np.int64)
