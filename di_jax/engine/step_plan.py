"""What the host sends to a step: shapes from a small ladder, and one packed int32 buffer (architecture 3).

Pure NumPy: the scheduler builds plans without touching a device.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

MAX_TILE = 128
DEVICE_TOKEN = -1  # a decode row that reads its token from the state: the last one sampled in its slot
FREE_TOKEN = -1  # no forced output


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of one compiled step, as one rank sees it.

    decode: one row per sequence; prefill: rows in tiles, each of one sequence. context_blocks: columns of the block
    tables, so the index scan covers context_blocks * block_size positions. cp: ranks that share the rows of a prefill.
    """

    decode: bool
    rows: int
    context_blocks: int
    cp: int = 1

    @property
    def tile(self) -> int:
        """Rows of a tile: 1 in decode; in prefill up to 128, and at least 16 tiles a rank from 1,024 rows a rank on."""
        rows = self.rows // self.cp
        return 1 if self.decode else min(rows // min(self.cp, 2), max(16, min(MAX_TILE, rows // 16 // 16 * 16)))

    @property
    def grain(self) -> int:
        """Rows that a chunk is padded to: whole tiles, the same number in each of the 2 cp mirrored blocks."""
        return self.tile if self.cp == 1 else self.tile * 2 * self.cp

    @property
    def sequences(self) -> int:
        return self.rows // self.tile

    @cached_property
    def fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the packed arrays, in order. All int32; floats and words are stored as their bits."""
        s = self.sequences
        return (
            ("token", (self.rows,)),
            ("tile_sequence", (s,)),
            ("start", (s,)),
            ("first_row", (s,)),
            ("count", (s,)),
            ("slot", (s,)),
            ("sample", (s,)),  # 1: the sequence's last row is sampled and its slot's last token set
            ("temperature", (s,)),  # fp32 bits
            ("seed_low", (s,)),
            ("seed_high", (s,)),
            ("output_index", (s,)),  # index of the token to come among the request's outputs
            ("forced", (s,)),  # FREE_TOKEN or the id to emit whatever the logits say
            ("block_table", (s, self.context_blocks)),
            *((("own_tiles", (s // self.cp,)), ("home", (s,))) if self.cp > 1 else ()),
        )

    @cached_property
    def size(self) -> int:
        """Elements of the packed buffer."""
        return sum(int(np.prod(shape)) for _, shape in self.fields)

    def unpack(self, buffer: Any) -> dict[str, Any]:
        """Views of the packed buffer, a NumPy or a JAX array of [size] int32."""
        views, at = {}, 0
        for name, shape in self.fields:
            count = int(np.prod(shape))
            views[name] = buffer[at : at + count].reshape(shape)
            at += count
        return views


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The rows that one sequence runs in a step, and how its next token is drawn."""

    tokens: Sequence[int]  # ids to feed; [DEVICE_TOKEN] in decode reads the slot's last token
    start: int  # position of the first one
    slot: int
    blocks: Sequence[int]  # the sequence's block table, at least ceil((start + len(tokens)) / block_size) long
    sample: bool = True
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # 64 bits
    output_index: int = 0
    forced: int = FREE_TOKEN


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One rank's step: its bucket, the packed buffer, and the chunks in order; chunk i is sequence i of the step."""

    bucket: Bucket
    buffer: np.ndarray
    chunks: tuple[Chunk, ...]

    def rows_of(self, index: int) -> slice:
        """Rows of the step that hold chunk `index`."""
        first = int(self.bucket.unpack(self.buffer)["first_row"][index])
        return slice(first, first + len(self.chunks[index].tokens))


@dataclasses.dataclass(frozen=True)
class BucketLadder:
    """The compiled shapes of an engine, ascending. Raises ValueError for work that no bucket holds."""

    prefill_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    context_blocks: tuple[int, ...]
    cp: int = 1  # ranks that share the rows of a prefill

    @classmethod
    def derive(
        cls,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_context_blocks: int,
        prefill: Sequence[int] | None = None,
        decode: Sequence[int] | None = None,
        context: Sequence[int] | None = None,
        cp: int = 1,
    ) -> BucketLadder:
        """Ladders from the limits: prefill rows x4 from 64 a rank, decode rows x4 from 1, context x4 from 16 blocks."""
        rungs = prefill or _ladder(min(64 * cp, max_num_batched_tokens), max_num_batched_tokens)
        return cls(
            tuple(sorted({_whole_grains(rows, cp) for rows in rungs})),
            tuple(decode or _ladder(1, max_num_seqs)),
            tuple(context or _ladder(min(16, max_context_blocks), max_context_blocks)),
            cp,
        )

    def buckets(self) -> tuple[Bucket, ...]:
        """Every shape, smallest first."""
        return tuple(
            self.bucket(decode, rows, context)
            for decode, ladder in ((True, self.decode_rows), (False, self.prefill_rows))
            for rows in ladder
            for context in self.context_blocks
        )

    def bucket(self, decode: bool, rows: int, context_blocks: int) -> Bucket:
        return Bucket(decode, rows, context_blocks, 1 if decode else self.cp)

    def prefill_row_cost(self, count: int, bucket_rows: int | None = None) -> int:
        """Rows that a chunk of `count` tokens takes in a bucket: whole grains."""
        grain = self.bucket(False, bucket_rows or self.prefill_rows[-1], 1).grain
        return -(-count // grain) * grain

    def fit(self, decode: bool, counts: Sequence[int], context_blocks: int) -> Bucket:
        """The smallest bucket that holds chunks of `counts` tokens with block tables of `context_blocks`."""
        context = _at_least(self.context_blocks, context_blocks, "context blocks")
        if decode:
            return Bucket(True, _at_least(self.decode_rows, len(counts), "decode rows"), context)
        for rows in self.prefill_rows:
            if sum(self.prefill_row_cost(n, rows) for n in counts) <= rows:
                return self.bucket(False, rows, context)
        raise ValueError(
            f"no prefill bucket holds chunks of {list(counts)} tokens; the largest has {self.prefill_rows[-1]} rows"
        )


def _ladder(low: int, high: int) -> list[int]:
    steps = []
    while low < high:
        steps.append(low)
        low *= 4
    return [*steps, high]


def _whole_grains(rows: int, cp: int) -> int:
    """The least number of rows from `rows` on that a prefill bucket divides into its grains."""
    rows = max(rows, 2 * cp if cp > 1 else 1)
    while rows % (2 * cp if cp > 1 else 1) or rows % Bucket(False, rows, 1, cp).grain:
        rows += 1
    return rows


def _at_least(ladder: tuple[int, ...], need: int, what: str) -> int:
    at = bisect_left(ladder, need)
    if at == len(ladder):
        raise ValueError(f"{need} {what} asked, the largest bucket has {ladder[-1]}")
    return ladder[at]


def build_plan(bucket: Bucket, chunks: Sequence[Chunk], context_rank: int = 0) -> StepPlan:
    """Packs `chunks` into the bucket. In decode every chunk has one token. context_rank: which of the bucket's cp ranks
    it is for; slots and blocks are those of that rank."""
    buffer = np.zeros(bucket.size, np.int32)
    view = bucket.unpack(buffer)
    view["forced"][:] = FREE_TOKEN
    # Tiles and sequences that nobody uses point at a sequence of no rows: all their rows are padding.
    if len(chunks) < bucket.sequences:
        view["tile_sequence"][:] = len(chunks)
    row, grain = 0, bucket.grain
    spans: list[tuple[int, int]] = []
    for i, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        rows = -(-count // grain) * grain
        if row + count > bucket.rows or (bucket.decode and count != 1):
            raise ValueError(f"chunk {i} of {count} tokens does not fit {bucket}")
        view["token"][row : row + count] = chunk.tokens
        view["tile_sequence"][row // bucket.tile : (row + rows) // bucket.tile] = i
        view["start"][i] = chunk.start
        view["first_row"][i] = row
        view["count"][i] = count
        view["slot"][i] = chunk.slot
        view["sample"][i] = chunk.sample
        view["temperature"].view(np.float32)[i] = chunk.temperature
        words = view["seed_low"].view(np.uint32), view["seed_high"].view(np.uint32)
        words[0][i], words[1][i] = chunk.seed & 0xFFFFFFFF, chunk.seed >> 32 & 0xFFFFFFFF
        view["output_index"][i] = chunk.output_index
        view["forced"][i] = chunk.forced
        used = min(len(chunk.blocks), bucket.context_blocks)
        view["block_table"][i, :used] = chunk.blocks[:used]
        spans.append((row // bucket.tile, rows // bucket.tile))
        row += rows
    if bucket.cp > 1:
        spans.append((row // bucket.tile, (bucket.rows - row) // bucket.tile))  # padding is shared out too
        tiles = mirrored_tiles(spans, bucket.cp)
        view["own_tiles"][:] = tiles[context_rank]
        view["home"][tiles.reshape(-1)] = np.arange(bucket.sequences)
    return StepPlan(bucket, buffer, tuple(chunks))


def mirrored_tiles(spans: Sequence[tuple[int, int]], cp: int) -> np.ndarray:
    """int32 [cp, tiles / cp]: the tiles of each context rank.

    spans: (first tile, tiles) of each sequence, tiles a multiple of 2 cp. A sequence is cut into 2 cp equal blocks, and
    rank k gets blocks k and 2 cp - 1 - k: early rows, which see little, go with late ones, which see much (engine 10).
    """
    blocks = [first + np.arange(tiles, dtype=np.int32).reshape(2 * cp, -1) for first, tiles in spans]
    return np.stack([np.concatenate([part for b in blocks for part in (b[k], b[2 * cp - 1 - k])]) for k in range(cp)])
