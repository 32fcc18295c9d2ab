"""Acceptance of drafts on toys: exact where the answer is known token by token, by chi-square where it is by chance.

The tests are named by their number in dspark 7.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from scipy.stats import chi2

from di_jax.engine.acceptance import (
    COUPLED,
    NOT_FIXED,
    ONE_HOT,
    PROBABILISTIC,
    Proposal,
    accept,
    accept_fixed,
    block_marks,
    block_recent,
    draft,
    fixed_tokens,
    overlap,
    residual,
)
from di_jax.engine.sampler import COUNT, IN_PROMPT, RowSampling, draw, gumbel, place_keys, process

IDS, OUT = 8, -np.inf
ACCEPT, DRAW, PROCESS = jax.jit(accept), jax.jit(draw), jax.jit(process)


def rows_of(seeds: Any, temperature: Any = 1.0, **changes: Any) -> RowSampling:
    low = jnp.asarray(seeds, jnp.int32)
    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), low.shape)
    rows = RowSampling.neutral(heat, low, jnp.full_like(low, 3), jnp.zeros_like(low))
    typed = {
        name: jnp.broadcast_to(jnp.asarray(value, getattr(rows, name).dtype), low.shape)
        for name, value in changes.items()
    }
    return dataclasses.replace(rows, **typed)


def strided(requests: int, drafts: int) -> Array:
    """Rows of blocks that are all as long."""
    return jnp.arange(requests * (drafts + 1), dtype=jnp.int32).reshape(requests, drafts + 1)


def of_block(rows: RowSampling, drafts: int) -> RowSampling:
    """[R * (G + 1)]: the target rows of the blocks, each at its own output."""
    every = jax.tree.map(lambda a: jnp.repeat(a, drafts + 1), rows)
    return dataclasses.replace(every, index=(rows.index[:, None] + jnp.arange(drafts + 1)).reshape(-1))


# ---- one step over tables: the logits after a token, for target and draft ----


@functools.partial(jax.jit, static_argnames="way")
def verify(
    way: str, target: Array, anchor: Array, drafts: Array, verified: Array, rows: RowSampling, forced: Array
) -> Any:
    """A step over target [V, V] of logits by the token before, with any drafts, which count as one-hot."""
    requests, count = drafts.shape
    fed = jnp.concatenate([anchor[:, None], jnp.maximum(drafts, 0)], axis=1)
    each = dataclasses.replace(of_block(rows, count), forced=forced.reshape(-1))
    logits = process(target[fed.reshape(-1)], each)
    fixed = fixed_tokens(way, logits, each).reshape(requests, count + 1)
    return accept(logits, strided(requests, count), fixed, drafts, verified, rows)


def plain(target: np.ndarray, start: int, length: int, rows: RowSampling) -> np.ndarray:
    """[R, length]: token by token, without drafts."""
    tokens = [jnp.full(rows.index.shape, start, jnp.int32)]
    for index in range(length):
        logits = PROCESS(jnp.asarray(target)[tokens[-1]], rows)
        at = jnp.full_like(rows.index, index)
        tokens.append(DRAW(logits, rows.temperature, rows.seed_low, rows.seed_high, at))
    return np.stack([np.asarray(t) for t in tokens[1:]], axis=1)


Propose = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]


def decode(
    way: str,
    target: np.ndarray,
    rows: RowSampling,
    length: int,
    propose: Propose,
    schedule: Callable[[np.random.Generator, int], np.ndarray],
    *,
    drafts: int = 3,
    forced: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """([R, length] tokens, accepted share of what was verified [R]) of steps over any drafts and lengths."""
    generator = np.random.default_rng(1)
    requests = len(rows.index)
    told: list[list[int]] = [[] for _ in range(requests)]
    anchor = np.zeros(requests, np.int32)
    counts = np.zeros((2, requests))
    must = np.full((requests, length + drafts + 1), NOT_FIXED, np.int32)
    if forced is not None:
        must[:, :length] = forced
    while min(map(len, told)) < length:
        index = np.array([min(len(t), length) for t in told], np.int32)
        own = dataclasses.replace(rows, index=jnp.asarray(index))
        x = propose(generator, anchor, index).astype(np.int32)
        verified = schedule(generator, requests).astype(np.int32)
        ahead = np.minimum(index[:, None] + np.arange(drafts + 1), must.shape[1] - 1)
        ids = np.take_along_axis(must, ahead, axis=1)
        done = verify(way, jnp.asarray(target), jnp.asarray(anchor), x, verified, own, ids)
        token, count = np.asarray(done.token), np.asarray(done.count)
        assert (count <= verified).all() and (token[np.arange(requests), count] >= 0).all()
        assert ((token >= 0).sum(axis=1) == count + 1).all(), "a token more than was kept, then nothing"
        counts += count, verified
        for r in range(requests):
            told[r] += token[r, : count[r] + 1].tolist()
        anchor = np.asarray(done.newest)
    return np.array([t[:length] for t in told]), counts[0] / np.maximum(counts[1], 1)


def integer_logits(seed: int) -> np.ndarray:
    """Small integers: no rounding anywhere, and many ties."""
    return np.random.default_rng(seed).integers(-2, 3, (IDS, IDS)).astype(np.float32)


def garbage(generator: np.random.Generator, anchor: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Any ids, the placeholder among them."""
    return generator.integers(-1, IDS, (len(anchor), 3))


