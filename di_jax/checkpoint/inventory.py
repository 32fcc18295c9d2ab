"""Every tensor that a checkpoint of one model must hold: name, dtype, shape and part (checkpoint 3 and 5).

The inventory follows from the config alone. The reader demands it, the mapping takes shapes from it, the writer takes
the storage formats from it and `scripts/inspect_checkpoint.py` prints it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import ml_dtypes
import numpy as np

from di_jax.model.config import ModelConfig

# Rows and columns of an e4m3 weight, columns of a packed fp4 or Engram row, that share one ue8m0 scale.
BLOCK = 32

# safetensors dtype name -> the numpy dtype that its bytes are read as. Scales and packed fp4 stay bytes: a numeric
# conversion of 2^-7 to an integer would be 0, and a signed byte would smear the sign over the high nibble
# (checkpoint 6.1, 6.3).
STORED_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
}

ROUTED_EXPERTS = "routed experts"
ENGRAM_TABLES = "Engram tables"
DRAFT_EXPERTS = "draft experts"
ATTENTION = "attention"
EMBED_HEAD = "embed, head, final norm"
SHARED_EXPERTS = "shared experts"
VISION = "vision, aligner, delimiters"
DRAFT_DENSE = "draft dense"
ENGRAM_DENSE = "Engram projections and gates"
ROUTER = "router"
MHC = "mHC"
INDEXERS = "indexers"
COMPRESSORS = "compressors"
BLOCK_NORMS = "block norms"
PARTS = (
    ROUTED_EXPERTS, ENGRAM_TABLES, DRAFT_EXPERTS, ATTENTION, EMBED_HEAD, SHARED_EXPERTS, VISION, DRAFT_DENSE,
    ENGRAM_DENSE, ROUTER, MHC, INDEXERS, COMPRESSORS, BLOCK_NORMS,
)  # fmt: skip

# Families that a checkpoint may leave out as a whole, by the field of config.json that announces them.
OPTIONAL_FAMILIES: dict[str, frozenset[str]] = {
    "mtp": frozenset({DRAFT_EXPERTS, DRAFT_DENSE}),
    "vision": frozenset({VISION}),
}

# How a tensor is made from logical float values: `plain` is a cast, `fp8_block` one scale per 32x32, `fp4_rows` and
# `fp8_rows` one scale per row and 32 columns, `scale` belongs to the weight of the same stem.
Storage = Literal["plain", "fp8_block", "fp4_rows", "fp8_rows", "scale"]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint. dtype: safetensors header name; shape: as stored (packed fp4: [out, in/2])."""

    dtype: str
    shape: tuple[int, ...]
    part: str
    storage: Storage = "plain"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape of the values: two per byte in packed fp4."""
        if self.storage == "fp4_rows":
            return (*self.shape[:-1], 2 * self.shape[-1])
        return self.shape


def scale_name(weight_name: str) -> str:
    """`x.weight` -> `x.scale`: the sibling that holds a quantized weight's scales."""
    return weight_name.removesuffix(".weight") + ".scale"


def expected_inventory(config: ModelConfig, quantized: bool | None = None) -> dict[str, TensorSpec]:
    """All tensors in layer order, by name, `mtp.*` and vision included when the config announces them.

    quantized: the released storage formats, or (False) everything bf16 without `.scale`; None: as the config says.
    Source: checkpoint 5.1 .. 5.7.
    """
    quantized = config.quantization is not None if quantized is None else quantized
    out = _Inventory(quantized)
    hidden = config.hidden_size
    out.bf16("embed.weight", (config.vocab_size, hidden), EMBED_HEAD)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        _add_block(out, config, prefix, config.n_routed_experts)
        _add_sources(out, config, layer)
        if layer in config.engram_layer_ids:
            _add_engram(out, config, layer)
    out.bf16("norm.weight", (hidden,), EMBED_HEAD)
    out.bf16("head.weight", (config.vocab_size, hidden), EMBED_HEAD)
    _add_draft(out, config)
    _add_vision(out, config)
    return out.tensors


