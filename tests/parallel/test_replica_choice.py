"""The choice of a copy by hash, and forced routing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from di_jax.parallel.eplb import moe_lb
from di_jax.parallel.replica_choice import forced_slot_factors, forced_slot_scores, mix, replica_index, row_hash

N = 60_000


def words(values: object) -> np.ndarray:
    return np.asarray(values, np.uint32)


def unevenness(choice: np.ndarray, cells: int) -> float:
    """Chi-square in standard deviations from its mean: about normal for a fair choice, far above it for a bad one."""
    expected = len(choice) / cells
    chi_square = ((np.bincount(choice, minlength=cells) - expected) ** 2).sum() / expected
    return float((chi_square - (cells - 1)) / np.sqrt(2 * (cells - 1)))


ROWS = {
    "positions of one sequence": (words(7), np.arange(N)),
    "every fourth position": (words(7), np.arange(N) * 4),
    "positions in blocks of 128": (words(123456789), np.arange(N) * 128),
    "consecutive seeds": (np.arange(N), words(500)),
    "seeds with low bits 0": (np.arange(N) * 2**16, words(1)),
    "seeds against positions": (np.arange(N), np.arange(N)),
    "seeds and positions that cancel": (np.arange(N), 2**32 - np.arange(N)),
    "four rows of consecutive seeds": (np.arange(N) // 4, np.arange(N) % 4),
}


@pytest.mark.parametrize("copies", [2, 3, 7, 20, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_copies_share_the_rows(rows: str, copies: int) -> None:
    seed, position = (np.broadcast_to(each, N).astype(np.uint32) for each in ROWS[rows])
    hashes = row_hash(seed, position)
    assert abs(unevenness(replica_index(hashes, words(copies)), copies)) < 4.5


@pytest.mark.parametrize("copies", [2, 3, 7])
def test_neighbours_choose_independently(copies: int) -> None:
    choice = replica_index(row_hash(words([9]), np.arange(2 * N, dtype=np.uint32)), words(copies))
    assert abs(unevenness(choice[::2] * copies + choice[1::2], copies**2)) < 4.5
    seeds = np.arange(N, dtype=np.uint32)
    one, next_one = (replica_index(row_hash(seeds, words([p])), words(copies)) for p in (40, 41))
    assert abs(unevenness(one * copies + next_one, copies**2)) < 4.5


def test_the_test_of_fairness_sees_unfair_choices() -> None:
    position = np.arange(N) * 4
    assert unevenness(position % 2, 2) > 100
    assert unevenness((position * 23_333) % 64, 64) > 100
    assert unevenness(np.where(np.arange(N) % 50 == 0, 0, np.arange(N) % 7), 7) > 10


def test_choice_is_in_range_and_single_copies_have_no_choice() -> None:
    hashes = row_hash(words([[0], [1], [2**32 - 1]]), words([[0, 1, 2**32 - 1]]))
    num = np.array([1, 2, 65], np.int32)
    choice = replica_index(hashes[..., None], num)
    assert choice.dtype == np.int32 and choice.shape == (3, 3, 3)
    assert (choice >= 0).all() and (choice < num).all() and not choice[..., 0].any()


def test_mix_is_a_bijection_on_a_sample() -> None:
    assert len(np.unique(mix(np.arange(2**20, dtype=np.uint32)))) == 2**20


def test_a_jitted_step_chooses_what_numpy_chooses() -> None:
    rng = np.random.default_rng(0)
    seed, position = (rng.integers(0, 2**32, 512, dtype=np.uint32) for _ in range(2))
    num = rng.integers(1, 66, (512, 6)).astype(np.int32)
    factors = forced_slot_factors(1.8, 4, 20, 6)
    slots = np.arange(20, dtype=np.uint32)

    @jax.jit
    def step(seed: jax.Array, position: jax.Array, num: jax.Array) -> tuple[jax.Array, ...]:
        hashes = row_hash(seed, position.astype(jnp.uint32))
        scores = forced_slot_scores(hashes, jnp.asarray(slots), jnp.asarray(factors))
        return hashes, replica_index(hashes[:, None], num), scores, lax.top_k(scores, 6)[1]

    hashes, replica, scores, chosen = step(seed, position.view(np.int32), num)
    assert hashes.dtype == jnp.uint32 and replica.dtype == jnp.int32 and scores.dtype == jnp.float32
    mine = row_hash(seed, position)
    np.testing.assert_array_equal(hashes, mine)
    np.testing.assert_array_equal(replica, replica_index(mine[:, None], num))
    np.testing.assert_array_equal(scores, forced_slot_scores(mine, slots, factors))
    assert all(len(set(row)) == 6 for row in np.asarray(chosen).tolist())


def forced_loads(ratio: float, ranks: int, slots: int, top_k: int, hot_rank: int = 0) -> np.ndarray:
    hashes = row_hash(np.arange(16_384, dtype=np.uint32), words([11]))
    factors = forced_slot_factors(ratio, ranks, slots, top_k, hot_rank)
    scores = forced_slot_scores(hashes, np.arange(slots, dtype=np.uint32), factors)
    chosen = np.argpartition(scores, -top_k, axis=1)[:, -top_k:]
    return np.bincount(chosen.reshape(-1) // (slots // ranks), minlength=ranks)


def test_forced_balance_is_as_even_as_chance() -> None:
    assert (forced_slot_factors(1, 16, 112, 6) == 1).all()
    assert moe_lb(forced_loads(1, 16, 112, 6)) < 1.03


@pytest.mark.parametrize(("ranks", "slots", "ratio"), [(64, 448, 1.8), (4, 416, 1.8), (16, 112, 3.0), (8, 64, 0.5)])
def test_forced_imbalance_has_the_ratio(ranks: int, slots: int, ratio: float) -> None:
    loads = forced_loads(ratio, ranks, slots, 6, hot_rank=2)
    others = np.delete(loads, 2)
    assert loads[2] / others.mean() == pytest.approx(ratio, rel=0.05)
    assert others.max() / others.mean() < 1.1


def test_the_ratio_saturates_at_the_slots_of_the_rank() -> None:
    factors = forced_slot_factors(1000, 8, 32, 6)
    assert factors[:4].tolist() == [100] * 4 and factors[4:].tolist() == [1] * 28
    loads = forced_loads(1000, 8, 32, 6)
    assert loads[0] > 0.99 * 4 * 16_384 and loads.sum() == 6 * 16_384


@pytest.mark.parametrize(("ratio", "ranks", "slots"), [(0, 4, 16), (1.8, 1, 16), (1.8, 3, 16), (1.8, 2, 8)])
def test_impossible_imbalance_is_refused(ratio: float, ranks: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"imbalance {ratio} of {slots} slots on {ranks} ranks"):
        forced_slot_factors(ratio, ranks, slots, 6)
