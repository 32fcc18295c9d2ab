"""A small target and its draft behind a `ModelRunner`, driven step by step without an engine.

Four layers of the golden model (windows, an Engram, a KV source of ratio 2 that is an index source too) with its draft:
a few seconds to compile. Sequences decode with drafts in slots and blocks of their own; `Lab.plain` decodes the same
without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_model import CHECKPOINT, TINY, tiny_leaves, tiny_numerics
from jax import Array
from jax.sharding import NamedSharding
from tokenizers import Tokenizer as RawTokenizer

from di_jax.checkpoint.mapping import all_sources, leaf_specs
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.engine.extra_sampling import (
    IN_PROMPT,
    NEUTRAL,
    NO_ID,
    OF_REQUEST,
    WORD_LENGTH,
    WORDS,
    SlotState,
    pack_rows,
)
from di_jax.engine.runner import ModelRunner, StepOutput, parameter_specs
from di_jax.engine.sampling_programs import NO_SLOT, mask_words
from di_jax.engine.speculative_programs import DRAFT_COLUMNS, DraftSettings, SpeculativePrograms
from di_jax.engine.step_output import DraftOutput
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, FREE_TOKEN, Bucket, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX, assemble_draft
from di_jax.model.engram_tables import EngramTables
from di_jax.model.transformer import assemble
from di_jax.parallel.mesh import ONE_DEVICE, Parallel

DRAFTS, CONTEXT = TINY.draft_block, 2
REQUESTS, SLOTS, BLOCKS = 2, 5, 12
PREFILL_ROWS, IDS = 80, TINY.vocab_size
PLAIN = Bucket(True, REQUESTS, CONTEXT)
CUT = dataclasses.replace(
    TINY,
    num_hidden_layers=4,
    compress_ratios=(0, 0, 2, 2),
    kv_source_layer_ids=(2,),
    index_source_layer_ids=(2,),
    engram_layer_ids=(1,),
    engram_num_embeddings=TINY.engram_num_embeddings[:1],
    dspark_target_layer_ids=(0, 2, 3),
)


def verify_bucket(rows: int, requests: int = REQUESTS, drafts: int = DRAFTS) -> Bucket:
    return Bucket(True, rows, CONTEXT, drafts=drafts, requests=requests)


FULL = verify_bucket(REQUESTS * (1 + DRAFTS))


def draft_leaves() -> dict[str, Array]:
    """The golden draft's weights as stored."""
    sources = all_sources(TINY, draft=True)
    leaves: dict[str, Any] = {}
    with open_checkpoint(CHECKPOINT) as reader:
        for path, spec in leaf_specs(TINY, draft=True).items():
            if path.startswith(LEAF_PREFIX):
                leaves[path] = np.empty(spec.shape, spec.dtype)
                for position, name in sources[path]:
                    leaves[path][position] = reader.read(name)
    return leaves


def spread[Model: nnx.Module](model: Model, parallel: Parallel) -> Model:
    """The model with its weights where the mesh wants them."""
    mesh = parallel.mesh.build()
    graph, params = nnx.split(model)
    specs = parameter_specs(params, parallel.mesh)
    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    return nnx.merge(graph, placed)


