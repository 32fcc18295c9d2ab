"""The bench command, its results file, its roofline, and the plot of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from di_jax import run
from di_jax.commands import bench
from di_jax.commands.roofline import Peaks, StepCost, step_cost
from di_jax.config import Config
from di_jax.errors import UserError
from di_jax.llm import LLM

PLOT = Path(__file__).parents[1] / "scripts" / "plot_bench.py"
PEAKS = Peaks(bytes_per_s=1e9, flops_per_s=1e11)


@pytest.fixture
def command(llm: LLM, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench` with arguments, over the weights and programs of the shared engine."""
    settings = {"bench.batch_sizes": [1, 3], "bench.prompt_len": 70, "bench.output_len": 4, "bench.repeats": 1}
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config.with_values(settings).to_yaml())
    monkeypatch.setattr(bench, "build_engine_parts", lambda config: llm.engine.parts)
    monkeypatch.setattr(bench, "measure_peaks", lambda dtype: PEAKS)
    return lambda *argv: run.main(["bench", "--config", str(path), *map(str, argv)])


def test_rows_of_both_phases(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json") == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert {"kind", "device", "versions", "rows"} <= set(result)
    assert (result["kind"], result["device"]) == ("engine", jax.devices()[0].device_kind)
    rows = result["rows"]
    assert [(r["phase"], r["batch"]) for r in rows] == [("prefill", 1), ("decode", 1), ("prefill", 3), ("decode", 3)]
    for row in rows:
        assert (row["prompt_len"], row["output_len"], row["repeats"]) == (70, 4, 1)
        assert row["tokens_per_s"] > 0 and row["step_ms"] > 0
        assert row["roofline_fraction"] == pytest.approx(row["roofline_ms"] / row["step_ms"])
        assert row["async_scheduling"] is True
        assert all(row[f"{part}_ms"] > 0 for part in ("schedule", "launch", "post")) and row["wait_ms"] >= 0
        if row["phase"] == "decode":
            assert row["idle_share"] == pytest.approx(max(0.0, 1 - row["device_ms"] / row["step_ms"]))
        else:
            assert "device_ms" not in row
    # 70 tokens take 80 of 128 rows; the other 48 go to the next prompt, so that two steps do for three.
    assert [row["steps"] for row in rows] == [1, 3, 2, 3]
    assert [row["bucket_rows"] for row in rows] == [128, 8, 128, 8]
    assert rows[3]["tokens_per_s"] == pytest.approx(3 * 1e3 / rows[3]["step_ms"])
    assert len(table) == 5


def test_one_token_has_no_decode_row(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json", "--set", "bench.output_len=1", "--set", "bench.batch_sizes=[2]") == 0
    assert [r["phase"] for r in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]] == ["prefill"]


def test_no_run_finds_the_prompts_of_another(llm: LLM, tiny_config: Config) -> None:
    config = tiny_config.with_values({"engine.prefix_caching": True})
    engine = bench.Engine(llm.engine.parts, config.engine)
    prompt = list(range(300))
    fed = [sum(s.num_tokens for s in bench._answer(engine, [prompt], 1, salt)) for salt in ("a", "a", "b")]
    assert fed[0] == fed[2] == 300 > fed[1]


def test_requests_that_never_run_together_are_no_measurement(llm: LLM, tiny_config: Config) -> None:
    config = tiny_config.with_values({"bench.prompt_len": 200, "bench.output_len": 20, "bench.repeats": 1})
    parts = dataclasses.replace(llm.engine.parts, layout=dataclasses.replace(llm.engine.parts.layout, num_blocks=4))
    with pytest.raises(UserError, match=r"bench.batch_sizes: 3 requests of 220 tokens never ran together"):
        bench.measure_batch(bench.Engine(parts, config.engine), config.bench, 3, PEAKS, bench.tqdm(disable=True))


def test_results_keep_their_history_and_can_be_drawn(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine-cpu.json"
    assert command("--output", file) == 0
    first = json.loads(file.read_text())
    assert {"kind", "device", "versions", "command", "date", "rows"} <= set(first) and len(first["rows"]) == 4
    assert first["command"].startswith("python -m di_jax.run bench --config")
    assert command("--output", file, "--set", "bench.batch_sizes=[2]") == 0
    second = json.loads(file.read_text())
    assert second["rows"][:4] == first["rows"] and [r["batch"] for r in second["rows"][4:]] == [2, 2]
    assert all(row["date"] == second["date"] for row in second["rows"])
    capsys.readouterr()
    drawn = subprocess.run([sys.executable, PLOT, file], capture_output=True, text=True, check=True)
    assert drawn.stdout.strip() == str(file.with_suffix(".png"))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    failed = subprocess.run([sys.executable, PLOT, empty], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and "not a results file" in failed.stderr


def test_a_results_file_of_something_else_is_left_alone(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    for text, words in (
        (json.dumps({"kind": "engine", "device": "abacus", "rows": []}), "holds results of engine on abacus"),
        ("not json", "is not a results file"),
        ("[]", "is not a results file"),
    ):
        file.write_text(text)
        assert command("--output", file) == 2
        assert words in capsys.readouterr().err and file.read_text() == text
    assert command("--output", tmp_path / "no" / "x.json") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_device_names_in_file_names() -> None:
    assert bench.device_slug("cpu") == "cpu"
    assert bench.device_slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"


def test_the_cost_counts_what_a_step_must_touch(llm: LLM) -> None:
    layout = llm.engine.parts.layout
    c = layout.config

    def cost(path: str, shape: tuple[int, ...], dtype: Any, tokens: int, sequences: int = 1) -> StepCost:
        leaf = jax.ShapeDtypeStruct(shape, dtype)
        bare = step_cost({}, layout, tokens=tokens, sequences=sequences, context=0)
        whole = step_cost({path: leaf}, layout, tokens=tokens, sequences=sequences, context=0)
        return StepCost(whole.bytes - bare.bytes, whole.flops - bare.flops)

    plain = cost("layers.attn.wq_a.weight", (10, 64, 128), jnp.float8_e4m3fn, 7)
    assert (plain.bytes, plain.flops) == (10 * 64 * 128, pytest.approx(2 * 7 * 10 * 64 * 128))
    scale = cost("layers.attn.wq_a.scale", (10, 2, 4), jnp.uint8, 7)
    assert (scale.bytes, scale.flops) == (80, 0)
    # Packed fp4: two values a byte; a token multiplies 4 of 16 experts, and four tokens may touch all of them.
    experts = cost("layers.ffn.experts.w1.weight", (10, 16, 32, 64), jnp.uint8, 1)
    assert (experts.bytes, experts.flops) == (10 * 4 * 32 * 64, pytest.approx(2 * 10 * 4 * 32 * 128))
    assert cost("layers.ffn.experts.w1.weight", (10, 16, 32, 64), jnp.uint8, 100).bytes == 10 * 16 * 32 * 64
    assert cost("embed.weight", (512, 128), jnp.bfloat16, 3) == StepCost(3 * 256, 0)
    table = cost("engram_tables.0.weight", (2914, 32), jnp.float8_e4m3fn, 3)
    assert table == StepCost(3 * c.engram_columns * 32, 0)
    assert cost("head.weight", (512, 128), jnp.bfloat16, 9, sequences=2).flops == pytest.approx(2 * 2 * 512 * 128)


def test_cache_reads_stop_growing_but_for_the_index_scan(llm: LLM) -> None:
    layout = llm.engine.parts.layout
    c = layout.config
    near, far, farther = (step_cost({}, layout, tokens=1, sequences=1, context=n).bytes for n in (1000, 2000, 3000))
    keys = sum(1000 / plan.ratio for plan in c.layers if plan.owns_index)
    assert far - near == farther - far == pytest.approx(keys * layout.formats.index.record(c.index_head_dim))


def test_the_longer_of_memory_and_compute_bounds() -> None:
    assert StepCost(1e9, 1e9).seconds(PEAKS) == 1.0 and StepCost(1e9, 1e9).bound(PEAKS) == "memory"
    assert StepCost(1e6, 1e11).seconds(PEAKS) == 1.0 and StepCost(1e6, 1e11).bound(PEAKS) == "compute"
