"""What a step runs on each rank, and where its results are found."""

from __future__ import annotations

import numpy as np
import pytest

from di_jax.engine.batch import VERIFIES, Batch, DecodeBatch, DecodePart, Need, Work, work_of
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.prefix_cache import Hit
from di_jax.engine.sequence import Holding, Sequence
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.step_plan import BucketLadder, Chunk
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.sampling_params import SamplingParams

LADDER = BucketLadder.derive(max_num_batched_tokens=512, max_num_seqs=4, max_context_blocks=8, keep_tokens=24)
LEDGERS = [BlockManager(8, 4, 128, rank) for rank in range(2)]


def sequence(prompt: int = 300, ranks: tuple[int, ...] = (0,), slot: int = 0, hit: Hit | None = None) -> Sequence:
    one = Sequence("a", 0, list(range(prompt)), SamplingParams(temperature=0), 7, max_tokens=4)
    one.held, one.goal = [Holding(rank, [3, 4, 5], slot) for rank in ranks], prompt
    one.hit = hit or one.hit
    return one


def part(count: int, start: int = 0, **fields: object) -> Work:
    one = sequence(start + count, **fields)  # type: ignore[arg-type]
    return work_of(one, one.tokens(start, start + count), start, sample=True, keep_tokens=24, look_back=3)


def fork(parent: Work, slot: int) -> Work:
    chunk = Chunk((), parent.end, slot, [3], decoder_start=parent.chunk.decoder_start)
    return Work(sequence(slot=slot), {parent.rank: chunk}, (), parent.end, parent)


def test_a_step_needs_what_its_fullest_rank_needs() -> None:
    assert Batch(PREFILL).need(LADDER, LEDGERS) == Need()
    short, long = part(20), part(280, ranks=(1,))
    assert Batch(PREFILL, [short]).need(LADDER, LEDGERS) == Need(64, 64, 8)
    # 512 rows come with 64 for the decoder layers, of which each chunk keeps 24 at most.
    assert Batch(PREFILL, [long]).need(LADDER, LEDGERS) == Need(512, 64, 8)
    both = Batch(PREFILL, [short, long])
    assert both.need(LADDER, LEDGERS) == Need(512, 64, 8)
    bucket = LADDER.bucket(False, 512, 8, 64)
    plans = both.plans(bucket, [0, 1])
    assert [[len(chunk.tokens) for chunk in plan.chunks] for plan in plans] == [[20], [280]]
    assert both.num_tokens == 300 and both.num_sequences == 2


def test_results_are_found_once_though_context_ranks_have_the_chunk_too() -> None:
    first, second = part(40, ranks=(0, 1)), part(30, ranks=(0, 1), slot=1)
    third = part(20, ranks=(1,), slot=2)
    settled = Work(second.sequence, {1: second.chunks[1]} | second.chunks, second.held, second.end)
    child = fork(settled, 3)
    batch = Batch(PREFILL, [first, settled, child, third])
    assert [(rank, place) for rank, place, _ in batch.results()] == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert [chunk.slot for chunk in batch.of_rank(0)] == [0, 1]
    assert [chunk.slot for chunk in batch.of_rank(1)] == [0, 1, 3, 2]
    assert [chunk.samples_of for chunk in batch.of_rank(1)] == [None, None, 1, None]


def test_rows_before_a_chunk_and_where_the_decoder_begins() -> None:
    cold = part(300)
    assert (cold.chunk.history, cold.chunk.decoder_start, cold.chunk.cached) == ([], 276, 0)
    later = part(100, start=200)
    assert (later.chunk.history, later.chunk.decoder_start, later.end) == ([197, 198, 199], 276, 300)
    assert part(2, start=1).chunk.history == [0] and part(2, start=1).chunk.decoder_start == 0
    restored = part(172, start=128, hit=Hit(128, 128, 0))
    assert (restored.chunk.window_start, restored.chunk.decoder_start, restored.chunk.cached) == (0, 276, 128)
    near = part(22, start=256, hit=Hit(256, 256, 0))
    assert near.chunk.decoder_start == 256, "rows before the hit are not computed"
    one = sequence(300, hit=Hit(256, 128, 128))
    replayed = work_of(one, one.tokens(128, 300), 128, sample=True)
    assert (replayed.chunk.window_start, replayed.chunk.decoder_start) == (128, 128)


def test_forced_tokens_are_of_the_sampled_row_alone() -> None:
    one = sequence(10)
    one.sampling = SamplingParams(forced_token_ids=(8, 9))
    assert work_of(one, [1], 9, sample=True).chunk.forced == 8
    assert work_of(one, [1], 3, sample=False).chunk.forced == -1
    one.output_ids = [8]
    assert work_of(one, [1], 9, sample=True).chunk.forced == 9


