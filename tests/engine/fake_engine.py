"""An engine over a fake device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_device import Clock, FakeDevice
from fake_model import fake_config

from di_jax.config import EngineGroup
from di_jax.engine import engine as engine_module
from di_jax.engine import intake as intake_module
from di_jax.engine.engine import Engine
from di_jax.engine.sequence import Request
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import BucketLadder
from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.mesh import DeviceMesh


class FakeTime:
    """Stands for the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self.perf_counter = clock.perf_counter


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine over a fake device. Buckets of None: the ladder's own."""

    window: int = 16
    block_size: int = 128
    num_blocks: int = 24
    num_slots: int = 4
    max_model_len: int = 640
    tokens: int = 128
    prefill: tuple[int, ...] | None = None
    decode: tuple[int, ...] | None = None
    dp: int = 1
    cp: int = 1
    keep_tokens: int = 24
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def fake_engine(
    setup: Setup, monkeypatch: Any = None, local_ranks: Sequence[int] | None = None
) -> tuple[Engine, FakeDevice]:
    """monkeypatch: pytest's, or anything with its `setattr`; with it time passes as the device's clock says.
    local_ranks: those that this engine's process hosts; by default all."""
    model = fake_config(setup.window)
    raw = {
        "max_num_seqs": setup.num_slots,
        "max_model_len": setup.max_model_len,
        "log_interval": 0,
        **setup.config,
    }
    replay = {"keep_tokens": setup.keep_tokens, **raw.get("replay", {})}
    config = EngineGroup.from_dict({**raw, "replay": replay})
    # Blocks and steps may be smaller than a config's.
    object.__setattr__(config, "max_num_batched_tokens", setup.tokens)
    ladder = BucketLadder.derive(
        max_num_batched_tokens=setup.tokens,
        max_num_seqs=setup.num_slots,
        max_context_blocks=-(-setup.max_model_len // setup.block_size),
        prefill=setup.prefill,
        decode=setup.decode,
        cp=setup.cp,
        keep_tokens=setup.keep_tokens if config.replay.decoder == "compact" else None,
        history=model.engram_look_back,
    )
    layout = CacheLayout(model, CacheFormats.plain(np.float32), setup.num_blocks, setup.num_slots, setup.block_size)
    device = FakeDevice(model, layout, DeviceMesh(dp=setup.dp, cp=setup.cp), local_ranks)
    if monkeypatch is not None:
        clock = device.clock
        monkeypatch.setattr(engine_module, "time", FakeTime(clock))
        monkeypatch.setattr(intake_module, "Request", lambda *a: Request(*a, arrived=clock.perf_counter()))
    parts = EngineParts(model, Path(), None, device, ladder, layout)  # type: ignore[arg-type]
    engine = Engine(parts, config)
    device.ledgers = engine.scheduler.ledgers
    return engine, device
