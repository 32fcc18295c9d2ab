"""Quantizers, records and weight expansion against the exact vectors and an independent NumPy definition."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_model import REAL, golden_file
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.extend.core import Literal

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import (
    CacheFormats,
    Codec,
    Fp4Block,
    Fp4Micro,
    Fp8Block,
    Plain,
    e2m1_code,
    e2m1_value,
    e4m3_value,
    exp2_from_byte,
    expand_rows,
    expand_weight,
    fake_quantize,
    pack_e2m1,
    pow2_ceil_exponent,
    unpack_e2m1,
)

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VECTORS: dict[str, Codec] = {
    "fp8_block32_ue8m0": Fp8Block(),
    "fp4_block32_ue8m0": Fp4Block(),
    "fp4_block16_e4m3": Fp4Micro(),
}
# Zeros and magnitudes that neither XLA nor the oracle flushes, up to 1e30.
LARGE = float(np.float32(1e30))
FLOATS = st.floats(-LARGE, LARGE, width=32, allow_subnormal=False).map(lambda v: v if abs(v) > 1e-30 else 0.0)
ROWS = arrays(np.float32, (2, 64), elements=FLOATS | st.floats(-4, 4, width=32).map(lambda v: round(v * 8) / 8))


def power_ceil(v: np.float32) -> float:
    """Smallest power of two >= v."""
    mantissa, exponent = math.frexp(float(v))
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to the even code, saturating: by distance, in float64."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 6)
    distance = np.abs(magnitude[..., None] - MAGNITUDES)
    # Of two codes at one distance the even one: odd codes lose by a hair.
    code = np.argmin(distance + (np.arange(8) % 2) * 1e-12, axis=-1)
    return np.copysign(MAGNITUDES[code], x)


def oracle(codec: Codec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales per group) of numerics 3.1, 3.2 and 3.3, one group at a time."""
    values, scales = np.empty(x.shape, np.float64), []
    for row, out in zip(x.reshape(-1, x.shape[-1]), values.reshape(-1, x.shape[-1])):
        for at in range(0, len(row), codec.group):  # type: ignore[attr-defined]
            g = row[at : at + codec.group]  # type: ignore[attr-defined]
            amax = np.float32(np.abs(g).max())
            if isinstance(codec, Fp8Block):
                scale = power_ceil(np.float32(max(amax, np.float32(1e-4)) * np.float32(1 / 448)))
                q = np.clip(g.astype(np.float64) / scale, -448, 448).astype(E4M3).astype(np.float64)
            elif isinstance(codec, Fp4Block):
                scale = power_ceil(np.float32(max(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6)))
                q = nearest_e2m1(g.astype(np.float64) / scale)
            else:
                exact = min(max(amax, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448))
                scale = float(np.float32(exact).astype(E4M3))
                q = nearest_e2m1(g / np.float32(scale))
            out[at : at + len(g)] = q * scale
            scales.append(scale)
    return values, np.array(scales).reshape(*x.shape[:-1], -1)


def scales_of(codec: Codec, record: np.ndarray, channels: int) -> np.ndarray:
    """The scales that a record stores, after its values."""
    stored = record[..., channels if isinstance(codec, Fp8Block) else channels // 2 :]
    if isinstance(codec, Fp4Micro):
        return stored.view(E4M3).astype(np.float64)
    return np.ldexp(1.0, stored.astype(int) - 127)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("compiled", [False, True])
def test_golden_vectors(name: str, compiled: bool) -> None:
    codec, vectors = VECTORS[name], golden_file("quant-vectors")
    encode, decode = (jax.jit(codec.encode), jax.jit(codec.decode)) if compiled else (codec.encode, codec.decode)
    record = encode(jnp.asarray(vectors["input"]))
    assert record.shape[-1] == codec.record(64) and record.dtype == codec.dtype
    np.testing.assert_array_equal(decode(record), vectors[name])
    np.testing.assert_array_equal(scales_of(codec, np.asarray(record), 64), vectors[f"scale_{name}"])


def test_values_are_rounded_to_e4m3_before_they_are_cast() -> None:
    """All values, the middles between neighbours and what lies next to those, of both signs, as ml_dtypes rounds."""
    exact = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    middle = (exact[:-1] + exact[1:]) / 2
    edges = np.concatenate([exact, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(500))])
    x = np.concatenate([edges, -edges])
    found = np.asarray(jax.jit(e4m3_value)(x))
    np.testing.assert_array_equal(found, x.astype(E4M3).astype(np.float32))
    assert (found != x).mean() > 0.6


