"""The architecture of one DeepSeek-V4.1 model, read from a released `config.json`.

`ModelConfig` is the only place that knows the released field names. Everything that follows from them
(which layer owns a cache, which one reuses it, ring lengths, Engram columns) is a derived property, so that no
other file repeats a released number. Field meanings: spec checkpoint.md section 2, numerics.md sections 1 and 9.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from di_jax.errors import UserError

KNOWN_ARCHITECTURES = ("DeepseekV41ForCausalLM",)

# Not in config.json, fixed by the released code (checkpoint.md section 2, last paragraph).
ROUTER_TEMPERATURE = 1.0
ENGRAM_GATE_CLAMP = 1e-6
ROUTER_WEIGHT_EPS = 1e-20
# Drafts per step when the checkpoint names no dspark_block_size: ring lengths are window + 5 + 1 and ratio + 5.
DEFAULT_DRAFT_BLOCK = 5


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
    def engram_history(self) -> int:
        """Ids kept per sequence for the n-gram look-back: (n - 1) + gamma + 1, a ring by position."""
        return self.engram_max_ngram_size - 1 + self.draft_block + 1

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
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelConfigError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ModelConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Builds the config from parsed JSON: `text_config` nested (released) or its fields at the top level."""
        return _Reader(raw, source).read()


