"""The bundled demo data and the checkpoint made from it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer

from di_jax.checkpoint import demo
from di_jax.checkpoint.demo import default_cache_dir, demo_checkpoint, demo_data, demo_key
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables

ROOT = Path(__file__).parents[2]
DATA = ROOT / "di_jax" / "checkpoint" / "demo_data"
CONFIG = ModelConfig.from_file(DATA)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return demo_checkpoint(cache)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# ---- bundled data ----


def test_bundled_data_is_small_and_complete() -> None:
    assert sum(p.stat().st_size for p in DATA.iterdir()) < 400_000
    assert set(demo_data()) <= {p.name for p in DATA.iterdir()}


def test_config_has_every_kind_of_layer_of_the_release() -> None:
    release = ModelConfig.from_file(ROOT / "tests" / "golden" / "config_real.json")

    assert {plan.kind for plan in CONFIG.layers} == {plan.kind for plan in release.layers}
    assert CONFIG.quantization == release.quantization
    assert CONFIG.hc_mult == release.hc_mult and CONFIG.image_token_id is None
    assert CONFIG.num_nextn_predict_layers == 2 and CONFIG.max_position_embeddings == 65536


def test_tokenizer_and_config_belong_together() -> None:
    raw = RawTokenizer.from_file(str(DATA / "tokenizer.json"))
    tables = EngramTables.build(CONFIG, raw)  # checks the compressed vocabulary and the row counts
    assert tables.token_map.shape == (CONFIG.vocab_size,)
    assert raw.get_vocab_size() <= CONFIG.dspark_noise_token_id < CONFIG.vocab_size
    assert [raw.id_to_token(i) for i in range(3)] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    settings = json.loads((DATA / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == raw.id_to_token(CONFIG.bos_token_id)
    assert settings["eos_token"] == raw.id_to_token(CONFIG.eos_token_id)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_demo_tokenizer", ROOT / "scripts" / "make_demo_tokenizer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bundled_config_is_what_the_script_makes_for_the_bundled_tokenizer(script: Any) -> None:
    raw = RawTokenizer.from_file(str(DATA / "tokenizer.json"))
    assert script.model_config(raw) == json.loads((DATA / "config.json").read_text())
    assert {*script.MARKERS, *script.VISIBLE, script.BOS, script.EOS, script.PAD} == {
        token.content for token in raw.get_added_tokens_decoder().values()
    }


def test_corpus_is_large_and_repeats(script: Any) -> None:
    corpus = list(script.docstrings())
    assert sum(map(len, corpus)) > 500_000 and corpus == list(script.docstrings())


def test_the_script_makes_equal_files_twice_and_refuses_to_change_them(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a part of the corpus, for speed. The bundled files follow the Python version they were trained with."""
    monkeypatch.setattr(script, "docstrings", lambda: iter([json.__doc__, argparse.__doc__, subprocess.__doc__] * 9))
    folder = ["--folder", str(tmp_path)]
    assert script.main([*folder, "--check"]) == 1 and list(tmp_path.iterdir()) == []
    assert script.main(folder) == 0
    before = contents(tmp_path)
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json", "provenance.json"}
    assert script.main(folder) == script.main([*folder, "--check"]) == 0

    (tmp_path / "tokenizer.json").write_text("{}")
    for option in ([], ["--check"]):
        capsys.readouterr()
        assert script.main([*folder, *option]) == 1
        assert "tokenizer.json: differs" in capsys.readouterr().err
        assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert script.main([*folder, "--force"]) == 0
    assert contents(tmp_path) == before


# ---- the checkpoint ----


def test_checkpoint_is_whole_and_in_the_released_format(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert {p.name for p in folder.glob("*.safetensors")} == shards
    for name, content in demo_data().items():
        if name == "config.json":
            assert json.loads((folder / name).read_text()) == json.loads(content)
        else:
            assert (folder / name).read_bytes() == content
    with open_checkpoint(folder) as reader:  # checks names, dtypes and shapes
        experts = reader.read("layers.3.ffn.experts.5.w1.weight")
        table = reader.read("layers.1.engram.embed.weight")
    assert experts.shape == (CONFIG.moe_intermediate_size, CONFIG.hidden_size // 2)  # packed fp4
    assert len(np.unique(experts)) > 100
    assert table.shape == (CONFIG.engram_num_embeddings[0], CONFIG.engram_head_dim) and table.dtype.itemsize == 1


def test_second_call_finds_the_first_result(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(demo, "write_checkpoint", fail)
    assert demo_checkpoint(cache) == folder
    with pytest.raises(AssertionError, match="made again"):
        demo_checkpoint(cache / "elsewhere")


def test_two_processes_at_once_agree(folder: Path, tmp_path: Path) -> None:
    """Both succeed with the same folder, equal to the one made elsewhere, and leave nothing beside it."""
    code = (
        "import sys; from pathlib import Path; from di_jax.checkpoint.demo import demo_checkpoint; "
        "print(demo_checkpoint(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs == [str(tmp_path / folder.name)] * 2
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    assert contents(tmp_path / folder.name) == contents(folder)


def test_losing_the_race_keeps_the_winner(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finishes between our check and our rename."""
    write = demo.write_checkpoint
    winner = tmp_path / folder.name

    def slow_write(*arguments: object, **options: object) -> None:
        write(*arguments, **options)  # type: ignore[arg-type]
        winner.mkdir()
        for name, content in contents(folder).items():
            (winner / name).write_bytes(content)
        (winner / "winner").touch()

    monkeypatch.setattr(demo, "write_checkpoint", slow_write)
    assert demo_checkpoint(tmp_path) == winner
    assert (winner / "winner").exists()
    assert list(tmp_path.iterdir()) == [winner]


@pytest.mark.parametrize("lost", ["model.safetensors.index.json", "tokenizer.json", "model-00002*"])
def test_a_checkpoint_that_lost_a_file_is_made_again(folder: Path, tmp_path: Path, lost: str) -> None:
    damaged = tmp_path / folder.name
    damaged.mkdir()
    for name, content in contents(folder).items():
        (damaged / name).write_bytes(content)
    assert demo_checkpoint(tmp_path) == damaged  # whole: taken as it is
    (victim,) = damaged.glob(lost)
    victim.unlink()
    assert demo_checkpoint(tmp_path) == damaged
    assert contents(damaged) == contents(folder)
    assert list(tmp_path.iterdir()) == [damaged]


def test_an_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = demo.random_tensors

    def interrupted(config: ModelConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        for n, item in enumerate(tensors(config, seed)):
            if n == 20:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(demo, "random_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/cache: the demo checkpoint cannot be written there"):
        demo_checkpoint(tmp_path / "file" / "cache")


def test_key_follows_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = demo_data()
    keys = {demo_key(data), demo_key({**data, "config.json": data["config.json"] + b" "})}
    # Moving bytes from one file to the next is another content too.
    keys.add(demo_key({**data, "config.json": b"", "tokenizer.json": data["config.json"] + data["tokenizer.json"]}))
    monkeypatch.setattr(demo, "GENERATOR_VERSION", demo.GENERATOR_VERSION + 1)
    keys.add(demo_key(data))
    assert len(keys) == 4


def test_default_cache_dir_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "di_jax"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "di_jax"
