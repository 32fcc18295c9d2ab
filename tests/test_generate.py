"""The generate command: records in, records out, exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from di_jax import run
from di_jax.commands import generate
from di_jax.commands.records import Record, parse_record, read_records
from di_jax.config import Config
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.errors import UserError
from di_jax.llm import LLM

RECORD = {"id", "prompt_token_ids", "outputs", "metrics", "seq_seed"}
METRICS = {
    "num_cached_tokens", "decode_steps", "drafted_tokens", "verified_tokens", "accepted_tokens", "accept_rate",
    "accepted_length", "verified_length", "decode_ppl", "confidence_error", "ttft_s", "total_s",
}  # fmt: skip
SUMMARY = {
    "requests", "failed", "prompt_tokens", "output_tokens", "wall_s", "compiles_after_warmup", "tokens_per_s",
}  # fmt: skip


@pytest.fixture
def config_file(tiny_config: Config, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config.with_values({"generate.prompts": ["The river", "A stone"]}).to_yaml())
    return path


@pytest.fixture
def command(llm: LLM, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`generate` with arguments, run in the shared engine."""

    @contextlib.contextmanager
    def shared(config: Config) -> Iterator[LLM]:
        assert config.engine == llm.config.engine
        llm.engine.compiles_when_ready = COMPILATIONS.count  # other tests of this process may have compiled
        yield llm

    monkeypatch.setattr(generate, "LLM", shared)
    return lambda *argv: run.main(["generate", "--config", str(config_file), *map(str, argv)])


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_records_of_the_contract(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "The river", "id": "first"},
        {"prompt_token_ids": [5, 6, 7], "sampling": {"max_tokens": 3, "n": 2, "temperature": 1, "seq_seed": 9}},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert command("--input", source, "--json") == 0
    out, err = capsys.readouterr()
    first, second, summary = records(out)
    assert set(first) == set(second) == RECORD and set(first["metrics"]) == METRICS and set(summary) == SUMMARY
    assert (first["id"], second["id"], second["seq_seed"]) == ("first", "1", 9)
    assert second["prompt_token_ids"] == [5, 6, 7]
    assert [o["index"] for o in second["outputs"]] == [0, 1]
    for output in (*first["outputs"], *second["outputs"]):
        assert set(output) == {"index", "text", "token_ids", "finish_reason", "cumulative_logprob"}
        assert output["finish_reason"] in ("stop", "length")
    assert (summary["requests"], summary["failed"]) == (2, 0)
    assert summary["prompt_tokens"] == len(first["prompt_token_ids"]) + 3
    assert summary["output_tokens"] == sum(len(o["token_ids"]) for o in (*first["outputs"], *second["outputs"]))
    assert summary["compiles_after_warmup"] == 0
    assert summary["tokens_per_s"] == pytest.approx(summary["output_tokens"] / summary["wall_s"])
    assert "prompt tokens" not in err


