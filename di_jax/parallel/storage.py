"""Arithmetic of a deployment's storage: window states in host memory, prefix blocks in an erasure-coded store."""

from __future__ import annotations

import dataclasses
import math

from di_jax.model.cache import CacheLayout

DAY = 86_400  # seconds


@dataclasses.dataclass(frozen=True)
class StoreLoad:
    """What a deployment keeps, and on what.

    new_tokens_per_second: tokens whose prefix blocks one device adds to the store, so without those it found there.
    retention_days: how long a block is kept after its last use. data_shards + parity_shards: a stripe is cut into the
    first and survives the loss of as many servers as the second. server_bytes: capacity of a storage server, of which
    the share `fill` is used.
    """

    new_tokens_per_second: float
    retention_days: float
    data_shards: int
    parity_shards: int
    server_bytes: float
    fill: float


@dataclasses.dataclass(frozen=True)
class StoragePlan:
    """Bytes before erasure coding, and servers with it."""

    window_bytes_per_sequence: int
    window_bytes_per_million: int
    kv_store_bytes_per_gpu: int
    servers: int


def storage_plan(load: StoreLoad, kv_bytes_per_token: float, window_bytes: int, devices: int) -> StoragePlan:
    """What `devices` need. kv_bytes_per_token: of the paged caches; window_bytes: of one sequence's window state.

    The store holds rate x retention of every device, 1 + parity / data times. There are never fewer servers than
    shards of a stripe: two shards on one server would be lost together.
    """
    per_device = load.new_tokens_per_second * load.retention_days * DAY * kv_bytes_per_token
    shards = load.data_shards + load.parity_shards
    stored = per_device * devices * shards / load.data_shards
    return StoragePlan(
        window_bytes_per_sequence=window_bytes,
        window_bytes_per_million=window_bytes * 10**6,
        kv_store_bytes_per_gpu=math.ceil(per_device),
        servers=max(shards, math.ceil(stored / (load.server_bytes * load.fill))),
    )


def window_state_bytes(layout: CacheLayout) -> int:
    """Bytes kept of a sequence so that a prefix hit can go on: the window rings of the encoder, the layers before the
    last KV source (architecture 7.3). What the layers after it need is computed again from the last prompt rows."""
    state = layout.abstract()
    ring = state.window.shape[2] * state.window.shape[3] * state.window.dtype.itemsize
    return max(layout.config.kv_source_layer_ids, default=0) * ring
