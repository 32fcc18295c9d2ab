"""Thousands of short requests with aborts at any moment: everything is given back, and nothing stays behind."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice
from fake_engine import Setup, fake_engine
from fake_session import ids

sys.path.insert(0, str(Path(__file__).parents[2]))  # scripts are run from a checkout, not installed

from di_jax.engine.engine import Engine
from di_jax.engine.prefix_cache import BlockKeys
from di_jax.engine.sequence import Holding, Request, Sequence
from di_jax.sampling_params import SamplingParams
from scripts import soak as script
from scripts.soak import resident, slope

KINDS = (Request, Sequence, Holding, BlockKeys)
# Blocks of 16 tokens and little room for window state: evictions, hits and preemptions all the time.
SETUP = Setup(
    block_size=16, num_blocks=30, num_slots=12, max_model_len=160, tokens=128, config={"state_cache_bytes": 40_000}
)
PREFIXES = [ids(length, length) for length in (20, 40, 64, 90)]


def alive() -> Counter[str]:
    """Objects of requests that something still refers to."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, KINDS))


class Soak:
    """Keeps an engine in work: some requests always wait, and one in six is aborted within its first twelve steps."""

    def __init__(self, engine: Engine, device: FakeDevice, seed: int = 0) -> None:
        self.engine, self.device = engine, device
        self.random = np.random.default_rng(seed)
        self.sent = self.steps = 0
        self.ended: Counter[str] = Counter()
        self.due: dict[int, list[str]] = {}  # ids to abort, by step

    def send(self) -> None:
        draw = self.random
        prompt = PREFIXES[draw.integers(4)] if draw.random() < 0.5 else []
        prompt = prompt + draw.integers(3, 200, draw.integers(1, 30)).tolist()
        sampling = SamplingParams(
            temperature=float(draw.choice([0.0, 1.0])),
            max_tokens=int(draw.integers(1, 40)),
            n=int(draw.choice([1, 1, 1, 2, 3])),
            seq_seed=self.sent,
            priority=int(draw.choice([0, 0, 1])),
            detokenize=False,
        )
        request = self.engine.add_request(prompt, sampling)
        self.sent += 1
        if draw.random() < 1 / 6:
            self.due.setdefault(self.steps + int(draw.integers(12)), []).append(request.request_id)

    def step(self, total: int) -> None:
        while self.sent < total and self.engine.scheduler.num_waiting < 6:
            self.send()
        for request_id in self.due.pop(self.steps, ()):
            self.ended["abort"] += request_id in self.engine.requests
            self.engine.abort(request_id)
        report = self.engine.step()
        self.steps += 1
        for request in report.requests if report is not None else ():
            if request.finished and not any(sequence.finish_reason == "abort" for sequence in request.sequences):
                assert all(sequence.finish_reason in ("stop", "length") for sequence in request.sequences)
                self.ended["answered"] += 1

    def run(self, total: int, every: int = 0) -> list[tuple[int, int]]:
        """Sends and answers `total` requests; (requests sent, resident bytes) after every so many steps."""
        seen = []
        while self.sent < total or self.engine.has_unfinished:
            self.step(total)
            if every and self.steps % every == 0:
                self.engine.scheduler.check()
                self.device.check_flights()
                self.device.scribble(self.random)
                seen.append((self.sent, resident()))
        self.engine.step()
        assert self.ended.total() == self.sent
        for ledger in self.engine.scheduler.ledgers:
            assert ledger.num_available == ledger.num_blocks and ledger.num_free_slots == ledger.num_slots
        assert not self.engine.requests and not self.engine.scheduler.num_waiting and not self.device.flights
        return seen


def test_nothing_of_a_request_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = alive()
    soak = Soak(*fake_engine(SETUP, monkeypatch))
    soak.run(400, every=5)
    scheduler = soak.engine.scheduler
    assert soak.ended["abort"] > 20 and scheduler.preemptions and scheduler.replays
    assert soak.engine.snapshots.evictions and scheduler.ledgers[0].evictions
    # Only block keys remain, as bytes, with the blocks and the window state that they name.
    assert alive() - before == Counter()
    assert soak.engine.snapshots.nbytes <= 40_000
    assert soak.engine.compiles_after_warmup == 0


def test_a_request_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = alive()
    soak = Soak(*fake_engine(SETUP, monkeypatch))
    kept: list[Any] = []
    end = soak.engine._end
    monkeypatch.setattr(soak.engine, "_end", lambda request, *rest: (kept.append(request), end(request, *rest)))
    soak.run(20)
    assert (alive() - before)["Request"] == 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_twenty_thousand_requests_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak(*fake_engine(SETUP, monkeypatch))
    seen = soak.run(20_000, every=50)
    assert slope(seen) < 200, "10,000 requests would leave 2 MB"


def test_the_slope_is_of_the_second_half() -> None:
    assert slope([(0, 0), (10, 90_000), (20, 1000), (30, 1300), (40, 1600)]) == pytest.approx(30)


@pytest.mark.slow
def test_the_real_engine_gives_everything_back(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    assert script.main(["--requests", "300", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert row["answered"] + row["aborted"] == row["requests"] == 300 and row["aborted"] > 20
    assert row["blocks_not_free"] == row["slots_not_free"] == row["compiled_after_warmup"] == row["neither"] == 0
    assert row["prefix_hit_tokens"]
