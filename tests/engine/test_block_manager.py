"""The ledger of blocks and slots, and the content that blocks without a holder keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from di_jax.engine.block_manager import BlockManager


def cached_chain(blocks: BlockManager, names: str) -> list[int]:
    """Blocks with the keys a, b, ... of `names`, without a holder."""
    chain = blocks.allocate(len(names))
    for block, name in zip(chain, names):
        assert blocks.register(block, name.encode())
    blocks.release(chain)
    return chain


def known(blocks: BlockManager, names: str) -> str:
    return "".join(name for name in names if blocks.lookup([name.encode()]))


def test_what_does_not_fit_is_refused() -> None:
    blocks = BlockManager(4, 1, 128, rank=3)
    held = blocks.allocate(1)
    cached_chain(blocks, "ab")
    with pytest.raises(RuntimeError, match="rank 3: cannot allocate 4 blocks: of 4, 1 are free, 2 cached and 1 held"):
        blocks.allocate(4)
    with pytest.raises(RuntimeError, match="cannot allocate -1 blocks"):
        blocks.allocate(-1)
    assert (blocks.num_available, blocks.evictions, known(blocks, "ab")) == (3, 0, "ab")
    slot = blocks.take_slot()
    with pytest.raises(RuntimeError, match="rank 3: all 1 slots are held"):
        blocks.take_slot()
    blocks.check([(held, slot)])
    assert [blocks.blocks_of(tokens) for tokens in (0, 1, 127, 128, 129)] == [0, 1, 1, 1, 2]


def test_free_blocks_are_taken_before_cached_ones_and_these_from_the_least_recently_used_chain_s_end() -> None:
    blocks = BlockManager(6, 0, 128)
    cached_chain(blocks, "abc")
    cached_chain(blocks, "xy")
    for block in blocks.lookup([b"a"]):  # used again: now more recent than x and y
        blocks.share(block)
        blocks.release([block])
    assert known(blocks, "abcxy") == "abcxy"
    remaining = []
    for _ in range(6):
        blocks.allocate(1)
        remaining.append(known(blocks, "abcxy"))
    assert remaining == ["abcxy", "abxy", "axy", "ax", "a", ""]
    assert (blocks.evictions, blocks.num_available, blocks.num_cached_blocks) == (5, 0, 0)


def test_a_lookup_ends_at_the_first_unknown_key() -> None:
    blocks = BlockManager(4, 1, 128)
    a, b, c = cached_chain(blocks, "abc")
    assert blocks.lookup([b"a", b"b", b"c"]) == [a, b, c]
    assert blocks.lookup([b"a", b"?", b"c"]) == [a]
    assert blocks.lookup([b"?", b"a"]) == blocks.lookup([]) == []
    blocks.share(a)
    assert (blocks.num_cached_of([a, b, c]), blocks.num_held_blocks) == (2, 1)
    blocks.check([([a], blocks.take_slot())])


def test_the_second_block_with_a_key_stays_without() -> None:
    blocks = BlockManager(3, 2, 128)
    (first,), (second,) = blocks.allocate(1), blocks.allocate(1)
    assert blocks.register(first, b"a") and blocks.register(first, b"a")
    assert not blocks.register(second, b"a")
    blocks.release([second])
    assert (blocks.num_free_blocks, blocks.lookup([b"a"])) == (2, [first])
    with pytest.raises(RuntimeError, match=f"block {first} is registered under another key"):
        blocks.register(first, b"b")
    blocks.release([first])
    with pytest.raises(RuntimeError, match=f"block {first} is not held"):
        blocks.register(first, b"a")
    assert blocks.lookup([b"b"]) == []
    blocks.check([])


def test_a_block_is_cached_only_after_its_last_holder() -> None:
    blocks = BlockManager(2, 2, 128)
    (block,) = blocks.allocate(1)
    blocks.register(block, b"a")
    blocks.share(block)
    blocks.release([block])
    assert (blocks.num_held_blocks, blocks.num_cached_blocks) == (1, 0)
    blocks.release([block])
    assert (blocks.num_held_blocks, blocks.num_cached_blocks) == (0, 1)


def test_what_is_forgotten_is_not_found_and_held_blocks_stay_held() -> None:
    blocks = BlockManager(5, 1, 128)
    cached_chain(blocks, "ab")
    held, slot = blocks.allocate(2), blocks.take_slot()
    blocks.register(held[0], b"c")
    blocks.forget_cached()
    assert known(blocks, "abc") == ""
    assert (blocks.num_free_blocks, blocks.num_cached_blocks, blocks.num_held_blocks) == (3, 0, 2)
    blocks.check([(held, slot)])
    assert blocks.register(held[0], b"c") and blocks.register(held[1], b"d")
    blocks.allocate(3)
    assert blocks.evictions == 0
    blocks.reset()
    assert known(blocks, "abcd") == ""
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (5, 1)
    blocks.check([])


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda b, held, cached, free: b.release([free]), "block {free} is released more often"),
        (lambda b, held, cached, free: b.release([cached]), "block {cached} is released more often"),
        (lambda b, held, cached, free: b.release([held, held]), "block {held} is released more often"),
        (lambda b, held, cached, free: b.release([held, -1]), "block -1 is released more often"),
        (lambda b, held, cached, free: b.share(free), "block {free} is neither held nor cached"),
        (lambda b, held, cached, free: b.share(-1), "block -1 is neither held nor cached"),
        (lambda b, held, cached, free: b.register(cached, b"z"), "block {cached} is not held"),
        (lambda b, held, cached, free: b.give_slot(1), "slot 1 is not held"),
        (lambda b, held, cached, free: (b.give_slot(0), b.give_slot(0)), "slot 0 is not held"),
    ],
)
def test_misuse_is_an_error_that_changes_nothing(misuse: Callable[..., object], message: str) -> None:
    blocks = BlockManager(3, 2, 128, rank=1)
    (held,), (cached,) = blocks.allocate(1), cached_chain(blocks, "a")
    (free,) = set(range(3)) - {held, cached}
    assert blocks.take_slot() == 0
    with pytest.raises(RuntimeError, match="rank 1: " + message.format(held=held, cached=cached, free=free)):
        misuse(blocks, held, cached, free)
    assert (blocks.num_held_blocks, blocks.num_cached_blocks, blocks.num_free_blocks) == (1, 1, 1)
    blocks.release([held])
    assert (blocks.num_free_blocks, blocks.lookup([b"a"])) == (2, [cached])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b._free_blocks.pop(), "block 3 is in the ledger 0 times"),
        (lambda b: b._free_blocks.append(0), "block 0 is in the ledger 2 times"),
        (lambda b: b._free_blocks.append(9), "block 9 does not exist"),
        (lambda b: b._free_blocks.append(b._cached.popitem()[0]), "block 2 is free and has a key"),
        (lambda b: b._cached.update({b._free_blocks.pop(): None}), "block 3 is cached without a key"),
        (lambda b: b.share(0), "block 0 has 2 references and 1 holders"),
        (lambda b: b.release([1]), "block 1 has 0 references and 1 holders"),
        (lambda b: b.allocate(1), "block 3 has 1 references and 0 holders"),
        (lambda b: b._free_slots.append(0), "slot 0 is in the ledger 2 times"),
        (lambda b: b._free_slots.pop(), "slot 1 is in the ledger 0 times"),
        (lambda b: b.take_slot(), "slot 1 has 1 references and 0 holders"),
        (lambda b: b.give_slot(0), "slot 0 has 0 references and 1 holders"),
        (lambda b: b._block_of.update({b"z": 0}), "2 keys and 1 blocks with a key do not map one to one"),
        (lambda b: b._key_of.update({0: b"a"}), "1 keys and 2 blocks with a key do not map one to one"),
        (lambda b: b._block_of.update({b"a": 0}), "do not map one to one"),
    ],
)
def test_check_finds_what_is_off(damage: Callable[[BlockManager], object], message: str) -> None:
    blocks = BlockManager(4, 2, 128, rank=5)
    held, slot = blocks.allocate(2), blocks.take_slot()
    cached_chain(blocks, "a")
    blocks.check([(held, slot)])
    damage(blocks)
    with pytest.raises(RuntimeError, match=f"rank 5: .*{message}"):
        blocks.check([(held, slot)])


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        ([], "block . has 1 references and 0 holders"),
        ([([0], 0)], "block 1 has 1 references and 0 holders"),
        ([([0, 1], 0), ([1], 1)], "block 1 has 1 references and 2 holders"),
        ([([0, 1, 2], 0)], "block 2 has 0 references and 1 holders"),
        ([([0, 1, 1], 0)], "slot 0 holds a block twice"),
        ([([0, 1], 1)], "slot . has . references and . holders"),
        ([([0, 1], 0), ([], 0)], "slot 0 has 1 references and 2 holders"),
    ],
)
def test_check_finds_a_holder_that_differs(holdings: list[tuple[list[int], int]], message: str) -> None:
    blocks = BlockManager(4, 2, 128)
    assert (blocks.allocate(2), blocks.take_slot()) == ([0, 1], 0)
    with pytest.raises(RuntimeError, match=message):
        blocks.check(holdings)


@dataclass(eq=False)
class Holder:
    """A sequence of the model: its tokens, one a block, of which the first `computed` are in the caches."""

    tokens: bytes
    blocks: list[int]
    slot: int
    computed: int = field(default=0)

    def key(self, index: int) -> bytes:
        return self.tokens[: index + 1]


class Ledger(RuleBasedStateMachine):
    """Sequences over two token ids come, compute, share, grow and go, beside a model that is lists and dicts.

    `content` is what the device would hold: the key that was computed into a block, None once it is given away.
    """

    @initialize(num_blocks=st.integers(1, 12), num_slots=st.integers(1, 4))
    def start(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = BlockManager(num_blocks, num_slots, 1)
        self.content: list[bytes | None] = [None] * num_blocks
        self.live: list[Holder] = []
        self.known: dict[bytes, int] = {}
        self.recent: list[int] = []  # cached blocks, the least recently used one first
        self.evictions = 0

    def take(self, count: int) -> list[int]:
        """Allocates, and proves which blocks were taken."""
        free = self.blocks.num_free_blocks
        taken = self.blocks.allocate(count)
        evicted = self.recent[: max(0, count - free)]
        assert taken[len(taken) - len(evicted) :] == evicted
        del self.recent[: len(evicted)]
        self.evictions += len(evicted)
        for block in evicted:
            del self.known[self.content[block] or b""]
        for block in taken:
            self.content[block] = None
        return taken

    def drop(self, holder: Holder) -> None:
        self.live.remove(holder)
        self.blocks.release(holder.blocks)
        self.blocks.give_slot(holder.slot)
        for block in reversed(holder.blocks):
            if not any(block in other.blocks for other in self.live) and block in self.known.values():
                self.recent.append(block)

    @rule(length=st.integers(0, 6), end=st.text("ab", max_size=2).map(str.encode))
    def admit(self, length: int, end: bytes) -> None:
        tokens = b"abaaba"[:length] + end
        keys = [tokens[: i + 1] for i in range(len(tokens))]
        hit = self.blocks.lookup(keys)
        assert [self.content[block] for block in hit] == keys[: len(hit)]  # nothing was written over
        assert len(hit) == len(keys) or keys[len(hit)] not in self.known
        missing = len(keys) - len(hit)
        if not self.blocks.num_free_slots or missing > self.blocks.num_available - self.blocks.num_cached_of(hit):
            return
        for block in hit:
            self.blocks.share(block)
        self.recent = [block for block in self.recent if block not in hit]
        self.live.append(Holder(tokens, hit + self.take(missing), self.blocks.take_slot(), computed=len(hit)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 5), count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        holder = self.live[which % len(self.live)]
        for index in range(holder.computed, min(holder.computed + count, len(holder.blocks))):
            block, key = holder.blocks[index], holder.key(index)
            self.content[block] = key
            assert self.blocks.register(block, key) == (key not in self.known)
            self.known.setdefault(key, block)
            holder.computed = index + 1

    @precondition(lambda self: self.live and self.blocks.num_available)
    @rule(which=st.integers(0, 5), token=st.sampled_from([b"a", b"b"]))
    def grow(self, which: int, token: bytes) -> None:
        holder = self.live[which % len(self.live)]
        holder.tokens += token
        holder.blocks += self.take(1)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 5))
    def end(self, which: int) -> None:
        self.drop(self.live[which % len(self.live)])

    @precondition(lambda self: len(self.known) > 4)
    @rule(end_all=st.booleans())
    def forget(self, end_all: bool) -> None:
        if end_all:
            self.blocks.reset()
            self.live = []
        else:
            self.blocks.forget_cached()
        self.known, self.recent = {}, []

    @invariant()
    def is_exact(self) -> None:
        blocks, held = self.blocks, {block for holder in self.live for block in holder.blocks}
        blocks.check([(holder.blocks, holder.slot) for holder in self.live])
        assert (blocks.num_held_blocks, blocks.num_cached_blocks) == (len(held), len(self.recent))
        assert blocks.num_available == blocks.num_blocks - len(held)
        assert blocks.num_free_blocks == blocks.num_available - len(self.recent)
        assert blocks.num_free_slots == blocks.num_slots - len(self.live)
        with pytest.raises(RuntimeError, match="cannot allocate"):
            blocks.allocate(blocks.num_available + 1)
        assert blocks.evictions == self.evictions
        for key, block in self.known.items():
            assert (blocks.lookup([key]), self.content[block]) == ([block], key)

    def teardown(self) -> None:
        for holder in list(self.live):
            self.drop(holder)
        self.is_exact()
        assert self.take(self.blocks.num_blocks)[self.blocks.num_blocks - len(self.recent) :] == self.recent


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
