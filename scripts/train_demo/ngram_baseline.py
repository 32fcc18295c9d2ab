"""Interpolated modified Kneser-Ney over token ids: the perplexity that the demo model has to beat.

    python -m scripts.train_demo.ngram_baseline --folder build/train_demo

trains on the English training tokens and prints the perplexity of the held-out ones. The estimate is that of Chen and
Goodman (1999): absolute discounting with one discount each for counts of one, two and more, lower orders estimated
from the number of different words that precede, all orders interpolated down to a uniform distribution.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.train_demo.tokenizer import VOCAB_SIZE

ORDER = 5


@dataclass(frozen=True, eq=False)
class Level:
    """One order n. n-grams are numbers in base V, int64, sorted; a context is an n-gram less its last token.

    ngrams, counts: [K], counts as the order is estimated from. contexts: [C] sorted; totals float64 [C] sum of counts;
    kept: float64 [C], the mass that the discounts free in a context. discounts: float64 [4], by min(count, 3).
    """

    ngrams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    kept: np.ndarray
    discounts: np.ndarray


class KneserNey:
    """A model of order `order` over ids below `vocab_size`; raises ValueError when an n-gram would not fit 63 bits."""

    def __init__(self, tokens: np.ndarray, vocab_size: int = VOCAB_SIZE, order: int = ORDER) -> None:
        if vocab_size**order >= 2**63:
            raise ValueError(f"{order}-grams of {vocab_size} ids do not fit 63 bits; lower the order")
        self.vocab_size, self.order = vocab_size, order
        self.levels: list[Level] = []  # of order 1, 2, ...
        ngrams, counts = np.unique(self._windows(tokens, order), return_counts=True)
        for n in tqdm(range(order, 0, -1), desc="counting n-grams", unit="order", disable=None):
            self.levels.insert(0, self._level(ngrams, counts))
            # The next lower order counts by how many different tokens an n-gram is preceded.
            ngrams, counts = np.unique(ngrams % vocab_size ** (n - 1), return_counts=True)

    def _windows(self, tokens: np.ndarray, n: int) -> np.ndarray:
        """Number of the n-gram that ends at each position from n - 1 on."""
        ids = tokens.astype(np.int64)
        numbers = np.zeros(len(ids) - n + 1, np.int64)
        for place in range(n):
            numbers = numbers * self.vocab_size + ids[place : len(ids) - n + 1 + place]
        return numbers

    def _level(self, ngrams: np.ndarray, counts: np.ndarray) -> Level:
        discounts = discounts_of(counts)
        contexts, begin = np.unique(ngrams // self.vocab_size, return_index=True)
        totals = np.add.reduceat(counts, begin).astype(np.float64)
        freed = np.add.reduceat(discounts[np.minimum(counts, 3)], begin)
        return Level(ngrams, counts, contexts, totals, freed / totals, discounts)

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [N]: probability of every token given the ones before it in `tokens` (up to order - 1)."""
        ids = tokens.astype(np.int64)
        probability = np.full(len(ids), 1.0 / self.vocab_size)
        for n, level in enumerate(self.levels, start=1):
            numbers = self._windows(tokens, n)
            where, known = _find(level.contexts, numbers // self.vocab_size)
            at, seen = _find(level.ngrams, numbers)
            counts = np.where(seen, level.counts[at], 0)
            shrunk = np.maximum(counts - level.discounts[np.minimum(counts, 3)], 0) / level.totals[where]
            lower = probability[n - 1 :]
            # A context never seen says nothing: the lower order stands.
            probability[n - 1 :] = np.where(known, shrunk + level.kept[where] * lower, lower)
        return probability


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """float64 [4]: discounts of counts 0 (none), 1, 2 and 3 or more, from how often counts of 1 to 4 occur.

    A text too small to show all four falls back to absolute discounts of a half, one and one and a half.
    """
    n1, n2, n3, n4 = (int(np.sum(counts == c)) for c in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
        return np.array([0.0, 0.5, 1.0, 1.5])
    y = n1 / (n1 + 2 * n2)
    found = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return np.clip(found, 0.0, [0.0, 1.0, 2.0, 3.0])


def _find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place of each wanted number in the sorted table, whether it is there)."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return at, table[at] == wanted


def perplexity(train: np.ndarray, held_out: np.ndarray, vocab_size: int = VOCAB_SIZE, order: int = ORDER) -> float:
    """Perplexity of held_out (ids [N], every token counted but the first) under a model of train (ids [M])."""
    model = KneserNey(train, vocab_size, order)
    return float(np.exp(-np.mean(np.log(model.probabilities(held_out)[1:]))))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="perplexity of a 5-gram model on held-out English")
    parser.add_argument("--folder", type=Path, required=True, help="what scripts.train_demo.prepare made")
    parser.add_argument("--order", type=int, default=ORDER)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    train, held_out = (np.load(options.folder / f"english_{split}.npy") for split in ("train", "eval"))
    found = perplexity(train, held_out, order=options.order)
    record = {"order": options.order, "perplexity": round(found, 3), "tokens": len(held_out) - 1}
    (options.folder / "ngram_baseline.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(json.dumps({**record, "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
