"""A hyper-connection site of the real kernels on a Hopper GPU against the reference and float64, in the released width.

Row counts around a block of rows, around a tuned choice, and odd ones.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from on_hopper import CONFIG, NEEDS_HOPPER, assert_same_bits, poison_outputs
from test_fused_site import CONSTANTS, LAYER, inputs, oracle_rest, oracle_streams

from kernels_pallas.hopper import KERNEL
from kernels_pallas.hyper_connections import api

pytestmark = NEEDS_HOPPER

ROWS = (1, 7, 8, 255, 256, 1000)
NOTHING: dict[str, Any] = {"y": None, "post": None, "comb": None}
STACKS = ("fn", "base", "scale", "norm_weight")
site = jax.jit(api.fused_site, static_argnames=(*CONSTANTS, "implementation"))


@cache
def case(rows: int) -> dict[str, Any]:
    """Random arrays; the weights of other layers are NaN."""
    made = inputs(rows, seed=rows, dim=CONFIG.hidden_size)
    for name in STACKS:
        made[name][np.arange(len(made[name])) != LAYER] = np.nan
    return made


def run(arrays: dict[str, Any], implementation: str) -> list[np.ndarray]:
    """(streams, input of the sublayer, pre, post, comb)."""
    names = ("y", "streams", "post", "comb", "pre", *STACKS)
    arguments = [None if arrays[name] is None else jnp.asarray(arrays[name]) for name in names]
    function = partial(site, **CONSTANTS, implementation=implementation)
    poison_outputs(jax.eval_shape(function, jnp.int32(LAYER), *arguments))
    return [np.asarray(x) for x in function(jnp.int32(LAYER), *arguments)]


@pytest.mark.parametrize("rows", ROWS)
def test_against_float64(rows: int) -> None:
    arrays = case(rows)
    streams, normed, *mixes = run(arrays, KERNEL)
    assert streams.dtype == normed.dtype == ml_dtypes.bfloat16
    # One rounding, and fp32 noise of a row's size where terms cancel.
    size = np.maximum(1, np.abs(arrays["streams"].astype(np.float64)).max(axis=(1, 2), keepdims=True))
    right = oracle_streams(**arrays)
    np.testing.assert_allclose(streams.astype(np.float64) / size, right / size, rtol=2.0**-8, atol=2e-6)
    right, *exact = oracle_rest(streams, **{name: arrays[name] for name in ("pre", *STACKS)})
    # One rounding, and what is collapsed next to a boundary may be rounded to its other side.
    np.testing.assert_allclose(normed.astype(np.float64), right, rtol=2.0**-8 + 2.0**-7, atol=1e-5)
    assert np.mean(np.abs(normed - right) > 2.0**-8 * 1.01 * np.abs(right) + 1e-5) < 1e-3
    for mine, expected in zip(mixes, exact, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5)


def close_to_the_reference(mine: list[np.ndarray], right: list[np.ndarray]) -> None:
    """All but the streams, of the same streams: each side rounds what is collapsed, perhaps to
    another side, and what is normed."""
    np.testing.assert_allclose(mine[1].astype(np.float64), right[1].astype(np.float64), rtol=2.0**-6, atol=2e-5)
    for a, b in zip(mine[2:], right[2:], strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_against_the_reference(rows: int) -> None:
    """Streams are the same but for sums next to a rounding boundary, there by one value of bfloat16; the rest is that
    of the reference on these streams."""
    mine, right = (run(case(rows), name) for name in (KERNEL, "reference"))
    streams, expected = (x[0].astype(np.float64) for x in (mine, right))
    assert (streams != expected).mean() < 1e-3
    # Where terms cancel, fp32 noise of the terms' size may be several values.
    np.testing.assert_allclose(streams, expected, rtol=2.0**-7, atol=2e-5)
    close_to_the_reference(mine, run(case(rows) | NOTHING | {"streams": mine[0]}, "reference"))
    assert_same_bits(run(case(rows), KERNEL), mine)


@pytest.mark.parametrize("rows", [7, 256])
def test_nothing_written_leaves_the_streams(rows: int) -> None:
    """Before the first layer and after an Engram: no output of a sublayer, bit by bit the same streams."""
    arrays = case(rows) | NOTHING
    mine = run(arrays, KERNEL)
    assert_same_bits(mine[0], arrays["streams"])
    close_to_the_reference(mine, run(arrays, "reference"))


@pytest.mark.parametrize("rows", [7, 255])
def test_a_row_does_not_touch_the_others(rows: int) -> None:
    """Whatever a row without a meaning holds. Control: its own streams and input are NaN."""
    arrays, dead = dict(case(rows)), rows // 2
    before = run(arrays, KERNEL)
    for name in ("y", "streams", "post", "comb", "pre"):
        arrays[name] = arrays[name].copy()
        arrays[name][dead] = np.nan
    after = run(arrays, KERNEL)
    rest = np.arange(rows) != dead
    assert_same_bits([x[rest] for x in after], [x[rest] for x in before])
    assert all(np.isnan(x[dead].astype(np.float32)).all() for x in after[:2])


def test_a_rounding_too_many_is_seen() -> None:
    """Control: the mixing weights, or one stream's share, rounded to bfloat16."""
    arrays = case(7)
    right = run(arrays, "reference")
    rounded = {name: arrays[name].astype(ml_dtypes.bfloat16).astype(np.float32) for name in ("fn", "comb")}
    mixes = run(arrays | {"fn": rounded["fn"]}, KERNEL)[2:]
    assert max(np.abs(a - b).max() for a, b in zip(mixes, right[2:], strict=True)) > 2e-5
    streams = run(arrays | {"comb": rounded["comb"]}, KERNEL)[0].astype(np.float64)
    assert (streams != right[0].astype(np.float64)).mean() > 1e-3
