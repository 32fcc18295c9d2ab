"""Reads a released `config.json` into a `ModelConfig`: types, ranges and relations of its fields (checkpoint 2).

Whatever the file holds, what comes out is a config that can be built, or a ModelConfigError that names the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from di_jax.model.config import (
    KNOWN_ARCHITECTURES,
    ModelConfig,
    ModelConfigError,
    QuantizationConfig,
    RopeConfig,
    VisionConfig,
)

# Drafts per step when the checkpoint names no dspark_block_size: ring lengths are window + 5 + 1 and ratio + 5.
DEFAULT_DRAFT_BLOCK = 5
# Ids, positions and rows are int32 on device.
MAX_INT = 2**31 - 1
# Positions of a block of the paged caches. Each source fills whole entries of it, so its ratio has to divide it.
_BLOCK = 128

# A broken value may be huge, or nested deeper than repr can follow.
_short = reprlib.Repr(maxlevel=3, maxlist=64, maxdict=4, maxstring=80, maxlong=40)


class ConfigReader:
    """Takes fields out of the nested JSON with messages that name the file, the section and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ModelConfigError(f"{source}: text_config must be an object, found {_short.repr(text)}")
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
                raise self.fail(field, f"must be a list of integers, found {_short.repr(value)}")
            return tuple(value)
        if kind is float:
            return self._number(field, value)
        if type(value) is not kind:
            raise self.fail(field, f"must be {kind.__name__}, found {_short.repr(value)}")
        if isinstance(value, int) and value < 0:
            raise self.fail(field, f"must not be negative, found {_short.repr(value)}")
        if isinstance(value, int) and value > MAX_INT:
            raise self.fail(field, f"must fit 32 bits, found {_short.repr(value)}")
        return value

    def _number(self, field: str, value: Any) -> float:
        """A finite number above 0: JSON as Python reads it knows NaN, Infinity, and integers beyond any float."""
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not 0 < number < math.inf:
            raise self.fail(field, f"must be a positive number, found {_short.repr(value)}")
        return number

    def expect(self, field: str, *allowed: Any) -> None:
        """A field that may be absent but whose value, when there, must be one that this engine implements."""
        value = self.text.get(field, allowed[0])
        if value not in allowed:
            raise self.fail(field, f"is {_short.repr(value)}; this engine implements {' or '.join(map(repr, allowed))}")

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
        if not isinstance(found, list):
            raise ModelConfigError(f"{self.source}: architectures must be a list of names, found {_short.repr(found)}")
        if not any(name in KNOWN_ARCHITECTURES for name in found):
            raise ModelConfigError(
                f"{self.source}: architecture {_short.repr(found[0])} is not one this engine runs; "
                f"known: {', '.join(KNOWN_ARCHITECTURES)}"
            )

    def _rope(self) -> RopeConfig:
        scaling = self.text.get("rope_scaling")
        theta, compress = self.text.get("rope_theta"), self.text.get("compress_rope_theta")
        if scaling is None and isinstance(parameters := self.text.get("rope_parameters"), Mapping):
            # The other published spelling: one table per use, `main` and `compress` (numerics 18, row 22).
            main, scaling = (self._table(f"rope_parameters.{name}", parameters) for name in ("main", "compress"))
            theta, compress = main.get("rope_theta", theta), scaling.get("rope_theta", compress)
        if not isinstance(scaling, Mapping):
            raise self.fail("rope_scaling", f"must be an object, found {_short.repr(scaling)}")
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "yarn":
            raise self.fail("rope_scaling.rope_type", f"must be 'yarn', found {_short.repr(kind)}")
        values: dict[str, Any] = {"theta": theta, "compress_theta": compress}
        for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            values[name] = scaling.get(name)
        numbers = {name: self._number(f"rope {name}", value) for name, value in values.items()}
        for name in ("theta", "compress_theta"):
            if numbers[name] <= 1:
                raise self.fail(f"rope {name}", f"must be above 1 (its logarithm divides), found {numbers[name]}")
        original = numbers.pop("original_max_position_embeddings")
        if original != int(original) or original > MAX_INT:
            raise self.fail("rope original_max_position_embeddings", f"must be a 32-bit integer, found {original}")
        return RopeConfig(**numbers, original_max_position_embeddings=int(original))

    def _table(self, field: str, parent: Mapping[str, Any]) -> Mapping[str, Any]:
        """The object under the last part of a dotted name; empty when it is not there."""
        value = parent.get(field.rpartition(".")[2], {})
        if not isinstance(value, Mapping):
            raise self.fail(field, f"must be an object, found {_short.repr(value)}")
        return value

    def _quantization(self) -> QuantizationConfig | None:
        raw = self.raw.get("quantization_config")
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"{self.source}: quantization_config must be an object, found {_short.repr(raw)}")
        for field, value in (
            ("quant_method", "fp8"),
            ("activation_scheme", "dynamic"),
            ("scale_fmt", "ue8m0"),
            ("weight_block_size", [32, 32]),
        ):
            if raw.get(field, value) != value:
                raise ModelConfigError(
                    f"{self.source}: quantization_config.{field} is {_short.repr(raw[field])}; this engine reads "
                    f"{value!r}"
                )
        expert = raw.get("expert_dtype", self.raw.get("expert_dtype", "fp4"))  # V4 kept it outside
        if expert != "fp4":
            raise ModelConfigError(
                f"{self.source}: quantization_config.expert_dtype is {_short.repr(expert)}; this engine reads 'fp4'"
            )
        return QuantizationConfig(weight_block=32, expert_dtype=expert)

    def _vision(self) -> VisionConfig | None:
        raw = self.raw.get("vision_config")
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"{self.source}: vision_config must be an object, found {_short.repr(raw)}")
        section = ConfigReader({"text_config": raw}, self.source)
        section.section = "vision_config."
        values: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(VisionConfig).items():
            if isinstance(hint, types.UnionType):  # a number that may be null or absent
                values[name] = section.get(name, float, default=None)
                continue
            values[name] = section.get(name, hint)
            if values[name] == 0:
                raise section.fail(name, "must be at least 1")
        return VisionConfig(**values)

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
        for field in ("head_dim", "index_head_dim"):
            value = getattr(c, field)
            require(value % 32 == 0, field, f"must divide by 32 (cache scales), found {value}")
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
        for field in _TOKENS:
            token = getattr(c, field)
            require(token is None or token < c.vocab_size, field, f"is {token}; the vocabulary ends at {c.vocab_size}")
        require(
            c.engram_compressed_vocab_size <= c.vocab_size,
            "engram_compressed_vocab_size",
            f"is {c.engram_compressed_vocab_size}, more than vocab_size = {c.vocab_size}",
        )
        ratios = sorted(set(c.compress_ratios) - {0})
        require(
            all(ratio > 0 and _BLOCK % ratio == 0 for ratio in ratios),
            "compress_ratios",
            f"must be 0 or divide {_BLOCK}, the positions of a cache block; found {ratios}",
        )
        compressed = [n for n, r in enumerate(c.compress_ratios) if r]
        for field, ids in (
            ("kv_source_layer_ids", c.kv_source_layer_ids),
            ("index_source_layer_ids", c.index_source_layer_ids),
        ):
            require(_ascends(ids), field, f"must ascend without repeats, found {list(ids)}")
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
        require(_ascends(c.engram_layer_ids), "engram_layer_ids", "must ascend without repeats")
        require(
            all(0 <= n <= MAX_INT for n in c.engram_num_embeddings), "engram_num_embeddings", "must fit 32-bit rows"
        )
        require(c.engram_vocab_size < 2**24, "engram_vocab_size", "must be below 2^24 (32-bit hash arithmetic)")
        if c.engram_layer_ids:
            require(c.engram_vocab_size > 0, "engram_vocab_size", "must be at least 1 for Engram layers")
            require(c.engram_max_ngram_size > 1, "engram_max_ngram_size", "must be at least 2 for Engram layers")
        if c.num_nextn_predict_layers:
            self._check_draft(c)

    def _check_draft(self, c: ModelConfig) -> None:
        """What the draft's stages name must be there."""
        targets, layers = list(c.dspark_target_layer_ids), c.num_hidden_layers
        if not _ascends(targets) or not all(0 <= n < layers for n in targets):
            raise self.fail("dspark_target_layer_ids", f"must ascend within the {layers} layers, found {targets}")
        if c.dspark_noise_token_id >= c.vocab_size:
            why = f"is {c.dspark_noise_token_id}; the vocabulary ends at {c.vocab_size}"
            raise self.fail("dspark_noise_token_id", why)
        if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
            why = f"is {c.dspark_num_experts_per_tok} of {c.dspark_n_routed_experts} experts"
            raise self.fail("dspark_num_experts_per_tok", why)


def _ascends(ids: Sequence[int]) -> bool:
    return list(ids) == sorted(set(ids))


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
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "max_position_embeddings", "o_lora_rank", "o_groups", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim",
    "index_topk", "candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters",
    "engram_n_heads", "engram_head_dim", "dspark_block_size",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id", "image_token_id")
