"""scripts/inspect_checkpoint.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import Parts

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_checkpoint.py"


@pytest.fixture(scope="module")
def inspect() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name + " "))
    return line[len(name) :].split()


def test_config_alone(inspect: Callable, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(golden / "config_real.json")]) == 0
    text = capsys.readouterr().out
    assert row(text, "total") == ["96,085", "510,286,023,000", "475.24"]
    assert row(text, "routed experts")[:2] == ["92,160", "288,777,830,400"]
    assert row(text, "F8_E8M0")[:2] == ["47,589", "23,563,015,184"]
    assert text.count("\ntotal ") == 2


def test_folder(inspect: Callable, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(tiny)]) == 0
    text = capsys.readouterr().out
    assert row(text, "total")[:2] == ["1,464", "4,855,044"]
    assert "mtp (draft stages): present" in text and "vision: absent" in text


def test_mismatch_exits_1(
    inspect: Callable, damage: Callable[[Callable[[Parts], None]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect([str(damage(lambda parts: parts.pop("norm.weight")))]) == 1
    assert "missing tensor 'norm.weight'" in capsys.readouterr().err


def test_no_such_file(inspect: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(tmp_path / "nowhere.json")]) == 1
    assert "nowhere.json" in capsys.readouterr().err
