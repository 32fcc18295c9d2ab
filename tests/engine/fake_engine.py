"""An engine over a fake device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_device import Clock, Drafting, FakeDevice
from fake_model import fake_config

from di_jax.config import EngineGroup
from di_jax.engine import engine as engine_module
from di_jax.engine import intake as intake_module
from di_jax.engine.engine import Engine
from di_jax.engine.sequence import Request
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_profile import StepProfile
from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.mesh import DeviceMesh


class FakeTime:
    """Stands for the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self.perf_counter = clock.perf_counter


class Profiles:
    """Stands for the module `step_profile`: what a device says that its steps take."""

    @staticmethod
    def measure(runner: FakeDevice, ladder: BucketLadder) -> StepProfile:
        runner.reset()
        assert runner.profile is not None
        return runner.profile


def profile_of(ladder: BucketLadder, curve: str) -> StepProfile:
    """flat: rows cost nothing, so that all drafts are verified. stairs: some are. steep: a row costs as much as a step,
    and drafting does not pay."""
    rows = sorted({rows for requests in ladder.decode_rows for rows in ladder.verify_rows(requests)})
    each = {"flat": 0.0, "stairs": 2.5e-4, "steep": 1e-3}[curve]
    drafting = {"flat": 1e-5, "stairs": 1e-4, "steep": 5e-3}[curve]
    return StepProfile(
        {count: 1e-3 + each * count for count in rows},
        {requests: 1e-4 for requests in ladder.decode_rows},
        {requests: drafting for requests in ladder.decode_rows},
        {requests: 1.1e-3 + each * requests for requests in ladder.decode_rows},
        {requests: 1.2e-3 + each * requests for requests in ladder.decode_rows},
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine over a fake device. Buckets of None: the ladder's own.

    drafting: of decode steps, None for none; varlen: whether they verify as many drafts as pay, where steps take what
    `curve` says.
    """

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
    drafting: Drafting | None = None
    varlen: bool = True
    curve: str = "stairs"


def fake_engine(
    setup: Setup, monkeypatch: Any = None, local_ranks: Sequence[int] | None = None, seed: int = 0
) -> tuple[Engine, FakeDevice]:
    """monkeypatch: pytest's, or anything with its `setattr`; with it time passes as the device's clock says, and steps
    take what they are said to. local_ranks: those that this engine's process hosts; by default all. seed: of drafts."""
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
        drafts=0 if setup.drafting is None else setup.drafting.num_drafts,
        varlen=setup.varlen,
    )
    layout = CacheLayout(model, CacheFormats.plain(np.float32), setup.num_blocks, setup.num_slots, setup.block_size)
    device = FakeDevice(model, layout, DeviceMesh(dp=setup.dp, cp=setup.cp), local_ranks, setup.drafting, seed)
    device.profile = profile_of(ladder, setup.curve)
    if monkeypatch is not None:
        clock = device.clock
        monkeypatch.setattr(engine_module, "time", FakeTime(clock))
        monkeypatch.setattr(engine_module, "step_profile", Profiles)
        monkeypatch.setattr(intake_module, "Request", lambda *a: Request(*a, arrived=clock.perf_counter()))
    parts = EngineParts(model, Path(), None, device, ladder, layout)  # type: ignore[arg-type]
    engine = Engine(parts, config)
    device.ledgers = engine.scheduler.ledgers
    device.tables = [table for rank in engine.scheduler.ranks for table in rank.tables]
    return engine, device
