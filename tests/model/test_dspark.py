"""The draft against the goldens: drafts, logits and confidences of eight decode steps after a prompt of 7 and of 64.

Both prompts run side by side, as two requests of every step. The target's steps are recorded once and replayed into
fresh rings for the controls, so that few programs are compiled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import CHECKPOINT, REAL, TINY, Lane, golden, tiny_leaves, tiny_model, tiny_numerics
from jax import Array

from di_jax.checkpoint.mapping import all_sources, leaf_specs
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.engine.step_plan import Bucket, Chunk, build_plan
from di_jax.model import dspark
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig, ModelConfigError
from di_jax.model.dspark import LEAF_PREFIX, DraftBlock, DraftModel, abstract_draft, assemble_draft
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats, expand_weight
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Transformer, abstract_model, assemble, parameter_paths
from kernels_pallas.choice import KernelChoice

PROMPTS, SLOTS, BLOCKS = ("p7", "p64"), (2, 0), ((1,), (0,))
LENGTHS = {"p7": 7, "p64": 64}
STEPS, STAGES, BLOCK, WINDOW = 8, TINY.num_nextn_predict_layers, TINY.draft_block, TINY.sliding_window
PREFILL, DECODE = Bucket(False, 80, 1), Bucket(True, 2, 1)
EXACT, ROUNDED = 1e-4, 2e-3
FREE = np.full((2, BLOCK), -1, np.int32)


@cache
def draft_leaves() -> dict[str, Array]:
    """The tiny checkpoint's draft weights as stored."""
    sources = all_sources(TINY, draft=True)
    leaves = {}
    with open_checkpoint(CHECKPOINT) as reader:
        for path, spec in leaf_specs(TINY, draft=True).items():
            if path.startswith(LEAF_PREFIX):
                whole = np.empty(spec.shape, spec.dtype)
                for position, name in sources[path]:
                    whole[position] = reader.read(name)
                leaves[path] = jnp.asarray(whole)
    return leaves


def rows_of(bucket: Bucket, buffer: Array) -> Rows:
    plan = bucket.unpack(buffer)
    names = ("token", "tile_sequence", "start", "first_row", "count", "slot", "block_table")
    return make_rows(*(plan[name] for name in names), decode=bucket.decode, history=plan.get("history"))


@dataclasses.dataclass
class Step:
    """One recorded step of the target. late: the taps that one layer later would give."""

    bucket: Bucket
    buffer: np.ndarray
    taps: np.ndarray  # [rows, tapped layers * D]
    late: np.ndarray
    rows: dict[str, slice]  # of each prompt
    logits: np.ndarray


@dataclasses.dataclass
class Drafted:
    """What the draft gave: one entry per decode step, a request per prompt, as the goldens have them."""

    token: np.ndarray  # [2, steps, B]
    logits: np.ndarray  # [2, steps, B, V]
    score: np.ndarray  # [2, steps, B]


