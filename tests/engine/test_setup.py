"""From a config to an engine's parts: what is wrong is said early."""

from __future__ import annotations

from typing import Any

import pytest

from di_jax.config import Config
from di_jax.engine.setup import build_engine_parts, build_ladder
from di_jax.errors import ConfigError


def test_buckets_are_checked_before_the_weights_are_loaded(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("loading")

    monkeypatch.setattr("di_jax.engine.setup.load_or_convert", load)
    with pytest.raises(AssertionError, match="loading"):
        build_engine_parts(tiny_config)
    message = r"engine\.prefill_buckets: 20 is not a multiple of 16 rows, its tiles; give 32"
    with pytest.raises(ConfigError, match=message):
        build_engine_parts(tiny_config.with_values({"engine.prefill_buckets": [20, 128]}))


def test_context_buckets_of_as_many_blocks_are_one(tiny_config: Config) -> None:
    ladder = build_ladder(tiny_config.with_values({"engine.context_buckets": [100, 128, 200, 384]}))
    assert ladder.context_blocks == (1, 2, 3)
    assert len(set(ladder.buckets())) == len(ladder.buckets())