def decode_part(rank: int, positions: list[int]) -> DecodePart:
    table = SlotTable(4, 8)
    for slot, position in enumerate(positions):
        table.begin(slot, sequence(position), position, 1, [1] * (position // 128 + 1))
    slots = table.ready()
    none, sequences = np.zeros(len(slots), np.int32), [table.sequences[s] for s in slots]
    return DecodePart(rank, table, slots, table.position[slots], sequences, none, none > 0)  # type: ignore[arg-type]


def test_a_decode_step_and_ranks_without_part_in_it() -> None:
    batch = DecodeBatch([decode_part(1, [10, 300, 5])])
    assert batch.kind == DECODE and batch.num_tokens == batch.num_sequences == 3
    need = batch.need(LADDER, LEDGERS)
    assert need == Need(4, 4, 8)
    idle, busy = batch.plans(LADDER.bucket(True, need.rows, need.context_blocks), [0, 1])
    assert not idle.bucket.unpack(idle.buffer)["count"].any()
    assert busy.bucket.unpack(busy.buffer)["count"].tolist() == [1, 1, 1, 0]
    batch.advance()
    assert batch.parts[0].table.position[:3].tolist() == [11, 301, 6]
    assert batch.parts[0].position.tolist() == [10, 300, 5], "of the step that was launched"
    assert DecodeBatch([]).need(LADDER, LEDGERS) == Need()


def test_the_context_of_a_step() -> None:
    assert Batch(PREFILL, [part(100, start=100), part(50)]).mean_context == pytest.approx(100 * 100 / 150)
    assert Batch(PREFILL).mean_context == 0
    assert np.isclose(DecodeBatch([]).mean_context, 0)


def test_a_decode_step_with_drafts() -> None:
    ladder = BucketLadder.derive(
        max_num_batched_tokens=512, max_num_seqs=4, max_context_blocks=8, context=(1, 2, 4, 8), decode=(2, 4), drafts=3
    )
    parts = []
    for rank, positions in enumerate(([10, 126], [50], [])):
        table = SlotTable(4, 8, 3)
        for slot, position in enumerate(positions):
            one = sequence(position)
            one.max_tokens = 50
            table.begin(slot, one, position, 1, [1])
        slots = table.ready()
        caps = np.full(len(slots), 2, np.int32)
        sequences = [table.sequences[s] for s in slots]
        parts.append(
            DecodePart(rank, table, slots, table.position[slots], sequences, caps, caps > 0, rows=8 - 4 * rank)
        )  # type: ignore[arg-type]
    batch = DecodeBatch(parts[:2], num_drafts=3)
    # The furthest row is at 128, in the second block; two sequences and the rows that the first rank asks for.
    need = batch.need(ladder, LEDGERS)
    assert need == Need(8, 0, 2, 2, VERIFIES)
    bucket = need.bucket(ladder, True)
    assert (bucket.rows, bucket.requests, bucket.drafts) == (8, 2, 3)
    views = [bucket.unpack(plan.buffer) for plan in batch.plans(bucket, [0, 1, 2])]
    assert [view["cap"].tolist() for view in views] == [[2, 2], [2, -1], [-1, -1]]
    assert [view["budget"].tolist() for view in views] == [[4], [2], [0]]
    batch.advance(bool(bucket.drafts), bucket.bare)
    assert parts[0].table.position[:2].tolist() == [11, 127] and parts[0].table.ahead[:2].tolist() == [2, 2]
    assert DecodeBatch([], num_drafts=3).need(ladder, LEDGERS) == Need()
    # Further ahead by what a step in flight may have accepted.
    assert DecodeBatch(parts[:1], num_drafts=3).need(ladder, LEDGERS).context_blocks == 2
    # Nothing to verify: what one process needs for its drafts to come all do, and idle ones need nothing.
    for part in parts:
        part.table.ahead[:] = part.caps[:] = 0
    for bare, idle, expected in ((False, True, False), (True, True, True), (True, False, False)):
        plain = DecodeBatch(parts[:2], num_drafts=3, bare=bare).need(ladder, LEDGERS)
        other = Need() if idle else DecodeBatch(parts[1:2], num_drafts=3).need(ladder, LEDGERS)
        shared = Need(*np.max([plain.numbers(), other.numbers()], axis=0).tolist()).bucket(ladder, True)
        assert not shared.drafts and shared.rows == 2 and shared.bare is expected
    parts[0].table.ahead[1] = 150
    assert parts[0].last_position == 126 + 48, "its last token is fed to nobody"
