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


def calibration_error(chance: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error, 0..1, of chance [N] against accepted [N]: the bins' mean gap, by their size."""
    table = reliability(chance, accepted, bins)
    filled = table[table[:, 0] > 0]
    return float(np.sum(filled[:, 0] * np.abs(filled[:, 1] - filled[:, 2])) / np.sum(filled[:, 0]))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Temperatures float64 [k]: position by position the one of GRID with the least error of the survival there.

    logits, accepted [N, k]. Earlier positions keep what was found for them; of equals the nearest to 1 is taken. Raises
    ValueError for other shapes or no blocks.
    """
    logits = np.asarray(logits, np.float64)
    if logits.ndim != 2 or logits.shape != np.shape(accepted) or not len(logits):
        raise ValueError(f"logits and accepted must be alike, [blocks, drafts]: {logits.shape}, {np.shape(accepted)}")
    nearest_first = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    found: list[float] = []
    before = np.ones(len(logits))
    for position in range(logits.shape[1]):
        column, target = logits[:, position : position + 1], np.asarray(accepted)[:, position]
        chances = [before * survival(column, np.array([t]))[:, 0] for t in nearest_first]
        best = int(np.argmin([calibration_error(chance, target) for chance in chances]))
        found.append(float(nearest_first[best]))
        before = chances[best]
    return np.array(found)
