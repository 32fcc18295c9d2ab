"""Which checkpoint tensors make up which parameter leaf.

Our parameter tree has tens of leaves: layer weights are stacked over the layers that own them, so that a step takes
few arguments. A leaf's dtype is the stored one. Paths are dotted; leading stack axes are, in order,

    L backbone layers   S KV sources   P pooled KV sources (ratio > 1)   I index sources   G Engram layers   E experts
    M draft stages

A mesh changes two kinds of leaves (`Parallel`): the expert axis has a slot for every redundant copy, and the rows of
an Engram table are padded to equal shares. Tables in host memory are no leaves.

Draft tensors (`mtp.*`) become leaves `draft.*` when asked for; vision tensors have no leaf here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from di_jax.checkpoint.inventory import STORED_DTYPES, expected_inventory
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import ONE_DEVICE, Parallel, padded

Sources = tuple[tuple[tuple[int, ...], str], ...]

_TABLES = "engram_tables."
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
_BLOCK_PLAIN = (
    "attn_norm.weight", "ffn_norm.weight", "attn.q_norm.weight", "attn.kv_norm.weight", "attn.attn_sink",
    "ffn.gate.weight", "ffn.gate.bias", "ffn.gate.bias_vl",
)  # fmt: skip


class LeafSpec(NamedTuple):
    """Global shape (stack axes first) and device dtype of a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def leaf_sources(config: ModelConfig, path: str) -> list[tuple[tuple[int, ...], str]]:
    """[(position on the stack axes, tensor name)]; position () for a leaf that is one tensor. KeyError if unknown."""
    return list(all_sources(config, draft=path.startswith("draft."))[path])


def leaf_specs(
    config: ModelConfig,
    quantized: bool | None = None,
    *,
    draft: bool = False,
    parallel: Parallel = ONE_DEVICE,
) -> dict[str, LeafSpec]:
    """Shape and dtype of every leaf. quantized False: bf16 weights, no `.scale` leaves; None: as the config says.

    draft: the leaves of the draft model as well.
    """
    quantized = config.quantization is not None if quantized is None else quantized
    inventory = expected_inventory(config, quantized)
    row_parts = parallel.mesh.size("engram_rows")
    specs = {}
    leaves = _all_sources(config, quantized, draft, parallel.extra_experts, parallel.engram_placement)
    for path, sources in leaves.items():
        tensor = inventory[sources[0][1]]
        shape = (*(n + 1 for n in sources[-1][0]), *tensor.shape)
        if path.startswith(_TABLES):
            shape = (padded(shape[0], row_parts), *shape[1:])
        specs[path] = LeafSpec(shape, STORED_DTYPES[tensor.dtype])
    return specs


def all_sources(
    config: ModelConfig, *, draft: bool = False, parallel: Parallel = ONE_DEVICE
) -> MappingProxyType[str, Sources]:
    """Every leaf's sources, in tree order, stack positions ascending; with `draft` those of the draft model last."""
    quantized = config.quantization is not None
    return _all_sources(config, quantized, draft, parallel.extra_experts, parallel.engram_placement)


def host_specs(config: ModelConfig, parallel: Parallel = ONE_DEVICE) -> dict[str, LeafSpec]:
    """Shape and dtype, as stored, of what `parallel` leaves in host memory: all of the Engram tables or nothing."""
    if parallel.engram_placement != "host":
        return {}
    return {path: spec for path, spec in leaf_specs(config).items() if path.startswith(_TABLES)}


