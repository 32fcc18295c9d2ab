"""Budgets, what they may see, and whether drafting pays (dspark 7: T6, T9, T14, T15)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.allocation import allocate_reference
from di_jax.engine.runtime_estimator import StepTimes
from di_jax.engine.verification import (
    ENOUGH_BLOCKS,
    HISTORY,
    JUDGED_STEPS,
    LEAST_PAUSE,
    LONGEST_PAUSE,
    MOST_DOUBLINGS,
    PROMISED,
    REMEMBERED,
    TRIAL_SHARE,
    UNKNOWN_STEPS,
    DraftSwitch,
    Promises,
    RateLedger,
    Round,
    TypicalBlock,
    choose_rows,
    draft_caps,
    drafting_gain,
    expected_tokens,
    fill,
    judged_steps,
    pause_steps,
    survival,
)

K = 5


def times(rows: list[int], seconds: list[float]) -> StepTimes:
    return StepTimes(np.array(rows), np.array(seconds, np.float64))


# -- T15: the budget


def tables(most: int) -> Iterator[StepTimes]:
    """A curve over every number of rows, staircases, one that jumps, flat and steep ones."""
    every = list(range(1, most + 1))
    yield times(every, [10 + 0.8 * rows for rows in every])
    yield times(every, [10 + 0.05 * rows**2 for rows in every])
    yield times([2, 4, 8, 16], [10, 10.5, 13, 20])
    yield times([4, 6, 10, 16], [5, 9, 9.1, 30])
    yield times(every, [3.0] * len(every))
    yield times(every, [float(10**rows) for rows in every])


@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_budget_is_the_best_of_all_lengths(requests: int) -> None:
    rng, k = np.random.default_rng(requests), 3
    for table, _ in itertools.product(tables(requests * (1 + k)), range(12)):
        stated = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0, *rng.random(4)], (requests, k)).astype(np.float32)
        chance = survival(stated)
        caps = rng.integers(0, k + 1, requests)

        def rate(lengths: tuple[int, ...], chance: np.ndarray = chance, table: StepTimes = table) -> float:
            tokens = len(lengths) + sum(chance[r, :length].sum() for r, length in enumerate(lengths))
            return float(tokens / table.at(len(lengths) + sum(lengths)))

        every = list(itertools.product(*(range(cap + 1) for cap in caps)))
        best = max(rate(lengths) for lengths in every)
        rows = choose_rows(chance[None], caps, table, margin=0)
        drafts = fill(rows, caps)
        found = tuple(allocate_reference(stated, caps, drafts).tolist())
        assert rate(found) == pytest.approx(best, rel=1e-6)
        # No smaller bucket does as well, and no draft is left out that the bucket has room for.
        smaller = [rate(n) for n in every if table.bucket(requests + sum(n)) < table.bucket(rows)]
        assert not smaller or max(smaller) < best * (1 + 1e-6)
        assert sum(found) == drafts == min(rows - requests, caps.sum())
        tokens = expected_tokens(chance[None], caps, drafts)
        assert tokens == pytest.approx(best * table.at(requests + drafts), rel=1e-6)


def test_flat_times_verify_everything_and_steep_ones_nothing() -> None:
    chance, caps = np.full((1, 3, K), 0.4, np.float32), np.array([K, 2, 4])
    every = list(range(1, 19))
    assert fill(choose_rows(chance, caps, times(every, [1.0] * 18)), caps) == 11
    assert fill(choose_rows(chance, caps, times(every, [2.0**rows for rows in every])), caps) == 0


def test_unknown_times_verify_everything() -> None:
    caps = np.array([K, 2, 4])
    assert choose_rows(np.zeros((1, 3, K)), caps, StepTimes(np.array([4, 8, 16, 32]), None)) == 16
    assert fill(16, caps) == 11


def test_margin_decides_when_fewer_drafts_are_taken() -> None:
    chance, caps = np.array([[[0.5, 0.1]]]), np.array([2])
    table = times([1, 2, 3], [1.0, 1.0, 1.1])  # rates 1, 1.5 and 1.4545: 3.1% more with one draft than with both
    assert [choose_rows(chance, caps, table, margin=m) for m in (0, 0.03, 0.032)] == [2, 2, 3]
    chance = np.array([[[0.5, 0.0]]])  # a draft that never survives, in a bucket that costs nothing
    assert choose_rows(chance, caps, times([1, 2, 3], [1.0, 1.0, 1.0]), margin=0) == 2
    assert choose_rows(chance, caps, times([1, 2, 3], [1.0, 1.0, 1.0])) == 3


def test_ranks_agree_on_rows_before_they_fill_them() -> None:
    table = times([4, 8, 16, 32], [1.0, 1.1, 2.0, 4.0])
    caps = [np.full(3, K), np.full(1, K), np.zeros(0, np.int64)]
    chance = [np.full((1, len(c), K), 0.6) ** np.arange(1, K + 1) for c in caps]
    wanted = [choose_rows(*each, table) for each in zip(chance, caps)]
    assert wanted == [8, 8, 0]
    assert [fill(max(wanted), c) for c in caps] == [5, 5, 0]
    assert [fill(16, c) for c in caps] == [13, 5, 0]


def test_budget_averages_over_older_blocks() -> None:
    """Two opposite blocks: each alone would verify none or all; on average each draft survives with 0.5."""
    good, bad = np.ones((1, 1, 2)), np.zeros((1, 1, 2))
    table, caps = times([1, 2, 3], [1.0, 1.2, 1.7]), np.array([2])
    assert [choose_rows(b, caps, table, 0) for b in (good, bad)] == [3, 1]
    both = np.concatenate([good, bad])
    assert expected_tokens(both, caps, 2) == 2
    assert choose_rows(both, caps, table, 0) == 2


def test_rows_that_no_bucket_holds() -> None:
    chance, caps = np.ones((1, 4, K)), np.full(4, K)
    assert choose_rows(chance, caps, times([4, 8], [1.0, 1.0])) == 8
    with pytest.raises(ValueError, match="no decode bucket holds 4 rows; the largest has 2"):
        choose_rows(chance, caps, times([1, 2], [1.0, 1.0]))


def test_caps_leave_room_for_the_token_that_is_always_drawn() -> None:
    assert draft_caps(np.array([0, 1, 2, 5, 6, 100]), K).tolist() == [0, 0, 1, 4, 5, 5]


# -- T6 and T14: what a budget may see


def block(owner: int, round_: int) -> np.ndarray:
    """A confidence that tells whose it is and of which round."""
    return np.full((1, K), (1 + owner * 512 + round_) / 2**23, np.float32)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_block_that_is_verified_is_never_seen(overlapped: bool) -> None:
    """C2: whether rounds overlap or not, round N sees what round N - 2 drafted; what round N - 1 did is poison."""
    slots, caps = np.arange(3), np.full(3, K)
    table = times([*range(3, 19)], [10 + 0.6 * rows for rows in range(3, 19)])
    blocks = np.random.default_rng(0).random((30, 3, K), np.float32)
    budgets: dict[str, list[int]] = {"as drafted": [], "poisoned": []}
    for kind, budget in budgets.items():
        ledger, flights = RateLedger(3, K), []
        for n in range(30):
            verified = ledger._rounds[:, (n - 1) % (HISTORY + 1)]
            kept = verified.copy()
            if kind == "poisoned" and n:
                verified[:] = np.nan
            begun = ledger.schedule(slots)
            verified[:] = kept
            if n >= 2:
                np.testing.assert_array_equal(begun.survival[0], survival(blocks[n - 2]))
            assert begun.known[0].all() == (n >= 2) and not np.isnan(begun.survival).any()
            budget.append(fill(choose_rows(begun.survival, caps, table, 0), caps))
            flights.append((begun.owners, blocks[n]))
            while len(flights) > overlapped:
                ledger.process(slots, *flights.pop(0))
    assert budgets["poisoned"] == budgets["as drafted"] and len(set(budgets["as drafted"])) > 1


def test_older_blocks_are_as_many_as_few_requests_need() -> None:
    ledger, slots = RateLedger(300, K), np.arange(300)
    assert ledger.schedule(slots[:1]).survival.shape == (HISTORY, 1, K)
    assert ledger.schedule(slots[1:257]).survival.shape == (1, 256, K)
    assert ledger.schedule(slots[257:]).survival.shape == (-(-ENOUGH_BLOCKS // 43), 43, K)
    assert ledger.schedule(slots[:0]).survival.shape[1:] == (0, K)


def test_rounds_that_did_not_draft_are_not_known() -> None:
    ledger, slot = RateLedger(1, K), np.array([0])
    for n in range(4):
        begun = ledger.schedule(slot)
        ledger.process(slot, begun.owners, None if n == 1 else block(0, n))
    assert ledger.schedule(slot).known[:4, 0].tolist() == [True, False, True, False]  # rounds 2, 1, 0; none before


def test_requests_that_did_not_draft_are_not_known() -> None:
    ledger, slots = RateLedger(3, K), np.arange(3)
    first = ledger.schedule(slots)
    ledger.reset(slots[1:2])
    ledger.schedule(slots[1:2])
    ledger.process(slots, first.owners, np.full((3, K), 0.5), np.array([True, True, False]))
    ledger.schedule(slots[[0, 2]])
    begun = ledger.schedule(slots[[0, 2]])
    assert begun.known[0].tolist() == [True, False]
    assert begun.survival[0, 0].tolist() == [0.5 ** (n + 1) for n in range(K)] and (begun.survival[0, 1] == 1).all()


def test_more_than_one_round_in_flight_is_told() -> None:
    ledger, slots = RateLedger(4, K), np.array([1, 3])
    ledger.schedule(slots)
    ledger.schedule(slots)
    with pytest.raises(RuntimeError, match="slot 1: 2 rounds scheduled, 0 processed"):
        ledger.schedule(slots)
    ledger.reset(slots)
    owners = ledger.schedule(slots).owners
    ledger.process(slots, owners, None)
    with pytest.raises(RuntimeError, match="slot 1: a round came back that was not scheduled"):
        ledger.process(slots, owners, None)


@given(st.data())
def test_no_request_sees_what_is_not_its_own(data: st.DataObject) -> None:
    """Random interleavings of rounds, results, admissions and preemptions, against a plain account by request."""
    ledger = RateLedger(3, K)
    request = [0, 1, 2]  # in each slot
    rounds = {0: 0, 1: 0, 2: 0}  # scheduled, by request
    seen_by: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}  # blocks that came back
    flights: list[tuple[np.ndarray, np.ndarray, list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["schedule", "schedule", "process", "replace"]))
        if action == "replace":
            slot = data.draw(st.integers(0, 2))
            ledger.reset(np.array([slot]))
            request[slot] = len(rounds)
            rounds[request[slot]], seen_by[request[slot]] = 0, []
        elif action == "process" and flights:
            slots, owners, who, which = flights.pop(0)
            ledger.process(slots, owners, np.concatenate([block(*each) for each in zip(who, which)]))
            for r, n in zip(who, which):
                seen_by[r].append(block(r, n)[0])
        elif action == "schedule":
            ready = [s for s in range(3) if rounds[request[s]] - len(seen_by[request[s]]) <= 1]
            chosen = data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1)) if ready else []
            if not chosen:
                continue
            slots = np.array(sorted(chosen))
            begun = ledger.schedule(slots)
            for i, s in enumerate(slots):
                r = request[s]
                for b in range(len(begun.known)):
                    n = rounds[r] - 2 - b
                    expected = survival(block(r, n))[0] if n >= 0 else np.ones(K)
                    np.testing.assert_array_equal(begun.survival[b, i], expected)
                    assert begun.known[b, i] == (n >= 0) and (n < 0 or n < len(seen_by[r]))
            flights.append((slots, begun.owners, [request[s] for s in slots], [rounds[request[s]] for s in slots]))
            for s in slots:
                rounds[request[s]] += 1
        ahead = ledger.scheduled - ledger.processed
        assert (ahead >= 0).all() and (ahead <= 2).all()  # 2: with the round that was just scheduled


# -- T9: a budget that sees the block itself biases the answers


P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])  # target and draft of the first token, over A and B
COUNTER = times([1, 2, 3], [1 / 1.0, 1 / 0.5, 1 / 0.45])


def confidence(first: int) -> np.ndarray:
    """Of a block that begins with A (0) or B (1): the second draft survives only behind A."""
    return np.array([[0.8, 0.9 if first == 0 else 0.0]], np.float32)


def law_of_first_token(drafts_of: list[int]) -> np.ndarray:
    """Exact, when a block that begins with x has drafts_of[x] drafts verified."""
    law = np.zeros(2)
    residual = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
    for x in (0, 1):
        length = int(allocate_reference(confidence(x), np.array([2]), drafts_of[x])[0])
        if length == 0:
            law += Q[x] * P
            continue
        accepted = min(1, P[x] / Q[x])
        law[x] += Q[x] * accepted
        law += Q[x] * (1 - accepted) * residual
    return law


def early_stop(confidence: np.ndarray) -> int:
    """[P] Alg. 1: admits in order of survival and stops where the rate does not rise."""
    chance, drafts = survival(confidence)[None], 0

    def rate(drafts: int) -> float:
        return expected_tokens(chance, np.array([2]), drafts) / COUNTER.at(1 + drafts)

    while drafts < 2 and rate(drafts + 1) > rate(drafts):
        drafts += 1
    return drafts


def test_a_budget_from_the_block_itself_is_biased() -> None:
    caps = np.array([2])
    own = [fill(choose_rows(survival(confidence(x))[None], caps, COUNTER), caps) for x in (0, 1)]
    assert own == [2, 0]
    assert law_of_first_token(own)[0] == pytest.approx(0.85)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("older", [0, 1])
def test_a_lagged_budget_is_not(older: int, overlapped: bool) -> None:
    """The budget of round 2 comes from the ledger, which knows both blocks or, overlapped, only the older one."""
    caps, slot, drafts = np.array([2]), np.array([0]), []
    for first in (0, 1):
        ledger = RateLedger(1, 2)
        for n, drafted in enumerate((older, first)):
            begun = ledger.schedule(slot)
            if n == 0 or not overlapped:
                ledger.process(slot, begun.owners, confidence(drafted))
        seen = ledger.schedule(slot).survival[:1]
        drafts.append(fill(choose_rows(seen, caps, COUNTER), caps))
    assert drafts == ([2, 2] if older == 0 else [0, 0])
    np.testing.assert_allclose(law_of_first_token(drafts), P)


def test_early_stop_is_not_either() -> None:
    drafts = [early_stop(confidence(x)) for x in (0, 1)]
    np.testing.assert_allclose(law_of_first_token(drafts), P)


# -- whether drafting pays


def pauses_of(switch: DraftSwitch, requests: int, gain: float, steps: int) -> list[int]:
    """Lengths of the pauses of so many steps that all have this gain; two steps pass until a block is known."""
    drafted, unknown = [], UNKNOWN_STEPS
    for _ in range(steps):
        drafts = switch.next(requests, None if unknown else gain)
        unknown = max(0, unknown - 1) if drafts else UNKNOWN_STEPS
        drafted.append(drafts)
    return [len(list(run)) for on, run in itertools.groupby(drafted) if not on][:-1]  # the last may be cut short


@pytest.mark.parametrize(("requests", "judged"), [(1, 16), (8, 16), (64, 4), (128, 2), (1024, 2)])
def test_a_gain_below_one_ends_drafting_for_a_stretch(requests: int, judged: int) -> None:
    switch = DraftSwitch()
    pause = pause_steps(0.9, judged + UNKNOWN_STEPS)
    steps = [switch.next(requests, 0.9) for _ in range(judged - 1 + pause + 1)]
    assert steps == [True] * (judged - 1) + [False] * pause + [True]


def test_one_bad_block_does_not() -> None:
    switch = DraftSwitch()
    assert all(switch.next(8, 0.5 if n % JUDGED_STEPS == 0 else 1.2) for n in range(200))


@pytest.mark.parametrize("requests", [1, 8, 64, 256])
def test_what_paid_for_long_is_not_given_up_for_a_few_bad_steps(requests: int) -> None:
    switch, enough = DraftSwitch(), judged_steps(requests)
    assert not all([switch.next(requests, 0.6) for _ in range(enough)]), "at first they are all that is known"
    switch = DraftSwitch()
    assert all(switch.next(requests, 1.4) for _ in range(REMEMBERED * enough))
    assert all(switch.next(requests, 0.6) for _ in range(enough))
    assert not all([switch.next(requests, 0.6) for _ in range(2 * enough)])


def test_what_is_not_known_is_drafted() -> None:
    switch = DraftSwitch()
    assert all(switch.next(8, None) for _ in range(100)) and not switch.pause


@given(requests=st.integers(1, 512), gain=st.floats(0.2, 0.999))
def test_trials_of_a_batch_that_never_gains_cost_their_share(requests: int, gain: float) -> None:
    pauses = pauses_of(DraftSwitch(), requests, gain, 12_000)
    trial = judged_steps(requests) - 1 + UNKNOWN_STEPS  # the step of the verdict drafts no more
    assert pauses == [min(pauses[0] << min(n, MOST_DOUBLINGS), LONGEST_PAUSE) for n in range(len(pauses))]
    cost = trial * (1 / gain - 1) / pauses[0]
    assert (cost <= TRIAL_SHARE or pauses[0] == LONGEST_PAUSE) and (
        pauses[0] == LEAST_PAUSE or cost > 0.6 * TRIAL_SHARE
    )


def test_what_keeps_failing_is_tried_less_often() -> None:
    switch = DraftSwitch()
    first, *others = pauses_of(switch, 8, 0.9, 25_000)
    assert (
        others[:5] == [min(first << n, LONGEST_PAUSE) for n in (1, 2, 3, 3, 3)][: len(others[:5])] and len(others) > 2
    )
    while switch.pause:
        switch.next(8, None)
    assert all(switch.next(8, 1.2) for _ in range(JUDGED_STEPS)), "it pays, and what failed before is forgotten"
    while switch.next(8, 0.9):
        pass
    assert switch.pause + 1 < 2 * first


def test_pauses_are_bounded() -> None:
    assert pause_steps(0.9999, 10) == LEAST_PAUSE and pause_steps(0.0, 10) == LONGEST_PAUSE
    assert LEAST_PAUSE < pause_steps(0.9, 10) < pause_steps(0.5, 10) < LONGEST_PAUSE


@given(requests=st.integers(1, 512), context=st.floats(0, 40))
def test_leaving_context_is_part_of_what_a_trial_costs(requests: int, context: float) -> None:
    switch = DraftSwitch()
    while switch.next(requests, 0.8, context=context):
        pass
    lost = (judged_steps(requests) + UNKNOWN_STEPS) * 0.25 + context
    assert abs(switch.pause + 1 - min(max(lost / TRIAL_SHARE, LEAST_PAUSE), LONGEST_PAUSE)) < 2


def test_a_batch_that_fills_up_is_not_tried_at_every_size() -> None:
    """What the others drafted says that it cannot pay: no trial, but a pause. Where it may, or what is known already
    says otherwise, that is of no account."""
    switch, ramp = DraftSwitch(), (1, 2, 4, 8, 16, 32)
    assert not any(switch.next(requests, None, lambda: 0.7) for requests in ramp) and switch.pause > LEAST_PAUSE
    assert switch.next(64, None, lambda: 1.1) and switch.next(128, None)
    assert not any(switch.next(requests, None, lambda: 1.1) for requests in ramp), "their pauses have only begun"
    switch = DraftSwitch()
    assert all(switch.next(8, 1.2) for _ in range(JUDGED_STEPS)) and switch.next(64, None)
    assert switch.next(8, None, lambda: 0.7), "it was seen to pay"


def test_drafting_returns_when_it_pays() -> None:
    switch = DraftSwitch()
    while switch.next(64, 0.8):
        pass
    left = switch.pause
    while not switch.next(64, None):
        assert switch.pause == left - 1
        left -= 1
    assert left == 0
    assert all(switch.next(64, 1.3) for _ in range(200)) and not switch.pause


def test_batches_of_another_size_have_a_verdict_of_their_own() -> None:
    switch = DraftSwitch()
    while switch.next(100, 0.5):
        pass
    assert not switch.next(127, None) and not switch.next(64, None)  # of the same size
    assert not switch.next(63, None), "one less than 64 is the same batch"
    assert switch.next(30, None) and not switch.pause
    assert all(switch.next(16, 1.3) for _ in range(50))
    assert not switch.next(100, None) and switch.pause, "what was found before it drained still holds"


def test_a_batch_that_changes_by_one_is_judged_once() -> None:
    """Of 63 and 64 requests in turn, of which nothing is known right after each change of the verdict."""
    switch, drafted = DraftSwitch(), []
    for step in range(600):
        recent = drafted[-3:-1]
        drafted.append(switch.next(63 + step % 2, 0.5 if len(recent) == 2 and all(recent) else None))
    assert sum(drafted) <= 2 * (judged_steps(64) + UNKNOWN_STEPS)


# -- blocks that are not known


def begun(known: list[list[bool]], value: float = 0.5) -> Round:
    """A round of requests whose known blocks survive with `value`, then its square, ..."""
    which = np.array(known)
    block_ = np.cumprod(np.full(K, value, np.float32))
    return Round(np.where(which[:, :, None], block_, np.float32(1)), which, np.zeros(which.shape[1], np.int64))


def test_before_the_first_block_all_is_certain() -> None:
    assert (TypicalBlock(K).fill(begun([[False, False]])) == 1).all()


def test_what_a_request_is_known_for_stands_for_its_other_blocks() -> None:
    typical, seen = TypicalBlock(K), begun([[True, False], [False, False]])
    seen.survival[0, 0] = [0.9, 0.2, 0.1][:K] + [0.1] * max(0, K - 3)
    filled = typical.fill(seen)
    np.testing.assert_array_equal(filled[0, 0], seen.survival[0, 0])
    np.testing.assert_allclose(filled[1, 0], seen.survival[0, 0], rtol=1e-6)
    np.testing.assert_allclose(filled[:, 1], np.tile(seen.survival[0, 0], (2, 1)), rtol=1e-6)  # of the other request
    assert (seen.survival[1] == 1).all(), "the round itself is as it was"


def test_all_known_blocks_are_as_they_are() -> None:
    seen = begun([[True] * 3] * 4)
    assert TypicalBlock(K).fill(seen) is seen.survival


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0.1, 0.9)), min_size=1, max_size=20))
def test_a_typical_block_is_a_mean_and_does_not_rise(rounds: list[tuple[int, float]]) -> None:
    typical = TypicalBlock(K)
    for requests, value in rounds:
        typical.fill(begun([[True] * requests], value))
    lowest, highest = min(v for _, v in rounds), max(v for _, v in rounds)
    assert lowest - 1e-5 <= typical.survival[0] <= highest + 1e-5
    assert (np.diff(typical.survival) <= 1e-6).all()
    if rounds[-1][0] >= ENOUGH_BLOCKS:
        assert typical.survival[0] == pytest.approx(rounds[-1][1], rel=1e-5), "so many outweigh all before"


def test_a_batch_that_drafts_again_does_not_verify_everything() -> None:
    """After a pause nothing is known, nor are most of the older blocks two steps later."""
    requests, ledger, typical = 64, RateLedger(64, K), TypicalBlock(K)
    slots, caps = np.arange(requests), np.full(requests, K)
    table = times([requests, requests * (K + 1)], [1.0, 2.0])
    weak, rows, raw = np.full((requests, K), 0.1, np.float32), [], []
    for n in range(40):
        now = ledger.schedule(slots)
        rows.append(choose_rows(typical.fill(now), caps, table))
        raw.append(choose_rows(now.survival, caps, table))
        ledger.process(slots, now.owners, None if 10 <= n < 30 else weak)
    assert rows[:2] == [requests * (K + 1)] * 2 and set(rows[2:]) == {requests}
    assert requests * (K + 1) in raw[31:], "which the blocks as certain ones would"


def test_gain_of_drafting() -> None:
    assert drafting_gain(tokens=24, seconds=0.015, requests=8, plain_seconds=0.010) == pytest.approx(2.0)
    assert drafting_gain(tokens=8, seconds=0.012, requests=8, plain_seconds=0.010) < 1


# -- what became of promises


def promised(survival: float, requests: int, accepted: int, promises: Promises | None = None) -> Promises:
    """K drafts of each request verified, each to survive with this chance, of which so many were accepted."""
    promises = Promises() if promises is None else promises
    promises.add(np.full((requests, K), survival, np.float32), np.full(requests, K), np.full(requests, accepted))
    return promises


def test_promises_are_believed_until_there_is_more() -> None:
    promises = Promises()
    assert promises.ratio == 1 and promises.ratio.dtype == np.float32
    # 64 drafts count as kept from the start: with 10 promised on top, and 4 kept, that makes 68 of 74.
    assert promised(1.0, 2, 2, promises).ratio == np.float32((PROMISED / 8 + 4) / (PROMISED / 8 + 10))


def test_the_share_of_kept_promises_has_bounds() -> None:
    broken, exceeded = promised(1.0, 1000, 0), promised(0.25, 1000, 5)
    assert broken.ratio == np.float32(0.1) and exceeded.ratio == np.float32(1.25)
    for _ in range(40):  # nor do they hold what is learned back: neither is far beyond its bound for long
        promised(1.0, 20, 4, broken)
        promised(1.0, 20, 4, exceeded)
    assert broken.ratio == pytest.approx(0.8, abs=0.01) and exceeded.ratio == pytest.approx(0.8, abs=0.01)


def test_only_the_newest_promises_count() -> None:
    """Half of what was promised is gone after as much again as the window holds, however much came before."""
    long, short = Promises(), Promises()
    for _ in range(100):
        promised(1.0, PROMISED // K, K, long)
    promised(1.0, PROMISED // K, K, short)
    ratios = []
    for promises in (long, short):
        promised(1.0, PROMISED // K, 0, promises)
        ratios.append(float(promises.ratio))
    assert ratios == pytest.approx([0.5, 0.5], abs=0.01)


def test_what_was_not_verified_or_not_known_is_no_promise() -> None:
    chances = np.array([[0.5, 0.25, 0.125], [np.nan] * 3, [1.0, 1.0, np.nan], [0.9, 0.9, 0.9]], np.float32)
    promises = Promises()
    promises.add(chances, np.array([2, 3, 2, 0]), np.array([1, 3, 2, 0]))
    # Two drafts of the first request; blocks that are not known, in part or at all, and one without verified drafts.
    assert promises.ratio == np.float32((PROMISED / 8 + 1) / (PROMISED / 8 + 0.75))
    promises.add(np.full((2, 3), np.nan, np.float32), np.array([3, -1]), np.array([3, -1]))
    assert promises.ratio == np.float32((PROMISED / 8 + 1) / (PROMISED / 8 + 0.75))
