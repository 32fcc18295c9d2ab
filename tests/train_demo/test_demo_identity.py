"""scripts/train_demo/identity.py: results are kept by what they depend on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.checkpoint.reader import open_checkpoint
from scripts.train_demo.identity import data_digest, weights_digest

RESULTS = Path(__file__).parents[2] / "scripts" / "results"


def test_the_committed_evaluation_is_of_the_bundled_weights() -> None:
    kept = json.loads((RESULTS / "demo-eval.json").read_text(encoding="utf-8"))
    assert kept["weights_sha256"] == weights_digest(demo_checkpoint())


@pytest.mark.parametrize(("name", "counts"), [("norm.weight", True), ("mtp.0.main_norm.weight", False)])
def test_another_draft_is_the_same_answers(tmp_path: Path, name: str, counts: bool) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "copy")
    with open_checkpoint(tmp_path / "copy") as reader:
        entry = reader.entries[name]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            first = file.read(1)
            file.seek(entry.offset)
            file.write(bytes([first[0] ^ 1]))
    assert (weights_digest(tmp_path / "copy") != weights_digest(demo_checkpoint())) == counts


def test_another_tokenizer_is_not(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "copy")
    with (tmp_path / "copy" / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert weights_digest(tmp_path / "copy") != weights_digest(demo_checkpoint())


def test_data_made_again_is_the_same_data(tmp_path: Path) -> None:
    def digest(**manifest: object) -> str:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        return data_digest(tmp_path)

    first = digest(seconds=1.0, sha256={"a": "1", "b": "2"})
    assert first == digest(seconds=2.0, sha256={"b": "2", "a": "1"}) != digest(sha256={"a": "1", "b": "3"})
