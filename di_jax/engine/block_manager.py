"""Who holds which blocks of a rank's paged caches and which state slot. Plain integers; the device is not touched."""

from __future__ import annotations

from collections.abc import Iterable

from di_jax.engine.sequence import Holding, Sequence


class BlockManager:
    """The ledger of one rank's blocks and slots: every one is free or held by one sequence, and `check` proves it.

    A sequence gets at admission all it may ever need, so a running one never waits for a block and none is preempted.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int, rank: int = 0) -> None:
        self.num_blocks, self.num_slots, self.block_size, self.rank = num_blocks, num_slots, block_size, rank
        # Stacks: the block freed last is reused first, which keeps the touched part of the pool small.
        self._free_blocks = list(range(num_blocks))[::-1]
        self._free_slots = list(range(num_slots))[::-1]
        self._holders: dict[int, Sequence] = {}  # by slot

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def held_by(self, sequence: Sequence) -> Holding | None:
        """What the sequence holds on this rank."""
        return next((holding for holding in sequence.held if holding.rank == self.rank), None)

    def can_allocate(self, sequence: Sequence) -> bool:
        return bool(self._free_slots) and self.blocks_of(sequence.capacity) <= len(self._free_blocks)

    def allocate(self, sequence: Sequence) -> None:
        """Gives the sequence a slot and blocks for prompt and answer here. Raises RuntimeError when it must not."""
        if self.held_by(sequence) or not self.can_allocate(sequence):
            raise RuntimeError(
                f"request {sequence.request_id}: cannot reserve {self.blocks_of(sequence.capacity)} blocks and a slot "
                f"of rank {self.rank}; it holds {self.held_by(sequence)}, free are {self.num_free_blocks} and "
                f"{self.num_free_slots}"
            )
        blocks = tuple(self._free_blocks.pop() for _ in range(self.blocks_of(sequence.capacity)))
        holding = Holding(self.rank, blocks, self._free_slots.pop())
        sequence.held.append(holding)
        self._holders[holding.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        """Takes back what the sequence holds here, if anything."""
        holding = self.held_by(sequence)
        if holding is None:
            return
        if self._holders.pop(holding.slot, None) is not sequence:
            raise RuntimeError(f"request {sequence.request_id}: slot {holding.slot} is held by another sequence")
        self._free_blocks.extend(reversed(holding.blocks))
        self._free_slots.append(holding.slot)
        sequence.held.remove(holding)

    def check(self) -> None:
        """Raises RuntimeError unless free and held together are every block and every slot, once each."""
        holdings = {slot: (self.held_by(sequence), sequence) for slot, sequence in self._holders.items()}
        held = [block for holding, _ in holdings.values() if holding for block in holding.blocks]
        _check_whole("block", self.num_blocks, self._free_blocks, held)
        _check_whole("slot", self.num_slots, self._free_slots, self._holders)
        for slot, (holding, sequence) in holdings.items():
            if not holding or holding.slot != slot or len(holding.blocks) != self.blocks_of(sequence.capacity):
                raise RuntimeError(f"request {sequence.request_id}: its blocks or slot changed since admission")


def _check_whole(what: str, count: int, free: Iterable[int], held: Iterable[int]) -> None:
    free, held = list(free), list(held)
    if sorted(free + held) != list(range(count)):
        raise RuntimeError(
            f"{what}s: {len(free)} free and {len(held)} held are not the {count} that there are, once each"
        )
