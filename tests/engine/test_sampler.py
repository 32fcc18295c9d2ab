"""The transforms of logits against a reference in NumPy that sorts, and what draws depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from di_jax.engine.sampler import (
    COUNT,
    ENDS_ANSWER,
    IN_PROMPT,
    LOGPROB_FLOOR,
    NO_ID,
    RowSampling,
    draw,
    endings,
    forbid,
    gumbel,
    keep_top_k,
    keep_top_p,
    penalized,
    place_keys,
    process,
    rank_of,
    sample,
    scaled,
    top_logprobs,
)

ROWS, IDS = 3, 13
OUT = -np.inf
# Ties, both zeros, ids that are out, values that differ in the last bit, and far tails.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), -1.0, OUT, 80.0, -80.0]),
    st.floats(-20, 20, width=32, allow_subnormal=False),  # zero to a device
)
LOGITS = st.lists(st.lists(VALUES, min_size=IDS, max_size=IDS), min_size=ROWS, max_size=ROWS).map(
    lambda rows: np.array([row if max(row) > OUT else [0.0] * IDS for row in rows], np.float32)
)


def each[T](values: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    return st.lists(values, min_size=ROWS, max_size=ROWS)


def rows_of(count: int = ROWS, **changes: Any) -> RowSampling:
    """Rows of temperature 1 with seeds of their own, but for `changes`."""
    fields: dict[str, Any] = {
        "temperature": np.ones(count, np.float32),
        "seed_low": np.arange(count, dtype=np.int32),
        "seed_high": np.full(count, 7, np.int32),
        "index": np.zeros(count, np.int32),
    }
    defaults = RowSampling.neutral(**jax.tree.map(jnp.asarray, fields))
    typed = {
        name: jnp.broadcast_to(jnp.asarray(value, getattr(defaults, name).dtype), (count,))
        for name, value in changes.items()
    }
    return jax.tree.map(jnp.asarray, RowSampling(**(vars(defaults) | typed)))


def kept(logits: Any) -> list[list[int]]:
    return [np.flatnonzero(row > OUT).tolist() for row in np.asarray(logits)]


# ---- the reference: sort, then cut ----


def falling(row: np.ndarray) -> np.ndarray:
    """Ids from the best down, equals by rising id."""
    return np.argsort(-row.astype(np.float64), kind="stable")


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row.astype(np.float64) - row.max())
    return e / e.sum()


def cut(row: np.ndarray, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The row with all but `ids` out."""
    left = np.full_like(row, OUT)
    left[ids] = row[ids]
    return left


def reference_top_k(row: np.ndarray, k: int) -> np.ndarray:
    return row if k < 1 else cut(row, falling(row)[:k])


def nucleus(row: np.ndarray, p: float) -> int:
    """How many ids reach mass p."""
    return 1 + int(np.searchsorted(np.cumsum(softmax(row)[falling(row)])[:-1], p, side="left"))


def boundary(row: np.ndarray, p: float) -> float:
    """How near p is to the mass of a head: nearer than rounding, and either head is right."""
    return float(np.abs(np.cumsum(softmax(row)[falling(row)]) - p).min())


def reference_top_p(row: np.ndarray, p: float) -> np.ndarray:
    return row if p >= 1 else cut(row, falling(row)[: nucleus(row, p)])


# ---- top-k and top-p ----

TOP_K, TOP_P = jax.jit(keep_top_k), jax.jit(keep_top_p)
SOME_P = st.one_of(st.floats(1e-6, 1.0), st.sampled_from([1e-9, 0.5, 0.95, 0.999999, 1.0]))


@given(LOGITS, each(st.integers(-1, IDS + 2)))
@settings(max_examples=100)
def test_top_k_is_the_head_of_a_stable_sort(logits: np.ndarray, k: list[int]) -> None:
    got = np.asarray(TOP_K(logits, np.array(k, np.int32)))
    np.testing.assert_array_equal(got, [reference_top_k(row, n) for row, n in zip(logits, k)])


@given(LOGITS, each(SOME_P))
@settings(max_examples=100)
def test_top_p_is_the_shortest_head_that_reaches_p(logits: np.ndarray, p: list[float]) -> None:
    masses = np.array(p, np.float32)
    got = np.asarray(TOP_P(logits, masses))
    for row, left, mass in zip(logits, got, masses):
        if mass == 1:
            np.testing.assert_array_equal(left, row)
        elif boundary(row, mass) > 1e-6:
            np.testing.assert_array_equal(left, reference_top_p(row, mass))
        size = len(kept([left])[0])
        np.testing.assert_array_equal(left, cut(row, falling(row)[:size]))


