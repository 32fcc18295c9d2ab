"""Host tables of the Engram hash: token map, bucket primes, row offsets, multipliers (numerics 12.1 - 12.5).

NumPy only. Everything here follows from `config.json` and `tokenizer.json`; the device part of the Engram receives
the arrays of `EngramTables` and repeats the hash in 32-bit arithmetic.

Shape letters: V vocabulary, U compressed vocabulary, G Engram layers (in config order), N largest n-gram,
H heads per n-gram size, C = (N - 1) * H columns ordered (size, head), T positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as RawTokenizer

from di_jax.errors import UserError
from di_jax.model.config import ModelConfig, ModelConfigError

MULTIPLIER_SEED = 10007  # numerics 12.3: the generator of layer n is seeded with 10007 * n
MODULUS_LIMIT = 2**24  # the 32-bit remainder of the device hash needs rem * 256 + byte < 2^32
SPACE_SENTINEL = "\ue000"  # private use: keeps a lone space through the strip of both ends
REPLACEMENT = "\ufffd"


class TokenizerMismatchError(UserError):
    """`tokenizer.json` does not belong to the checkpoint: its Engram token map has another size than the config's."""


def _key_normalizer() -> normalizers.Normalizer:
    """The normalisation of numerics 12.1, in its order and with the Unicode tables of the tokenizers package."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), SPACE_SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(SPACE_SENTINEL, " "),
        ]
    )


def token_key(tokenizer: RawTokenizer, token_id: int, text: str, normalizer: normalizers.Normalizer) -> str:
    """The string under which an id is counted: its normalised text (numerics 12.1).

    A token that is part of a character (its text holds U+FFFD) counts under its raw vocabulary string; a token
    that normalises to nothing counts under its text as it is.
    """
    if REPLACEMENT in text:
        return tokenizer.id_to_token(token_id) or text
    return normalizer.normalize_str(text) or text


def token_map(tokenizer: RawTokenizer, vocab_size: int, pad_token_id: int = 2) -> np.ndarray:
    """Compressed id of every token id, int32 [V]; compressed ids count distinct keys by first appearance.

    Ids past the tokenizer's end (an embedding padded beyond it, checkpoint 1) map like `pad_token_id`: the model can
    receive them, no text can. Raises TokenizerMismatchError when the tokenizer has more ids than `vocab_size`, or
    none for the pad.
    """
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if count > vocab_size:
        raise TokenizerMismatchError(
            f"tokenizer.json has {count} ids, config.json has vocab_size {vocab_size}; "
            "use the tokenizer.json that came with this checkpoint"
        )
    if not 0 <= pad_token_id < count:
        raise TokenizerMismatchError(
            f"tokenizer.json has {count} ids, config.json names pad id {pad_token_id}; "
            "use the tokenizer.json that came with this checkpoint"
        )
    texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
    normalizer = _key_normalizer()
    numbers: dict[str, int] = {}
    mapped = np.empty(vocab_size, np.int32)
    for i, text in enumerate(texts):
        mapped[i] = numbers.setdefault(token_key(tokenizer, i, text, normalizer), len(numbers))
    mapped[count:] = mapped[pad_token_id]
    return mapped


def _is_prime(n: int, small_primes: np.ndarray) -> bool:
    divisors = small_primes[small_primes * small_primes <= n]
    return n > 1 and bool(np.all(n % divisors))


def _small_primes(limit: int) -> np.ndarray:
    sieve = np.ones(limit + 1, bool)
    sieve[:2] = False
    for p in range(2, int(limit**0.5) + 1):
        if sieve[p]:
            sieve[p * p :: p] = False
    return np.flatnonzero(sieve)


def bucket_primes(config: ModelConfig) -> np.ndarray:
    """Table size of every hash column, int64 [G, N - 1, H] (numerics 12.2).

    The primes from `engram_vocab_size` upwards, each used once over all layers, sizes and heads. Raises
    ModelConfigError when they would leave 24 bits (`engram_vocab_size` too close to 2^24).
    """
    shape = (len(config.engram_layer_ids), len(config.engram_ngram_sizes), config.engram_n_heads)
    small = _small_primes(int(MODULUS_LIMIT**0.5))
    primes: list[int] = []
    candidate = config.engram_vocab_size
    while len(primes) < int(np.prod(shape)):
        if candidate >= MODULUS_LIMIT:
            raise ModelConfigError(
                f"engram_vocab_size is {config.engram_vocab_size}: fewer than {int(np.prod(shape))} primes lie "
                "between it and 2^24, the limit of the 32-bit hash"
            )
        if _is_prime(candidate, small):
            primes.append(candidate)
        candidate += 1
    return np.array(primes, np.int64).reshape(shape)


def row_offsets(config: ModelConfig) -> np.ndarray:
    """First table row of every column, int64 [G, C], restarting at 0 in each layer (numerics 12.4).

    Raises ModelConfigError when a layer's primes do not sum to its `engram_num_embeddings` entry.
    """
    primes = bucket_primes(config).reshape(len(config.engram_layer_ids), config.engram_columns)
    ends = np.cumsum(primes, axis=1)
    for layer, rows, end in zip(config.engram_layer_ids, config.engram_num_embeddings, ends, strict=True):
        if rows != end[-1]:
            raise ModelConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}, but {config.engram_columns} primes from "
                f"engram_vocab_size = {config.engram_vocab_size} need {end[-1]} rows"
            )
    return ends - primes


def multipliers(config: ModelConfig) -> np.ndarray:
    """Odd hash multipliers, int64 [G, N]; entry s multiplies the id s positions back (numerics 12.3)."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = [
        np.random.default_rng(MULTIPLIER_SEED * layer).integers(0, bound, config.engram_max_ngram_size, np.int64)
        for layer in config.engram_layer_ids
    ]
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size)
    return np.array(draws, np.int64).reshape(shape) * 2 + 1


