"""One hyper-connection site on Hopper in two launches (numerics 10; DeepInfer's `site` kernel without the fp8 cast).

Roofline: a row reads y and its streams and writes the streams and the sublayer's input, (1 + hc + hc + 1) D bf16, and
every launch reads fn, (2 + hc) hc hc D fp32. 256 rows of 4 x 5120 are 28 MB: 7.3 us at 4.3 TB/s. The products with fn,
0.25 GFLOP, are nothing to the tensor cores, but a CTA for a block of rows alone would read all 2 MB of fn again.

1. `_expand`: a CTA has 64 rows a warpgroup and some channels of all streams. It expands, stores the new streams,
   multiplies them by its part of fn while they are in registers, and collapses them. Streams are bf16, so they are
   exact operands; fn is split into three bf16 that add up to it, so that products are those of fp32. What a row needs
   of all its channels is left in `sums`: products and two sums of squares a row and CTA.
2. `_finish`: adds the sums up, makes pre, post and comb of them (one warp a row: comb's rows across its lanes, in
   registers for all iterations), and norms the collapsed rows.

The second launch starts while the first ends (programmatic dependent launch) and waits for its memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hyper_connections.config import Tuning
from kernels_pallas.mosaic import stably_named

HC = 4
MIXES = (2 + HC) * HC
ROWS = 64  # of a warpgroup: the M of wgmma
PARTS = 3  # bf16 numbers that add up to one fp32
GROUPS = 8  # of HC sums: HC of comb, pre, post, squares, and one unused that makes 128 bytes

_WGMMA_ROWS = plgpu.Layout.WGMMA.reduce(1)
# fn [streams, mixes, channels]: a warp has a stream, its lanes 8 mixes x 4 times 2 channels. Not 4: the barrier of XLA
# (optimization_barrier, JAX 0.11.2) permutes vectors of more than one register.
_FN = plgpu.Layout.TILED(
    Tiling(((HC, 8, 8), (1, 1, 2))), warp_dims=(-6,), lane_dims=(-5, -4), vector_dim=-1, _check_canonical=False
)
# sums [rows, CTAs, groups, HC]: a warp has a row, its lanes 8 CTAs x 4 groups.
_SUMS = plgpu.Layout.TILED(
    Tiling(((4, 8, HC, HC), (1, 1, 1, HC))), warp_dims=(-8,), lane_dims=(-7, -6), vector_dim=-1, _check_canonical=False
)
# [rows, HC, HC]: a warp has a row, every lane of it all: sums over either axis need no other lane.
_OWN = plgpu.Layout.TILED(
    Tiling(((4, HC, HC), (1, 1, HC))),
    warp_dims=(-6,),
    lane_dims=(Replicated(32),),
    vector_dim=-1,
    _check_canonical=False,
)
FINISH_ROWS = 4


def _compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,  # threads read what they wrote themselves, or after commit_smem
    )


def _expand_body(
    layer_ref,
    y,
    streams,
    post,
    comb,
    pre,
    fn,
    out,
    collapsed,
    sums,
    y_smem,
    x_smem,
    parts,
    post_smem,
    comb_smem,
    pre_smem,
    x_ready,
    rows_ready,
    parts_ready,
    *,
    tuning: Tuning,
    dim: int,
    overlap: bool,
):  # type: ignore[no-untyped-def]
    groups, chunks = tuning.warpgroups, tuning.chunks
    wg = lax.axis_index("wg")
    split = lax.axis_index("splits")
    rows = pl.ds((lax.axis_index("rows") * groups + wg) * ROWS, ROWS)
    # A CTA has a chunk of each width, not all in a row: a tiled copy must start at a multiple of its width.
    splits = dim // tuning.channels
    starts = [splits * sum(chunks[:c]) + split * chunks[c] for c in range(len(chunks))]
    if overlap:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    layer = layer_ref[0]
    for c, (start, chunk) in enumerate(zip(starts, chunks, strict=True)):
        plgpu.copy_gmem_to_smem(y.at[rows, pl.ds(start, chunk)], y_smem[c].at[wg], x_ready.at[wg, c])
        for j in range(HC):
            part = streams.at[rows, pl.ds(j * dim + start, chunk)]
            plgpu.copy_gmem_to_smem(part, x_smem[c].at[wg, j], x_ready.at[wg, c])
    plgpu.copy_gmem_to_smem(post.at[rows], post_smem.at[wg], rows_ready.at[wg])
    plgpu.copy_gmem_to_smem(comb.at[rows], comb_smem.at[wg], rows_ready.at[wg])
    plgpu.copy_gmem_to_smem(pre.at[rows], pre_smem.at[wg], rows_ready.at[wg])

    # fn in bf16 parts, while the streams are on their way.

    def split_fn(c: int) -> None:
        piece = fn.at[layer, :, :, pl.ds(starts[c], chunks[c])]
        rest = plgpu.load(piece.transpose((1, 0, 2)), layout=_FN, optimized=False)
        for p in range(PARTS):
            part = _packed(rest)
            parts[c][p] = part
            if p < PARTS - 1:
                rest -= part.astype(jnp.float32)

    for c in range(len(chunks)):
        pl.when(wg == c % groups)(partial(split_fn, c))
    plgpu.commit_smem()
    if groups > 1:
        plgpu.barrier_arrive(parts_ready)
        plgpu.barrier_wait(parts_ready)

    plgpu.barrier_wait(rows_ready.at[wg])
    column = partial(plgpu.load, layout=_WGMMA_ROWS, optimized=False)
    post_rows = [column(post_smem.at[wg, :, k]) for k in range(HC)]
    pre_rows = [column(pre_smem.at[wg, :, k]) for k in range(HC)]
    comb_rows = [[column(comb_smem.at[wg, :, j * HC + k]) for k in range(HC)] for j in range(HC)]

    def scope(products) -> None:  # type: ignore[no-untyped-def]
        squares = jnp.float32(0)
        mean_squares = jnp.float32(0)
        for c, (start, chunk) in enumerate(zip(starts, chunks, strict=True)):

            def wide(row: Array, chunk: int = chunk) -> Array:
                return lax.broadcast_in_dim(row, (ROWS, chunk), (0,))

            plgpu.barrier_wait(x_ready.at[wg, c])
            y_now = y_smem[c][wg].astype(jnp.float32)
            x_now = [x_smem[c][wg, j].astype(jnp.float32) for j in range(HC)]
            square = mean = jnp.float32(0)
            for k in range(HC):
                new = wide(post_rows[k]) * y_now
                for j in range(HC):
                    new += wide(comb_rows[j][k]) * x_now[j]
                new = _packed(new)
                x_smem[c][wg, k] = new
                new = new.astype(jnp.float32)
                square += new * new
                mean += wide(pre_rows[k]) * new
            mean = _packed(mean)
            y_smem[c][wg] = mean
            mean = mean.astype(jnp.float32)
            squares += jnp.sum(square, axis=1)
            mean_squares += jnp.sum(mean * mean, axis=1)
            plgpu.commit_smem()
            for k in range(HC):
                plgpu.copy_smem_to_gmem(x_smem[c].at[wg, k], out.at[rows, pl.ds(k * dim + start, chunk)])
                for p in range(PARTS):
                    plgpu.wgmma(products, x_smem[c].at[wg, k], parts[c].at[p, k].transpose((1, 0)))
            plgpu.copy_smem_to_gmem(y_smem[c].at[wg], collapsed.at[rows, pl.ds(start, chunk)])
        done = products[...]
        sums[rows, split, pl.ds(0, HC * HC)] = done[:, 2 * HC :]
        sums[rows, split, pl.ds(HC * HC, 2 * HC)] = done[:, : 2 * HC]
        sums[rows, split, MIXES] = squares
        sums[rows, split, MIXES + 1] = mean_squares

    pl.run_scoped(scope, plgpu.ACC((ROWS, MIXES), jnp.float32))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _packed(x: Array) -> Array:
    """x in bf16, two to a register. The barrier keeps the compiler from converting them singly, at an eighth of the
    rate, where they are read as fp32 again."""
    return lax.optimization_barrier(x.astype(jnp.bfloat16))


def _expand(
    tuning: Tuning,
    layer: Array,
    y: Array,
    streams: Array,
    post: Array,
    comb: Array,
    pre: Array,
    fn: Array,
    *,
    overlap: bool,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """streams' [T, HC * D], collapsed [T, D] and sums fp32 [T rounded up, D / channels, GROUPS * HC]."""
    total, dim = y.shape
    groups, chunks, splits = tuning.warpgroups, tuning.chunks, dim // tuning.channels
    aligned = all(splits * sum(chunks[:c]) % chunk == 0 for c, chunk in enumerate(chunks))
    if dim % tuning.channels or splits % 8 or not aligned:
        raise ValueError(f"{tuning} cannot split hidden size {dim} evenly over CTAs")
    blocks = -(-total // (ROWS * groups))

    def tiles(*shape: int) -> Any:
        chunk = shape[-1]
        # mypy takes them for abstract: they leave a method empty.
        tiling: Any = plgpu.TilingTransform((8, chunk))  # type: ignore[abstract]
        swizzle: Any = plgpu.SwizzleTransform(2 * chunk)  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzle))

    body = partial(_expand_body, tuning=tuning, dim=dim, overlap=overlap)
    run = plgpu.kernel(
        body if interpret else stably_named(body),
        out_type=(
            jax.ShapeDtypeStruct(streams.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(y.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((blocks * groups * ROWS, splits, GROUPS * HC), jnp.float32),
        ),
        grid=(blocks, splits),
        grid_names=("rows", "splits"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=(
            [tiles(groups, ROWS, chunk) for chunk in tuning.chunks],
            [tiles(groups, HC, ROWS, chunk) for chunk in tuning.chunks],
            [tiles(PARTS, HC, MIXES, chunk) for chunk in tuning.chunks],
            plgpu.SMEM((groups, ROWS, HC), jnp.float32),
            plgpu.SMEM((groups, ROWS, HC * HC), jnp.float32),
            plgpu.SMEM((groups, ROWS, HC), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + HC, num_barriers=(groups, len(tuning.chunks))),
            plgpu.Barrier(num_arrivals=3, num_barriers=groups),
            plgpu.Barrier(num_arrivals=groups),
        ),
        compiler_params=_compiler_params(),
        kernel_name="hyper_connections_expand",
        interpret=interpret,
    )
    return run(layer, y, streams, post, comb, pre, fn.reshape(-1, MIXES, HC, dim))


def _finish_body(
    layer_ref,
    sums,
    collapsed,
    base,
    scale,
    norm_weight,
    normed,
    pre_out,
    post_out,
    comb_out,
    sums_smem,
    sums_ready,
    *,
    norm_groups: int,
    dim: int,
    iterations: int,
    eps: float,
    rms_eps: float,
    overlap: bool,
):  # type: ignore[no-untyped-def]
    wg = lax.axis_index("wg")
    first = lax.axis_index("rows") * FINISH_ROWS
    layer = layer_ref[0]
    load = partial(plgpu.load, optimized=False)

    def wide(v: Array, shape: tuple[int, ...], *dims: int) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(v, shape, dims), _OWN if len(shape) == 3 else _OWN.reduce(1))

    @pl.when(wg == 0)
    def _():
        rows, gate, matrix = pl.ds(first, FINISH_ROWS), (FINISH_ROWS, HC), (FINISH_ROWS, HC, HC)
        # base and scale are in the order of fn: pre, post, comb.
        gate_base = [wide(load(base.at[layer, i], layout=_OWN.reduce((0, 1))), gate, 1) for i in range(2)]
        comb_base = wide(load(base.at[layer, pl.ds(2, HC)], layout=_OWN.reduce(0)), matrix, 1, 2)
        scales = [scale[layer, i] for i in range(3)]
        if overlap:
            plgpu.griddepcontrol_wait()
        for half in (pl.ds(0, HC), pl.ds(HC, HC)):
            sums_smem[:, half] = jnp.sum(load(sums.at[rows, :, half], layout=_SUMS), axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(sums_ready)

        square = load(sums_smem.at[:, HC + 2, 0], layout=_OWN.reduce((1, 2)))
        factor = 1.0 / jnp.sqrt(square * (1 / (HC * dim)) + rms_eps)
        m = load(sums_smem.at[:, pl.ds(0, HC)], layout=_OWN)
        m = m * wide(factor, matrix, 0) * scales[2] + comb_base
        m = jnp.exp(m - wide(jnp.max(m, axis=2), matrix, 0, 1))
        m = m * wide(1.0 / jnp.sum(m, axis=2), matrix, 0, 1) + eps
        m = m * wide(1.0 / (jnp.sum(m, axis=1) + eps), matrix, 0, 2)

        def step(_: Array, m: Array) -> Array:
            m = m * wide(1.0 / (jnp.sum(m, axis=2) + eps), matrix, 0, 1)
            return m * wide(1.0 / (jnp.sum(m, axis=1) + eps), matrix, 0, 2)

        comb_out[rows] = lax.fori_loop(0, iterations - 1, step, m)
        for i, result in enumerate((pre_out, post_out)):
            z = load(sums_smem.at[:, HC + i], layout=_OWN.reduce(1)) * wide(factor, gate, 0) * scales[i]
            sigmoid = 1.0 / (1.0 + jnp.exp(-(z + gate_base[i])))
            result[rows] = 2.0 * sigmoid if i else sigmoid + eps

    @pl.when(wg > 0)
    def _():
        layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=8)
        weight = plgpu.load(norm_weight.at[layer], layout=layout).astype(jnp.float32)
        if overlap:
            plgpu.griddepcontrol_wait()
        for i in range(FINISH_ROWS // norm_groups):
            row = (wg - 1) * (FINISH_ROWS // norm_groups) + i
            x = plgpu.load(collapsed.at[first + row], layout=layout).astype(jnp.float32)
            if i == 0:
                plgpu.barrier_wait(sums_ready)
            factor = 1.0 / jnp.sqrt(sums_smem[row, HC + 2, 1] * (1 / dim) + rms_eps)
            normed[first + row] = (weight * x * factor).astype(jnp.bfloat16)


def _finish(
    tuning: Tuning,
    layer: Array,
    sums: Array,
    collapsed: Array,
    base: Array,
    scale: Array,
    norm_weight: Array,
    *,
    iterations: int,
    eps: float,
    rms_eps: float,
    overlap: bool,
    interpret: Any,
) -> tuple[Array, Array, Array, Array]:
    """normed [T, D], pre' [T, HC], post' [T, HC], comb' [T, HC, HC] of what `_expand` left. T is a multiple of 4."""
    total, dim = collapsed.shape
    body = partial(
        _finish_body,
        norm_groups=tuning.norm_groups,
        dim=dim,
        iterations=iterations,
        eps=eps,
        rms_eps=rms_eps,
        overlap=overlap,
    )
    run = plgpu.kernel(
        body if interpret else stably_named(body),
        out_type=(
            jax.ShapeDtypeStruct(collapsed.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((total, HC), jnp.float32),
            jax.ShapeDtypeStruct((total, HC), jnp.float32),
            jax.ShapeDtypeStruct((total, HC, HC), jnp.float32),
        ),
        grid=(total // FINISH_ROWS,),
        grid_names=("rows",),
        num_threads=1 + tuning.norm_groups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((FINISH_ROWS, GROUPS, HC), jnp.float32), plgpu.Barrier()),
        compiler_params=_compiler_params(),
        kernel_name="hyper_connections_finish",
        interpret=interpret,
    )
    sums = sums.reshape(*sums.shape[:2], GROUPS, HC)
    return run(layer, sums, collapsed, base.reshape(-1, MIXES // HC, HC), scale, norm_weight)


# jit: calls with the same shapes share one compiled kernel.
@partial(jax.jit, static_argnames=("tuning", "iterations", "eps", "rms_eps", "overlap", "interpret"))
def fused_site(
    layer: Array,
    y: Array,
    streams: Array,
    post: Array,
    comb: Array,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    norm_weight: Array,
    *,
    tuning: Tuning,
    iterations: int,
    eps: float,
    rms_eps: float,
    overlap: bool = True,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """`api.fused_site` for bf16 streams. overlap: start launches early; interpret: parameters of the interpreter."""
    total, _, dim = streams.shape
    padding = -total % 8  # rows of a tile of shared memory
    if padding:
        y, streams, post, comb, pre = (
            jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1)) for a in (y, streams, post, comb, pre)
        )
    rows = total + padding
    # Mosaic GPU refuses operands that do not begin at a multiple of 256 bytes, and XLA gives it slices in place: the
    # number of a layer that a scan takes out of its numbers. What is computed has a buffer of its own.
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, len(fn) - 1).reshape(1)
    flat = streams.reshape(rows, HC * dim), post, comb.reshape(rows, HC * HC), pre
    new, collapsed, sums = _expand(tuning, layer, y, *flat, fn, overlap=overlap, interpret=interpret)
    rest = _finish(
        tuning,
        layer,
        sums,
        collapsed,
        base,
        scale,
        norm_weight,
        iterations=iterations,
        eps=eps,
        rms_eps=rms_eps,
        overlap=overlap,
        interpret=interpret,
    )
    outputs = (new.reshape(rows, HC, dim), *rest)
    return tuple(a[:total] for a in outputs) if padding else outputs  # type: ignore[return-value]
