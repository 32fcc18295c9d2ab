"""Numerics 10 in float64 numpy, for the tests of the model and of the kernels."""

from __future__ import annotations

import numpy as np


def oracle(
    streams: np.ndarray, fn: np.ndarray, base: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """pre, post and comb of a site; rms_eps 1e-20, eps 1e-6, 20 iterations."""
    hc = streams.shape[1]
    flat = streams.reshape(len(streams), -1).astype(np.float64)
    z = flat @ fn.T.astype(np.float64) / np.sqrt((flat**2).mean(axis=-1, keepdims=True) + 1e-20)
    pre = 1 / (1 + np.exp(-(z[:, :hc] * scale[0] + base[:hc]))) + 1e-6
    post = 2 / (1 + np.exp(-(z[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])))
    m = (z[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(-1, hc, hc)
    m = np.exp(m - m.max(axis=-1, keepdims=True))
    m = m / m.sum(axis=-1, keepdims=True) + 1e-6
    m = m / (m.sum(axis=1, keepdims=True) + 1e-6)
    for _ in range(19):
        m = m / (m.sum(axis=2, keepdims=True) + 1e-6)
        m = m / (m.sum(axis=1, keepdims=True) + 1e-6)
    return pre, post, m