class Bench:
    """The tiny target and its draft, compiled. variant: nokvq or kvq."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.golden = {prompt: golden(variant, prompt) for prompt in PROMPTS}
        numerics = tiny_numerics(variant)
        self.layout = CacheLayout(TINY, numerics.formats, num_blocks=2, num_slots=3, draft_stages=STAGES)
        self.draft = assemble_draft(TINY, numerics, draft_leaves())
        self.target_graph, self.target = nnx.split(tiny_model(numerics))
        self.draft_graph, self.weights = nnx.split(self.draft)
        self._feed = jax.jit(self.feed, static_argnums=0)
        self._store = jax.jit(self.store, static_argnums=0)
        self._block = jax.jit(self.block)

    def empty(self) -> EngineState:
        # On the weights' device by name: a first step without it would compile a second time.
        return jax.device_put(self.layout.allocate(), jax.devices()[0])

    @property
    def bar(self) -> float:
        return EXACT if self.variant == "nokvq" else ROUNDED

    def feed(
        self, bucket: Bucket, target: Any, state: EngineState, buffer: Array
    ) -> tuple[EngineState, Array, Array, Array]:
        """A step of the target: (state, taps, taps of one layer later, logits)."""
        model: Transformer = nnx.merge(self.target_graph, target)
        step = model(rows_of(bucket, buffer), state, self.layout, trace=True, taps=True)
        hidden, state, trace, taps = step.hidden, step.state, step.traces, step.taps
        leaving = jnp.concatenate([record.streams for record in trace])
        late = [model.tap(leaving[layer]) for layer in TINY.dspark_target_layer_ids]
        return state, taps, jnp.concatenate(late, axis=-1), model.logits(hidden)

    def store(self, bucket: Bucket, weights: Any, state: EngineState, buffer: Array, taps: Array) -> EngineState:
        draft: DraftModel = nnx.merge(self.draft_graph, weights)
        return draft.store_context(taps, rows_of(bucket, buffer), state, self.layout)

    def block(
        self, target: Any, weights: Any, state: EngineState, anchor: Array, start: Array, forced: Array, valid: Array
    ) -> DraftBlock:
        """Greedy drafts, except where forced [R, B] holds an id."""
        model: Transformer = nnx.merge(self.target_graph, target)
        draft: DraftModel = nnx.merge(self.draft_graph, weights)

        def choose(logits: Array, number: Array) -> tuple[Array, None]:
            return jnp.where(forced[:, number] >= 0, forced[:, number], dspark.greedy(logits, number)[0]), None

        context = draft.context(jnp.asarray(SLOTS), start, state, self.layout)
        return draft(model, anchor, start, context, choose=choose, valid=valid)

    def plans(self, cuts: tuple[int, ...]) -> Iterator[tuple[Bucket, np.ndarray, dict[str, slice]]]:
        """The prompts in chunks, then the golden's decode steps."""
        lanes = [Lane(self.golden[p]["input_ids"], cuts, slot, own) for p, slot, own in zip(PROMPTS, SLOTS, BLOCKS)]
        pending = [lane.chunks() for lane in lanes]
        while work := {p: c for p, chunks in zip(PROMPTS, pending) if (c := next(chunks, None)) is not None}:
            yield self._plan(PREFILL, work)
        for step in range(STEPS):
            work = {}
            for prompt, slot, own in zip(PROMPTS, SLOTS, BLOCKS):
                token = int(self.golden[prompt]["dspark/decode_ids"][step])
                work[prompt] = Chunk([token], LENGTHS[prompt] + step, slot, own)
            yield self._plan(DECODE, work)

    @staticmethod
    def _plan(bucket: Bucket, work: dict[str, Chunk]) -> tuple[Bucket, np.ndarray, dict[str, slice]]:
        plan = build_plan(bucket, list(work.values()))
        return bucket, plan.buffer, {prompt: plan.rows_of(i) for i, prompt in enumerate(work)}

    def record(self, cuts: tuple[int, ...]) -> list[Step]:
        state, steps = self.empty(), []
        for bucket, buffer, rows in self.plans(cuts):
            state, *found = self._feed(bucket, self.target, state, buffer)
            taps, late, logits = map(np.asarray, found)
            steps.append(Step(bucket, buffer, taps, late, rows, logits))
        return steps

    def taps(self, steps: list[Step], prompt: str, name: str = "taps") -> np.ndarray:
        """[tokens, tapped layers * D] of a prompt and of its decode steps."""
        return np.concatenate([getattr(s, name)[s.rows[prompt]] for s in steps if prompt in s.rows])

    def anchors(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Newest token of each request after decode step `step`, and its position."""
        ids = [self.golden[p]["dspark/decode_ids"][step + 1] for p in PROMPTS]
        return np.asarray(ids, np.int32), np.asarray([LENGTHS[p] + step + 1 for p in PROMPTS], np.int32)

    def replay(
        self,
        steps: list[Step],
        taps: str = "taps",
        block: Callable[..., DraftBlock] | None = None,
        count: int = STEPS,
    ) -> tuple[Drafted, EngineState]:
        """Feeds recorded taps to the draft and drafts after each of the first `count` decode steps."""
        state = self.empty()
        blocks: list[DraftBlock] = []
        for step in steps:
            state = self._store(step.bucket, self.weights, state, step.buffer, getattr(step, taps))
            if step.bucket.decode and len(blocks) < count:
                blocks.append(self.draft_at(len(blocks), state, block=block))
                if len(blocks) == count:
                    break
        return Drafted(*(np.stack([getattr(b, f) for b in blocks], 1) for f in ("token", "logits", "score"))), state

    def draft_at(
        self,
        step: int,
        state: EngineState,
        forced: np.ndarray = FREE,
        valid: tuple[bool, bool] = (True, True),
        block: Callable[..., DraftBlock] | None = None,
    ) -> DraftBlock:
        anchor, start = self.anchors(step)
        run = block or self._block
        return jax.device_get(run(self.target, self.weights, state, anchor, start, forced, np.asarray(valid)))

    def check(self, drafted: Drafted) -> None:
        for request, prompt in enumerate(PROMPTS):
            expected = self.golden[prompt]
            np.testing.assert_array_equal(drafted.token[request], expected["dspark/draft_ids"][:, 1:], prompt)
            assert np.abs(drafted.logits[request] - expected["dspark/draft_logits"]).max() <= self.bar, prompt
            assert np.abs(drafted.score[request] - expected["dspark/confidence"]).max() <= self.bar, prompt

    def error(self, drafted: Drafted, prompt: str) -> float:
        """Largest error of the logits over the steps that there are."""
        mine = drafted.logits[PROMPTS.index(prompt)]
        return float(np.abs(mine - self.golden[prompt]["dspark/draft_logits"][: len(mine)]).max())


@pytest.fixture(scope="module", params=["nokvq", "kvq"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> list[Step]:
    """The prompts in one chunk each, then the decode steps."""
    return bench.record((80,))


@pytest.fixture(scope="module")
def drafted(bench: Bench, whole: list[Step]) -> tuple[Drafted, EngineState]:
    return bench.replay(whole)


def test_taps(bench: Bench, whole: list[Step]) -> None:
    """Taps of the prompt and of the decode steps, from layers of their own and from the caches."""
    for prompt in PROMPTS:
        expected = bench.golden[prompt]
        both = np.concatenate([expected["dspark/main_hidden_prefill"], expected["dspark/main_hidden"]])
        assert np.abs(bench.taps(whole, prompt) - both).max() <= bench.bar, prompt
        assert np.abs(bench.taps(whole, prompt, "late") - both).max() > 0.1, "the off-by-one is seen"
        chosen = [s.logits[s.rows[prompt]][-1].argmax() for s in whole if s.bucket.decode]
        assert chosen == expected["dspark/decode_ids"][1 : STEPS + 1].tolist()


def test_drafts_logits_and_confidences(bench: Bench, drafted: tuple[Drafted, EngineState]) -> None:
    bench.check(drafted[0])


def test_chunked_prompt(bench: Bench, whole: list[Step]) -> None:
    """Any cuts: the rings hold the same windows, and so the drafts are the same."""
    steps = bench.record((5, 1, 10, 16, 3, 33))
    assert len(steps) == 6 + STEPS
    for prompt in PROMPTS:
        assert np.abs(bench.taps(steps, prompt) - bench.taps(whole, prompt)).max() <= bench.bar
    bench.check(bench.replay(steps)[0])


def test_store_leaves_the_target_alone(bench: Bench, whole: list[Step]) -> None:
    state = bench.empty()
    stored = bench._store(PREFILL, bench.weights, state, whole[0].buffer, whole[0].taps)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(stored)):
        assert before.shape == after.shape
    changed = np.asarray(stored.window != state.window).any(axis=(2, 3))  # [rings, slots]
    assert changed[TINY.num_hidden_layers :][:, list(SLOTS)].all()
    assert not changed[: TINY.num_hidden_layers].any() and not changed[:, 1].any()


def poisoned(bench: Bench, state: EngineState, keep: Callable[[np.ndarray], np.ndarray]) -> EngineState:
    """NaN in every draft ring row of both requests but those of kept distances before the block, 1 = just before."""
    window = np.array(state.window)
    _, start = bench.anchors(STEPS - 1)
    for slot, first in zip(SLOTS, start):
        row = np.arange(TINY.window_ring)
        distance = (first - 1 - row) % TINY.window_ring + 1
        exists = distance <= first
        window[TINY.num_hidden_layers :, slot, row[~(keep(distance) & exists)]] = NOT_A_NUMBER[bench.variant]
    return jax.device_put(state.replace(window=jnp.asarray(window)), jax.devices()[0])


# 0xFF is NaN as an e4m3 code and an infinite scale.
NOT_A_NUMBER = {"nokvq": np.nan, "kvq": 255}


def test_a_block_reads_its_window_and_nothing_else(bench: Bench, drafted: tuple[Drafted, EngineState]) -> None:
    """Rows older than the window, rows of rejected drafts and rows never written: none is read (dspark 7, T10, T11)."""
    expected, state = drafted
    clean = bench.draft_at(STEPS - 1, poisoned(bench, state, lambda distance: distance <= WINDOW))
    np.testing.assert_array_equal(clean.logits, expected.logits[:, -1])
    np.testing.assert_array_equal(clean.score, expected.score[:, -1])
    oldest = bench.draft_at(STEPS - 1, poisoned(bench, state, lambda distance: distance < WINDOW))
    newest = bench.draft_at(STEPS - 1, poisoned(bench, state, lambda distance: distance > 1))
    assert np.isnan(oldest.logits[1]).all() and np.isfinite(oldest.logits[0]).all(), "the short prompt has no such row"
    assert np.isnan(newest.logits).all()


def test_requests_do_not_mix(bench: Bench, drafted: tuple[Drafted, EngineState]) -> None:
    """A request that is padding changes nothing for the other."""
    expected, state = drafted
    for request in (0, 1):
        alone = bench.draft_at(STEPS - 1, state, valid=(request == 0, request == 1))
        assert np.abs(alone.logits[request] - expected.logits[request, -1]).max() <= 1e-5


def test_markov_bias_and_confidence_depend_on_the_previous_token(
    bench: Bench, drafted: tuple[Drafted, EngineState]
) -> None:
    """Another second draft moves the third's logits by the difference of two biases, and nothing else (T13)."""
    expected, state = drafted
    forced = np.stack([expected.token[0, -1], expected.token[1, -1]])
    same = bench.draft_at(STEPS - 1, state, forced)
    np.testing.assert_array_equal(same.logits, expected.logits[:, -1])
    other = forced.copy()
    other[:, 1] = (forced[:, 1] + 7) % TINY.vocab_size
    moved = bench.draft_at(STEPS - 1, state, other)
    np.testing.assert_array_equal(moved.token, other)
    assert (moved.logits != same.logits).any(axis=(0, 2)).tolist() == [False, False, True, False, False]
    assert (moved.score != same.score).all(axis=0).tolist() == [False, False, True, False, False]
    embed, head = (np.asarray(draft_leaves()[f"draft.markov_head.{n}.weight"], np.float32) for n in ("embed", "head"))
    bias = (embed[other[:, 1]] - embed[forced[:, 1]]) @ head.T
    assert np.abs(moved.logits[:, 2] - same.logits[:, 2] - bias).max() <= 1e-5


def test_taps_of_a_later_layer_are_seen(bench: Bench, whole: list[Step]) -> None:
    """Control: the off-by-one of other readings of the config (dspark 1.2, T12)."""
    late, _ = bench.replay(whole, taps="late", count=2)
    assert min(bench.error(late, prompt) for prompt in PROMPTS) > 0.05


def causal(context: Array, block: int) -> Array:
    """Rows do not see later rows."""
    inside = jnp.tril(jnp.ones((block, block), bool))
    requests, window = context.shape
    return jnp.concatenate(
        [
            jnp.broadcast_to(context[:, None], (requests, block, window)),
            jnp.broadcast_to(inside, (requests, block, block)),
        ],
        axis=-1,
    )


def sliding(context: Array, block: int) -> Array:
    """The window moves on with every row."""
    requests, window = context.shape
    inside = jnp.arange(window) >= jnp.arange(block)[:, None]
    return jnp.concatenate([context[:, None] & inside, jnp.ones((requests, block, block), bool)], axis=-1)


@pytest.mark.parametrize(("mask", "prompts"), [(causal, PROMPTS), (sliding, ("p64",))])
def test_other_masks_are_seen(
    bench: Bench,
    whole: list[Step],
    monkeypatch: pytest.MonkeyPatch,
    mask: Callable[[Array, int], Array],
    prompts: tuple[str, ...],
) -> None:
    """Control (T11). The short prompt and its block fit one window, so that sliding drops nothing of it."""
    expected, state = bench.replay(whole, count=1)
    monkeypatch.setattr(dspark, "visible_keys", mask)
    wrong = bench.draft_at(0, state, block=jax.jit(lambda *given: bench.block(*given)))
    for request, prompt in enumerate(PROMPTS):
        error = np.abs(wrong.logits[request] - expected.logits[request, 0]).max()
        assert (error > 0.05) == (prompt in prompts), (prompt, error)


def float_weights(draft: DraftModel) -> Any:
    """The tiny checkpoint's weights as float32 values, for a draft without quantized storage."""
    leaves = draft_leaves()

    def value(path: str) -> Array:
        scale = leaves.get(f"{LEAF_PREFIX}{path.removesuffix('.weight')}.scale") if path.endswith(".weight") else None
        return expand_weight(leaves[LEAF_PREFIX + path], scale, jnp.dtype(jnp.float32))

    flat = nnx.to_flat_state(nnx.state(draft, nnx.Param))
    return nnx.from_flat_state([(path, leaf.replace(value(".".join(map(str, path))))) for path, leaf in flat])


@pytest.mark.slow
def test_gradients() -> None:
    """A loss on drafts and confidences moves every weight, and its gradient is its slope."""
    numerics = tiny_numerics("nokvq")
    # The reference's loop over the tiles of an expert has no reverse mode.
    kernels = KernelChoice(overrides=(("expert_ffn", "dense"),))
    model = abstract_draft(dataclasses.replace(TINY, quantization=None), numerics, kernels)
    target, graph = tiny_model(numerics), nnx.graphdef(model)
    taps = jnp.asarray(golden("nokvq", "p64")["dspark/main_hidden_prefill"])[-WINDOW:]
    anchor, start = jnp.asarray([3], jnp.int32), jnp.asarray([64], jnp.int32)
    wanted = jnp.asarray([[5, 6, 7, 8, 9]], jnp.int32)

    def loss(weights: Any, taps: Array) -> Array:
        draft: DraftModel = nnx.merge(graph, weights)
        keys = draft.context_kv(taps, start - WINDOW + jnp.arange(WINDOW))[:, None]
        context = dspark.DraftContext(keys, jnp.ones((1, WINDOW), bool))
        block = draft(target, anchor, start, context, choose=lambda logits, number: (wanted[:, number], None))
        logp = jax.nn.log_softmax(block.logits)
        return -jnp.mean(jnp.take_along_axis(logp, wanted[..., None], axis=-1)) + jnp.mean(block.score**2)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    weights = float_weights(model)
    _, (by_weight, by_taps) = run(weights, taps)
    for path, leaf in nnx.to_flat_state(by_weight):
        assert np.isfinite(leaf).all(), path
        # The router's biases choose experts, and a choice has no gradient: training moves them by load.
        assert path[-1] in ("bias", "bias_vl") or np.abs(leaf).max() > 0, path
    step = 1e-3 * by_taps / jnp.linalg.norm(by_taps)
    up, down = (run(weights, taps + sign * step)[0] for sign in (1, -1))
    assert float(up - down) / 2e-3 == pytest.approx(float(jnp.linalg.norm(by_taps)), rel=0.02)


def abstract_block(config: ModelConfig, numerics: Numerics, requests: int) -> tuple[Any, DraftBlock]:
    """Shapes and dtypes of the context and of the drafts of `requests` requests, at no cost."""
    target_graph, target = nnx.split(abstract_model(config, numerics))
    graph, weights = nnx.split(abstract_draft(config, numerics))
    layout = CacheLayout(config, numerics.formats, 1, requests, draft_stages=config.num_nextn_predict_layers)

    def run(target: Any, weights: Any, state: EngineState) -> tuple[Any, DraftBlock]:
        draft: DraftModel = nnx.merge(graph, weights)
        slot = jnp.arange(requests, dtype=jnp.int32)
        context = draft.context(slot, slot + 9, state, layout)
        return context, draft(nnx.merge(target_graph, target), slot, slot + 9, context)

    return jax.eval_shape(run, target, weights, layout.abstract())


def test_released_sizes() -> None:
    """Three stages of bfloat16: logits and confidences are float32 all the same."""
    context, block = abstract_block(REAL, Numerics.create("bfloat16"), 6)
    assert (context.keys.shape, context.keys.dtype) == ((3, 6, 128, 512), jnp.bfloat16)
    assert (block.token.shape, block.token.dtype) == ((6, 5), jnp.int32)
    assert (block.logits.shape, block.logits.dtype) == ((6, 5, 129280), jnp.float32)
    assert (block.score.shape, block.score.dtype) == ((6, 5), jnp.float32)


def test_bytes_of_the_rings() -> None:
    """Three rings of 134 records of 528 B; none without speculation."""
    plain = CacheLayout(REAL, CacheFormats.quantized(), 8, 4)
    speculating = dataclasses.replace(plain, draft_stages=REAL.num_nextn_predict_layers)
    assert speculating.bytes_per_slot - plain.bytes_per_slot == 212_256
    assert speculating.bytes_per_token == plain.bytes_per_token
    assert plain.abstract().window.shape[0] == REAL.num_hidden_layers


def test_taps_cost_nothing_when_not_asked_for() -> None:
    """The same program as for a model without a draft."""
    numerics = tiny_numerics("nokvq")

    def program(config: ModelConfig, taps: bool) -> str:
        graph, weights = nnx.split(abstract_model(config, numerics))
        layout = CacheLayout(config, numerics.formats, 1, 1)
        buffer = jax.ShapeDtypeStruct((DECODE.size,), jnp.int32)

        def run(weights: Any, state: EngineState, buffer: Array) -> Any:
            model: Transformer = nnx.merge(graph, weights)
            rows = rows_of(DECODE, buffer)
            return model(rows, state, layout, taps=True) if taps else model(rows, state, layout)

        # Without the addresses of functions, which the text of a program holds.
        return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(weights, layout.abstract(), buffer)))

    untapped = dataclasses.replace(TINY, dspark_target_layer_ids=())
    assert program(TINY, False) == program(untapped, False)
    assert program(TINY, True) != program(TINY, False)