@pytest.mark.parametrize(
    ("row", "k", "p", "ids"),
    [
        ([1, 3, 3, 2, 3], 2, 1, [1, 2]),  # of equals the lower ids
        ([1, 3, 3, 2, 3], 1, 1, [1]),
        ([0.0, -0.0, 0.0, -0.0], 3, 1, [0, 1, 2]),  # both zeros are equal
        ([5, 5, 5, 5], 0, 0.5, [0, 1]),  # exactly reached: no more is needed
        ([5, 5, 5, 5], 0, 0.51, [0, 1, 2]),
        ([1, 9, 2, 3], 0, 1e-30, [1]),  # never empty
        ([1, OUT, 2, OUT], 3, 1, [0, 2]),  # what is out stays out
        ([1, OUT, 2, OUT], 0, 0.9999, [0, 2]),
        ([2, 1, 0, -1], 2**31 - 1, 1, [0, 1, 2, 3]),
        (np.log([0.4, 0.3, 0.2, 0.1]), 2, 0.5, [0]),  # 0.4 of the two that top-k left are 0.57
        (np.log([0.4, 0.3, 0.2, 0.1]), 0, 0.5, [0, 1]),  # control: of all four it takes two
    ],
)
def test_chosen_cuts(row: list[float], k: int, p: float, ids: list[int]) -> None:
    logits = jnp.asarray([row], jnp.float32)
    rows = rows_of(1, top_k=k, top_p=p)
    assert kept(process(logits, rows)) == [ids]


def test_long_rows_keep_tails_that_fp32_sums_lose() -> None:
    """Half the mass in 100,000 ids of 1e-5 of the best one each: a cut inside that tail is exact to 1e-4 of its ids."""
    row = np.full(100_001, np.log(0.5 / 100_000), np.float32)
    row[50] = np.log(0.5)
    left = np.asarray(keep_top_p(jnp.asarray(row[None]), jnp.array([0.75], jnp.float32)))[0]
    ids = np.flatnonzero(left > OUT)
    assert len(ids) == pytest.approx(50_001, abs=10)
    np.testing.assert_array_equal(ids, np.arange(len(ids)))


def test_which_ids_are_kept_does_not_depend_on_the_batch() -> None:
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(37, 999)).astype(np.float32) * 4
    rows = rows_of(37, top_p=generator.uniform(0.1, 1, 37), top_k=generator.integers(0, 900, 37), min_p=0.001)
    together = np.asarray(process(jnp.asarray(logits), rows))
    for at in (0, 17, 36):
        alone = process(jnp.asarray(logits[at : at + 1]), rows.rows(np.array([at])))
        np.testing.assert_array_equal(np.asarray(alone)[0], together[at])


# ---- all of them, in their order ----


def reference(
    row: np.ndarray, marks: np.ndarray, bias: np.ndarray, banned: list[int], allowed: np.ndarray, s: dict[str, Any]
) -> tuple[np.ndarray, float]:
    """(the processed row, how near a comparison was to its boundary), in fp64."""
    z = row.astype(np.float64)
    count = marks & COUNT
    seen = (count > 0) | (marks & IN_PROMPT != 0)
    z = np.where(seen, np.where(z > 0, z / s["repetition"], z * s["repetition"]), z)
    z = z - s["frequency"] * count - s["presence"] * (count > 0)
    if s["index"] < s["min_tokens"]:
        z = np.where(marks & ENDS_ANSWER != 0, OUT, z)
    z = z + bias
    z[[i for i in banned if i != NO_ID]] = OUT
    z = np.where(allowed, z, OUT)
    if not (z > OUT).any():
        z = row.astype(np.float64)
    z = z / (s["temperature"] or 1)
    near = np.inf
    if s["min_p"] > 0:
        p = softmax(z)
        limit = s["min_p"] * p.max()
        near = np.abs(p / limit - 1).min()
        z = np.where(p >= limit, z, OUT)
    ordered = np.sort(z[z > OUT])
    if len(ordered) > 1:  # rounding makes equals of what differs in fp64
        gaps = np.diff(ordered)
        near = min(near, float(gaps.min()))
    z = reference_top_k(z, s["top_k"])
    if s["top_p"] < 1:
        near = min(near, boundary(z, s["top_p"]))
    return reference_top_p(z, s["top_p"]), near