class _Inventory:
    """Collects specs; each method is one storage family of checkpoint 5."""

    def __init__(self, quantized: bool) -> None:
        self.quantized = quantized
        self.tensors: dict[str, TensorSpec] = {}

    def bf16(self, name: str, shape: tuple[int, ...], part: str) -> None:
        self.tensors[name] = TensorSpec("BF16", shape, part)

    def f32(self, name: str, shape: tuple[int, ...], part: str) -> None:
        self.tensors[name] = TensorSpec("F32", shape, part)

    def fp8_block(self, stem: str, out: int, fan_in: int, part: str) -> None:
        if not self.quantized:
            return self.bf16(f"{stem}.weight", (out, fan_in), part)
        self.tensors[f"{stem}.weight"] = TensorSpec("F8_E4M3", (out, fan_in), part, "fp8_block")
        self._scale(stem, (_blocks(out), _blocks(fan_in)), part)

    def fp4_rows(self, stem: str, out: int, fan_in: int, part: str) -> None:
        if not self.quantized:
            return self.bf16(f"{stem}.weight", (out, fan_in), part)
        self.tensors[f"{stem}.weight"] = TensorSpec("I8", (out, fan_in // 2), part, "fp4_rows")
        self._scale(stem, (out, _blocks(fan_in)), part)

    def fp8_rows(self, stem: str, rows: int, width: int, part: str) -> None:
        if not self.quantized:
            return self.bf16(f"{stem}.weight", (rows, width), part)
        self.tensors[f"{stem}.weight"] = TensorSpec("F8_E4M3", (rows, width), part, "fp8_rows")
        self._scale(stem, (rows, _blocks(width)), part)

    def _scale(self, stem: str, shape: tuple[int, ...], part: str) -> None:
        self.tensors[f"{stem}.scale"] = TensorSpec("F8_E8M0", shape, part, "scale")


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _add_block(out: _Inventory, c: ModelConfig, prefix: str, experts: int) -> None:
    """One backbone layer or draft stage without its sources (checkpoint 5.2)."""
    draft = prefix.startswith("mtp.")

    def part(name: str) -> str:
        return DRAFT_DENSE if draft else name

    hidden, heads, width = c.hidden_size, c.num_attention_heads, c.moe_intermediate_size
    attention = part(ATTENTION)
    for stem, rows, columns in (
        ("wq_a", c.q_lora_rank, hidden),
        ("wq_b", heads * c.head_dim, c.q_lora_rank),
        ("wkv", c.head_dim, hidden),
        ("wo_a", c.o_groups * c.o_lora_rank, heads * c.head_dim // c.o_groups),
        ("wo_b", hidden, c.o_groups * c.o_lora_rank),
    ):
        out.fp8_block(f"{prefix}attn.{stem}", rows, columns, attention)
    out.bf16(f"{prefix}attn.q_norm.weight", (c.q_lora_rank,), attention)
    out.bf16(f"{prefix}attn.kv_norm.weight", (c.head_dim,), attention)
    out.f32(f"{prefix}attn.attn_sink", (heads,), attention)
    for norm in ("attn_norm", "ffn_norm"):
        out.bf16(f"{prefix}{norm}.weight", (hidden,), part(BLOCK_NORMS))
    for site in ("attn", "ffn"):
        out.f32(f"{prefix}hc_{site}_fn", (c.n_mixes, c.hc_mult * hidden), part(MHC))
        out.f32(f"{prefix}hc_{site}_base", (c.n_mixes,), part(MHC))
        out.f32(f"{prefix}hc_{site}_scale", (3,), part(MHC))
    out.bf16(f"{prefix}ffn.gate.weight", (experts, hidden), part(ROUTER))
    for bias in ("bias", "bias_vl"):
        out.f32(f"{prefix}ffn.gate.{bias}", (experts,), part(ROUTER))
    shapes = (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width))
    for stem, rows, columns in shapes:
        out.fp8_block(f"{prefix}ffn.shared_experts.{stem}", rows, columns, part(SHARED_EXPERTS))
    routed = DRAFT_EXPERTS if draft else ROUTED_EXPERTS
    for expert in range(experts):
        for stem, rows, columns in shapes:
            out.fp4_rows(f"{prefix}ffn.experts.{expert}.{stem}", rows, columns, routed)


def _add_sources(out: _Inventory, c: ModelConfig, layer: int) -> None:
    """Compressor and indexer tensors of the layers that own them (checkpoint 5.3, 5.4)."""
    prefix = f"layers.{layer}.attn."
    if layer in c.kv_source_layer_ids:
        out.bf16(f"{prefix}compressor.wkv.weight", (c.head_dim, c.hidden_size), COMPRESSORS)
        if c.compress_ratios[layer] > 1:
            out.bf16(f"{prefix}compressor.wgate.weight", (c.head_dim, c.hidden_size), COMPRESSORS)
        out.bf16(f"{prefix}compressor.norm.weight", (c.head_dim,), COMPRESSORS)
        out.bf16(f"{prefix}indexer.wk.weight", (c.index_head_dim, c.head_dim), INDEXERS)
        out.bf16(f"{prefix}indexer.k_norm.weight", (c.index_head_dim,), INDEXERS)
    if layer in c.index_source_layer_ids:
        out.fp8_block(f"{prefix}indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, INDEXERS)
        out.bf16(f"{prefix}indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), INDEXERS)


def _add_engram(out: _Inventory, c: ModelConfig, layer: int) -> None:
    """Table, projection and gates of one Engram layer (checkpoint 5.5)."""
    prefix = f"layers.{layer}.engram."
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    out.fp8_rows(f"{prefix}embed", rows, c.engram_head_dim, ENGRAM_TABLES)
    fan_in = c.engram_columns * c.engram_head_dim
    out.fp8_block(f"{prefix}wkv", (c.hc_mult + 1) * c.hidden_size, fan_in, ENGRAM_DENSE)
    for gate in ("q_weight", "k_weight"):
        out.bf16(f"{prefix}{gate}", (c.hc_mult, c.hidden_size), ENGRAM_DENSE)


def _add_draft(out: _Inventory, c: ModelConfig) -> None:
    """The DSpark stages (checkpoint 5.2 with the draft's expert count, 5.6)."""
    stages = c.num_nextn_predict_layers
    if not stages:
        return
    hidden, rank = c.hidden_size, c.dspark_markov_rank
    for stage in range(stages):
        _add_block(out, c, f"mtp.{stage}.", c.dspark_n_routed_experts)
    out.fp8_block("mtp.0.main_proj", hidden, len(c.dspark_target_layer_ids) * hidden, DRAFT_DENSE)
    out.bf16("mtp.0.main_norm.weight", (hidden,), DRAFT_DENSE)
    last = f"mtp.{stages - 1}."
    out.bf16(f"{last}norm.weight", (hidden,), DRAFT_DENSE)
    for table in ("embed", "head"):
        out.bf16(f"{last}markov_head.{table}.weight", (c.vocab_size, rank), DRAFT_DENSE)
    out.bf16(f"{last}confidence_head.proj.weight", (1, hidden + rank), DRAFT_DENSE)


def _add_vision(out: _Inventory, c: ModelConfig) -> None:
    """Vision tower, aligner and the three delimiter vectors (checkpoint 5.7)."""
    v = c.vision
    if v is None:
        return
    width = v.hidden_size

    def add(name: str, *shape: int) -> None:
        out.bf16(name, shape, VISION)

    add("vision.patch_embed.proj.weight", width, 3 * v.patch_size**2)
    add("vision.patch_embed.proj.bias", width)
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        add(f"{prefix}norm1.weight", width)
        add(f"{prefix}norm2.weight", width)
        add(f"{prefix}attn.wqkv.weight", 3 * width, width)
        add(f"{prefix}attn.wqkv.bias", 3 * width)
        add(f"{prefix}attn.wo.weight", width, width)
        add(f"{prefix}attn.wo.bias", width)
        add(f"{prefix}mlp.w1.weight", 2 * v.intermediate_size, width)
        add(f"{prefix}mlp.w2.weight", width, v.intermediate_size)
    add("vision.norm.weight", width)
    hidden = c.hidden_size
    add("aligner.w1.weight", hidden, width * v.downsample_ratio**2)
    add("aligner.w1.bias", hidden)
    add("aligner.w2.weight", hidden, hidden)
    add("aligner.w2.bias", hidden)
    for name in ("image_start", "image_end", "image_newline"):
        add(name, hidden)
