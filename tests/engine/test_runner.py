"""The compiled step: what it aliases, what it costs, what it reads from the state; sizes of the released model."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import REAL, TINY, tiny_model, tiny_numerics
from jax import Array

from di_jax.checkpoint.inventory import OPTIONAL_FAMILIES, expected_inventory
from di_jax.checkpoint.mapping import leaf_specs
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.runner import LOGITS, TOKENS, ModelRunner
from di_jax.engine.step_plan import DEVICE_TOKEN, Bucket, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Transformer, abstract_model, parameter_paths
from kernels_pallas.index_topk import api as index_topk
from kernels_pallas.sparse_attention import api as sparse_attention

# Aliases are decided before machine code is made: the least optimized code compiles in half the time.
FAST = {"xla_backend_optimization_level": 0}


def nbytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


# ---- the tiny model's step ----


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    numerics = tiny_numerics("kvq")
    return ModelRunner(tiny_model(numerics), CacheLayout(TINY, numerics.formats, num_blocks=8, num_slots=4))


@pytest.mark.parametrize("bucket", [Bucket(False, 32, 2), Bucket(True, 4, 2)], ids=["prefill", "decode"])
def test_the_whole_state_is_updated_in_place(runner: ModelRunner, bucket: Bucket) -> None:
    """Every byte of the donated caches is reused for the result: a step needs no second copy of them."""
    memory = runner.lower(bucket).compile(compiler_options=FAST).memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(runner.layout.abstract())


def test_an_unusable_donation_is_an_error() -> None:
    """Control: this suite turns jax's warning into a failure."""
    with pytest.raises(UserWarning, match="donated buffers were not usable"):
        jax.jit(lambda x: x[:1].astype(jnp.int8), donate_argnums=0)(jnp.ones(4))


def flops(lowered: Any) -> float:
    return lowered.cost_analysis()["flops"]


ROWS, SHORT, LONG = 4, 16, 64  # decode rows; blocks of the block tables: 2,048 and 8,192 positions


def decode_rows(blocks: int) -> Rows:
    ids = jnp.arange(ROWS, dtype=jnp.int32)
    tables = jnp.zeros((ROWS, blocks), jnp.int32)
    return make_rows(ids, ids, start=ids, first_row=ids, count=ids * 0 + 1, slot=ids, block_table=tables, decode=True)


def scan_flops(layout: CacheLayout, layer: int, blocks: int) -> float:
    """Of one layer's index scan alone."""
    plan, c = TINY.layers[layer], TINY
    state = layout.abstract()
    query = jax.ShapeDtypeStruct((ROWS, c.index_n_heads, c.index_head_dim), jnp.float32)
    weights = jax.ShapeDtypeStruct((ROWS, c.index_n_heads), jnp.float32)
    candidates = jax.ShapeDtypeStruct((ROWS, c.candidate_topk_blocks), jnp.int32)

    def scan(query: Array, weights: Array, pool: Array, candidates: Array, rows: Rows) -> Any:
        return index_topk.index_topk(
            query,
            weights,
            pool,
            rows,
            layout,
            source=plan.kv_source,
            candidates=candidates if plan.is_reindex else None,
            make_candidates=plan.is_candidate_source,
        )

    return flops(jax.jit(scan).lower(query, weights, state.index, candidates, decode_rows(blocks)))


def test_a_decode_token_costs_more_with_context_in_the_index_scan_alone(runner: ModelRunner) -> None:
    """Four times the context adds exactly the scan of the added keys, which is a product over each of them and
    little else; the layers that search inside candidates add nothing."""
    step = [flops(runner.lower(Bucket(True, ROWS, blocks))) for blocks in (SHORT, LONG)]
    scans = {n: [scan_flops(runner.layout, n, b) for b in (SHORT, LONG)] for n in TINY.index_source_layer_ids}
    added = {n: long - short for n, (short, long) in scans.items()}
    assert step[1] - step[0] == pytest.approx(sum(added.values()), rel=0.01)
    assert added.pop(8) == pytest.approx(0, abs=0.01 * scans[8][0])
    for layer, extra in added.items():
        entries = ROWS * (LONG - SHORT) * runner.layout.block_size // TINY.compress_ratios[layer]
        products = 2 * entries * TINY.index_n_heads * TINY.index_head_dim
        assert products <= extra <= 2 * products, layer