def test_seven_answers_and_one_error(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": f"number {n}"}) for n in range(8)]
    lines[5] = '{"prompt": "unfinished'
    source.write_text("\n".join(lines))
    assert command("--input", source, "--output", target, "--json") == 1
    out, _ = capsys.readouterr()
    results = records(target.read_text())
    assert [r["id"] for r in results] == [str(n) for n in range(8)]
    assert ["error" in r for r in results] == [n == 5 for n in range(8)]
    assert set(results[5]) == {"id", "error"} and set(results[5]["error"]) == {"type", "message"}
    assert "line 6: not readable as JSON" in results[5]["error"]["message"]
    summary = records(out)
    assert len(summary) == 1 and (summary[0]["requests"], summary[0]["failed"]) == (8, 1)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt_token_ids": [5, 512]}, "prompt_token_ids[1]: 512"),
        ({"prompt_token_ids": [5] * 384}, "engine.max_model_len = 384"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "<｜User｜>"),
        ({"prompt": "a", "sampling": {"so_args": {}}}, "sampling.so_args: {} is not available yet"),
        ({"prompt": "a", "sampling": [1]}, "sampling: expected an object, found list"),
        ({"prompt": "a", "samplng": {}}, "samplng: unknown field; did you mean sampling?"),
        ({"prompt": "a", "messages": []}, "found prompt and messages"),
        ({"id": "mine"}, "expected one of prompt, prompt_token_ids, messages, found none of them"),
        ({"prompt": "a", "id": [1]}, "id: expected text, found list"),
        (["prompt"], "expected an object, found list"),
        ("prompt", "expected an object, found str"),
    ],
)
def test_a_bad_record_has_an_error_of_its_own(
    record: Any, words: str, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(record) + "\n" + json.dumps({"prompt": "fine"}) + "\n")
    assert command("--input", source) == 1
    bad, good = records(capsys.readouterr().out)
    assert bad["error"]["type"] == "invalid_request" and words in bad["error"]["message"], bad
    assert bad["id"] == ("mine" if isinstance(record, dict) and record.get("id") == "mine" else "0")
    assert good["outputs"][0]["token_ids"] and good["id"] == "1"


