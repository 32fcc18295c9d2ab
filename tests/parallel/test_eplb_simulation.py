"""scripts/eplb_simulation.py: its model of routing, the bars at full width in small, and its committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

from di_jax.parallel.eplb import expert_map, initial_slots, moe_lb, rank_loads, rebalance_experts
from scripts import eplb_simulation as simulation


@pytest.fixture(scope="module")
def silent() -> tqdm:
    return tqdm(disable=True)


def test_chance_of_a_choice_agrees_with_draws() -> None:
    rng = np.random.default_rng(0)
    popularity = simulation.zipf_popularity(rng, 1.2, 2, 12)
    chance = simulation.choice_probability(popularity, 3)
    np.testing.assert_allclose(chance.sum(axis=1), 3, rtol=1e-4)
    for layer in range(2):
        drawn = simulation.draw_experts(rng, popularity[layer], 200_000, 3)
        assert all((drawn[:, a] != drawn[:, b]).all() for a, b in ((0, 1), (0, 2), (1, 2)))
        np.testing.assert_allclose(np.bincount(drawn.reshape(-1)) / len(drawn), chance[layer], atol=0.005)
        np.testing.assert_allclose(np.bincount(drawn[:, 0]) / len(drawn), popularity[layer], atol=0.005)


def test_a_step_loses_no_token() -> None:
    rng = np.random.default_rng(1)
    hashes = simulation.request_rows(rng, 100, 4)
    chosen = simulation.draw_experts(rng, np.full(12, 1 / 12), len(hashes), 3)
    loads = simulation.step_loads(hashes, chosen, expert_map(initial_slots(1, 12, 16), 12), 0, 4, 16)
    assert loads.shape == (4,) and loads.sum() == 100 * 4 * 3


@pytest.mark.parametrize("exponent", simulation.EXPONENTS)
def test_bars_at_full_width(exponent: float) -> None:
    rng = np.random.default_rng(2)
    layers, slots = 2, 448
    start = initial_slots(layers, simulation.EXPERTS, slots)
    popularity = simulation.zipf_popularity(rng, exponent, layers, simulation.EXPERTS)
    chance = simulation.choice_probability(popularity, simulation.TOP_K)
    found = [rebalance_experts(loads[None], start, simulation.RANKS) for loads in (popularity, chance)]
    assert all(each.balance_after <= simulation.EXPECTED_BAR[exponent] < each.balance_before for each in found)
    assert moe_lb(rank_loads(popularity[None], found[0].slot_experts, simulation.RANKS)) == pytest.approx(
        found[0].balance_after, rel=1e-4
    )
    tables = [expert_map(slot_experts, simulation.EXPERTS) for slot_experts in (start, found[1].slot_experts)]
    steps: list[list[np.ndarray]] = [[], []]
    for _ in range(6):
        for layer in range(layers):
            hashes = simulation.request_rows(rng, simulation.REQUESTS, simulation.ROWS_EACH)
            chosen = simulation.draw_experts(rng, popularity[layer], len(hashes), simulation.TOP_K)
            for each, layer_map in zip(steps, tables, strict=True):
                each.append(simulation.step_loads(hashes, chosen, layer_map, layer, simulation.RANKS, slots))
    before, after = (moe_lb(np.stack(each)) for each in steps)
    assert after <= simulation.STEP_BAR[exponent] < before


def test_drift_is_followed(silent: tqdm) -> None:
    row = simulation.simulate_drift(np.random.default_rng(3), 1.0, 0.1, 2, intervals=2, every=1_250, bar=silent)
    assert row["preset"] <= simulation.DRIFT_BAR < row["once"] < row["initial"]


def test_committed_results_stay_below_the_bars() -> None:
    results = json.loads(simulation.RESULTS.read_text(encoding="utf-8"))
    assert {"kind", "device", "processor", "versions", "command", "date", "rows"} <= results.keys()
    rows = results["rows"]
    resting = {(r["exponent"], r["measure"], r.get("loads")): r for r in rows if r["part"] == "resting"}
    for exponent in (0.8, 1.0):
        for loads in ("popularity", "top_6"):
            row = resting[exponent, "expected", loads]
            assert row["after"] <= row["worst_layer"] <= {0.8: 1.005, 1.0: 1.02}[exponent] < row["before"]
        row = resting[exponent, "per_step", None]
        assert row["after"] <= {0.8: 1.035, 1.0: 1.045}[exponent] < row["before"]
    drifts = {(r["exponent"], r["drift"]): r for r in rows if r["part"] == "drift"}
    for exponent in (0.8, 1.0):
        assert drifts[exponent, 0.1]["preset"] <= 1.09 < drifts[exponent, 0.1]["once"]
    times = {r["extra_per_rank"]: r for r in rows if r["part"] == "time"}
    assert times[1]["policy_ms"] < 100 and (times[1]["layers"], times[1]["experts"], times[1]["ranks"]) == (40, 384, 64)


def test_the_plot_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    rows = json.loads(simulation.RESULTS.read_text(encoding="utf-8"))["rows"]
    simulation.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
