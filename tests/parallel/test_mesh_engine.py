"""The engine on meshes of virtual devices against the goldens: however the work is spread, the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from di_jax.config import Config
from di_jax.engine.engine import Engine
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.sampling_params import SamplingParams

PROMPTS = ("p64", "p150", "p300")
MESHES = {
    "dp8": {"dp": 8},
    "ep8dp8": {"dp": 8, "ep": 8},
    "ep2dp8": {"dp": 8, "ep": 2},
    "ep2cp8": {"cp": 8, "ep": 2},
    "ep4dp4cp2": {"dp": 4, "cp": 2, "ep": 4},
    "eplb": {"dp": 4, "cp": 2, "ep": 8},
}


def config_of(golden: Path, mesh: dict[str, int], **values: object) -> Config:
    """The golden tiny model on a mesh, with one prefill and one decode shape."""
    cp = mesh.get("cp", 1)
    base = Config.from_dict(
        {
            "model": {"path": str(golden / "tiny-v41-fp8"), "dtype": "float32", "quantize_caches": False},
            "mesh": mesh,
            "engine": {
                "max_num_seqs": 4,
                "max_num_batched_tokens": 512,
                "prefill_buckets": [512],
                "decode_buckets": [4],
                "max_model_len": 384,
                "log_interval": 0,
                "warmup": False,
            },
            "sampling": {"temperature": 0, "max_tokens": 32},
        }
    )
    assert cp <= 8
    return base.with_values(values)


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "tiny-v41.nokvq.safetensors")


@pytest.fixture(scope="module", params=MESHES)
def parts(request: pytest.FixtureRequest, golden: Path) -> Iterator[EngineParts]:
    values = {"eplb.extra_per_rank": 1} if request.param == "eplb" else {}
    yield build_engine_parts(config_of(golden, MESHES[request.param], **values))


def test_scores_are_the_goldens(parts: EngineParts, goldens: dict[str, np.ndarray]) -> None:
    """Logits within 1e-4; every selection and every expert equal."""
    prompts = [(name, goldens[f"{name}/input_ids"].tolist()) for name in PROMPTS]
    scores = {score.request_id: score for score in Scorer(parts, trace=True).run(prompts)}
    assert scores.keys() == set(PROMPTS)
    for name, score in scores.items():
        assert np.abs(score.logits - goldens[f"{name}/logits"]).max() < 1e-4
        for layer, selected in score.selected.items():
            assert (selected == goldens[f"{name}/L{layer}/topk_idx"]).all()
        for layer, experts in score.experts.items():
            assert (experts == goldens[f"{name}/L{layer}/expert_ids"]).all()


def test_greedy_answers_are_the_goldens(parts: EngineParts, goldens: dict[str, np.ndarray]) -> None:
    """More requests than ranks, so that every rank decodes and some prompts are cut into chunks."""
    engine = Engine(parts, config_of(Path(parts.folder).parent, {}).engine)
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    requests = {
        f"{name}-{copy}": engine.add_request(goldens[f"{name}/input_ids"].tolist(), sampling)
        for copy in range(4)
        for name in PROMPTS
    }
    while engine.step() is not None:
        for ledger in engine.scheduler.ledgers:
            ledger.check()
    for key, request in requests.items():
        name = key.partition("-")[0]
        margin = goldens[f"{name}/greedy_margin"]
        certain = len(margin) if margin.min() > 1e-3 else int(np.argmax(margin <= 1e-3))
        assert request.failure is None
        assert request.sequences[0].output_ids[:certain] == goldens[f"{name}/greedy_ids"][:certain].tolist()
        assert certain > 8
    assert all(ledger.num_free_blocks == ledger.num_blocks for ledger in engine.scheduler.ledgers)
