"""The parameter tree: every backbone tensor in exactly one leaf, shapes and dtypes as stored."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from di_jax.checkpoint.inventory import expected_inventory
from di_jax.checkpoint.mapping import all_sources, leaf_sources, leaf_specs
from di_jax.model.config import ModelConfig


@pytest.fixture(scope="module")
def config(golden: Path) -> ModelConfig:
    return ModelConfig.from_file(golden / "tiny-v41-fp8")


@pytest.mark.parametrize("name", ["tiny-v41-fp8", "config_real.json"])
@pytest.mark.parametrize("quantized", [True, False])
def test_each_backbone_tensor_is_in_one_leaf(golden: Path, name: str, quantized: bool) -> None:
    config = ModelConfig.from_file(golden / name)
    if not quantized:
        config = dataclasses.replace(config, quantization=None)
    inventory = expected_inventory(config)
    used = [tensor for sources in all_sources(config).values() for _, tensor in sources]
    optional = ("mtp.", "vision.", "aligner.", "image_")
    assert len(used) == len(set(used))
    assert set(used) == {tensor for tensor in inventory if not tensor.startswith(optional)}
    specs = leaf_specs(config)
    assert sum(spec.nbytes for spec in specs.values()) == sum(inventory[tensor].nbytes for tensor in used)
    assert len(specs) == (55 if quantized else 40)  # a step takes tens of arguments, not thousands


@pytest.mark.parametrize("name", ["tiny-v41-fp8", "config_real.json"])
@pytest.mark.parametrize("quantized", [True, False])
def test_each_draft_tensor_is_in_one_leaf_when_asked_for(golden: Path, name: str, quantized: bool) -> None:
    config = ModelConfig.from_file(golden / name)
    if not quantized:
        config = dataclasses.replace(config, quantization=None)
    inventory = expected_inventory(config)
    plain, both = all_sources(config), all_sources(config, draft=True)
    assert dict(itertools.islice(both.items(), len(plain))) == dict(plain)  # the backbone's leaves stay as they are
    draft = {path: sources for path, sources in both.items() if path not in plain}
    used = [tensor for sources in draft.values() for _, tensor in sources]
    assert all(path.startswith("draft.") for path in draft)
    assert len(used) == len(set(used))
    assert set(used) == {tensor for tensor in inventory if tensor.startswith("mtp.")}
    specs = leaf_specs(config, draft=True)
    assert sum(specs[path].nbytes for path in draft) == sum(inventory[tensor].nbytes for tensor in used)
    assert len(draft) == (43 if quantized else 31)
    assert {path: specs[path] for path in plain} == leaf_specs(config)


def test_stacks_are_full_boxes(config: ModelConfig) -> None:
    inventory = expected_inventory(config)
    for path, spec in leaf_specs(config, draft=True).items():
        sources = leaf_sources(config, path)
        axes = len(sources[0][0])
        positions = [position for position, _ in sources]
        assert positions == list(itertools.product(*(range(n) for n in spec.shape[:axes])))
        assert {inventory[tensor].shape for _, tensor in sources} == {spec.shape[axes:]}


def test_paths_of_each_kind(config: ModelConfig) -> None:
    specs = leaf_specs(config)
    expected = {
        "embed.weight": ((512, 128), jnp.bfloat16),
        "norm.weight": ((128,), jnp.bfloat16),
        "layers.attn.wo_a.weight": ((10, 128, 128), jnp.float8_e4m3fn),
        "layers.attn.wo_a.scale": ((10, 4, 4), jnp.uint8),
        "layers.attn.attn_sink": ((10, 8), jnp.float32),
        "layers.hc_ffn.fn": ((10, 24, 512), jnp.float32),
        "layers.ffn.gate.bias_vl": ((10, 16), jnp.float32),
        "layers.ffn.experts.w1.weight": ((10, 16, 32, 64), jnp.uint8),
        "layers.ffn.experts.w2.scale": ((10, 16, 128, 1), jnp.uint8),
        "compressors.wk.weight": ((3, 32, 64), jnp.bfloat16),
        "gates.wgate.weight": ((2, 64, 128), jnp.bfloat16),
        "indexers.wq_b.weight": ((4, 512, 64), jnp.float8_e4m3fn),
        "engrams.k_weight": ((2, 4, 128), jnp.bfloat16),
        "engram_tables.1.weight": ((3746, 32), jnp.float8_e4m3fn),
        "engram_tables.1.scale": ((3746, 1), jnp.uint8),
    }
    for path, (shape, dtype) in expected.items():
        assert specs[path].shape == shape
        assert specs[path].dtype == dtype


def test_sources_follow_the_owning_layers(config: ModelConfig) -> None:
    assert leaf_sources(config, "norm.weight") == [((), "norm.weight")]
    assert leaf_sources(config, "layers.hc_attn.base")[3] == ((3,), "layers.3.hc_attn_base")
    assert leaf_sources(config, "layers.ffn.experts.w3.scale")[17] == ((1, 1), "layers.1.ffn.experts.1.w3.scale")
    assert [name for _, name in leaf_sources(config, "compressors.k_norm.weight")] == [
        f"layers.{n}.attn.indexer.k_norm.weight" for n in (2, 4, 6)
    ]
    assert [name for _, name in leaf_sources(config, "gates.wgate.weight")] == [
        f"layers.{n}.attn.compressor.wgate.weight" for n in (2, 4)
    ]
    assert [name for _, name in leaf_sources(config, "indexers.wq_b.scale")] == [
        f"layers.{n}.attn.indexer.wq_b.scale" for n in (2, 4, 6, 8)
    ]
    assert leaf_sources(config, "engram_tables.1.scale") == [((), "layers.4.engram.embed.scale")]


def test_draft_leaves(config: ModelConfig) -> None:
    """Two stages of eight experts; what they share is in the first, the ends of the network are in the last."""
    specs = leaf_specs(config, draft=True)
    for path, (shape, dtype) in {
        "draft.stages.attn.wq_a.weight": ((2, 64, 128), jnp.float8_e4m3fn),
        "draft.stages.ffn.experts.w1.weight": ((2, 8, 32, 64), jnp.uint8),
        "draft.main_proj.weight": ((128, 384), jnp.float8_e4m3fn),
        "draft.main_proj.scale": ((4, 12), jnp.uint8),
        "draft.markov_head.embed.weight": ((512, 32), jnp.bfloat16),
        "draft.confidence_head.proj.weight": ((1, 160), jnp.bfloat16),
    }.items():
        assert specs[path] == (shape, np.dtype(dtype))
    assert leaf_sources(config, "draft.stages.hc_ffn.fn")[1] == ((1,), "mtp.1.hc_ffn_fn")
    assert leaf_sources(config, "draft.stages.ffn.experts.w2.scale")[9] == ((1, 1), "mtp.1.ffn.experts.1.w2.scale")
    assert leaf_sources(config, "draft.main_norm.weight") == [((), "mtp.0.main_norm.weight")]
    assert leaf_sources(config, "draft.markov_head.head.weight") == [((), "mtp.1.markov_head.head.weight")]
    assert leaf_sources(config, "draft.norm.weight") == [((), "mtp.1.norm.weight")]


def test_a_model_without_a_draft_has_no_draft_leaves(config: ModelConfig) -> None:
    bare = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert leaf_specs(bare, draft=True) == leaf_specs(bare)


def test_unquantized_has_no_scales(config: ModelConfig) -> None:
    specs = leaf_specs(config, quantized=False)
    assert [path for path in specs if path.endswith(".scale")] == ["layers.hc_attn.scale", "layers.hc_ffn.scale"]
    assert specs["layers.ffn.experts.w1.weight"] == ((10, 16, 32, 128), np.dtype(jnp.bfloat16))
    assert specs["engram_tables.0.weight"] == ((2914, 32), np.dtype(jnp.bfloat16))


def test_empty_stacks_make_no_leaf(config: ModelConfig) -> None:
    bare = dataclasses.replace(
        config,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        compress_ratios=tuple(min(ratio, 1) for ratio in config.compress_ratios),
    )
    specs = leaf_specs(bare)
    assert not [path for path in specs if path.startswith(("engram", "gates"))]
    assert specs["compressors.wkv.weight"].shape[0] == 3
    with pytest.raises(KeyError):
        leaf_sources(bare, "gates.wgate.weight")
