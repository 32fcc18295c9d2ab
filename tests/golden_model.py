"""The tiny golden model as tests run it: load it in any precision, feed prompts in any cuts, read its paged caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

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
from di_jax.model.transformer import Transformer, assemble

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "tiny-v41-fp8"
PROMPTS = ("p7", "p64", "p150", "p300")
TINY = ModelConfig.from_file(CHECKPOINT)
REAL = ModelConfig.from_file(GOLDEN / "config_real.json")

# Few shapes, since each costs seconds to compile; a 320-row step holds 16 sequences, a 32-row step two.
LADDER = BucketLadder(prefill_rows=(32, 320), decode_rows=(1, 4), context_blocks=(4,))
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


def tiny_runner(numerics: Numerics, *, num_slots: int = NUM_SLOTS, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    return ModelRunner(tiny_model(numerics), CacheLayout(TINY, numerics.formats, num_blocks, num_slots))


@dataclasses.dataclass
class Lane:
    """A sequence to feed: its ids, the chunk sizes that they are cut into (the last one repeats), its slot and blocks.

    decode: one token a step through the decode program, whatever the cuts. start: position of the first id; anything
    but 0 is a lie about the caches unless they hold what comes before it.
    """

    tokens: Sequence[int]
    cuts: Sequence[int] = (320,)
    slot: int = 0
    blocks: Sequence[int] = (0, 1, 2, 3)
    decode: bool = False
    start: int = 0

    def chunks(self) -> Iterator[Chunk]:
        """What the steps run, in order; the last chunk samples."""
        tokens = [int(t) for t in self.tokens]
        sizes, at, number = [1] if self.decode else list(self.cuts), 0, 0
        while at < len(tokens):
            size = sizes[min(number, len(sizes) - 1)]
            piece = tokens[at : at + size]
            yield Chunk(piece, self.start + at, self.slot, self.blocks, sample=at + size >= len(tokens))
            at, number = at + size, number + 1


@dataclasses.dataclass
class Fed:
    """What the steps computed for one lane, rows joined: see `LayerTrace`. token: the id sampled after the last row."""

    logits: np.ndarray  # fp32 [T, V]
    streams: np.ndarray  # [L, T, hc, D] leaving each layer
    experts: np.ndarray  # int32 [L, T, k]
    selected: dict[int, np.ndarray]  # int32 [T, index_topk] by index source layer
    token: int


def lanes_of(prompts: Iterable[Sequence[int]], **common: object) -> list[Lane]:
    """A lane for every prompt, in slots and blocks of their own."""
    return [
        Lane(tokens, slot=i, blocks=own_blocks(i), **common)  # type: ignore[arg-type]
        for i, tokens in enumerate(prompts)
    ]


def own_blocks(lane: int) -> tuple[int, ...]:
    """Blocks of the `lane`-th sequence: its own, in no order."""
    first = lane * BLOCKS_PER_SEQUENCE
    return (first + 2, first, first + 3, first + 1)


def feed(runner: ModelRunner, lanes: Sequence[Lane]) -> list[Fed]:
    """Runs all lanes side by side: every step takes the next chunk of every lane that has one."""
    pending = [lane.chunks() for lane in lanes]
    steps: list[list[tuple[StepPlan, int, StepOutput]]] = [[] for _ in lanes]
    while True:
        upcoming = [(i, next(chunks, None)) for i, chunks in enumerate(pending)]
        work = [(i, chunk) for i, chunk in upcoming if chunk is not None]
        if not work:
            return [_joined(s) for s in steps]
        for decode in (True, False):
            part = [(i, chunk) for i, chunk in work if lanes[i].decode == decode]
            limit = LADDER.decode_rows[-1] if decode else len(part)
            for at in range(0, len(part), limit or 1):
                group = part[at : at + limit]
                bucket = LADDER.fit(decode, [len(c.tokens) for _, c in group], BLOCKS_PER_SEQUENCE)
                plan = build_plan(bucket, [c for _, c in group])
                output = runner.execute(plan, TRACE).host()
                for place, (i, _) in enumerate(group):
                    steps[i].append((plan, place, output))


def _joined(steps: list[tuple[StepPlan, int, StepOutput]]) -> Fed:
    rows = [(plan.rows_of(place), output) for plan, place, output in steps]

    def layers(pick: str) -> np.ndarray:
        return np.concatenate([np.concatenate([getattr(t, pick)[:, r] for t in o.trace]) for r, o in rows], axis=1)

    selected = {}
    for at, run in enumerate(TINY.layer_runs):
        if run[0].owns_index:
            selected[run[0].layer] = np.concatenate([o.trace[at].selected[0, r] for r, o in rows])
    _, place, output = steps[-1]
    logits = np.concatenate([o.logits[r] for r, o in rows])
    return Fed(logits, layers("streams"), layers("experts"), selected, int(output.token[place]))


def greedy(runner: ModelRunner, lanes: Sequence[Lane], count: int) -> list[list[int]]:
    """`count` greedy ids of every lane: its prompt as the lane says, then decode steps that read the state's token."""
    ids = [[fed.token] for fed in feed(runner, lanes)]
    for step in range(1, count):
        for at in range(0, len(lanes), LADDER.decode_rows[-1]):
            group = lanes[at : at + LADDER.decode_rows[-1]]
            chunks = [Chunk([DEVICE_TOKEN], len(l.tokens) + step - 1, l.slot, l.blocks) for l in group]
            plan = build_plan(LADDER.fit(True, [1] * len(chunks), BLOCKS_PER_SEQUENCE), chunks)
            tokens = runner.execute(plan, TRACE).host().token
            for i, token in enumerate(tokens[: len(group)]):
                ids[at + i].append(int(token))
    return ids


def stored_entries(runner: ModelRunner, layer: int, blocks: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(compressed KV [count, head_dim], index keys [count, index_head_dim]) as the pools hold them for KV source `layer`."""
    layout, state = runner.layout, runner.state
    source = TINY.kv_source_layer_ids.index(layer)
    row = layout.entry_row(source, jnp.asarray(blocks), jnp.arange(count))

    def read(pool: Array) -> Array:
        return pool.reshape(-1, pool.shape[-1])[row]

    formats = layout.formats
    return np.asarray(formats.compressed.decode(read(state.compressed))), np.asarray(
        formats.index.decode(read(state.index))
    )
