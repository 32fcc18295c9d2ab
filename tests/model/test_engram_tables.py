"""Engram host tables against the golden tables, the real model's constants and the vectors of numerics 17."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from di_jax.errors import UserError
from di_jax.model.config import ModelConfig, ModelConfigError
from di_jax.model.engram_tables import (
    EngramTables,
    TokenizerMismatchError,
    bucket_primes,
    hash_ids,
    multipliers,
    row_offsets,
    token_map,
)

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ModelConfig.from_file(GOLDEN / "tiny-v41-fp8")
REAL = ModelConfig.from_file(GOLDEN / "config_real.json")
TINY_TOKENIZER = RawTokenizer.from_file(str(GOLDEN / "tiny-v41-fp8" / "tokenizer.json"))
VECTOR_IDS = np.array([0, 671, 6102, 99091, 17, 5])  # numerics 17, ids already mapped


@pytest.fixture(scope="module")
def tiny() -> EngramTables:
    return EngramTables.build(TINY, TINY_TOKENIZER)


@pytest.fixture(scope="module")
def real() -> EngramTables:
    """The real constants under a stand-in map: 99,092 compressed ids, id 2 maps to 2."""
    stand_in = np.minimum(np.arange(REAL.vocab_size), REAL.engram_compressed_vocab_size - 1)
    return EngramTables.build(REAL, stand_in)


def limb_hash(tables: EngramTables, mapped: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """The device scheme of numerics 12.4 in uint32 only: XOR of limb pairs, remainder byte by byte."""
    layers, ngram = tables.multipliers.shape
    heads = tables.primes.shape[1] // (ngram - 1)
    primes = tables.primes.astype(np.uint32)
    out = np.zeros((len(mapped), *primes.shape), np.uint32)
    for t in range(len(mapped)):
        blocked = False
        mixed = np.zeros((layers, 2), np.uint32)
        for back in range(ngram):
            blocked = blocked or t - back < 0 or bool(dead[t - back])
            c = tables.pad if blocked else int(mapped[t - back])
            mixed ^= tables.product_limbs[:, back, c]
            if not back:
                continue
            columns = slice((back - 1) * heads, back * heads)
            remainder = np.zeros_like(primes[:, columns])
            for limb in (mixed[:, 1:], mixed[:, :1]):
                for shift in (24, 16, 8, 0):
                    byte = (limb >> np.uint32(shift)) & np.uint32(255)
                    remainder = (remainder * np.uint32(256) + byte) % primes[:, columns]
            assert remainder.dtype == np.uint32
            out[t, :, columns] = remainder + tables.offsets[:, columns].astype(np.uint32)
    return out.astype(np.int32)


def test_tiny_tables_equal_the_golden_tables(tiny: EngramTables) -> None:
    golden = load_file(GOLDEN / "tiny-v41.tables.safetensors")
    np.testing.assert_array_equal(tiny.token_map, golden["token_map"])
    np.testing.assert_array_equal(bucket_primes(TINY), golden["primes"])
    np.testing.assert_array_equal(row_offsets(TINY), golden["offsets"])
    np.testing.assert_array_equal(multipliers(TINY), golden["multipliers"])
    np.testing.assert_array_equal(tiny.primes, golden["primes"].reshape(2, -1))
    np.testing.assert_array_equal(tiny.offsets, golden["offsets"])
    np.testing.assert_array_equal(tiny.multipliers, golden["multipliers"])
    assert tiny.token_map.dtype == tiny.primes.dtype == tiny.offsets.dtype == np.int32
    assert tiny.product_limbs.dtype == np.uint32 and tiny.product_limbs.shape == (2, 4, 379, 2)


def test_real_constants(real: EngramTables) -> None:
    golden = load_file(GOLDEN / "real-constants.safetensors")
    np.testing.assert_array_equal(bucket_primes(REAL), golden["engram/primes"])
    np.testing.assert_array_equal(row_offsets(REAL), golden["engram/offsets"])
    np.testing.assert_array_equal(multipliers(REAL), golden["engram/multipliers"])
    assert real.pad == golden["engram/example_pad_id"][0]
    rows = hash_ids(real, golden["engram/example_compressed_ids"])
    np.testing.assert_array_equal(rows, golden["engram/example_hash_ids"])
    assert list(row_offsets(REAL)[:, 8]) == [128000880, 128004290]
    assert list(row_offsets(REAL)[:, 16]) == [256002934, 256009984]


def test_hash_vectors(real: EngramTables) -> None:
    """numerics 17, Engram hash: layer 1 then layer 14, t = 0 and t = 3."""
    rows = hash_ids(real, VECTOR_IDS)
    columns = [0, 1, 2, 8, 16, 23]
    assert rows[0, 0, columns].tolist() == [5702652, 24393184, 39183301, 131476717, 257520185, 380066193]
    assert rows[3, 0, columns].tolist() == [13209418, 30618253, 35074543, 141403109, 257376030, 383319188]
    assert rows[0, 1, columns].tolist() == [14361964, 29977809, 32716444, 132225184, 261362261, 372375971]
    assert rows[3, 1, columns].tolist() == [13368988, 28300975, 33651511, 129940186, 270516569, 376293511]


def test_hash_of_a_dead_position_latches(real: EngramTables) -> None:
    """numerics 17: with position 2 dead, later windows regain one n-gram size per token."""
    live = hash_ids(real, VECTOR_IDS)
    dead = hash_ids(real, VECTOR_IDS, np.arange(6) == 2)
    assert dead[3, 0, [0, 8, 16]].tolist() == [2008568, 134138602, 264495124]
    np.testing.assert_array_equal(dead[:2], live[:2])
    np.testing.assert_array_equal(dead[4, :, :8], live[4, :, :8])
    assert (dead[4, :, 8:] != live[4, :, 8:]).any()
    np.testing.assert_array_equal(dead[5, :, :16], live[5, :, :16])
    assert (dead[5, :, 16:] != live[5, :, 16:]).any()
    # The latch: behind the dead position nothing shows, so what stands there cannot matter.
    other = VECTOR_IDS.copy()
    other[:3] = [7, 8, 9]
    np.testing.assert_array_equal(hash_ids(real, other, np.arange(6) == 2)[3:], dead[3:])


def test_a_dead_position_itself_hashes_pads_only(real: EngramTables) -> None:
    dead = hash_ids(real, VECTOR_IDS, np.arange(6) == 2)
    pads = hash_ids(real, np.full(6, real.pad))
    np.testing.assert_array_equal(dead[2], pads[3])


@pytest.mark.parametrize("prompt", ["p7", "p64", "p150", "p300"])
def test_golden_hash_ids(tiny: EngramTables, prompt: str) -> None:
    golden = load_file(GOLDEN / "tiny-v41.nokvq.safetensors")
    mapped = tiny.token_map[golden[f"{prompt}/input_ids"]]
    np.testing.assert_array_equal(hash_ids(tiny, mapped), golden[f"{prompt}/engram_hash_ids"])


@given(data=st.data())
def test_limb_hash_equals_the_64_bit_hash(data: st.DataObject, real: EngramTables, tiny: EngramTables) -> None:
    tables = data.draw(st.sampled_from([real, tiny]))
    top = tables.product_limbs.shape[2] - 1
    ids = data.draw(st.lists(st.integers(0, top) | st.just(top), min_size=1, max_size=6))
    dead = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    np.testing.assert_array_equal(
        limb_hash(tables, np.array(ids), np.array(dead)), hash_ids(tables, np.array(ids), np.array(dead))
    )


def test_product_limbs_are_the_products(real: EngramTables) -> None:
    for layer, back, c in [(0, 0, 99091), (1, 3, 1), (1, 2, 4711), (0, 1, 0)]:
        low, high = (int(x) for x in real.product_limbs[layer, back, c])
        assert low + (high << 32) == c * int(real.multipliers[layer, back])


def test_rows_stay_inside_their_columns(tiny: EngramTables) -> None:
    rows = hash_ids(tiny, np.arange(379))
    assert (rows >= tiny.offsets).all() and (rows < tiny.offsets + tiny.primes).all()


def word_tokenizer(words: list[str]) -> RawTokenizer:
    tokenizer = RawTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_token_map_normalises_in_the_specified_order() -> None:
    words = [
        "a",
        "b",
        "p",
        "A",
        "Á",
        "ａ",
        " a\t",
        "",
        "  ",
        "\n",
        " ",
        "\u00a0",
        "\u0301",
        "\u0302",
        "ﬁ",
        "fi",
        "x y",
        "x\r\ny",
    ]
    found = token_map(word_tokenizer(words), len(words)).tolist()
    #        a  b  p  A  Á  ａ ' a\t' ''
    assert found[:8] == [0, 1, 2, 0, 0, 0, 0, 3]
    assert found[8:12] == [4, 4, 4, 4]  # all white space is one space; NFKC makes U+00A0 one too
    assert found[12:14] == [5, 6]  # an accent alone normalises to nothing: its own text counts
    assert found[14] == found[15] == 7  # compatibility ligature
    assert found[16] == found[17] == 8


def test_token_map_counts_partial_characters_by_their_vocabulary_string() -> None:
    tokenizer = RawTokenizer(models.BPE(vocab={"a": 0, "Ġ": 1, "b": 2, "ä": 3, "½": 4, "A": 5}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert token_map(tokenizer, 6).tolist() == [0, 1, 2, 3, 4, 0]


def test_token_map_counts_special_tokens_like_text() -> None:
    tokenizer = word_tokenizer(["b", "c", "p", "<END>"])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert token_map(tokenizer, 5).tolist() == [0, 1, 2, 3, 3]


def test_ids_past_the_tokenizer_map_like_the_pad() -> None:
    found = token_map(word_tokenizer(["b", "c", "p"]), 6)
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 2, 2, 2, 2]
    assert token_map(word_tokenizer(["b", "c", "p"]), 4, pad_token_id=1).tolist() == [0, 1, 2, 1]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer\.json has 3 ids.*vocab_size 2"):
        token_map(word_tokenizer(["b", "c", "p"]), 2)


def test_a_tokenizer_without_the_pad_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match="pad id 2"):
        token_map(word_tokenizer(["b", "c"]), 8)


def test_a_foreign_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer\.json.* 3 .*engram_compressed_vocab_size = 379") as e:
        EngramTables.build(TINY, word_tokenizer(["b", "c", "p"]))
    assert isinstance(e.value, UserError)


def test_wrong_row_counts_are_refused() -> None:
    wrong = dataclasses.replace(TINY, engram_num_embeddings=(2914, 3747))
    with pytest.raises(ModelConfigError, match=r"engram_num_embeddings is 3747 for layer 4.* 3746 rows"):
        EngramTables.build(wrong, TINY_TOKENIZER)


def test_primes_must_stay_below_24_bits() -> None:
    with pytest.raises(ModelConfigError, match="engram_vocab_size"):
        bucket_primes(dataclasses.replace(TINY, engram_vocab_size=2**24 - 50))


def test_primes_are_distinct_over_all_layers_and_start_at_the_bucket_size() -> None:
    primes = bucket_primes(dataclasses.replace(TINY, engram_vocab_size=211)).ravel()
    assert primes[0] == 211 and len(set(primes)) == primes.size
    assert all(all(p % d for d in range(2, int(p**0.5) + 1)) for p in primes.tolist())


def test_a_model_without_engram_has_empty_tables() -> None:
    bare = dataclasses.replace(TINY, engram_layer_ids=(), engram_num_embeddings=())
    tables = EngramTables.build(bare, TINY_TOKENIZER)
    assert tables.primes.shape == (0, 12) and tables.product_limbs.shape == (0, 4, 379, 2)
    assert hash_ids(tables, np.arange(5)).shape == (5, 0, 12)