def any_length(generator: np.random.Generator, requests: int) -> np.ndarray:
    return generator.integers(0, 4, requests)


def all_of(length: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, requests: np.full(requests, length)


@given(st.integers(0, 10_000))
@settings(max_examples=10)
def test_t1_greedy_is_what_it_is_without_drafts(seed: int) -> None:
    target, rows = integer_logits(seed), rows_of(np.arange(4), 0.0)
    want = plain(target, 0, 9, rows)
    for schedule in (any_length, all_of(0), all_of(3)):
        got, _ = decode(ONE_HOT, target, rows, 9, garbage, schedule)
        np.testing.assert_array_equal(got, want)


def followers(target: np.ndarray) -> Propose:
    """Drafts that are all right."""

    def propose(generator: np.random.Generator, anchor: np.ndarray, index: np.ndarray) -> np.ndarray:
        found = [anchor]
        for _ in range(3):
            found.append(target[found[-1]].argmax(axis=1))
        return np.stack(found[1:], axis=1)

    return propose


@pytest.mark.parametrize("way", [ONE_HOT, COUPLED])
def test_t2_adversarial_drafts(way: str) -> None:
    """Right ones are all kept, a placeholder or an id that never comes is never kept, the answer is the same."""
    target, rows = integer_logits(5), rows_of(np.arange(4), 0.0)
    target[:, 7] = -9.0  # the noise token is never emitted
    want = plain(target, 0, 12, rows)
    cases: tuple[tuple[Propose, float], ...] = (
        (followers(target), 1.0),
        (lambda g, a, i: np.full((len(a), 3), 7), 0.0),
        (lambda g, a, i: np.full((len(a), 3), -1), 0.0),
    )
    for propose, share in cases:
        for schedule in (all_of(3), any_length):
            got, accepted = decode(way, target, rows, 12, propose, schedule)
            np.testing.assert_array_equal(got, want)
            assert (accepted == share).all()


# One shape for all that sample: 24 requests of all kinds.
MANY = {"top_k": np.arange(24) % 5, "top_p": np.linspace(0.6, 1, 24), "min_p": np.arange(24) % 2 * 0.05}


def test_t3_no_verified_drafts_are_plain_decoding() -> None:
    """Sampled too: the bonus token has the noise that the token of plain decoding has."""
    target, rows = integer_logits(3), rows_of(np.arange(24), np.linspace(0, 2, 24), **MANY)
    got, _ = decode(ONE_HOT, target, rows, 6, garbage, all_of(0))
    np.testing.assert_array_equal(got, plain(target, 0, 6, rows))
    assert len(np.unique(got, axis=0)) > 15


def test_t25_coupled_tokens_depend_on_nothing_but_the_seed() -> None:
    """Any drafts, lengths, neighbours and order: the tokens are those of plain decoding of the same seeds."""
    target, rows = integer_logits(4), rows_of(np.arange(24), np.linspace(0, 1.5, 24), **MANY)
    want = plain(target, 0, 8, rows)
    for schedule in (any_length, all_of(0), all_of(3)):
        np.testing.assert_array_equal(decode(COUPLED, target, rows, 8, garbage, schedule)[0], want)
    order = np.random.default_rng(0).permutation(24)[:4]
    got, _ = decode(COUPLED, target, rows.rows(order), 8, garbage, any_length)
    np.testing.assert_array_equal(got, want[order])
    # Control: without the coupling a draft that is kept replaces what the seed would have drawn.
    got, _ = decode(ONE_HOT, target, rows, 8, garbage, all_of(3))
    assert (got != want).any()


def test_forced_ids_come_whatever_was_drafted() -> None:
    target, rows = integer_logits(6), rows_of(np.arange(4), [0.0, 1.0, 1.0, 0.0])
    forced = np.random.default_rng(2).integers(0, IDS, (4, 7))
    forced[2] = NOT_FIXED
    forced[3, 2:] = NOT_FIXED
    for way in (ONE_HOT, COUPLED):
        got, _ = decode(way, target, rows, 7, garbage, any_length, forced=forced)
        np.testing.assert_array_equal(got[forced >= 0], forced[forced >= 0])
        want = plain(target, int(forced[3, 1]), 5, rows_of([3], 0.0))
        np.testing.assert_array_equal(got[3, 2:], want[0])


# ---- rules of one step ----


def block(requests: int = 6, drafts: int = 3, seed: int = 0) -> dict[str, Any]:
    """Arguments of `accept`: random logits, any drafts."""
    generator = np.random.default_rng(seed)
    rows = rows_of(np.arange(requests), np.where(np.arange(requests) % 3 == 0, 0.0, 1.0), index=5)
    logits = generator.normal(size=(requests * (drafts + 1), IDS)).astype(np.float32)
    proposed = generator.normal(size=(requests, drafts, IDS)).astype(np.float32)
    fixed = fixed_tokens(PROBABILISTIC, jnp.asarray(logits), of_block(rows, drafts))
    return {
        "logits": jnp.asarray(logits),
        "row": strided(requests, drafts),
        "fixed": fixed.reshape(requests, drafts + 1),
        "drafts": jnp.asarray(generator.integers(0, IDS, (requests, drafts)), jnp.int32),
        "verified": jnp.asarray(generator.integers(0, drafts + 1, requests), jnp.int32),
        "rows": rows,
        "proposal": Proposal.of(jnp.asarray(proposed)),
    }


def test_packed_rows_are_as_good_as_strided_ones() -> None:
    given = block()
    want = ACCEPT(**given)
    # 1 + l rows of each request, in another order; what is beyond them points anywhere.
    requests = len(given["verified"])
    order = [(r, j) for r in reversed(range(requests)) for j in range(int(given["verified"][r]) + 1)]
    row = np.zeros((requests, 4), np.int32)
    for at, (r, j) in enumerate(order):
        row[r, j] = at
    packed = given["logits"].reshape(requests, 4, IDS)[tuple(np.array(order).T)]
    got = ACCEPT(**given | {"logits": packed, "row": jnp.asarray(row)})
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.count, want.count)
    assert 0 < int(got.count.sum()) < int(given["verified"].sum())