@lru_cache(maxsize=4)  # 92,000 names for the released model: built once per config, not once per leaf
def _all_sources(
    config: ModelConfig, quantized: bool, draft: bool, extra_experts: int, engram_placement: str
) -> MappingProxyType[str, Sources]:
    tree = _Tree(quantized)
    for name in ("embed.weight", "head.weight", "norm.weight"):
        tree.single(name, name)
    layers = [f"layers.{n}." for n in range(config.num_hidden_layers)]
    kv_sources = [f"layers.{n}.attn." for n in config.kv_source_layer_ids]
    index_sources = [f"layers.{n}.attn." for n in config.index_source_layer_ids]
    engrams = [f"layers.{n}.engram." for n in config.engram_layer_ids]

    # Redundant slots start as copies of experts 0, 1, 2, ... (engine 7.1).
    slots = [slot % config.n_routed_experts for slot in range(config.n_routed_experts + extra_experts)]
    tree.blocks("layers", layers, slots)

    for name in ("wkv", "norm"):
        tree.stack(f"compressors.{name}.weight", kv_sources, f"compressor.{name}.weight")
    for name in ("wk", "k_norm"):
        tree.stack(f"compressors.{name}.weight", kv_sources, f"indexer.{name}.weight")
    pooled = [kv_sources[ordinal] for ordinal in config.pooled_sources]
    tree.stack("gates.wgate.weight", pooled, "compressor.wgate.weight")

    tree.scaled_stack("indexers.wq_b", index_sources, "indexer.wq_b")
    tree.stack("indexers.weights_proj.weight", index_sources, "indexer.weights_proj.weight")

    tree.scaled_stack("engrams.wkv", engrams, "wkv")
    for name in ("q_weight", "k_weight"):
        tree.stack(f"engrams.{name}", engrams, name)
    for ordinal, prefix in enumerate(engrams if engram_placement == "device" else ()):
        for part in tree.parts:  # row counts differ between layers: no stack
            tree.single(f"{_TABLES}{ordinal}.{part}", f"{prefix}embed.{part}")
    if draft and config.num_nextn_predict_layers:
        _add_draft(tree, config)
    return MappingProxyType(tree.leaves)


def _add_draft(tree: _Tree, config: ModelConfig) -> None:
    """What the stages share lies in the first stage's tensors, the ends of the network in the last one's."""
    stages = [f"mtp.{n}." for n in range(config.num_nextn_predict_layers)]
    tree.blocks("draft.stages", stages, range(config.dspark_n_routed_experts))
    for part in tree.parts:
        tree.single(f"draft.main_proj.{part}", f"{stages[0]}main_proj.{part}")
    tree.single("draft.main_norm.weight", f"{stages[0]}main_norm.weight")
    for name in ("norm", "markov_head.embed", "markov_head.head", "confidence_head.proj"):
        tree.single(f"draft.{name}.weight", f"{stages[-1]}{name}.weight")


class _Tree:
    """Collects leaves; a stack over nothing makes none."""

    def __init__(self, quantized: bool) -> None:
        self.parts = ("weight", "scale") if quantized else ("weight",)
        self.leaves: dict[str, Sources] = {}

    def single(self, path: str, name: str) -> None:
        self.leaves[path] = (((), name),)

    def blocks(self, path: str, prefixes: list[str], experts: Sequence[int]) -> None:
        """What every backbone layer and every draft stage has. experts: of each slot."""
        for name in _BLOCK_PLAIN:
            self.stack(f"{path}.{name}", prefixes, name)
        for site in ("attn", "ffn"):
            for name in ("fn", "base", "scale"):
                self.stack(f"{path}.hc_{site}.{name}", prefixes, f"hc_{site}_{name}")
        for name in _FP8:
            self.scaled_stack(f"{path}.attn.{name}", prefixes, f"attn.{name}")
        for name in ("w1", "w3", "w2"):
            self.scaled_stack(f"{path}.ffn.shared_experts.{name}", prefixes, f"ffn.shared_experts.{name}")
            self.expert_stack(f"{path}.ffn.experts.{name}", prefixes, experts, name)

    def stack(self, path: str, prefixes: list[str], suffix: str) -> None:
        if prefixes:
            self.leaves[path] = tuple(((n,), prefix + suffix) for n, prefix in enumerate(prefixes))

    def scaled_stack(self, path: str, prefixes: list[str], stem: str) -> None:
        for part in self.parts:
            self.stack(f"{path}.{part}", prefixes, f"{stem}.{part}")

    def expert_stack(self, path: str, prefixes: list[str], experts: Sequence[int], stem: str) -> None:
        for part in self.parts:
            self.leaves[f"{path}.{part}"] = tuple(
                ((n, slot), f"{prefix}ffn.experts.{e}.{stem}.{part}")
                for n, prefix in enumerate(prefixes)
                for slot, e in enumerate(experts)
            )
