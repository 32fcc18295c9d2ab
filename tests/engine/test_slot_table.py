"""Decode steps planned from arrays by slot are those that would be built chunk by chunk."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.sequence import Sequence
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, Bucket, Chunk, build_plan
from di_jax.sampling_params import SamplingParams

SLOTS, WIDTH, BLOCK = 6, 5, 16


@dataclasses.dataclass
class Entry:
    """What a slot should hold."""

    sequence: Sequence
    position: int
    output_index: int
    blocks: list[int]


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    position = draw(st.integers(1, WIDTH * BLOCK - 1))
    index = draw(st.integers(1, 5))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.3])),
        forced_token_ids=draw(st.sampled_from([None, (4, -1, 9, 8)])),
    )
    sequence = Sequence(
        "a", 0, [5] * position, sampling, draw(st.integers(0, 2**64 - 1)), max_tokens=index + draw(st.integers(0, 9))
    )
    count = -(-position // BLOCK)
    return Entry(sequence, position, index, draw(st.lists(st.integers(0, 90), min_size=count, max_size=count)))


@given(data=st.data())
def test_plans_follow_from_what_the_slots_hold(data: st.DataObject) -> None:
    table, held = SlotTable(SLOTS, WIDTH), dict[int, Entry]()
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        if slot in held:
            table.end(slot)
            del held[slot]
        else:
            held[slot] = entry = data.draw(entries())
            table.begin(slot, entry.sequence, entry.position, entry.output_index, entry.blocks)
        ready = [s for s in sorted(held) if held[s].output_index < held[s].sequence.max_tokens]
        assert table.ready().tolist() == ready
        short = [s for s in ready if held[s].position // BLOCK >= len(held[s].blocks)]
        assert table.short(table.ready(), BLOCK) == short
        for s in short:
            held[s].blocks.append(data.draw(st.integers(0, 90)))
            table.grow(s, held[s].blocks[-1])
        assert table.short(table.ready(), BLOCK) == []
        check_plan(table, held, ready)
        table.advance(np.array(ready, np.int64))
        for s in ready:
            held[s].position += 1
            held[s].output_index += 1
        for s in [s for s in ready if held[s].position == WIDTH * BLOCK]:
            table.end(s)
            del held[s]


def check_plan(table: SlotTable, held: dict[int, Entry], ready: list[int]) -> None:
    bucket = Bucket(True, 8, WIDTH)
    plan = table.plan(bucket, np.array(ready, np.int64))
    assert plan.chunks == () and plan.bucket == bucket
    chunks = [
        Chunk(
            [DEVICE_TOKEN],
            DEVICE_LENGTH,
            slot,
            entry.blocks,
            temperature=entry.sequence.sampling.temperature,
            seed=entry.sequence.seed,
            output_index=entry.output_index,
            forced=entry.sequence.forced_token(entry.output_index),
        )
        for slot in ready
        for entry in [held[slot]]
    ]
    want, found = (bucket.unpack(one.buffer) for one in (build_plan(bucket, chunks), plan))
    for place, slot in enumerate(ready):  # columns behind a sequence's blocks are never read
        found["block_table"][place, len(held[slot].blocks) :] = 0
    for name in want:
        assert np.array_equal(want[name], found[name]), name


def test_a_plan_holds_no_more_context_than_its_bucket() -> None:
    table = SlotTable(2, WIDTH)
    table.begin(1, Sequence("a", 0, [1] * 20, SamplingParams(), 7, max_tokens=4), 20, 1, [8, 9])
    found = table.plan(Bucket(True, 1, 1), np.array([1]))
    assert found.bucket.unpack(found.buffer)["block_table"].tolist() == [[8]]
    wide = table.plan(Bucket(True, 2, WIDTH + 3), np.array([1]))
    assert wide.bucket.unpack(wide.buffer)["block_table"][0, :2].tolist() == [8, 9]


def test_a_slot_forgets_what_was_forced() -> None:
    table, bucket = SlotTable(1, WIDTH), Bucket(True, 1, WIDTH)
    forced = Sequence("a", 0, [1], SamplingParams(forced_token_ids=(3, 4, 5)), 7, max_tokens=9)
    table.begin(0, forced, 1, 1, [0])
    view = bucket.unpack(table.plan(bucket, np.array([0])).buffer)
    assert view["forced"].tolist() == [4]
    table.end(0)
    table.begin(0, Sequence("b", 0, [1], SamplingParams(), 7, max_tokens=9), 1, 1, [0])
    view = bucket.unpack(table.plan(bucket, np.array([0])).buffer)
    assert view["forced"].tolist() == [-1]
    assert np.isnan(table.told[0])