def test_attention_costs_the_same_at_every_context(runner: ModelRunner) -> None:
    layout, c = runner.layout, TINY
    state = layout.abstract()
    query = jax.ShapeDtypeStruct((ROWS, c.num_attention_heads, c.head_dim), jnp.float32)
    kv = jax.ShapeDtypeStruct((ROWS, c.head_dim), jnp.float32)
    selected = jax.ShapeDtypeStruct((ROWS, c.index_topk), jnp.int32)
    sink = jax.ShapeDtypeStruct((c.num_hidden_layers, c.num_attention_heads), jnp.float32)

    def attend(query: Array, kv: Array, window: Array, pool: Array, selected: Array, sink: Array, rows: Rows) -> Array:
        angles = rotation(c, True, rows.position)
        return sparse_attention.sparse_attention(
            2, query, kv, window, pool, selected, sink, angles, rows, layout, source=0, scale=1.0
        )

    short, long = (
        flops(jax.jit(attend).lower(query, kv, state.window, state.compressed, selected, sink, decode_rows(blocks)))
        for blocks in (SHORT, LONG)
    )
    assert short == pytest.approx(long, rel=0.001) and short > 0


# ---- steps of a small window-only model, which compiles fast ----


SMALL = dataclasses.replace(
    TINY,
    num_hidden_layers=2,
    compress_ratios=(0, 0),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    engram_layer_ids=(),
    engram_num_embeddings=(),
    quantization=None,
)
PREFILL, DECODE = Bucket(False, 16, 1), Bucket(True, 2, 1)


@dataclasses.dataclass
class Warm:
    """A runner that has been warmed up, and the compilations that this took."""

    runner: ModelRunner
    compilations: int


@pytest.fixture(scope="module")
def warm() -> Warm:
    """Two layers of random weights."""
    numerics = Numerics.create("float32")
    model = Transformer(SMALL, numerics)
    generator = np.random.default_rng(0)
    for parameter in parameter_paths(model).values():
        shape, dtype = parameter[...].shape, parameter[...].dtype
        parameter[...] = jnp.asarray(generator.normal(size=shape) * 0.3, dtype)
    runner = ModelRunner(model, CacheLayout(SMALL, numerics.formats, num_blocks=4, num_slots=3))
    before = COMPILATIONS.count
    runner.warm_up((PREFILL, DECODE), LOGITS)
    return Warm(runner, COMPILATIONS.count - before)


@pytest.fixture
def small(warm: Warm) -> ModelRunner:
    return warm.runner


def prompt_step(slot: int, tokens: list[int], **changes: Any) -> StepPlan:
    return build_plan(PREFILL, [Chunk(tokens, 0, slot, [slot], **changes)])


def decode_step(*chunks: Chunk) -> StepPlan:
    return build_plan(DECODE, chunks)


def run(runner: ModelRunner, plan: StepPlan, outputs: str = LOGITS) -> Any:
    """The step's StepOutput on the host."""
    return runner.execute([plan], outputs).host()[0]


def test_warm_up_compiles_each_bucket_once(warm: Warm) -> None:
    """And after it steps of these buckets compile nothing."""
    assert warm.compilations == 2
    before = COMPILATIONS.count
    warm.runner.warm_up((PREFILL, DECODE), LOGITS)
    warm.runner.execute([prompt_step(0, [5, 6, 7])], LOGITS)
    warm.runner.execute([decode_step(Chunk([DEVICE_TOKEN], 3, 0, [0]))], LOGITS)
    assert COMPILATIONS.count == before


def test_the_counter_counts_compilations_and_not_calls() -> None:
    twice = jax.jit(lambda x: x * 2 + 41)
    x = jnp.arange(7)
    before = COMPILATIONS.count
    twice(x)
    twice(x + 0)
    after_calls = COMPILATIONS.count
    twice(jnp.arange(9, dtype=jnp.float32))
    assert 1 <= after_calls - before <= 2, "the function, and the sum of the second argument"
    assert COMPILATIONS.count > after_calls, "another shape"