@pytest.mark.parametrize("codec", [Fp8Block(32), Fp4Micro()], ids=str)
def test_no_quantizer_leaves_its_rounding_to_a_cast(codec: Fp8Block | Fp4Micro) -> None:
    """Which a GPU's compiler takes out again: what is cast to fp8 is exact already."""
    program = jax.make_jaxpr(codec.encode)(jnp.zeros((2, 64))).jaxpr
    made = {variable: equation for equation in program.eqns for variable in equation.outvars}
    casts = [e for e in program.eqns if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype == E4M3]
    assert casts
    for cast in casts:
        before = [made[v].primitive.name for v in made[cast.invars[0]].invars if not isinstance(v, Literal)]
        assert "reduce_precision" in before


@pytest.mark.parametrize("name", VECTORS)
def test_the_oracle_of_these_tests_agrees_with_the_golden_vectors(name: str) -> None:
    vectors = golden_file("quant-vectors")
    values, scales = oracle(VECTORS[name], vectors["input"])
    np.testing.assert_array_equal(values, vectors[name])
    np.testing.assert_array_equal(scales, vectors[f"scale_{name}"])


@pytest.mark.parametrize("codec", VECTORS.values(), ids=VECTORS)
@given(x=ROWS)
def test_any_values(codec: Codec, x: np.ndarray) -> None:
    record = np.asarray(codec.encode(jnp.asarray(x)))
    mine = np.asarray(codec.decode(jnp.asarray(record)))
    assert np.isfinite(mine).all()
    values, scales = oracle(codec, x)
    np.testing.assert_array_equal(scales_of(codec, record, 64), scales)
    np.testing.assert_array_equal(mine, values)


@pytest.mark.parametrize("codec", [Fp8Block(), Fp4Block()], ids=["fp8", "fp4"])
@given(x=ROWS)
def test_quantizing_twice_changes_nothing(codec: Codec, x: np.ndarray) -> None:
    once = fake_quantize(codec, jnp.asarray(x))
    np.testing.assert_array_equal(fake_quantize(codec, once), once)


@given(x=arrays(np.float32, (2, 64), elements=st.floats(-100, 100, width=32)))
def test_quantizing_twice_with_a_micro_scale(x: np.ndarray) -> None:
    """Here it holds where scales have all their bits: below amax 0.1 they are subnormal and may round far down."""
    x[:, ::16] = 8.0
    once = fake_quantize(Fp4Micro(), jnp.asarray(x))
    np.testing.assert_array_equal(fake_quantize(Fp4Micro(), once), once)


@given(st.floats(2.0**-126, 2.0**127, width=32, allow_subnormal=False))
def test_power_of_two_ceiling(v: float) -> None:
    for near in (np.float32(v), np.float32(power_ceil(np.float32(min(v, 1e38))))):
        for value in (near, np.nextafter(near, np.float32(np.inf))):
            if np.isfinite(value):
                assert 2.0 ** int(pow2_ceil_exponent(jnp.float32(value))) == power_ceil(value)


