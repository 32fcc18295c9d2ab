"""scripts/speculation_simulator.py: the published chart, its blocks, the policy in small, and the committed results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.commands.bench_speculation import (
    ACCEPTED_LENGTH,
    DRAFTS,
    Blocks,
    EnginePolicy,
    Policy,
    Simulation,
    load_blocks,
    rescaled,
    simulate,
)
from di_jax.engine.confidence import calibration_error
from di_jax.engine.speculation import LOOK_EVERY
from di_jax.engine.verification import Promises
from scripts import command_line
from scripts import speculation_simulator as simulator
from scripts.speculation_simulator import AnyRows, remixed


@pytest.fixture(scope="module")
def recorded() -> Blocks:
    temperatures = json.loads((simulator.FOLDER / "demo-sts.json").read_text(encoding="utf-8"))
    return load_blocks(simulator.RECORDING, temperatures["confidence_temperatures"])


@pytest.fixture(scope="module")
def blocks(recorded: Blocks) -> Blocks:
    return rescaled(recorded, ACCEPTED_LENGTH)[0]


def run(blocks: Blocks, requests: int, policy: Callable[[int], Policy] = EnginePolicy, steps: int = 60) -> Simulation:
    return simulate(np.random.default_rng(1), blocks, requests, steps, policy(requests))


class Recorded:
    """Keeps the rows of a policy's steps."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.all_rows, self.rows = policy, policy.all_rows, list[int]()
        self.land, self.replace = policy.land, policy.replace

    def launch(self) -> tuple[int, np.ndarray]:
        rows, caps = self.policy.launch()
        self.rows.append(rows)
        return rows, caps


def test_step_times_reproduce_the_published_chart() -> None:
    for requests, speed in simulator.PUBLISHED_SPEED.items():
        assert simulator.request_speed(requests, 4, 3.25) == pytest.approx(speed, abs=1.5)


@pytest.mark.parametrize("word", ["--concurrency", "--request-steps", "--record-rows"])
def test_less_than_one_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulator.main([word, "0"])
    assert f"{word} 0: at least 1" in capsys.readouterr().err


def test_a_recording_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "out.json"
    words = ["--recording", str(tmp_path / "none.npz"), "--output", str(output)]
    assert command_line.run(lambda: simulator.main(words)) == 2
    assert f"error: --recording {tmp_path}/none.npz: cannot be read: No such file" in capsys.readouterr().err
    assert not output.exists()


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


@pytest.mark.parametrize("grain", [1, 8])
def test_verifying_everything_gains_nothing(blocks: Blocks, grain: int) -> None:
    row = run(blocks, 2, partial(AnyRows, margin=np.inf, grain=grain))
    assert (row.verified_length, row.gain) == (5, 0)
    assert row.accepted_length == row.fixed_accepted_length


@pytest.mark.parametrize("policy", [EnginePolicy, AnyRows, partial(AnyRows, grain=8)])
def test_gain_is_never_negative_and_verified_never_rises(blocks: Blocks, policy: Callable[[int], Policy]) -> None:
    rows = [run(blocks, requests, policy) for requests in (1, 8, 16, 40, 96, 256)]
    assert all(row.gain >= 0 for row in rows)
    verified, gain = ([getattr(row, name) for row in rows] for name in ("verified_length", "gain"))
    assert verified == sorted(verified, reverse=True) and verified[0] == 5 > verified[-1]
    assert 0.05 < gain[-2] < gain[-1]


