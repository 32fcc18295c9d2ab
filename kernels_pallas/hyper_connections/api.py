"""A hyper-connection site: the write-back of one sublayer, the mixes of the streams, the input of the next sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.choice import choose
from kernels_pallas.hopper import KERNEL, choose_kernel, unavailable
from kernels_pallas.hyper_connections import reference
from kernels_pallas.hyper_connections.config import tuning_for

OPERATION = "hyper_connections"


def fused_site(
    layer: Array | int,
    y: Array | None,
    streams: Array,
    post: Array | None,
    comb: Array | None,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    norm_weight: Array,
    *,
    iterations: int,
    eps: float,
    rms_eps: float,
    implementation: str = "auto",
) -> tuple[Array, Array, Array, Array, Array]:
    """(streams' [T, hc, D], input of the sublayer [T, D], pre' [T, hc], post' [T, hc], comb' [T, hc, hc]) of a site.

    The output y [T, D] of the sublayer before is written into its streams [T, hc, D] with its post [T, hc] and
    comb [T, hc, hc]. The result is collapsed with `pre` [T, hc] of the site before and normed with
    norm_weight[layer]; pre', post' and comb' are of this site: fn fp32 [L, (2 + hc) hc, hc D], base, scale [L, 3]
    at `layer` (numerics 10). Stacks come whole: a slice would be a copy in the step. y, post and comb are None where
    nothing is to be written: before the first layer, after an Engram. UnsupportedShape: the named kernel cannot run.
    """
    kernel: Callable[..., Any] = partial(_kernel, streams.shape)
    why = unavailable() or unsupported(streams)
    run = choose_kernel(OPERATION, implementation, kernel, reference.fused_site, why)
    constants: dict[str, Any] = {"iterations": iterations, "eps": eps, "rms_eps": rms_eps}
    return run(layer, y, streams, post, comb, pre, fn, base, scale, norm_weight, **constants)


def _kernel(
    shape: tuple[int, ...],
    layer: Array | int,
    y: Array | None,
    streams: Array,
    post: Array | None,
    comb: Array | None,
    *rest: Array,
    **constants: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    from kernels_pallas.hyper_connections.mosaic_gpu_sm90 import fused_site

    if y is None:
        y, post, comb = nothing_written(streams)
    tuning = tuning_for(jax.devices()[0].device_kind, hidden=shape[-1], rows=shape[0])
    return fused_site(layer, y, streams, post, comb, *rest, **constants, tuning=tuning)


def unsupported(streams: Array) -> str | None:
    """Why the Hopper kernel cannot take these streams [T, hc, D]; None where it can."""
    rows, hc, dim = streams.shape
    if streams.dtype != jnp.bfloat16:
        return f"streams must be bfloat16, they are {streams.dtype}"
    if hc != 4:
        return f"hc_mult must be 4, it is {hc}"
    if dim % 1024:
        return f"hidden_size must be a multiple of 1024, it is {dim}"
    if not rows:
        return "there are no rows"
    return None


def nothing_written(streams: Array) -> tuple[Array, Array, Array]:
    """y, post and comb with which the kernel leaves the streams [T, hc, D] as they are, bit for bit."""
    rows, hc, dim = streams.shape
    comb = jnp.broadcast_to(jnp.eye(hc, dtype=jnp.float32), (rows, hc, hc))
    return jnp.zeros((rows, dim), streams.dtype), jnp.zeros((rows, hc), jnp.float32), comb


# What is not fused is left to XLA: the ends of the model, and layers that change or tap the streams between two sites.
def site(
    streams: Array,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    eps: float,
    rms_eps: float,
    implementation: str = "auto",
) -> tuple[Array, Array, Array, Array]:
    """(collapsed [T, D], pre' [T, hc], post [T, hc], comb [T, hc, hc]) of one site, nothing written before or normed.

    The sublayer's input is collapsed with `pre` of the site before, the mixes are of this site (numerics 10).
    """
    mixes = _plain(reference.mixes, implementation)
    mixed = mixes(streams, fn, base, scale, iterations=iterations, eps=eps, rms_eps=rms_eps)
    return (reference.collapse(streams, pre), *mixed)


def collapse(streams: Array, pre: Array, *, implementation: str = "auto") -> Array:
    """sum_j pre_j X_j: [T, hc, D], [T, hc] -> [T, D]."""
    return _plain(reference.collapse, implementation)(streams, pre)


def expand(y: Array, streams: Array, post: Array, comb: Array, *, implementation: str = "auto") -> Array:
    """Writes the sublayer's output y [T, D] back into the streams [T, hc, D]."""
    return _plain(reference.expand, implementation)(y, streams, post, comb)


def _plain[F: Callable[..., Any]](run: F, implementation: str) -> F:
    return choose(OPERATION, "reference" if implementation in ("auto", KERNEL) else implementation, {"reference": run})
