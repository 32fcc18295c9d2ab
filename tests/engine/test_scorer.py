"""The scorer's bookkeeping over a stand-in runner whose logits say which token ran, where, and in whose caches.

Against the model's own logits it is tested with the goldens (`test_golden_feeds.py`).
"""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_model import TINY
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.runner import LOGITS, TRACE, StepOutput
from di_jax.engine.scorer import FEEDS, Score, Scorer
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import BucketLadder, StepPlan
from di_jax.model.cache import CacheLayout
from di_jax.model.config import LayerPlan
from di_jax.model.quantization import CacheFormats
from di_jax.model.transformer import LayerTrace

MODEL = dataclasses.replace(TINY, vocab_size=4)
LADDER = BucketLadder(prefill_rows=(32, 64), decode_rows=(1, 2), context_blocks=(1, 2))
BLOCK = 16


@dataclasses.dataclass
class EchoRunner:
    """Row t of a chunk gets logits [token, position, slot, block of the position], and its trace the same numbers."""

    plans: list[StepPlan] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)
    returned: list[weakref.ref[np.ndarray]] = dataclasses.field(default_factory=list)  # arrays of earlier steps

    local_ranks = (0,)

    def execute(self, plans: list[StepPlan], outputs: str) -> SimpleNamespace:
        (plan,) = plans
        assert not any(array() is not None for array in self.returned), "an earlier step's whole output is still held"
        self.plans.append(plan)
        self.outputs.append(outputs)
        rows = np.full((plan.bucket.rows, 4), np.nan, np.float32)
        for i, chunk in enumerate(plan.chunks):
            position = chunk.start + np.arange(len(chunk.tokens))
            block = np.asarray(chunk.blocks)[position // BLOCK]
            rows[plan.rows_of(i)] = np.stack([chunk.tokens, position, np.full(len(position), chunk.slot), block], -1)
        trace = [self._trace(rows, run) for run in MODEL.layer_runs] if outputs == TRACE else None
        arrays: list[Any] = [rows] + [a for t in trace or () for a in (t.streams, t.experts, t.selected)]
        self.returned = [weakref.ref(a) for a in arrays if a is not None]
        nothing: Any = np.zeros(plan.bucket.sequences)
        output = StepOutput(nothing, nothing, rows, trace, None)  # type: ignore[arg-type]
        return SimpleNamespace(host=lambda: [output])

    @staticmethod
    def _trace(rows: np.ndarray, run: tuple[LayerPlan, ...]) -> LayerTrace:
        layer = np.array([plan.layer for plan in run])[:, None, None]
        streams: Any = (rows + layer)[..., None]
        experts: Any = rows * 0 + layer
        selected: Any = rows + 100 * layer if run[0].owns_index else None
        return LayerTrace(streams, experts, selected)


def make(
    feed: str = "whole", chunk: int = 7, *, num_blocks: int = 4, num_slots: int = 3, trace: bool = False
) -> Scorer:
    layout = CacheLayout(MODEL, CacheFormats.quantized(), num_blocks, num_slots, block_size=BLOCK)
    runner: Any = EchoRunner()
    parts = EngineParts(MODEL, Path(), None, runner, LADDER, layout)  # type: ignore[arg-type]
    return Scorer(parts, feed, chunk, trace=trace)


def plans(scorer: Scorer) -> list[StepPlan]:
    return scorer.parts.runner.plans  # type: ignore[attr-defined]


def score(scorer: Scorer, *lengths: int) -> dict[str, Score]:
    requests = [(str(i), [100 * i + t for t in range(n)]) for i, n in enumerate(lengths)]
    scores = list(scorer.run(requests))
    assert sorted(s.request_id for s in scores) == sorted(name for name, _ in requests)
    by_id = {s.request_id: s for s in scores}
    for name, ids in requests:
        assert by_id[name].token_ids == ids
        assert by_id[name].logits[:, 0].tolist() == ids, "every row, in order, of this request"
        assert by_id[name].logits[:, 1].tolist() == list(range(len(ids)))
        assert len(set(by_id[name].logits[:, 2])) == 1, "one slot"
    return by_id


@given(
    st.sampled_from(FEEDS),
    st.integers(1, 40),
    st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=6),
    st.integers(2, 5),
    st.integers(1, 3),
)
def test_any_requests(feed: str, chunk: int, lengths: list[int], num_blocks: int, num_slots: int) -> None:
    """Every row of every request comes back once, requests wait for room, and nothing is left held."""
    scorer = make(feed, chunk, num_blocks=num_blocks, num_slots=num_slots)
    score(scorer, *lengths)
    scorer.ranks[0].ledgers[0].check([])
    assert scorer.ranks[0].ledgers[0].num_free_blocks == num_blocks
    for plan in plans(scorer):
        held = [b for c in plan.chunks for b in c.blocks]
        assert len(held) == len(set(held)) and len({c.slot for c in plan.chunks}) == len(plan.chunks)
        assert not any(c.sample for c in plan.chunks), "scoring draws no token"
        assert plan.bucket.decode == (feed == "stepwise")
    assert sum(len(c.tokens) for plan in plans(scorer) for c in plan.chunks) == sum(lengths)


