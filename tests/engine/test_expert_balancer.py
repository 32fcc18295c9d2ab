"""EPLB while the engine runs: experts move between steps and no answer changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from di_jax.config import Config
from di_jax.engine import expert_balancer
from di_jax.engine.engine import Engine
from di_jax.engine.runner import StepOutput
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.parallel.eplb import initial_slots
from di_jax.sampling_params import SamplingParams
from tests.golden_model import TINY, tiny_leaves

LAYERS, EXPERTS = TINY.num_hidden_layers, TINY.n_routed_experts


@pytest.fixture(scope="module")
def config(golden: Path) -> Config:
    return Config.from_dict(
        {
            "model": {"path": str(golden / "tiny-v41-fp8"), "dtype": "float32", "quantize_caches": False},
            "mesh": {"dp": 4, "ep": 4},
            "eplb": {"extra_per_rank": 1, "window": 12, "interval": 12},
            "engine": {
                "max_num_seqs": 2,
                "max_num_batched_tokens": 256,
                "prefill_buckets": [256],
                "decode_buckets": [2],
                "max_model_len": 384,
                "log_interval": 0,
            },
        }
    )


@pytest.fixture(scope="module")
def parts(config: Config) -> EngineParts:
    return build_engine_parts(config)


def test_answers_stay_the_goldens_while_experts_move(
    parts: EngineParts, config: Config, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_balancer, "STEPS_TO_DECIDE", 2)
    goldens = load_file(golden / "tiny-v41.nokvq.safetensors")
    engine = Engine(parts, config.engine)
    balancer = engine.balancer
    assert balancer is not None and (balancer.slot_experts == initial_slots(LAYERS, EXPERTS, EXPERTS + 4)).all()
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    names = ("p64", "p150", "p300")
    requests = [(name, engine.add_request(goldens[f"{name}/input_ids"].tolist(), sampling)) for name in names * 5]
    before = balancer.slot_experts.copy()
    moved_layers = set()
    while engine.step() is not None:
        changed = np.flatnonzero((balancer.slot_experts != before).any(axis=1))
        assert len(changed) <= 1, "one layer between two steps"
        moved_layers.update(changed.tolist())
        before = balancer.slot_experts.copy()
    assert balancer.rearrangements >= 2 and len(moved_layers) == LAYERS
    assert engine.compiles_after_warmup == 0
    for name, request in requests:
        margin = goldens[f"{name}/greedy_margin"]
        certain = len(margin) if margin.min() > 1e-3 else int(np.argmax(margin <= 1e-3))
        assert request.sequences[0].output_ids[:certain] == goldens[f"{name}/greedy_ids"][:certain].tolist()
    # The device holds the experts that the books say, in every slot.
    stored = np.asarray(tiny_leaves()["layers.ffn.experts.w2.weight"])
    held = np.asarray(parts.runner.params["layers"]["ffn"]["experts"]["w2"]["weight"].get_value())
    assert (held == stored[np.arange(LAYERS)[:, None], balancer.slot_experts]).all()


def test_the_load_of_a_step_counts_every_routed_row_once(parts: EngineParts, config: Config) -> None:
    engine = Engine(parts, config.engine)
    assert engine.balancer is not None
    seen = []
    monitored = engine.balancer.window.record
    engine.balancer.window.record = lambda tokens, slots: seen.append(tokens) or monitored(tokens, slots)  # type: ignore[func-returns-value,method-assign]
    request = engine.add_request([5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    while engine.step() is not None:
        pass
    assert len(request.sequences[0].output_ids) == 3
    rows = [5, 1, 1]  # the prompt, then one row a step; padding and idle ranks route nowhere
    assert [tokens.sum(axis=1).tolist() for tokens in seen] == [[n * TINY.num_experts_per_tok] * LAYERS for n in rows]


def test_the_balance_statistic_reaches_the_reports(
    parts: EngineParts, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(parts, config.engine)
    assert engine.balancer is not None
    monkeypatch.setattr(engine.balancer, "statistic", expert_balancer.BalanceStatistic(LAYERS, 4, num_steps=3))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    reports = [report for report in iter(engine.step, None)]
    assert [report.moe_lb is None for report in reports] == [True, True, False, False]
    assert 1.0 <= reports[2].moe_lb <= 4.0


def test_a_move_that_fails_leaves_the_books_as_they_were(
    parts: EngineParts, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error before the weights are touched: the move is made again; after it, every step says what is wrong."""
    engine = Engine(parts, config.engine)
    balancer = engine.balancer
    assert balancer is not None
    # The fixture's engines moved the weights before: these books begin where the last ones ended.
    wanted = np.roll(balancer.slot_experts, 1, axis=1)
    moves = expert_balancer.plan_moves(balancer.slot_experts, wanted, 4)
    balancer._moves.append((2, moves, wanted[2]))
    load = [StepOutput(None, None, None, None, np.zeros((LAYERS, EXPERTS + 4), int))] * 4  # type: ignore[arg-type]
    before = balancer.slot_experts.copy()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("di_jax.engine.runner.slot_tables", lambda *_: (_ for _ in ()).throw(MemoryError()))
        balancer.after_step(load)
    assert (balancer.slot_experts == before).all() and len(balancer._moves) == 1
    balancer.after_step(load)
    assert (balancer.slot_experts[2] == wanted[2]).all() and not balancer._moves


def test_weights_that_were_lost_are_named(parts: EngineParts, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(parts, config.engine)
    lost = SimpleNamespace(is_deleted=lambda: True)
    monkeypatch.setattr(parts.runner, "params", {"w": lost})
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=2))
    with pytest.raises(RuntimeError, match="weights were lost when moving experts failed: start the engine again"):
        engine.step()
