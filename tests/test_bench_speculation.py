"""The bench command of kind host with a recording: what verifying fewer drafts gains, simulated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax import run
from di_jax.commands import bench_host
from di_jax.config import load_config
from scripts import speculation_simulator as simulator

RECORDING = simulator.RECORDING
RESULTS = simulator.FOLDER
BATCHES = [16, 48, 96]
SMALL: dict[str, Any] = {
    "speculative.enabled": True,
    "engine.max_num_seqs": 96,
    "engine.max_model_len": 256,
    "engine.max_num_batched_tokens": 2048,
    "bench.batch_sizes": BATCHES,
    "bench.prompt_len": 64,
    "bench.output_len": 24,
    "bench.repeats": 1,
    "bench.recording": str(RECORDING),
}
SIMULATED = {
    "verified_length", "accepted_length", "fixed_accepted_length", "simulated_steps", "simulated_step_ms",
    "fixed_step_ms", "gain",
}  # fmt: skip
# Names of the simulator's results.
SCRIPT = {"simulated_steps": "steps", "simulated_step_ms": "step_ms"}


def words(**values: Any) -> list[str]:
    return [word for name, value in {**SMALL, **values}.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def decode_rows(**values: Any) -> list[dict[str, Any]]:
    config = load_config("host_bench").with_values({**SMALL, **values})
    return [row for row in bench_host.measure(config, partial(tqdm, disable=True)) if row["phase"] == "decode"]


def test_the_command_simulates_as_the_script_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["bench", "--config", "host_bench", *words(), "--json"]) == 0
    head, *table, last = capsys.readouterr().out.splitlines()
    prefill, decode = ([r for r in json.loads(last)["rows"] if r["phase"] == p] for p in ("prefill", "decode"))
    assert [row["batch"] for row in decode] == BATCHES
    assert all(set(row) >= SIMULATED and row["num_draft_tokens"] == 5 for row in decode)
    assert not any(SIMULATED & set(row) for row in prefill)
    verified = [row["verified_length"] for row in decode]
    assert all(row["gain"] >= 0 for row in decode)
    assert verified == sorted(verified, reverse=True) and verified[0] == 5 > verified[1]
    assert head.split()[-5:] == ["verified", "tokens", "step", "ms", "gain"] and table[-1].endswith(" 11.0%")

    output = tmp_path / "script.json"
    assert simulator.main(["--output", str(output), "--concurrency", *map(str, BATCHES)]) == 0
    same_as_script(decode, output)
    same_as_script(decode, simulator.RESULTS)


def same_as_script(rows: list[dict[str, Any]], results: Path) -> None:
    script = json.loads(results.read_text(encoding="utf-8"))["rows"]
    engine = {row["requests"]: row for row in script if row["arm"] == "engine"}
    for row in rows:
        for name in SIMULATED:
            assert round(row[name], 5) == engine[row["batch"]][SCRIPT.get(name, name)], (row["batch"], name)


def test_the_committed_rows_are_those_of_the_script() -> None:
    rows = json.loads((RESULTS / "host-cpu.json").read_text(encoding="utf-8"))["rows"]
    newest = {(row["max_model_len"], row["batch"]): row for row in rows if "gain" in row}
    for length in (4096, 32768):
        mine = [row for (most, _), row in newest.items() if most == length]
        assert [row["batch"] for row in mine] == [1, 16, 64, 256]
        assert all(row["gain"] >= 0 for row in mine)
        verified = [row["verified_length"] for row in mine]
        assert verified == sorted(verified, reverse=True)
        same_as_script(mine, simulator.RESULTS)


def test_without_a_recording_nothing_is_simulated() -> None:
    (row,) = decode_rows(**{"bench.recording": None, "bench.batch_sizes": [2]})
    assert row["num_draft_tokens"] == 5 and not SIMULATED & set(row)


def test_fixed_drafts_gain_nothing() -> None:
    (row,) = decode_rows(**{"bench.batch_sizes": [96], "speculative.varlen": False})
    assert (row["verified_length"], row["gain"]) == (5, 0)
    assert row["accepted_length"] == row["fixed_accepted_length"]
    assert row["simulated_step_ms"] == pytest.approx(row["fixed_step_ms"])


def test_temperatures_are_those_of_the_config() -> None:
    """They change which drafts are verified, not what is accepted where all are."""
    batch = {"bench.batch_sizes": [96]}
    (ones,) = decode_rows(**batch, **{"speculative.confidence_temperatures": [1.0] * 5})
    (none,) = decode_rows(**batch)
    (flat,) = decode_rows(**batch, **{"speculative.confidence_temperatures": [50.0] * 5})
    assert all(ones[name] == none[name] for name in SIMULATED)
    assert flat["gain"] != none["gain"] and flat["fixed_accepted_length"] == none["fixed_accepted_length"]


def test_requests_are_those_of_a_rank() -> None:
    (row,) = decode_rows(**{"bench.batch_sizes": [96], "mesh.dp": 2})
    script = json.loads(simulator.RESULTS.read_text(encoding="utf-8"))["rows"]
    (engine,) = [one for one in script if (one["arm"], one["requests"]) == ("engine", 48)]
    assert round(row["gain"], 5) == engine["gain"]


def arrays(count: int = 6, drafts: int = 5, **changed: Any) -> dict[str, np.ndarray]:
    score, overlap = np.zeros((count, drafts), np.float16), np.full((count, drafts), 0.5, np.float16)
    return {"score": score, "overlap": overlap, "text": np.arange(count) // 2, **changed}


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in arrays().items() if key != name}


REFUSED: dict[str, tuple[Callable[[Path], object] | dict[str, np.ndarray], str]] = {
    "missing": (lambda path: None, "cannot be read: No such file or directory"),
    "folder": (Path.mkdir, "cannot be read: Is a directory"),
    "empty": (Path.touch, "is not a whole .npz file of numbers"),
    "text": (lambda path: path.write_text("score"), "is not a whole .npz file of numbers"),
    "cut": (lambda path: path.write_bytes(RECORDING.read_bytes()[:5000]), "is not a whole .npz file of numbers"),
    "npy": (lambda path: np.save(path.open("wb"), np.zeros(3)), "is one array; expected an .npz file"),
    "objects": (arrays(text=np.array([None] * 6)), "is not a whole .npz file of numbers"),
    "no text": (without("text"), "has no text; expected the arrays score, overlap, text"),
    "words": (arrays(text=np.array(["a"] * 6)), "has text of <U1; expected numbers"),
    "three drafts": (
        arrays(drafts=3),
        "has score [6, 3] and text [6]; expected [N, 5] and [N] of N blocks of 5 drafts",
    ),
    "no blocks": (arrays(count=0), "has score [0, 5] and text [0]"),
    "other blocks": (arrays(overlap=np.ones((5, 5))), "has overlap [5, 5] and text [6]"),
    "no chance": (arrays(overlap=np.full((6, 5), 1.5)), "overlap from 0 to 1"),
    "not finite": (arrays(score=np.full((6, 5), np.nan)), "finite score"),
    "texts mixed": (arrays(text=np.array([0, 1, 0, 1, 0, 1])), "rising text"),
    "all right": (arrays(overlap=np.ones((6, 5))), "has blocks that yield 6.00 tokens a step, which no power"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_recording_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, why = REFUSED[case]
    path = tmp_path / "recording.npz"
    if callable(made):
        made(path)
    else:
        np.savez(path, **made)
    assert run.main(["bench", "--config", "host_bench", *words(**{"bench.recording": str(path)})]) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith(f"error: bench.recording: {path} ") and why in line and not out


def test_other_than_five_drafts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["bench", "--config", "host_bench", *words(**{"speculative.num_draft_tokens": 3})]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: bench.recording: {RECORDING} ") and "speculative.num_draft_tokens is 3" in line
