"""Training sees the values that the checkpoint will hold; weights travel and come back."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.checkpoint.writer import write_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX, DraftModel
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import Fp4Block, Fp8Block, StraightThrough, fake_quantize_weight
from di_jax.model.transformer import parameter_paths
from scripts.train_demo import export
from scripts.train_demo.architecture import config_json
from scripts.train_demo.export import tensors
from scripts.train_demo.parameters import (
    Params,
    TrainingTransformer,
    builder,
    from_checkpoint,
    initial,
    load_parts,
    save_parts,
    storages,
)
from scripts.train_demo.train_draft import draft_builder

RAW = config_json(256, 256, 255)
CONFIG = ModelConfig.from_dict(RAW)
NUMERICS = Numerics.training()
PLACES = {
    "fp4": ("layers.ffn.experts.w1", "draft.stages.ffn.experts.w2"),
    "fp8": ("attn.wq_a", "attn.wo_b", "shared_experts.w1", "indexers.wq_b", "engrams.wkv", "draft.main_proj"),
    "rows": ("engram_tables.0", "engram_tables.1"),
    "bf16": ("compressors.wkv", "gates.wgate", "indexers.weights_proj", "draft.confidence_head.proj"),
}


def tables(config: ModelConfig) -> EngramTables:
    return EngramTables.build(config, np.arange(256, dtype=np.int32))


def values(model: nnx.Module) -> Params:
    """What a built model computes with, by dotted path."""
    return {path: leaf.get_value() for path, leaf in parameter_paths(model).items()}


@pytest.fixture(scope="module")
def params() -> Params:
    found = initial(CONFIG, builder(CONFIG, NUMERICS, tables(CONFIG))[1], seed=3)
    draft = initial(CONFIG, draft_builder(CONFIG, NUMERICS)[1], seed=4)
    return found | {f"draft.{path}": value for path, value in draft.items()}


@pytest.mark.slow
def test_the_exported_values_are_those_that_training_used(params: Params, tmp_path: Path) -> None:
    host = {path: np.asarray(value) for path, value in params.items()}
    write_checkpoint(tmp_path / "demo", RAW, tensors(CONFIG, host), include_mtp=True)
    stored = from_checkpoint(tmp_path / "demo", CONFIG) | from_checkpoint(tmp_path / "demo", CONFIG, draft=True)
    backbone = {path: value for path, value in params.items() if not path.startswith(LEAF_PREFIX)}
    draft = {path.removeprefix(LEAF_PREFIX): value for path, value in params.items() if path.startswith(LEAF_PREFIX)}
    used = values(builder(CONFIG, NUMERICS, tables(CONFIG))[0](backbone))
    used |= {LEAF_PREFIX + path: value for path, value in values(draft_builder(CONFIG, NUMERICS)[0](draft)).items()}
    assert stored.keys() == params.keys() == used.keys()
    kinds = storages(nnx.eval_shape(lambda: TrainingTransformer(CONFIG, NUMERICS, dense=False)))
    of_draft = storages(nnx.eval_shape(lambda: DraftModel(CONFIG, NUMERICS)))
    kinds |= {LEAF_PREFIX + path: kind for path, kind in of_draft.items()}
    for path, value in used.items():
        if path in kinds:
            np.testing.assert_array_equal(stored[path], value, err_msg=path)
        else:  # of bfloat16 or float32 in the checkpoint, of float32 in training
            np.testing.assert_array_equal(value, params[path], err_msg=path)
            np.testing.assert_allclose(stored[path], value, rtol=2**-8, err_msg=path)
    for kind, places in PLACES.items():
        for place in places:
            paths = [path for path in used if place in path]
            assert paths and all(kinds[path] == kind for path in paths), place
            assert not any(np.array_equal(used[path], params[path]) for path in paths), place


def test_a_step_may_see_the_masters_as_they_are() -> None:
    """One program for both; the gradient is straight through in either."""
    config = ModelConfig.from_dict(config_json(256, 256, 255, small=True))
    build, shapes = builder(config, NUMERICS, tables(config))
    masters = initial(config, shapes, seed=1)
    kinds = storages(nnx.eval_shape(lambda: TrainingTransformer(config, NUMERICS, dense=False)))
    assert set(kinds.values()) == {"fp4", "fp8", "rows", "bf16"} and kinds.keys() < masters.keys()

    @jax.jit
    def seen(masters: Params, exact: jax.Array) -> tuple[Params, Params]:
        """(values of the model, gradient of their sum)."""
        found, back = jax.vjp(lambda params: values(build(params, exact)), masters)
        return found, back(jax.tree.map(jnp.ones_like, found))[0]

    @jax.jit
    def unasked(masters: Params) -> tuple[Params, Params, Params]:
        """Values without the flag, and with one that is no array; and the formats' own."""
        stored = {path: fake_quantize_weight(masters[path], kind) for path, kind in kinds.items()}
        return values(build(masters)), values(build(masters, exact=True)), masters | stored

    default, plain, stored = unasked(masters)
    for path, master in masters.items():
        np.testing.assert_array_equal(default[path], stored[path], err_msg=path)
        np.testing.assert_array_equal(plain[path], master, err_msg=path)
    for exact in (False, True):
        found, gradient = seen(masters, jnp.bool_(exact))
        for path, master in masters.items():
            np.testing.assert_array_equal(found[path], master if exact else stored[path], err_msg=path)
            np.testing.assert_array_equal(gradient[path], jnp.ones_like(master), err_msg=path)
            assert np.array_equal(found[path], master) is not (path in kinds and not exact), path


def test_weights_travel_in_small_files(params: Params, tmp_path: Path) -> None:
    files = save_parts(tmp_path, params, "weights")
    assert all(f.stat().st_size <= 16 * 2**20 for f in files)
    back = load_parts(files)
    assert back.keys() == params.keys()
    for path, value in params.items():
        error = np.abs(back[path] - np.asarray(value)).max() / max(1e-9, float(np.abs(value).max()))
        assert error <= 2**-4, path
    assert back["layers.attn.q_norm.weight"].shape == params["layers.attn.q_norm.weight"].shape


def test_all_weights_of_the_model_and_its_draft_travel_in_32_mib(tmp_path: Path) -> None:
    """Of the bundled sizes, with normal values: trained ones deflate a little better."""
    config = ModelConfig.from_file(demo_checkpoint())
    each = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    _, shapes = builder(config, NUMERICS, EngramTables.build(config, each))
    _, of_draft = draft_builder(config, NUMERICS)
    files = save_parts(tmp_path, initial(config, shapes, seed=0), "weights")
    files += save_parts(tmp_path, initial(config, of_draft, seed=1), "draft")
    sizes = [file.stat().st_size for file in files]
    assert sum(sizes) <= 32 * 2**20 and max(sizes) <= 16 * 2**20 and sum(sizes) > 24 * 2**20


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
