"""A row's output on Hopper: its channels back in order and rotated; and splits of a row joined into it.

Splits of a row are exact together: with peaks p and totals s of its splits, in powers of two, and sums v of their
values, the row is sum 2^(p - max p) v / sum 2^(p - max p) s. All of it is fp32, rounded once, as without splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import stably_named
from kernels_pallas.sparse_attention import lanes as lane_code

HEADS, CHANNELS = 64, 512
SHRINK = 40  # expanded keys, and so sums of values, are 2^-40 of what they stand for
TILES = 4  # of 64 columns, over which the chunks of half a row's channels are dealt
PART = 64  # channels of a row that a block joins: a row's 131,072 bytes a split are read by 8 blocks


def store_output(lanes: Any, refs: Sequence[Any], scalars: Sequence[Any], _: Any, columns: Sequence[Any]) -> None:
    """Some channels of a row's output, back in their order, the last 64 of all rotated by minus the position.

    columns: of each of the four tiles of 64 columns that half the channels are in, the same ones, those of two tiles or
    of one in each accumulator. They are the channels from `part` times their number on.
    """
    (cos, sin, output), (row, part) = refs, scalars
    together = TILES // len(columns)
    chunks = columns[0].shape[1] // (8 * together)  # of a tile
    width = TILES * 8 * chunks
    lane = lanes.thread & 31
    quarter, odd, upper = lane & 3, lane & 1, lane & 2
    odd, upper = lanes.negative(odd << 31), lanes.negative(upper << 30)
    for column in range(chunks):
        rotated = column >= chunks - 2  # channels 448.. are chunks 4 j + c of j = 14, 15
        if rotated:
            here = lanes.less(part, CHANNELS // width - 1)
            at = (quarter + 4 * (column - (chunks - 2))) * 16
            cosine = [lanes.where(here, 0x3F800000, x) for x in lanes.load(cos, row, at, 4)]
            sine = [lanes.where(here, 0, x) for x in lanes.load(sin, row, at, 4)]
        for below in range(2):
            # Thread q of four holds word q of four chunks and wants the four words of chunk q: a 4 x 4 transpose.
            w = [
                lanes.accumulated(columns[c // together], below, chunks * (c % together) + column) for c in range(TILES)
            ]
            for distance, side in ((1, odd), (2, upper)):
                for low in (0, 1) if distance == 2 else (0, 2):
                    high = low + distance
                    mine = lanes.where(side, w[low], w[high])
                    other = lanes.exchange(mine, distance)
                    w[low], w[high] = lanes.where(side, other, w[low]), lanes.where(side, w[high], other)
            pairs = [lanes.permute(x, y, s) for s in (0x5410, 0x7632) for x, y in ((w[0], w[1]), (w[2], w[3]))]
            if rotated:
                pairs = [lanes.rotate(p, x, y) for p, x, y in zip(pairs, cosine, sine, strict=True)]
            head = (lanes.thread >> 5) * 16 + (lane >> 2) + 8 * below
            lanes.store_output(output, row, part, head, quarter + 4 * column, pairs, width)


def join(sums: Array, peaks: Array, cos: Array, sin: Array, *, interpret: Any = None) -> Array:
    """[T, 64, 512] bfloat16 of splits: the same number of each row, those of a row in a row.

    sums fp32 [T splits, 64, 512], 2^-SHRINK times the weighted values, in the order of the keys' columns; peaks fp32
    [T splits, 2, 64]: the largest logit, in powers of two, and the sum of weights relative to it, of the sink too in
    one split; cos, sin fp32 [T, 32]. A split without keys has sums of 0 and any peak that is not above the row's.
    """
    rows = len(cos)
    splits = len(sums) // rows
    simulated = interpret is not None
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    columns = PART // TILES  # of a tile

    def body(sums_ref: Any, peaks_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        if not simulated:
            plgpu.griddepcontrol_wait()
        parts_of_half = CHANNELS // 2 // PART
        first = lax.div(part, parts_of_half) * (CHANNELS // 2) + lax.rem(part, parts_of_half) * columns
        tile = CHANNELS // 2 // TILES

        def stored(split: int, which: int) -> Array:
            return plgpu.load(peaks_ref.at[row * splits + split, which], layout=row_layout, optimized=False)

        peak = [stored(split, 0) for split in range(splits)]
        highest = peak[0]
        for other in peak[1:]:
            highest = jnp.maximum(highest, other)
        weight = [jnp.exp2(x - highest) for x in peak]
        norm = 2.0**SHRINK / sum(w * stored(split, 1) for split, w in enumerate(weight))

        def joined(c: int) -> Array:
            total: Any = 0.0
            for split, w in enumerate(weight):
                part = sums_ref.at[row * splits + split, :, pl.ds(first + c * tile, columns)]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
                total += values * lax.broadcast_in_dim(w * norm, values.shape, [0])
            return total

        results = [joined(c) for c in range(TILES)]
        refs = (cos_ref, sin_ref, out_ref)
        lane_code.call(store_output, refs, scalars=(row, part), accumulators=results, interpret=simulated)

    kernel = plgpu.kernel(
        body if interpret else stably_named(body),
        out_type=jax.ShapeDtypeStruct((rows, HEADS, CHANNELS), jnp.bfloat16),
        grid=(rows, CHANNELS // PART),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="sparse_attention_join",
        interpret=interpret,
    )
    return kernel(sums, peaks, cos, sin)
