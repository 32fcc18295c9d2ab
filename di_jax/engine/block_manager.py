"""Who holds which blocks of a rank's paged caches and which state slots. Plain integers; the device is not touched."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """The ledger of one rank: every block is free, cached or held, every slot free or held, and `check` proves it.

    A held block has as many references as holders. A block whose content is complete may be registered under a key
    (`prefix_cache.BlockKeys`); without a holder it is then cached: found by `lookup` until `allocate` needs it, the
    least recently used one first. A free block has no key. Every operation is O(1) per block. Misuse is a RuntimeError
    and changes nothing.

    evictions: cached blocks that `allocate` took, since the start.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int, rank: int = 0) -> None:
        self.num_blocks, self.num_slots, self.block_size, self.rank = num_blocks, num_slots, block_size, rank
        self.evictions = 0
        self.reset()

    def reset(self) -> None:
        """Frees everything and forgets every key, for a device state that was emptied. Holders forget theirs."""
        # Stacks: the block freed last is reused first, which keeps the touched part of the pool small.
        self._free_blocks = list(range(self.num_blocks))[::-1]
        self._free_slots = list(range(self.num_slots))[::-1]
        self._held_slots: set[int] = set()
        self._references: dict[int, int] = {}  # of held blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used one first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content worth keeping."""
        return len(self._free_blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a holder whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached."""
        return len(self._free_blocks) + len(self._cached)

    @property
    def num_held_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    # -- blocks

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, to be overwritten: free ones first, then cached ones, evicted."""
        if not 0 <= count <= self.num_available:
            raise RuntimeError(
                f"rank {self.rank}: cannot allocate {count} blocks: of {self.num_blocks}, {self.num_free_blocks} are "
                f"free, {self.num_cached_blocks} cached and {self.num_held_blocks} held"
            )
        blocks = [self._free_blocks.pop() for _ in range(min(count, len(self._free_blocks)))]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self.evictions += 1
            blocks.append(block)
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, block: int) -> None:
        """One reference more to a cached or held block. Share what `lookup` found before an `allocate` can evict it."""
        if block in self._references:
            self._references[block] += 1
        elif block in self._cached:
            del self._cached[block]
            self._references[block] = 1
        else:
            raise RuntimeError(f"rank {self.rank}: block {block} is neither held nor cached and cannot be shared")

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a holder's blocks, which are in the order of their positions.

        A block without references is cached as the most recently used one if it has a key, else free. The last block
        of the list ends up as the least recently used one of them: it is of no use without those before it.
        """
        if len(set(blocks)) != len(blocks) or any(block not in self._references for block in blocks):
            wrong = next(b for b in blocks if b not in self._references or blocks.count(b) > 1)
            raise RuntimeError(f"rank {self.rank}: block {wrong} is released more often than it is held")
        for block in reversed(blocks):
            if self._references[block] > 1:
                self._references[block] -= 1
                continue
            del self._references[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free_blocks.append(block)

    def num_cached_of(self, blocks: Iterable[int]) -> int:
        """How many of these are cached: sharing them lowers `num_available` by as many."""
        return sum(block in self._cached for block in blocks)

    # -- content

    def register(self, block: int, key: bytes) -> bool:
        """The content of a held block is complete and has this key; it may not change any more.

        False, and the block stays without a key, when another block is known under it.
        """
        if block not in self._references or self._key_of.get(block, key) != key:
            state = "registered under another key" if block in self._references else "not held"
            raise RuntimeError(f"rank {self.rank}: block {block} is {state} and cannot be registered")
        if self._block_of.setdefault(key, block) != block:
            return False
        self._key_of[block] = key
        return True

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known keys from the first. Takes no reference."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget_cached(self) -> None:
        """Forgets every key: cached blocks become free, held ones stay held and become free on their last release.

        A holder may register later blocks of its chain afterwards, so after a change of the weights end them all first.
        """
        self._free_blocks.extend(reversed(self._cached))
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    # -- slots

    def take_slot(self) -> int:
        if not self._free_slots:
            raise RuntimeError(f"rank {self.rank}: all {self.num_slots} slots are held")
        slot = self._free_slots.pop()
        self._held_slots.add(slot)
        return slot

    def give_slot(self, slot: int) -> None:
        """Takes a slot back."""
        if slot not in self._held_slots:
            raise RuntimeError(f"rank {self.rank}: slot {slot} is not held and cannot be given back")
        self._held_slots.remove(slot)
        self._free_slots.append(slot)

    # -- proof

    def check(self, holdings: Iterable[tuple[Sequence[int], int]]) -> None:
        """Raises RuntimeError, saying what is off, unless the ledger is exact. O(blocks + slots).

        holdings: (blocks, slot) of every holder on this rank. Free, cached and held blocks are all blocks, once each;
        free and held slots all slots; references are the number of holders; keys and blocks map one to one, cached
        blocks have a key and free ones none.
        """
        holdings = list(holdings)
        held = [block for blocks, _ in holdings for block in set(blocks)]
        slots = [slot for _, slot in holdings]
        problem = (
            _not_whole("block", self.num_blocks, self._free_blocks, self._cached, self._references)
            or _not_whole("slot", self.num_slots, self._free_slots, self._held_slots)
            or next(
                (f"slot {slot} holds a block twice" for blocks, slot in holdings if len(set(blocks)) < len(blocks)), ""
            )
            or _held_otherwise("block", self._references, held)
            or _held_otherwise("slot", dict.fromkeys(self._held_slots, 1), slots)
            or self._keys_off()
        )
        if problem:
            raise RuntimeError(f"rank {self.rank}: {problem}")

    def _keys_off(self) -> str:
        """What is wrong unless keys and blocks map one to one, cached blocks have a key and free ones none."""
        blocks = {key: block for block, key in self._key_of.items()}
        if self._block_of != blocks or len(blocks) != len(self._key_of):
            return f"{len(self._block_of)} keys and {len(self._key_of)} blocks with a key do not map one to one"
        if nameless := self._cached.keys() - self._key_of.keys():
            return f"block {min(nameless)} is cached without a key"
        if named := self._key_of.keys() & set(self._free_blocks):
            return f"block {min(named)} is free and has a key"
        return ""


def _not_whole(what: str, count: int, *parts: Iterable[int]) -> str:
    """What is wrong unless the parts together are 0 .. count - 1, once each."""
    seen = Counter(one for part in parts for one in part)
    for one in range(count):
        if seen[one] != 1:
            return f"{what} {one} is in the ledger {seen[one]} times"
    return "" if len(seen) == count else f"{what} {max(seen.keys() - set(range(count)))} does not exist"


def _held_otherwise(what: str, references: dict[int, int], held: Iterable[int]) -> str:
    """What is wrong unless each has as many holders as there are references."""
    holders = Counter(held)
    for one in references.keys() | holders.keys():
        if references.get(one, 0) != holders[one]:
            return f"{what} {one} has {references.get(one, 0)} references and {holders[one]} holders"
    return ""