@dataclasses.dataclass
class Lane:
    """One sequence. said: its answer so far, by step; temperature 0 is greedy."""

    prompt: Sequence[int]
    slot: int
    blocks: Sequence[int]
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 60
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)  # of extra sampling
    rule: Callable[[int], np.ndarray] | None = None  # output index -> bool [V], the ids that may stand there
    words: Sequence[Sequence[int]] = ()  # that must not appear; with `has_state` among the numbers
    said: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the caches: all but the newest."""
        return len(self.prompt) + len(self.said) - 1

    @property
    def ids(self) -> list[int]:
        return [*map(int, self.prompt), *self.said]

    @property
    def index(self) -> int:
        """Of the next output."""
        return len(self.said)

    @property
    def slot_state(self) -> SlotState:
        """What its slot starts from."""
        marks = np.zeros(IDS, np.int32)
        marks[np.asarray(self.prompt)] |= IN_PROMPT
        words = np.full((WORDS, WORD_LENGTH), NO_ID, np.int32)
        for row, word in zip(words, self.words):
            row[-len(word) :] = word
        return SlotState(marks, np.zeros(IDS, np.float32), words, np.full(WORD_LENGTH - 1, NO_ID, np.int32))

    @property
    def packed(self) -> np.ndarray:
        """int32 [OF_REQUEST]."""
        numbers = NEUTRAL.copy()
        numbers[OF_REQUEST.index("chosen")] = self.rule is not None
        for name, value in self.numbers.items():
            whole = name in ("chosen", "has_state", "top_k", "min_tokens", "top")
            numbers[OF_REQUEST.index(name)] = np.int32(value) if whole else np.float32(value).view(np.int32)
        return numbers


class Lab:
    """A runner over one mesh. num_drafts: drawn of the draft's block."""

    def __init__(
        self,
        variant: str = "nokvq",
        way: str = "probabilistic",
        *,
        config: ModelConfig = CUT,
        num_drafts: int = DRAFTS,
        parallel: Parallel | None = None,
        temperatures: tuple[float, ...] | None = None,
    ) -> None:
        numerics = tiny_numerics(variant)
        tables = EngramTables.build(config, RawTokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
        leaves = {}
        for path, spec in leaf_specs(config, parallel=parallel or ONE_DEVICE).items():
            leaf = tiny_leaves()[path][: spec.shape[0]]  # of the layers that there are
            rows = spec.shape[0] - leaf.shape[0]  # Engram tables are padded to equal shares
            leaves[path] = jnp.pad(leaf, [(0, rows)] + [(0, 0)] * (leaf.ndim - 1)) if rows else leaf
        self.layout = CacheLayout(
            config,
            numerics.formats,
            num_blocks=BLOCKS,
            num_slots=SLOTS,
            draft_stages=config.num_nextn_predict_layers,
            num_drafts=num_drafts,
            keeps_proposal=way == "probabilistic",
        )
        self.target = assemble(config, numerics, leaves, tables, parallel=parallel)
        self.draft_model = assemble_draft(config, numerics, draft_leaves(), parallel=parallel)
        if parallel is not None:
            self.target, self.draft_model = (spread(model, parallel) for model in (self.target, self.draft_model))
        settings = DraftSettings(num_drafts, way, temperatures)
        self.runner = ModelRunner(self.target, self.layout, draft=self.draft_model, settings=settings)
        self.num_drafts = num_drafts
        cp = 1 if parallel is None else parallel.mesh.cp
        self.prefills = Bucket(False, PREFILL_ROWS if cp == 1 else 128, CONTEXT, cp)

    def drafting(self, way: str, temperatures: tuple[float, ...] | None = None) -> SpeculativePrograms:
        """What accepts and drafts in another way over the same model, to be put into the runner."""
        old = self.runner._speculative
        assert old is not None
        settings = DraftSettings(self.num_drafts, way, temperatures)
        return SpeculativePrograms(old.mesh, old.plan, old.layout, settings, old.graphs, old.specs, np.float32)

    @property
    def ranks(self) -> int:
        return len(self.runner.local_ranks)

    def set(self, **arrays: np.ndarray) -> None:
        """Overwrites arrays of the state, laid out as they were."""
        state = self.runner.state
        placed = {name: jax.device_put(array, getattr(state, name).sharding) for name, array in arrays.items()}
        self.runner.state = state.replace(**placed)

    def host(self, name: str) -> np.ndarray:
        return np.array(getattr(self.runner.state, name))

    # ---- steps ----

    def prefill(self, lanes: Sequence[Lane], cut: int | None = None) -> None:
        """Prompts, in chunks of `cut` tokens at most, and the first token of each answer."""
        at, cut = 0, cut or PREFILL_ROWS
        for lane in lanes:
            if lane.numbers.get("has_state"):
                self.runner.begin_answers([lane.slot] * self.ranks, [lane.slot_state] * self.ranks)
        while any(at < len(lane.prompt) for lane in lanes):
            chunks, ending = [], []
            for lane in lanes:
                part = lane.prompt[at : at + cut]
                if len(part):
                    last = at + cut >= len(lane.prompt)
                    before = lane.prompt[max(0, at - TINY.engram_look_back) : at]
                    chunks.append(self._chunk(lane, part, at, sample=last, history=before))
                    ending.append((lane, last))
            plans = [build_plan(self.prefills, chunks, rank % self.prefills.cp) for rank in range(self.ranks)]
            output = self.runner.execute(plans)
            output = self._resampled(output, plans[0], [lane for lane, _ in ending]).host()[0]
            for place, (lane, last) in enumerate(ending):
                if last:
                    self._say(lane, output.token[place : place + 1], output.logprob[place : place + 1])
            at += cut

    def plain(self, lanes: Sequence[Lane], tokens: Sequence[int] | None = None, bucket: Bucket = PLAIN) -> StepOutput:
        """A decode step without drafts. tokens: to be fed instead of the lanes' newest, at their positions."""
        chunks = [
            self._chunk(lane, [DEVICE_TOKEN if tokens is None else tokens[i]], DEVICE_LENGTH)
            for i, lane in enumerate(lanes)
        ]
        plan = build_plan(bucket, chunks)
        output = self._resampled(self.runner.execute([plan] * self.ranks), plan, lanes).host()[0]
        for place, lane in enumerate(lanes):
            self._say(lane, output.token[place : place + 1], output.logprob[place : place + 1])
        return output

    def verify(
        self,
        lanes: Sequence[Lane],
        caps: Sequence[int] | int = DRAFTS,
        budget: int | None = None,
        bucket: Bucket = FULL,
        forced: Sequence[int] | None = None,
    ) -> StepOutput:
        """verify and accept. Without a budget, caps are what is verified where there is as much."""
        caps = [caps] * len(lanes) if isinstance(caps, int) else list(caps)
        bucket = dataclasses.replace(bucket, drafts=self.num_drafts)
        buffer = np.zeros(bucket.size, np.int32)
        view = bucket.unpack(buffer)
        view["budget"][:] = sum(caps) if budget is None else budget
        view["cap"][:], view["forced"][:] = -1, FREE_TOKEN
        for i, lane in enumerate(lanes):
            view["cap"][i] = caps[i]
            view["capacity"][i] = len(lane.prompt) + lane.max_tokens
            view["block_table"][i] = lane.blocks
            if forced is not None:
                view["forced"][i] = forced[i]
            for name, value in self._drawn_by(lane).items():
                view[name][i] = value
        verification = self.runner.verify([StepPlan(bucket, buffer, ())] * self.ranks)
        rows, allowed = None, self._masks(lanes, bucket.requests, self.num_drafts + 1)
        if allowed is not None or any(lane.numbers for lane in lanes):
            rows = np.repeat(NEUTRAL[:, None], bucket.requests, axis=1)
            rows[:, : len(lanes)] = np.stack([lane.packed for lane in lanes], axis=1)
        output = self.runner.accept(
            verification,
            None if rows is None else [rows] * self.ranks,
            None if allowed is None else [allowed] * self.ranks,
        ).host()[0]
        for place, lane in enumerate(lanes):
            count = int((output.token[place] >= 0).sum())
            self._say(lane, output.token[place, :count], output.logprob[place, :count])
        return output

    def draft(self, lanes: Sequence[Lane], requests: int = REQUESTS) -> DraftOutput:
        rows = np.zeros((len(DRAFT_COLUMNS), requests), np.int32)
        column = dict(zip(DRAFT_COLUMNS, rows))
        column["slot"][:] = NO_SLOT
        column["top_p"].view(np.float32)[:] = 1.0
        for i, lane in enumerate(lanes):
            for name, value in self._drawn_by(lane).items():
                column[name][i] = value
            for name in ("min_p", "top_k", "top_p"):
                column[name][i] = lane.packed[OF_REQUEST.index(name)]
        return self.runner.draft([rows] * self.ranks).host()[0]

    def give(self, lane: Lane, drafts: Sequence[int], confidence: Sequence[float] | None = None) -> None:
        """Puts drafts into the lane's slot in place of its own."""
        token = self.host("draft_token")
        token[lane.slot :: SLOTS, : len(drafts)] = drafts
        changes = {"draft_token": token}
        if confidence is not None:
            stated = self.host("draft_confidence")
            stated[lane.slot :: SLOTS] = confidence
            changes["draft_confidence"] = stated
        self.set(**changes)

    # ---- parts ----

    def _chunk(self, lane: Lane, tokens: Sequence[int], start: int, sample: bool = True, **more: Any) -> Chunk:
        return Chunk(
            tokens,
            start,
            lane.slot,
            lane.blocks,
            sample=sample,
            temperature=lane.temperature,
            seed=lane.seed,
            output_index=len(lane.said),
            **more,
        )

    def _resampled(self, output: StepOutput, plan: StepPlan, lanes: Sequence[Lane]) -> StepOutput:
        allowed = self._masks(lanes, plan.bucket.sequences, 1)
        if allowed is None and not any(lane.numbers for lane in lanes):
            return output
        rows = pack_rows(plan, [lane.packed for lane in lanes])
        masks = None if allowed is None else [allowed] * self.ranks
        return self.runner.resample(output, [rows] * self.ranks, masks)

    @staticmethod
    def _masks(lanes: Sequence[Lane], sequences: int, places: int) -> np.ndarray | None:
        """int32 [sequences, places, words], None when no lane has a rule."""
        if all(lane.rule is None for lane in lanes):
            return None
        masks = np.full((sequences, places, mask_words(IDS)), -1, np.int32)
        for mask, lane in zip(masks, lanes):
            for place in range(places) if lane.rule is not None else ():
                bits = np.packbits(lane.rule(lane.index + place), bitorder="little")
                mask[place] = bits.view(np.int32)
        return masks

    @staticmethod
    def _drawn_by(lane: Lane) -> dict[str, int]:
        low, high = np.array([lane.seed & 0xFFFFFFFF, lane.seed >> 32], np.uint32).view(np.int32)
        bits = np.float32(lane.temperature).view(np.int32)
        return {"slot": lane.slot, "origin": len(lane.prompt), "temperature": bits, "seed_low": low, "seed_high": high}

    @staticmethod
    def _say(lane: Lane, token: np.ndarray, logprob: np.ndarray) -> None:
        lane.said += token.tolist()
        lane.logprobs += logprob.tolist()
