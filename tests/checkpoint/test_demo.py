"""The bundled demo checkpoint: complete, small, and of every kind of layer that the release has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from di_jax.chat import ChatEncoder
from di_jax.checkpoint import demo
from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.tokenizer import Tokenizer
from scripts.train_demo.architecture import BUDGET_BYTES, config_json

ROOT = Path(__file__).parents[2]
FOLDER = demo_checkpoint()
CONFIG = ModelConfig.from_file(FOLDER)


def test_it_is_complete_and_within_its_budget() -> None:
    with open_checkpoint(FOLDER, CONFIG) as reader:
        assert reader.has_draft and not reader.has_vision
        assert len(reader.headers) > 1  # the index path is exercised by whoever runs the demo
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= BUDGET_BYTES


def test_config_has_every_kind_of_layer_of_the_release() -> None:
    release = ModelConfig.from_file(ROOT / "tests" / "golden" / "config_real.json")
    assert {plan.kind for plan in CONFIG.layers} >= {plan.kind for plan in release.layers}
    assert CONFIG.quantization == release.quantization and CONFIG.hc_mult == release.hc_mult
    assert CONFIG.num_nextn_predict_layers == release.num_nextn_predict_layers
    assert CONFIG.dspark_block_size == release.dspark_block_size


def test_its_architecture_is_the_one_that_the_scripts_train() -> None:
    text = json.loads((FOLDER / "config.json").read_text())["text_config"]
    made = config_json(text["vocab_size"], text["engram_compressed_vocab_size"], text["dspark_noise_token_id"])
    assert json.loads((FOLDER / "config.json").read_text()) == made


def test_tokenizer_fits_and_speaks_chat() -> None:
    tokenizer = Tokenizer.from_folder(FOLDER, CONFIG)
    EngramTables.build(CONFIG, tokenizer.raw)
    assert not set(ChatEncoder(FOLDER).missing_spellings) - {"<｜image｜>"}


def test_an_installation_without_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="bundled demo checkpoint"):
        demo_checkpoint()
