"""Quantizers, record formats and weight expansion of DeepSeek-V4.1 (numerics 3, 4; checkpoint 6).

Three cache quantizers belong to the trained function and are applied in float32 and bfloat16 alike:

| codec     | group | scale | record per d channels | used for                    |
|-----------|-------|-------|-----------------------|-----------------------------|
| Fp8Block  | 32    | ue8m0 | d + d/32 bytes        | window KV                   |
| Fp4Block  | 32    | ue8m0 | d/2 + d/32 bytes      | index keys (and queries)    |
| Fp4Micro  | 16    | e4m3  | d/2 + d/16 bytes      | compressed KV               |

`encode` maps [..., d] floats to [..., record] uint8, `decode` maps back, and the fake quantizer is decode(encode(x)).
Records hold values first, then scales. `Plain` stores the floats themselves (`model.quantize_caches: false`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4  # numerics 3.1: the smallest fp8 scale is 2^-22
FP4_BLOCK_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_MICRO_AMAX_FLOOR = 6.0 * 2.0**-9


def pow2_ceil_exponent(v: Array) -> Array:
    """Exponent k of the smallest power of two >= v, for fp32 v > 0 (numerics 3). Int32, done on the bits.

    A log2 would misround next to powers of two.
    """
    bits = lax.bitcast_convert_type(v.astype(jnp.float32), jnp.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    return exponent - 127 + (mantissa != 0)


def exp2_from_byte(byte: Array) -> Array:
    """ue8m0 byte b -> 2^(b-127) as fp32, exact for b in 1..254 (checkpoint 6.1)."""
    return lax.bitcast_convert_type(byte.astype(jnp.int32) << 23, jnp.float32)


def e2m1_code(x: Array) -> Array:
    """fp32 -> e2m1 code 0..15, ties to the even code, saturating, sign kept (numerics 3.4). Result int32."""
    a = jnp.minimum(jnp.abs(x), E2M1_MAX)
    # Midpoints between codes; a tie rounds up exactly when the code above is even (1->2 at .75, 3->4 at 1.75, ...).
    code = (a > 0.25).astype(jnp.int32)
    for midpoint, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= midpoint if inclusive else a > midpoint).astype(jnp.int32)
    return code | jnp.where(jnp.signbit(x), 8, 0)


def e2m1_value(code: Array) -> Array:
    """e2m1 code 0..15 -> fp32 value. Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6.

    Integer arithmetic, because the bit trick through bf16 denormals is flushed to zero on some backends.
    """
    code = code.astype(jnp.int32)
    m = code & 7
    doubled = jnp.where(m < 2, m, (2 + (m & 1)) << jnp.maximum((m >> 1) - 1, 0))
    value = doubled.astype(jnp.float32) * 0.5
    return jnp.where(code & 8 != 0, -value, value)


def e4m3_value(x: Array) -> Array:
    """fp32 from -448 to 448 -> the nearest e4m3 value, ties to even, still as fp32: the cast that follows is exact.

    A cast alone does not round where the result is read back in the same program: XLA's GPU pipeline, which may keep
    more precision than was asked for, takes the pair of casts out. On an H200 `fake_quantize` of fp8 was the identity.
    """
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(x) < 2.0**-6, jnp.round(x * 512) * (1 / 512), normal)


def pack_e2m1(code: Array) -> Array:
    """Codes [..., d] -> bytes [..., d/2]; the even channel sits in the low nibble (checkpoint 6.3)."""
    pairs = code.reshape(*code.shape[:-1], code.shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)


def unpack_e2m1(packed: Array) -> Array:
    """Bytes [..., d/2] -> fp32 values [..., d]."""
    packed = packed.astype(jnp.int32)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return e2m1_value(codes).reshape(*packed.shape[:-1], 2 * packed.shape[-1])  # not -1: there may be no rows


def _groups(x: Array, size: int) -> tuple[Array, Array]:
    """[..., d] -> fp32 groups [..., d/size, size] and their absolute maxima [..., d/size, 1]."""
    g = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return g, jnp.max(jnp.abs(g), axis=-1, keepdims=True)


def _as_bytes(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


class Codec(Protocol):
    """How one vector of `channels` floats is stored in a cache."""

    @property
    def dtype(self) -> jnp.dtype:
        """Element type of the stored record."""

    def record(self, channels: int) -> int:
        """Elements of a record that holds `channels` floats."""

    def encode(self, x: Array) -> Array:
        """[..., channels] -> [..., record]."""

    def decode(self, record: Array) -> Array:
        """[..., record] -> fp32 [..., channels]."""


@dataclasses.dataclass(frozen=True)
class Fp8Block:
    """e4m3 values, one ue8m0 scale per 32 channels (numerics 3.1)."""

    group: int = 32
    dtype = jnp.dtype(jnp.uint8)

    def record(self, channels: int) -> int:
        return channels + channels // self.group

    def encode(self, x: Array) -> Array:
        g, amax = _groups(x, self.group)
        k = pow2_ceil_exponent(jnp.maximum(amax, FP8_AMAX_FLOOR) * jnp.float32(1 / E4M3_MAX))
        q = e4m3_value(jnp.clip(g * exp2_from_byte(127 - k), -E4M3_MAX, E4M3_MAX)).astype(jnp.float8_e4m3fn)
        values = _as_bytes(q).reshape(x.shape)
        return jnp.concatenate([values, (k[..., 0] + 127).astype(jnp.uint8)], axis=-1)

    def decode(self, record: Array) -> Array:
        channels = record.shape[-1] * self.group // (self.group + 1)
        q = lax.bitcast_convert_type(record[..., :channels], jnp.float8_e4m3fn).astype(jnp.float32)
        scale = exp2_from_byte(record[..., channels:])
        return (q.reshape(*scale.shape, self.group) * scale[..., None]).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class Fp4Block:
    """e2m1 values, one ue8m0 scale per 32 channels (numerics 3.2)."""

    group: int = 32
    dtype = jnp.dtype(jnp.uint8)

    def record(self, channels: int) -> int:
        return channels // 2 + channels // self.group

    def encode(self, x: Array) -> Array:
        g, amax = _groups(x, self.group)
        k = pow2_ceil_exponent(jnp.maximum(amax, FP4_BLOCK_AMAX_FLOOR) * jnp.float32(1 / E2M1_MAX))
        # Two factors: 2^-k leaves the fp32 range for the smallest scales.
        half = k // 2
        code = e2m1_code(g * exp2_from_byte(127 - half) * exp2_from_byte(127 - (k - half)))
        values = pack_e2m1(code.reshape(x.shape))
        return jnp.concatenate([values, (k[..., 0] + 127).astype(jnp.uint8)], axis=-1)

    def decode(self, record: Array) -> Array:
        channels = record.shape[-1] * 2 * self.group // (self.group + 2)
        values = unpack_e2m1(record[..., : channels // 2])
        scale = exp2_from_byte(record[..., channels // 2 :])
        return (values.reshape(*scale.shape, self.group) * scale[..., None]).reshape(values.shape)


@dataclasses.dataclass(frozen=True)
class Fp4Micro:
    """e2m1 values, one e4m3 scale per 16 channels, true division in both places (numerics 3.3)."""

    group: int = 16
    dtype = jnp.dtype(jnp.uint8)

    def record(self, channels: int) -> int:
        return channels // 2 + channels // self.group

    def encode(self, x: Array) -> Array:
        g, amax = _groups(x, self.group)
        # Clamped before the cast: a larger value would become NaN, not 448.
        scale = e4m3_value(jnp.minimum(jnp.maximum(amax, FP4_MICRO_AMAX_FLOOR) / E2M1_MAX, E4M3_MAX))
        scale = scale.astype(jnp.float8_e4m3fn)
        code = e2m1_code(g / scale.astype(jnp.float32))
        return jnp.concatenate([pack_e2m1(code.reshape(x.shape)), _as_bytes(scale[..., 0])], axis=-1)

    def decode(self, record: Array) -> Array:
        channels = record.shape[-1] * 2 * self.group // (self.group + 2)
        values = unpack_e2m1(record[..., : channels // 2])
        scale = lax.bitcast_convert_type(record[..., channels // 2 :], jnp.float8_e4m3fn).astype(jnp.float32)
        return (values.reshape(*scale.shape, self.group) * scale[..., None]).reshape(values.shape)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The floats themselves: the goldens without cache quantization."""

    dtype: jnp.dtype

    def record(self, channels: int) -> int:
        return channels

    def encode(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def decode(self, record: Array) -> Array:
        return record.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """Training: stores what `codec` would give back, as fp32; the gradient passes as if it were the identity."""

    codec: Codec
    dtype = jnp.dtype(jnp.float32)

    def record(self, channels: int) -> int:
        return channels

    def encode(self, x: Array) -> Array:
        return straight_through(x, fake_quantize(self.codec, x)).astype(jnp.float32)

    def decode(self, record: Array) -> Array:
        return record


@dataclasses.dataclass(frozen=True)
class CacheFormats:
    """The codec of each cache; queries of the indexer pass through `index` as well."""

    window: Codec
    compressed: Codec
    index: Codec

    @classmethod
    def quantized(cls) -> CacheFormats:
        return cls(Fp8Block(), Fp4Micro(), Fp4Block())

    @classmethod
    def straight_through(cls) -> CacheFormats:
        return cls(StraightThrough(Fp8Block()), StraightThrough(Fp4Micro()), StraightThrough(Fp4Block()))

    @classmethod
    def plain(cls, dtype: jnp.dtype) -> CacheFormats:
        return cls(Plain(dtype), Plain(dtype), Plain(dtype))


def fake_quantize(codec: Codec, x: Array) -> Array:
    """decode(encode(x)) in x's dtype; exact there, since a quantized value fits bf16 (numerics 2.2)."""
    return codec.decode(codec.encode(x)).astype(x.dtype)


def straight_through(x: Array, quantized: Array) -> Array:
    """`quantized` forwards, the gradient of `x` backwards."""
    return x + lax.stop_gradient(quantized - x)


def fake_quantize_weight(weight: Array, storage: str) -> Array:
    """Training: the value [..., out, in] that the checkpoint format would store of an fp32 master weight.

    storage: "fp8" (checkpoint 6.2), "fp4" (6.3), "rows" (fp8 in rows, 6.4) or "bf16". In dimensions that 32 divides.
    """
    if storage == "bf16":
        stored = lax.reduce_precision(weight, exponent_bits=8, mantissa_bits=7)  # bfloat16, see `e4m3_value`
    elif storage == "fp4":
        stored = fake_quantize(Fp4Block(), weight)
    elif storage == "rows":
        stored = fake_quantize(Fp8Block(), weight)
    else:  # one scale for 32 x 32: bring each block into one row, of which it is then the only group
        *stack, rows, columns = weight.shape
        blocks = weight.reshape(*stack, rows // 32, 32, columns // 32, 32).swapaxes(-3, -2)
        flat = blocks.reshape(*stack, rows // 32, columns // 32, 1024)
        stored = fake_quantize(Fp8Block(1024), flat).reshape(blocks.shape).swapaxes(-3, -2).reshape(weight.shape)
    return straight_through(weight, stored)


def quantize_activation(x: Array) -> Array:
    """The MXFP8 input of an fp8 or fp4 linear (numerics 2.1), as exact values in x's dtype."""
    return fake_quantize(Fp8Block(), x)


def expand_weight(weight: Array, scale: Array | None, dtype: jnp.dtype) -> Array:
    """A stored weight -> its exact value in `dtype`, [..., out, in].

    weight: bf16 or f32 [..., out, in] with scale None; e4m3 [..., out, in] with uint8 ue8m0
    [..., ceil(out/32), ceil(in/32)] (checkpoint 6.2); or uint8 e2m1 pairs [..., out, in/2] with uint8 ue8m0
    [..., out, in/32] (checkpoint 6.3).
    """
    if scale is None:
        return weight.astype(dtype)
    factor = exp2_from_byte(scale).astype(dtype)
    if weight.dtype == jnp.uint8:
        values = unpack_e2m1(weight).astype(dtype)
        grouped = values.reshape(*factor.shape, 32) * factor[..., None]
        return grouped.reshape(values.shape)
    rows, columns = weight.shape[-2:]
    factor = jnp.repeat(jnp.repeat(factor, 32, axis=-2), 32, axis=-1)[..., :rows, :columns]
    return weight.astype(dtype) * factor


def expand_rows(values: Array, scale: Array | None, dtype: jnp.dtype) -> Array:
    """Engram rows e4m3 [..., c] with ue8m0 [..., c/32] -> exact values in `dtype` (checkpoint 6.4)."""
    if scale is None:
        return values.astype(dtype)
    factor = exp2_from_byte(scale).astype(dtype)
    grouped = values.astype(dtype).reshape(*factor.shape, values.shape[-1] // factor.shape[-1])
    return (grouped * factor[..., None]).reshape(values.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, weight: Array, out_dtype: jnp.dtype) -> Array:
    """x [..., in] times weight [out, in] transposed: fp32 accumulation, one rounding to `out_dtype`.

    HIGHEST keeps fp32 operands out of tf32; for bf16 operands products are exact in fp32 anyway. The gradient enters
    its products in x's dtype: derived from the fp32 result they would be fp32 products, a tenth as fast.
    """
    return _product("...i,oi->...o", x, weight).astype(out_dtype)


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _matmul_forward(x: Array, weight: Array, out_dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, weight, out_dtype), (x, weight)


def _matmul_backward(out_dtype: jnp.dtype, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, weight = saved
    g = g.astype(x.dtype)
    d_weight = _product("to,ti->oi", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]))
    return _product("...o,oi->...i", g, weight).astype(x.dtype), d_weight.astype(weight.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)
