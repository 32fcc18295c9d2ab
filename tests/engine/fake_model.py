"""The arithmetic of a model that hashes: every number that the real one would read goes into a row's hash."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from golden_model import TINY

from di_jax.model.config import ModelConfig

U = np.uint64
GOLD, STIR, FOLD = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB)
# Salts of the kinds of numbers.
EMBED, KEY, PAIR, ENTRY, LAYER, HEAD = (U(1000 * n) for n in range(1, 7))


def mix(x: np.ndarray, salt: np.ndarray | np.uint64) -> np.ndarray:
    """A hash of uint64 numbers, elementwise."""
    x = (x + GOLD * np.atleast_1d(salt)) * STIR
    x = (x ^ (x >> U(29))) * FOLD
    return x ^ (x >> U(32))


def fake_config(window: int = 16, vocabulary: int = 211) -> ModelConfig:
    """Four layers: window only, a pooled source, and two decoder layers behind a source of ratio 1. A ring has
    window + 6 rows."""
    return dataclasses.replace(
        TINY,
        vocab_size=vocabulary,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=(100,),
        sliding_window=window,
    )


@dataclasses.dataclass(frozen=True)
class Past:
    """What a prefill found in the caches. length, start, window_start, decoder_start: as in `Hit` and `Chunk`.

    entries: of each source, those of the positions below `length`. rings: by layer, values of positions below `start`
    that were restored.
    """

    length: int = 0
    start: int = 0
    window_start: int = 0
    decoder_start: int = 0
    entries: tuple[np.ndarray, ...] = ()
    rings: Mapping[int, Mapping[int, int]] = dataclasses.field(default_factory=dict)


COLD = Past()


class FakeModel:
    """The arithmetic. Rows are uint64 [n], positions int [n]."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.window, self.look_back = config.sliding_window, config.engram_look_back
        self.ratios, self.boundary = config.kv_source_ratios, config.first_decoder_layer

    def embed(self, looks: Sequence[np.ndarray]) -> np.ndarray:
        """looks: ids of the row's token and of those before it, nearest first; -1: none."""
        terms = [mix((ids + 1).astype(U), EMBED + U(back)) for back, ids in enumerate(looks)]
        return np.sum(terms, axis=0, dtype=U)

    def key(self, layer: int, h: np.ndarray, position: np.ndarray) -> np.ndarray:
        return mix(h + position.astype(U) * GOLD, KEY + U(layer))

    def pair(self, h: np.ndarray, position: np.ndarray) -> np.ndarray:
        return mix(h + position.astype(U) * FOLD, PAIR)

    def entry(self, source: int, members: Sequence[np.ndarray]) -> np.ndarray:
        total = sum((U(2 * n + 3) * member for n, member in enumerate(members)), np.zeros(1, U))
        return mix(total, ENTRY + U(source))

    def layer(self, layer: int, h: np.ndarray, near: np.ndarray, far: np.ndarray) -> np.ndarray:
        return mix(h + U(3) * near + U(5) * far, LAYER + U(layer))

    def draw(
        self,
        h: np.ndarray,
        temperature: np.ndarray,
        seed: np.ndarray,
        index: np.ndarray,
        allowed: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probabilities) after rows h. seed uint64, index of the output, allowed bool [n, V]: ids that may
        come."""
        noise = mix(seed + index.astype(U) * GOLD, HEAD) + np.round(temperature * 1e3).astype(U)
        drawn = mix(h + np.where(temperature > 0, noise, U(0)), HEAD)
        token = (drawn % U(self.config.vocab_size)).astype(np.int64)
        if allowed is not None:
            ids = [np.flatnonzero(row) for row in allowed]
            token = np.array([own[int(d % U(len(own)))] for own, d in zip(ids, drawn, strict=True)], np.int64)
        return token, -(drawn % U(997)).astype(np.float32) / 64

    def hidden(self, tokens: Sequence[int], past: Past = COLD) -> np.ndarray:
        """The last layer's rows of all tokens at once, from nothing but the tokens and what the caches gave. Rows
        below `past.start`, and those that the decoder layers drop, mean nothing."""
        n, s = len(tokens), past.start
        ids = np.concatenate([np.full(self.look_back, -1), np.asarray(tokens, np.int64)])
        h = self.embed([ids[self.look_back - back : n + self.look_back - back] for back in range(self.look_back + 1)])
        position = np.arange(n)
        for layer, plan in enumerate(self.config.layers):
            if plan.owns_kv:
                ratio = self.ratios[plan.kv_source]
                kept = n // ratio * ratio
                members = h if ratio == 1 else self.pair(h, position)
                members = members[:kept].reshape(-1, ratio).T
                entries = self.entry(plan.kv_source, [m + position[:kept:ratio].astype(U) for m in members])
                cached = past.length // ratio
                if cached:
                    entries = np.concatenate([past.entries[plan.kv_source][:cached], entries[cached:]])
                known = np.concatenate([np.zeros(1, U), np.cumsum(entries, dtype=U)])
            low = past.window_start if layer < self.boundary else past.decoder_start
            key = self.key(layer, h, position)
            key[:s] = np.array([past.rings.get(layer, {}).get(p, 0) for p in range(s)], U)
            total = np.concatenate([np.zeros(1, U), np.cumsum(key, dtype=U)])
            first = np.minimum(np.maximum(position - self.window + 1, low), position + 1)
            near = total[position + 1] - total[first]
            far = known[(position + 1) // ratio] if plan.kv_source >= 0 else np.zeros(n, U)
            h = self.layer(layer, h, near, far)
        return h