def test_a_request_does_not_see_its_neighbours() -> None:
    """Greedy and sampled ones in one batch give what each gives alone."""
    given = block()
    want = ACCEPT(**given)
    for r in range(6):
        alone = jax.tree.map(lambda a, r=r: a[r : r + 1], {k: v for k, v in given.items() if k != "logits"})
        got = ACCEPT(**alone | {"logits": given["logits"][4 * r : 4 * r + 4], "row": strided(1, 3)})
        np.testing.assert_array_equal(got.token[0], want.token[r])


def test_accept_fixed_is_accept_without_chance() -> None:
    given = block(seed=3)
    greedy = given | {"rows": dataclasses.replace(given["rows"], temperature=jnp.zeros(6))}
    greedy["fixed"] = fixed_tokens(PROBABILISTIC, given["logits"], of_block(greedy["rows"], 3)).reshape(6, 4)
    want = ACCEPT(**greedy)
    got = accept_fixed(greedy["fixed"], given["drafts"], given["verified"])
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.newest, want.newest)


def test_without_a_residual_the_token_comes_from_p() -> None:
    """A q above p everywhere, which only rounding makes: no NaN, and the token that p alone would give."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, IDS)), jnp.float32)
    rows = rows_of([1])
    swollen = dataclasses.replace(Proposal.of(logits[None, :1]), norm=jnp.full((1, 1), -50.0))
    nothing = residual(logits[:1], jax.nn.logsumexp(logits[:1], axis=-1), jax.tree.map(lambda a: a[0], swollen))
    assert np.isneginf(np.asarray(nothing)).all()
    free, refused, one = jnp.full((1, 2), NOT_FIXED), jnp.array([[2]]), jnp.array([1])
    got = ACCEPT(logits, strided(1, 1), free, refused, one, rows, swollen)
    want = draw(logits[:1], rows.temperature, rows.seed_low, rows.seed_high, rows.index)
    assert got.count[0] == 0 and got.token[0, 0] == want[0]


def test_a_placeholder_is_replaced_by_a_plain_draw() -> None:
    """Not by one from p - q: nothing was drafted."""
    given = block(seed=4) | {"drafts": jnp.full((6, 3), -1), "verified": jnp.full(6, 3, jnp.int32)}
    got = ACCEPT(**given)
    rows = given["rows"]
    want = draw(given["logits"][::4], rows.temperature, rows.seed_low, rows.seed_high, rows.index)
    np.testing.assert_array_equal(got.token[:, 0], want)
    assert (np.asarray(got.count) == 0).all()


def test_a_block_that_is_kept_whole_ends_in_a_plain_draw() -> None:
    """With the noise of its own place, l outputs after the first: whoever verified less would draw it alike."""
    given = block(seed=2)
    given["fixed"] = given["fixed"].at[:, :3].set(given["drafts"])
    got = ACCEPT(**given)
    np.testing.assert_array_equal(got.count, given["verified"])
    at = given["rows"].index + got.count
    rows, logits = given["rows"], given["logits"].reshape(6, 4, IDS)[jnp.arange(6), got.count]
    want = draw(logits, rows.temperature, rows.seed_low, rows.seed_high, at)
    free = np.asarray(given["fixed"])[np.arange(6), np.asarray(got.count)] == NOT_FIXED
    assert free.sum() >= 2
    np.testing.assert_array_equal(np.asarray(got.newest)[free], np.asarray(want)[free])


def test_drafts_are_drawn_from_the_numbers_that_are_kept() -> None:
    """Inside one compiled program too, where a rounding that is undone at once could be left out."""
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(400, 2000)).astype(np.float32) * 3 + 30)
    rows = rows_of(np.arange(400), index=2)
    start = jnp.zeros_like(rows.index)
    token, proposal = jax.jit(draft, static_argnums=0)(PROBABILISTIC, logits, rows, start)
    assert proposal.logits.dtype == jnp.bfloat16
    keys = jax.vmap(jax.random.fold_in)(place_keys(rows.seed_low, rows.seed_high, rows.index, 1), start)
    noise = np.asarray(gumbel(keys, 2000))
    kept = np.asarray(proposal.logits.astype(jnp.float32))
    np.testing.assert_array_equal(token, (kept + noise).argmax(axis=1))
    np.testing.assert_allclose(np.exp(proposal.logprobs()).sum(axis=-1), 1, atol=1e-5)
    assert ((np.asarray(logits) + noise).argmax(axis=1) != np.asarray(token)).any(), "the rounding shows"


def test_bytes_of_a_proposal() -> None:
    """Of the released model: 1.29 MB a sequence, half of fp32."""
    kept = jax.eval_shape(Proposal.of, jax.ShapeDtypeStruct((5, 129_280), jnp.float32))
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept)) == 1_292_820


def test_overlap_is_the_chance_to_be_kept() -> None:
    p, q = (np.random.default_rng(s).normal(size=(4, IDS)).astype(np.float32) for s in (1, 2))
    p[0, 3], q[1, 2] = OUT, OUT
    x = jnp.array([3, 1, 4, 1])
    proposal = Proposal.of(jnp.asarray(q))
    exact = [np.exp(np.asarray(a, np.float64)) for a in (jax.nn.log_softmax(jnp.asarray(p)), proposal.logprobs())]
    np.testing.assert_allclose(overlap(jnp.asarray(p), x, proposal), np.minimum(*exact).sum(axis=1), atol=1e-6)
    np.testing.assert_allclose(overlap(jnp.asarray(p), x), exact[0][np.arange(4), x], atol=1e-6)


def test_rows_of_a_block_count_the_drafts_before_them() -> None:
    marks = jnp.asarray([[1, IN_PROMPT, 0, IN_PROMPT | 2]])
    got = np.asarray(block_marks(marks, jnp.array([[1, 1, -1]])))[0]
    assert (got & COUNT).tolist() == [[1, 0, 0, 2], [1, 1, 0, 2], [1, 2, 0, 2], [1, 2, 0, 2]]
    assert (got & IN_PROMPT > 0).tolist() == [[False, True, False, True]] * 4


def test_rows_of_a_block_see_the_drafts_before_them() -> None:
    got = block_recent(jnp.array([[1, 2, 3], [-1, -1, 4]]), jnp.array([[5, 6], [7, -1]]))
    assert got.tolist() == [[[1, 2, 3], [2, 3, 5], [3, 5, 6]], [[-1, -1, 4], [-1, 4, 7], [4, 7, -1]]]


# ---- distributions ----

DRAFTS, TOLD = 2, 3  # drafts of a block, tokens whose joint distribution is looked at
TRIALS = 200_000
PER_CALL, FIRST_SEED = 8192, 10_000_000
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
}
CONFIGS = [(name, heat) for name in FILTERS for heat in (0.5, 1.0, 1.5)]


def toy() -> tuple[np.ndarray, np.ndarray]:
    """Logits of target and draft [V, V] by the token before. After 3 their supports are disjoint, after 4 they are
    equal, after 5 the draft leaves out what the target likes, after 6 the target what the draft likes."""
    generator = np.random.default_rng(11)
    target = generator.normal(size=(IDS, IDS)).astype(np.float32) * 1.2
    proposed = (target + generator.normal(size=(IDS, IDS)) * 1.0).astype(np.float32)
    target[3, :4], proposed[3, 4:] = OUT, OUT
    proposed[4] = target[4]
    proposed[5, target[5].argmax()] = OUT
    target[6, proposed[6].argmax()] = OUT
    return target, proposed


@functools.cache
def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Processed logits of target and draft [configs, V, V], and a confidence [configs, V] by the token before."""

    def processed(table: np.ndarray) -> np.ndarray:
        rows = [rows_of(np.zeros(IDS), heat, **FILTERS[name]) for name, heat in CONFIGS]
        return np.stack([np.asarray(PROCESS(jnp.asarray(table), each)) for each in rows])

    target, proposed = map(processed, toy())
    p, q = (np.asarray(jax.nn.softmax(table, axis=-1)) for table in (target, proposed))
    return target, proposed, np.minimum(p, q).sum(axis=-1)


