"""The command line: dispatch, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import yaml

from di_jax import run
from di_jax.config import COMMANDS, Config, load_config
from di_jax.errors import UserError

Command = Callable[[Config, argparse.Namespace], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Command], None]:
    """Puts a function in the place of `di_jax.commands.<name>.run`."""

    def install(name: str, function: Command) -> None:
        module = types.ModuleType(f"di_jax.commands.{name}")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "di_jax.commands", types.ModuleType("di_jax.commands"))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


@pytest.fixture
def calls(command: Callable[[str, Command], None]) -> list[tuple[str, Config, argparse.Namespace]]:
    """What the commands were called with; each returns 0."""
    seen: list[tuple[str, Config, argparse.Namespace]] = []

    def recorder(name: str) -> Command:
        def record(config: Config, args: argparse.Namespace) -> int:
            seen.append((name, config, args))
            return 0

        return record

    for name in run.OPTIONS:
        command(name, recorder(name))
    return seen


def exit_code(argv: list[str]) -> int:
    """The exit code, also where argparse exits by itself."""
    try:
        return run.main(argv)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_the_command_is_the_argument_else_the_configs_else_generate(
    calls: list[tuple[str, Config, argparse.Namespace]], tmp_path: Path
) -> None:
    (tmp_path / "scores.yaml").write_text("command: score")
    (tmp_path / "empty.yaml").write_text("")
    assert run.main(["--config", str(tmp_path / "scores.yaml")]) == 0
    assert run.main(["bench", "--config", str(tmp_path / "scores.yaml")]) == 0
    assert run.main(["--config", str(tmp_path / "scores.yaml"), "generate"]) == 0
    assert run.main(["--config", str(tmp_path / "empty.yaml")]) == 0
    assert [name for name, _, _ in calls] == ["score", "bench", "generate", "generate"]
    assert [config.command for _, config, _ in calls] == ["score", "bench", "generate", "generate"]


def test_arguments_reach_the_command(calls: list[tuple[str, Config, argparse.Namespace]]) -> None:
    argv = "--config quickstart --set engine.max_num_seqs=3 --json --prompt one generate --prompt two --output o.jsonl"
    assert run.main([*argv.split(), "--set", "model.path=a b"]) == 0
    _, config, args = calls[0]
    assert (config.engine.max_num_seqs, config.model.path) == (3, "a b")
    assert (args.json, args.prompt, args.input, args.output) == (True, ["one", "two"], None, Path("o.jsonl"))
    assert run.main(["score", "--config", "quickstart", "--input", "in.jsonl", "--output", "out.safetensors"]) == 0
    _, _, args = calls[1]
    assert (args.json, args.prompt, args.input, args.output) == (False, [], Path("in.jsonl"), Path("out.safetensors"))
    assert run.main(["generate", "--config", "quickstart", "--prompt", ""]) == 0
    assert calls[2][2].prompt == [""]
    assert (calls[2][2].dump, calls[2][2].judge_only) == (None, None)
    assert run.main(["eval", "--config", "quickstart", "--dump", "d.jsonl"]) == 0
    assert run.main(["eval", "--config", "quickstart", "--judge-only", "d.jsonl"]) == 0
    assert (calls[3][2].dump, calls[4][2].judge_only) == (Path("d.jsonl"), Path("d.jsonl"))


def test_the_resolved_config_is_printed_to_stderr(
    calls: list[tuple[str, Config, argparse.Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--config", "ep8", "--set", "engine.max_num_seqs=9"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert Config.from_dict(yaml.safe_load(err)) == calls[0][1] == load_config("ep8", ["engine.max_num_seqs=9"])


@pytest.mark.parametrize("code", [0, 1])
def test_the_commands_exit_code_is_the_exit_code(code: int, command: Callable[[str, Command], None]) -> None:
    command("generate", lambda config, args: code)
    assert run.main(["--config", "quickstart"]) == code


def test_errors_of_the_user_are_one_line_and_2(
    command: Callable[[str, Command], None], capsys: pytest.CaptureFixture[str]
) -> None:
    class CheckpointError(UserError):
        pass

    def fail(config: Config, args: argparse.Namespace) -> int:
        raise CheckpointError("model.safetensors: tensor x\n  is truncated")

    command("generate", fail)
    assert run.main(["--config", "quickstart"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: model.safetensors: tensor x is truncated"


def test_defects_keep_their_traceback(command: Callable[[str, Command], None]) -> None:
    def fail(config: Config, args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command("generate", fail)
    with pytest.raises(ZeroDivisionError):
        run.main(["--config", "quickstart"])


def test_interrupted(command: Callable[[str, Command], None], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(config: Config, args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command("generate", interrupt)
    assert run.main(["--config", "quickstart"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--config quickstart --set engine.max_seqs=1", ["engine.max_seqs: unknown key", "engine.max_num_seqs"]),
        ("--config nowhere.yaml", ["'nowhere.yaml'", "no such file", "quickstart"]),
        ("generate", ["--config"]),
        ("genrate --config quickstart", ["'genrate'", "did you mean generate?"]),
        ("xyz --config quickstart", ["'xyz'", "expected one of", "conformance"]),
        ("--config quickstart --jsn", ["--jsn"]),
        ("--conf quickstart", ["--conf"]),
        ("--config quickstart --set", ["--set"]),
        ("--config quickstart --prompt a --input b", ["--input and --prompt"]),
        ("score --config quickstart --prompt a", ["--prompt", "score"]),
        ("bench --config quickstart --prompt a", ["--prompt", "bench"]),
        ("bench --config quickstart --input a", ["--input", "bench"]),
        ("eval --config quickstart --output a", ["--output", "eval"]),
        ("generate --config quickstart --dump a", ["--dump is not an option of generate"]),
        ("score --config quickstart --judge-only a", ["--judge-only is not an option of score"]),
        ("eval --config quickstart --dump a --judge-only b", ["--dump and --judge-only are both given"]),
        ("--config quickstart --set sampling.so_args={}", ["sampling.so_args: {} is not available yet"]),
    ],
)
def test_bad_arguments_are_one_line_and_2(
    argv: str,
    words: list[str],
    calls: list[tuple[str, Config, argparse.Namespace]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and not calls
    assert len(err.splitlines()) == 1 and err.startswith("error: ")
    assert all(word in err for word in words), err


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - set(run.OPTIONS)))
def test_commands_to_come(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([name, "--config", "ep64"]) == 2
    available = "generate, score, bench, plan, eval"
    assert capsys.readouterr().err == f"error: {name} is not available yet; this version has {available}\n"
    assert run.main(["--config", "ep64", "--set", f"command={name}"]) == 2


def test_help_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    options = ("--config", "--set", "--json", "--input", "--prompt", "--output", "--dump", "--judge-only")
    assert all(word in text for word in (*COMMANDS, *options))


def test_as_a_program_from_another_folder(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "di_jax.run", "--config", "quickstart.yaml", "--set", "engine.nothing=1"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: engine.nothing: unknown key") and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    code = (
        "import sys, types\n"
        "from di_jax import run\n"
        "module = types.ModuleType('di_jax.commands.generate')\n"
        "module.run = lambda config, args: [print('x' * 1000) for _ in range(1000)] and 0\n"
        "sys.modules['di_jax.commands'] = types.ModuleType('di_jax.commands')\n"
        "sys.modules[module.__name__] = module\n"
        "sys.exit(run.main(['--config', 'quickstart']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 1
    assert "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.parametrize("name", [name for name in run.OPTIONS if name != "plan"])
def test_missing_devices_are_reported_before_anything_else(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ep64 has no prompts, so that `generate` would find nothing to answer; no output file is made either."""
    present = len(jax.devices())
    target = tmp_path / "out"
    for options in ([], ["--dump" if name == "eval" else "--output", str(target)]):
        assert run.main([name, "--config", "ep64.yaml", *options]) == 2
        out, err = capsys.readouterr()
        last = err.splitlines()[-1]
        assert out == "" and f"64 devices asked, {present} present" in last, err
        assert "`plan`" in last and "mesh.simulate_devices" in last
        assert not target.exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["generate", "score"])
def test_a_stdout_that_is_full_is_one_line_and_2(name: str, unbuffered: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    program = [sys.executable, "-m", "di_jax.run", name, "--config", "quickstart", "--input", str(source), "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: stdout: cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


def test_other_errors_of_the_system_keep_their_traceback(command: Callable[[str, Command], None]) -> None:
    def fail(config: Config, args: argparse.Namespace) -> int:
        raise FileNotFoundError("a defect")

    command("generate", fail)
    with pytest.raises(FileNotFoundError, match="a defect"):
        run.main(["--config", "quickstart"])
