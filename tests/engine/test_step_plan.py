"""Buckets, ladders and the packed buffer of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.step_plan import (
    DEVICE_LENGTH,
    DEVICE_TOKEN,
    FREE_TOKEN,
    NO_TOKEN,
    Bucket,
    BucketLadder,
    Chunk,
    StepPlan,
    build_plan,
)

LADDER = BucketLadder((64, 256), (1, 4, 16), (2, 8))
KEEPING = Bucket(False, 256, 2, kept_rows=64)


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
        start=st.integers(DEVICE_LENGTH if decode else 0, 900),
        slot=st.integers(0, 15),
        blocks=st.lists(st.integers(0, 99), min_size=1, max_size=12),
        sample=st.booleans(),
        temperature=st.floats(0, 2, width=32),
        seed=st.integers(0, 2**64 - 1),
        output_index=st.integers(0, 1000),
        forced=st.integers(FREE_TOKEN, 500),
        **({} if decode else {name: st.integers(0, 900) for name in ("window_start", "cached")}),
        history=st.lists(st.integers(NO_TOKEN, 500), max_size=5),
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
        if decode:
            continue
        assert (view["window_start"][i], view["decoder_start"][i], view["cached"][i]) == (
            chunk.window_start,
            chunk.decoder_start,
            chunk.cached,
        )
        padded = [NO_TOKEN] * bucket.history + list(chunk.history)
        assert view["history"][i].tolist() == padded[-bucket.history :]
        assert view["sample_row"][i] == at.stop - 1
    # Rows outside of every chunk belong to no row of a sequence, so the step sees them as padding.
    for row in np.flatnonzero(~used):
        owner = rows[row]
        if owner < bucket.sequences:
            offset = row - view["first_row"][owner]
            assert not 0 <= offset < view["count"][owner]
    assert not view["count"][len(given_chunks) :].any()
    assert (view["forced"][len(given_chunks) :] == FREE_TOKEN).all()


# ---- rows that the decoder layers drop ----


def test_a_chunk_keeps_its_rows_from_decoder_start_on() -> None:
    for start, count, decoder_start, kept in ((0, 9, 0, 9), (5, 9, 3, 9), (5, 9, 5, 9), (5, 9, 11, 3), (5, 9, 14, 0)):
        assert Chunk([1] * count, start, 0, [], decoder_start=decoder_start).num_kept == kept
        assert Chunk([1] * count, start, 0, [], decoder_start=decoder_start + 90).num_kept == 0


def replayed(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Chunk]:
    """Chunks at 100, any part of which is kept."""
    return st.builds(
        lambda count, kept: Chunk([7] * count, 100, 0, [0], sample=kept > 0, decoder_start=100 + max(0, count - kept)),
        sizes,
        st.integers(0, 50),
    )


def check_layout(plan: StepPlan, counts: list[int], prefix: str, rank: int) -> np.ndarray:
    """That every chunk's rows are consecutive, in tiles of its own; the context ranks share out all tiles. Returns the
    tiles of the plan's rank."""
    bucket = plan.bucket.kept if prefix else plan.bucket
    view, tile = plan.bucket.unpack(plan.buffer), bucket.tile
    owner, seen = view[prefix + "tile_sequence"], np.zeros(bucket.tiles, bool)
    for i, count in enumerate(counts):
        first = int(view[prefix + "first_row"][i])
        tiles = slice(first // tile, -(-(first + count) // tile))
        assert first % tile == 0 and (owner[tiles] == i).all() and not seen[tiles].any()
        seen[tiles] = True
    if bucket.cp == 1:
        return np.arange(bucket.tiles)
    own, home = view[prefix + "own_tiles"], view[prefix + "home"]
    assert (home[own] == rank * len(own) + np.arange(len(own))).all()
    return own


@given(data=st.data(), cp=st.sampled_from([1, 2]))
def test_kept_rows_have_a_layout_of_their_own(data: st.DataObject, cp: int) -> None:
    bucket = Bucket(False, 256 * cp, 2, cp, 64 * cp)
    given_chunks = data.draw(st.lists(replayed(st.integers(1, 70)), min_size=1, max_size=8))
    counts, kept = [len(c.tokens) for c in given_chunks], [c.num_kept for c in given_chunks]
    if not (bucket.fits_rows(counts) and bucket.kept.fits_rows(kept)):
        with pytest.raises(ValueError, match=r"chunk \d of \d+ tokens does not fit"):
            build_plan(bucket, given_chunks)
        return
    shares: dict[str, list[int]] = {"": [], "kept_": []}
    for rank in range(cp):
        plan = build_plan(bucket, given_chunks, rank)
        for prefix, sizes in (("", counts), ("kept_", kept)):
            shares[prefix] += check_layout(plan, sizes, prefix, rank).tolist()
        view = bucket.unpack(plan.buffer)
        for i, chunk in enumerate(given_chunks):
            if chunk.sample:
                assert view["sample_row"][i] == view["kept_first_row"][i] + kept[i] - 1
    assert sorted(shares[""]) == list(range(bucket.tiles))
    assert sorted(shares["kept_"]) == list(range(bucket.kept.tiles))


def test_forks_take_a_sequence_and_no_row() -> None:
    """They sample the last row of their source, among the rows that the decoder layers run."""
    source = Chunk([7] * 40, 100, 0, [0], decoder_start=120)
    other = Chunk([8] * 16, 0, 1, [1])
    forks = [Chunk([], 0, 2 + i, [], samples_of=of, seed=i) for i, of in enumerate((0, 1, 0))]
    for bucket, last in ((Bucket(False, 256, 2), (39, 63)), (KEEPING, (19, 47))):
        view = bucket.unpack(build_plan(bucket, [source, other, *forks]).buffer)
        assert view["sample_row"][:5].tolist() == [*last, last[0], last[1], last[0]]
        assert view["count"][:5].tolist() == [40, 16, 0, 0, 0] and view["slot"][:5].tolist() == [0, 1, 2, 3, 4]
        assert (view["tile_sequence"] != 2).all() and (view["tile_sequence"] != 3).all()
    # Every sequence of the bucket taken: rows that are left over are padding of one that has none there.
    full = build_plan(Bucket(False, 64, 2), [other, *[Chunk([], 0, 2, [], samples_of=0)] * 3])
    assert full.bucket.unpack(full.buffer)["tile_sequence"].tolist() == [0, 3, 3, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Chunk([], 0, 1, [], samples_of=2), "chunk 1 of 0 tokens cannot sample chunk 2 of 2"),
        (Chunk([5], 0, 1, [0], samples_of=0), "chunk 1 of 1 tokens cannot sample chunk 0"),
        (Chunk([], 0, 1, []), "chunk 1 samples chunk 1, of which the decoder layers keep no row"),
        (Chunk([5] * 9, 0, 1, [0], decoder_start=9), "chunk 1 samples chunk 1, of which the decoder layers keep no"),
    ],
)
def test_what_cannot_be_sampled_is_refused(bad: Chunk, message: str) -> None:
    for bucket in (Bucket(False, 256, 2), KEEPING):
        with pytest.raises(ValueError, match=message):
            build_plan(bucket, [Chunk([7] * 20, 0, 0, [0]), bad])
    with pytest.raises(ValueError, match="chunk 0 of 0 tokens does not fit"):
        build_plan(Bucket(True, 4, 1), [Chunk([], 0, 0, [0], samples_of=0)])


