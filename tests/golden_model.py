"""The tiny golden model as tests run it: load it in any precision, feed prompts in any cuts, read its paged caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import load_file
from tokenizers import Tokenizer as RawTokenizer

from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.engine.runner import TRACE, ModelRunner, StepOutput
from di_jax.engine.step_plan import DEVICE_TOKEN, BucketLadder, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import Codec
from di_jax.model.transformer import Transformer, assemble

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "tiny-v41-fp8"
PROMPTS = ("p7", "p64", "p150", "p300")
TINY = ModelConfig.from_file(CHECKPOINT)
REAL = ModelConfig.from_file(GOLDEN / "config_real.json")

NUM_SLOTS, NUM_BLOCKS = 18, 72
BLOCKS_PER_SEQUENCE = 4


@cache
def golden_file(stem: str) -> dict[str, np.ndarray]:
    """All arrays of `tests/golden/<stem>.safetensors`."""
    return load_file(GOLDEN / f"{stem}.safetensors")


def golden(variant: str, prompt: str) -> dict[str, np.ndarray]:
    """The arrays of one prompt of `nokvq` or `kvq`, without the prompt's prefix."""
    tensors = golden_file(f"tiny-v41.{variant}")
    return {name.removeprefix(f"{prompt}/"): a for name, a in tensors.items() if name.startswith(f"{prompt}/")}


def tiny_numerics(variant: str) -> Numerics:
    """float32, with the cache quantizers of the real model (`kvq`) or without (`nokvq`)."""
    return Numerics.create("float32", quantize_caches=variant == "kvq")


@cache
def tiny_leaves() -> dict[str, Array]:
    """The tiny checkpoint's weights as stored."""
    with open_checkpoint(CHECKPOINT) as reader:
        return load_leaves(reader, reader.config, None)