@pytest.mark.parametrize(
    ("codec", "amax", "exponent"),
    [
        (Fp8Block(), 1e-4, -22),
        (Fp8Block(), 0.0, -22),
        (Fp8Block(), 448, 0),
        (Fp8Block(), 449, 1),
        (Fp4Block(), 6, 0),
        (Fp4Block(), 3, -1),
        (Fp4Block(), 1, -2),
        (Fp4Block(), 0.0, -126),
    ],
)
def test_scale_exponents(codec: Codec, amax: float, exponent: int) -> None:
    """Numerics 17, and the floors for groups of zeros."""
    record = np.asarray(codec.encode(jnp.zeros(32).at[7].set(amax)))
    assert int(record[-1]) - 127 == exponent


@pytest.mark.parametrize(("amax", "scale"), [(1.0, 0.171875), (6, 1), (10, 1.625), (0.001, 2.0**-9), (0, 2.0**-9)])
def test_micro_scales(amax: float, scale: float) -> None:
    """Numerics 17; a group of zeros keeps the smallest scale."""
    record = np.asarray(Fp4Micro().encode(jnp.zeros(16).at[3].set(amax)))
    assert float(record[-1:].view(E4M3)[0]) == scale
    assert amax or not record[:-1].any()


def test_micro_group_of_the_specification() -> None:
    x = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -1, 0.05, 0, -0.15, 0.25, 0.35, -0.45]
    codes = [1, 10, 3, 12, 5, 13, 6, 14, 7, 15, 1, 0, 10, 3, 4, 13]
    record = np.asarray(Fp4Micro().encode(jnp.asarray(x, jnp.float32)))
    assert [int(v) for byte in record[:8] for v in (byte & 15, byte >> 4)] == codes
    assert record[:8].tobytes().hex() == "a1c3d5e6f7013ad4"
    assert float(record[8:].view(E4M3)[0]) == 0.171875


