"""Buckets, ladders and the packed buffer of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.step_plan import DEVICE_TOKEN, FREE_TOKEN, Bucket, BucketLadder, Chunk, build_plan

LADDER = BucketLadder((64, 256), (1, 4, 16), (2, 8))


def test_ladders_grow_by_four_and_end_at_the_limit() -> None:
    ladder = BucketLadder.derive(max_num_batched_tokens=2048, max_num_seqs=20, max_context_blocks=100)
    assert ladder == BucketLadder((64, 256, 1024, 2048), (1, 4, 16, 20), (16, 64, 100))
    small = BucketLadder.derive(max_num_batched_tokens=48, max_num_seqs=1, max_context_blocks=3)
    assert small == BucketLadder((48,), (1,), (3,))
    given_ones = BucketLadder.derive(
        max_num_batched_tokens=64, max_num_seqs=4, max_context_blocks=3, prefill=[64], decode=[2, 4], context=[1, 3]
    )
    assert given_ones == BucketLadder((64,), (2, 4), (1, 3))
    assert len(given_ones.buckets()) == 6 and len(set(given_ones.buckets())) == 6


@pytest.mark.parametrize(
    ("rows", "tile", "sequences"), [(16, 16, 1), (64, 16, 4), (256, 16, 16), (1024, 64, 16), (4096, 128, 32)]
)
def test_prefill_tiles(rows: int, tile: int, sequences: int) -> None:
    bucket = Bucket(False, rows, 1)
    assert (bucket.tile, bucket.sequences) == (tile, sequences)
    assert (Bucket(True, rows, 1).tile, Bucket(True, rows, 1).sequences) == (1, rows)


def test_fit_takes_the_smallest_bucket() -> None:
    assert LADDER.fit(True, [1, 1], 1) == Bucket(True, 4, 2)
    assert LADDER.fit(True, [1], 3) == Bucket(True, 1, 8)
    assert LADDER.fit(False, [64], 2) == Bucket(False, 64, 2)
    # Four tiles of 16 rows: five sequences of one token do not fit 64 rows.
    assert LADDER.fit(False, [1] * 4, 2) == Bucket(False, 64, 2)
    assert LADDER.fit(False, [1] * 5, 2) == Bucket(False, 256, 2)
    assert LADDER.fit(False, [17, 33], 2) == Bucket(False, 256, 2)


def test_work_that_no_bucket_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="17 decode rows asked, the largest bucket has 16"):
        LADDER.fit(True, [1] * 17, 1)
    with pytest.raises(ValueError, match="9 context blocks asked, the largest bucket has 8"):
        LADDER.fit(False, [1], 9)
    with pytest.raises(ValueError, match=r"no prefill bucket holds chunks of \[257\] tokens"):
        LADDER.fit(False, [257], 1)
    with pytest.raises(ValueError, match="chunk 0 of 2 tokens does not fit"):
        build_plan(Bucket(True, 4, 1), [Chunk([5, 6], 0, 0, [0])])
    with pytest.raises(ValueError, match="chunk 1 of 17 tokens does not fit"):
        build_plan(Bucket(False, 64, 1), [Chunk([5] * 33, 0, 0, [0]), Chunk([5] * 17, 0, 1, [0])])


def chunks(decode: bool) -> st.SearchStrategy[list[Chunk]]:
    one = st.builds(
        Chunk,
        tokens=st.just([DEVICE_TOKEN]) if decode else st.lists(st.integers(0, 500), min_size=1, max_size=40),
        start=st.integers(0, 900),
        slot=st.integers(0, 15),
        blocks=st.lists(st.integers(0, 99), min_size=1, max_size=12),
        sample=st.booleans(),
        temperature=st.floats(0, 2, width=32),
        seed=st.integers(0, 2**64 - 1),
        output_index=st.integers(0, 1000),
        forced=st.integers(FREE_TOKEN, 500),
    )
    return st.lists(one, min_size=1, max_size=5 if not decode else 16)


@given(data=st.data(), decode=st.booleans())
def test_a_plan_holds_every_field_of_every_chunk(data: st.DataObject, decode: bool) -> None:
    given_chunks = data.draw(chunks(decode))
    bucket = LADDER.fit(decode, [len(c.tokens) for c in given_chunks], 8)
    plan = build_plan(bucket, given_chunks)
    view = bucket.unpack(plan.buffer)
    assert plan.buffer.dtype == np.int32 and plan.buffer.size == bucket.size == sum(v.size for v in view.values())
    rows = np.repeat(view["tile_sequence"], bucket.tile)
    used = np.zeros(bucket.rows, bool)
    for i, chunk in enumerate(given_chunks):
        at = plan.rows_of(i)
        assert not used[at].any() and at.start % bucket.tile == 0
        used[at] = True
        assert view["token"][at].tolist() == list(chunk.tokens)
        assert (rows[at] == i).all()
        assert (view["start"][i], view["count"][i], view["slot"][i]) == (chunk.start, len(chunk.tokens), chunk.slot)
        assert (view["sample"][i], view["output_index"][i]) == (chunk.sample, chunk.output_index)
        assert view["temperature"].view(np.float32)[i] == chunk.temperature
        words = view["seed_low"].view(np.uint32)[i], view["seed_high"].view(np.uint32)[i]
        assert int(words[0]) | int(words[1]) << 32 == chunk.seed
        assert view["forced"][i] == chunk.forced
        table = view["block_table"][i]
        assert table[: len(chunk.blocks)].tolist() == list(chunk.blocks)[: bucket.context_blocks]
        assert not table[len(chunk.blocks) :].any()
    # Rows outside of every chunk belong to no row of a sequence, so the step sees them as padding.
    for row in np.flatnonzero(~used):
        owner = rows[row]
        if owner < bucket.sequences:
            offset = row - view["first_row"][owner]
            assert not 0 <= offset < view["count"][owner]
    assert not view["count"][len(given_chunks) :].any()
    assert (view["forced"][len(given_chunks) :] == FREE_TOKEN).all()
