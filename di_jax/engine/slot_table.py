"""The running sequences of one rank as arrays by state slot: a decode step of hundreds of sequences is planned and
booked with a few array operations instead of a loop in Python."""

from __future__ import annotations

import numpy as np

from di_jax.engine.extra_sampling import NEUTRAL
from di_jax.engine.sequence import Sequence
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, FREE_TOKEN, Bucket, StepPlan


class SlotTable:
    """Arrays by slot. A slot decodes while `left` is positive.

    position: of the token that the next decode step feeds. left: decode steps that may still be launched.
    output_index: of the token that the next one samples. num_blocks, block_table: pool blocks by position. numbers:
    `ExtraSampling.numbers`.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.position, self.left, self.output_index, self.num_blocks, self.seed_low, self.seed_high = np.zeros(
            (6, num_slots), np.int32
        )
        self.temperature = np.zeros(num_slots, np.float32)
        self.numbers = np.tile(NEUTRAL, (num_slots, 1))
        self.told = np.full(num_slots, np.nan)  # when its last token came, seconds
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self._forced: dict[int, Sequence] = {}
        self._packed: dict[Bucket, tuple[np.ndarray, dict[str, np.ndarray]]] = {}

    def begin(self, slot: int, sequence: Sequence, position: int, output_index: int, blocks: list[int]) -> None:
        """From now on the slot's sequence decodes; output `output_index` is what its next decode step samples."""
        self.sequences[slot] = sequence
        self.position[slot], self.output_index[slot] = position, output_index
        self.left[slot] = sequence.max_tokens - output_index
        self.told[slot] = np.nan
        self.temperature[slot] = sequence.sampling.temperature
        self.numbers[slot] = NEUTRAL if sequence.extra is None else sequence.extra.numbers
        words = np.array([sequence.seed & 0xFFFFFFFF, sequence.seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
        self.seed_low[slot], self.seed_high[slot] = words
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        if sequence.sampling.forced_token_ids:
            self._forced[slot] = sequence

    def end(self, slot: int) -> None:
        """The slot decodes no more."""
        self.sequences[slot] = None
        self.left[slot] = 0
        self._forced.pop(slot, None)

    def grow(self, slot: int, block: int) -> None:
        self.block_table[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def ready(self) -> np.ndarray:
        """Slots that can decode, ascending."""
        return np.flatnonzero(self.left > 0)

    def short(self, slots: np.ndarray, block_size: int) -> list[int]:
        """Those of `slots` whose next position lies in a block that they do not have."""
        found: list[int] = slots[self.position[slots] // block_size >= self.num_blocks[slots]].tolist()
        return found

    def advance(self, slots: np.ndarray) -> None:
        """A decode step of these slots was launched."""
        self.position[slots] += 1
        self.left[slots] -= 1
        self.output_index[slots] += 1

    def plan(self, bucket: Bucket, slots: np.ndarray) -> StepPlan:
        """The decode step of these slots; tokens and lengths are those on device. To be made before `advance`.

        Its buffer is the bucket's, which the next plan overwrites: fresh memory of 270 kB (256 rows, 256 blocks) costs
        as many page faults as to take four times as long.
        """
        if bucket not in self._packed:
            buffer = np.zeros(bucket.size, np.int32)
            self._packed[bucket] = buffer, bucket.unpack(buffer)
        (buffer, view), n = self._packed[bucket], len(slots)
        buffer.fill(0)
        order = np.arange(n, dtype=np.int32)
        # Rows that nobody uses point at a sequence of no rows.
        view["tile_sequence"][n:] = min(n, bucket.sequences - 1)
        view["tile_sequence"][:n] = view["first_row"][:n] = order
        view["token"][:n] = DEVICE_TOKEN
        view["start"][:n] = DEVICE_LENGTH
        view["count"][:n] = view["sample"][:n] = 1
        view["slot"][:n] = slots
        view["temperature"].view(np.float32)[:n] = self.temperature[slots]
        view["seed_low"][:n] = self.seed_low[slots]
        view["seed_high"][:n] = self.seed_high[slots]
        view["output_index"][:n] = self.output_index[slots]
        view["forced"][:] = FREE_TOKEN
        for slot, sequence in self._forced.items():
            view["forced"][:n][slots == slot] = sequence.forced_token(int(self.output_index[slot]))
        width = min(bucket.context_blocks, self.block_table.shape[1])
        view["block_table"][:n, :width] = self.block_table[slots, :width]
        return StepPlan(bucket, buffer, ())
