"""Broken `config.json` files: each is refused with the file and the field, whatever it holds."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from golden_model import CHECKPOINT, GOLDEN, REAL, TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from di_jax.errors import ConfigError
from di_jax.model.config import ModelConfig, ModelConfigError, check_decoder_replay

DRAFT = {
    "dspark_target_layer_ids": [8, 10],
    "dspark_noise_token_id": 512,
    "dspark_num_experts_per_tok": 9,
}


def raw(path: Path = CHECKPOINT / "config.json") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def changed(field: str, value: Any) -> dict[str, Any]:
    """The tiny config with one dotted field set."""
    config = raw()
    *path, last = field.split(".")
    section = config
    for name in path:
        section = section.setdefault(name, {})
    section[last] = value
    return config


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict(config, "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ") and len(message) < 600
    return message


def name_of(value: Any) -> str:
    """Of a test: some values are too long or too deep to show."""
    return value if isinstance(value, str) else type(value).__name__


DEEP: Any = 0
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5),
        ("architectures", "DeepseekV41ForCausalLM"),
        ("architectures", {"0": "DeepseekV41ForCausalLM"}),
        ("vision_config", []),
        ("vision_config", "tower"),
        ("text_config", []),
        ("quantization_config", 3),
        ("text_config.hidden_size", DEEP),
        ("text_config.hidden_size", 10**4000),
        ("text_config.vocab_size", 2**31),
        ("text_config.hidden_act", DEEP),
        ("text_config.compress_ratios", [0, 0, 3, 3, 3, 3, 1, 1, 1, 1, 0, 0]),
        ("text_config.compress_ratios", [0, 0, -2, -2, -2, -2, 1, 1, 1, 1, 0, 0]),
        ("text_config.compress_ratios", [0, 0, 256, 256, 256, 256, 1, 1, 1, 1, 0, 0]),
        ("text_config.qk_rope_head_dim", 0),
        ("text_config.max_position_embeddings", 0),
        ("text_config.engram_layer_ids", [4, 1]),
        ("text_config.engram_num_embeddings", [2914, -1]),
        ("text_config.engram_max_ngram_size", 1),
        ("text_config.engram_vocab_size", 0),
        ("text_config.engram_compressed_vocab_size", 513),
        ("text_config.rope_scaling", [1]),
        *((f"text_config.{name}", value) for name, value in DRAFT.items()),
        *((name, 512) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")),
        ("text_config.engram_pad_token_id", 512),
        *(
            (f"text_config.{name}", value)
            for name in ("rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor")
            for value in (math.nan, math.inf, -math.inf, -1.0, 0, 10**400, True, "1", None)
        ),
    ],
    ids=name_of,
)
def test_the_field_is_named(field: str, value: Any) -> None:
    assert field.rpartition(".")[2] in refusal(changed(field, value))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1, 10**400, "16", True, [16], None], ids=name_of)
@pytest.mark.parametrize("name", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_rope_scaling_values(name: str, value: Any) -> None:
    assert f"rope {name} must be a positive number" in refusal(changed(f"text_config.rope_scaling.{name}", value))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rope_theta", math.nan, "rope theta must be a positive number, found nan"),
        ("compress_rope_theta", math.inf, "rope compress_theta must be a positive number, found inf"),
        ("compress_rope_theta", 1, "rope compress_theta must be above 1"),
        ("rope_scaling.original_max_position_embeddings", 4096.5, "must be a 32-bit integer, found 4096.5"),
        ("rope_scaling.original_max_position_embeddings", 2**31, "must be a 32-bit integer"),
        ("rope_scaling.rope_type", DEEP, "rope_scaling.rope_type must be 'yarn'"),
    ],
)
def test_rope_bases(field: str, value: Any, words: str) -> None:
    assert words in refusal(changed(f"text_config.{field}", value))


@pytest.mark.parametrize("name", ["main", "compress"])
def test_the_other_spelling_of_rope(name: str) -> None:
    config = raw()
    text = config["text_config"]
    scaling, theta, compress = (text.pop(n) for n in ("rope_scaling", "rope_theta", "compress_rope_theta"))
    tables = {"main": {"rope_theta": theta}, "compress": {**scaling, "rope_theta": compress}}
    text["rope_parameters"] = tables
    assert ModelConfig.from_dict(config) == TINY
    text["rope_parameters"] = {**tables, name: [1]}
    assert f"rope_parameters.{name} must be an object, found [1]" in refusal(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "1024"),
        ("hidden_size", 1024.0),
        ("num_hidden_layers", -1),
        ("patch_size", 0),
        ("min_pixels", None),
        ("rope_theta", math.nan),
        ("max_wh_ratio", [2]),
        ("max_wh_ratio", math.inf),
    ],
)
def test_vision_values(name: str, value: Any) -> None:
    config = raw(GOLDEN / "config_real.json")
    config["vision_config"][name] = value
    assert f"vision_config.{name}" in refusal(config)


def test_good_vision_values_are_kept() -> None:
    config = raw(GOLDEN / "config_real.json")
    config["vision_config"]["max_wh_ratio"] = 4
    vision = ModelConfig.from_dict(config).vision
    assert vision is not None and (vision.max_wh_ratio, vision.rope_theta, vision.patch_size) == (4.0, 10000.0, 14)


def test_without_a_draft_its_fields_do_not_matter() -> None:
    config = raw()
    config["text_config"] |= {**DRAFT, "num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1]}
    assert ModelConfig.from_dict(config).num_nextn_predict_layers == 0


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{", b'{"a": ' + b"1" * 5000 + b"}", b"[]"])
def test_files_that_are_no_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        ModelConfig.from_file(tmp_path)


FIELDS = [name for name in raw() if name != "text_config"]
FIELDS += [f"text_config.{name}" for name in raw()["text_config"]]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=1000)
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_is_taken_or_refused(field: str, value: Any) -> None:
    """Never another exception, and what is taken has its derived plan."""
    try:
        config = ModelConfig.from_dict(changed(field, value))
    except ModelConfigError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert len(config.layers) == config.num_hidden_layers and config.compressor_ring > 0


def test_released_models_can_replay() -> None:
    """With the spec's default of 140 rows, and with the fewest: window + 6 (numerics 13.3)."""
    assert (REAL.first_decoder_layer, TINY.first_decoder_layer) == (20, 6)
    for config, least in ((REAL, 134), (TINY, 22)):
        check_decoder_replay(config, 140)
        check_decoder_replay(config, least)
        with pytest.raises(ConfigError, match=rf"engine.replay.keep_tokens: {least - 1} rows .* \+ 5 \+ 1 = {least}"):
            check_decoder_replay(config, least - 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dspark_target_layer_ids": (6, 8)}, r"dspark_target_layer_ids \[6, 8\].* after layer 6"),
        ({"engram_layer_ids": (1, 6)}, r"engram_layer_ids \[1, 6\] have to lie before layer 6"),
        ({"kv_source_layer_ids": (2, 4, 6, 8)}, r"layer_id = 6 .*the last KV source of \[2, 4, 6, 8\]"),
        ({"index_source_layer_ids": (2, 4, 8)}, r"candidate_source_layer_id = 6 has to be an index source"),
        ({"kv_source_layer_ids": (), "index_source_layer_ids": ()}, "no KV source"),
    ],
)
def test_models_whose_later_layers_need_every_row_cannot_replay(changes: dict[str, Any], why: str) -> None:
    """Numerics 13.6; the message names the key that turns replay off."""
    with pytest.raises(ConfigError, match=rf"engine.replay.decoder: .*{why}.*engine.replay.decoder: off"):
        check_decoder_replay(dataclasses.replace(TINY, **changes), 140)


def test_a_model_without_a_draft_has_no_taps() -> None:
    check_decoder_replay(dataclasses.replace(TINY, num_nextn_predict_layers=0, dspark_target_layer_ids=(1,)), 140)
