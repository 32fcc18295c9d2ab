"""The ledger of blocks and slots."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.sequence import Sequence
from di_jax.sampling_params import SamplingParams


def sequence(prompt: int, answer: int, name: str = "a") -> Sequence:
    return Sequence(name, 0, [0] * prompt, SamplingParams(), 0, max_tokens=answer)


def test_a_sequence_gets_all_it_may_ever_need() -> None:
    blocks = BlockManager(10, 2, 128)
    one, two = sequence(100, 28), sequence(100, 29)
    blocks.allocate(one)
    blocks.allocate(two)
    (first,), (second,) = one.held, two.held
    assert (len(first.blocks), len(second.blocks)) == (1, 2)
    assert not set(first.blocks) & set(second.blocks) and first.slot != second.slot
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (7, 0)
    blocks.check()
    blocks.free(one)
    assert one.held == []
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (8, 1)
    blocks.free(one)  # nothing held, nothing to do
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (8, 1)
    blocks.check()


def test_what_does_not_fit_is_refused() -> None:
    blocks = BlockManager(2, 1, 128)
    assert not blocks.can_allocate(sequence(256, 1))
    with pytest.raises(RuntimeError, match="request big: cannot reserve 3 blocks"):
        blocks.allocate(sequence(256, 1, "big"))
    held = sequence(1, 1)
    blocks.allocate(held)
    assert not blocks.can_allocate(sequence(1, 1))  # no slot
    with pytest.raises(RuntimeError, match="it holds Holding"):
        blocks.allocate(held)
    blocks.check()


@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5)), max_size=40))
def test_the_ledger_is_exact_whatever_happens(num_blocks: int, slots: int, events: list[tuple[int, int]]) -> None:
    blocks = BlockManager(num_blocks, slots, 128)
    held: list[Sequence] = []
    for size, victim in events:
        if victim and held:
            blocks.free(held.pop(victim % len(held)))
        else:
            new = sequence(size, 1)
            if blocks.can_allocate(new):
                blocks.allocate(new)
                held.append(new)
            else:
                assert not blocks.num_free_slots or blocks.num_free_blocks < -(-(size + 1) // 128)
        blocks.check()
        assert blocks.num_free_blocks + sum(len(s.held[0].blocks) for s in held) == num_blocks
        assert blocks.num_free_slots + len(held) == slots
    for one in held:
        blocks.free(one)
    blocks.check()
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (num_blocks, slots)


def test_check_finds_a_leak_a_double_and_a_changed_holder() -> None:
    def fresh() -> tuple[BlockManager, Sequence]:
        blocks, one = BlockManager(4, 2, 128), sequence(200, 1)
        blocks.allocate(one)
        blocks.check()
        return blocks, one

    def change(one: Sequence, **changes: object) -> None:
        one.held[0] = dataclasses.replace(one.held[0], **changes)

    blocks, one = fresh()
    change(one, blocks=one.held[0].blocks[:-1])
    with pytest.raises(RuntimeError, match="blocks: 2 free and 1 held are not the 4"):
        blocks.check()
    blocks, one = fresh()
    change(one, blocks=(blocks._free_blocks[0], one.held[0].blocks[1]))
    with pytest.raises(RuntimeError, match="once each"):
        blocks.check()
    blocks, one = fresh()
    change(one, slot=1 - one.held[0].slot)
    with pytest.raises(RuntimeError, match="changed since admission"):
        blocks.check()
    with pytest.raises(RuntimeError, match="held by another sequence"):
        blocks.free(one)


def test_a_sequence_holds_on_several_ranks() -> None:
    ledgers = [BlockManager(4, 2, 128, rank) for rank in range(3)]
    one = sequence(200, 1)
    for ledger in ledgers:
        ledger.allocate(one)
    assert [holding.rank for holding in one.held] == [0, 1, 2]
    ledgers[1].free(one)
    assert [holding.rank for holding in one.held] == [0, 2]
    assert [ledger.num_free_blocks for ledger in ledgers] == [2, 4, 2]
    for ledger in ledgers:
        ledger.check()
