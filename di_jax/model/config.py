"""The architecture of one DeepSeek-V4.1 model, read from a released `config.json`.

`ModelConfig` and its reader (config_reader.py) alone know the released field names. Everything that follows from them
(which layer owns a cache, which one reuses it, ring lengths, Engram columns) is a derived property, so that no
other file repeats a released number. Field meanings: spec checkpoint.md section 2, numerics.md sections 1 and 9.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from di_jax.errors import ConfigError, UserError

KNOWN_ARCHITECTURES = ("DeepseekV41ForCausalLM",)

# Not in config.json, fixed by the released code (checkpoint.md section 2, last paragraph).
ROUTER_TEMPERATURE = 1.0
ENGRAM_GATE_CLAMP = 1e-6
ROUTER_WEIGHT_EPS = 1e-20


class ModelConfigError(UserError):
    """A `config.json` that this engine cannot run; the message names the file and the field."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary settings: a plain base for window-only layers, base + YaRN for layers that compress (numerics 5.2)."""

    theta: float
    compress_theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Storage formats of the released checkpoint. Absent in the unquantized variant (all weights bf16)."""

    weight_block: int  # rows and columns that share one ue8m0 scale of an e4m3 weight
    expert_dtype: str  # "fp4": packed e2m1 with one ue8m0 scale per row and 32 columns


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower's sizes. Parsed and counted; the tower itself comes with the vision feature."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What one backbone layer does. Two layers with equal `kind` share code and can be scanned together.

    ratio: compression ratio, 0 = window only. kv_source / index_source: ordinal (not layer number) of the KV and
    index source that this layer reads, -1 when it reads none. engram: ordinal of its Engram, -1 when it has none.
    """

    layer: int
    ratio: int
    kv_source: int
    index_source: int
    owns_kv: bool
    owns_index: bool
    is_candidate_source: bool
    is_reindex: bool
    engram: int

    @property
    def kind(self) -> tuple[int, bool, bool, bool, bool, bool]:
        """Layers of equal kind run the same program (sources and Engram layers always stand alone)."""
        return (
            self.ratio,
            self.owns_kv,
            self.owns_index,
            self.is_candidate_source,
            self.is_reindex,
            self.engram >= 0,
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek-V4.1 language model. Field names are the released `text_config` names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per backbone layer (draft stages' entries are checked and dropped)
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    quantization: QuantizationConfig | None
    vision: VisionConfig | None

    # ---- derived: sharing schedule (numerics 9) ----

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan of every backbone layer, in order."""
        plans = []
        for n in range(self.num_hidden_layers):
            ratio = self.compress_ratios[n]
            kv = sum(s <= n for s in self.kv_source_layer_ids) - 1 if ratio else -1
            index = sum(s <= n for s in self.index_source_layer_ids) - 1 if ratio else -1
            owns_kv, owns_index = n in self.kv_source_layer_ids, n in self.index_source_layer_ids
            plans.append(
                LayerPlan(
                    layer=n,
                    ratio=ratio,
                    kv_source=kv,
                    index_source=index,
                    owns_kv=owns_kv,
                    owns_index=owns_index,
                    is_candidate_source=n == self.candidate_source_layer_id,
                    is_reindex=owns_index and n > self.candidate_source_layer_id,
                    engram=self.engram_layer_ids.index(n) if n in self.engram_layer_ids else -1,
                )
            )
        return tuple(plans)

    @cached_property
    def layer_runs(self) -> tuple[tuple[LayerPlan, ...], ...]:
        """Maximal runs of consecutive layers that share one program: each run of Reuse layers is one scan."""
        runs: list[list[LayerPlan]] = []
        for plan in self.layers:
            previous = runs[-1][-1] if runs else None
            joins = (
                previous is not None
                and plan.kind == previous.kind
                and not (plan.owns_kv or plan.owns_index or plan.engram >= 0)
            )
            if joins:
                runs[-1].append(plan)
            else:
                runs.append([plan])
        return tuple(tuple(run) for run in runs)

    @cached_property
    def kv_source_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each KV source, by source ordinal."""
        return tuple(self.compress_ratios[n] for n in self.kv_source_layer_ids)

    @cached_property
    def pooled_sources(self) -> tuple[int, ...]:
        """Ordinals of the KV sources that pool (ratio > 1): they alone have a gate weight and a compressor ring."""
        return tuple(i for i, r in enumerate(self.kv_source_ratios) if r > 1)

    @property
    def first_decoder_layer(self) -> int:
        """The last KV source: it computes the entries of all later layers from its input, so that a token of which
        nothing else is needed stops there (numerics 13.1). num_hidden_layers in a model without KV sources."""
        return self.candidate_source_layer_id if self.kv_source_layer_ids else self.num_hidden_layers

    # ---- derived: sizes ----

    @property
    def draft_block(self) -> int:
        """Drafts per step, gamma."""
        return self.dspark_block_size

    @cached_property
    def draft_config(self) -> ModelConfig:
        """The draft's stages as the layers of a model of their own: window-only, with the draft's experts."""
        stages = self.num_nextn_predict_layers
        return dataclasses.replace(
            self,
            num_hidden_layers=stages,
            compress_ratios=(0,) * stages,
            kv_source_layer_ids=(),
            index_source_layer_ids=(),
            engram_layer_ids=(),
            engram_num_embeddings=(),
            n_routed_experts=self.dspark_n_routed_experts,
            num_experts_per_tok=self.dspark_num_experts_per_tok,
        )

    @property
    def window_ring(self) -> int:
        """Rows of a window ring: window + gamma + 1, so that a rejected draft needs no undo (numerics 14)."""
        return self.sliding_window + self.draft_block + 1

    @property
    def compressor_ring(self) -> int:
        """Rows of a compressor ring: the largest pooled ratio + gamma."""
        return max((r for r in self.kv_source_ratios if r > 1), default=1) + self.draft_block

    @property
    def engram_look_back(self) -> int:
        """Tokens before its own that an n-gram holds."""
        return self.engram_max_ngram_size - 1

    @property
    def engram_history(self) -> int:
        """Ids kept per sequence for the n-gram look-back: (n - 1) + gamma + 1, a ring by position."""
        return self.engram_look_back + self.draft_block + 1

    @property
    def engram_ngram_sizes(self) -> tuple[int, ...]:
        return tuple(range(2, self.engram_max_ngram_size + 1))

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer."""
        return len(self.engram_ngram_sizes) * self.engram_n_heads

    @property
    def n_mixes(self) -> int:
        """Outputs of one hyper-connection mix: pre, post and the stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads `config.json` (a file, or the folder that holds it). Raises ModelConfigError."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelConfigError(f"{path}: no such file; a checkpoint folder holds config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of many digits; nested too deep
            raise ModelConfigError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ModelConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Builds the config from parsed JSON: `text_config` nested (released) or its fields at the top level."""
        from di_jax.model.config_reader import ConfigReader  # it makes what is declared here

        return ConfigReader(raw, source).read()


def check_decoder_replay(config: ModelConfig, keep_tokens: int) -> None:
    """Raises ConfigError unless the decoder layers can run the last `keep_tokens` rows of a prompt alone (numerics
    13.6): nothing but the entries of their first one may need the rows before."""
    c, boundary = config, config.first_decoder_layer
    taps = c.dspark_target_layer_ids if c.num_nextn_predict_layers else ()
    for ok, why in (
        (bool(c.kv_source_layer_ids), "the model has no KV source, so no layer computes the entries of later ones"),
        (
            boundary in c.index_source_layer_ids and c.kv_source_layer_ids[-1:] == (boundary,),
            f"candidate_source_layer_id = {boundary} has to be an index source and the last KV source of "
            f"{list(c.kv_source_layer_ids)}",
        ),
        (
            all(n < boundary for n in c.engram_layer_ids),
            f"engram_layer_ids {list(c.engram_layer_ids)} have to lie before layer {boundary}",
        ),
        (
            all(n > boundary for n in taps),
            f"dspark_target_layer_ids {list(taps)}, which the draft reads, have to lie after layer {boundary}",
        ),
    ):
        if not ok:
            raise ConfigError(f"engine.replay.decoder: this model cannot replay: {why}; set engine.replay.decoder: off")
    if keep_tokens < c.window_ring:
        raise ConfigError(
            f"engine.replay.keep_tokens: {keep_tokens} rows are fewer than sliding_window + dspark_block_size + 1 = "
            f"{c.sliding_window} + {c.draft_block} + 1 = {c.window_ring}: the windows of the first decode steps would "
            "be cut too; raise it"
        )
