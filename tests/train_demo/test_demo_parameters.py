"""Training sees the values that the checkpoint will hold; weights travel and come back."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from di_jax.checkpoint.writer import write_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import Fp4Block, Fp8Block, StraightThrough, fake_quantize_weight
from scripts.train_demo import export
from scripts.train_demo.architecture import config_json
from scripts.train_demo.export import tensors
from scripts.train_demo.parameters import Params, builder, from_checkpoint, initial, load_parts, save_parts
from scripts.train_demo.train_draft import draft_builder

RAW = config_json(256, 256, 255)
CONFIG = ModelConfig.from_dict(RAW)
NUMERICS = Numerics.training()
FP8_PLACES = ("attn.wq_a", "attn.wo_b", "shared_experts.w1", "indexers.wq_b", "engrams.wkv")


@pytest.fixture(scope="module")
def params() -> Params:
    tables = EngramTables.build(CONFIG, np.arange(256, dtype=np.int32))
    found = initial(CONFIG, builder(CONFIG, NUMERICS, tables)[1], seed=3)
    draft = initial(CONFIG, draft_builder(CONFIG, NUMERICS)[1], seed=4)
    return found | {f"draft.{path}": value for path, value in draft.items()}


@pytest.mark.slow
def test_the_exported_values_are_those_that_training_used(params: Params, tmp_path: Path) -> None:
    host = {path: np.asarray(value) for path, value in params.items()}
    write_checkpoint(tmp_path / "demo", RAW, tensors(CONFIG, host), include_mtp=True)
    stored = from_checkpoint(tmp_path / "demo", CONFIG) | from_checkpoint(tmp_path / "demo", CONFIG, draft=True)
    assert stored.keys() == params.keys()
    checked = set()
    for path, value in params.items():
        if ".experts." in path:
            storage = "fp4"
        elif path.startswith("engram_tables"):
            storage = "rows"
        elif any(place in path for place in FP8_PLACES):
            storage = "fp8"
        else:
            continue
        checked.add(storage)
        np.testing.assert_array_equal(stored[path], np.asarray(fake_quantize_weight(value, storage)), err_msg=path)
    assert checked == {"fp4", "fp8", "rows"}


def test_weights_travel_in_small_files(params: Params, tmp_path: Path) -> None:
    files = save_parts(tmp_path, params, "weights")
    assert all(f.stat().st_size <= 16 * 2**20 for f in files)
    back = load_parts(files)
    assert back.keys() == params.keys()
    for path, value in params.items():
        error = np.abs(back[path] - np.asarray(value)).max() / max(1e-9, float(np.abs(value).max()))
        assert error <= 2**-4, path
    assert back["layers.attn.q_norm.weight"].shape == params["layers.attn.q_norm.weight"].shape


@pytest.mark.parametrize("storage", ["fp4", "fp8", "rows", "bf16"])
def test_the_gradient_passes_straight_through(storage: str) -> None:
    weight = jax.random.normal(jax.random.key(0), (64, 96))
    toward = jax.random.normal(jax.random.key(1), weight.shape)
    gradient = jax.grad(lambda w: jnp.vdot(fake_quantize_weight(w, storage), toward))(weight)
    np.testing.assert_allclose(gradient, toward, rtol=1e-6)
    assert np.abs(fake_quantize_weight(weight, storage) - weight).max() > 0


@pytest.mark.parametrize("codec", [Fp8Block(), Fp4Block()])
def test_a_straight_through_cache_stores_what_the_codec_gives_back(codec: Fp8Block | Fp4Block) -> None:
    x = jax.random.normal(jax.random.key(2), (5, 64))
    training = StraightThrough(codec)
    np.testing.assert_array_equal(training.decode(training.encode(x)), codec.decode(codec.encode(x)))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(training.encode(x)))(x), jnp.ones_like(x))


def test_the_unquantized_export_holds_the_masters_in_bfloat16(params: Params, tmp_path: Path) -> None:
    files = save_parts(tmp_path, params, "weights")
    (tmp_path / "config.json").write_text(json.dumps(RAW), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    words = ["--data", str(tmp_path), "--weights", *map(str, files), "--out"]
    for folder, extra in (("plain", ["--unquantized"]), ("quantized", [])):
        assert export.main([*words, str(tmp_path / folder), *extra]) == 0
    masters, path = load_parts(files), "layers.attn.wq_a.weight"
    plain, quantized = (
        from_checkpoint(tmp_path / folder, ModelConfig.from_file(tmp_path / folder))
        for folder in ("plain", "quantized")
    )
    for name, value in plain.items():
        np.testing.assert_allclose(value, masters[name], rtol=2**-8, err_msg=name)
    assert np.abs(quantized[path] - masters[path]).max() > 2 * np.abs(plain[path] - masters[path]).max()