def test_taps_inside_a_run_of_layers() -> None:
    """The released model's taps lie in a scanned run; here two of four equal layers are tapped."""
    assert [plan.layer for plan in REAL.layer_runs[-1]] == list(REAL.dspark_target_layer_ids)
    config = dataclasses.replace(
        TINY.draft_config,
        num_hidden_layers=4,
        compress_ratios=(0,) * 4,
        n_routed_experts=TINY.n_routed_experts,
        num_experts_per_tok=TINY.num_experts_per_tok,
        dspark_target_layer_ids=(1, 3),
    )
    assert len(config.layer_runs) == 1
    numerics = tiny_numerics("nokvq")
    leaves = {
        path: leaf[:4] if path.startswith("layers.") else leaf
        for path, leaf in tiny_leaves().items()
        if path in leaf_specs(config)
    }
    graph, weights = nnx.split(assemble(config, numerics, leaves, None))
    layout = CacheLayout(config, numerics.formats, 1, 2)
    chunks = [Chunk([token], 0, slot, (0,)) for slot, token in enumerate((5, 77))]

    @jax.jit
    def run(weights: Any, state: EngineState, buffer: Array) -> tuple[Array, Array, Array]:
        model: Transformer = nnx.merge(graph, weights)
        out = model(rows_of(DECODE, buffer), state, layout, trace=True, taps=True)
        (record,), taps = out.traces, out.taps
        return taps, model.tap(record.streams[0]), model.tap(record.streams[2])

    taps, *entering = map(np.asarray, run(weights, layout.allocate(), build_plan(DECODE, chunks).buffer))
    assert np.abs(taps - np.concatenate(entering, axis=-1)).max() <= 1e-6
    assert np.abs(entering[0] - entering[1]).max() > 0.1