def test_micro_scale_saturates_before_the_cast() -> None:
    """A cast of more than 448 to e4m3 is NaN: the clamp comes first, then codes saturate."""
    x = jnp.full(16, 1e30).at[0].set(-1e30).at[1].set(0)
    assert np.isnan(np.float32(1e30).astype(E4M3))
    np.testing.assert_array_equal(fake_quantize(Fp4Micro(), x), np.where(x > 0, 2688, np.where(x < 0, -2688, 0)))


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = {0.25: 0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    for tie, value in ties.items():
        for sign in (1, -1):
            assert float(e2m1_value(e2m1_code(jnp.float32(sign * tie)))) == sign * value
        below, above = np.nextafter(np.float32(tie), np.float32(0)), np.nextafter(np.float32(tie), np.float32(9))
        assert float(e2m1_value(e2m1_code(jnp.float32(below)))) < float(e2m1_value(e2m1_code(jnp.float32(above))))
    assert int(e2m1_code(jnp.float32(-0.1))) == 8, "the sign of a value that rounds to zero is kept"
    assert int(e2m1_code(jnp.float32(1e9))) == 7 and int(e2m1_code(jnp.float32(-1e9))) == 15


def test_every_byte_of_packed_e2m1() -> None:
    packed = np.arange(256, dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    expected = codes.view(E2M1).astype(np.float32)
    np.testing.assert_array_equal(unpack_e2m1(jnp.asarray(packed[:, None])), expected)
    np.testing.assert_array_equal(e2m1_value(jnp.asarray(codes)), expected)
    np.testing.assert_array_equal(pack_e2m1(jnp.asarray(codes.astype(np.int32)))[:, 0], packed)
    np.testing.assert_array_equal(e2m1_code(jnp.asarray(expected)), codes)


def test_every_valid_scale_byte() -> None:
    byte = np.arange(1, 255)
    np.testing.assert_array_equal(exp2_from_byte(jnp.asarray(byte, jnp.uint8)), np.ldexp(np.float32(1), byte - 127))


def test_record_sizes_of_the_released_model() -> None:
    """528 bytes of window, 288 of compressed KV, 68 of index key (numerics 4)."""
    formats = CacheFormats.quantized()
    assert formats.window.record(REAL.head_dim) == 528
    assert formats.compressed.record(REAL.head_dim) == 288
    assert formats.index.record(REAL.index_head_dim) == 68
    state = CacheLayout(REAL, formats, 1, 1).abstract()
    assert (state.window.shape[-1], state.compressed.shape[-1], state.index.shape[-1]) == (528, 288, 68)
    assert {a.dtype for a in (state.window, state.compressed, state.index)} == {jnp.dtype(jnp.uint8)}


def test_a_window_scale_over_64_channels_is_seen() -> None:
    """Control: logits do not show it, the vectors do."""
    vectors = golden_file("quant-vectors")
    wide = np.asarray(fake_quantize(Fp8Block(group=64), jnp.asarray(vectors["input"])))
    assert (wide != vectors["fp8_block32_ue8m0"]).any()


def test_plain_records_are_the_floats() -> None:
    codec, x = Plain(jnp.dtype(jnp.float32)), jnp.asarray(golden_file("quant-vectors")["input"])
    assert codec.record(64) == 64
    np.testing.assert_array_equal(fake_quantize(codec, x), x)


@pytest.mark.parametrize("shape", [(64, 96), (40, 70), (1, 32), (33, 1), (3, 2, 40, 70)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_weights(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """One scale per 32 x 32 block, edge blocks cut; exact in bf16 as well."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=shape).astype(E4M3)
    blocks = (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 32))
    scale = generator.integers(110, 140, blocks).astype(np.uint8)
    expected = np.empty(shape)
    for index in np.ndindex(*shape):
        block = (*index[:-2], index[-2] // 32, index[-1] // 32)
        expected[index] = float(weight[index]) * 2.0 ** (int(scale[block]) - 127)
    mine = expand_weight(jnp.asarray(weight), jnp.asarray(scale), jnp.dtype(dtype))
    assert mine.dtype == dtype
    np.testing.assert_array_equal(np.asarray(mine, np.float64), expected)


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 5, 96)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp4_weights(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """Two codes a byte, even column low, one scale per row and 32 columns."""
    generator = np.random.default_rng(1)
    codes = generator.integers(0, 16, shape).astype(np.uint8)
    scale = generator.integers(110, 140, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    factor = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=-1)
    mine = expand_weight(jnp.asarray(packed), jnp.asarray(scale), jnp.dtype(dtype))
    assert mine.dtype == dtype
    np.testing.assert_array_equal(np.asarray(mine, np.float64), codes.view(E2M1).astype(np.float64) * factor)


def test_engram_rows_and_plain_weights() -> None:
    generator = np.random.default_rng(2)
    rows = generator.normal(size=(5, 3, 64)).astype(E4M3)
    scale = generator.integers(110, 140, (5, 3, 2)).astype(np.uint8)
    factor = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=-1)
    mine = expand_rows(jnp.asarray(rows), jnp.asarray(scale), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(mine, np.float64), rows.astype(np.float64) * factor)
    plain = jnp.asarray(generator.normal(size=(4, 6)), jnp.bfloat16)
    np.testing.assert_array_equal(expand_weight(plain, None, jnp.dtype(jnp.float32)), plain.astype(jnp.float32))


@pytest.mark.parametrize("codec", [Fp8Block(), Fp4Block(), Fp4Micro()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_rows_give_no_rows(codec: Codec, shape: tuple[int, ...]) -> None:
    records = jnp.zeros((*shape, codec.record(64)), jnp.uint8)
    assert codec.decode(records).shape == (*shape, 64)
    assert codec.encode(jnp.zeros((*shape, 64))).shape == records.shape


def test_no_rows_of_weights() -> None:
    assert expand_weight(jnp.zeros((0, 16), jnp.uint8), jnp.zeros((0, 1), jnp.uint8), jnp.float32).shape == (0, 32)
    rows = expand_rows(jnp.zeros((0, 64), jnp.float8_e4m3fn), jnp.zeros((0, 2), jnp.uint8), jnp.float32)
    assert rows.shape == (0, 64)
