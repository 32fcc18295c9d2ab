"""Which blocks of a prompt are in the caches already: keys of complete blocks, and how far a prefix hit reaches.

A key names the content of a block and of all before it. The same keys name the snapshots of `state_cache` at the end of
a block. Pure functions and plain numpy; `BlockManager` knows which block has which key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

KEY_BYTES = 16


class BlockKeys:
    """The keys of a sequence's complete blocks, each computed once as the tokens grow: first the prompt, then answers.

    key = blake2b-128(key before, the block's ids as int32 little-endian, images that begin in it). The key before the
    first block is a hash of the salt, so requests with different salts never share a block; None shares with None only.
    content: by the position of an image's first token, an id of its pixels. The placeholders of two images are the same
    tokens; the id tells apart the block where an image begins, and the chain all after it.
    """

    def __init__(self, block_size: int, salt: str | None = None, content: Mapping[int, str] | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self._content = sorted((content or {}).items())
        self._next_content = 0  # the first image whose block is not complete
        self._rest = np.zeros(0, "<i4")  # tokens after the last complete block
        # "salt" before it: an empty salt is not none. JSON can hold lone surrogates, hence surrogatepass.
        self._last = _digest(b"" if salt is None else b"salt" + _encode(salt))

    @property
    def num_tokens(self) -> int:
        """Tokens given so far."""
        return len(self.keys) * self.block_size + len(self._rest)

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds the tokens that follow the `num_tokens` given so far, and the keys of the blocks they complete.

        tokens: ids, any count. Raises ValueError for ids that are none, such as -1 of a token not known yet.
        """
        if not len(tokens):
            return
        new = np.asarray(tokens)
        if new.min() < 0 or new.max() > np.iinfo(np.int32).max:
            raise ValueError(f"token ids of a block key must be in 0 .. 2^31 - 1; got {new.min()} .. {new.max()}")
        ids = np.concatenate([self._rest, new.astype("<i4", casting="same_kind")])
        complete = len(ids) // self.block_size * self.block_size
        data, width = memoryview(ids[:complete].tobytes()), self.block_size * ids.itemsize
        for first in range(0, len(data), width):
            self._last = _digest(self._last, data[first : first + width], self._images_of_next())
            self.keys.append(self._last)
        self._rest = ids[complete:].copy()  # not a view, which would keep the whole prompt

    def copy(self) -> Self:
        """An independent one with the same tokens, for another answer to the same prompt."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.keys = list(self.keys)
        return other

    def _images_of_next(self) -> bytes:
        """Offset, length and id of the images that begin in the block after the last complete one."""
        first, images = len(self.keys) * self.block_size, b""
        while self._next_content < len(self._content):
            position, name = self._content[self._next_content]
            if position >= first + self.block_size:
                break
            data = _encode(name)
            images += np.array([position - first, len(data)], "<i4").tobytes() + data
            self._next_content += 1
        return images


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(*parts: bytes | memoryview) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


class Hit(NamedTuple):
    """How a prefill uses the caches.

    length: positions whose compressed entries and index keys are cached and not rewritten. start: first row computed.
    window_start: windows of the encoder layers never reach below it; 0 when their rings were restored, or without hit.
    """

    length: int
    start: int
    window_start: int


def hit_limit(num_tokens: int, look_back: int, block_size: int) -> int:
    """The longest hit that leaves the last `look_back` positions to compute: a multiple of block_size, at least 0.

    look_back: window + 6, the rows of a window ring (134 for a window of 128, engine specification 5.4), so that the
    prefill after a hit fills the rings of every layer.
    """
    return max(0, num_tokens - look_back) // block_size * block_size


def choose_hit(
    chain_blocks: int,
    num_tokens: int,
    look_back: int,
    has_snapshot: Callable[[int], bool],
    replay: bool,
    block_size: int = 128,
) -> Hit:
    """How far a hit reaches, and where its prefill starts (engine specification 5.4).

    chain_blocks: cached blocks from the first on. num_tokens: of the prefill, cached ones included. has_snapshot:
    whether window state is kept for a boundary (tokens before it, a positive multiple of block_size). replay: encoder
    windows may restart a block before the end of the hit when no state is kept there; without it the hit ends at the
    farthest boundary with a snapshot and equals a cold run.
    """
    length = min(chain_blocks * block_size, hit_limit(num_tokens, look_back, block_size))
    if replay and length and not has_snapshot(length):
        return Hit(length, length - block_size, length - block_size)
    while length and not has_snapshot(length):
        length -= block_size
    return Hit(length, length, 0)
