"""The NumPy quantizers of the writer: goldens, exact round trips, ties, limits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from di_jax.checkpoint.quantize import (
    dequantize_fp4_rows,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    pow2ceil_byte,
    quantize_fp4_rows,
    quantize_fp8_block,
    quantize_fp8_rows,
    scale_value,
)

PAIRS = [
    (quantize_fp8_block, dequantize_fp8_block),
    (quantize_fp8_rows, dequantize_fp8_rows),
    (quantize_fp4_rows, dequantize_fp4_rows),
]


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Any shape, any magnitude below 2^126, blocks of zeros and repeated values among them."""
    shape = draw(st.tuples(st.integers(1, 70), st.integers(1, 50).map(lambda n: 2 * n)))
    low = draw(st.integers(-140, 120))
    high = draw(st.integers(low, min(low + 40, 123)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = np.ldexp(generator.standard_normal(shape).clip(-4, 4), generator.integers(low, high + 1, shape))
    return (values * (generator.random(shape) < draw(st.sampled_from([0.02, 0.5, 1.0])))).astype(np.float32)


def test_golden_vectors(golden: Path) -> None:
    """The activation quantizers share the formats; they differ in the floor on amax (1e-4 for fp8, numerics 3.1)."""
    vectors = load_file(golden / "quant-vectors.safetensors")
    values = vectors["input"]
    packed, scale = quantize_fp4_rows(values)
    assert np.array_equal(dequantize_fp4_rows(packed, scale), vectors["fp4_block32_ue8m0"])
    assert np.array_equal(scale_value(scale), vectors["scale_fp4_block32_ue8m0"])
    above = np.abs(values.reshape(-1, 2, 32)).max(axis=2) >= 1e-4
    codes, scale = quantize_fp8_rows(values)
    assert above.mean() > 0.8
    assert np.array_equal(scale_value(scale)[above], vectors["scale_fp8_block32_ue8m0"][above])
    got, want = dequantize_fp8_rows(codes, scale), vectors["fp8_block32_ue8m0"]
    assert np.array_equal(got.reshape(-1, 2, 32)[above], want.reshape(-1, 2, 32)[above])


@pytest.mark.parametrize(
    ("amax", "fp8", "fp4"), [(448, 0, 7), (449, 1, 7), (6, -6, 0), (3, -7, -1), (1, -8, -2), (224, -1, 6)]
)
def test_scales_at_powers_of_two(amax: float, fp8: int, fp4: int) -> None:
    row = np.full((1, 32), amax, np.float32)
    assert quantize_fp8_block(row)[1].item() - 127 == fp8
    assert quantize_fp8_rows(row)[1].item() - 127 == fp8
    assert quantize_fp4_rows(row)[1].item() - 127 == fp4


@given(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_pow2ceil_is_the_smallest_power_not_below(value: float) -> None:
    scale = float(scale_value(pow2ceil_byte(np.array([value], np.float32)))[0])
    assert scale >= value > scale / 2


@pytest.mark.parametrize(("quantize", "dequantize"), PAIRS)
@given(values=matrices())
def test_a_representable_weight_round_trips_exactly(quantize, dequantize, values: np.ndarray) -> None:
    first = dequantize(*quantize(values))
    assert np.array_equal(dequantize(*quantize(first)), first)


@pytest.mark.parametrize(("quantize", "dequantize"), PAIRS)
@given(values=matrices())
def test_scale_bytes_and_error_bounds(quantize, dequantize, values: np.ndarray) -> None:
    """Half a step of the coarsest code: 16 scales for e4m3 (448 - 416 over 2), 1 scale for e2m1 (6 - 4 over 2)."""
    codes, scale = quantize(values)
    assert scale.dtype == np.uint8 and scale.min() >= 1 and scale.max() <= 254
    step = {quantize_fp8_block: 16.0, quantize_fp8_rows: 16.0, quantize_fp4_rows: 1.0}[quantize]
    rows, columns = values.shape
    wide = np.repeat(scale_value(scale).astype(np.float64), 32, axis=1)[:, :columns]
    if quantize is quantize_fp8_block:
        wide = np.repeat(wide, 32, axis=0)[:rows]
    assert codes.shape == ((rows, columns // 2) if quantize is quantize_fp4_rows else (rows, columns))
    assert (np.abs(dequantize(codes, scale).astype(np.float64) - values) <= step * wide).all()


def test_block_scales_are_shared_by_32_rows_and_columns() -> None:
    values = np.ones((40, 70), np.float32)
    values[33, 65] = 4480.0
    codes, scale = quantize_fp8_block(values)
    assert codes.shape == (40, 70) and scale.shape == (2, 3)
    assert (scale[0] == scale[0, 0]).all() and scale[1, 2] == scale[0, 0] + 13 - 1
    _, rows = quantize_fp8_rows(values)
    assert rows.shape == (40, 3) and (np.delete(rows.ravel(), 33 * 3 + 2) == rows[0, 0]).all()


def test_fp4_nibbles_and_ties() -> None:
    """Low nibble = even column; ties go to the even code (numerics 3.4)."""
    row = np.zeros((1, 32), np.float32)
    row[0, :10] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.75, -6]
    packed, scale = quantize_fp4_rows(row)
    assert scale.item() == 127
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    assert codes[:10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 10, 15]
    assert packed[0, 0] == 0x07 and packed[0, 4] == 0xFA
    assert dequantize_fp4_rows(packed, scale)[0, :10].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -1, -6]


def test_signed_bytes_decode_like_unsigned() -> None:
    packed = np.array([[0xF8] * 16], np.uint8)
    scale = np.array([[127]], np.uint8)
    assert np.array_equal(dequantize_fp4_rows(packed.view(np.int8), scale), dequantize_fp4_rows(packed, scale))
    assert dequantize_fp4_rows(packed, scale)[0, :2].tolist() == [0.0, -6.0]


def test_all_zero_groups() -> None:
    for quantize, dequantize in PAIRS:
        codes, scale = quantize(np.zeros((32, 64), np.float32))
        assert (scale == 1).all()
        assert not dequantize(codes, scale).any()


def test_e4m3_clamps_instead_of_nan() -> None:
    """f32(1/448) may lie below 1/448, so that amax over its scale exceeds 448 by a rounding."""
    values = np.ldexp(np.nextafter(np.float32(448), np.float32(500)), np.arange(-60, 60)).astype(np.float32)
    for row in values:
        codes, scale = quantize_fp8_rows(np.full((1, 32), row, np.float32))
        assert codes.dtype == ml_dtypes.float8_e4m3fn
        assert np.allclose(dequantize_fp8_rows(codes, scale), row, rtol=2**-4)


def test_odd_columns_do_not_pack() -> None:
    with pytest.raises(ValueError, match="even number"):
        quantize_fp4_rows(np.zeros((1, 3), np.float32))