def test_the_engine_chooses_among_its_shapes_and_looks_every_few_steps(blocks: Blocks) -> None:
    requests, steps = 40, 200
    engine = EnginePolicy(requests)
    recorded = Recorded(engine)
    row = simulate(np.random.default_rng(1), blocks, requests, steps, recorded, warm_up=0)
    assert set(recorded.rows) == {4 * requests, 6 * requests} < set(engine.ladder.verify_rows(requests))
    assert recorded.rows[0] == engine.all_rows and engine.table.drafted.all()
    assert row.verified_length == pytest.approx(np.mean(recorded.rows) / requests - 1)
    # Once it was seen to pay; another choice before that is of the first looks, of every step.
    changes = {at % LOOK_EVERY for at in np.flatnonzero(np.diff(recorded.rows[steps // 2 :])).tolist()}
    assert len(changes) == 1
    ledger = engine.books.ledgers[0]
    in_flight = ledger.scheduled - ledger.processed  # none of a request that has just come
    assert in_flight.max() == 1 and in_flight.min() >= 0 and in_flight.sum() > requests // 2


def test_the_other_arm_chooses_other_row_counts_and_at_every_step(blocks: Blocks) -> None:
    recorded = Recorded(AnyRows(40))
    simulate(np.random.default_rng(1), blocks, 40, 200, recorded, warm_up=0)
    assert len(set(recorded.rows)) > len(EnginePolicy(40).ladder.verify_rows(40))
    assert len({at % LOOK_EVERY for at in np.flatnonzero(np.diff(recorded.rows[100:])).tolist()}) == LOOK_EVERY


def test_the_engine_learns_that_confidence_promises_too_much(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    boastful = dataclasses.replace(blocks, confidence=blocks.confidence**0.7)
    true, learning = EnginePolicy(64), EnginePolicy(64)
    simulate(np.random.default_rng(1), blocks, 64, 60, true)
    learned = simulate(np.random.default_rng(1), boastful, 64, 60, learning)
    assert learning.books.promises.ratio < 0.9 < true.books.promises.ratio < 1.15
    monkeypatch.setattr(Promises, "add", lambda *_: None)
    believed = run(boastful, 64)
    assert believed.verified_length == 5 > learned.verified_length + 0.5
    assert believed.gain == 0 < learned.gain


def test_another_request_in_a_slot_voids_what_is_in_flight(blocks: Blocks) -> None:
    policy = EnginePolicy(2)
    certain, hopeless = np.ones((1, DRAFTS), np.float32), np.full((1, DRAFTS), 0.25, np.float32)
    policy.replace(np.arange(2), np.repeat(certain, 2, axis=0))
    policy.launch()
    policy.replace(np.array([1]), hopeless)
    five = np.full(2, DRAFTS)
    policy.land(five, five, np.repeat(certain, 2, axis=0))
    ledger = policy.books.ledgers[0]
    assert ledger.processed.tolist() == [2, 1]  # prefill and step; prefill alone
    seen = ledger.schedule(np.arange(2)), ledger.schedule(np.arange(2))
    assert seen[1].survival[0, 1].tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.0009765625]


def test_a_confidence_that_says_nothing_gains_less(blocks: Blocks) -> None:
    shuffled = blocks.confidence[np.random.default_rng(2).permutation(len(blocks.text))]
    blind = dataclasses.replace(blocks, confidence=shuffled)
    knowing = dataclasses.replace(blocks, confidence=blocks.chance)
    gains = [run(each, 96).gain for each in (blind, blocks, knowing)]
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
    assert results["notes"] == simulator.NOTES
    assert simulator.RECORDING.stat().st_size < 300_000
    rows = {(row["arm"], row["requests"]): row for row in results["rows"]}
    for arm in ("engine", "any_rows", "buckets"):
        mine = {requests: row for (name, requests), row in rows.items() if name == arm}
        assert tuple(mine) == simulator.CONCURRENCY
        assert all(row["gain"] >= 0 for row in mine.values())
        verified = [row["verified_length"] for row in mine.values()]
        assert verified == sorted(verified, reverse=True)
        assert mine[16]["gain"] == 0 and mine[16]["verified_length"] == 5
        assert 0.03 < mine[60]["gain"] < 0.07 and 0.07 < mine[96]["gain"] < 0.12
        assert all(abs(row["fixed_accepted_length"] - ACCEPTED_LENGTH) < 0.05 for row in mine.values())
    for requests in simulator.CONCURRENCY:
        engine, free = rows["engine", requests], rows["any_rows", requests]
        assert free["gain"] >= engine["gain"]
        assert free["gain"] - engine["gain"] < (0.0025 if 60 <= requests <= 96 else 0.06)
    assert rows["engine", 60]["verified_length"] == rows["engine", 96]["verified_length"] == 3
    assert all(rows["perfect", requests]["gain"] > rows["engine", requests]["gain"] for requests in (60, 96, 256))
    for row in results["published"][1:]:
        assert row["rescaled_accepted"] < row["accepted_length"] < row["remixed_accepted"]