def budget(survival: Array) -> Array:
    """int32 [pairs]: the drafts of a pair of requests that promise most tokens a second, [pairs, 2 G] survivals."""
    promised = 2 + jnp.cumsum(-jnp.sort(-survival, axis=1), axis=1)
    seconds = jnp.array([1.0, 1.4, 1.45, 1.5, 2.2])  # for 0..4 drafts: a stair
    return jnp.argmax(jnp.pad(promised, ((0, 0), (1, 0)), constant_values=2.0) / seconds, axis=1)


@functools.partial(jax.jit, static_argnames=("way", "shared"))
def simulate(
    way: str,
    tables: tuple[Array, Array, Array],
    config: Array,
    varlen: Array,
    seeds: Array,
    *,
    shared: bool = False,
) -> tuple[Array, Array]:
    """([R, 3] first tokens, [R] drafts verified) of steps with `draft` and `accept`. Requests 2 i and 2 i + 1 share
    the budget of a varlen step, which comes from the block before (dspark 3.3) and is spent by this one's confidence.

    shared: a fault on purpose, drafts drawn with the noise of the residual.
    """
    target, proposed, confidence = tables
    requests = len(config)
    rows = dataclasses.replace(rows_of(seeds), seed_high=config * 2 + varlen)
    anchor, index = jnp.zeros(requests, jnp.int32), jnp.zeros(requests, jnp.int32)
    told = jnp.full((requests, TOLD), -1, jnp.int32)
    allowed = jnp.full(requests // 2, 2 * DRAFTS)  # without history all are verified
    total = jnp.zeros(requests, jnp.int32)
    for _ in range(TOLD):
        own = dataclasses.replace(rows, index=index)
        drafts, proposals, chance, previous = [], [], [], anchor
        for k in range(DRAFTS):
            here = dataclasses.replace(own, index=index + k)
            logits = proposed[config, previous]
            chance.append(confidence[config, previous])
            previous, proposal = draft(way, logits, here, index)
            if shared:
                previous, _ = draft(COUPLED, logits, here, index)
            drafts.append(previous)
            proposals.append(proposal)
        survival = jnp.cumprod(jnp.stack(chance, axis=1), axis=1).reshape(requests // 2, -1)
        rank = jnp.argsort(jnp.argsort(-survival, axis=1, stable=True), axis=1, stable=True)
        chosen = (rank < allowed[:, None]).reshape(requests, DRAFTS).sum(axis=1, dtype=jnp.int32)
        verified = jnp.where(varlen, chosen, DRAFTS)
        x = jnp.stack(drafts, axis=1)
        logits = target[config[:, None], jnp.concatenate([anchor[:, None], x], axis=1)].reshape(-1, IDS)
        fixed = fixed_tokens(way, logits, of_block(own, DRAFTS)).reshape(requests, DRAFTS + 1)
        q = None if way == ONE_HOT else jax.tree.map(lambda *a: jnp.stack(a, axis=1), *proposals)
        done = accept(logits, strided(requests, DRAFTS), fixed, x, verified, own, q)
        ahead = jnp.arange(DRAFTS + 1)
        place = jnp.where(ahead <= done.count[:, None], index[:, None] + ahead, TOLD)
        told = told.at[jnp.arange(requests)[:, None], place].set(done.token, mode="drop")
        total += jnp.where(index < TOLD, verified, 0)
        anchor, index, allowed = done.newest, index + done.count + 1, budget(survival)
    return told, total


def expected(config: int) -> np.ndarray:
    """Chance [V^3] of the first three tokens."""
    p = np.exp(tables()[0][config].astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    return np.einsum("a,ab,bc->abc", p[0], p, p).reshape(-1)


def chi_square(observed: np.ndarray, chance: np.ndarray) -> float:
    """The p-value; cells of fewer than 5 expected are one cell. 0 when something impossible happened."""
    trials = observed.sum()
    if observed[chance == 0].sum():
        return 0.0
    small = chance * trials < 5
    counts = np.append(observed[~small], observed[small].sum())
    wanted = np.append(chance[~small], chance[small].sum()) * trials
    filled = wanted > 0
    statistic = ((counts - wanted)[filled] ** 2 / wanted[filled]).sum()
    return float(chi2.sf(statistic, filled.sum() - 1))


def p_values(
    way: str, configs: list[int], trials: int = TRIALS, varlens: tuple[bool, ...] = (False, True), shared: bool = False
) -> dict[tuple[str, float, bool], float]:
    """Of every config, at fixed and at lagged lengths."""
    kinds = [(config, varlen) for config in configs for varlen in varlens]
    config, varlen = (np.repeat(np.array(v), PER_CALL) for v in zip(*kinds))
    cells = np.zeros((len(kinds), IDS**TOLD), np.int64)
    lengths = np.zeros(len(kinds))
    for call in range(-(-trials // PER_CALL)):
        seeds = FIRST_SEED + call * PER_CALL + np.tile(np.arange(PER_CALL), len(kinds))
        told, total = simulate(way, tables(), jnp.asarray(config, jnp.int32), jnp.asarray(varlen), seeds, shared=shared)
        joint = np.asarray(told) @ np.array([IDS**2, IDS, 1])
        for at, rows in enumerate(joint.reshape(len(kinds), PER_CALL)):
            cells[at] += np.bincount(rows, minlength=IDS**TOLD)
        lengths += np.asarray(total).reshape(len(kinds), PER_CALL).sum(axis=1)
    if len(varlens) == 2:
        fixed, varied = lengths.reshape(-1, 2).T
        assert (varied < 0.95 * fixed).all(), "the lengths really vary"
    return {
        (*CONFIGS[config], varlen): chi_square(counts, expected(config))
        for (config, varlen), counts in zip(kinds, cells)
    }


@pytest.mark.parametrize("way", [ONE_HOT, PROBABILISTIC])
def test_t21_the_distribution_is_the_targets(way: str) -> None:
    found = p_values(way, list(range(len(CONFIGS))))
    assert len(found) == 24
    worst = min(found, key=found.__getitem__)
    assert found[worst] > 1e-3 / 48, f"{worst}: p = {found[worst]:.2e}"
    assert 0.2 < np.median(list(found.values())) < 0.8


def test_t23_shared_noise_is_found() -> None:
    """Control: a draft drawn with the noise that draws its replacement."""
    assert p_values(PROBABILISTIC, [1], 40_000, (False,), shared=True)["plain", 1.0, False] < 1e-6


def test_t9_a_budget_from_the_block_itself_is_found() -> None:
    """Control, the paper's example: p = (.7, .3), q = (.5, .5), chances .8 and then .9 after A, 0 after B, speeds 1, .5
    and .45 for 1 to 3 rows. The best budget is 2 after A and 0 after B: decided by the block that it verifies it makes
    P(A) = .85, by the block before it does no harm."""
    trials, rows = 100_000, rows_of(np.arange(100_000), index=5)
    p, q = (jnp.broadcast_to(jnp.log(jnp.asarray(x)), (trials, 2)) for x in ([0.7, 0.3], [0.5, 0.5]))
    x, proposals = zip(
        *(draft(PROBABILISTIC, q, rows_of(np.arange(trials), index=5 + k), rows.index) for k in range(2))
    )
    before, _ = draft(PROBABILISTIC, q, rows_of(np.arange(trials), index=4), rows.index - 1)
    kept = jax.tree.map(lambda *a: jnp.stack(a, axis=1), *proposals)
    row, free = jnp.tile(jnp.arange(trials)[:, None], 3), jnp.full((trials, 3), NOT_FIXED)
    share = {}
    for name, seen in (("this block", x[0]), ("the block before", before)):
        verified = jnp.where(seen == 0, 2, 0)
        done = ACCEPT(p, row, free, jnp.stack(x, axis=1), verified, rows, kept)
        share[name] = float(np.mean(np.asarray(done.token[:, 0]) == 0))
    assert share["this block"] == pytest.approx(0.85, abs=0.005)
    assert share["the block before"] == pytest.approx(0.70, abs=0.005)


def test_t21_the_chi_square_finds_another_temperature() -> None:
    """Control of the statistics: 2% off is found, nothing is not."""
    chance = expected(1)
    assert chi_square(np.random.default_rng(0).multinomial(TRIALS, chance), chance) > 1e-3
    warmer = chance**0.98
    assert chi_square(np.random.default_rng(0).multinomial(TRIALS, warmer / warmer.sum()), chance) < 1e-3


@pytest.mark.parametrize("way", [ONE_HOT, PROBABILISTIC])
def test_t22_accepted_lengths_are_those_of_the_overlaps(way: str) -> None:
    """Context-free: E[a] is the sum over k of the product of the first k chances to be kept."""
    trials, drafts = 50_000, 3
    p, q = np.random.default_rng(3).normal(size=(2, drafts + 1, IDS)).astype(np.float32)

    @jax.jit
    def step(rows: RowSampling) -> tuple[Array, Array]:
        x, proposals = [], []
        for k in range(drafts):
            here = dataclasses.replace(rows, index=rows.index + k)
            token, proposal = draft(way, jnp.broadcast_to(q[k], (trials, IDS)), here, rows.index)
            x.append(token)
            proposals.append(proposal)
        told = jnp.stack(x, axis=1)
        kept = None if way == ONE_HOT else jax.tree.map(lambda *a: jnp.stack(a, axis=1), *proposals)
        fixed = jnp.full((trials, drafts + 1), NOT_FIXED)
        row = jnp.broadcast_to(jnp.arange(drafts + 1), (trials, drafts + 1))
        done = accept(jnp.asarray(p), row, fixed, told, jnp.full(trials, drafts, jnp.int32), rows, kept)
        first = jax.tree.map(lambda a: a[0], kept)
        return done.count, overlap(jnp.asarray(p[:drafts]), told[0], first)

    counts, chances = map(np.asarray, step(rows_of(np.arange(trials))))
    survival = np.cumprod(chances.astype(np.float64))
    assert counts.mean() == pytest.approx(survival.sum(), abs=4 * counts.std() / np.sqrt(trials))
    for k in range(drafts):
        error = 4 * np.sqrt(survival[k] / trials)
        assert np.mean(counts > k) == pytest.approx(survival[k], abs=error)


def test_coupled_drafts_are_kept_nearly_as_often() -> None:
    """Not below the bound of the coupling, nor above 1 - TV."""
    trials = 50_000
    p, q = np.random.default_rng(9).normal(size=(2, IDS)).astype(np.float32)
    rows = rows_of(np.arange(trials))
    places = (rows.temperature, rows.seed_low, rows.seed_high, rows.index)
    mine, theirs = (DRAW(jnp.broadcast_to(z, (trials, IDS)), *places) for z in (p, q))
    share = float(np.mean(np.asarray(mine) == np.asarray(theirs)))
    same = float(overlap(jnp.asarray(p[None]), jnp.zeros(1, jnp.int32), Proposal.of(jnp.asarray(q[None])))[0])
    assert same / (2 - same) - 0.01 < share < same - 0.01