@cache
def tiny_tables() -> EngramTables:
    return EngramTables.build(TINY, RawTokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


def tiny_model(numerics: Numerics) -> Transformer:
    return assemble(TINY, numerics, tiny_leaves(), tiny_tables())


@dataclasses.dataclass
class Lane:
    """A sequence to feed: its ids, the chunk sizes that they are cut into (the last one repeats), its slot and blocks.

    decode: one token a step through the decode program, whatever the cuts. before: ids in front of `tokens`; a lie
    about the caches unless they hold them.
    """

    tokens: Sequence[int]
    cuts: Sequence[int] = (320,)
    slot: int = 0
    blocks: Sequence[int] = (0, 1, 2, 3)
    decode: bool = False
    before: Sequence[int] = ()

    def chunks(self) -> Iterator[Chunk]:
        """What the steps run, in order; the last chunk samples."""
        tokens = [int(t) for t in (*self.before, *self.tokens)]
        sizes, at, number = [1] if self.decode else list(self.cuts), len(self.before), 0
        while at < len(tokens):
            end = at + sizes[min(number, len(sizes) - 1)]
            history = tokens[max(0, at - TINY.engram_look_back) : at]
            sample = end >= len(tokens)
            yield Chunk(tokens[at:end], at, self.slot, self.blocks, sample=sample, history=history)
            at, number = end, number + 1


@dataclasses.dataclass
class Fed:
    """What the steps computed for one lane, rows joined: see `LayerTrace`. token: the id sampled after the last row."""

    logits: np.ndarray  # fp32 [T, V]
    streams: np.ndarray  # [L, T, hc, D] leaving each layer
    experts: np.ndarray  # int32 [L, T, k]
    selected: dict[int, np.ndarray]  # int32 [T, index_topk] by index source layer
    token: int


def lanes_of(prompts: Iterable[Sequence[int]], cuts: Sequence[int] = (320,), *, decode: bool = False) -> list[Lane]:
    """A lane for every prompt, in slots and blocks of their own."""
    return [Lane(tokens, cuts, slot=i, blocks=own_blocks(i), decode=decode) for i, tokens in enumerate(prompts)]


def own_blocks(lane: int) -> tuple[int, ...]:
    """Blocks of the `lane`-th sequence: its own, in no order."""
    first = lane * BLOCKS_PER_SEQUENCE
    return (first + 2, first, first + 3, first + 1)


class Feeder:
    """A runner of the tiny model with few buckets (a compilation takes seconds), and ways to feed it."""

    def __init__(
        self, numerics: Numerics, *, prefill_rows: tuple[int, ...] = (320,), decode_rows: tuple[int, ...] = (4,)
    ) -> None:
        self.ladder = BucketLadder(prefill_rows, decode_rows, (BLOCKS_PER_SEQUENCE,))
        self.runner = ModelRunner(tiny_model(numerics), CacheLayout(TINY, numerics.formats, NUM_BLOCKS, NUM_SLOTS))

    def feed(self, lanes: Sequence[Lane]) -> list[Fed]:
        """Runs all lanes side by side: every round takes the next chunk of every lane that has one."""
        pending = [lane.chunks() for lane in lanes]
        steps: list[list[tuple[StepPlan, int, StepOutput]]] = [[] for _ in lanes]
        while True:
            upcoming = [(i, next(chunks, None)) for i, chunks in enumerate(pending)]
            work = [(i, chunk) for i, chunk in upcoming if chunk is not None]
            if not work:
                return [_joined(s) for s in steps]
            for decode in (True, False):
                part = [(i, chunk) for i, chunk in work if lanes[i].decode == decode]
                for group in self._groups(decode, part):
                    plan, output = self._execute(decode, [chunk for _, chunk in group])
                    for place, (i, _) in enumerate(group):
                        steps[i].append((plan, place, output))

    def _groups(self, decode: bool, work: list[tuple[int, Chunk]]) -> Iterator[list[tuple[int, Chunk]]]:
        """Cuts the chunks of a round into steps that the largest bucket holds."""
        limit = self.ladder.decode_rows[-1] if decode else self.ladder.prefill_rows[-1]
        group: list[tuple[int, Chunk]] = []
        used = 0
        for i, chunk in work:
            need = 1 if decode else self.ladder.prefill_row_cost(len(chunk.tokens))
            if used + need > limit:
                yield group
                group, used = [], 0
            group.append((i, chunk))
            used += need
        if group:
            yield group

    def greedy(self, lanes: Sequence[Lane], count: int) -> list[list[int]]:
        """`count` greedy ids of every lane: its prompt, then decode steps that read the state's token."""
        ids = [[fed.token] for fed in self.feed(lanes)]
        for step in range(count - 1):
            work = [
                (i, Chunk([DEVICE_TOKEN], len(lane.tokens) + step, lane.slot, lane.blocks))
                for i, lane in enumerate(lanes)
            ]
            for group in self._groups(True, work):
                _, output = self._execute(True, [chunk for _, chunk in group])
                for place, (i, _) in enumerate(group):
                    ids[i].append(int(output.token[place]))
        return ids

    def _execute(self, decode: bool, chunks: list[Chunk]) -> tuple[StepPlan, StepOutput]:
        plan = build_plan(self.ladder.fit(decode, [len(c.tokens) for c in chunks], BLOCKS_PER_SEQUENCE), chunks)
        return plan, self.runner.execute([plan], TRACE).host()[0]

    def stored(self, layer: int, lane: Lane) -> tuple[np.ndarray, np.ndarray]:
        """What the pools hold of a lane for KV source `layer`: compressed KV and index keys, both [n, channels].

        n counts the groups that the lane's tokens complete.
        """
        layout, state = self.runner.layout, self.runner.state
        source = TINY.kv_source_layer_ids.index(layer)
        # All entries that the blocks hold, so that every call decodes the same shape.
        entry = jnp.arange(len(lane.blocks) * layout.entries_per_block[source])
        row = np.asarray(layout.entry_row(source, jnp.asarray(lane.blocks), entry))
        count = len(lane.tokens) // TINY.compress_ratios[layer]

        def read(codec: Codec, pool: Array) -> np.ndarray:
            return np.asarray(_decode(codec, np.asarray(pool).reshape(-1, pool.shape[-1])[row]))[:count]

        formats = layout.formats
        return read(formats.compressed, state.compressed), read(formats.index, state.index)


@partial(jax.jit, static_argnums=0)
def _decode(codec: Codec, record: Array) -> Array:
    return codec.decode(record)


def _joined(steps: list[tuple[StepPlan, int, StepOutput]]) -> Fed:
    rows: list[tuple[slice, Any]] = [(plan.rows_of(place), output) for plan, place, output in steps]

    def layers(name: str) -> np.ndarray:
        return np.concatenate([np.concatenate([getattr(t, name)[:, r] for t in o.trace]) for r, o in rows], axis=1)

    selected = {}
    for at, run in enumerate(TINY.layer_runs):
        if run[0].owns_index:
            selected[run[0].layer] = np.concatenate([o.trace[at].selected[0, r] for r, o in rows])
    _, place, output = steps[-1]
    logits = np.concatenate([o.logits[r] for r, o in rows])
    return Fed(logits, layers("streams"), layers("experts"), selected, int(output.token[place]))
