"""The draft's goldens through the caches of the engine: chunks of a prompt, then steps that verify and reject drafts.

Eight decode steps after prompts of 7 and of 64 tokens, both in one batch. Every step verifies five wrong drafts, so
that each leaves dead rows behind, and drafts what the golden has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import TINY, golden
from speculative_lab import CONTEXT, DRAFTS, IDS, PREFILL_ROWS, Lab, Lane

from di_jax.engine.acceptance import Proposal
from di_jax.engine.step_plan import Bucket, Chunk, build_plan
from di_jax.model.cache import EngineState

PROMPTS, PLACES, STEPS = ("p7", "p64"), ((2, (1, 2)), (0, (4, 3))), 8
BARS = {"nokvq": 1e-4, "kvq": 2e-3}


class Blocks:
    """The draft's logits and raw confidences from a state, which the engine's program does not tell."""

    def __init__(self, lab: Lab) -> None:
        graphs, self.weights = zip(*(nnx.split(model) for model in (lab.target, lab.draft_model)))

        def run(weights: Any, state: EngineState, slot: jax.Array) -> Any:
            target, draft = (nnx.merge(graph, each) for graph, each in zip(graphs, weights))
            start = state.length[slot]
            block = draft(target, state.last_token[slot], start, draft.context(slot, start, state, lab.layout))
            return block.logits, block.score

        self._run = jax.jit(run)

    def __call__(self, state: EngineState) -> tuple[np.ndarray, np.ndarray]:
        slots = jnp.asarray([slot for slot, _ in PLACES], jnp.int32)
        return jax.device_get(self._run(self.weights, state, slots))


@pytest.mark.parametrize("variant", ["nokvq", pytest.param("kvq", marks=pytest.mark.slow)])
def test_drafts_of_the_goldens(variant: str) -> None:
    """Ids equal, logits and confidences within the goldens' bars, and the distributions that are kept are those."""
    lab, bar = Lab(variant, config=TINY), BARS[variant]
    blocks = Blocks(lab)
    goldens = [golden(variant, prompt) for prompt in PROMPTS]
    lanes = [Lane(own["input_ids"].tolist(), slot, where) for own, (slot, where) in zip(goldens, PLACES)]
    lab.prefill(lanes, 24)
    rng = np.random.default_rng(0)
    lab.draft(lanes)
    for step in range(STEPS):
        for lane, own in zip(lanes, goldens):
            wrong = rng.integers(0, IDS, DRAFTS)
            wrong[0] = (own["dspark/decode_ids"][step + 1] + 1 + wrong[0] % (IDS - 1)) % IDS
            lab.give(lane, wrong)
        assert lab.verify(lanes).verified.tolist() == [DRAFTS, DRAFTS]
        drafts = lab.draft(lanes)
        logits, score = blocks(lab.runner.state)
        for place, (lane, own) in enumerate(zip(lanes, goldens)):
            assert lane.said == own["dspark/decode_ids"][: step + 2].tolist()
            expected = own["dspark/draft_ids"][step]
            assert lane.said[-1] == expected[0]
            np.testing.assert_array_equal(drafts.token[place], expected[1:])
            np.testing.assert_array_equal(lab.host("draft_token")[lane.slot], expected[1:])
            assert np.abs(logits[place] - own["dspark/draft_logits"][step]).max() <= bar
            assert np.abs(score[place] - own["dspark/confidence"][step]).max() <= bar
            chance = 1 / (1 + np.exp(-own["dspark/confidence"][step].astype(np.float64)))
            assert np.abs(drafts.confidence[place] - chance).max() <= bar
            q = jax.nn.softmax(jnp.asarray(own["dspark/draft_logits"][step]))
            kept = Proposal(lab.host("draft_logits")[lane.slot], lab.host("draft_norm")[lane.slot])
            # Of bf16 numbers: 1 in 256 of the distance to the best, so up to 0.03 for ids that are likely at all.
            assert np.abs(np.exp(np.asarray(kept.logprobs())) - q).max() <= 0.01
    other = np.abs(logits[0] - goldens[0]["dspark/draft_logits"][STEPS - 2]).max()
    assert other > 0.1, "another step's logits are told apart"


@pytest.mark.slow
def test_a_prompt_of_which_the_decoder_keeps_the_end() -> None:
    """The draft's context is that of the kept rows, whether the others are dropped or computed for nothing."""
    lab, kept, (slot, blocks) = Lab(config=TINY), 20, PLACES[1]
    ids = golden("nokvq", "p64")["input_ids"].tolist()
    start, ring = len(ids) - kept, TINY.window_ring
    assert TINY.sliding_window <= kept < ring
    rings = []
    for rows in (0, 32):
        bucket = Bucket(False, PREFILL_ROWS, CONTEXT, kept_rows=rows)
        assert bucket.drops_rows == (rows > 0)
        lab.runner.reset()
        lab.runner.execute([build_plan(bucket, [Chunk(ids, 0, slot, blocks, decoder_start=start)])])
        rings.append(lab.host("window")[TINY.num_hidden_layers :, slot])
    dropped = np.abs(rings[0] - rings[1]).max()
    assert dropped <= BARS["nokvq"]
    written = (rings[1] != 0).any(axis=-1)  # [stages, ring]
    there = np.isin(np.arange(ring), np.arange(start, len(ids)) % ring)
    assert (written == there).all()