def product_limbs(factors: np.ndarray, compressed_vocab_size: int) -> np.ndarray:
    """Every id-times-multiplier product as 32-bit halves, uint32 [G, N, U, 2] (low, high); `factors` int64 [G, N]."""
    ids = np.arange(compressed_vocab_size, dtype=np.uint64)
    products = factors.astype(np.uint64)[:, :, None] * ids  # below 2^63 by the bound on the multipliers
    return np.stack([products & np.uint64(0xFFFFFFFF), products >> np.uint64(32)], axis=-1).astype(np.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class EngramTables:
    """All that the Engram hash needs besides the ids. Columns are ordered (n-gram size, head)."""

    token_map: np.ndarray  # int32 [V], token id -> compressed id
    pad: int  # compressed id of the pad token
    primes: np.ndarray  # int32 [G, C], rows of each column
    offsets: np.ndarray  # int32 [G, C], first row of each column
    multipliers: np.ndarray  # int64 [G, N]
    product_limbs: np.ndarray  # uint32 [G, N, U, 2], (low, high) halves of id * multiplier

    @classmethod
    def build(cls, config: ModelConfig, source: RawTokenizer | np.ndarray) -> EngramTables:
        """Tables of one model; `source` is its tokenizer, or a ready token map int32 [V].

        Raises TokenizerMismatchError when the map's compressed size is not `engram_compressed_vocab_size`, and
        ModelConfigError when `engram_num_embeddings` disagrees with the primes.
        """
        if isinstance(source, np.ndarray):
            mapped = source.astype(np.int32)
        else:
            mapped = token_map(source, config.vocab_size, config.engram_pad_token_id)
        if mapped.shape != (config.vocab_size,):
            raise ValueError(f"token map has shape {mapped.shape}, expected ({config.vocab_size},)")
        found = int(mapped.max()) + 1
        if found != config.engram_compressed_vocab_size:
            raise TokenizerMismatchError(
                f"tokenizer.json compresses to {found} Engram ids, config.json says engram_compressed_vocab_size = "
                f"{config.engram_compressed_vocab_size}; use the tokenizer.json that came with this checkpoint"
            )
        layers, columns = len(config.engram_layer_ids), config.engram_columns
        factors = multipliers(config)
        return cls(
            token_map=mapped,
            pad=int(mapped[config.engram_pad_token_id]),
            primes=bucket_primes(config).reshape(layers, columns).astype(np.int32),
            offsets=row_offsets(config).astype(np.int32),
            multipliers=factors,
            product_limbs=product_limbs(factors, config.engram_compressed_vocab_size),
        )


def hash_ids(tables: EngramTables, mapped: np.ndarray, dead: np.ndarray | None = None) -> np.ndarray:
    """Table rows read by every position, int32 [T, G, C]: the 64-bit reference of the hash (numerics 12.4, 12.5).

    mapped: compressed ids [T] of a whole sequence from its first token. dead: bool [T], the positions inside an
    image span or padding (default none). Looking back from a position, the first dead one (itself included) or the
    start of the sequence turns that id and every earlier one into the pad.
    """
    mapped = np.asarray(mapped, np.int64)
    count = mapped.shape[0]
    dead = np.zeros(count, bool) if dead is None else np.asarray(dead, bool)
    layers, ngram = tables.multipliers.shape
    heads = tables.primes.shape[1] // (ngram - 1)
    rows = np.empty((count, *tables.primes.shape), np.int32)
    blocked = np.zeros(count, bool)
    mixed = np.zeros((count, layers), np.int64)
    for back in range(ngram):
        position = np.arange(count) - back
        blocked |= (position < 0) | dead[np.maximum(position, 0)]
        ids = np.where(blocked, tables.pad, mapped[np.maximum(position, 0)])
        mixed ^= ids[:, None] * tables.multipliers[:, back]
        if back:
            columns = slice((back - 1) * heads, back * heads)
            rows[:, :, columns] = mixed[:, :, None] % tables.primes[:, columns] + tables.offsets[:, columns]
    return rows
