"""Decode steps planned from arrays by slot are those that would be built chunk by chunk."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.sequence import Sequence
from di_jax.engine.slot_table import SlotTable, idle_plan
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, FREE_TOKEN, Bucket, Chunk, build_plan
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


# ---- with drafts ----

DRAFTS = 3


def answering(prompt: int, answer: int, **sampling: object) -> Sequence:
    return Sequence("a", 0, [5] * prompt, SamplingParams(**sampling), 9, max_tokens=answer)  # type: ignore[arg-type]


@dataclasses.dataclass
class Truth:
    """Where a sequence is on device. position: of its newest token."""

    sequence: Sequence
    position: int

    @property
    def output_index(self) -> int:
        return self.position + 1 - len(self.sequence.prompt_ids)

    @property
    def room(self) -> int:
        """Tokens to come."""
        return self.sequence.max_tokens - self.output_index


@given(data=st.data())
def test_bounds_hold_whatever_is_accepted(data: st.DataObject) -> None:
    """Up to two steps in flight, of which nobody knows what they emit until they are settled."""
    table = SlotTable(SLOTS, 9, DRAFTS)
    truth: dict[int, Truth] = {}
    flying: list[tuple[np.ndarray, np.ndarray, dict[int, int]]] = []
    for _ in range(data.draw(st.integers(1, 20))):
        for slot in set(range(SLOTS)) - truth.keys():
            if not any(slot in slots for slots, _, _ in flying) and data.draw(st.booleans()):
                one = answering(data.draw(st.integers(1, 40)), data.draw(st.integers(2, 20)))
                truth[slot] = Truth(one, len(one.prompt_ids))
                table.begin(slot, one, len(one.prompt_ids), 1, [1])
                assert not table.caps(np.array([slot]))[0], "it has no drafts yet"
        ready = table.ready()
        full = [slot for slot, one in truth.items() if not one.room]
        assert {slot for slot, one in truth.items() if one.room} <= set(ready.tolist()), "tokens are left to be had"
        caps = table.caps(ready)
        assert ((caps >= 0) & (caps <= DRAFTS)).all()
        if not flying:
            assert not set(full) & set(ready.tolist()) and not table.ahead[ready].any()
            assert caps.tolist() == [min(DRAFTS, truth[s].room - 1) if table.drafted[s] else 0 for s in ready.tolist()]
        for slot in ready.tolist():
            one, low = truth[slot], int(table.position[slot])
            assert low <= one.position <= low + table.ahead[slot]
            assert table.output_index[slot] <= one.output_index and table.left[slot] >= one.room
            assert one.position - low == one.output_index - table.output_index[slot] == table.left[slot] - one.room
        last = table.last_position(ready, caps)
        emitted: dict[int, int] = {}
        for at, slot in enumerate(ready.tolist()):
            one = truth[slot]
            cap = min(int(caps[at]), one.room - 1)
            if one.room:
                assert one.position + cap <= last[at] <= len(one.sequence.prompt_ids) + one.sequence.max_tokens - 2
            emitted[slot] = data.draw(st.integers(1, cap + 1)) if one.room else 0
            one.position += emitted[slot]
        table.advance(ready, caps)
        assert not table.caps(ready).any(), "drafts are verified once"
        if data.draw(st.booleans()):
            table.drafted[ready] = True
        flying.append((ready, caps, emitted))
        while len(flying) > data.draw(st.integers(0, 1)):
            slots, verified, came = flying.pop(0)
            # Ended: by a token, or because the answer is full.
            over = {s for s in slots.tolist() if s in truth and (not came[s] or data.draw(st.integers(0, 9)) == 9)}
            done = {
                s
                for s in slots.tolist()
                if s in truth
                and not truth[s].room
                and not any(s in other for other, _, later in flying if later.get(s))
            }
            for slot in over | done:
                table.end(slot)
                del truth[slot]
            on = np.array([slot in truth for slot in slots.tolist()], bool)
            table.settle(slots[on], verified[on], np.array([came[s] for s in slots[on].tolist()], np.int32))


def test_what_a_step_of_three_tokens_leaves() -> None:
    table = SlotTable(1, 9, DRAFTS)
    table.begin(0, answering(20, 9), 20, 1, [1, 2])
    table.drafted[0] = True
    slots, caps = table.ready(), table.caps(table.ready())
    table.advance(slots, caps)
    assert (table.position[0], table.ahead[0], table.left[0], table.output_index[0]) == (21, 3, 7, 2)
    table.settle(slots, caps, np.array([3]))
    assert (table.position[0], table.ahead[0], table.left[0], table.output_index[0]) == (23, 0, 5, 4)


def test_drafts_that_may_be_verified() -> None:
    table = SlotTable(4, 9, DRAFTS)
    for slot, answer in enumerate((2, 4, 9)):
        table.begin(slot, answering(20, answer), 20, 1, [1, 2])
    table.begin(3, answering(20, 9, forced_token_ids=(4, -1, 4)), 20, 1, [1, 2])
    assert table.caps(table.ready()).tolist() == [0, 0, 0, 0], "nothing was drafted"
    table.drafted[:] = True
    assert table.caps(table.ready()).tolist() == [0, 2, 3, 0], "the last token needs none, forced ones are not checked"
    table.output_index[3] = 2
    assert table.caps(np.array([3])).tolist() == [0]
    table.output_index[3] = 3
    assert table.caps(np.array([3])).tolist() == [3], "behind what is forced"
    table.output_index[3] = 1
    table.begin(3, answering(20, 9), 20, 1, [1, 2])
    table.drafted[3] = True
    assert table.caps(np.array([3])).tolist() == [3], "the slot's next owner is forced to nothing"


@pytest.mark.parametrize(("position", "ahead", "want"), [(20, 0, 3), (29, 0, 2), (28, 3, 0), (30, 5, 0), (20, 3, 3)])
def test_drafts_within_blocks(position: int, ahead: int, want: int) -> None:
    table = SlotTable(2, 9, DRAFTS)
    table.begin(1, answering(20, 99), position, 1, [1, 2])
    table.ahead[1] = ahead
    slots = np.array([1])
    drafts = table.within_blocks(slots, np.array([DRAFTS], np.int32), BLOCK)
    assert drafts.tolist() == [want]
    if position + ahead < 2 * BLOCK:
        assert table.short(slots, BLOCK, drafts) == []
    assert table.short(slots, BLOCK, drafts + 1) == ([1] if want < DRAFTS else [])


def test_a_plan_with_drafts() -> None:
    table = SlotTable(4, WIDTH, DRAFTS)
    for slot, answer in ((1, 9), (3, 4)):
        table.begin(slot, answering(20, answer, temperature=0.5), 20, 1, [slot, 8])
    table.drafted[:] = True
    bucket = Bucket(True, 6, WIDTH + 1, drafts=DRAFTS, requests=3)
    slots = table.ready()
    view = bucket.unpack(table.plan(bucket, slots, np.array([3, 2])).buffer)
    assert view["cap"].tolist() == [3, 2, -1] and view["budget"].tolist() == [4]
    assert view["slot"][:2].tolist() == [1, 3]
    assert view["origin"][:2].tolist() == [20, 20] and view["capacity"][:2].tolist() == [29, 24]
    assert view["temperature"].view(np.float32)[:2].tolist() == [0.5, 0.5]
    assert view["forced"].tolist() == [FREE_TOKEN] * 3
    assert view["block_table"][:2, :2].tolist() == [[1, 8], [3, 8]]
    view = bucket.unpack(table.plan(bucket, slots, np.array([1, 0])).buffer)
    assert view["budget"].tolist() == [1], "no more than there are"
    view = bucket.unpack(table.plan(bucket, slots[:1], np.array([3])).buffer)
    assert view["cap"].tolist() == [3, -1, -1], "nothing is left of the plan before"
    idle = bucket.unpack(idle_plan(bucket).buffer)
    assert idle["cap"].tolist() == [-1] * 3 and idle["budget"].tolist() == [0]


def test_a_window_has_its_context_when_it_is_filled_again() -> None:
    table, window = SlotTable(4, 4, 3), 8
    for slot in (0, 2):
        table.begin(slot, answering(20, 99), 20, 1, [1, 2])
    slots = np.array([0, 2])

    def whole() -> list[bool]:
        return table.has_context(slots, window, table.position[slots]).tolist()

    assert whole() == [True, True]
    table.advance(slots[:1], bare=True)
    table.advance(slots[1:])
    assert whole() == [False, True]
    for _ in range(window - 1):
        table.advance(slots[:1])
        assert whole() == [False, True]
    table.advance(slots[:1])
    assert whole() == [True, True]
    table.advance(slots, bare=True)
    table.begin(0, answering(4, 99), 4, 1, [1])
    assert whole() == [True, False], "another sequence, of fewer tokens than a window"
