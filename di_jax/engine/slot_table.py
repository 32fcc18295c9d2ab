"""The running sequences of one rank as arrays by state slot: a decode step of hundreds of sequences is planned and
booked with a few array operations instead of a loop in Python."""

from __future__ import annotations

import numpy as np

from di_jax.engine.extra_sampling import NEUTRAL
from di_jax.engine.sequence import Sequence
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, FREE_TOKEN, Bucket, StepPlan
from di_jax.engine.verification import draft_caps, fill


class SlotTable:
    """Arrays by slot. A slot decodes while `left` is positive.

    position: of the token that the next decode step feeds. left: decode steps that may still be launched.
    output_index: of the token that the next one samples. num_blocks, block_table: pool blocks by position. numbers:
    `ExtraSampling.numbers`. origin: tokens of the prompt; capacity: those and max_tokens.

    A step that verifies drafts emits one token and up to as many more as it verified; how many is known when its
    results are in. Until then position and output_index are the least that they may be, left the most, and `ahead` is
    how much further the position may be. drafted: whether drafts for the next step are on device. context_start: from
    which position on all steps left the draft its context (dspark 1.3); from the first on where a sequence begins, as
    no more of its prompt comes from the prefix cache than leaves a window to compute. matched:
    whether the sequence has a matcher. forced_until: outputs
    before it may be forced: until then no drafts are verified, so that the host knows which output comes next.
    """

    def __init__(self, num_slots: int, max_blocks: int, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.position, self.left, self.output_index, self.num_blocks, self.seed_low, self.seed_high = np.zeros(
            (6, num_slots), np.int32
        )
        self.ahead, self.origin, self.capacity, self.forced_until, self.context_start = np.zeros(
            (5, num_slots), np.int32
        )
        self.drafted, self.matched = np.zeros((2, num_slots), bool)
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
        self.origin[slot], self.capacity[slot] = len(sequence.prompt_ids), sequence.capacity
        self.ahead[slot], self.drafted[slot], self.context_start[slot] = 0, False, 0
        self.matched[slot] = sequence.matcher is not None
        self.forced_until[slot] = len(sequence.sampling.forced_token_ids or ())
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

    def shrink(self, slot: int) -> None:
        """Gives the slot's last block up."""
        self.num_blocks[slot] -= 1

    def unneeded(self, block_size: int) -> list[int]:
        """Slots, once for each block that they have beyond the one that their next step feeds: for drafts. To be asked
        while no step is in flight."""
        slots = self.ready()
        spare = self.num_blocks[slots] - 1 - self.position[slots] // block_size
        found: list[int] = np.repeat(slots, np.maximum(spare, 0)).tolist()
        return found

    def ready(self) -> np.ndarray:
        """Slots that can decode, ascending."""
        return np.flatnonzero(self.left > 0)

    def short(self, slots: np.ndarray, block_size: int, drafts: np.ndarray | int = 0) -> list[int]:
        """Those of `slots` that may feed a position in a block that they do not have. drafts: of each, int [n]."""
        last = self.last_position(slots, drafts)
        found: list[int] = slots[last // block_size >= self.num_blocks[slots]].tolist()
        return found

    def last_position(self, slots: np.ndarray, drafts: np.ndarray | int) -> np.ndarray:
        """The furthest that a step of these slots feeds when it verifies so many drafts of each, int32 [n]."""
        last: np.ndarray = self.position[slots]
        if not self.num_drafts or not (self.ahead.any() or np.any(drafts)):
            return last  # as most are: each of these operations costs a step a microsecond or two
        return np.minimum(last + self.ahead[slots] + drafts, self.capacity[slots] - 2)

    def caps(self, slots: np.ndarray) -> np.ndarray:
        """Drafts of each slot that the next step may verify, int32 [n]."""
        if not self.drafted.any():
            return np.zeros(len(slots), np.int32)
        some = self.drafted[slots] & (self.output_index[slots] >= self.forced_until[slots])
        return np.where(some, draft_caps(self.left[slots], self.num_drafts), 0).astype(np.int32)

    def has_context(self, slots: np.ndarray, window: int, position: np.ndarray) -> np.ndarray:
        """Whether the draft has the context of the `window` positions before `position`, int [n], of each slot, or of
        all there are: bool [n]."""
        found: np.ndarray = self.context_start[slots] <= np.maximum(position - window, 0)
        return found

    def within_blocks(self, slots: np.ndarray, drafts: np.ndarray, block_size: int) -> np.ndarray:
        """`drafts` int32 [n], fewer where the slot has no block for them."""
        if not drafts.any():
            return drafts
        room = self.num_blocks[slots] * block_size - 1 - self.position[slots] - self.ahead[slots]
        return np.clip(drafts, 0, np.maximum(room, 0)).astype(np.int32)

    def advance(self, slots: np.ndarray, drafts: np.ndarray | None = None, bare: bool = False) -> None:
        """A decode step of these slots was launched. drafts: of each that it may verify, int32 [n]. bare: it left the
        draft no context; it verified nothing then, and no step before it that is in flight."""
        self.position[slots] += 1
        if bare:
            self.context_start[slots] = self.position[slots]
        self.left[slots] -= 1
        self.output_index[slots] += 1
        self.drafted[slots] = False  # a step uses them up, whether it verifies or not
        if drafts is not None:
            self.ahead[slots] += drafts

    def settle(self, slots: np.ndarray, drafts: np.ndarray, emitted: np.ndarray) -> None:
        """The results of a step are in that might verify so many drafts of each slot: so many tokens came of each."""
        self.position[slots] += emitted - 1
        self.left[slots] -= emitted - 1
        self.output_index[slots] += emitted - 1
        self.ahead[slots] -= drafts

    def plan(self, bucket: Bucket, slots: np.ndarray, drafts: np.ndarray | int = 0) -> StepPlan:
        """The decode step of these slots; tokens and lengths are those on device. To be made before `advance`.

        drafts: of each slot that it may verify, int32 [n]; it verifies as many as there are rows for.

        Its buffer is the bucket's, which the next plan overwrites: fresh memory of 270 kB (256 rows, 256 blocks) costs
        as many page faults as to take four times as long.
        """
        if bucket not in self._packed:
            buffer = np.zeros(bucket.size, np.int32)
            self._packed[bucket] = buffer, bucket.unpack(buffer)
        (buffer, view), n = self._packed[bucket], len(slots)
        buffer.fill(0)
        if bucket.drafts:
            view["cap"].fill(-1)
            view["cap"][:n] = drafts
            view["budget"][:] = fill(bucket.rows, view["cap"][:n])
            view["origin"][:n] = self.origin[slots]
            view["capacity"][:n] = self.capacity[slots]
        else:
            self._one_row_each(view, n, bucket.sequences)
            view["output_index"][:n] = self.output_index[slots]
        view["slot"][:n] = slots
        view["temperature"].view(np.float32)[:n] = self.temperature[slots]
        view["seed_low"][:n] = self.seed_low[slots]
        view["seed_high"][:n] = self.seed_high[slots]
        view["forced"][:] = FREE_TOKEN
        for slot, sequence in self._forced.items():
            view["forced"][:n][slots == slot] = sequence.forced_token(int(self.output_index[slot]))
        width = min(bucket.context_blocks, self.block_table.shape[1])
        view["block_table"][:n, :width] = self.block_table[slots, :width]
        return StepPlan(bucket, buffer, ())

    @staticmethod
    def _one_row_each(view: dict[str, np.ndarray], n: int, sequences: int) -> None:
        order = np.arange(n, dtype=np.int32)
        # Rows that nobody uses point at a sequence of no rows.
        view["tile_sequence"][n:] = min(n, sequences - 1)
        view["tile_sequence"][:n] = view["first_row"][:n] = order
        view["token"][:n] = DEVICE_TOKEN
        view["start"][:n] = DEVICE_LENGTH
        view["count"][:n] = view["sample"][:n] = 1


def idle_plan(bucket: Bucket) -> StepPlan:
    """The plan of a rank without sequences in a step that verifies drafts."""
    buffer = np.zeros(bucket.size, np.int32)
    bucket.unpack(buffer)["cap"].fill(-1)
    return StepPlan(bucket, buffer, ())
