"""Random words of the slice bench: fixed values, no relation between seeds, evenly spread."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from di_jax.commands.bench_slice.random_arrays import SEED, uniform, words
from di_jax.parallel.replica_choice import mix

PLACES = 4096


def unmixed(shape: tuple[int, ...], seed: int) -> jnp.ndarray:
    """Words of a seed that goes in as it is: what `words` once were."""
    word = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        word = mix(word ^ (lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(0x9E3779B9)))
    return word


def shared(first: np.ndarray, second: np.ndarray) -> float:
    """Share of the words of the first that are anywhere in the second, too."""
    return float(np.isin(first, second).mean())


def chi_square(values: np.ndarray, cells: int) -> float:
    counts = np.bincount(values.ravel().astype(np.int64), minlength=cells)
    assert counts.size == cells
    mean = values.size / cells
    return float(((counts - mean) ** 2 / mean).sum())


def test_known_words() -> None:
    want = [[0xBE447809, 0x66A2DECB, 0x57F4CE04], [0x76741B3F, 0x034418EB, 0xBFCD1107]]
    np.testing.assert_array_equal(words((2, 3), SEED), np.array(want, np.uint32))
    np.testing.assert_array_equal(words((2, 3), jnp.uint32(SEED)), np.array(want, np.uint32))


@pytest.mark.parametrize("shape", [(PLACES,), (64, PLACES // 64), (PLACES // 64, 64)])
@pytest.mark.parametrize("seed", [0, SEED])
def test_neighbouring_seeds_share_no_words(shape: tuple[int, ...], seed: int) -> None:
    base = np.asarray(words(shape, seed))
    # Of 32 bits, 4,096 words of one seed meet 4,096 of another 0.004 times on average.
    assert all(shared(base, np.asarray(words(shape, seed + step))) < 0.001 for step in (1, 2, 3, 16, 256))


def test_seeds_that_are_not_mixed_permute_the_words() -> None:
    for shape in ((PLACES,), (64, 64)):
        first, second = (np.asarray(unmixed(shape, SEED + step)) for step in (0, 1))
        assert shared(first, second) > 0.9 and (first != second).all()


@pytest.mark.parametrize("shape", [(2**16,), (256, 256)])
def test_each_byte_is_evenly_spread(shape: tuple[int, ...]) -> None:
    found = np.asarray(words(shape, SEED))
    # 255 degrees of freedom: mean 255, deviation 22.6; 370 is five of them.
    assert all(chi_square((found >> shift) & 255, 256) < 370 for shift in (0, 8, 16, 24))
    pairs = (found.ravel()[:-1] >> 28) * 16 + (found.ravel()[1:] >> 28)
    assert chi_square(pairs, 256) < 370
    assert chi_square(np.arange(2**16) % 256 // 2 * 2, 256) > 370


def test_uniform_numbers() -> None:
    numbers = np.asarray(uniform((2**16,), SEED, 0.5, jnp.float32), np.float64)
    assert abs(numbers.mean()) < 5 * 0.5 / 256 and numbers.std() == pytest.approx(0.5, rel=0.01)
    assert abs(numbers).max() <= 0.5 * 3**0.5
    other = np.asarray(uniform((2**16,), SEED + 1, 0.5, jnp.float32), np.float64)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 5 / 256
