"""Perplexity of the bundled checkpoint stays what it was on this platform, within 0.5%."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from scripts.perplexity_baselines import BASELINES, DTYPES, WORKLOADS, measure

TOLERANCE = 0.005
KEPT = json.loads(BASELINES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_perplexity_is_that_of_the_baseline(dtype: str) -> None:
    platform = jax.default_backend()
    if platform not in KEPT:
        pytest.skip(f"no baselines for {platform}; keep some by python -m scripts.perplexity_baselines --update")
    assert measure(dtype) == pytest.approx(KEPT[platform][dtype], rel=TOLERANCE)


def test_every_platform_has_every_workload_in_both_precisions() -> None:
    assert "cpu" in KEPT
    for kept in KEPT.values():
        assert kept.keys() == set(DTYPES) and all(values.keys() == set(WORKLOADS) for values in kept.values())
        # bfloat16 rounds activations and quantizes the inputs of products: near, but never the same.
        for name in WORKLOADS:
            near = kept["float32"][name]
            assert kept["bfloat16"][name] == pytest.approx(near, rel=0.1) and kept["bfloat16"][name] != near
