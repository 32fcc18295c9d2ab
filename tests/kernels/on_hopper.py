"""What the tests of the kernels on a Hopper GPU share: where they run, released shapes, memory that held other things.

They call `kernels_pallas.<operation>.api` as a model does, in a compiled program, and skip where a kernel cannot run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import Piece, rows_of

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows
from kernels_pallas.benchmark import RELEASED
from kernels_pallas.hopper import unavailable

_WHY = unavailable()
NEEDS_HOPPER = pytest.mark.skipif(_WHY is not None, reason=f"real kernels: {_WHY}")
CONFIG = ModelConfig.from_file(RELEASED)
QUANTIZED = CacheFormats.quantized()
# All ones are NaN as float32, bfloat16 and e4m3, and the largest ue8m0 scale: such records decode to NaN.
POISON = 0xFF


def released_layout(*, num_blocks: int, num_slots: int) -> CacheLayout:
    """Quantized caches of the released model, in blocks of 128 positions."""
    return CacheLayout(CONFIG, QUANTIZED, num_blocks=num_blocks, num_slots=num_slots)


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Where inputs are made and results are judged: one operation after another, each compiled, which a CPU does in
    milliseconds and a GPU in tenths of a second."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS without it
        return contextlib.nullcontext()


def host_rows(pieces: Sequence[Piece], *, tile: int, padding_tiles: int = 1) -> tuple[Rows, list[int]]:
    """`rows_of` in numpy."""
    with on_host():
        rows, first = rows_of(pieces, tile=tile, padding_tiles=padding_tiles)
        return jax.tree.map(np.asarray, rows), first


def poison_outputs(results: Any) -> None:
    """Frees arrays of NaN, or of the largest integer, in the shapes of `results`: what a kernel leaves out shows them.

    The allocator gives the same memory to the next array of a size.
    """
    held = [
        jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max, x.dtype)
        for x in jax.tree.leaves(results)
    ]
    jax.block_until_ready(held)


def assert_same_bits(first: Any, second: Any) -> None:
    """Of all arrays of two results, NaN and the sign of 0 included."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
