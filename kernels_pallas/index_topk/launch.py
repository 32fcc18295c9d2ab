"""Launches of the kernels of this folder: a body in the vocabulary of `lanes` on a grid of blocks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.index_topk import lanes
from kernels_pallas.mosaic import stably_named


def run(
    body: Any, name: str, out_type: Any, scratch: dict[str, int], blocks: int, threads: int, *arguments: Array
) -> Any:
    """Launches body(machine, addresses of arguments and outputs, addresses in shared memory) on a grid of blocks.

    scratch: bytes by name, laid out one after the other at multiples of 16. out_type: of the outputs, which it returns.
    """
    arrays = (*arguments, *out_type)
    places = placed(scratch)

    def kernel_body(*references: Any) -> None:
        def emit(_: Any, *refs: Any) -> None:
            memory = [lanes.global_memory(r, real=a.dtype == jnp.float32) for r, a in zip(refs, arrays)]
            start = lanes.shared_address(refs[-1])
            body(lanes.Lanes(threads), memory, {key: start + at for key, at in places.items()})

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(references))(emit)(*references)

    kernel = plgpu.kernel(
        stably_named(kernel_body),
        out_type=out_type,
        scratch_types=[plgpu.SMEM((places["end"],), jnp.uint8)],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
    )
    return kernel(*arguments)


def placed(sizes: dict[str, int]) -> dict[str, int]:
    """Offsets of blocks of these sizes, and "end"."""
    places, at = {}, 0
    for key, size in (*sizes.items(), ("end", 0)):
        places[key] = at
        at += -(-size // 16) * 16
    return places