class Compiling(ModelRunner):
    """A stand-in that compiles nothing: `compile_one` is called instead, in the threads of warm_up."""

    def __init__(self, compile_one: Callable[[int], None]) -> None:
        self._compiled = {}
        self._hidden_dtype, self._sampling = None, SimpleNamespace(jobs=lambda sequences, hidden: [])  # type: ignore
        self._speculative = None
        self.compile_one = compile_one

    def compiled(self, bucket: Bucket, outputs: str = TOKENS) -> Any:
        self.compile_one(bucket.rows)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_warm_up_cut_short_waits_for_nobody(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """It is raised while another compilation is in flight, and what had not begun never does."""
    begun: list[int] = []
    busy, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def compile_one(rows: int) -> None:
        begun.append(rows)
        if rows == 1:
            assert busy.wait(30)
            raise error
        busy.set()
        go_on.wait(30)
        ended.set()

    with pytest.raises(error), caplog.at_level("WARNING"):
        Compiling(compile_one).warm_up([Bucket(True, rows, 1) for rows in range(1, 20)], workers=2)
    assert not ended.is_set()
    assert "in flight (2 at most) are compiled to the end" in caplog.text
    go_on.set()
    assert ended.wait(30)
    assert len(begun) <= 3  # the one that failed, and at most one begun by its thread before it was stopped


def test_a_warm_up_that_is_not_cut_short_does_everything() -> None:
    begun: list[int] = []
    Compiling(begun.append).warm_up([Bucket(True, rows, 1) for rows in range(1, 20)])
    assert sorted(begun) == list(range(1, 20))


class Interrupt(BaseException):
    """What Ctrl-C raises, told apart from a real one."""


def test_a_step_cut_short_after_the_donation_leaves_an_empty_state(
    small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.execute([prompt_step(0, [5, 6, 7])], LOGITS)
    executable, resets = small._compiled[PREFILL, LOGITS], small.resets

    def cut_short(*arguments: Any) -> Any:
        executable(*arguments)
        raise Interrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setitem(small._compiled, (PREFILL, LOGITS), cut_short)
        small.execute([prompt_step(1, [5, 6, 7])], LOGITS)
    assert small.resets == resets + 1
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(small.state))
    want = run(small, prompt_step(0, [5, 6, 7])).token[0]
    assert int(small.state.last_token[0]) == want


def test_a_step_cut_short_before_the_donation_leaves_the_state(
    small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, resets = int(run(small, prompt_step(0, [5, 6, 7])).token[0]), small.resets

    def cut_short(*arguments: Any) -> Any:
        raise Interrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setitem(small._compiled, (PREFILL, LOGITS), cut_short)
        small.execute([prompt_step(1, [5, 6, 7])], LOGITS)
    assert small.resets == resets and int(small.state.last_token[0]) == token


def test_a_step_replaces_the_donated_state(small: ModelRunner) -> None:
    old = small.state
    small.execute([prompt_step(0, [5, 6, 7])], LOGITS)
    assert all(a.is_deleted() for a in jax.tree.leaves(old) if a.size)
    assert not any(a.is_deleted() for a in jax.tree.leaves(small.state))


def test_a_decode_step_reads_its_token_from_the_state(small: ModelRunner) -> None:
    """The token sampled last in the slot, without a visit to the host; equal to sending it."""
    sampled = int(run(small, prompt_step(1, [9, 8, 7, 6])).token[0])
    assert int(small.state.last_token[1]) == sampled
    by_state = run(small, decode_step(Chunk([DEVICE_TOKEN], 4, 1, [1], sample=False)))
    sent = run(small, decode_step(Chunk([sampled], 4, 1, [1], sample=False)))
    other = run(small, decode_step(Chunk([(sampled + 1) % 512], 4, 1, [1], sample=False)))
    np.testing.assert_array_equal(by_state.logits[0], sent.logits[0])
    assert np.abs(by_state.logits[0] - other.logits[0]).max() > 1e-3


def test_only_sampled_sequences_set_their_slot(small: ModelRunner) -> None:
    """Chunks before the last one and padding leave it alone; a forced id is what the next step reads."""
    small.execute([prompt_step(0, [1, 2, 3], forced=77)], LOGITS)
    small.execute([prompt_step(1, [1, 2, 3], sample=False)], LOGITS)
    assert int(small.state.last_token[0]) == 77
    before = np.asarray(small.state.last_token).tolist()
    output = run(small, decode_step(Chunk([DEVICE_TOKEN], 3, 0, [0], sample=False), Chunk([4], 3, 1, [1], forced=123)))
    assert output.token[1] == 123
    assert np.asarray(small.state.last_token).tolist() == [before[0], 123, before[2]]


def test_the_log_probability_is_of_the_raw_logits(small: ModelRunner) -> None:
    """Greedy, heated or forced: the emitted token under softmax of the logits."""
    for changes in ({}, {"temperature": 0.7, "seed": 2**63 + 5}, {"forced": 300}):
        output = run(small, prompt_step(2, [11, 12, 13], **changes))
        logits = output.logits[2].astype(np.float64)
        expected = logits[output.token[0]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert output.logprob[0] == pytest.approx(expected, abs=1e-4)
        if not changes:
            assert output.token[0] == logits.argmax()


def test_outputs_hold_what_was_asked_for(small: ModelRunner) -> None:
    with_logits = run(small, prompt_step(0, [5, 6, 7]))
    tokens = run(small, prompt_step(0, [5, 6, 7]), TOKENS)
    assert with_logits.logits.shape == (PREFILL.rows, SMALL.vocab_size) and with_logits.trace is None
    assert tokens.logits is None and tokens.trace is None
    assert tokens.token[0] == with_logits.token[0]
    assert tokens.logprob[0] == pytest.approx(with_logits.logprob[0], abs=1e-5)


# ---- sizes of the released model ----


def test_released_cache_sizes() -> None:
    """890 B of paged cache per token; rings of 134 rows of 528 B, 1,415,040 B of them in the encoder (numerics 4)."""
    layout = CacheLayout(REAL, CacheFormats.quantized(), num_blocks=3, num_slots=2)
    window = layout.abstract().window
    assert layout.bytes_per_token == 890
    assert window.shape == (40, 2, 134, 528)
    encoder = REAL.candidate_source_layer_id
    assert nbytes(window) // 2 == 2_830_080 and nbytes(window) // 2 * encoder // 40 == 1_415_040
    assert layout.bytes_per_slot == 2_830_080 + 3 * 7 * 2 * 512 * 4 + REAL.engram_history * 4 + 2 * 4


def released_parameters() -> dict[str, nnx.Param]:
    return parameter_paths(abstract_model(REAL, Numerics.create("bfloat16")))


def test_released_parameters() -> None:
    """Few leaves, of exactly the bytes that the checkpoint stores for the backbone, none of them allocated."""
    parameters = {path: leaf.get_value() for path, leaf in released_parameters().items()}
    assert len(parameters) <= 60
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in parameters.values())
    optional = set().union(*OPTIONAL_FAMILIES.values())
    stored = sum(t.nbytes for t in expected_inventory(REAL).values() if t.part not in optional)
    assert nbytes(parameters) == stored
    specs = leaf_specs(REAL)
    assert {path: (a.shape, a.dtype) for path, a in parameters.items()} == {
        path: (specs[path].shape, specs[path].dtype) for path in parameters
    }


@pytest.mark.parametrize("quantized", [True, False])
def test_every_parameter_names_its_axes(quantized: bool) -> None:
    config = REAL if quantized else dataclasses.replace(REAL, quantization=None)
    for path, leaf in parameter_paths(abstract_model(config, Numerics.create("bfloat16"))).items():
        assert len(leaf.get_metadata()["logical_axes"]) == len(leaf.get_value().shape), path
    for name, axes in CacheLayout.logical_axes().items():
        layout = CacheLayout(REAL, CacheFormats.quantized(), 1, 1, num_drafts=5)
        assert len(axes) == len(getattr(layout.abstract(), name).shape), name
