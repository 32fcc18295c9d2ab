"""`model.path`: a folder, the demo, a hub id from the cache; nothing here reaches a network."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.hub import resolve_checkpoint

RESOLVE = """
import sys
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.hub import resolve_checkpoint
try:
    print(resolve_checkpoint(sys.argv[1], sys.argv[2] or None))
except CheckpointError as error:
    print("refused:", error)
"""


def resolve_offline(hub_home: Path, path: str, revision: str = "") -> str:
    """In a process of its own: the hub library reads its environment at import."""
    environment = {**os.environ, "HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_home / "hub")}
    command = [sys.executable, "-c", RESOLVE, path, revision]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def hub_home(tmp_path: Path) -> Path:
    """A hub cache that holds owner/model at branch main and at tag v1."""
    repository = tmp_path / "hub" / "models--owner--model"
    for reference, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    return tmp_path


def test_local_folder(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_checkpoint(tiny) == tiny
    assert resolve_checkpoint(str(tiny), None) == tiny
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        resolve_checkpoint(tiny, "v1")
    assert "model.revision 'v1' is ignored" in caplog.text


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/weights") == tmp_path / "weights"


def test_demo_comes_from_its_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("di_jax.checkpoint.demo.demo_checkpoint", lambda: tmp_path)
    assert resolve_checkpoint("demo") == tmp_path


@pytest.mark.parametrize("path", ["/no/such/folder", "plain-name", "a/b/c", "./owner/model", "owner/", "owner/mo del"])
def test_neither_folder_nor_hub_id(path: str) -> None:
    with pytest.raises(CheckpointError, match=r"model\.path.*neither") as caught:
        resolve_checkpoint(path)
    assert repr(path) in str(caught.value)


def test_a_file_is_not_a_checkpoint(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.path.*is a file"):
        resolve_checkpoint(tiny / "model.safetensors")


def test_hub_id_offline_from_the_cache(hub_home: Path) -> None:
    assert resolve_offline(hub_home, "owner/model").endswith("a" * 40)
    assert resolve_offline(hub_home, "owner/model", "v1").endswith("b" * 40)


def test_hub_id_offline_and_not_cached(hub_home: Path) -> None:
    for path, revision in (("owner/other", ""), ("owner/model", "v2")):
        answer = resolve_offline(hub_home, path, revision)
        assert answer.startswith("refused: model.path:") and repr(path) in answer and "not in the local cache" in answer


def test_only_top_level_weights_and_json_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **arguments: object) -> str:
        asked.update(arguments, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_checkpoint("owner/model", "abc") == tmp_path
    assert (asked["repository"], asked["revision"]) == ("owner/model", "abc")
    listing = [
        "config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00048.safetensors",
        "inference/config.json", "encoding/fixtures/a.json", "README.md", "assets/report.pdf", "inference/model.py",
    ]  # fmt: skip
    kept = filter_repo_objects(
        listing, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == listing[:4]


@pytest.mark.parametrize("error", [OSError("connection refused"), ValueError])
def test_a_failed_fetch_names_the_field(monkeypatch: pytest.MonkeyPatch, error: Exception | type[Exception]) -> None:
    from huggingface_hub.errors import HFValidationError

    def fail(*_: object, **__: object) -> str:
        raise HFValidationError("bad id") if error is ValueError else error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"model\.path.*'owner/model'.*failed: (connection refused|bad id)"):
        resolve_checkpoint("owner/model")
