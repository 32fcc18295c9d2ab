"""The score command: records in, a safetensors file and a perplexity out, exit codes.

The logits themselves are tested with the goldens (`engine/test_golden_feeds.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file

from di_jax import run
from di_jax.commands import score
from di_jax.config import Config, load_config
from di_jax.engine.scorer import Score, Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts

VOCAB = 512


@pytest.fixture(scope="module")
def config_file(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("score") / "tiny.yaml"
    path.write_text(tiny_config.with_values({"engine.max_num_seqs": 4, "engine.decode_buckets": (4,)}).to_yaml())
    return path


@pytest.fixture(scope="module")
def parts(config_file: Path) -> EngineParts:
    return build_engine_parts(load_config(str(config_file), []))


@pytest.fixture
def command(parts: EngineParts, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`score` with arguments, over weights and programs that all tests share."""
    monkeypatch.setattr(score, "build_engine_parts", lambda config: parts)
    return lambda *argv: run.main(["score", "--config", str(config_file), *map(str, argv)])


@pytest.fixture
def no_model(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`score` with arguments, where a model must not be loaded."""

    def never(config: Config) -> EngineParts:
        raise AssertionError("loaded")

    monkeypatch.setattr(score, "build_engine_parts", never)
    return lambda *argv: run.main(["score", "--config", str(config_file), *map(str, argv)])


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def replace_scores(monkeypatch: pytest.MonkeyPatch, change: Callable[[Score], None]) -> None:
    """Lets every score pass through `change` on its way from the scorer to the command."""

    class Changed(Scorer):
        def run(self, requests: Any) -> Iterator[Score]:
            for result in super().run(requests):
                change(result)
                yield result

    monkeypatch.setattr(score, "Scorer", Changed)


def test_tensors_and_perplexity(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perplexity is over all tokens that follow another; sampling says nothing here, not even what is unknown."""
    first, second = [5, 6, 7, 8], [9, 10, 11]
    source = write(
        tmp_path / "in.jsonl",
        {"prompt_token_ids": first, "id": "first"},
        {"prompt_token_ids": second, "sampling": {"top_k": 3, "max_tokens": -1}},
    )
    target = tmp_path / "out.safetensors"
    assert command("--input", source, "--output", target, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    tensors = load_file(target)
    assert {name: value.shape for name, value in tensors.items()} == {"logits.first": (4, 512), "logits.1": (3, 512)}
    assert all(value.dtype == np.float32 for value in tensors.values())
    assert set(result) == {"requests", "perplexity", "feed"} and (result["requests"], result["feed"]) == (2, "whole")
    nll = [-log_softmax(tensors["logits.first"])[t, first[t + 1]] for t in range(3)]
    nll += [-log_softmax(tensors["logits.1"])[t, second[t + 1]] for t in range(2)]
    assert result["perplexity"] == pytest.approx(math.exp(sum(nll) / 5))
    assert command("--input", source) == 0
    assert capsys.readouterr().out == f"2 records, 0 failed, perplexity {result['perplexity']:.4f}, feed whole\n"


def test_trace_tensors(command: Callable[..., int], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "The river", "id": "r"})
    target = tmp_path / "out.safetensors"
    assert command("--input", source, "--output", target, "--set", "score.trace=true") == 0
    tensors = load_file(target)
    length = len(tensors["logits.r"])
    assert {value.shape[0] for value in tensors.values()} == {length} and length > 1
    for kind, dtype, rank in (("hidden", np.float32, 3), ("experts", np.int32, 2), ("topk", np.int32, 2)):
        found = {name: value for name, value in tensors.items() if name.startswith(f"{kind}.r.")}
        assert found and all(value.dtype == dtype and value.ndim == rank for value in found.values()), kind


def test_a_single_token_leaves_its_neighbours_alone(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, single = {"prompt_token_ids": [5, 6, 7], "id": "pair"}, {"prompt_token_ids": [5], "id": "one"}
    target = tmp_path / "out.safetensors"
    assert command("--input", write(tmp_path / "pair.jsonl", pair), "--json") == 0
    alone = json.loads(capsys.readouterr().out)["perplexity"]
    assert command("--input", write(tmp_path / "both.jsonl", single, pair), "--output", target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(alone, rel=1e-5)
    assert {name: len(value) for name, value in load_file(target).items()} == {"logits.one": 1, "logits.pair": 3}
    assert command("--input", write(tmp_path / "one.jsonl", single), "--json") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] is None
    assert command("--input", tmp_path / "one.jsonl") == 0
    assert "perplexity none (no token follows another)" in capsys.readouterr().out


def test_bad_records_are_logged_and_counted(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "", "id": "empty"}, "prompt: is empty"),
        ({"prompt_token_ids": [], "id": "none"}, "prompt: is empty"),
        ({"prompt_token_ids": [5, VOCAB], "id": "high"}, "prompt_token_ids[1]: 512"),
        ({"prompt_token_ids": [5] * 385, "id": "long"}, "engine.max_model_len = 384"),
        ({"id": "blank"}, "found none of them"),
    ]
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6]}, *(record for record, _ in bad))
    assert command("--input", source, "--json") == 1
    assert json.loads(capsys.readouterr().out)["requests"] == 6
    for record, words in bad:
        assert [m for m in caplog.messages if m.startswith(f"record {record['id']}: ") and words in m], record
    assert "5 of 6 records failed" in caplog.messages
    assert command("--input", source) == 1
    assert capsys.readouterr().out.startswith("6 records, 5 failed, perplexity ")