def test_large_prefill_buckets_come_in_two_shapes() -> None:
    """An eighth of the rows, at least the ends of two prompts, where that is a quarter of the rows or less."""
    limits = {"max_num_seqs": 1, "max_context_blocks": 1}
    ladder = BucketLadder.derive(max_num_batched_tokens=16384, keep_tokens=140, **limits)
    assert ladder.prefill_rows == (64, 256, 1024, 4096, 16384)
    assert ladder.kept_rows == (0, 0, 0, 512, 2048)
    shapes = [(b.rows, b.kept_rows) for b in ladder.buckets() if not b.decode]
    assert shapes == [(64, 64), (256, 256), (1024, 1024), (4096, 512), (4096, 4096), (16384, 2048), (16384, 16384)]
    assert len(set(ladder.buckets())) == len(ladder.buckets())
    assert BucketLadder.derive(max_num_batched_tokens=16384, **limits).kept_rows == ()
    # Given rungs, and ranks that share a prompt: whole grains of 2 x cp blocks.
    ladder = BucketLadder.derive(max_num_batched_tokens=1, keep_tokens=140, prefill=[8192], cp=8, **limits)
    (kept,) = ladder.kept_rows
    assert kept % Bucket(False, kept, 1, 8).grain == 0 and 1024 <= kept <= 2048