def test_whole_takes_a_prompt_in_one_step() -> None:
    scorer = make("whole")
    score(scorer, 31)
    assert [(p.bucket.rows, len(p.chunks[0].tokens)) for p in plans(scorer)] == [(32, 31)]


def test_whole_cuts_at_the_largest_bucket() -> None:
    scorer = make("whole", num_blocks=8)
    scorer.parts = dataclasses.replace(scorer.parts, ladder=dataclasses.replace(LADDER, context_blocks=(1, 8)))
    score(scorer, 100)
    assert [len(p.chunks[0].tokens) for p in plans(scorer)] == [64, 36]


def test_chunks_are_fixed() -> None:
    scorer = make("chunked", 7)
    score(scorer, 23)
    assert [[c.start for c in p.chunks] for p in plans(scorer)] == [[0], [7], [14], [21]]
    assert [p.bucket.context_blocks for p in plans(scorer)] == [1, 1, 2, 2]


def test_requests_share_a_step() -> None:
    """Two of three in the decode bucket of two; the third starts when a row is free."""
    scorer = make("stepwise", num_blocks=6)
    score(scorer, 3, 2, 4)
    assert [len(p.chunks) for p in plans(scorer)] == [2, 2, 2, 1, 1, 1]


def test_the_context_bucket_follows_the_longest() -> None:
    scorer = make("chunked", 16, num_blocks=6)
    score(scorer, 16, 20)
    assert [p.bucket.context_blocks for p in plans(scorer)] == [1, 2]


@pytest.mark.parametrize("trace", [False, True])
def test_a_steps_output_is_not_held(trace: bool) -> None:
    """Memory follows the rows scored, not steps times bucket rows; the runner asserts it at every step."""
    scorer = make("chunked", 1, trace=trace)
    (result,) = score(scorer, 20).values()
    assert len(plans(scorer)) == 20 and {p.bucket.rows for p in plans(scorer)} == {32}
    kept = [result.logits, *result.hidden.values(), *result.selected.values(), *result.experts.values()]
    assert all(array.base is None and array.shape[0] == 20 for array in kept)
    assert all(array() is None for array in scorer.parts.runner.returned)  # type: ignore[attr-defined]


def test_trace_is_sorted_into_layers() -> None:
    """Runs of layers are taken apart: each layer number gets its own rows."""
    scorer = make("chunked", 5, trace=True)
    result = score(scorer, 12, 9)["1"]
    assert set(scorer.parts.runner.outputs) == {TRACE}  # type: ignore[attr-defined]
    assert result.hidden.keys() == result.experts.keys() == set(range(MODEL.num_hidden_layers))
    assert result.selected.keys() == set(MODEL.index_source_layer_ids)
    for layer in range(MODEL.num_hidden_layers):
        np.testing.assert_array_equal(result.hidden[layer][:, :, 0], result.logits + layer)
        assert (result.experts[layer] == layer).all()
    for layer, selected in result.selected.items():
        np.testing.assert_array_equal(selected, result.logits + 100 * layer)


def test_without_trace_only_logits_are_asked_for() -> None:
    scorer = make()
    result = score(scorer, 4)["0"]
    assert set(scorer.parts.runner.outputs) == {LOGITS}  # type: ignore[attr-defined]
    assert not (result.hidden or result.selected or result.experts)


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(ValueError, match=r"request big: needs 5 blocks of a pool of 4"):
        list(make(num_blocks=4).run([("small", [1, 2]), ("big", list(range(5 * BLOCK)))]))


def test_an_unknown_feed_is_refused() -> None:
    with pytest.raises(ValueError, match="'sideways' is not one of whole, chunked, stepwise"):
        make("sideways")


def test_negative_log_likelihood() -> None:
    """Against a softmax in float64, with logits that overflow an fp32 exponential."""
    generator = np.random.default_rng(0)
    logits = (generator.normal(size=(5, 9)) * 10 + 500).astype(np.float32)
    ids = [3, 1, 4, 1, 5]
    shifted = logits.astype(np.float64) - 500
    probability = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    expected = [-np.log(probability[t, ids[t + 1]]) for t in range(4)]
    nll = Score("x", ids, logits, {}, {}, {}).negative_log_likelihood()
    assert nll.dtype == np.float64
    np.testing.assert_allclose(nll, expected, rtol=1e-9)


def test_a_single_token_has_no_likelihood() -> None:
    nll = Score("x", [3], np.zeros((1, 9), np.float32), {}, {}, {}).negative_log_likelihood()
    assert nll.shape == (0,) and nll.dtype == np.float64