def test_a_prompt_that_the_caches_never_hold_fails_alone(
    command: Callable[..., int], parts: EngineParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(parts, "layout", dataclasses.replace(parts.layout, num_blocks=1))
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [5] * 129}, {"prompt_token_ids": [5, 6]})
    assert command("--input", source) == 1
    assert "record 0: prompt: has 129 tokens, the caches hold 128; raise engine.num_blocks" in caplog.messages
    assert "1 of 2 records failed" in caplog.messages


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_without_finite_logits_fails_alone(
    value: float, command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    good, bad = {"prompt_token_ids": [5, 6, 7], "id": "good"}, {"prompt_token_ids": [8, 9, 10], "id": "bad"}
    target = tmp_path / "out.safetensors"
    assert command("--input", write(tmp_path / "good.jsonl", good), "--json") == 0
    alone = json.loads(capsys.readouterr().out)["perplexity"]

    def spoil(result: Score) -> None:
        if result.token_ids[0] == 8:
            result.logits[1, 40] = value  # of a token that is not asked for

    replace_scores(monkeypatch, spoil)
    assert command("--input", write(tmp_path / "in.jsonl", bad, good), "--output", target, "--json") == 1
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(alone, rel=1e-5)
    assert load_file(target).keys() == {"logits.good"}
    assert "record bad: the model's logits are not finite at 1 of 3 positions, from 1" in caplog.messages
    assert "1 of 2 records failed" in caplog.messages


def test_a_perplexity_beyond_a_float_is_null(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sharpen(result: Score) -> None:
        result.logits[:] = 0
        result.logits[:, 3] = 800  # 800 nats for every other token

    replace_scores(monkeypatch, sharpen)
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6, 7]})
    assert command("--input", source, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"requests": 1, "perplexity": None, "feed": "whole"}
    assert command("--input", source) == 0
    assert "perplexity too large for a number (exp of 800.0 nats a token)" in capsys.readouterr().out


def test_equal_ids_lose_no_tensor(
    command: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", "a", "a.1", "\ud800"]
    source = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [5] * (n + 1), "id": i} for n, i in enumerate(names)))
    target = tmp_path / "out.safetensors"
    assert command("--input", source, "--output", target) == 0
    lengths = {name: len(value) for name, value in load_file(target).items()}
    assert lengths == {"logits.a": 1, "logits.a.2": 2, "logits.a.1": 3, "logits.\\ud800": 4}
    renamed = [message for message in caplog.messages if "tensors are named" in message]
    assert renamed == ["record a: its tensors are named a.2", "record \\ud800: its tensors are named \\ud800"]


@given(st.lists(st.sampled_from(["a", "a.1", "a.2", "a.1.1", "b", ""]) | st.text(max_size=3), max_size=12))
def test_tensor_names_are_distinct_and_keep_the_first_of_each_id(ids: list[str]) -> None:
    names = score.tensor_names(ids)
    assert len(names) == len(ids) == len(set(names))
    for index, (identity, name) in enumerate(zip(ids, names, strict=True)):
        assert (name == identity) == (identity not in ids[:index])
        assert name == identity or name not in ids


def test_an_empty_input_is_no_request_and_loads_no_model(
    no_model: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.safetensors"
    source.write_text("\n")
    assert no_model("--input", source, "--output", target, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"requests": 0, "perplexity": None, "feed": "whole"}
    assert load_file(target) == {}


def test_files_are_checked_before_the_model_is_loaded(
    no_model: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"})
    text = source.read_text()
    (tmp_path / "soft").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for argv, words in (
        (["--output", tmp_path / "x"], "nothing to score; give --input"),
        (["--input", source, "--output", source], "is also the input"),
        (["--input", source, "--output", tmp_path / "soft"], "is also the input"),
        (["--input", source, "--output", tmp_path / "hard"], "is also the input"),
        (["--set", f"generate.input={source}", "--output", source], "is also the input"),
        (["--input", source, "--output", tmp_path], "is not a regular file"),
        (["--input", source, "--output", tmp_path / "pipe"], "is not a regular file"),
        (["--input", source, "--output", tmp_path / "loop"], "loop: cannot be written"),
        (["--input", source, "--output", tmp_path / "no" / "x"], "x: cannot be written: No such file"),
        (["--input", source, "--output", source / "x"], "x: cannot be written: Not a directory"),
    ):
        before = sorted(tmp_path.iterdir())
        assert no_model(*argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err.splitlines()[-1], err
        assert sorted(tmp_path.iterdir()) == before
    assert source.read_text() == text and (tmp_path / "pipe").is_fifo()


def test_a_link_stays_a_link_and_modes_are_kept(command: Callable[..., int], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6]})
    real, link, dangling = tmp_path / "real", tmp_path / "link", tmp_path / "dangling"
    real.write_text("old")
    real.chmod(0o604)
    link.symlink_to(real)
    (tmp_path / "folder").mkdir()
    dangling.symlink_to(tmp_path / "folder" / "new")
    previous = os.umask(0o026)
    try:
        assert command("--input", source, "--output", link) == 0
        assert command("--input", source, "--output", dangling) == 0
    finally:
        os.umask(previous)
    assert link.readlink() == real and dangling.readlink() == tmp_path / "folder" / "new"
    assert load_file(real).keys() == load_file(dangling).keys() == {"logits.0"}
    assert stat.S_IMODE(real.stat().st_mode) == 0o604
    assert stat.S_IMODE(dangling.stat().st_mode) == 0o640
    assert not [*tmp_path.rglob("*.partial")]


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), OSError(28, "No space left on device")])
def test_a_write_that_fails_keeps_the_old_output(
    error: Exception, command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, target = write(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6]}), tmp_path / "out.safetensors"
    target.write_text("old")

    def full(tensors: dict[str, np.ndarray], path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(score, "save_file", full)
    assert command("--input", source, "--output", target) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: output {target}: cannot be written: ") and "No space left on device" in last
    assert target.read_text() == "old" and sorted(tmp_path.iterdir()) == [source, target]
