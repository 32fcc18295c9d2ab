"""What the host sends to a step: shapes from a small ladder, and one packed int32 buffer (architecture 3).

Pure NumPy: the scheduler builds plans without touching a device.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

MAX_TILE = 128
DEVICE_TOKEN = -1  # a decode row that reads its token from the state: the last one sampled in its slot
DEVICE_LENGTH = -1  # a decode chunk that starts where the caches of its slot end
FREE_TOKEN = -1  # no forced output
NO_TOKEN = -1  # of a history that is shorter than asked, or dead to the Engram
REPLAY_FIELDS = ("window_start", "decoder_start", "cached", "history")  # of a prefill, named as in `rows.Rows`


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of one compiled step, as one rank sees it.

    decode: one row per sequence; prefill: rows in tiles, each of one sequence. context_blocks: columns of the block
    tables, so the index scan covers context_blocks * block_size positions. cp: ranks that share the rows of a prefill.
    kept_rows: rows that the decoder layers of a prefill run, in tiles of their own; 0 stands for `rows`, when no row is
    dropped. history: ids before each chunk of a prefill, at least as many as the Engram looks back at.
    drafts: of a decode step that verifies drafts, how many a sequence has at most; each of `requests` sequences then
    has a row, and the device gives the other rows to the likeliest drafts of all (`engine.allocation`). bare: of a
    decode step of an engine that drafts, that leaves the draft no context: as without a draft.
    """

    decode: bool
    rows: int
    context_blocks: int
    cp: int = 1
    kept_rows: int = 0
    history: int = 3
    drafts: int = 0
    requests: int = 0
    bare: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept_rows", self.kept_rows or self.rows)
        if self.drafts and not (self.decode and 0 < self.requests <= self.rows):
            raise ValueError(f"{self.rows} rows for {self.requests} sequences with drafts")
        if self.bare and (self.drafts or not self.decode):
            raise ValueError("only a decode step without drafts leaves the draft no context")

    @property
    def drops_rows(self) -> bool:
        return self.kept_rows < self.rows

    @property
    def kept(self) -> Bucket:
        """The decoder layers' rows as a bucket: their tiles and grains."""
        return Bucket(self.decode, self.kept_rows, self.context_blocks, self.cp)

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
    def tiles(self) -> int:
        return self.rows // self.tile

    @property
    def sequences(self) -> int:
        return self.requests or self.tiles

    def row_cost(self, count: int) -> int:
        """Rows that `count` tokens of one sequence take: whole grains."""
        return -(-count // self.grain) * self.grain

    def fits_rows(self, counts: Sequence[int]) -> bool:
        """Whether its rows hold chunks of `counts` tokens."""
        return sum(map(self.row_cost, counts)) <= self.rows

    @cached_property
    def fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the packed arrays, in order. All int32; floats and words are stored as their bits."""
        s = self.sequences
        if self.drafts:
            return (
                ("budget", (1,)),  # drafts to verify in all
                ("cap", (s,)),  # drafts to verify of the sequence at most; -1: nobody
                ("slot", (s,)),
                ("origin", (s,)),  # tokens of its prompt: the token at position p is its output p - origin
                ("capacity", (s,)),  # prompt and max_tokens: no row goes beyond position capacity - 2
                ("temperature", (s,)),  # fp32 bits
                ("seed_low", (s,)),
                ("seed_high", (s,)),
                ("forced", (s,)),  # FREE_TOKEN or the next id; only with cap 0
                ("block_table", (s, self.context_blocks)),
            )
        return (
            ("token", (self.rows,)),
            *self._layout_fields(),
            ("start", (s,)),  # DEVICE_LENGTH: read from the state
            ("count", (s,)),
            ("slot", (s,)),
            ("sample", (s,)),  # 1: a row is sampled for the sequence and its slot's last token set
            ("temperature", (s,)),  # fp32 bits
            ("seed_low", (s,)),
            ("seed_high", (s,)),
            ("output_index", (s,)),  # index of the token to come among the request's outputs
            ("forced", (s,)),  # FREE_TOKEN or the id to emit whatever the logits say
            ("block_table", (s, self.context_blocks)),
            *(() if self.decode else self._prefill_fields()),
        )

    def _layout_fields(self, prefix: str = "", sequences: int = 0) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What `lay_out` gives."""
        shapes = [("tile_sequence", self.tiles), ("first_row", sequences or self.sequences)]
        if self.cp > 1:
            shapes += [("own_tiles", self.tiles // self.cp), ("home", self.tiles)]
        return tuple((prefix + name, (size,)) for name, size in shapes)

    def _prefill_fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        s = self.sequences
        return (
            ("sample_row", (s,)),  # which row, of those that the decoder layers run
            *((name, (s,)) for name in REPLAY_FIELDS if name != "history"),
            ("history", (s, self.history)),
            *(self.kept._layout_fields("kept_", s) if self.drops_rows else ()),
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
    """The rows that one sequence runs in a step, and how its next token is drawn.

    One with `samples_of` has no rows: it draws another token after the last row of another chunk, for its own slot.
    """

    tokens: Sequence[int]  # ids to feed; [DEVICE_TOKEN] in decode reads the slot's last token
    start: int  # position of the first one; DEVICE_LENGTH in decode
    slot: int
    blocks: Sequence[int]  # the sequence's block table, at least ceil((start + len(tokens)) / block_size) long
    sample: bool = True
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # 64 bits
    output_index: int = 0
    forced: int = FREE_TOKEN
    window_start: int = 0  # no window reaches below it
    decoder_start: int = 0  # the same in the decoder layers, which drop the rows below it
    cached: int = 0  # compressed entries and index keys of positions below it exist; a multiple of the block size
    history: Sequence[int] = ()  # ids right before `start`, the most recent last; NO_TOKEN: dead to the Engram
    samples_of: int | None = None  # index of the chunk among those of the plan

    @property
    def num_kept(self) -> int:
        """Rows that the decoder layers need."""
        return max(0, self.start + len(self.tokens) - max(self.start, self.decoder_start))


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
    kept_rows: tuple[int, ...] = ()  # for each of prefill_rows: `Bucket.kept_rows` of a second shape, 0 for none
    history: int = 3  # as in `Bucket`
    drafts: int = 0  # of a sequence, that a decode step may verify; 0 without speculation
    varlen: bool = True  # whether steps may verify fewer; those that verify none may be plain ones

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
        keep_tokens: int | None = None,
        history: int = 3,
        drafts: int = 0,
        varlen: bool = True,
    ) -> BucketLadder:
        """Ladders from the limits: prefill rows x4 from 64 a rank, decode rows x4 from 1, context x4 from 16 blocks.

        decode: sequences of a decode step; with drafts each comes in the shapes of `verify_rows`.
        keep_tokens: rows of a prompt's end that the decoder layers run; with it, the larger prefill buckets come in a
        second shape whose decoder layers have an eighth of the rows.
        """
        rungs = prefill or _ladder(min(64 * cp, max_num_batched_tokens), max_num_batched_tokens)
        prefill = tuple(sorted({_whole_grains(rows, cp) for rows in rungs}))
        return cls(
            prefill,
            tuple(decode or _ladder(1, max_num_seqs)),
            tuple(context or _ladder(min(16, max_context_blocks), max_context_blocks)),
            cp,
            () if keep_tokens is None else _kept_rows(prefill, cp, keep_tokens),
            history,
            drafts,
            varlen,
        )

    def buckets(self) -> tuple[Bucket, ...]:
        """Every shape, smallest first."""
        return tuple(
            dataclasses.replace(shape, context_blocks=context)
            for shapes in (self._decodes(), self._prefills())
            for shape in shapes
            for context in self.context_blocks
        )

    def bucket(
        self,
        decode: bool,
        rows: int,
        context_blocks: int,
        kept_rows: int = 0,
        requests: int = 0,
        bare: bool = False,
    ) -> Bucket:
        """The shape of these rows, and of at least so many kept ones; 0: nothing may be dropped.

        requests: sequences with drafts, of `decode_rows`; the shape then has the next rows up that they come in. bare:
        as in `Bucket`.
        """
        if decode and requests:
            shapes = self.verify_rows(requests)
            rows = next((each for each in shapes if each >= rows), shapes[-1])
            return Bucket(True, rows, context_blocks, history=self.history, drafts=self.drafts, requests=requests)
        if decode:
            return Bucket(True, rows, context_blocks, history=self.history, bare=bare)
        need = kept_rows or rows
        shape = min((b for b in self._prefills() if b.rows == rows and b.kept_rows >= need), default=None)
        if shape is None:
            raise ValueError(f"no prefill bucket of {rows} rows, {need} of them kept; there are {self.prefill_rows}")
        return dataclasses.replace(shape, context_blocks=context_blocks)

    def decode_rung(self, sequences: int) -> int:
        """Of `decode_rows`, the least that holds so many."""
        return _at_least(self.decode_rows, sequences, "decode rows")

    def verify_rows(self, requests: int) -> tuple[int, ...]:
        """Rows of the steps of so many sequences with drafts, rising: none verified, one each, half, and all."""
        most = self.drafts
        each = {0, min(1, most), (most + 1) // 2, most} if self.varlen else {most}
        return tuple(requests * (1 + count) for count in sorted(each))

    def prefill_row_cost(self, count: int, bucket_rows: int | None = None) -> int:
        """Rows that a chunk of `count` tokens takes in a bucket: whole grains."""
        return Bucket(False, bucket_rows or self.prefill_rows[-1], 1, self.cp).row_cost(count)

    def fit(
        self, decode: bool, counts: Sequence[int], context_blocks: int, kept: Sequence[int] | None = None
    ) -> Bucket:
        """The smallest bucket that holds chunks of `counts` tokens with block tables of `context_blocks`.

        kept: `Chunk.num_kept` of each; without it nothing may be dropped, so that the results have every row.
        """
        context = _at_least(self.context_blocks, context_blocks, "context blocks")
        if decode:
            return self.bucket(True, self.decode_rung(len(counts)), context)
        for shape in self._prefills():
            enough = not shape.drops_rows if kept is None else shape.kept.fits_rows(kept)
            if enough and len(counts) <= shape.sequences and shape.fits_rows(counts):
                return dataclasses.replace(shape, context_blocks=context)
        raise ValueError(
            f"no prefill bucket holds chunks of {list(counts)} tokens; the largest has {self.prefill_rows[-1]} rows"
        )

    def _decodes(self) -> Iterator[Bucket]:
        """The decode shapes, smallest first, at one block of context."""
        for requests in self.decode_rows:
            if not self.drafts or self.varlen:
                yield self.bucket(True, requests, 1)
            if self.drafts and self.varlen:
                yield self.bucket(True, requests, 1, bare=True)
            for rows in self.verify_rows(requests) if self.drafts else ():
                yield self.bucket(True, rows, 1, requests=requests)

    def _prefills(self) -> Iterator[Bucket]:
        """The prefill shapes, smallest first, at one block of context."""
        for at, rows in enumerate(self.prefill_rows):
            for kept in sorted({self.kept_rows[at] if self.kept_rows else 0, rows} - {0}):
                yield Bucket(False, rows, 1, self.cp, kept, self.history)


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


def _kept_rows(prefill_rows: Sequence[int], cp: int, keep_tokens: int) -> tuple[int, ...]:
    """Kept rows of the second shape of each prefill bucket, 0 for none: an eighth of its rows, enough for the ends of
    two prompts. It has to save something: below four times the kept rows it would be one more program for little."""

    def grains(rows: int) -> int:
        return rows // Bucket(False, rows, 1, cp).grain

    found: list[int] = []
    for rows in prefill_rows:
        kept = _whole_grains(max(rows // 8, 2 * keep_tokens), cp)
        # Ranks of one step share the largest that any needs, so what fits a smaller shape has to fit this one.
        while not Bucket(False, kept, 1, cp).fits_rows([keep_tokens] * 2) or grains(kept) < max(
            (grains(smaller) for smaller in (*prefill_rows, *found) if 0 < smaller < kept), default=0
        ):
            kept = _whole_grains(kept + 1, cp)
        found.append(kept if rows >= 4 * kept else 0)
    return tuple(found)


def _at_least(ladder: tuple[int, ...], need: int, what: str) -> int:
    at = bisect_left(ladder, need)
    if at == len(ladder):
        raise ValueError(f"{need} {what} asked, the largest bucket has {ladder[-1]}")
    return ladder[at]


def build_plan(bucket: Bucket, chunks: Sequence[Chunk], context_rank: int = 0) -> StepPlan:
    """Packs `chunks` into the bucket. In decode every chunk has one token. context_rank: which of the bucket's cp ranks
    it is for; slots and blocks are those of that rank. Raises ValueError for chunks that do not fit."""
    buffer = np.zeros(bucket.size, np.int32)
    view = bucket.unpack(buffer)
    view["forced"][:] = FREE_TOKEN
    lay_out(bucket, [len(chunk.tokens) for chunk in chunks], view, context_rank)
    for i, chunk in enumerate(chunks):
        count, row = len(chunk.tokens), int(view["first_row"][i])
        view["token"][row : row + count] = chunk.tokens
        view["start"][i] = chunk.start
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
    if not bucket.decode:
        _pack_prefill(bucket, chunks, view, context_rank)
    return StepPlan(bucket, buffer, tuple(chunks))


def _pack_prefill(bucket: Bucket, chunks: Sequence[Chunk], view: dict[str, np.ndarray], context_rank: int) -> None:
    """What prefills alone have: which rows the decoder layers run and sample, and what the caches hold before."""
    view["history"][:] = NO_TOKEN
    counts = [chunk.num_kept if bucket.drops_rows else len(chunk.tokens) for chunk in chunks]
    if bucket.drops_rows:
        lay_out(bucket.kept, counts, view, context_rank, "kept_")
    first_row = view["kept_first_row" if bucket.drops_rows else "first_row"]
    for i, chunk in enumerate(chunks):
        for name in ("window_start", "decoder_start", "cached"):
            view[name][i] = getattr(chunk, name)
        if before := list(chunk.history)[-bucket.history :]:
            view["history"][i, -len(before) :] = before
        source = i if chunk.samples_of is None else chunk.samples_of
        if source != i and (chunk.tokens or not 0 <= source < len(chunks)):
            raise ValueError(f"chunk {i} of {len(chunk.tokens)} tokens cannot sample chunk {source} of {len(chunks)}")
        if chunk.sample and not chunks[source].num_kept:
            raise ValueError(f"chunk {i} samples chunk {source}, of which the decoder layers keep no row")
        view["sample_row"][i] = max(0, first_row[source] + counts[source] - 1)


def lay_out(
    bucket: Bucket, counts: Sequence[int], view: dict[str, np.ndarray], context_rank: int, prefix: str = ""
) -> None:
    """Gives chunks of `counts` tokens, one after the other, whole grains of the bucket's rows, and tiles to the context
    ranks: fills tile_sequence, first_row, own_tiles and home of `view`. Raises ValueError for chunks that do not fit.
    """
    tile_sequence, first_row = view[prefix + "tile_sequence"], view[prefix + "first_row"]
    # Tiles and sequences that nobody uses point at a sequence of no rows: all their rows are padding.
    tile_sequence[:] = min(len(counts), len(first_row) - 1)
    row = 0
    spans: list[tuple[int, int]] = []
    for i, count in enumerate(counts):
        rows = bucket.row_cost(count)
        if i == len(first_row) or row + rows > bucket.rows or (bucket.decode and count != 1):
            raise ValueError(f"chunk {i} of {count} tokens does not fit {bucket}")
        tile_sequence[row // bucket.tile : (row + rows) // bucket.tile] = i
        first_row[i] = row
        if rows:
            spans.append((row // bucket.tile, rows // bucket.tile))
        row += rows
    if bucket.cp > 1:
        spans.append((row // bucket.tile, (bucket.rows - row) // bucket.tile))  # padding is shared out too
        tiles = mirrored_tiles(spans, bucket.cp)
        view[prefix + "own_tiles"][:] = tiles[context_rank]
        view[prefix + "home"][tiles.reshape(-1)] = np.arange(bucket.tiles)


def mirrored_tiles(spans: Sequence[tuple[int, int]], cp: int) -> np.ndarray:
    """int32 [cp, tiles / cp]: the tiles of each context rank.

    spans: (first tile, tiles) of each sequence, tiles a multiple of 2 cp. A sequence is cut into 2 cp equal blocks, and
    rank k gets blocks k and 2 cp - 1 - k: early rows, which see little, go with late ones, which see much (engine 10).
    """
    blocks = [first + np.arange(tiles, dtype=np.int32).reshape(2 * cp, -1) for first, tiles in spans]
    return np.stack([np.concatenate([part for b in blocks for part in (b[k], b[2 * cp - 1 - k])]) for k in range(cp)])