def test_prompts_of_the_command_line_and_of_the_config(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    out, err = capsys.readouterr()
    assert len(records(out)) == 2
    assert "'The river'" in err and "8 output tokens, length" in err and "tokens/s" in err
    assert "2 requests, 0 failed" in err
    assert command("--prompt", "one", "--prompt", "", "--prompt", "three", "--json") == 1
    one, empty, three, summary = records(capsys.readouterr().out)
    assert [r["id"] for r in (one, empty, three)] == ["0", "1", "2"] and "error" in empty
    assert (summary["requests"], summary["failed"]) == (3, 1)


def test_an_input_of_the_config(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "id": 7}\r\n')
    assert command("--set", "generate.prompts=null", "--set", f"generate.input={source}") == 0
    assert [r["id"] for r in records(capsys.readouterr().out)] == ["7"]


def no_model(config: Config) -> LLM:
    raise AssertionError("loaded")


def test_an_empty_input_is_no_request_and_loads_no_model(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "LLM", no_model)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target.write_text("old\n")
    for text in ("", "\n"):
        source.write_text(text)
        assert run.main(["--config", str(config_file), "--input", str(source), "--json", "--output", str(target)]) == 0
        (summary,) = records(capsys.readouterr().out)
        assert set(summary) == SUMMARY and not any(summary.values())
        assert target.read_text() == ""


def test_files_are_checked_before_the_model_is_loaded(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "LLM", no_model)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    for argv, words in (
        (["--input", tmp_path / "none.jsonl"], "none.jsonl: cannot be read: No such file"),
        (["--input", tmp_path], "cannot be read: Is a directory"),
        (["--prompt", "a", "--output", tmp_path / "no" / "out.jsonl"], "out.jsonl: cannot be written: No such file"),
        (["--prompt", "a", "--output", tmp_path], "cannot be written: Is a directory"),
        (["--input", source, "--output", source], "is also the input"),
        (["--set", "generate.prompts=null"], "nothing to answer; give --input, --prompt"),
    ):
        assert run.main(["--config", str(config_file), *map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err.splitlines()[-1], err
    assert source.read_text() == '{"prompt": "a"}'


def test_an_old_output_is_kept_until_the_model_is_loaded(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("hours of work\n" * 1000)
    for error, code in ((UserError("model.path: no such folder"), 2), (KeyboardInterrupt(), 130)):

        def fail(config: Config, error: BaseException = error) -> LLM:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(generate, "LLM", fail)
            assert command("--output", target) == code
        assert target.read_text() == "hours of work\n" * 1000
    assert command("--output", target) == 0
    assert [r["id"] for r in records(target.read_text())] == ["0", "1"], "nothing of the old content is left"
    capsys.readouterr()


def test_an_output_that_is_full_is_one_line(
    command: Callable[..., int], llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--output", "/dev/full") == 2
    out, err = capsys.readouterr()
    message = "error: output /dev/full: cannot be written: No space left on device; the lines before are in it"
    assert out == "" and err.splitlines()[-1] == message
    (ledger,) = llm.engine.scheduler.ledgers
    assert not llm.engine.requests and ledger.num_free_blocks == ledger.num_blocks


def test_an_output_that_fails_when_it_is_closed_is_no_success(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Network file systems report a full disk at close."""

    target = tmp_path / "out.jsonl"
    real = Path.open

    class Late(io.TextIOWrapper):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def opened(path: Path, *args: Any, **keywords: Any) -> Any:
        return Late(io.FileIO(path, "a")) if path == target else real(path, *args, **keywords)

    monkeypatch.setattr(Path, "open", opened)
    assert command("--output", target) == 2
    assert "out.jsonl: cannot be written: Disk quota exceeded" in capsys.readouterr().err.splitlines()[-1]


def test_the_input_under_another_name_is_no_output(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "LLM", no_model)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    (tmp_path / "soft.jsonl").symlink_to(source)
    (tmp_path / "hard.jsonl").hardlink_to(source)
    for name in ("soft.jsonl", "hard.jsonl"):
        argv = ["--config", str(config_file), "--input", str(source), "--output", str(tmp_path / name)]
        assert run.main(argv) == 2
        assert "is also the input" in capsys.readouterr().err.splitlines()[-1]
        assert source.read_text() == '{"prompt": "a"}'


def test_text_that_the_output_cannot_hold_is_escaped(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "id": "\\ud800"}\n{"prompt": "a", "id": "ü"}\n', encoding="utf-8")
    target = tmp_path / "out.jsonl"
    assert command("--input", source, "--output", target) == 0
    text = target.read_text(encoding="utf-8")
    assert [r["id"] for r in records(text)] == ["\ud800", "ü"]
    assert '"\\ud800"' in text and '"ü"' in text


def test_records_before_an_interrupt_are_written(
    command: Callable[..., int], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step
    calls: list[int] = []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "sampling": {"max_tokens": 3}}, {"prompt": "b", "sampling": {"max_tokens": 90}}]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert command("--input", source, "--output", target) == 130
    assert [r["id"] for r in records(target.read_text())] == ["0"]
    (ledger,) = llm.engine.scheduler.ledgers
    assert not llm.engine.requests and ledger.num_free_blocks == ledger.num_blocks


def test_lines_that_are_no_text() -> None:
    assert str(parse_record(b"\xff\xfe{}", 3, 9).error).startswith("line 9: not readable as JSON")
    assert str(parse_record(b"[" * 100_000, 3, 9).error).startswith("line 9: not readable as JSON")
    assert parse_record(b'{"prompt": "a", "sampling": null}', 3, 9) == Record("3", {"prompt": "a"})


def test_messages_count_lines_and_ids_count_records(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf\n\r\n{"prompt": "a"}\r\n\n[]\n  \n{"prompt": "b"}\n{')
    found = read_records(source)
    assert [record.id for record in found] == ["0", "1", "2", "3"]
    assert found[1].error == "line 5: expected an object, found list"
    assert str(found[3].error).startswith("line 8: not readable as JSON")


def test_an_id_of_null_is_no_id() -> None:
    assert parse_record(b'{"prompt": "a", "id": null}', 3, 9) == Record("3", {"prompt": "a"})
    assert parse_record(b'{"prompt": "a", "id": ""}', 3, 9) == Record("", {"prompt": "a"})
    assert parse_record(b'{"prompt": "a", "id": 0}', 3, 9) == Record("0", {"prompt": "a"})
    assert parse_record(b'{"prompt": "a", "id": false}', 3, 9).error == "id: expected text, found bool"