def test_weights_fill_the_model() -> None:
    """The mapping's leaves are the model's parameters, in name, shape and stored dtype."""
    for config in (TINY, REAL, dataclasses.replace(TINY, quantization=None)):
        specs = {path: spec for path, spec in leaf_specs(config, draft=True).items() if path.startswith(LEAF_PREFIX)}
        mine = parameter_paths(abstract_draft(config, tiny_numerics("kvq")))
        assert {LEAF_PREFIX + path for path in mine} == specs.keys()
        for path, leaf in mine.items():
            value = leaf.get_value()
            assert (value.shape, value.dtype) == specs[LEAF_PREFIX + path], path


def test_missing_and_strange_weights_are_refused() -> None:
    leaves = draft_leaves()
    assert assemble_draft(TINY, tiny_numerics("kvq"), {**leaves, "norm.weight": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"main_proj\.scale"):
        assemble_draft(TINY, tiny_numerics("kvq"), {k: v for k, v in leaves.items() if k != "draft.main_proj.scale"})
    with pytest.raises(ValueError, match=r"norm\.weight is bfloat16"):
        assemble_draft(TINY, tiny_numerics("kvq"), {**leaves, "draft.norm.weight": jnp.zeros(9, jnp.bfloat16)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids must ascend"),
        ({"dspark_target_layer_ids": (8, 7)}, "dspark_target_layer_ids must ascend"),
        ({"dspark_target_layer_ids": (8, 10)}, "within the 10 layers"),
        ({"dspark_target_layer_ids": (4, 7)}, r"Engram layer: \[4\]"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank must be at least 1"),
        ({"dspark_num_experts_per_tok": 9}, "is 9 of 8 experts"),
        ({"dspark_noise_token_id": 512}, "the vocabulary ends at 512"),
    ],
)
def test_configs_without_a_usable_draft_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        abstract_draft(dataclasses.replace(TINY, **change), tiny_numerics("kvq"))


def test_a_layout_without_rings_is_refused() -> None:
    numerics = tiny_numerics("kvq")
    draft = assemble_draft(TINY, numerics, draft_leaves())
    layout = CacheLayout(TINY, numerics.formats, 1, 1)
    with pytest.raises(ValueError, match="rings for 0 draft stages, the draft has 2"):
        draft.context(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), layout.allocate(), layout)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    token, kept = dspark.greedy(jnp.asarray([[0.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]), jnp.int32(0))
    assert token.tolist() == [1, 0] and kept is None


def test_confidence() -> None:
    """A sigmoid with a temperature per draft, saturating without NaN."""
    score = jnp.asarray([[-2.0, 0.0, 3.0], [1e30, -1e30, 1.0]])
    plain, warm = dspark.confidence(score), dspark.confidence(score, jnp.asarray([2.0, 1.0, 0.5]))
    assert np.allclose(plain, [[0.11920292, 0.5, 0.95257413], [1, 0, 0.73105858]])
    assert np.allclose(warm, [[0.26894142, 0.5, 0.99752738], [1, 0, 0.88079708]])
    with pytest.raises(ValueError, match=r"\(2,\) calibration temperatures for blocks of 3 drafts"):
        dspark.confidence(score, jnp.ones(2))
