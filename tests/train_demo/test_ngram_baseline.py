"""scripts/train_demo/ngram_baseline.py against a direct implementation over dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from scripts.train_demo.ngram_baseline import KneserNey, discounts_of, perplexity

VOCAB = 11


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    rng = np.random.default_rng(5)
    ids = [0, 1]
    for _ in range(3000):  # each id leans on the two before it
        ids.append(int((ids[-1] * 3 + ids[-2] + rng.choice(4, p=[0.7, 0.15, 0.1, 0.05])) % VOCAB))
    return np.array(ids)


def direct(train: list[int], order: int):
    """Probability of a word after a context, by the textbook's recursion."""
    grams = {order: Counter(tuple(train[i : i + order]) for i in range(len(train) - order + 1))}
    for n in range(order - 1, 0, -1):
        grams[n] = Counter(gram[1:] for gram in grams[n + 1])
    discounts = {n: discounts_of(np.array(list(c.values()))) for n, c in grams.items()}
    after: dict[int, dict[tuple[int, ...], dict[int, int]]] = {n: defaultdict(dict) for n in grams}
    for n, counter in grams.items():
        for gram, count in counter.items():
            after[n][gram[:-1]][gram[-1]] = count

    def probability(context: tuple[int, ...], word: int) -> float:
        n = len(context) + 1
        lower = probability(context[1:], word) if context else 1 / VOCAB
        seen = after[n].get(context)
        if not seen:
            return lower
        total = sum(seen.values())
        kept = sum(discounts[n][min(c, 3)] for c in seen.values()) / total
        count = seen.get(word, 0)
        return max(count - discounts[n][min(count, 3)], 0) / total + kept * lower

    return probability


def test_equals_the_direct_implementation(text: np.ndarray) -> None:
    model, slow = KneserNey(text[:2000], VOCAB, 3), direct(text[:2000].tolist(), 3)
    held_out = text[2000:2400]
    found = model.probabilities(held_out)
    for i in range(len(held_out)):
        context = tuple(held_out[max(0, i - 2) : i].tolist())
        assert found[i] == pytest.approx(slow(context, int(held_out[i])), rel=1e-12)


def test_probabilities_of_a_context_sum_to_one(text: np.ndarray) -> None:
    model = KneserNey(text, VOCAB, 4)
    for context in ([3, 7, 2], [1, 1, 1], [0, 0, 9]):
        total = sum(model.probabilities(np.array([*context, word]))[-1] for word in range(VOCAB))
        assert total == pytest.approx(1.0, rel=1e-9)


def test_more_context_helps_where_it_should(text: np.ndarray) -> None:
    by_order = [perplexity(text[:2400], text[2400:], VOCAB, order) for order in (1, 2, 3)]
    # Only two ids together tell the next one, so one alone is of no use here.
    assert by_order[2] < 0.5 * min(by_order[:2])
    noise = np.random.default_rng(1).permutation(text)
    assert perplexity(noise[:2400], noise[2400:], VOCAB, 3) > 0.95 * by_order[0]


def test_orders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="6-grams of 4608 ids do not fit 63 bits"):
        KneserNey(np.zeros(10, np.int64), 4608, 6)
