"""Engram on device: hash across any cuts equal to the 64-bit reference, look-back, gate, dead tokens (numerics 12)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import PROMPTS, REAL, TINY, golden, golden_file, tiny_model, tiny_numerics, tiny_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from di_jax.model.config import ModelConfig
from di_jax.model.engram import DEAD, NgramHash, engram_gate
from di_jax.model.engram_tables import EngramTables, hash_ids
from di_jax.model.rows import make_rows

ROWS, SLOTS = 16, 2
# Numerics 17: ids already mapped, pad 2.
IDS = [0, 671, 6102, 99091, 17, 5]


@partial(jax.jit, static_argnums=(0, 5))
def hash_step(graph: Any, state: Any, packed: Array, image: Array, history: Array, decode: bool) -> tuple[Array, Array]:
    """packed: token [T], the ids before them, then start, count and slot. One sequence a step."""
    ngram: NgramHash = nnx.merge(graph, state)
    token, before, (start, count, slot) = packed[: len(image)], packed[len(image) : -3], packed[-3:]
    one = jnp.zeros(1, jnp.int32)
    rows = make_rows(
        token,
        one,
        start[None],
        one,
        count[None],
        slot[None],
        one[:, None],
        decode=decode,
        image=image,
        history=None if decode else before[None],
    )
    look, history = ngram.lookback(rows, history)
    return ngram(look), history


class Hasher:
    """Feeds one sequence after the other through the device hash, in chunks; the history stays between steps.

    look_back: ids that a prefill step is told of those before it.
    """

    def __init__(self, config: ModelConfig, tables: EngramTables, look_back: int = 3) -> None:
        self.look_back = look_back
        self.graph, self.state = nnx.split(NgramHash(config, tables))
        self.history = jnp.full((SLOTS, config.engram_history), 7, jnp.int32)  # another sequence was here

    def __call__(self, ids: list[int], dead: list[bool], cuts: list[int], slot: int = 0) -> np.ndarray:
        """Table rows int32 [T, G, C]. A cut of 1 goes through a decode step, larger ones through a prefill step."""
        out, start = [], 0
        sizes = iter(cuts)
        while start < len(ids):
            count = min(next(sizes, ROWS), len(ids) - start)
            width = 1 if count == 1 else ROWS
            token, image = np.zeros(width, np.int32), np.zeros(width, bool)
            token[:count], image[:count] = ids[start : start + count], dead[start : start + count]
            before = np.full(self.look_back, DEAD, np.int32)
            for back in range(1, min(start, self.look_back) + 1):
                before[-back] = DEAD if dead[start - back] else ids[start - back]
            packed = np.concatenate([token, before, np.array([start, count, slot], np.int32)])
            rows, self.history = hash_step(self.graph, self.state, packed, image, self.history, width == 1)
            out.append(np.asarray(rows)[:, :count])
            start += count
        return np.concatenate(out, axis=1).transpose(1, 0, 2)


@cache
def tiny_hasher() -> Hasher:
    return Hasher(TINY, tiny_tables())


@cache
def real_hasher() -> Hasher:
    """The released primes and multipliers under a stand-in map: 99,092 compressed ids, each id below maps to itself."""
    stand_in = np.minimum(np.arange(REAL.vocab_size), REAL.engram_compressed_vocab_size - 1)
    return Hasher(REAL, EngramTables.build(REAL, stand_in))


@pytest.mark.parametrize("cuts", [[6], [1] * 6, [2, 1, 3], [4, 2]])
def test_vectors_of_the_specification(cuts: list[int]) -> None:
    rows = real_hasher()(IDS, [False] * 6, cuts)
    assert rows.shape == (6, 2, 24)
    assert rows[0, 0, [0, 1, 2, 8, 16, 23]].tolist() == [5702652, 24393184, 39183301, 131476717, 257520185, 380066193]
    assert rows[3, 0, [0, 1, 2, 8, 16, 23]].tolist() == [13209418, 30618253, 35074543, 141403109, 257376030, 383319188]
    assert rows[0, 1, [0, 1, 2, 8, 16, 23]].tolist() == [14361964, 29977809, 32716444, 132225184, 261362261, 372375971]
    assert rows[3, 1, [0, 1, 2, 8, 16, 23]].tolist() == [13368988, 28300975, 33651511, 129940186, 270516569, 376293511]


@pytest.mark.parametrize("cuts", [[6], [1] * 6, [3, 3], [2, 1, 3]])
def test_vectors_with_a_dead_position(cuts: list[int]) -> None:
    """What lies before a dead token stays out of reach until the look-back no longer meets it."""
    dead = [t == 2 for t in range(6)]
    rows, live = real_hasher()(IDS, dead, cuts), real_hasher()(IDS, [False] * 6, [6])
    assert rows[3, 0, [0, 8, 16]].tolist() == [2008568, 134138602, 264495124]
    np.testing.assert_array_equal(rows[4, :, :8], live[4, :, :8])
    assert (rows[4, :, 8:] != live[4, :, 8:]).any(axis=-1).all()
    np.testing.assert_array_equal(rows[5, :, :16], live[5, :, :16])
    assert (rows[5, :, 16:] != live[5, :, 16:]).any(axis=-1).all()


def test_released_example() -> None:
    real = golden_file("real-constants")
    assert real["engram/example_pad_id"].tolist() == [2]
    rows = real_hasher()(real["engram/example_compressed_ids"].tolist(), [False] * 40, [7, 1, 1, 16])
    np.testing.assert_array_equal(rows, real["engram/example_hash_ids"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_prompts(prompt: str) -> None:
    """p300 holds the image id as text: it is alive (numerics 12.5)."""
    expected = golden("kvq", prompt)
    ids = expected["input_ids"].tolist()
    assert prompt != "p300" or ids[54] == TINY.image_token_id
    rows = tiny_hasher()(ids, [False] * len(ids), [5, 1, 16, 1, 1, 3])
    np.testing.assert_array_equal(rows, expected["engram_hash_ids"])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, TINY.vocab_size - 1), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(1, ROWS), max_size=12),
    st.integers(0, SLOTS - 1),
)
def test_any_cuts_equal_the_reference(tokens: list[tuple[int, bool]], cuts: list[int], slot: int) -> None:
    """Dead tokens at any place, also the last ones of a chunk; slots keep the history of another sequence."""
    ids, dead = [t for t, _ in tokens], [d for _, d in tokens]
    mapped = tiny_tables().token_map[ids]
    np.testing.assert_array_equal(tiny_hasher()(ids, dead, cuts, slot), hash_ids(tiny_tables(), mapped, np.array(dead)))


def test_prefill_looks_back_at_what_came_with_it() -> None:
    """As far as any n-gram reaches, wherever the chunk starts; the slot may have been another sequence's. Controls: an
    id fewer, and a wrong one, which reaches the rows that far behind it."""
    ids, dead = list(range(40, 60)), [False] * 20
    expected = tiny_hasher()(ids, dead, [16, 4])
    for look_back, right in ((3, True), (5, True), (2, False)):
        hasher = Hasher(TINY, tiny_tables(), look_back)
        np.testing.assert_array_equal(hasher(ids, dead, [7])[:7], expected[:7])
        hasher.history = jnp.full_like(hasher.history, 9)  # taken by another sequence since
        same = (hasher(ids, dead, [7, 9, 4]) == expected).all(axis=(1, 2))
        assert same.tolist() == [right or t not in (7, 16) for t in range(20)]
    ids[6] = 99
    differs = (tiny_hasher()(ids, dead, [7, 13]) != expected).any(axis=(1, 2))
    assert np.flatnonzero(differs).tolist() == [6, 7, 8, 9]


def test_the_look_back_latches() -> None:
    """Control: blocking only the dead position itself would let the id before it through."""
    ids, dead = [10, 11, 12, 13], [False, False, True, False]
    rows = tiny_hasher()(ids, dead, [4])[3]
    tables, mapped = tiny_tables(), tiny_tables().token_map
    leaked = mapped[13] * tables.multipliers[:, 0] ^ tables.pad * tables.multipliers[:, 1]
    leaked = leaked ^ mapped[11] * tables.multipliers[:, 2]
    heads = TINY.engram_n_heads
    trigrams = leaked[:, None] % tables.primes[:, heads : 2 * heads] + tables.offsets[:, heads : 2 * heads]
    assert (rows[:, heads : 2 * heads] != trigrams).any()


def test_history_marks_dead_tokens() -> None:
    hasher = tiny_hasher()
    hasher([10, 11, 12], [False, True, False], [3])
    assert np.asarray(hasher.history)[0, :3].tolist() == [
        tiny_tables().token_map[10],
        DEAD,
        tiny_tables().token_map[12],
    ]


def test_gate() -> None:
    """At d = +0 it opens to .50025 and at d = -0 to .49975 (numerics 17); the clamp holds between -1e-6 and 1e-6."""
    d = jnp.asarray([0.0, -0.0, 1e-7, -1e-7, 4.0, -4.0], jnp.float32)
    clamped = 1 / (1 + np.exp(-1e-3))
    wide = 1 / (1 + np.exp(-2.0))
    expected = [clamped, 1 - clamped, clamped, 1 - clamped, wide, 1 - wide]
    np.testing.assert_allclose(engram_gate(d), expected, rtol=0, atol=1e-7)
    np.testing.assert_allclose(engram_gate(d)[:2], [0.50025, 0.49975], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ordinal", range(len(TINY.engram_layer_ids)))
def test_write(ordinal: int) -> None:
    """Against float64; dead rows keep their streams to the bit."""
    engram: Any = tiny_model(tiny_numerics("kvq")).engrams
    generator = np.random.default_rng(ordinal)
    rows, hc, dim = 6, TINY.hc_mult, TINY.hidden_size
    streams = generator.normal(size=(rows, hc, dim)).astype(np.float32)
    memory = generator.normal(size=(rows, TINY.engram_columns * TINY.engram_head_dim)).astype(np.float32)
    streams[4] = 0
    dead = np.array([False, True, False, True, False, False])
    out = np.asarray(engram(ordinal, jnp.asarray(streams), jnp.asarray(memory), jnp.asarray(dead)))
    assert out[dead].tobytes() == streams[dead].tobytes()

    weight = np.asarray(engram.wkv.expanded(ordinal), np.float64)
    kv = (memory.astype(np.float64) @ weight.T).reshape(rows, hc + 1, dim)
    key, value, x = kv[:, :hc], kv[:, hc:], streams.astype(np.float64)
    gates = np.asarray(engram.q_weight[ordinal], np.float64) * np.asarray(engram.k_weight[ordinal], np.float64)
    d = (x * gates * key).sum(-1) * dim**-0.5
    for v in (x, key):
        d = d / np.sqrt((v**2).mean(-1) + TINY.rms_norm_eps)
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(d), 1e-6)), d)))
    expected = np.where(dead[:, None, None], x, x + gate[..., None] * value)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-4)
    assert np.abs(out[~dead] - streams[~dead]).max() > 0.1


def test_dead_rows_keep_the_sign_of_zero() -> None:
    """x + 0 * value would turn -0 into +0, and a NaN in an unused row would spread."""
    engram: Any = tiny_model(tiny_numerics("kvq")).engrams
    streams = jnp.full((2, TINY.hc_mult, TINY.hidden_size), -0.0)
    memory = jnp.full((2, TINY.engram_columns * TINY.engram_head_dim), jnp.nan)
    out = np.asarray(engram(0, streams, memory, jnp.asarray([True, False])))
    assert np.signbit(out[0]).all() and not out[0].any()
    assert np.isnan(out[1]).all()
