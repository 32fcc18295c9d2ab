"""How a step's tokens are shared between prompts, and where chunks end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.chunking import cut, gets_tokens, share_tokens

BLOCK = 128
budgets = st.integers(1, 40 * BLOCK)
prompts = st.lists(st.integers(0, 5000), max_size=12)
turns = st.integers(0, 1)


@given(prompts, budgets, turns)
def test_shares_stay_within_the_budget_and_use_it(remaining: list[int], budget: int, turn: int) -> None:
    shares = share_tokens(remaining, budget, BLOCK, turn)
    assert all(0 <= share <= tokens for share, tokens in zip(shares, remaining, strict=True))
    assert sum(shares) <= budget
    assert sum(shares) == sum(remaining) or budget - sum(shares) < BLOCK


@given(prompts, budgets, turns)
def test_the_oldest_gets_half_and_the_rest_goes_to_the_shortest(remaining: list[int], budget: int, turn: int) -> None:
    shares = share_tokens(remaining, budget, BLOCK, turn)
    left = [tokens for tokens in remaining if tokens]
    if not left:
        assert shares == [0] * len(remaining)
        return
    oldest = next(i for i, tokens in enumerate(remaining) if tokens)
    if budget >= 2 * BLOCK:  # of less than three blocks one is kept for the others
        assert shares[oldest] >= min(remaining[oldest], -(-budget // 2) if budget >= 3 * BLOCK else BLOCK)
    elif not turn:
        assert shares[oldest] == min(remaining[oldest], budget)
    others = [i for i, tokens in enumerate(remaining) if tokens and i > oldest]
    for i in others:
        if shares[i] < remaining[i]:
            assert shares[i] % BLOCK == 0, "a part of a prompt is of whole blocks"
            assert not any(shares[j] for j in others if remaining[j] > remaining[i]), "nobody longer goes before it"
            assert shares[oldest] == remaining[oldest] or sum(shares) == budget


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    assert share_tokens([100_000, 300, 200, 100], 2048, BLOCK) == [2048 - 600, 300, 200, 100]
    assert share_tokens([100_000, 5000, 300], 2048, BLOCK) == [1024 + 84, 640, 300]
    assert share_tokens([100, 5000, 300], 2048, BLOCK) == [100, 1536, 300], "what is left is less than a block"
    assert share_tokens([100_000, 300, 200], 300, BLOCK) == [172, 0, 128], "less than half, so that there is a block"
    assert share_tokens([100_000, 50], 60, BLOCK) == [60, 0]
    assert share_tokens([0, 70, 50], 100, BLOCK) == [0, 70, 0]
    assert share_tokens([], 100, BLOCK) == [] and share_tokens([5], 0, BLOCK) == [0]


def test_prompts_take_turns_at_less_than_two_blocks() -> None:
    assert share_tokens([100_000, 300, 50], 128, BLOCK) == [128, 0, 0]
    assert share_tokens([100_000, 300, 50], 128, BLOCK, 1) == [78, 0, 50]
    assert share_tokens([100_000, 300], 128, BLOCK, 1) == [0, 128]
    assert share_tokens([100_000, 300], 200, BLOCK, 2) == [200, 0]
    assert share_tokens([100_000, 300], 200, BLOCK, 3) == [72, 128]
    assert share_tokens([300], 128, BLOCK, 1) == [128], "nobody else is there"


@given(st.integers(BLOCK, 4 * BLOCK), st.integers(0, 1), st.integers(1, 4 * BLOCK))
def test_a_short_prompt_beside_a_very_long_one_waits_for_no_more_than_its_own_blocks(
    budget: int, turn: int, tokens: int
) -> None:
    """Whatever the budget: a block every second step. A long prompt that always went first would let it wait."""
    left, steps = [10**6, tokens], 0
    while left[1]:
        left = [n - share for n, share in zip(left, share_tokens(left, budget, BLOCK, turn + steps), strict=True)]
        steps += 1
    assert steps <= 2 * -(-tokens // BLOCK)
    assert 10**6 - left[0] >= steps // 2 * min(budget // 2, BLOCK), "nor does the long one wait"


@given(prompts, st.integers(0, 5000), budgets, turns)
def test_who_gets_tokens_is_known_before(remaining: list[int], tokens: int, budget: int, turn: int) -> None:
    shares = share_tokens([*remaining, tokens], budget, BLOCK, turn)
    assert gets_tokens(remaining, tokens, budget, BLOCK, turn) == (shares[-1] > 0)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(BLOCK, 10 * BLOCK),
)
def test_every_prompt_ends_in_a_bounded_number_of_steps(arrivals: list[tuple[int, int]], budget: int) -> None:
    """However short those that come later: at most the steps in which it and all before it get half of the budget, or
    all of it every second time."""
    arrivals = sorted(arrivals, key=lambda one: one[1])
    half = -(-budget // 2) if budget >= 3 * BLOCK else BLOCK if budget >= 2 * BLOCK else budget
    left: list[int] = []
    ended: dict[int, int] = {}
    step = 0
    while len(ended) < len(arrivals):
        left += [tokens for tokens, at in arrivals if at == step]
        if any(left):
            shares = share_tokens(left, budget, BLOCK, step)
            assert sum(shares) > 0
            left = [tokens - share for tokens, share in zip(left, shares, strict=True)]
        ended.update({i: step for i, tokens in enumerate(left) if not tokens and i not in ended})
        step += 1
    for i, (_, at) in enumerate(arrivals):
        steps_of_oldest = sum(-(-tokens // half) for tokens, _ in arrivals[: i + 1]) * (1 + (budget < 2 * BLOCK))
        assert ended[i] - at < steps_of_oldest


@given(
    st.integers(0, 5000),
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.lists(st.integers(0, 80).map(lambda n: n * BLOCK), max_size=4),
)
def test_a_cut_ends_on_a_boundary_and_before_a_stop(start: int, count: int, more: int, stops: list[int]) -> None:
    total = start + more
    size = cut(start, count, total, stops, BLOCK)
    end, reach = start + size, min(start + count, total)
    assert 0 <= size <= min(count, total - start)
    assert size > 0 or count == 0 or more == 0
    assert not any(start < stop < end for stop in stops)
    ahead = [stop for stop in stops if start < stop <= reach]
    if ahead:
        assert end == min(ahead)
    elif reach < total:
        inside = reach // BLOCK * BLOCK
        assert end == (inside if inside > start else reach)
    else:
        assert end == total


def test_cuts() -> None:
    assert cut(0, 300, 1000, (), BLOCK) == 256
    assert cut(0, 100, 1000, (), BLOCK) == 100, "no boundary inside"
    assert cut(100, 100, 1000, (), BLOCK) == 28
    assert cut(256, 2000, 1000, (), BLOCK) == 744, "the end of the prompt"
    assert cut(256, 2000, 1000, (256, 896), BLOCK) == 640
    assert cut(256, 100, 300, (), BLOCK) == 44
    assert cut(0, 130, 1000, (130,), BLOCK) == 130, "a stop is kept wherever it is"
