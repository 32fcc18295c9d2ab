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
    """The static shape of one compiled step.

    decode: one row per sequence; prefill: rows in tiles, each of one sequence. context_blocks: columns of the block
    tables, so the index scan covers context_blocks * block_size positions.
    """

    decode: bool
    rows: int
    context_blocks: int

    @property
    def tile(self) -> int:
        """Rows of a tile: 1 in decode; in prefill up to 128, and at least 16 tiles from 1,024 rows on."""
        return 1 if self.decode else min(self.rows, max(16, min(MAX_TILE, self.rows // 16 // 16 * 16)))

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
    """One step: its bucket, the packed buffer, and the chunks in order; chunk i is sequence i of the step."""

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
    ) -> BucketLadder:
        """Ladders from the limits: prefill rows x4 from 64, decode rows x4 from 1, context x4 from 16 blocks."""
        rows = max_num_batched_tokens
        while rows % Bucket(False, rows, 1).tile:
            rows += 1  # the last bucket holds whole tiles
        return cls(
            tuple(prefill or _ladder(min(64, rows), rows)),
            tuple(decode or _ladder(1, max_num_seqs)),
            tuple(context or _ladder(min(16, max_context_blocks), max_context_blocks)),
        )

    def buckets(self) -> tuple[Bucket, ...]:
        """Every shape, smallest first."""
        return tuple(
            Bucket(decode, rows, context)
            for decode, ladder in ((True, self.decode_rows), (False, self.prefill_rows))
            for rows in ladder
            for context in self.context_blocks
        )

    def prefill_row_cost(self, count: int, bucket_rows: int | None = None) -> int:
        """Rows that a chunk of `count` tokens takes in a bucket: whole tiles."""
        tile = Bucket(False, bucket_rows or self.prefill_rows[-1], 1).tile
        return -(-count // tile) * tile

    def fit(self, decode: bool, counts: Sequence[int], context_blocks: int) -> Bucket:
        """The smallest bucket that holds chunks of `counts` tokens with block tables of `context_blocks`."""
        context = _at_least(self.context_blocks, context_blocks, "context blocks")
        if decode:
            return Bucket(True, _at_least(self.decode_rows, len(counts), "decode rows"), context)
        for rows in self.prefill_rows:
            bucket = Bucket(False, rows, context)
            if sum(-(-n // bucket.tile) * bucket.tile for n in counts) <= rows:
                return bucket
        raise ValueError(
            f"no prefill bucket holds chunks of {list(counts)} tokens; the largest has {self.prefill_rows[-1]} rows"
        )


def _ladder(low: int, high: int) -> list[int]:
    steps = []
    while low < high:
        steps.append(low)
        low *= 4
    return [*steps, high]


def _at_least(ladder: tuple[int, ...], need: int, what: str) -> int:
    at = bisect_left(ladder, need)
    if at == len(ladder):
        raise ValueError(f"{need} {what} asked, the largest bucket has {ladder[-1]}")
    return ladder[at]


def build_plan(bucket: Bucket, chunks: Sequence[Chunk]) -> StepPlan:
    """Packs `chunks` into the bucket. In decode every chunk has one token."""
    buffer = np.zeros(bucket.size, np.int32)
    view = bucket.unpack(buffer)
    view["forced"][:] = FREE_TOKEN
    # Tiles and sequences that nobody uses point at a sequence of no rows: all their rows are padding.
    if len(chunks) < bucket.sequences:
        view["tile_sequence"][:] = len(chunks)
    row = 0
    for i, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        tiles = -(-count // bucket.tile)
        if row + count > bucket.rows or (bucket.decode and count != 1):
            raise ValueError(f"chunk {i} of {count} tokens does not fit {bucket}")
        view["token"][row : row + count] = chunk.tokens
        view["tile_sequence"][row // bucket.tile : row // bucket.tile + tiles] = i
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
        row += tiles * bucket.tile
    return StepPlan(bucket, buffer, tuple(chunks))