ALL = jax.jit(process)
ONE_OF = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 3, IDS, 50]),
    "top_p": st.sampled_from([1.0, 0.2, 0.7, 0.99]),
    "presence": st.sampled_from([0.0, -1.5, 0.7]),
    "frequency": st.sampled_from([0.0, -0.6, 1.3]),
    "repetition": st.sampled_from([1.0, 0.6, 1.8]),
    "min_tokens": st.integers(0, 2),
    "index": st.integers(0, 2),
}
MARKS = st.builds(
    lambda count, prompt, ends: count | prompt | ends,
    st.integers(0, 3),
    st.sampled_from([0, IN_PROMPT]),
    st.sampled_from([0, ENDS_ANSWER]),
)


@given(st.data())
@settings(max_examples=60)
def test_the_transforms_are_those_of_the_reference(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    # No equal logits here: what rounding makes of equals after a division is not the reference's.
    logits = np.random.default_rng(seed).uniform(-6, 6, (ROWS, IDS)).astype(np.float32)
    marks = np.array(data.draw(each(st.lists(MARKS, min_size=IDS, max_size=IDS))), np.int32)
    bias = np.array(
        data.draw(each(st.lists(st.sampled_from([0.0, 2.5, -3.0, OUT]), min_size=IDS, max_size=IDS))), np.float32
    )
    banned = np.array(data.draw(each(st.lists(st.integers(-1, IDS - 1), min_size=2, max_size=2))), np.int32)
    allowed = np.array(data.draw(each(st.lists(st.booleans(), min_size=IDS, max_size=IDS))), bool)
    numbers = {name: data.draw(each(values)) for name, values in ONE_OF.items()}
    rows = rows_of(**{name: np.array(values) for name, values in numbers.items()})
    got = np.asarray(ALL(logits, rows, marks=marks, bias=bias, banned=banned, allowed=allowed))
    for at in range(ROWS):
        own = {name: values[at] for name, values in numbers.items()}
        want, near = reference(logits[at], marks[at], bias[at], banned[at].tolist(), allowed[at], own)
        if near > 1e-4:
            np.testing.assert_allclose(got[at], want, rtol=1e-5, atol=1e-5)


def test_every_row_keeps_its_argmax_and_something_finite() -> None:
    """Also where the request forbids every id: then its logits stand as they are."""
    logits = jnp.asarray([[1.0, 4.0, 2.0], [3.0, 1.0, 2.0]])
    rows = rows_of(2, top_k=2, top_p=0.999)
    nothing = process(logits, rows, allowed=jnp.array([[False] * 3, [False, True, True]]))
    assert kept(nothing) == [[1, 2], [1, 2]]
    assert np.isfinite(np.asarray(nothing).max(-1)).all()


def test_the_order_of_the_transforms_shows() -> None:
    """Controls: each pair of neighbours, the other way round, would keep or give something else."""
    logits = jnp.asarray([[2.0, 1.5, 1.0, -1.0]])
    # A bias is not penalized: 1.5 / 3 + 1 = 1.5, not 2.5 / 3.
    marks = jnp.asarray([[0, 1, 0, 0]])
    biased = process(logits, rows_of(1, repetition=3.0), marks=marks, bias=jnp.asarray([[0.0, 1.0, 0, 0]]))
    np.testing.assert_allclose(np.asarray(biased)[0], [2.0, 1.5, 1.0, -1.0], rtol=1e-6)
    # min-p sees the heated distribution: at temperature 2 the second id has e^-0.25 of the best, at 1 only e^-0.5.
    assert kept(process(logits, rows_of(1, temperature=2.0, min_p=0.7))) == [[0, 1]]
    assert kept(process(logits, rows_of(1, min_p=0.7))) == [[0]]
    # top-p counts what top-k left.
    assert kept(process(logits, rows_of(1, top_k=2, top_p=0.6))) == [[0]]
    assert kept(process(logits, rows_of(1, top_p=0.6))) == [[0, 1]]


def test_penalties_by_hand() -> None:
    """id 0 only in the prompt, 1 twice in the output, 2 in both, 3 nowhere, 4 only ends the answer."""
    marks = jnp.asarray([[IN_PROMPT, 2, IN_PROMPT | 1, 0, ENDS_ANSWER]])
    logits = jnp.asarray([[1.0, 1.0, -1.0, 1.0, 1.0]])
    rows = rows_of(1, repetition=2.0, frequency=0.25, presence=0.125)
    np.testing.assert_array_equal(penalized(logits, marks, rows), [[0.5, -0.125, -2.375, 1.0, 1.0]])


def test_neutral_rows_are_left_to_the_last_bit() -> None:
    """In a batch whose other rows use everything: neighbours pay nothing in their answers."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32) * 3)
    busy = {"top_k": 4, "top_p": 0.5, "min_p": 0.2, "presence": 1.0, "frequency": 1.0, "repetition": 2.0}
    neutral = vars(rows_of(1))
    rows = rows_of(
        2, **{name: np.array([neutral[name][0], value]) for name, value in busy.items()}, temperature=[0.7, 0.7]
    )
    marks = jnp.asarray(np.random.default_rng(2).integers(0, 3, (2, 50)), jnp.int32)
    got = process(logits, rows, marks=marks, bias=jnp.zeros((2, 50)))
    np.testing.assert_array_equal(got[0], scaled(logits, rows.temperature)[0])
    assert np.isneginf(np.asarray(got[1])).sum() >= 46
    token, _ = sample(logits, rows.temperature, rows.seed_low, rows.seed_high, rows.index, rows.forced)
    assert draw(got, rows.temperature, rows.seed_low, rows.seed_high, rows.index)[0] == token[0]


# ---- words that must not appear ----


def test_a_word_is_cut_before_its_last_token() -> None:
    words = jnp.asarray([[[-1, -1, 7], [-1, 4, 5], [3, 4, 6], [9, 4, 8], [-1, -1, -1]]])
    assert endings(words, jnp.asarray([[3, 4]])).tolist() == [[7, 5, 6, NO_ID, NO_ID]]
    assert endings(words, jnp.asarray([[NO_ID, 4]])).tolist() == [[7, 5, NO_ID, NO_ID, NO_ID]]
    assert endings(words, jnp.asarray([[4, 3]])).tolist() == [[7, NO_ID, NO_ID, NO_ID, NO_ID]]


def test_forbidden_ids_are_out_and_nothing_else_is() -> None:
    assert kept(forbid(jnp.zeros((2, 4)), jnp.asarray([[0, NO_ID], [3, 3]]))) == [[1, 2, 3], [0, 1, 2]]


# ---- draws ----


def test_plain_tokens_are_pinned() -> None:
    """The rule by which every answer so far was drawn: argmax of logits over temperature plus Gumbel noise of the key
    fold_in(seed, output index). A change here changes what a seed reproduces."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4, 300)).astype(np.float32)
    temperature = np.array([1.0, 0.6, 0.0, 1.3], np.float32)
    seeds, index = [2**63 + 5, 1, 2, 2**64 - 1], np.array([0, 9, 3, 40_000], np.int32)
    words = np.array([[s & 0xFFFFFFFF, s >> 32] for s in seeds], np.uint32)
    token, logprob = sample(
        jnp.asarray(logits),
        jnp.asarray(temperature),
        jnp.asarray(words[:, 0].view(np.int32)),
        jnp.asarray(words[:, 1].view(np.int32)),
        jnp.asarray(index),
        jnp.full(4, NO_ID),
    )
    for at in range(4):
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(words[at]), impl="threefry2x32"), index[at])
        noise = np.asarray(jax.random.gumbel(key, (300,), jnp.float32))
        heated = logits[at] / (temperature[at] or np.float32(1)) + (noise if temperature[at] else 0)
        assert token[at] == heated.argmax()
        assert logprob[at] == pytest.approx(np.log(softmax(logits[at])[token[at]]), abs=1e-5)


