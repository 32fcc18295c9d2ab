"""Answers of the bundled checkpoint are distributed as without drafts (dspark T21): counts against exact chances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from di_jax.config import load_config
from di_jax.engine.engine import Engine
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.engine.step_profile import StepProfile
from di_jax.sampling_params import SamplingParams

ANSWERS = 2500
RUNNING = 32
LEAST_EXPECTED = 8  # counts below it go together: there chi-square is no distribution of theirs
SIGNIFICANT = 1e-3 / 12  # twelve tests
PROMPT = "And the LORD said unto"


def engine_of(profile: StepProfile | None = None, **speculative: Any) -> Engine:
    values = {
        "engine.max_num_seqs": RUNNING,
        "engine.max_num_batched_tokens": 128,
        "engine.prefill_buckets": [128],
        "engine.decode_buckets": [RUNNING],
        "engine.max_model_len": 128,
        "engine.context_buckets": [128],
        "engine.prefix_caching": False,
        "engine.replay.decoder": "off",
        "engine.warmup": False,
        "engine.log_interval": 0,
        **{f"speculative.{name}": value for name, value in speculative.items()},
    }
    config = load_config("speculative").with_values(values)
    return Engine(build_engine_parts(config), config.engine, profile)


def answers(engine: Engine, prompt: Sequence[int], first: int, temperature: float) -> tuple[list[list[int]], set[int]]:
    """Three tokens each; the first one is given, so that the drafts after it are verified for all alike. And how many
    rows steps with drafts had."""
    found = []
    for seed in range(ANSWERS):
        sampling = SamplingParams(
            temperature=temperature, seq_seed=seed, max_tokens=4, forced_token_ids=(first,), ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        found.append(engine.add_request(list(prompt), sampling))
    rows = set()
    while engine.has_unfinished:
        report = engine.step()
        assert report is not None
        if report.bucket.drafts:
            rows.add(report.bucket.rows)
    return [request.sequences[0].output_ids for request in found], rows


def after(parts: EngineParts, tokens: Sequence[int], temperature: float) -> np.ndarray:
    """Exact probabilities float64 [V] of what follows tokens, by a prefill that drafts nothing."""
    (score,) = Scorer(parts, "whole").run([("x", list(tokens))])
    z = score.logits[-1].astype(np.float64) / temperature
    p = np.exp(z - z.max())
    return p / p.sum()


def p_value(counts: Counter[int], p: np.ndarray) -> float:
    """Of Pearson's test, with all rare ids as one."""
    total = sum(counts.values())
    often = np.flatnonzero(p * total >= LEAST_EXPECTED)
    seen = np.array([counts[int(token)] for token in often])
    expected = p[often] * total
    if (rest := total - expected.sum()) >= LEAST_EXPECTED:
        seen, expected = np.append(seen, total - seen.sum()), np.append(expected, rest)
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(expected) - 1))


# By which a step is worth a second draft of a request or not, according to older confidences; seconds by rows.
PROFILE = StepProfile({32: 1.0, 64: 1.05, 128: 1.2, 192: 1.3}, {32: 0.05}, {32: 0.05}, {32: 9.0}, {32: 9.0})


WAYS: dict[str, dict[str, Any]] = {
    "probabilistic": {"varlen": False},
    "varlen": {"varlen": True, "profile": PROFILE},
    "one_hot": {"varlen": False, "draft_sampling": "one_hot"},
    "coupled": {"varlen": False, "coupled": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_distributed_as_without_drafts(way: str) -> None:
    engine = engine_of(**WAYS[way])
    if way == "varlen":  # the profile is all that counts, not what steps take here
        assert engine.speculation is not None
        engine.speculation.observe = lambda *_: None  # type: ignore[method-assign]
    parts = engine.parts
    prompt = parts.tokenizer.encode(PROMPT)
    first = int(after(parts, prompt, 1.0).argmax())
    found, rows = answers(engine, prompt, first, 1.0)
    drafts = engine.metrics.drafts
    if way == "varlen":
        assert {64, 128} <= rows, "one draft of a request, and two"
    assert drafts.verified > (1 if way == "varlen" else 2) * ANSWERS and 0.1 < (drafts.accept_rate or 0) < 0.95
    assert drafts.accepted > ANSWERS / 2
    known = [*prompt, first]
    for place in (1, 2, 3):
        of_known = [answer for answer in found if answer[:place] == known[len(prompt) :]]
        p, counts = after(parts, known, 1.0), Counter(answer[place] for answer in of_known)
        assert len(of_known) > 150
        assert p_value(counts, p) > SIGNIFICANT, (way, place)
        if place == 1:  # the control: it would be seen if they were a little too sure
            assert p_value(counts, after(parts, known, 0.8)) < 1e-6
        known.append(counts.most_common(1)[0][0])
