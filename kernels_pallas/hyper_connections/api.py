"""Hyper-connection site: the mixes of the streams, the collapsed input of the sublayer, and the write-back."""

from __future__ import annotations

from jax import Array

from kernels_pallas.choice import choose
from kernels_pallas.hyper_connections import reference


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
    """(collapsed [T, D], pre' [T, hc], post [T, hc], comb [T, hc, hc]) of one site.

    The sublayer's input is collapsed with `pre` of the site before, the mixes are of this site (numerics 10).
    """
    run = choose("hyper_connections", implementation, {"reference": _reference_site})
    return run(streams, pre, fn, base, scale, iterations=iterations, eps=eps, rms_eps=rms_eps)


def _reference_site(streams: Array, pre: Array, fn: Array, base: Array, scale: Array, **constants):  # type: ignore[no-untyped-def]
    return (reference.collapse(streams, pre), *reference.mixes(streams, fn, base, scale, **constants))


def collapse(streams: Array, pre: Array, *, implementation: str = "auto") -> Array:
    """sum_j pre_j X_j: [T, hc, D], [T, hc] -> [T, D]."""
    return choose("hyper_connections", implementation, {"reference": reference.collapse})(streams, pre)


def expand(y: Array, streams: Array, post: Array, comb: Array, *, implementation: str = "auto") -> Array:
    """Writes the sublayer's output y [T, D] back into the streams [T, hc, D]."""
    return choose("hyper_connections", implementation, {"reference": reference.expand})(y, streams, post, comb)
