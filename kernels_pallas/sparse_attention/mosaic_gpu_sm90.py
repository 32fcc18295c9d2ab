"""Window and selected entries on Hopper: gathers 528- and 288-byte records, expands them, attends (numerics 6.3-6.5).

One block of threads takes a row: its 64 heads are the 64 rows of a WGMMA. Keys come in tiles of 64:

    producer    gathers the records of a tile into registers, expands them to bfloat16 and writes them to shared memory
    scores      query times keys, running softmax, probabilities and rescaling factors to shared memory
    values (2)  probabilities times the same tile as values, each for one half of the 512 channels

so a tile is expanded once and serves as key and value. Two tiles are in flight. Expansion writes channels in an order
that suits it: two nibbles 16 bits apart become a register, and the four 16-byte pieces of a thread go to four tiles of
64 columns. The query is put into that order on its way in, the output is put back on its way out, where the inverse
rotation is applied too. Expanded keys are 2^-40 times their value, which keeps the exponent arithmetic inside bfloat16;
both products undo it.

Where rows are too few for all multiprocessors, blocks of threads share a row: each takes some of its tiles and leaves
the sum of its values, not yet divided, with its peak and total. `output.join`, a second launch, puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas.mosaic import stably_named
from kernels_pallas.sparse_attention import lanes as lane_code
from kernels_pallas.sparse_attention.config import SparseAttentionConfig
from kernels_pallas.sparse_attention.output import CHANNELS, HEADS, SHRINK, join, store_output

KEYS = 64  # of a tile
SLOTS = 2  # tiles in flight
UNIT = (32, 9)  # words of values, and of scales and a mask, that a thread reads at once: 32 window keys or 64 entries
MATRICES = lane_code.MATRICES  # of 128 columns hold 512 channels
LOG2E = math.log2(math.e)
# Mosaic GPU refuses operands that do not begin at a multiple of 256 bytes, and XLA gives it slices in place. So stacks
# come whole, and the number of the layer, which is a slice where layers are scanned, comes so often as to fill 256.
LAYER_COPIES = 64
NONE = np.uint32(0xFFFFFFFF)
SIGNS = np.uint32(0x80008000)  # of a pair of bfloat16


def power(exponent: int) -> int:
    """2^exponent as a pair of bfloat16."""
    return ((exponent + 127) << 7) * 0x10001


# --- what a thread does -----------------------------------------------------------------------------------------------
# Of 64 chunks of 8 channels, chunk 4 j + c (j 0..15, c 0..3) is number j % 8 in tile 4 (j / 8) + c of 64 columns.
# Inside a chunk channels lie in the order 0 4 1 5 2 6 3 7.


def fetch_entries(lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], keys: int) -> list[list[Any]]:
    """64 entries of a row of `keys` from key `first` on, 32 to a word; every warp holds them all."""
    (index,), (row, first) = refs, scalars
    numbers = [first + (lanes.thread & 31) + 32 * i for i in range(2)]
    numbers = [lanes.where(lanes.less(key, keys), key, keys - 1) for key in numbers]
    return [[lanes.load(index, row, key * 4, 1)[0] for key in numbers]]


def note(lanes: Any, entry: Any, mask: Any, step: int) -> tuple[Any, Any]:
    """An entry that can be read in the place of one that may be none, and the mask with a bit for one that exists.

    What is read is looked at only in `expand_...`, a unit later: here it would be waited for.
    """
    nothing = lanes.negative(entry)
    return lanes.where(nothing, 0, entry), mask | lanes.where(nothing, 0, 1 << step)


def kept(lanes: Any, factor: Any, mask: Any, step: int) -> Any:
    """The factor of a key that exists, else 0."""
    return lanes.where(lanes.less((mask >> step) & 1, 1), 0, factor)


def gather_compressed(lanes: Any, refs: Sequence[Any], _: Any, words: Sequence[Any], *__: Any) -> list[list[Any]]:
    """Reads the entries' records: 16 threads take one, each 16 bytes of nibbles and two scales of the 288."""
    (pool,), (entries,) = refs, words
    piece, values, scales, mask = lanes.thread & 15, [], [], lanes.thread & 0
    for step in range(8):
        entry = lanes.pick(entries[step // 4], (lanes.thread >> 4) + 8 * (step % 4))
        entry, mask = note(lanes, entry, mask, step)
        values += lanes.load(pool, entry, piece * 16, 4)
        scales.append(lanes.load_part(pool, entry, piece * 2 + CHANNELS // 2, 16))
    return [values, [*scales, mask]]


def expand_compressed(lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], words: Sequence[Any], _: Any) -> None:
    """e2m1 times e4m3: a nibble's bits in a bfloat16 are its value times 2^-126, a scale's are times 2^-120."""
    (tile,), (matrix,), (values, scales) = refs, scalars, words
    piece, mask = lanes.thread & 15, scales.pop()
    for step, both in enumerate(scales):
        both, row = kept(lanes, both, mask, step), (lanes.thread >> 4) + 8 * step
        at = lanes.matrix_address(tile, matrix, row, (piece >> 3) * 4, piece & 7)
        bytes_ = (lanes.permute(both, 0, 0x4040), lanes.permute(both, 0, 0x4141))
        factors = [lanes.times(lanes.times(b << 4, power(120)), power(126 - SHRINK)) for b in bytes_]
        for c, word in enumerate(values[4 * step : 4 * step + 4]):
            pairs = []
            for n in range(4):
                bits = word << 6 - 4 * n if n < 2 else word >> 4 * n - 6
                sign = word << 12 - 4 * n if n < 3 else word
                pairs.append(lanes.times((bits & 0x01C001C0) | (sign & SIGNS), factors[c // 2]))
            lanes.store_matrix(tile, at, c, pairs)


def gather_window(
    lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], words: Sequence[Any], ring_records: int
) -> list[list[Any]]:
    """Reads the records of 32 entries: 32 threads take one, each 16 bytes of values and a scale of the 528.

    The layer has `ring_records` records, behind `before` of other layers.
    """
    (window, *fresh), (before,), (entries,) = refs, scalars, words
    piece, half = lanes.thread & 15, (lanes.thread >> 4) & 1
    values, scales, mask = [], [], lanes.thread & 0
    own = lanes.where(lanes.negative(entries[0]), entries[0], entries[0] + before)
    for step in range(8):
        entry, mask = note(lanes, lanes.pick(own, (lanes.thread >> 5) + 4 * step), mask, step)
        source = window
        if fresh:  # entries after those of the layer are records of this step
            old = lanes.less(entry, before + ring_records)
            source = (old, window, fresh[0])
            entry = lanes.where(old, entry, entry + (before + ring_records) * NONE)
        values += lanes.load(source, entry, piece * 32 + half * 16, 4)
        scales.append(lanes.load_part(source, entry, piece + CHANNELS, 8))
    return [values, [*scales, mask]]


def expand_window(lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], words: Sequence[Any], _: Any) -> None:
    """e4m3 times ue8m0: a byte's bits in a bfloat16 are its value times 2^-120."""
    (tile,), (matrix, first), (values, scales) = refs, scalars, words
    piece, half, mask = lanes.thread & 15, (lanes.thread >> 4) & 1, scales.pop()
    for step, byte in enumerate(scales):
        exponent = byte + (120 - SHRINK)
        scale = lanes.where(lanes.less(exponent, 254), exponent, 254) * (0x10001 << 7)
        scale = kept(lanes, scale, mask, step)
        row = first + (lanes.thread >> 5) + 4 * step
        at = lanes.matrix_address(tile, matrix, row, (piece >> 3) * 4 + half * 2, piece & 7)
        for c in range(2):
            a, b = values[4 * step + 2 * c : 4 * step + 2 * c + 2]
            pairs = []
            for word in (lanes.permute(a, b, 0x5410), lanes.permute(a, b, 0x7632)):
                even = ((word << 4) & 0x07F007F0) | ((word << 8) & SIGNS)
                odd = ((word >> 4) & 0x07F007F0) | (word & SIGNS)
                pairs += [lanes.times(even, scale), lanes.times(odd, scale)]
            lanes.store_matrix(tile, at, c, pairs)


def load_query(lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], *_: Any) -> None:
    """A row's query [64, 512] into two matrices, in the order of the keys. A warp takes half a head at a time."""
    (query, matrices), (row,) = refs, scalars
    warp, c, j = lanes.thread >> 5, (lanes.thread >> 3) & 3, lanes.thread & 7
    for batch in range(4):  # of 8 loads in flight
        heads = [warp + 4 * (4 * batch + i) for i in range(4)]
        places = [(head, half) for head in heads for half in range(2)]
        loaded = [lanes.load(query, row * HEADS + h, j * 64 + c * 16 + 512 * half, 4) for h, half in places]
        for (head, half), (x, y, z, w) in zip(places, loaded, strict=True):
            at = lanes.matrix_address(matrices, 0, head, c + 4 * half, j)
            pairs = [lanes.permute(a, b, s) for a, b in ((x, z), (y, w)) for s in (0x5410, 0x7632)]
            lanes.store_matrix(matrices, at, 0, pairs)


def fetch_ahead(
    lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], window: int, keys: int, ring_records: int, records: bool
) -> None:
    """Half of a row's query and records into the L2 cache; keys of the index, the first `window` of the ring."""
    (query, index, rings, *others), (row, half, before) = refs, scalars
    lanes.prefetch(query, row * HEADS + half * 32 + (lanes.thread >> 2), (lanes.thread & 3) * 256, 256)
    if not records:
        return
    numbers = [lanes.thread + half * 128 + first for first in range(0, keys, 256)]
    numbers = [lanes.where(lanes.less(key, keys), key, keys - 1) for key in numbers]
    entries = [lanes.load(index, row, key * 4, 1)[0] for key in numbers]
    for key, entry in zip(numbers, entries, strict=True):
        near = lanes.less(key, window)
        own = lanes.less(lanes.where(near, entry, NONE), ring_records)
        lanes.prefetch(rings, entry + before, 0, 528, own)
        if others:
            lanes.prefetch(others[-1], entry, 0, 288, lanes.less(lanes.where(near, NONE, entry), 1 << 31))


# --- the kernel -------------------------------------------------------------------------------------------------------


def accumulate(product: Any, start: Sequence[Array], simulated: bool) -> Sequence[Array]:
    """`start` plus what product(*accumulators) adds to accumulators of that shape."""
    if not simulated:
        return pl.run_state(lambda refs: product(*refs))(tuple(plgpu.ACC.init(x) for x in start))

    def added(*refs: Any) -> list[Array]:
        product(*refs)
        return [ref[...] for ref in refs]

    kinds = [plgpu.ACC((x.shape[0], x.shape[1]), x.dtype) for x in start]
    return [x + y for x, y in zip(start, pl.run_scoped(added, *kinds), strict=True)]


def attend(
    query: Array,
    index: Array,
    tiles: Array,
    layer: Array,
    window: Array,
    fresh: Array | None,
    pool: Array | None,
    sink: Array,
    cos: Array,
    sin: Array,
    *,
    scale: float,
    window_tiles: int,
    config: SparseAttentionConfig,
    interpret: Any = None,
) -> Array:
    """[T, 64, 512] bfloat16.

    query [T, 64, 512] bfloat16; index int32 [T, n], n a multiple of 64: records of the layer in `window` and of `fresh`
    behind them in the first 64 `window_tiles` places, of the pool in the others, -1 = none; tiles int32 [T], how many
    tiles of a row are taken (0 as one, if it has no splits); layer int32 [LAYER_COPIES], all the same; window uint8
    [layers, ..., 528], fresh uint8 [rows, 528] or None, pool uint8 [..., 288] or None; sink fp32 [layers, 64]; cos, sin
    fp32 [T, 32].
    """
    rows, most_tiles = query.shape[0], index.shape[1] // KEYS
    splits = config.splits(rows, most_tiles)
    split = splits > 1
    # A block has one split and no second: nothing is fetched ahead, and where a row has fewer tiles it does nothing.
    blocks = rows * splits if split else min(config.blocks, rows)
    ring_records = math.prod(window.shape[1:-1])
    factor = scale * LOG2E * 2.0**SHRINK
    simulated = interpret is not None
    width = lane_code.MATRIX[1]
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    optional = [x for x in (fresh, pool) if x is not None]
    rotation = () if split else (cos, sin)
    inputs = (query, index, tiles, layer, window, *optional, sink, *rotation)

    def body(*refs: Any) -> None:
        outputs, scratch = refs[len(inputs) : -10], refs[-10:]
        query_ref, index_ref, tiles_ref, layer_ref, window_ref, *others = refs[: len(inputs)]
        optional_refs, (sink_ref, *rotation_refs) = others[: len(optional)], others[len(optional) :]
        q, k, p, alpha_ref, norm_ref, full, ready, free, normed, taken = scratch
        fresh_refs = optional_refs[:1] if fresh is not None else []
        pool_refs = optional_refs[-1:] if pool is not None else []
        block, group = lax.axis_index("block"), lax.axis_index("group")
        own_rows = (rows - block + blocks - 1) // blocks
        if split and not simulated:
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()  # of `join`, which waits for all that is written here

        def each_row(step: Any, start: Any) -> Any:
            """Runs step(i, row, begin, end, carry) for the rows of this block, or its part of one, and their tiles."""
            if split:
                # Shorter parts come first: a tile of the window is two units to read, one of entries is one.
                row, number = lax.div(block, splits), lax.rem(block, splits)
                begin, end = (lax.div((number + i) * most_tiles, splits) for i in range(2))
                end = jnp.maximum(jnp.minimum(end, tiles_ref[row]), begin)
                return step(jnp.int32(0), row, begin, end, start)

            def one(i: Array, carry: Any) -> Any:
                row = block + i * blocks
                # What is fetched ahead is the next row's.
                return step(i, row, 0, jnp.maximum(tiles_ref[row], 1), carry)

            return lax.fori_loop(0, own_rows, one, start)

        def drain(done: Array) -> None:
            """Sees the last tiles off: who waits for a barrier waits for all its phases."""
            for slot in range(SLOTS):

                @pl.when(done > slot)
                def _(slot: int = slot) -> None:
                    plgpu.barrier_wait(free.at[slot])

        def run(code: Any, *operands: Any, **options: Any) -> list[Array]:
            return lane_code.call(code, *operands, **options, interpret=simulated)

        @pl.when(group == 0)
        def _scores() -> None:
            plgpu.set_max_registers(config.registers[0], action="decrease")
            first = plgpu.load(sink_ref.at[layer_ref[0]], layout=row_layout, optimized=False) * LOG2E

            def one_row(i: Array, row: Array, begin: Any, end: Array, done: Array) -> Array:
                run(load_query, (query_ref, q), scalars=(row,))
                plgpu.commit_smem()

                def one_tile(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                    peak, total, done = carry
                    slot = lax.rem(done, SLOTS)
                    entry = plgpu.load(
                        index_ref.at[row, pl.ds(tile * KEYS, KEYS)], layout=column_layout, optimized=False
                    )
                    plgpu.barrier_wait(full.at[slot])

                    none = lax.shift_right_logical(done, 31)  # 0; else descriptors of q are kept, and spill

                    def product(acc: Any) -> Array:
                        for matrix in range(MATRICES):
                            plgpu.wgmma(acc, q.at[none + matrix], k.at[slot * MATRICES + matrix].transpose((1, 0)))
                        return acc[...]

                    products = pl.run_scoped(product, plgpu.ACC((HEADS, KEYS), jnp.float32))
                    exists = lax.broadcast_in_dim(entry >= 0, products.shape, [1])
                    products = jnp.where(exists, products, -jnp.inf)
                    higher = jnp.maximum(peak, products.max(axis=1) * factor)
                    alpha = jnp.exp2(peak - higher)
                    weight = jnp.exp2(products * factor - lax.broadcast_in_dim(higher, products.shape, [0]))
                    total = total * alpha + weight.sum(axis=1)

                    @pl.when(done >= SLOTS)
                    def _() -> None:
                        plgpu.barrier_wait(free.at[slot])

                    p[slot] = weight.astype(jnp.bfloat16)
                    alpha_ref[slot] = alpha
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready.at[slot])
                    return higher, total, done + 1

                # The sink's own weight, which counts in the first split alone. Peaks of all begin with the sink.
                own = jnp.where(begin == 0, 1.0, 0.0) if split else 1.0
                own = plgpu.layout_cast(jnp.full((HEADS,), own, jnp.float32), row_layout)
                peak, total, done = lax.fori_loop(begin, end, one_tile, (first, own, done))
                if split:
                    outputs[1][block, 0] = peak
                    outputs[1][block, 1] = total
                    return done

                @pl.when(i > 0)
                def _last_is_taken() -> None:
                    plgpu.barrier_wait(taken)

                norm_ref[...] = 2.0**SHRINK / total
                plgpu.commit_smem()
                plgpu.barrier_arrive(normed)
                return done

            drain(each_row(one_row, jnp.int32(0)))
            if split:
                return

            @pl.when(own_rows > 0)
            def _all_are_taken() -> None:
                plgpu.barrier_wait(taken)

        @pl.when((group == 1) | (group == 2))
        def _values() -> None:
            plgpu.set_max_registers(config.registers[1], action="increase")
            half = group - 1

            def ahead(lanes: Any, refs: Any, scalars: Any, *_: Any) -> None:
                fetch_ahead(
                    lanes, refs, scalars, window_tiles * KEYS, index.shape[1], ring_records, config.records_ahead
                )

            def one_row(_i: Array, row: Array, begin: Any, end: Array, done: Array) -> Array:
                if not split:

                    @pl.when(row + blocks < rows)
                    def _fetch() -> None:
                        before = layer_ref[0] * ring_records if config.records_ahead else 0
                        run(ahead, (query_ref, index_ref, window_ref, *pool_refs), scalars=(row + blocks, half, before))

                def one_tile(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                    left, right, done = carry
                    slot = lax.rem(done, SLOTS)
                    plgpu.barrier_wait(ready.at[slot])
                    alpha = lax.broadcast_in_dim(plgpu.load(alpha_ref.at[slot], layout=row_layout), left.shape, [0])

                    def product(*accumulators: Any) -> None:
                        for i, acc in enumerate(accumulators):
                            plgpu.wgmma(acc, p.at[slot], k.at[slot * MATRICES + 2 * half + i])

                    left, right = accumulate(product, (left * alpha, right * alpha), simulated)
                    plgpu.barrier_arrive(free.at[slot])
                    return left, right, done + 1

                zero = plgpu.layout_cast(jnp.zeros(lane_code.MATRIX, jnp.float32), plgpu.Layout.WGMMA)
                left, right, done = lax.fori_loop(begin, end, one_tile, (zero, zero, done))
                if split:
                    for i, sums in enumerate((left, right)):
                        outputs[0][block, :, pl.ds((2 * half + i) * width, width)] = sums
                    return done
                plgpu.barrier_wait(normed)
                norm = plgpu.load(norm_ref, layout=row_layout)
                plgpu.barrier_arrive(taken)
                norm = lax.broadcast_in_dim(norm, left.shape, [0])
                results = (left * norm, right * norm)
                run(store_output, (*rotation_refs, *outputs), scalars=(row, half), accumulators=results)
                return done

            each_row(one_row, jnp.int32(0))

        @pl.when(group == 3)
        def _producer() -> None:
            plgpu.set_max_registers(config.registers[2], action="decrease")
            before = layer_ref[0] * ring_records

            def entries_of(row: Array, unit: Array) -> Array:
                first = jnp.where(unit < 2 * window_tiles, unit * (KEYS // 2), (unit - window_tiles) * KEYS)
                return run(fetch, (index_ref,), scalars=(jnp.minimum(row, rows - 1), first), results=(2,))[0]

            def fetch(lanes: Any, refs: Any, scalars: Any, *_: Any) -> list[list[Any]]:
                return fetch_entries(lanes, refs, scalars, index.shape[1])

            def from_window(lanes: Any, refs: Any, scalars: Any, words: Any, _: Any) -> Any:
                return gather_window(lanes, refs, scalars, words, ring_records)

            def gather(unit: Array, entries: Array) -> list[Array]:
                refs = (window_ref, *fresh_refs)
                near = partial(run, from_window, refs, scalars=(before,), words=(entries,), results=UNIT)
                if not pool_refs:
                    return near()
                far = partial(run, gather_compressed, pool_refs, words=(entries,), results=UNIT)
                return lax.cond(unit < 2 * window_tiles, near, far)

            def first_unit(tile: Array) -> Array:
                return tile + jnp.minimum(tile, window_tiles)  # a tile of the window is two units

            def one_row(_: Array, row: Array, begin: Any, end: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                units = first_unit(end)

                def one_unit(unit: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                    """Reads the next unit's records and the entries of the one after it, then expands this one."""
                    done, entries, *read = carry
                    slot = lax.rem(done, SLOTS)
                    if split:  # nothing follows the last unit: its own words are passed on, and nobody uses them
                        following = lax.cond(unit + 1 < units, partial(gather, unit + 1, entries), lambda: read)
                        entries = entries_of(row, unit + 2)
                    else:
                        following = gather(jnp.where(unit + 1 < units, unit + 1, 0), entries)
                        later = unit + 2
                        inside = later < units
                        its_row = jnp.where(inside, row, row + blocks)
                        entries = entries_of(its_row, jnp.where(inside, later, later - units))
                    near = unit < 2 * window_tiles
                    part = jnp.where(near, lax.rem(unit, 2), 0)

                    @pl.when((part == 0) & (done >= SLOTS))
                    def _() -> None:
                        plgpu.barrier_wait(free.at[slot])

                    def expand_near() -> None:
                        run(expand_window, (k,), scalars=(slot * MATRICES, part * (KEYS // 2)), words=read)

                    def expand_far() -> None:
                        run(expand_compressed, (k,), scalars=(slot * MATRICES,), words=read)

                    if pool_refs:
                        lax.cond(near, expand_near, expand_far)
                    else:
                        expand_near()
                    last = (part == 1) | ~near

                    @pl.when(last)
                    def _() -> None:
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(full.at[slot])

                    return (done + last.astype(jnp.int32), entries, *following)

                if not split:
                    return lax.fori_loop(0, units, one_unit, carry)
                unit = first_unit(begin)
                carry = (zero, entries_of(row, unit + 1), *gather(unit, entries_of(row, unit)))
                return lax.fori_loop(unit, units, one_unit, carry)

            zero = jnp.int32(0)
            start: tuple[Array, ...] = ()
            if not split:
                start = (zero, entries_of(block, jnp.int32(1)), *gather(zero, entries_of(block, zero)))
            drain(each_row(one_row, start)[0])

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=lane_code.TILED)

    results: Any = jax.ShapeDtypeStruct(query.shape, query.dtype)
    if split:
        results = [jax.ShapeDtypeStruct((blocks, *shape), jnp.float32) for shape in ((HEADS, CHANNELS), (2, HEADS))]
    kernel = plgpu.kernel(
        body if interpret else stably_named(body),
        out_type=results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="group",
        scratch_types=[
            shared(MATRICES, *lane_code.MATRIX),  # query
            shared(SLOTS * MATRICES, *lane_code.MATRIX),  # keys, which are the values
            shared(SLOTS, HEADS, KEYS),  # probabilities
            plgpu.SMEM((SLOTS, HEADS), jnp.float32),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="sparse_attention",
        interpret=interpret,
    )
    if not split:
        return kernel(*inputs)
    sums, peaks = kernel(*inputs)
    return join(sums, peaks, cos, sin, interpret=interpret)


# --- the operation ----------------------------------------------------------------------------------------------------


def sparse_attention(
    layer: Array | int,
    query: Array,
    step_kv: Array,
    window: Array,
    pool: Array | None,
    selected: Array | None,
    sink: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    layout: CacheLayout,
    *,
    source: int,
    scale: float,
    config: SparseAttentionConfig,
    interpret: Any = None,
) -> Array:
    """See `api.sparse_attention`; `api.unsupported` says what it takes. Rows that are not valid come out as zeros.

    Where the keys of a row are is the same for all layers that share a selection, counted from the layer's first
    record: XLA moves `plan` out of their loop.
    """
    fresh = None if rows.decode else layout.formats.window.encode(step_kv)
    index, tiles = plan(rows, layout, selected, source, ring_slots=window.shape[1])
    return attend(
        query,
        index,
        tiles,
        jnp.full(LAYER_COPIES, layer, jnp.int32),
        window,
        fresh,
        pool,
        sink,
        *cos_sin,
        scale=scale,
        window_tiles=-(-layout.config.sliding_window // KEYS),
        config=config,
        interpret=interpret,
    )


def plan(
    rows: Rows, layout: CacheLayout, selected: Array | None, source: int, *, ring_slots: int
) -> tuple[Array, Array]:
    """(index [T, n], tiles [T]) of `attend`: where the keys of each row are, and how many tiles hold any."""
    window, ring_rows = layout.config.sliding_window, layout.config.window_ring
    sequence = rows.sequence[:, None]
    span = rows.position[:, None] - (window - 1) + jnp.arange(window, dtype=jnp.int32)
    near = rows.slot[sequence] * ring_rows + span % ring_rows
    if not rows.decode:  # rows of this step are not in the ring yet
        near = jnp.where(span >= rows.start[sequence], ring_slots * ring_rows + rows.row_of(span, sequence), near)
    parts = [jnp.where(span >= jnp.maximum(rows.window_start[sequence], 0), near, -1)]
    if selected is not None:
        entry = jnp.maximum(selected, 0)
        per_block = layout.entries_per_block[source]
        block = rows.block_table[sequence, entry // per_block]
        far = block * layout.rows_per_block + layout.source_offset[source] + entry % per_block
        parts.append(jnp.where(selected >= 0, far, -1))
    whole = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % KEYS)), constant_values=-1) for x in parts]
    index = jnp.where(rows.valid[:, None], jnp.concatenate(whole, axis=1), -1)
    last = jnp.max(jnp.where(index >= 0, jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32), 0), axis=1)
    return index, (last + KEYS - 1) // KEYS
