"""scripts/speculation_benchmark.py: runs over a fake device, and all of it over the golden checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed
sys.path.insert(0, str(Path(__file__).parent / "engine"))

from fake_device import Drafting
from fake_engine import Setup, fake_engine

from di_jax.engine.step_plan import Bucket
from di_jax.errors import ConfigError
from scripts import speculation_benchmark as benchmark
from scripts.speculation_benchmark import FIXED, MODES, NONE, VARLEN, Ask, Run

OFF = {"replay": {"decoder": "off", "encoder": "off"}, "prefix_caching": False}
SETUP = Setup(block_size=16, num_blocks=99, num_slots=4, max_model_len=160, tokens=128, decode=(4,), config=OFF)
DRAFTS = {
    NONE: dataclasses.replace(SETUP),
    FIXED: dataclasses.replace(SETUP, drafting=Drafting(5, right=0.7, confidence=0.7), varlen=False),
    VARLEN: dataclasses.replace(SETUP, drafting=Drafting(5, right=0.7, confidence=0.7), curve="steep"),
}


def asks(count: int, length: int = 30) -> list[Ask]:
    return [Ask([5 + at % 40, 7, 9], float(at % 2), length + at % 5, at) for at in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_has_as_many_requests_as_it_says(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = fake_engine(DRAFTS[mode], monkeypatch)
    run = benchmark.serve(engine, asks(20), 4)
    assert not engine.requests and not engine.has_unfinished
    sizes = [step.num_sequences for step in run.decodes]
    assert sizes.count(4) > 0.7 * len(sizes) and max(sizes) == 4, "a step or two pass until the next one is in"
    numbers = run.numbers()
    assert run.tokens < run.all_tokens <= sum(ask.max_tokens for ask in asks(20))
    assert run.tokens + 20 >= run.all_tokens, "all others are first tokens, of prompts"
    assert numbers["tau"] == pytest.approx(1 + numbers["accepted"], abs=0.1)
    assert numbers["accepted"] <= numbers["verified"] <= 5 * numbers["drafted_share"]
    if mode == NONE:
        assert numbers["verified"] == numbers["drafted_share"] == device.drafts_made == 0 and numbers["rows"] == 4
    elif mode == FIXED:
        assert numbers["rows"] == 24 and numbers["drafted_share"] > 0.9 and 1.5 < numbers["tau"] < 6
    else:
        assert numbers["drafted_share"] < 0.5, "a row costs as much as a step: it soon drafts no more"
    assert (numbers["bare_share"] > 0.3) == (mode == VARLEN)


def run_of(tokens: int, seconds: float) -> Run:
    step: Any = dataclasses.make_dataclass(
        "Step",
        ["kind", "seconds", "num_sequences", "bucket", "schedule_s", "launch_s", "wait_s", "post_s"],
    )("decode", seconds, 2, Bucket(True, 12, 1), 0.1, 0.1, 0.1, 0.1)
    counts = {"decode_steps": 2, "drafted": 10, "verified": 10, "accepted": tokens - 2}
    return Run([step], tokens, tokens + 2, 2 * seconds, counts, 5)


def test_ratios_are_of_the_runs_of_one_round() -> None:
    # Each round is twice as slow as the one before; of one round, varlen is 1.5 times as fast as fixed, twice as none.
    rounds = [{NONE: run_of(6, s), FIXED: run_of(8, s), VARLEN: run_of(12, s)} for s in (1.0, 2.0, 4.0)]
    rows, ratios = benchmark.table(2, rounds)
    assert [row["mode"] for row in rows] == list(MODES) and rows[0]["tokens_per_s"] == 3
    assert rows[2]["tokens_per_s_range"] == [3, 12] and rows[2]["tau"] == 6 and rows[2]["drafted_share"] == 1
    found = {(each["of"], each["over"]): each for each in ratios}
    assert found[VARLEN, FIXED]["median"] == 1.5 and found[VARLEN, FIXED]["range"] == [1.5, 1.5]
    assert found[VARLEN, NONE]["median"] == 2 and found[VARLEN, NONE]["rounds"] == 3


def test_settings_differ_only_in_what_is_compared() -> None:
    configs = {mode: benchmark.settings("demo", (1, 16), mode, ["model.dtype=bfloat16"]) for mode in MODES}
    assert [config.speculative.enabled for config in configs.values()] == [False, True, True]
    assert not configs[FIXED].speculative.varlen and configs[VARLEN].speculative.varlen
    assert configs[FIXED].engine == configs[VARLEN].engine == configs[NONE].engine
    assert configs[NONE].engine.decode_buckets == (1, 16) and configs[NONE].model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"engine.policy"):
        benchmark.settings("demo", (1, 16), NONE, ["engine.policy=none"])


def test_results_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trio = {mode: fake_engine(setup, monkeypatch)[0] for mode, setup in DRAFTS.items()}
    asked: list[tuple[int, ...]] = []

    def requests(encoder: object, count: int, seed: tuple[int, ...], answer: tuple[int, int]) -> list[Ask]:
        asked.append(seed)
        return asks(count, answer[0])

    monkeypatch.setattr(benchmark, "engines", lambda configs: trio)
    monkeypatch.setattr(benchmark, "PromptEncoder", lambda *parts: None)
    monkeypatch.setattr(benchmark, "requests", requests)
    output = tmp_path / "speculation.json"
    words = ["--concurrency", "4", "2", "--rounds", "2", "--answer", "20", "30", "--output", str(output)]
    assert benchmark.main(words) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["kind"] == "speculation" and " ".join(words) in result["command"]
    assert [(row["concurrency"], row["mode"]) for row in result["rows"]] == [(c, m) for c in (2, 4) for m in MODES]
    assert {ratio["rounds"] for ratio in result["ratios"]} == {2}
    assert len(asked) == 2 * (3 + 2) and len(set(asked)) == 6, "all modes of a round get the same requests"
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "tokens_per_s" in capsys.readouterr().out


def test_less_time_means_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    trio = {mode: fake_engine(setup, monkeypatch)[0] for mode, setup in DRAFTS.items()}
    monkeypatch.setattr(benchmark, "PromptEncoder", lambda *parts: None)
    monkeypatch.setattr(benchmark, "requests", lambda encoder, count, seed, answer: asks(count, answer[0]))
    found = benchmark.compare(trio, 4, 50, seconds=0.0, answer=(10, 12))
    assert len(found) == benchmark.LEAST_ROUNDS


def test_prompts_are_of_all_kinds_and_come_again() -> None:
    class Encoder:
        def encode(self, record: dict[str, Any]) -> tuple[None, list[int]]:
            return None, list(str(record).encode())

    encoder: Any = Encoder()
    first = benchmark.requests(encoder, 60, (1, 2, 3))
    assert first == benchmark.requests(encoder, 60, (1, 2, 3)) != benchmark.requests(encoder, 60, (1, 2, 4))
    texts = [bytes(ask.prompt_ids).decode() for ask in first]
    for kind in ("json: ", "calc: ", "Please sort: ", ". And'", "KING"):
        assert any(kind in text for text in texts), kind
    assert [ask.temperature for ask in first[:4]] == [0, 1, 0, 1] and len({ask.seed for ask in first}) == 60
    assert {ask.max_tokens >= 64 and ask.max_tokens <= 128 for ask in first} == {True}
    assert max(len(text) for text in texts) < 400, "prompts are short beside the answers' context"


@pytest.mark.slow  # about 20 programs
def test_all_of_it_over_a_small_checkpoint(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "speculation.json"
    sets = ["speculative.num_draft_tokens=1", "speculative.confidence_temperatures=null", "engine.max_model_len=512"]
    words = [f"--set={each}" for each in sets]
    asked = ["--checkpoint", str(golden / "tiny-v41-fp8"), "--concurrency", "2", "--rounds", "1", "--answer", "6", "9"]
    assert benchmark.main([*asked, *words, "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["kind"] == "speculation" and set(result["profile"]["forward_ms"]) == {"2", "4"}
    rows = {row["mode"]: row for row in result["rows"]}
    assert rows[NONE]["verified"] == 0 and rows[NONE]["rows"] == 2 and rows[FIXED]["rows"] == 4
    assert 0 <= rows[FIXED]["accepted"] <= rows[FIXED]["verified"] <= 1
    assert all(row["tokens_per_s"] > 0 and row["concurrency"] == 2 for row in rows.values())
    assert [ratio["rounds"] for ratio in result["ratios"]] == [1, 1, 1]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fixed", "sizes"), [("nvidia-h200", 0.98, (1, 4, 16, 64, 128)), ("cpu", 1.0, (64, 128))]
)
def test_the_committed_runs_keep_what_variable_lengths_promise(name: str, fixed: float, sizes: tuple[int, ...]) -> None:
    """As fast as five drafts where a step takes as long whatever it verifies, faster where rows cost, and no loss
    against an engine without drafts anywhere."""
    path = Path(__file__).parent.parent / "scripts" / "results" / f"speculation-{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    median = {(r["concurrency"], r["over"]): r["median"] for r in kept["ratios"] if r["of"] == VARLEN}
    assert {concurrency for concurrency, _ in median} == {1, 4, 16, 64, 128}
    assert all(median[size, FIXED] >= fixed for size in sizes)
    assert all(ratio >= 0.97 for (_, over), ratio in median.items() if over == NONE)