class _Reader:
    """Takes fields out of the nested JSON with messages that name the file, the section and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ModelConfigError(f"{source}: text_config must be an object, found {text!r}")
        self.text: Mapping[str, Any] = text
        self.section = "text_config." if "text_config" in raw else ""

    def fail(self, field: str, why: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {self.section}{field} {why}")

    def get(self, field: str, kind: type, *aliases: str, default: Any = dataclasses.MISSING) -> Any:
        for name in (field, *aliases):
            for section in (self.text, self.raw):
                if section.get(name) is not None:
                    return self._typed(name, section[name], kind)
        if default is not dataclasses.MISSING:
            return default
        near = difflib.get_close_matches(field, list(self.text), n=1)
        raise self.fail(field, "is missing" + (f" (found {near[0]!r})" if near else ""))

    def _typed(self, field: str, value: Any, kind: type) -> Any:
        if kind is tuple:
            if not isinstance(value, list) or not all(type(v) is int for v in value):
                raise self.fail(field, f"must be a list of integers, found {value!r}")
            return tuple(value)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.fail(field, f"must be {kind.__name__}, found {value!r}")
        if isinstance(value, int) and value < 0:
            raise self.fail(field, f"must not be negative, found {value}")
        return value

    def expect(self, field: str, *allowed: Any) -> None:
        """A field that may be absent but whose value, when there, must be one that this engine implements."""
        value = self.text.get(field, allowed[0])
        if value not in allowed:
            raise self.fail(field, f"is {value!r}; this engine implements {' or '.join(map(repr, allowed))}")

    def read(self) -> ModelConfig:
        self._check_architecture()
        for field, *allowed in (
            ("hidden_act", "silu"),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("num_key_value_heads", 1),
            ("attention_bias", False),
            ("tie_word_embeddings", False),
        ):
            self.expect(field, *allowed)
        layers = self.get("num_hidden_layers", int)
        stages = self.get("num_nextn_predict_layers", int, "n_mtp_layers", default=0)
        ratios = self.get("compress_ratios", tuple)
        if len(ratios) not in (layers, layers + stages):
            raise self.fail(
                "compress_ratios", f"has {len(ratios)} entries for {layers} layers and {stages} draft stages"
            )
        if any(ratios[layers:]):
            raise self.fail("compress_ratios", f"of a draft stage must be 0, found {ratios[layers:]}")
        config = ModelConfig(
            **{f: self.get(f, int) for f in _INTS},
            **{f: self.get(f, float) for f in _FLOATS},
            **{f: self.get(f, tuple) for f in _TUPLES},
            num_hidden_layers=layers,
            compress_ratios=ratios[:layers],
            rope=self._rope(),
            # Two spellings exist in the wild (checkpoint.md section 12, first row).
            engram_pad_token_id=self.get("engram_pad_token_id", int, "engram_pad_id", default=2),
            image_token_id=self.get("image_token_id", int, default=None),
            n_shared_experts=self.get("n_shared_experts", int, default=1),
            num_nextn_predict_layers=stages,
            dspark_block_size=self.get("dspark_block_size", int, default=DEFAULT_DRAFT_BLOCK),
            dspark_noise_token_id=self.get("dspark_noise_token_id", int, default=0),
            dspark_target_layer_ids=self.get("dspark_target_layer_ids", tuple, default=()),
            dspark_markov_rank=self.get("dspark_markov_rank", int, default=0),
            dspark_n_routed_experts=self.get("dspark_n_routed_experts", int, default=0),
            dspark_num_experts_per_tok=self.get(
                "dspark_num_experts_per_tok", int, "dspark_n_activated_experts", default=0
            ),
            quantization=self._quantization(),
            vision=self._vision(),
        )
        self._check(config)
        return config

    def _check_architecture(self) -> None:
        found = self.raw.get("architectures") or [self.raw.get("model_type")]
        if not any(name in KNOWN_ARCHITECTURES for name in found):
            raise ModelConfigError(
                f"{self.source}: architecture {found[0]!r} is not one this engine runs; "
                f"known: {', '.join(KNOWN_ARCHITECTURES)}"
            )

    def _rope(self) -> RopeConfig:
        scaling = self.text.get("rope_scaling")
        theta, compress = self.text.get("rope_theta"), self.text.get("compress_rope_theta")
        if scaling is None and isinstance(parameters := self.text.get("rope_parameters"), Mapping):
            # The other published spelling: one table per use, `main` and `compress` (numerics 18, row 22).
            main, scaling = parameters.get("main", {}), parameters.get("compress", {})
            theta, compress = main.get("rope_theta", theta), scaling.get("rope_theta", compress)
        if not isinstance(scaling, Mapping):
            raise self.fail("rope_scaling", f"must be an object, found {scaling!r}")
        if scaling.get("rope_type", scaling.get("type")) != "yarn":
            raise self.fail("rope_scaling.rope_type", f"must be 'yarn', found {scaling.get('rope_type')!r}")
        values: dict[str, Any] = {"theta": theta, "compress_theta": compress}
        for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            values[name] = scaling.get(name)
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise self.fail(f"rope {name}", f"must be a positive number, found {value!r}")
        original = int(values.pop("original_max_position_embeddings"))
        return RopeConfig(**{k: float(v) for k, v in values.items()}, original_max_position_embeddings=original)

    def _quantization(self) -> QuantizationConfig | None:
        raw = self.raw.get("quantization_config")
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"{self.source}: quantization_config must be an object, found {raw!r}")
        for field, value in (
            ("quant_method", "fp8"),
            ("activation_scheme", "dynamic"),
            ("scale_fmt", "ue8m0"),
            ("weight_block_size", [32, 32]),
        ):
            if raw.get(field, value) != value:
                raise ModelConfigError(
                    f"{self.source}: quantization_config.{field} is {raw[field]!r}; this engine reads {value!r}"
                )
        expert = raw.get("expert_dtype", self.raw.get("expert_dtype", "fp4"))  # V4 kept it outside
        if expert != "fp4":
            raise ModelConfigError(
                f"{self.source}: quantization_config.expert_dtype is {expert!r}; this engine reads 'fp4'"
            )
        return QuantizationConfig(weight_block=32, expert_dtype=expert)

    def _vision(self) -> VisionConfig | None:
        raw = self.raw.get("vision_config")
        if raw is None:
            return None
        fields = {f.name for f in dataclasses.fields(VisionConfig)}
        missing = sorted(fields - set(raw) - {"max_wh_ratio"})
        if missing:
            raise ModelConfigError(f"{self.source}: vision_config.{missing[0]} is missing")
        return VisionConfig(**{k: raw.get(k) for k in fields})

    def _check(self, c: ModelConfig) -> None:
        """Relations between fields; each message carries the numbers."""

        def require(ok: bool, field: str, why: str) -> None:
            if not ok:
                raise self.fail(field, why)

        for field in (*_POSITIVE, "n_shared_experts"):
            require(getattr(c, field) > 0, field, "must be at least 1")
        require(c.n_shared_experts == 1, "n_shared_experts", f"is {c.n_shared_experts}; this engine has one")
        require(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", f"must be even, found {c.qk_rope_head_dim}")
        rope_limit = min(c.head_dim, c.index_head_dim)
        require(
            c.qk_rope_head_dim <= rope_limit,
            "qk_rope_head_dim",
            f"is {c.qk_rope_head_dim}, larger than the smallest head ({rope_limit})",
        )
        for field, divisor in (("head_dim", 32), ("index_head_dim", 32)):
            value = getattr(c, field)
            require(value % divisor == 0, field, f"must divide by {divisor} (cache scales), found {value}")
        require(
            c.num_attention_heads % c.o_groups == 0,
            "o_groups",
            f"must divide num_attention_heads = {c.num_attention_heads}, found {c.o_groups}",
        )
        require(
            c.num_experts_per_tok <= c.n_routed_experts,
            "num_experts_per_tok",
            f"is {c.num_experts_per_tok} of {c.n_routed_experts} experts",
        )
        compressed = [n for n, r in enumerate(c.compress_ratios) if r]
        for field, ids in (
            ("kv_source_layer_ids", c.kv_source_layer_ids),
            ("index_source_layer_ids", c.index_source_layer_ids),
        ):
            require(list(ids) == sorted(set(ids)), field, f"must ascend without repeats, found {list(ids)}")
            require(all(n in compressed for n in ids), field, f"names a layer that does not compress: {list(ids)}")
            require(
                not compressed or (bool(ids) and ids[0] == compressed[0]),
                field,
                f"must start at the first compressing layer {compressed[:1]}, found {list(ids)}",
            )
        require(
            set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
            "index_source_layer_ids",
            "must contain every KV source layer",
        )
        for plan in c.layers:
            if plan.ratio:
                owner = c.kv_source_ratios[plan.kv_source]
                require(
                    plan.ratio == owner,
                    "compress_ratios",
                    f"of layer {plan.layer} is {plan.ratio}, its KV source compresses by {owner}",
                )
        require(
            not compressed or c.candidate_source_layer_id == c.kv_source_layer_ids[-1],
            "candidate_source_layer_id",
            f"must be the last KV source, found {c.candidate_source_layer_id} of {list(c.kv_source_layer_ids)}",
        )
        require(
            len(c.engram_num_embeddings) == len(c.engram_layer_ids),
            "engram_num_embeddings",
            f"has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} Engram layers",
        )
        require(
            all(0 <= n < c.candidate_source_layer_id for n in c.engram_layer_ids),
            "engram_layer_ids",
            f"must lie before the decoder half (layer {c.candidate_source_layer_id}), found {list(c.engram_layer_ids)}",
        )
        require(all(n < 2**31 for n in c.engram_num_embeddings), "engram_num_embeddings", "must fit 32-bit rows")
        require(c.engram_vocab_size < 2**24, "engram_vocab_size", "must be below 2^24 (32-bit hash arithmetic)")


_INTS = (
    "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "max_position_embeddings", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size", "hc_mult",
    "hc_sinkhorn_iters", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_compressed_vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_FLOATS = ("rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "hc_eps")
_TUPLES = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "engram_num_embeddings")
_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks",
    "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "engram_n_heads", "engram_head_dim",
    "dspark_block_size",
)  # fmt: skip
