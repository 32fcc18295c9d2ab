"""How many blocks the caches get, and whether the fullest step then fits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden_model import REAL, TINY
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.memory_sizing import (
    IN_FLIGHT,
    MOST_BLOCKS,
    StepMemory,
    block_bytes,
    choose_blocks,
    describe,
    draft_bytes,
    fullest_buckets,
    in_turn,
    program_memory,
    slots_bytes,
    step_memory,
)
from di_jax.engine.runner import TOKENS
from di_jax.engine.setup import cache_layout, fullest_step
from di_jax.engine.speculative_programs import DraftSettings
from di_jax.engine.step_plan import Bucket, BucketLadder
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.dspark import abstract_draft
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from di_jax.model.transformer import abstract_model
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.compiler import XLA_DEFAULTS
from di_jax.platforms.devices import MemoryRoom

LAYOUT = CacheLayout(TINY, CacheFormats.quantized(), num_blocks=1, num_slots=16)
STEP = StepMemory("a step", 700_000, 200_000, 100_000)


def engine_of(**values: Any) -> Any:
    """What the decision reads of `engine.*`."""
    defaults = {"max_model_len": 4096, "max_num_seqs": 16, "num_blocks": None, "prefix_caching": False}
    return SimpleNamespace(**{"block_size": 128, "memory_utilization": 0.9} | defaults | values)


def room_for(blocks: float, engine: Any, used: int = 10**9, step: StepMemory | None = STEP) -> MemoryRoom:
    """A device of which `blocks` blocks are left."""
    need = used + slots_bytes(LAYOUT) + (step.total if step else 0) + int(blocks * block_bytes(LAYOUT))
    return MemoryRoom(-(-need * 1000 // int(engine.memory_utilization * 1000)), used)


# ---- the decision ----


@given(
    limit=st.integers(0, 10**9),
    used=st.integers(0, 10**9),
    temporaries=st.integers(0, 10**9),
    utilization=st.floats(0.1, 1),
    length=st.integers(1, 10_000),
    num_blocks=st.none() | st.integers(100, 10**5),
    caching=st.booleans(),
    shared=st.booleans(),
)
def test_the_fullest_step_always_fits(
    limit: int,
    used: int,
    temporaries: int,
    utilization: float,
    length: int,
    num_blocks: int | None,
    caching: bool,
    shared: bool,
) -> None:
    """And one request does; what is left over is less than a 64th, unless there is enough; else it is an error."""
    engine = engine_of(
        memory_utilization=utilization, max_model_len=length, num_blocks=num_blocks, prefix_caching=caching
    )
    step, block = dataclasses.replace(STEP, temporaries=temporaries), block_bytes(LAYOUT)
    free = limit * utilization - used - slots_bytes(LAYOUT) - step.total
    least = num_blocks or -(-length // 128)
    try:
        blocks, _ = choose_blocks(engine, LAYOUT, MemoryRoom(limit, used, shared), step)
    except ConfigError:
        assert free < least * block
        return
    full = -(-length // 128) * 16
    assert least <= blocks and blocks * block <= free
    if num_blocks is not None:
        assert blocks == num_blocks
    elif caching and not shared:
        assert blocks <= MOST_BLOCKS
        assert blocks >= min(MOST_BLOCKS, (free // block - 1) * 63 / 64)
    else:
        assert blocks <= full
        assert blocks >= min(full, (free // block - 1) * 63 / 64)


def test_every_part_counts() -> None:
    """Control: a little less memory, or a little more of anything that takes it, and the last request is out."""
    engine = engine_of(max_num_seqs=1)
    room = room_for(32, engine)
    assert choose_blocks(engine, LAYOUT, room, STEP)[0] == 32
    for room_now, layout, step in (
        (dataclasses.replace(room, limit=room.limit - 10), LAYOUT, STEP),
        (dataclasses.replace(room, used=room.used + 10), LAYOUT, STEP),
        (room, dataclasses.replace(LAYOUT, num_slots=17), STEP),
        (room, LAYOUT, dataclasses.replace(STEP, temporaries=STEP.temporaries + 10)),
        (room, LAYOUT, dataclasses.replace(STEP, buffers=STEP.buffers + 10)),
        (room, LAYOUT, dataclasses.replace(STEP, code=STEP.code + 10)),
    ):
        with pytest.raises(ConfigError):
            choose_blocks(engine, layout, room_now, step)


def test_a_pool_need_not_hold_every_slot_at_full_length() -> None:
    engine = engine_of()
    assert choose_blocks(engine, LAYOUT, room_for(32.5, engine), STEP)[0] == 32, "one request of 4,096 tokens"
    assert choose_blocks(engine, LAYOUT, room_for(40.5, engine), STEP)[0] == 40
    assert choose_blocks(engine, LAYOUT, room_for(10_000, engine), STEP)[0] == 16 * 32
    caching = engine_of(prefix_caching=True)
    assert choose_blocks(caching, LAYOUT, room_for(10_000, caching), STEP)[0] == 9984, "all that fits, to a 64th"
    assert choose_blocks(caching, LAYOUT, None, None)[0] == 16 * 32


def test_other_starts_find_the_same_number() -> None:
    """A few bytes more or less in use do not make other programs of all steps."""
    engine = engine_of(max_num_seqs=10_000)
    found = {choose_blocks(engine, LAYOUT, room_for(5001 + n / 4, engine), STEP)[0] for n in range(-80, 80)}
    assert len(found) <= 3 and min(found) > 4900


def test_what_was_asked_is_checked_against_the_same_limit() -> None:
    engine = engine_of(num_blocks=200)
    assert choose_blocks(engine, LAYOUT, room_for(200, engine), STEP)[0] == 200
    with pytest.raises(ConfigError) as error:
        choose_blocks(engine, LAYOUT, room_for(199.5, engine), STEP)
    message = str(error.value)
    for part in (
        "engine.num_blocks: 200 blocks do not fit: engine.memory_utilization = 0.9 of 1.12 GB, less 1.00 GB in use",
        "for 16 sequence slots",
        "1.00 MB for a step (temporaries 700.00 kB, plans and results 200.00 kB, code of all shapes 100.00 kB), leaves",
        ": 199 blocks of 13.57 kB; lower engine.num_blocks, engine.max_model_len, engine.max_num_seqs or "
        "engine.max_num_batched_tokens, or raise engine.memory_utilization",
    ):
        assert part in message, message
    engine = engine_of()
    with pytest.raises(ConfigError, match=r"engine.max_model_len: the 32 blocks of one request of 4096 tokens do not"):
        choose_blocks(engine, LAYOUT, room_for(31.5, engine), STEP)
    with pytest.raises(ConfigError, match=r"leaves 0.00 kB: 0 blocks of 13.57 kB; lower engine.max_model_len, "):
        choose_blocks(engine, LAYOUT, MemoryRoom(100, 200), STEP)


def test_one_line_says_what_was_decided() -> None:
    engine = engine_of()
    blocks, why = choose_blocks(engine, LAYOUT, room_for(100.5, engine), STEP)
    line = describe(engine, dataclasses.replace(LAYOUT, num_blocks=blocks), why)
    assert "\n" not in line
    slots = f"{slots_bytes(LAYOUT) / 1e3:,.2f} kB"
    for part in (
        "caches of a rank: 100 blocks of 128 tokens (1.36 MB, 12,800 tokens, 3 requests of engine.max_model_len = ",
        f"4096), 16 sequence slots ({slots}): all that fits; engine.memory_utilization = 0.9 of ",
        f"less 1.00 GB in use, {slots} for 16 sequence slots and 1.00 MB for a step",
    ):
        assert part in line, line


def test_what_a_sequence_keeps_for_its_drafts() -> None:
    """The released sizes: three windows of 134 rows, and 5 drafts with the distributions they were drawn from."""
    formats = CacheFormats.quantized()
    plain = cache_layout(REAL, formats, 1, 16, None)
    assert draft_bytes(plain) == (0, 0)
    windows = 3 * 134 * 528
    for settings, drafts in (
        (DraftSettings(5), 5 * (2 * 129_280 + 4 + 4 + 4)),
        (DraftSettings(3), 3 * (2 * 129_280 + 4 + 4 + 4)),
        (DraftSettings(5, "one_hot"), 5 * (4 + 4)),
        (DraftSettings(5, "coupled"), 5 * (4 + 4)),
    ):
        layout = cache_layout(REAL, formats, 1, 16, settings)
        assert draft_bytes(layout) == (windows, drafts)
        assert slots_bytes(layout) == slots_bytes(plain) + 16 * (windows + drafts), "the room for blocks counts it"
    line = describe(engine_of(), cache_layout(REAL, formats, 32, 16, DraftSettings(5)), "why")
    assert "; of each sequence 212.26 kB are windows of the draft and 1.29 MB its drafts): why" in line
    assert "draft" not in describe(engine_of(), dataclasses.replace(plain, num_blocks=32), "why")


# ---- what steps need ----


def test_the_largest_shape_of_each_kind_is_measured() -> None:
    ladder = BucketLadder.derive(max_num_batched_tokens=4096, max_num_seqs=16, max_context_blocks=64, keep_tokens=140)
    dropping, whole = ladder.bucket(False, 4096, 64, 1), ladder.bucket(False, 4096, 64)
    assert dropping.drops_rows and not whole.drops_rows
    assert set(fullest_buckets(ladder)) == {ladder.bucket(True, 16, 64), whole, dropping}


def test_the_step_that_verifies_most_is_measured() -> None:
    ladder = BucketLadder.derive(
        max_num_batched_tokens=4096, max_num_seqs=16, max_context_blocks=64, decode=[1, 16], drafts=5
    )
    assert set(fullest_buckets(ladder)) == {ladder.bucket(True, 96, 64, requests=16), ladder.bucket(False, 4096, 64)}


def test_programs_of_one_step() -> None:
    """They run one after the other: temporaries of the fullest, results and code of all."""
    parts = [StepMemory("verify", 500, 10, 1), StepMemory("accept", 700, 20, 2), StepMemory("draft", 600, 40, 4)]
    assert in_turn(parts) == StepMemory("accept", 700, 70, 7)
    memory = SimpleNamespace(
        output_size_in_bytes=90, alias_size_in_bytes=60, temp_size_in_bytes=5, generated_code_size_in_bytes=7
    )
    executable = SimpleNamespace(memory_analysis=lambda: memory)
    assert program_memory("x", executable, 3) == StepMemory("x", 5, IN_FLIGHT * 30, 21)


def test_the_parts_of_a_step() -> None:
    """Two plans and results, one set of temporaries, and the code of all shapes."""
    bucket = Bucket(False, 128, 3)
    memory = SimpleNamespace(
        argument_size_in_bytes=9_999_999,
        output_size_in_bytes=5_000_600,
        alias_size_in_bytes=5_000_000,
        temp_size_in_bytes=12_345,
        generated_code_size_in_bytes=100,
    )
    step = step_memory(bucket, SimpleNamespace(memory_analysis=lambda: memory), num_shapes=7)
    assert IN_FLIGHT == 2
    assert step == StepMemory(
        "a prefill step of 128 rows and 3 blocks of context", 12_345, 2 * (600 + 4 * bucket.size), 700
    )


# Every kind of layer that reads or writes a pool, and few of them.
SMALL = dataclasses.replace(
    TINY,
    num_hidden_layers=2,
    compress_ratios=(2, 1),
    kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1),
    candidate_source_layer_id=1,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    quantization=None,
)


@pytest.mark.slow
def test_a_steps_memory_does_not_depend_on_the_pool() -> None:
    """So that the smallest pool tells it."""
    numerics = Numerics.create("float32")
    model, mesh = abstract_model(SMALL, numerics), DeviceMesh().build()

    def measured(blocks: int) -> StepMemory:
        layout = CacheLayout(SMALL, numerics.formats, blocks, num_slots=4)
        return fullest_step(model, mesh, BucketLadder((16,), (2,), (1,)), TOKENS, None, XLA_DEFAULTS, layout)

    few, many = measured(1), measured(1000)
    added = 999 * block_bytes(CacheLayout(SMALL, numerics.formats, 1, 4))
    assert added > 3 * few.total > 0, "or a copy of the pool could hide"
    assert many == few


@pytest.mark.slow
def test_a_step_with_drafts_is_measured_whole() -> None:
    """Verifying, accepting and drafting count, and the pool does not: with a vocabulary large enough for the drafts'
    distributions to be the most, accepting is what needs memory."""
    config = dataclasses.replace(SMALL, dspark_target_layer_ids=(0, 1), vocab_size=32_768)
    numerics = Numerics.create("float32")
    model, mesh = abstract_model(config, numerics), DeviceMesh().build()
    draft = abstract_draft(config, numerics)

    def measured(requests: int, blocks: int = 1) -> StepMemory:
        settings = DraftSettings(3)
        layout = cache_layout(config, numerics.formats, blocks, requests, settings)
        ladder = BucketLadder((16,), (requests,), (1,), drafts=3, varlen=False)
        return fullest_step(model, mesh, ladder, TOKENS, (draft, settings), XLA_DEFAULTS, layout)

    few, many, pooled = measured(2), measured(8), measured(2, blocks=1000)
    logits = 4 * 32_768  # bytes of a row
    assert few.temporaries > 2 * 4 * logits and many.temporaries - few.temporaries > 6 * 4 * logits
    assert "drafts of 2 sequences in 8 rows" in few.name or "drafting for 2" in few.name, few.name
    assert many.buffers > few.buffers > IN_FLIGHT * 8 * config.hidden_size * 4, "hidden rows wait to be accepted"
    assert pooled == few


def test_a_pool_that_is_copied_would_be_seen() -> None:
    """Control: a step that keeps the old pool needs memory for a second one."""

    def step(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool.at[0].set(1), pool.sum()

    sizes = [
        step_memory(
            Bucket(True, 1, 1), jax.jit(step).lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile(), num_shapes=1
        )
        for n in (1000, 2000)
    ]
    assert sizes[1].total - sizes[0].total >= 2 * 4000
