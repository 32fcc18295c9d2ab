"""Deployment arithmetic of window states and the prefix store."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.storage import DAY, StoreLoad, storage_plan, window_state_bytes

LOAD = StoreLoad(1000.0, 3.0, data_shards=10, parity_shards=2, server_bytes=1e14, fill=0.8)


@pytest.fixture(scope="module")
def layout(golden: Path) -> CacheLayout:
    return CacheLayout(ModelConfig.from_file(golden / "config_real.json"), CacheFormats.quantized(), 2, 3)


def test_window_state_of_the_released_model(layout: CacheLayout) -> None:
    window = window_state_bytes(layout)
    assert window == 1_415_040, "20 encoder rings of 134 rows of 528 bytes (engine 4.4)"
    plan = storage_plan(LOAD, layout.bytes_per_token, window, 64)
    assert plan.window_bytes_per_sequence == window and plan.window_bytes_per_million == window * 10**6
    assert window_state_bytes(dataclasses.replace(layout, draft_stages=3)) == window, "draft rings are not kept"


def test_the_store_by_hand() -> None:
    # 1,000 tokens/s for 3 days at 890 bytes are 230.7 GB a device; 2,000 devices with 12/10 of coding 553.7 TB.
    plan = storage_plan(LOAD, 890, 0, 2000)
    assert plan.kv_store_bytes_per_gpu == 1000 * 3 * DAY * 890 == 230_688_000_000
    assert plan.servers == 12, "6.9 servers hold it, a stripe needs 12"
    assert storage_plan(LOAD, 890, 0, 20_000).servers == 70, "5.537 PB on servers that take 80 TB"
    bare = dataclasses.replace(LOAD, parity_shards=0)
    assert storage_plan(bare, 890, 0, 20_000).servers == 58, "without parity a sixth less"


@given(st.floats(0, 1e5), st.floats(0.1, 30), st.integers(1, 20), st.integers(0, 5), st.integers(1, 10_000))
def test_servers_hold_what_is_stored(rate: float, days: float, data: int, parity: int, devices: int) -> None:
    load = StoreLoad(rate, days, data, parity, 2e14, 0.7)
    plan = storage_plan(load, 890, 10, devices)
    stored = rate * days * DAY * 890 * devices * (data + parity) / data
    assert plan.servers >= data + parity
    assert plan.servers * 2e14 * 0.7 >= stored * (1 - 1e-9)
    assert plan.servers == data + parity or (plan.servers - 1) * 2e14 * 0.7 < stored * (1 + 1e-9)
    assert storage_plan(load, 890, 10, devices + 1).servers >= plan.servers