def test_decode_steps_with_and_without_context_for_a_draft() -> None:
    """An engine that may pause drafting has both, one that always verifies or has no draft neither."""

    def plain(drafts: int, varlen: bool) -> list[bool]:
        ladder = BucketLadder((64,), (4,), (2,), drafts=drafts, varlen=varlen)
        return [bucket.bare for bucket in ladder.buckets() if bucket.decode and not bucket.drafts]

    assert plain(5, True) == [False, True] and plain(5, False) == [] and plain(0, True) == [False]
    ladder = BucketLadder((64,), (4,), (2,), drafts=5)
    with_context, bare = ladder.bucket(True, 4, 2), ladder.bucket(True, 4, 2, bare=True)
    assert with_context != bare and with_context.fields == bare.fields
    with pytest.raises(ValueError, match="only a decode step without drafts"):
        Bucket(False, 64, 2, bare=True)
    with pytest.raises(ValueError, match="only a decode step without drafts"):
        Bucket(True, 8, 2, drafts=3, requests=4, bare=True)


def test_fit_takes_the_smallest_shape_that_keeps_enough() -> None:
    ladder = BucketLadder((64, 256), (1,), (2,), kept_rows=(0, 64))
    assert ladder.fit(False, [200], 2, [22]) == KEEPING
    assert ladder.fit(False, [200], 2, [0]) == KEEPING
    assert ladder.fit(False, [100, 100], 2, [22, 32]) == KEEPING
    assert ladder.fit(False, [100, 100], 2, [22, 33]) == Bucket(False, 256, 2)
    assert ladder.fit(False, [200], 2) == Bucket(False, 256, 2), "all rows are asked for"
    assert ladder.fit(False, [30, 0, 0], 2, [22, 0, 0]) == Bucket(False, 64, 2)
    assert ladder.fit(False, [30, 0, 0, 0, 0], 2, [22, 0, 0, 0, 0]) == KEEPING, "a sequence each"
    assert ladder.bucket(False, 256, 2, 64) == ladder.bucket(False, 256, 2, 33) == KEEPING
    assert ladder.bucket(False, 256, 2, 65) == ladder.bucket(False, 256, 2) == Bucket(False, 256, 2, kept_rows=256)
    with pytest.raises(ValueError, match="no prefill bucket of 256 rows, 257 of them kept"):
        ladder.bucket(False, 256, 2, 257)


@given(
    batches=st.lists(st.lists(replayed(st.integers(1, 600)), min_size=1, max_size=20), min_size=2, max_size=3),
    most=st.integers(100, 5000),
    cp=st.sampled_from([1, 2]),
    keep=st.integers(20, 140),
)
def test_ranks_that_need_different_shapes_share_one(batches: list[list[Chunk]], most: int, cp: int, keep: int) -> None:
    """The largest numbers that any rank needs are a shape that holds the work of each."""
    ladder = BucketLadder.derive(
        max_num_batched_tokens=most, max_num_seqs=1, max_context_blocks=1, cp=cp, keep_tokens=keep
    )
    fitting = []
    for batch in batches:
        try:
            counts, kept = [len(c.tokens) for c in batch], [c.num_kept for c in batch]
            fitting.append((batch, ladder.fit(False, counts, 1, kept)))
        except ValueError:
            continue
    check_shared(ladder, fitting)


def check_shared(ladder: BucketLadder, fitting: list[tuple[list[Chunk], Bucket]]) -> None:
    rows, kept_rows = (max((getattr(b, name) for _, b in fitting), default=0) for name in ("rows", "kept_rows"))
    for batch, _ in fitting:
        build_plan(ladder.bucket(False, rows, 1, kept_rows), batch)


def test_a_larger_shape_keeps_as_many_ends() -> None:
    """18 ends of 16 rows each have a tile in the 288 kept rows of the smaller bucket. Those of the larger one have
    tiles of 32 rows: an eighth of its rows, 512, would hold 16 ends."""
    ladder = BucketLadder.derive(
        max_num_batched_tokens=1, max_num_seqs=1, max_context_blocks=1, prefill=[64, 1200, 4096], keep_tokens=140
    )
    assert ladder.kept_rows == (0, 288, 576)
    ends = [Chunk([7] * 60, 0, 0, [0], decoder_start=44)] * 18
    long = [Chunk([7] * 2000, 0, 0, [0], decoder_start=1860)]
    shapes = [ladder.fit(False, [len(c.tokens) for c in b], 1, [c.num_kept for c in b]) for b in (ends, long)]
    assert [shape.kept_rows for shape in shapes] == [288, 576]
    check_shared(ladder, [(ends, shapes[0]), (long, shapes[1])])
