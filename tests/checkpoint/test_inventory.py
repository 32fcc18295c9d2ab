"""The inventory of the released model, number by number (checkpoint 3)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest

from di_jax.checkpoint.inventory import PARTS, STORED_DTYPES, TensorSpec, expected_inventory
from di_jax.model.config import ModelConfig

RELEASED_DTYPES = {
    "I8": (47_232, 278_585_671_680),
    "F8_E4M3": (357, 204_015_223_296),
    "F8_E8M0": (47_589, 23_563_015_184),
    "BF16": (520, 3_952_883_712),
    "F32": (387, 169_229_128),
}
RELEASED_PARTS = {
    "routed experts": (92_160, 288_777_830_400),
    "Engram tables": (4, 202_758_032_400),
    "draft experts": (2_304, 7_219_445_760),
    "attention": (520, 5_069_721_600),
    "embed, head, final norm": (3, 2_647_664_640),
    "shared experts": (240, 1_416_960_000),
    "vision, aligner, delimiters": (266, 970_536_960),
    "draft dense": (97, 713_428_872),
    "Engram projections and gates": (8, 315_043_840),
    "router": (120, 157_409_280),
    "mHC": (240, 157_295_040),
    "indexers": (32, 45_130_752),
    "compressors": (11, 36_704_256),
    "block norms": (80, 819_200),
}


@pytest.fixture(scope="module")
def released(golden: Path) -> dict[str, TensorSpec]:
    return expected_inventory(ModelConfig.from_file(golden / "config_real.json"))


def split(inventory: dict[str, TensorSpec], field: str) -> dict[str, tuple[int, int]]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for spec in inventory.values():
        counts[getattr(spec, field)][0] += 1
        counts[getattr(spec, field)][1] += spec.nbytes
    return {key: (tensors, size) for key, (tensors, size) in counts.items()}


def test_released_totals(released: dict[str, TensorSpec]) -> None:
    assert len(released) == 96_085
    assert sum(spec.nbytes for spec in released.values()) == 510_286_023_000


def test_released_split_by_dtype(released: dict[str, TensorSpec]) -> None:
    assert split(released, "dtype") == RELEASED_DTYPES
    assert set(RELEASED_DTYPES) == set(STORED_DTYPES)


def test_released_split_by_part(released: dict[str, TensorSpec]) -> None:
    assert split(released, "part") == RELEASED_PARTS
    assert set(RELEASED_PARTS) == set(PARTS)


def test_presence_rules(released: dict[str, TensorSpec]) -> None:
    def count(suffix: str) -> int:
        return sum(name.endswith(suffix) for name in released)

    assert count("compressor.wkv.weight") == 4
    assert count("compressor.wgate.weight") == 3
    assert count("indexer.wq_b.weight") == 8
    assert count("indexer.wk.weight") == 4
    assert count("engram.embed.weight") == 2
    assert count("bias_vl") == 43
    assert not any(word in name for name in released for word in ("tid2eid", "ape", "hc_head", "image_pad"))


def test_unquantized_variant_has_logical_shapes_and_no_scales(golden: Path) -> None:
    config = ModelConfig.from_file(golden / "tiny-v41-fp8")
    stored, plain = expected_inventory(config), expected_inventory(config, quantized=False)
    assert plain == expected_inventory(dataclasses.replace(config, quantization=None))
    assert set(plain) == {name for name, spec in stored.items() if spec.storage != "scale"}
    assert len(plain) == 831
    for name, spec in plain.items():
        assert spec.shape == stored[name].logical_shape
        assert spec.dtype == ("F32" if stored[name].dtype == "F32" else "BF16")


def test_ragged_blocks_round_up(golden: Path) -> None:
    config = dataclasses.replace(ModelConfig.from_file(golden / "tiny-v41-fp8"), q_lora_rank=40)
    inventory = expected_inventory(config)
    assert inventory["layers.0.attn.wq_a.scale"].shape == (2, 4)
    assert inventory["layers.0.attn.wq_b.scale"].shape == (16, 2)
