"""scripts/train_demo/compare.py: float32 masters against the quantized checkpoint that they become."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo import compare
from scripts.train_demo.__main__ import ENDS, OPTIONS, stages
from scripts.train_demo.architecture import config_json
from scripts.train_demo.average import average, cool
from scripts.train_demo.compare import masters, rounding
from scripts.train_demo.curriculum import Clock
from scripts.train_demo.evaluate import GATES
from scripts.train_demo.export import export
from scripts.train_demo.parameters import builder, from_checkpoint, initial
from scripts.train_demo.perplexity import measure

CONFIG = ModelConfig.from_dict(config_json(64, 64, 63, small=True))
TABLES = EngramTables.build(CONFIG, np.arange(64, dtype=np.int32))
RESULTS = Path(__file__).parents[2] / "scripts/results"
TEXT = np.random.default_rng(0).integers(0, 64, 700).astype(np.uint16)


def test_no_state_no_masters(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="masters are on the machine that trained"):
        masters(tmp_path / "none", CONFIG, TABLES)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--state", "a", "b"], "--state: of one training or of 3, given 2"),
        (["--state", "a", "--text-tokens", "0"], "--text-tokens 0: at least 1"),
        (["--state", "a", "--temperature", "nan"], "--temperature nan: a positive number"),
        (["--state", "a", "--row-length", "100"], "--row-length 100: not a multiple of 128"),
        (["--state", "a", "--out", "no/such/file.json"], "--out no/such/file.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--data", "nowhere", "--out", "masters.json", *words])
    assert why in capsys.readouterr().err


def test_by_itself_it_says_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    words = ["--data", str(tmp_path / "none"), "--state", str(tmp_path), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.train_demo.compare", *words],
        cwd=RESULTS.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_three_trainings_are_compared_as_their_cooled_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported of them, and not the last alone."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(64, 64, 63, small=True)), encoding="utf-8")
    np.save(tmp_path / "token_map.npy", np.arange(64, dtype=np.int32))
    for text in ("english", "python"):
        for part in ("train", "eval"):
            np.save(tmp_path / f"{text}_{part}.npy", TEXT)
    _, shapes = builder(CONFIG, Numerics.training("float32"), TABLES)
    ends = [{path: np.asarray(value) for path, value in initial(CONFIG, shapes, seed).items()} for seed in range(3)]
    clocks = [Clock(step=10 * (number + 1), trained_s=1.5) for number in range(3)]
    seen: list[dict[str, np.ndarray]] = []
    monkeypatch.setattr(compare, "masters", lambda state, *_: (ends[int(state.name)], clocks[int(state.name)]))
    monkeypatch.setattr(compare, "measure", lambda *_: lambda weights, text: seen.append(weights) or 2.0)
    monkeypatch.setattr(compare, "export", lambda *_, **__: None)
    monkeypatch.setattr(compare, "from_checkpoint", lambda *_: ends[0])
    states = [str(tmp_path / str(number)) for number in range(3)]
    arguments = ["--data", str(tmp_path), "--out", str(tmp_path / "masters.json"), "--state"]
    assert compare.main([*arguments, *states]) == 0
    expected = cool(average(ends))
    assert all(np.array_equal(seen[0][path], value) for path, value in expected.items())
    assert not np.array_equal(seen[0]["norm.weight"], ends[-1]["norm.weight"])
    result = json.loads((tmp_path / "masters.json").read_text(encoding="utf-8"))
    assert result["trained"] == {"trainings": 3, "steps": 60, "seconds": 4.5, "temperature": 1.4} and set(
        result["seen"]
    ) == {*result["perplexity"]}
    seen.clear()
    assert compare.main([*arguments, *states, "--temperature", "1.7"]) == 0
    assert np.array_equal(seen[0]["norm.weight"], cool(average(ends), 1.7)["norm.weight"])
    seen.clear()
    assert compare.main([*arguments, states[2]]) == 0
    assert all(np.array_equal(seen[0][path], value) for path, value in ends[2].items())


def test_what_the_formats_hold_is_exported_unchanged(tmp_path: Path) -> None:
    """The bundled weights as fp32 masters become the same checkpoint; masters that have moved do not."""
    folder = demo_checkpoint()
    config = ModelConfig.from_file(folder)
    weights = from_checkpoint(folder, config)
    export(folder, weights, tmp_path / "same", draft=False)
    assert rounding(weights, from_checkpoint(tmp_path / "same", config)) == {"experts": 0, "others": 0}
    rng = np.random.default_rng(0)
    moved = {path: value + rng.normal(0, 0.02, value.shape).astype(np.float32) for path, value in weights.items()}
    export(folder, moved, tmp_path / "moved", draft=False)
    changed = rounding(moved, from_checkpoint(tmp_path / "moved", config))
    # e2m1 rounds evenly spread weights by a tenth, e4m3 by a fiftieth.
    assert 0.08 < changed["experts"] < 0.14 and 0.015 < changed["others"] < 0.03


@pytest.mark.slow
def test_perplexity_is_of_the_weights_as_they_are() -> None:
    _, shapes = builder(CONFIG, Numerics.training("float32"), TABLES)
    weights = {path: np.asarray(value) for path, value in initial(CONFIG, shapes, 1).items()}
    few, many = (measure(CONFIG, TABLES, 128, 32, batch) for batch in (2, 8))
    # Rows that fill up a batch do not count.
    assert few(weights, TEXT) == pytest.approx(many(weights, TEXT), rel=1e-5)
    assert 64 < few(weights, TEXT) < 400  # noise: an untrained model is worse than none
    silent = weights | {"head.weight": np.zeros_like(weights["head.weight"])}
    assert few(silent, TEXT) == pytest.approx(64, rel=1e-5)
    # Nothing is rounded: neither to the released formats nor to bfloat16.
    rounded = {path: value.astype(ml_dtypes.bfloat16).astype(np.float32) for path, value in weights.items()}
    exact, coarse = (few(found, TEXT) for found in (weights, rounded))
    assert exact != coarse and exact == pytest.approx(coarse, rel=0.05)


@pytest.mark.parametrize(
    ("name", "moved"),
    [("bundled", 0.08), ("third-stretch", 0.08), ("command-nvidia-h200", 0.08), ("both-forms-cpu", 0.05)],
)
def test_kept_comparisons_are_of_masters_between_the_values_of_the_formats(name: str, moved: float) -> None:
    """e2m1 rounds evenly spread weights by 0.1; few steps on from values of the formats it is less."""
    kept = json.loads((RESULTS / f"demo-masters-{name}.json").read_text(encoding="utf-8"))
    assert kept["rounding"]["experts"] > moved
    assert set(kept["perplexity"]) == {"english", "python"}
    for found in kept["perplexity"].values():
        assert found["ratio"] == pytest.approx(found["quantized_export"] / found["masters"], abs=1e-4)
        assert found["tokens"] == 60_000
    assert (kept["masters"] == "float32") is ("trained" in kept)


def test_an_export_costs_three_percent_at_most() -> None:
    """In both directions: of the bundled weights, of what the command trains from nothing, and of 241 steps more.

    The third stretch's end, which knows its texts by heart, is not what is bundled: it costs that one 4%.
    """
    for name in ("bundled", "command-nvidia-h200", "both-forms-cpu"):
        kept = json.loads((RESULTS / f"demo-masters-{name}.json").read_text(encoding="utf-8"))
        assert all(abs(found["ratio"] - 1) <= 0.03 for found in kept["perplexity"].values()), name


def test_the_bundled_export_is_the_one_that_was_evaluated() -> None:
    """Two programs, one model: the engine's perplexity of the checkpoint, and this comparison's."""
    mine, engine = (
        json.loads((RESULTS / f"demo-{name}.json").read_text(encoding="utf-8"))["perplexity"]
        for name in ("masters-bundled", "eval")
    )
    for text, found in mine.items():
        assert found["quantized_export"] == pytest.approx(engine[text], rel=1e-3)


def test_what_the_command_trains_is_compared_as_it_is_exported() -> None:
    """The average of its trainings. It knows the text by heart that it saw, and loses some of that."""
    kept = json.loads((RESULTS / "demo-masters-command-nvidia-h200.json").read_text(encoding="utf-8"))
    assert kept["masters"] == "float32" and kept["trained"]["trainings"] == 3
    for name, found in kept["perplexity"].items():
        seen = kept["seen"][name]
        assert found["tokens"] == seen["tokens"] == 60_000
        assert seen["masters"] < seen["quantized_export"] < found["masters"] / 2
        assert found["ratio"] > 1  # nothing is gained by rounding
        assert found["ratio"] == pytest.approx(found["quantized_export"] / found["masters"], abs=1e-4)


@pytest.mark.parametrize("name", ["bundled", "third-stretch", "command-nvidia-h200", "both-forms-cpu"])
def test_the_readme_quotes_the_kept_comparisons(name: str) -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith("|") and f"demo-masters-{name}.json" in line)
    kept = json.loads((RESULTS / f"demo-masters-{name}.json").read_text(encoding="utf-8"))["perplexity"]
    cells = [f"{f['masters']:.2f}, {f['quantized_export']:.2f}: {f['ratio'] - 1:+.1%}" for f in kept.values()]
    assert [cell.strip() for cell in row.split("|")[2:4]] == cells


def test_the_command_from_nothing_met_the_gates() -> None:
    """With its defaults: the trainings' whole lengths and the draft's, and what came out of all stages."""
    run = json.loads((RESULTS / "train-demo-nvidia-h200.json").read_text(encoding="utf-8"))
    trained = (*ENDS, "draft")
    minutes = {name: float(OPTIONS[name].split("--total-minutes ")[1].split()[0]) for name in trained}
    assert all(run["trained"][name]["seconds"] >= 60 * minutes[name] for name in trained)
    assert run["calls"][-1]["next"] is None and "--options" not in run["command"]
    assert run["done"] == [stage.name for stage in stages(Path(), Path(), None)]
    found, surprise = run["evaluation"]["tasks"], run["evaluation"]["perplexity"]
    assert all(found[name] >= gate for name, gate in GATES.items())
    assert surprise["english"] < surprise["english_five_gram_kneser_ney"] and surprise["tokens"]["english"] == 60_000
    masters = json.loads((RESULTS / "demo-masters-command-nvidia-h200.json").read_text(encoding="utf-8"))
    assert masters["trained"]["steps"] == sum(run["trained"][end]["steps"] for end in ENDS)
    assert masters["trained"]["temperature"] == run["temperature"]
    readme = " ".join((RESULTS.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"copy {found['copy']:.0%}, sort {found['sort']:.0%}, sums and differences {found['calc']:.0%}" in readme
    assert f"English perplexity {surprise['english']:.2f} against" in readme
    block = {kind: 1 + run["calibration"]["accepted_drafts"]["all"][kind] for kind in ("greedy", "sampled")}
    error = run["calibration"]["calibration_error"]["after"]["all"]
    assert min(block.values()) >= 2.5 and error <= 0.03
    assert f"yields {block['greedy']:.2f} tokens (sampled {block['sampled']:.2f}) with a calibration error of" in readme
    assert f"calibration error of {error:.1%}" in readme
