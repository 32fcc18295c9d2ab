"""The README stays true: its commands parse, its configs resolve, its numbers are those of the committed results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from di_jax.config import load_config
from di_jax.run import OPTIONS, parse_arguments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^    (python .*)$", README, re.MULTILINE)]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m di_jax.run" in c])
def test_commands_parse_and_their_configs_resolve(command: str) -> None:
    words = shlex.split(command)
    args = parse_arguments(words[words.index("di_jax.run") + 1 :])
    overrides = [*args.set, *([f"command={args.command}"] if args.command else [])]
    config = load_config(args.config, overrides)
    assert config.command in OPTIONS


@pytest.mark.parametrize("command", [c for c in COMMANDS if "scripts/" in c])
def test_scripts_and_their_files_exist(command: str) -> None:
    for word in shlex.split(command)[1:]:
        if not word.startswith("-"):
            assert (ROOT / word).exists(), word


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_performance_table_quotes_the_committed_rows() -> None:
    match = re.search(r"<!-- performance table: (\S+) -->\n(.*?)<!-- end of performance table -->", README, re.DOTALL)
    assert match is not None
    result = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))
    rows = [line for line in match[2].splitlines() if re.match(r"\| (prefill|decode) ", line)]
    latest = max(row["date"] for row in result["rows"])
    committed = {(r["phase"], r["batch"]): r for r in result["rows"] if r["date"] == latest}
    assert len(rows) == len(committed) > 0
    for line in rows:
        phase, batch, speed, step = [cell.strip() for cell in line.strip("|").split("|")][:4]
        row = committed[phase, int(batch)]
        assert float(speed.replace(",", "")) == pytest.approx(row["tokens_per_s"], rel=0.01), line
        assert float(step) == pytest.approx(row["step_ms"], rel=0.01), line
