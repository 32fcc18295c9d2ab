"""Routed experts on the rows that chose them."""

from __future__ import annotations

from jax import Array

from kernels_pallas.choice import choose
from kernels_pallas.expert_ffn import dense, reference
from kernels_pallas.expert_ffn.reference import Stored


def expert_ffn(
    x: Array,
    expert: Array,
    weight: Array,
    w1: Stored,
    w3: Stored,
    w2: Stored,
    layer: Array | int,
    *,
    limit: float,
    quantize: bool,
    implementation: str = "auto",
) -> Array:
    """fp32 [T, D]: the sum over each row's experts of w2(weight * swiglu(w1 x, w3 x)) (numerics 11.2, 11.3).

    x [T, D]; expert int32 [T, k], equal to E on rows that route nowhere; weight fp32 [T, k], applied before w2;
    w1, w3 [L, E, width, D] and w2 [L, E, D, width] with their scales, in the stored format, read at `layer`.
    Bytes: the packed weights of the experts that have rows; flops: 6 * D * width per routed row.
    """
    run = choose("expert_ffn", implementation, {"reference": reference.expert_ffn, "dense": dense.expert_ffn})
    return run(x, expert, weight, w1, w3, w2, layer, limit=limit, quantize=quantize)
