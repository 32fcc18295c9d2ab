"""Cache writes on Hopper: pooling, norm, rotation and quantizers in registers, records stored in place (numerics 3, 7).

A warp has a row. Of its 512 channels a lane has two runs of 8, `8 * lane` and `256 + 8 * lane`; of the 128 of an index
key one run of 4. So a group of 16 or 32 channels that shares a scale lies in neighbouring lanes, rotated pairs lie in
one lane, and nothing passes through shared memory. A row is stored by the warp that computed it; rows to be skipped
have the record -1.

A pair of the compressor is read by the row after it, and overwritten by the row that a ring later takes its place. Both
may be rows of one step, in a chunk: then the reader stores the other's pair once it has read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import E4M3_MAX, FP4_BLOCK_AMAX_FLOOR, FP4_MICRO_AMAX_FLOOR, FP8_AMAX_FLOOR
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows
from kernels_pallas.compress_store import lanes
from kernels_pallas.compress_store.config import Tuning
from kernels_pallas.compress_store.reference import stored_in_window

HEAD, KEY = 512, 128  # channels of a latent and of an index key
ROPE = 64
WINDOW_BYTES, ENTRY_BYTES, KEY_BYTES = 528, 288, 68
WARPS = lanes.WARPGROUP // 32
# Mosaic GPU refuses operands that do not begin at a multiple of 256 bytes, and XLA gives it slices in place. So stacks
# come whole, and the number of a layer, which is a slice where layers are scanned, comes so often as to fill 256.
LAYER_COPIES = 64
# Columns of what the compressor's rows are told (`entry_plan`).
TARGET, OWN, HISTORY, LATE, ENTRY, COLUMNS = 0, 1, 2, 3, 4, 8
LOG2E = math.log2(math.e)
SIGN = 0x80000000


# --- what a lane does with its channels -------------------------------------------------------------------------------


def run_length(channels: int) -> int:
    """Consecutive channels of a lane."""
    return min(8, channels // 32)


def load_words(memory: Any, row: Any, size: int, index: Any, count: int) -> list[Any]:
    """2 or 4 elements at `index` of a row of `size`."""
    place = memory.row(row, size)
    return place.load4(index) if count == 4 else [place.load(index + i) for i in range(count)]


def load_bf16(m: Any, memory: Any, row: Any, channels: int) -> list[Any]:
    """The lane's channels of a row of bf16 as words of two."""
    width, words = run_length(channels), []
    for run in range(channels // (32 * width)):
        at = (m.thread() & 31) * (width // 2) + run * 16 * width
        words += load_words(memory, row, channels // 2, at, width // 2)
    return words


def load_fp32(m: Any, place: Any) -> list[Any]:
    """The lane's channels of 512 fp32 at a place."""
    return [x for run in range(2) for half in range(2) for x in place.load4(fp32_index(m, run, half))]


def fp32_index(m: Any, run: int, half: int) -> Any:
    return (m.thread() & 31) * 8 + (256 * run + 4 * half)


def unpacked(m: Any, words: list[Any]) -> list[Any]:
    return [m.as_real(bits) for w in words for bits in (w << 16, w & 0xFFFF0000)]


def rounded(m: Any, x: list[Any]) -> list[Any]:
    """Words of two bf16."""
    return [m.bf16_pair(a, b) for a, b in zip(x[::2], x[1::2], strict=True)]


def pooled(m: Any, gates: Sequence[list[Any]], latents: Sequence[list[Any]]) -> list[Any]:
    """Channelwise softmax over two tokens (numerics 7)."""
    out = []
    for g, h, a, b in zip(*gates, *latents, strict=True):
        ahead = g - h
        less = m.power_of_two(m.magnitude(ahead) * -LOG2E)  # weight of the smaller gate, that of the other is 1
        first = m.as_bits(ahead) >= 0
        value = m.select(first, a, b) + less * m.select(first, b, a)
        out.append(value * m.reciprocal(less + 1.0))
    return out


def normed(m: Any, x: list[Any], weight: list[Any], channels: int, eps: float) -> list[Any]:
    """Words of two bf16 (numerics 5.1)."""
    total = m.real(0.0)
    for value in x:
        total = total + value * value
    for distance in (16, 8, 4, 2, 1):
        total = total + m.swap(total, distance)
    factor = m.inverse_root(total * (1 / channels) + eps)
    return rounded(m, [w * value * factor for w, value in zip(weight, x, strict=True)])


def rotated(m: Any, words: list[Any], channels: int, cos: list[Any], sin: list[Any]) -> list[Any]:
    """The same words with the last 64 channels rotated (numerics 5.3); they are in the last lanes' last run."""
    width = run_length(channels)
    plain, tail = words[: -width // 2], words[-width // 2 :]
    inside = (m.thread() & 31) >= 32 - ROPE // width
    for word, c, s in zip(tail, cos, sin, strict=True):
        a, b = unpacked(m, [word])
        plain.append(m.select(inside, m.bf16_pair(a * c - b * s, a * s + b * c), word))
    return plain


def load_angles(m: Any, memory: Any, row: Any, channels: int) -> list[Any]:
    """The lane's part of 32 cosines or sines of a row; of lanes that rotate nothing, any."""
    width = run_length(channels)
    at = ((m.thread() & 31) - (32 - ROPE // width)).at_least(0) * (width // 2)
    return load_words(memory, row, ROPE // 2, at, width // 2)


def largest(m: Any, x: list[Any], lanes_: int) -> Any:
    """The largest magnitude of the channels in so many neighbouring lanes."""
    amax = m.magnitude(x[0])
    for value in x[1:]:
        amax = m.larger(amax, m.magnitude(value))
    distance = 1
    while distance < lanes_:
        amax, distance = m.larger(amax, m.swap(amax, distance)), 2 * distance
    return amax


def power_scale(m: Any, v: Any) -> tuple[Any, Any]:
    """(ue8m0 byte of the smallest power of two >= v, its reciprocal) for v > 0 (numerics 3)."""
    bits = m.as_bits(v)
    byte = (bits >> 23) + m.flag((bits & 0x7FFFFF) > 0)
    return byte, m.as_real((byte * -1 + 254) << 23)


def snapped(m: Any, quotient: Any) -> Any:
    """A quotient of a bf16 by 6 or by an e4m3, made by way of a reciprocal, so that it rounds as the true one does.

    The true one lies between two codes, which takes less than 8 bits, or 2^-9 of itself away from that. What is wrong
    in the last of 24 bits is rounded away.
    """
    return m.as_real((m.as_bits(quotient) + 0x80) & 0xFFFFFF00)


def e2m1(m: Any, x: Any) -> Any:
    """e2m1 code, ties to even, saturating (numerics 3.4): its values are 0.5, 1 or 2 apart, by the magnitude."""
    bits = m.as_bits(x)
    a = (bits & 0x7FFFFFFF).at_most(0x40C00000)  # 6
    small, middle = a < 0x40000000, a < 0x40800000  # 2, 4
    steps = m.select(small, m.real(2.0), m.select(middle, m.real(1.0), m.real(0.5)))
    before = m.select(small, m.integer(0), m.select(middle, m.integer(2), m.integer(4)))
    # Added to 1.5 * 2^23 a number is rounded to an integer in the lowest bits.
    count = m.as_bits(m.as_real(a) * steps + 12582912.0) & 7
    return count + before | bits >> 28 & 8


def packed(parts: list[Any], bits: int) -> Any:
    """Parts of so many bits in one word, the first lowest."""
    word = parts[0]
    for i, part in enumerate(parts[1:], 1):
        word = word | part << bits * i
    return word


# --- records ----------------------------------------------------------------------------------------------------------


def store_window_record(m: Any, pool: Any, record: Any, words: list[Any]) -> None:
    """512 e4m3 and 16 ue8m0 (numerics 3.1)."""
    lane = m.thread() & 31
    for run in range(2):
        x = unpacked(m, words[4 * run : 4 * run + 4])
        amax = m.larger(largest(m, x, 4), m.real(FP8_AMAX_FLOOR))
        byte, inverse = power_scale(m, amax * (1 / E4M3_MAX))
        pairs = [m.e4m3_pair(a * inverse, b * inverse) for a, b in zip(x[::2], x[1::2], strict=True)]
        values = [packed(pairs[:2], 16), packed(pairs[2:], 16)]
        m.store_bytes(pool, record, WINDOW_BYTES, lane * 8 + run * 256, values)
        with m.when((lane & 3).equals(0)):
            m.store_part(pool, record, WINDOW_BYTES, (lane >> 2) + (HEAD + 8 * run), byte, 8)


def store_entry_record(m: Any, pool: Any, record: Any, words: list[Any]) -> None:
    """512 e2m1 and 32 e4m3 (numerics 3.3)."""
    lane = m.thread() & 31
    for run in range(2):
        x = unpacked(m, words[4 * run : 4 * run + 4])
        amax = m.larger(largest(m, x, 2), m.real(FP4_MICRO_AMAX_FLOOR))
        scale = snapped(m, amax * (1 / 6.0))
        byte = m.e4m3_pair(scale, scale) & 0xFF  # saturates at 448
        # Below 8 it is subnormal, that many times 2^-9; 2^23 and an integer is that float.
        subnormal = (m.as_real(byte | 0x4B000000) - 8388608.0) * 2.0**-9
        scale = m.select(byte < 8, subnormal, m.as_real((byte << 20) + (120 << 23)))
        inverse = m.reciprocal(scale)
        codes = packed([e2m1(m, snapped(m, value * inverse)) for value in x], 4)
        m.store_bytes(pool, record, ENTRY_BYTES, lane * 4 + run * 128, [codes])
        with m.when((lane & 1).equals(0)):
            m.store_part(pool, record, ENTRY_BYTES, (lane >> 1) + (HEAD // 2 + 16 * run), byte, 8)


def store_key_record(m: Any, pool: Any, record: Any, words: list[Any]) -> None:
    """128 e2m1 and 4 ue8m0 (numerics 3.2)."""
    lane, x = m.thread() & 31, unpacked(m, words)
    amax = m.larger(largest(m, x, 8), m.real(FP4_BLOCK_AMAX_FLOOR))
    byte, inverse = power_scale(m, amax * (1 / 6.0))
    codes = packed([e2m1(m, value * inverse) for value in x], 4)
    m.store_part(pool, record, KEY_BYTES, lane * 2, codes, 16)
    with m.when((lane & 7).equals(0)):
        m.store_part(pool, record, KEY_BYTES, (lane >> 3) + KEY // 2, byte, 8)


# --- launches ---------------------------------------------------------------------------------------------------------


def _launch(
    body: Callable[[Any, list[Any], Any], None],
    name: str,
    rows: int,
    tuning: Tuning,
    inputs: Sequence[Array],
    pools: Sequence[Array],
    out_type: Sequence[Any] = (),
) -> tuple[list[Array], list[Array]]:
    """body(machine, memory, row) of every row in a warp of its own."""
    warps = WARPS * tuning.warpgroups

    def each_row(m: Any, memory: list[Any]) -> None:
        row = m.block() * warps + (m.thread() >> 5)
        with m.when(row < rows):
            body(m, memory, row)

    name = f"compress_store_{name}"
    return lanes.run(each_row, name, -(-rows // warps), tuning.warpgroups, inputs, pools, out_type)


def store_window(
    ring: Array, layer: Array | int, kv: Array, rows: Rows, layout: CacheLayout, *, tuning: Tuning
) -> Array:
    """`api.store_window` for bf16 kv [T, 512] or [n, T, 512]."""
    return _store_window(ring, layer, kv, rows, tuning=tuning)


@partial(jax.jit, static_argnames="tuning")
def _store_window(ring: Array, layer: Array | int, kv: Array, rows: Rows, *, tuning: Tuning) -> Array:
    each, per_layer = rows.num_rows, ring.shape[1] * ring.shape[2]

    def body(m: Any, memory: list[Any], row: Any) -> None:
        records, number, x, pool = memory
        words, behind = load_bf16(m, x, row, HEAD), row.divided(each)
        record = records.load(row - behind * each)
        with m.when(record >= 0):
            store_window_record(m, pool, record + (number.load(m.integer(0)) + behind) * per_layer, words)

    inputs = (window_records(ring, rows), _copies(layer), kv.reshape(-1, HEAD))
    return _launch(body, "window", kv.size // HEAD, tuning, inputs, (ring,))[1][0]


def store_projected(
    ring: Array,
    layer: Array | int,
    projected: Array,
    norm_weight: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    layout: CacheLayout,
    *,
    tuning: Tuning,
) -> Array:
    """`api.store_projected` for bf16 [T, 512]."""
    eps = layout.config.rms_norm_eps
    return _store_projected(ring, layer, projected, norm_weight, cos_sin, rows, eps=eps, tuning=tuning)


@partial(jax.jit, static_argnames=("eps", "tuning"))
def _store_projected(
    ring: Array,
    layer: Array | int,
    projected: Array,
    norm_weight: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    *,
    eps: float,
    tuning: Tuning,
) -> Array:
    per_layer = ring.shape[1] * ring.shape[2]

    def body(m: Any, memory: list[Any], row: Any) -> None:
        records, number, x, weight, cos, sin, pool = memory
        own = number.load(m.integer(0))
        words, weights = load_bf16(m, x, row, HEAD), load_bf16(m, weight, own, HEAD)
        angles = [load_angles(m, memory, row, HEAD) for memory in (cos, sin)]
        record = records.load(row)
        with m.when(record >= 0):
            done = normed(m, unpacked(m, words), unpacked(m, weights), HEAD, eps)
            store_window_record(m, pool, record + own * per_layer, rotated(m, done, HEAD, *angles))

    inputs = (window_records(ring, rows), _copies(layer), projected, norm_weight, *cos_sin)
    return _launch(body, "projected", len(projected), tuning, inputs, (ring,))[1][0]


def window_records(ring: Array, rows: Rows) -> Array:
    """int32 [T] record slot * ring + position mod ring, of any layer, that a row becomes; -1 of rows left out."""
    ring_rows = ring.shape[2]
    record = rows.slot[rows.sequence] * ring_rows + rows.position % ring_rows
    return jnp.where(stored_in_window(rows, ring_rows), record, -1)


def _copies(layer: Array | int) -> Array:
    return jnp.full(LAYER_COPIES, layer, jnp.int32)


def entry_plan(rows: Rows, layout: CacheLayout, source: int) -> Array:
    """What each row does in the compressor of `source`, int32 [T, COLUMNS]; -1 is nothing.

    TARGET: record of the pool that its group becomes; ENTRY: row of the latents that its group becomes; OWN: record of
    the ring [sources, slots, ring, 2, d] of pairs that it stores; HISTORY: record of the pair before it, where that is
    of an earlier step; LATE: row whose pair it stores there once it has read.
    """
    config, ring_rows = layout.config, layout.config.compressor_ring
    ratio = config.kv_source_ratios[source]
    sequence, position = rows.sequence, rows.position
    emits, entry = rows.valid & (position % ratio == ratio - 1), position // ratio
    address = layout.entry_row(source, rows.block_table[sequence], entry[:, None])[:, 0]
    row = jnp.arange(rows.num_rows, dtype=jnp.int32)
    nothing = jnp.full_like(row, -1)
    columns = [nothing] * COLUMNS
    columns[TARGET] = jnp.where(emits & (entry * ratio >= rows.cached[sequence]), address, -1)
    columns[ENTRY] = jnp.where(emits, row // rows.tile * -(-rows.tile // ratio) + row % rows.tile // ratio, -1)
    if ratio > 1:
        start, end = rows.start[sequence], rows.end[sequence]
        before = (config.pooled_sources.index(source) * layout.num_slots + rows.slot[sequence]) * ring_rows
        first = rows.valid & (position == start)
        # The last position of the step that takes the place of the pair before its first, where that is read.
        successor = start - 1 + (end - start) // ring_rows * ring_rows
        successor = jnp.where((start % 2 == 1) & (successor >= start), successor, -1)
        kept = rows.valid & (position >= end - ring_rows) & (position != successor)
        columns[OWN] = jnp.where(kept, before + position % ring_rows, -1)
        columns[HISTORY] = jnp.where(first & emits, before + (position - 1) % ring_rows, -1)
        columns[LATE] = jnp.where(first & (successor >= 0), rows.first_row[sequence] + successor - start, -1)
    return jnp.stack(columns, axis=1)


def _plan(rows: Rows, layout: CacheLayout, source: int) -> tuple[Array, tuple[Array, Array]]:
    """`entry_plan`, and the rotation of the first token of every row's group."""
    ratio = layout.config.kv_source_ratios[source]
    return entry_plan(rows, layout, source), rotation(layout.config, True, rows.position // ratio * ratio)


def store_entries(
    pool: Array,
    ring: Array,
    source: int,
    gate: Array | None,
    latent: Array,
    norm_weight: Array,
    rows: Rows,
    layout: CacheLayout,
    dtype: jnp.dtype,
    *,
    tuning: Tuning,
) -> tuple[Array, Array, Array]:
    """`api.store_entries` for bf16 latents of a ratio of 1, and fp32 pairs of a ratio of 2."""
    ratio = layout.config.kv_source_ratios[source]
    made = rows.num_tiles * -(-rows.tile // ratio)
    plan, angles = _plan(rows, layout, source)
    options: dict[str, Any] = {"made": made, "source": source, "eps": layout.config.rms_norm_eps, "tuning": tuning}
    if gate is None:
        pool, out = _store_latents(pool, latent, norm_weight, plan, *angles, **options)
        return pool, ring, out
    return _store_pooled(pool, ring, gate, latent, norm_weight, plan, *angles, **options)


OPTIONS = ("made", "source", "eps", "tuning")


@partial(jax.jit, static_argnames=OPTIONS)
def _store_latents(
    pool: Array,
    latent: Array,
    norm_weight: Array,
    plan: Array,
    cos: Array,
    sin: Array,
    *,
    made: int,
    source: int,
    eps: float,
    tuning: Tuning,
) -> tuple[Array, Array]:
    def body(m: Any, memory: list[Any], row: Any) -> None:
        plan, x, weight, cos, sin, pool, out = memory
        words, weights = load_bf16(m, x, row, HEAD), load_bf16(m, weight, m.integer(source), HEAD)
        angles = [load_angles(m, memory, row, HEAD) for memory in (cos, sin)]
        todo = plan.row(row, COLUMNS)
        _finish(
            m,
            pool,
            out,
            todo.load(m.integer(TARGET)),
            todo.load(m.integer(ENTRY)),
            unpacked(m, words),
            weights,
            angles,
            eps,
        )

    inputs, out_type = (plan, latent, norm_weight, cos, sin), [jax.ShapeDtypeStruct((made, HEAD), jnp.bfloat16)]
    (out,), (pool,) = _launch(body, "latents", len(latent), tuning, inputs, (pool,), out_type)
    return pool, out


@partial(jax.jit, static_argnames=OPTIONS)
def _store_pooled(
    pool: Array,
    ring: Array,
    gate: Array,
    latent: Array,
    norm_weight: Array,
    plan: Array,
    cos: Array,
    sin: Array,
    *,
    made: int,
    source: int,
    eps: float,
    tuning: Tuning,
) -> tuple[Array, Array, Array]:
    def body(m: Any, memory: list[Any], row: Any) -> None:
        plan, gate, latent, weight, cos, sin, pool, ring, out = memory
        todo = plan.row(row, COLUMNS)
        target, own, history, late = todo.load4(m.integer(0))
        entry = todo.load(m.integer(ENTRY))

        def pair(row: Any) -> list[Any]:
            return [load_fp32(m, part.row(row, HEAD)) for part in (gate, latent)]

        def keep(record: Any, pair: list[Any]) -> None:
            for i, values in enumerate(pair):
                place = ring.row(record * 2 + i, HEAD)
                for part in range(4):
                    at = fp32_index(m, part // 2, part % 2)
                    m.store_elements(place, at, values[4 * part : 4 * part + 4])

        mine = pair(row)
        # Where there is no group they are read for nothing: behind a branch the stores above it would be waited for.
        old, before = history >= 0, (row - 1).at_least(0)
        earlier = [
            load_fp32(m, m.either(old, ring.row(history.at_least(0) * 2 + i, HEAD), part.row(before, HEAD)))
            for i, part in enumerate((gate, latent))
        ]
        weights = load_bf16(m, weight, m.integer(source), HEAD)
        angles = [load_angles(m, memory, row, HEAD) for memory in (cos, sin)]
        with m.when(own >= 0):
            keep(own, mine)
        with m.when(entry >= 0):
            x = unpacked(m, rounded(m, pooled(m, *zip(earlier, mine, strict=True))))
            _finish(m, pool, out, target, entry, x, weights, angles, eps)
        with m.when(late >= 0):
            keep(history, pair(late))

    inputs = (plan, gate, latent, norm_weight, cos, sin)
    out_type = [jax.ShapeDtypeStruct((made, HEAD), jnp.bfloat16)]
    (out,), (pool, ring) = _launch(body, "pooled", len(latent), tuning, inputs, (pool, ring), out_type)
    return pool, ring, out


def _finish(
    m: Any,
    pool: Any,
    out: Any,
    target: Any,
    entry: Any,
    x: list[Any],
    weights: list[Any],
    angles: list[Any],
    eps: float,
) -> None:
    """Norms a latent, hands it on as row `entry`, and stores it rotated as record `target`."""
    with m.when(entry >= 0):
        words = normed(m, x, unpacked(m, weights), HEAD, eps)
        place = out.row(entry, HEAD // 2)
        for run in range(2):
            m.store_elements(place, (m.thread() & 31) * 4 + 128 * run, words[4 * run : 4 * run + 4])
        with m.when(target >= 0):
            store_entry_record(m, pool, target, rotated(m, words, HEAD, *angles))


def store_keys(
    pool: Array,
    source: int,
    key: Array,
    norm_weight: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    tuning: Tuning,
) -> Array:
    """`api.store_keys` for bf16 [N, 128]."""
    plan, angles = _plan(rows, layout, source)
    return _store_keys(
        pool, key, norm_weight, plan, *angles, source=source, eps=layout.config.rms_norm_eps, tuning=tuning
    )


@partial(jax.jit, static_argnames=("source", "eps", "tuning"))
def _store_keys(
    pool: Array,
    key: Array,
    norm_weight: Array,
    plan: Array,
    cos: Array,
    sin: Array,
    *,
    source: int,
    eps: float,
    tuning: Tuning,
) -> Array:
    def body(m: Any, memory: list[Any], row: Any) -> None:
        plan, x, weight, cos, sin, pool = memory
        weights = load_bf16(m, weight, m.integer(source), KEY)
        angles = [load_angles(m, memory, row, KEY) for memory in (cos, sin)]
        todo = plan.row(row, COLUMNS)
        target, entry = todo.load(m.integer(TARGET)), todo.load(m.integer(ENTRY))
        with m.when(target >= 0):
            words = normed(m, unpacked(m, load_bf16(m, x, entry, KEY)), unpacked(m, weights), KEY, eps)
            store_key_record(m, pool, target, rotated(m, words, KEY, *angles))

    return _launch(body, "keys", len(plan), tuning, (plan, key, norm_weight, cos, sin), (pool,))[1][0]
