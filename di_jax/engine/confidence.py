"""Calibration of the draft's confidence: sequential temperature scaling (dspark 1.5).

The draft gives a logit per position; sigmoid(logit / temperature) is the chance that the draft there is accepted if all
before it are, and the product up to a position the chance that all up to it are: the survival. Plain numpy; N blocks of
k drafts, verified in full whatever the confidence said. accepted[n, i] is 1 where drafts 1..i + 1 of block n were all
accepted, so each row falls from 1 to 0 at most once; a chance of that in 0..1 serves as well.
"""

from __future__ import annotations

import numpy as np

MAX_LOGIT = 60.0  # the bound of dspark 1.5
GRID = np.logspace(-1, 1, 41)  # temperatures tried: 41 from 0.1 to 10
BINS = 15
FOLDS = 10
# Standard errors that the error has to fall by, on blocks that a temperature was not fitted on. The demo's draft is
# calibrated to 1.4%: the least error alone gave 1.0, 0.89, 1.26, 1.58, 1.12, and raised it on held-out rows, at the
# last position from 0.97% to 1.27%.
CLEARLY = 2.0


def survival(logits: np.ndarray, temperatures: np.ndarray | None = None) -> np.ndarray:
    """Chance float64 [N, k] that all drafts up to each position are accepted.

    logits [N, k]; temperatures [k], positive, None for 1. Raises ValueError for other shapes or temperatures.
    """
    scaled = np.asarray(logits, np.float64)
    if scaled.ndim != 2:
        raise ValueError(f"confidence logits must be [blocks, drafts], found {scaled.shape}")
    if temperatures is not None:
        divisor = np.asarray(temperatures, np.float64)
        if divisor.shape != scaled.shape[1:] or not (divisor > 0).all():
            raise ValueError(f"{scaled.shape[1]} positive temperatures are needed, found {divisor.tolist()}")
        scaled = scaled / divisor
    return np.cumprod(1 / (1 + np.exp(-np.clip(scaled, -MAX_LOGIT, MAX_LOGIT))), axis=1)


def reliability(chance: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> np.ndarray:
    """float64 [bins, 3] of equal bins of the chance: blocks in the bin, their mean chance, their accepted share.

    chance, accepted [N]. An empty bin is (0, nan, nan).
    """
    which = np.minimum((np.asarray(chance) * bins).astype(np.int64), bins - 1)
    count = np.bincount(which, minlength=bins).astype(np.float64)
    sums = [np.bincount(which, weights=np.asarray(v, np.float64), minlength=bins) for v in (chance, accepted)]
    mean = [np.divide(s, count, out=np.full(bins, np.nan), where=count > 0) for s in sums]
    return np.stack([count, *mean], axis=1)


def roc_auc(chance: np.ndarray, accepted: np.ndarray) -> float:
    """Area under the ROC curve, 0..1, of chance [N] for accepted [N], equals counting half; NaN where all or none are
    accepted. Of accepted chances: of the outcomes drawn from them, pair by pair."""
    values, which = np.unique(chance, return_inverse=True)
    kept, lost = (np.bincount(which, weights=w, minlength=len(values)) for w in (accepted, 1 - np.asarray(accepted)))
    pairs = kept.sum() * lost.sum()
    return float(kept @ (np.cumsum(lost) - lost / 2) / pairs) if pairs > 0 else float("nan")


def calibration_error(chance: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error, 0..1, of chance [N] against accepted [N]: the bins' mean gap, by their size."""
    table = reliability(chance, accepted, bins)
    filled = table[table[:, 0] > 0]
    return float(np.sum(filled[:, 0] * np.abs(filled[:, 1] - filled[:, 2])) / np.sum(filled[:, 0]))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray, texts: np.ndarray | None = None) -> np.ndarray:
    """Temperatures float64 [k]: position by position the one of GRID with the least error of the survival there, if it
    is clearly better than 1, else 1.

    Clearly better: over FOLDS of the blocks, each with the temperature that is best for the others, the error falls by
    more than CLEARLY standard errors (jackknife over the folds).

    logits, accepted [N, k]. texts: int [N], which text a block is of; those of one are alike and stay in one fold;
    None: every block by itself. Earlier positions keep what was found for them; of equals the nearest to 1 is taken.
    Raises ValueError for other shapes or no blocks.
    """
    logits, accepted = np.asarray(logits, np.float64), np.asarray(accepted, np.float64)
    if logits.ndim != 2 or logits.shape != accepted.shape or not len(logits):
        raise ValueError(f"logits and accepted must be alike, [blocks, drafts]: {logits.shape}, {accepted.shape}")
    fold = _folds(len(logits), texts)
    nearest_first = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]  # 1 is the first
    found: list[float] = []
    before = np.ones(len(logits))
    for position in range(logits.shape[1]):
        column = logits[:, position : position + 1]
        chances = [before * survival(column, np.array([t]))[:, 0] for t in nearest_first]
        gaps = np.stack([_gaps(chance, accepted[:, position], fold) for chance in chances])
        best = int(np.argmin(_total(gaps.sum(axis=1))))
        if not _is_clear(gaps, np.bincount(fold)):
            best = 0
        found.append(float(nearest_first[best]))
        before = chances[best]
    return np.array(found)


def _folds(count: int, texts: np.ndarray | None) -> np.ndarray:
    """int64 [count]: the fold of each block, fewer than FOLDS where there are fewer texts."""
    if texts is None:
        return np.arange(count) % FOLDS
    if np.shape(texts) != (count,):
        raise ValueError(f"texts must be [{count}], one for each block, found {np.shape(texts)}")
    return np.unique(texts, return_inverse=True)[1] % FOLDS


def _gaps(chance: np.ndarray, accepted: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Sums float64 [folds, BINS] of chance - accepted, as `reliability` bins them."""
    folds = int(fold.max()) + 1
    which = fold * BINS + np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    return np.bincount(which, weights=chance - accepted, minlength=folds * BINS).reshape(folds, BINS)


def _total(gaps: np.ndarray) -> np.ndarray:
    """The calibration error [...] of gaps [..., BINS], times the blocks."""
    total: np.ndarray = np.abs(gaps).sum(axis=-1)
    return total


def _is_clear(gaps: np.ndarray, blocks: np.ndarray) -> bool:
    """Whether temperatures lower the error on folds that they were not fitted on. gaps: float64 [temperatures, folds,
    BINS], of temperature 1 first; blocks: [folds]."""
    folds = len(blocks)
    if folds < 2:
        return False
    others = _total(gaps.sum(axis=1, keepdims=True) - gaps)
    judged, as_is = gaps[np.argmin(others, axis=0), np.arange(folds)], gaps[0]
    falls = _total(as_is.sum(axis=0)) - _total(judged.sum(axis=0))
    without = _total(as_is.sum(axis=0) - as_is) - _total(judged.sum(axis=0) - judged)
    without = without / (blocks.sum() - blocks)
    error = np.sqrt((folds - 1) * np.mean((without - without.mean()) ** 2))
    return bool(falls / blocks.sum() > CLEARLY * error)
