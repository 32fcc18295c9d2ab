"""scripts/speculation_simulator.py: the published chart, its blocks, the policy in small, and the committed results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.engine.confidence import calibration_error
from di_jax.engine.verification import MARGIN
from scripts import speculation_simulator as simulator
from scripts.speculation_simulator import ACCEPTED_LENGTH, Blocks, remixed, rescaled, simulate


@pytest.fixture(scope="module")
def recorded() -> Blocks:
    temperatures = json.loads((simulator.FOLDER / "demo-sts.json").read_text(encoding="utf-8"))
    return simulator.load_blocks(simulator.RECORDING, temperatures["confidence_temperatures"])


@pytest.fixture(scope="module")
def blocks(recorded: Blocks) -> Blocks:
    return rescaled(recorded, ACCEPTED_LENGTH)[0]


def run(blocks: Blocks, requests: int, steps: int = 60, margin: float = MARGIN, grain: int = 1) -> simulator.Row:
    return simulate(np.random.default_rng(1), blocks, requests, steps, margin, grain)


def test_step_times_reproduce_the_published_chart() -> None:
    for requests, speed in simulator.PUBLISHED_SPEED.items():
        assert simulator.request_speed(requests, 4, 3.25) == pytest.approx(speed, abs=1.5)


def test_published_gains_imply_verified_lengths_in_the_published_range() -> None:
    low, high = simulator.PUBLISHED_VERIFIED
    assert all(low < simulator.implied_verified(r, simulator.PUBLISHED_GAIN[r]) < high for r in (60, 96))


def test_rescaling_keeps_the_order_and_the_calibration(recorded: Blocks, blocks: Blocks) -> None:
    assert recorded.accepted_length() < ACCEPTED_LENGTH
    assert blocks.accepted_length() == pytest.approx(ACCEPTED_LENGTH, abs=1e-6)
    stated, before = (np.cumprod(each.confidence, axis=1).reshape(-1) for each in (blocks, recorded))
    assert (np.diff(stated[np.argsort(before)]) >= -1e-12).all()
    assert calibration_error(stated, blocks.accepted.reshape(-1)) < 0.03


def test_remixing_changes_no_block(recorded: Blocks) -> None:
    remix = remixed(recorded, ACCEPTED_LENGTH)
    assert remix.accepted_length() == pytest.approx(ACCEPTED_LENGTH, abs=1e-6)
    np.testing.assert_array_equal(remix.chance, recorded.chance)
    assert remix.weight is not None and remix.weight.sum() == pytest.approx(1)


def test_accepted_of_the_best_drafts(blocks: Blocks) -> None:
    lengths = [blocks.accepted_of(verified) for verified in (0, 1, 2.5, 5)]
    assert lengths[0] == pytest.approx(1, abs=1e-3) and lengths[-1] == pytest.approx(ACCEPTED_LENGTH)
    assert (np.diff(lengths) > 0).all()
    assert lengths[1] > 1 + blocks.chance[:, 0].mean()  # better than the first draft of every block


def test_requests_follow_their_texts() -> None:
    text = np.array([0, 0, 3, 3, 3])
    blocks = Blocks(np.ones((5, 2)), np.ones((5, 2)), text)
    after, ended = blocks.following(np.random.default_rng(0), np.array([0, 1, 3, 4]))
    assert after.tolist() == [1, 2, 4, 0] and ended.tolist() == [False, True, False, True]


def test_buckets() -> None:
    assert simulator.buckets(20, 8) == [1, 2, 4, 8, 16, 24]
    assert simulator.buckets(4, 1)[:4] == [1, 2, 3, 4]


def test_verifying_everything_gains_nothing(blocks: Blocks) -> None:
    row = run(blocks, 4, margin=np.inf)
    assert (row["verified"], row["gain"]) == (5, 0)
    assert row["accepted_length"] == row["fixed_accepted_length"]


@pytest.mark.parametrize("grain", [1, 8])
def test_gain_is_never_negative_and_verified_never_rises(blocks: Blocks, grain: int) -> None:
    rows = [run(blocks, requests, grain=grain) for requests in (1, 8, 16, 40, 96, 256)]
    assert all(row["gain"] >= 0 for row in rows)
    verified, gain = ([row[name] for row in rows] for name in ("verified", "gain"))
    assert verified == sorted(verified, reverse=True) and verified[0] == 5 > verified[-1]
    assert 0.05 < gain[-2] < gain[-1]


def test_a_confidence_that_says_nothing_gains_less(blocks: Blocks) -> None:
    shuffled = blocks.confidence[np.random.default_rng(2).permutation(len(blocks.text))]
    blind = dataclasses.replace(blocks, confidence=shuffled)
    knowing = dataclasses.replace(blocks, confidence=blocks.chance)
    gains = [run(each, 96)["gain"] for each in (blind, blocks, knowing)]
    assert gains[0] + 0.02 < gains[1] < gains[2]


def test_a_run_in_small_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "out.json"
    assert simulator.main(["--output", str(output), "--request-steps", "1", "--concurrency", "2"]) == 0
    assert {row["arm"] for row in json.loads(output.read_text(encoding="utf-8"))["rows"]} >= {"engine", "perfect"}
    assert output.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "arm engine, requests 2" in capsys.readouterr().out


def test_committed_results() -> None:
    results = json.loads(simulator.RESULTS.read_text(encoding="utf-8"))
    assert {"kind", "device", "versions", "command", "date", "seed", "power", "published", "notes"} <= results.keys()
    assert simulator.RECORDING.stat().st_size < 300_000
    mine = {row["requests"]: row for row in results["rows"] if row["arm"] == "engine"}
    assert tuple(mine) == simulator.CONCURRENCY
    assert all(row["gain"] >= 0 for row in mine.values())
    verified = [row["verified"] for row in mine.values()]
    assert verified == sorted(verified, reverse=True)
    assert mine[16]["gain"] == 0 and mine[16]["verified"] == 5
    assert 0.03 < mine[60]["gain"] < 0.07 and 0.07 < mine[96]["gain"] < 0.12
    assert all(abs(row["fixed_accepted_length"] - ACCEPTED_LENGTH) < 0.05 for row in mine.values())
    perfect = {row["requests"]: row["gain"] for row in results["rows"] if row["arm"] == "perfect"}
    assert all(perfect[requests] > mine[requests]["gain"] for requests in (60, 96, 256))
    for row in results["published"][1:]:
        assert row["rescaled_accepted"] < row["accepted_length"] < row["remixed_accepted"]