def test_each_place_and_stream_has_noise_of_its_own() -> None:
    low, high, index = (np.array(v, np.int32) for v in ([1, 1, 1, 2], [0, 0, 1, 0], [0, 1, 0, 0]))
    noise = np.concatenate([np.asarray(gumbel(place_keys(low, high, index, stream), 64)) for stream in range(3)])
    assert len(np.unique(noise)) == noise.size
    again = np.asarray(gumbel(place_keys(low[2:], high[2:], index[2:], 1), 64))
    np.testing.assert_array_equal(noise[6:8], again)


def test_forced_ids_win() -> None:
    row = jnp.asarray([[0.0, 9.0, 1.0]] * 2)
    zero, index = jnp.zeros(2), jnp.zeros(2, jnp.int32)
    token, logprob = sample(row, zero, index, index, index, jnp.array([2, NO_ID]))
    assert token.tolist() == [2, 1] and logprob[0] == pytest.approx(-8, abs=1e-2)


# ---- log-probabilities ----


def test_top_logprobs() -> None:
    logits = np.array([[1.0, 3.0, 3.0, OUT, 2.0], [0.0, OUT, OUT, OUT, OUT]], np.float32)
    ids, logprobs = top_logprobs(jnp.asarray(logits), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    np.testing.assert_allclose(logprobs[0], np.log(softmax(logits[0])[[1, 2, 4, 0]]), atol=1e-6)
    assert logprobs[1].tolist() == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR]
    assert rank_of(jnp.asarray(logits), jnp.array([4, 0])).tolist() == [3, 1]
    assert rank_of(jnp.asarray(logits), jnp.array([2, 3])).tolist() == [1, 2]
