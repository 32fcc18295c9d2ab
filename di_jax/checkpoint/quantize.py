"""The released weight formats in NumPy: quantize when writing, dequantize to check (numerics 3, checkpoint 6).

Every scale is a power of two held as its ue8m0 byte, value 2^(byte - 127), byte in 1..254. A weight that is already
representable comes back exactly: its block's new scale is never larger than the one it was made with. Magnitudes
must be below MAX_MAGNITUDE, else a value rounded up may leave the range of float32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from di_jax.checkpoint.inventory import BLOCK

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MAX_MAGNITUDE = 2.0**126
# The smallest scale, 2^-126 (byte 1): byte 0 would decode to 0 by the exponent shift that readers use.
_MIN_SCALE = np.float32(2.0**-126)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def pow2ceil_byte(values: np.ndarray) -> np.ndarray:
    """ue8m0 byte of the smallest power of two >= value, for float32 values >= 2^-126, on bits (numerics 3).

    A log2 would misround next to powers of two.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def scale_value(byte: np.ndarray) -> np.ndarray:
    """2^(byte - 127) as float32, exact for bytes 1..254."""
    return (byte.astype(np.uint32) << 23).view(np.float32)


def _scale_bytes(amax: np.ndarray, largest: float) -> np.ndarray:
    """Scale that brings amax to at most `largest`; the quotient is a reciprocal multiply (numerics 3)."""
    return pow2ceil_byte(np.maximum(amax * np.float32(1.0 / largest), _MIN_SCALE))


def _scaled(values: np.ndarray, byte: np.ndarray, largest: float) -> np.ndarray:
    """values / scale, clamped. Exact: the divisor is a power of two."""
    return np.clip(values / scale_value(byte), -largest, largest)


def _pad_columns(values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK)))


def _row_groups(values: np.ndarray) -> np.ndarray:
    """[R, C] -> [R, ceil(C/32), 32], zeros beyond C."""
    padded = _pad_columns(np.asarray(values, np.float32))
    return padded.reshape(padded.shape[0], -1, BLOCK)


def quantize_fp8_block(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] float32 -> (float8_e4m3fn [R, C], ue8m0 uint8 [ceil(R/32), ceil(C/32)]). checkpoint 6.2."""
    rows, columns = values.shape
    padded = np.pad(_pad_columns(np.asarray(values, np.float32)), ((0, -rows % BLOCK), (0, 0)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale_bytes(np.abs(blocks).max(axis=3, initial=0).max(axis=1, initial=0), E4M3_MAX)
    codes = _scaled(blocks, scale[:, None, :, None], E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return np.ascontiguousarray(codes.reshape(padded.shape)[:rows, :columns]), scale


def dequantize_fp8_block(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of quantize_fp8_block: float32 [R, C], exact."""
    rows, columns = codes.shape
    wide = np.repeat(np.repeat(scale_value(scale), BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]
    return codes.astype(np.float32) * wide


def quantize_fp8_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] float32 -> (float8_e4m3fn [R, C], ue8m0 uint8 [R, ceil(C/32)]): Engram rows. checkpoint 6.4."""
    groups = _row_groups(values)
    scale = _scale_bytes(np.abs(groups).max(axis=2, initial=0), E4M3_MAX)
    codes = _scaled(groups, scale[:, :, None], E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return np.ascontiguousarray(codes.reshape(len(values), -1)[:, : values.shape[1]]), scale


def dequantize_fp8_rows(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of quantize_fp8_rows: float32 [R, C], exact."""
    return codes.astype(np.float32) * np.repeat(scale_value(scale), BLOCK, axis=1)[:, : codes.shape[1]]


def quantize_fp4_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] float32, C even -> (packed e2m1 uint8 [R, C/2], ue8m0 uint8 [R, ceil(C/32)]). checkpoint 6.3.

    Low nibble = even column. Ties go to the even code, the sign of a zero is kept (numerics 3.4).
    """
    if values.shape[1] % 2:
        raise ValueError(f"packed fp4 needs an even number of columns, found {values.shape[1]}")
    groups = _row_groups(values)
    scale = _scale_bytes(np.abs(groups).max(axis=2, initial=0), E2M1_MAX)
    scaled = _scaled(groups, scale[:, :, None], E2M1_MAX)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(values), -1)[:, : values.shape[1]]
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale


def dequantize_fp4_rows(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of quantize_fp4_rows: float32 [R, 2 * packed columns], exact."""
    packed = packed.view(np.uint8)
    values = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1).reshape(len(packed), -1)
    return values * np.repeat(scale_value(scale), BLOCK, axis=1)[:, : values.shape[1]]
