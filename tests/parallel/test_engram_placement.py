"""Engram tables in host memory: the same bits as on the devices, none of their bytes, and errors that stop the step."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_model import TINY

from di_jax.checkpoint.cache import load_or_convert
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.mapping import host_specs, leaf_specs
from di_jax.checkpoint.reader import CheckpointReader, open_checkpoint
from di_jax.commands.plan import Planner
from di_jax.config import Config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.model.config import ModelConfig
from di_jax.model.engram import EngramTable, host_memory
from di_jax.model.linear import Numerics
from di_jax.parallel.mesh import ONE_DEVICE, DeviceMesh, Parallel
from di_jax.parallel.placement import HOST
from di_jax.platforms.devices import configure_jax

# One device decodes; a mesh with ranks of every kind runs prompts whole. Two programs each: compiling is what it costs.
MESHES = {"one": {}, "dp2cp2ep2": {"dp": 2, "cp": 2, "ep": 2}}
FEEDS = [("one", "stepwise"), pytest.param("dp2cp2ep2", "whole", marks=pytest.mark.slow)]
LENGTHS = (150, 3, 64, 21, 2)


def config_of(checkpoint: Path, mesh: dict[str, int], placement: str = "host", **values: object) -> Config:
    """With one prefill and one decode shape."""
    return Config.from_dict(
        {
            "model": {"path": str(checkpoint), "dtype": "float32", "engram_placement": placement},
            "mesh": mesh,
            "engine": {
                "max_num_seqs": 4,
                "max_num_batched_tokens": 512,
                "prefill_buckets": [512],
                "decode_buckets": [4],
                "max_model_len": 256,
                "log_interval": 0,
                "warmup": False,
            },
        }
    ).with_values(values)


@pytest.fixture(scope="module")
def checkpoint(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, in a copy of its own that the last test damages."""
    return Path(shutil.copytree(golden / "tiny-v41-fp8", tmp_path_factory.mktemp("model") / "tiny-v41-fp8"))


@pytest.fixture(scope="module")
def built(checkpoint: Path) -> object:
    """built(mesh, placement): the parts of an engine, made once."""

    @cache
    def build(mesh: str, placement: str) -> EngineParts:
        return build_engine_parts(config_of(checkpoint, MESHES[mesh], placement))

    return build


def prompts() -> list[tuple[str, list[int]]]:
    random = np.random.default_rng(0)
    return [(str(n), random.integers(0, TINY.vocab_size, n).tolist()) for n in LENGTHS]


@pytest.mark.parametrize(("mesh", "feed"), FEEDS)
def test_the_scores_are_those_of_tables_on_devices(built, mesh: str, feed: str) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit, rows of padding in every step."""
    logits = {}
    for placement in ("device", "host"):
        scorer = Scorer(built(mesh, placement), feed)
        requests = prompts() if feed == "whole" else [(name, ids[:21]) for name, ids in prompts()]
        logits[placement] = {score.request_id: score.logits for score in scorer.run(requests)}
    assert logits["host"].keys() == {str(n) for n in LENGTHS}
    for name, expected in logits["device"].items():
        assert np.isfinite(expected).all() and np.ptp(expected) > 1
        assert logits["host"][name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("mesh", ["one", pytest.param("dp2cp2ep2", marks=pytest.mark.slow)])
def test_no_device_holds_a_table(built, mesh: str) -> None:  # type: ignore[no-untyped-def]
    held = {}
    for placement in ("device", "host"):
        runner = built(mesh, placement).runner
        shards = [s for leaf in jax.tree.leaves(runner.params) for s in leaf.addressable_shards]
        held[placement] = {d: sum(s.data.nbytes for s in shards if s.device == d) for d in runner.mesh.devices.flat}
    world = DeviceMesh(**MESHES[mesh]).world
    specs = leaf_specs(TINY, parallel=Parallel(DeviceMesh(**MESHES[mesh])))
    share = sum(spec.nbytes for path, spec in specs.items() if path.startswith("engram_tables.")) // world
    assert share > 0 and len(held["host"]) == world
    assert {d: n + share for d, n in held["host"].items()} == held["device"]


def test_what_it_saves_and_costs_is_said_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(checkpoint, MESHES["dp2cp2ep2"])
    with caplog.at_level(logging.INFO, "di_jax.engine.setup"):
        build_engine_parts(config)
    (line,) = [r.getMessage() for r in caplog.records if "engram_placement" in r.getMessage()]
    nbytes = sum(spec.nbytes for spec in host_specs(TINY, Parallel(engram_placement="host")).values())
    assert f"{nbytes / 1e6:.1f} MB are read" in line and f"{nbytes / 4e6:.1f} MB less on each device" in line
    assert "nothing overlaps" in line


def test_the_weights_cache_holds_no_table(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each placement has an entry of its own, and a start from the cache still finds the tables."""
    config, on_host = ModelConfig.from_file(checkpoint), Parallel(engram_placement="host")
    device = load_or_convert(checkpoint, config, tmp_path / "cache", None)
    host = load_or_convert(checkpoint, config, tmp_path / "cache", None, on_host)
    tables = set(host_specs(config, on_host))
    assert len(tables) == 4 and device.keys() - host.keys() == tables and host.keys() < device.keys()
    assert not host_specs(config, ONE_DEVICE)
    sizes = {sum(f.stat().st_size for f in entry.rglob("*") if f.is_file()) for entry in (tmp_path / "cache").iterdir()}
    nbytes = sum(spec.nbytes for spec in host_specs(config, on_host).values())
    assert len(sizes) == 2 and max(sizes) - min(sizes) > 0.5 * nbytes  # compressed

    def read(*_: object) -> np.ndarray:
        raise AssertionError("the cache holds every weight")

    monkeypatch.setattr(CheckpointReader, "read", read)
    entries = set((tmp_path / "cache").iterdir())
    build_engine_parts(config_of(checkpoint, {}, **{"cache.weights_dir": str(tmp_path / "cache")}))
    assert set((tmp_path / "cache").iterdir()) == entries


@pytest.mark.parametrize("quantized", [True, False])
def test_rows_are_expanded_as_on_the_device(quantized: bool) -> None:
    """Both layers in one call, fp8 or bf16 rows; without tables nothing is answered."""
    config = TINY if quantized else dataclasses.replace(TINY, quantization=None)
    numerics, random = Numerics.create("bfloat16"), np.random.default_rng(1)
    layers = len(config.engram_layer_ids)
    tables, stored = [], []
    for rows in config.engram_num_embeddings:
        table = EngramTable(config, numerics, rows, ONE_DEVICE)
        weight = jnp.asarray(random.normal(size=table.weight.shape), table.weight.dtype)
        table.weight.set_value(weight)
        parts = [np.asarray(weight).view(np.uint8).reshape(rows, -1)]
        if table.scale is not None:
            scale = random.integers(120, 130, table.scale.shape, dtype=np.uint8)
            table.scale.set_value(jnp.asarray(scale))
            parts.append(scale)
        tables.append(table)
        stored.append(parts)

    class Source:
        asked = 0

        def __call__(self, row: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
            self.asked += 1
            return tuple(
                np.stack([stored[n][part][np.asarray(row)[n]] for n in range(layers)]) for part in range(len(stored[0]))
            )

        def raise_failure(self) -> None:
            raise AssertionError

    row = jnp.asarray(random.integers(0, min(config.engram_num_embeddings), (layers, 5, config.engram_columns)))
    source, valid = Source(), jnp.ones(5, bool)
    found = jax.jit(lambda row, valid: host_memory(source, config, numerics.dtype, row, valid))(row, valid)
    for ordinal, table in enumerate(tables):
        expected = np.asarray(table(row[ordinal], valid))
        assert found[ordinal].dtype == numerics.dtype and expected.any()
        assert np.asarray(found[ordinal]).tobytes() == expected.tobytes()
    assert source.asked == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="were not opened"):
        jax.block_until_ready(host_memory(None, config, numerics.dtype, row, valid))


def test_the_plan_counts_them_as_host_memory(checkpoint: Path) -> None:
    """Tracing alone. The released tables are 202.76 GB."""
    planners = {
        placement: Planner(config_of(checkpoint, {}, placement, **{"plan.device": "cpu"}), TINY)
        for placement in ("device", "host")
    }
    layout = {name: {a.name: a for a in planner.weights} for name, planner in planners.items()}
    tables = host_specs(TINY, Parallel(engram_placement="host"))
    assert layout["host"].keys() == layout["device"].keys() > tables.keys()
    for path, spec in tables.items():
        record = layout["host"][path].record()
        assert record["spec"] == HOST and record["bytes_per_device"] == 0 and record["shape"] == list(spec.shape)
        assert layout["device"][path].bytes_per_device == spec.nbytes
        json.dumps(record)
    nbytes = sum(spec.nbytes for spec in tables.values())
    assert f"Engram tables: {nbytes / 1e9:,.2f} GB in the memory of each host" in planners["host"].describe()
    assert not any("Engram" in line for line in planners["device"].describe())
    traced = planners["host"].trace("decode")
    assert sum(a.bytes_per_device for a in planners["host"].weights) < nbytes + sum(
        a.bytes_per_device for a in planners["device"].weights
    )
    assert str(traced.jaxpr).count("pure_callback") == 1


@pytest.mark.parametrize(
    ("platform", "placement", "expected"),
    [("tpu", "host", "tpu,cpu"), ("tpu", "device", "tpu"), ("cpu", "host", "cpu"), ("gpu", "host", "")],
)
def test_a_named_platform_leaves_the_cpu_to_callbacks(
    monkeypatch: pytest.MonkeyPatch, platform: str, placement: str, expected: str
) -> None:
    changes = {}
    monkeypatch.setattr(jax.config, "update", changes.__setitem__)
    configure_jax(Config().with_values({"platform.name": platform, "model.engram_placement": placement}))
    assert changes == {"jax_platforms": expected}


def test_released_bytes(golden: Path) -> None:
    released = ModelConfig.from_file(golden / "config_real.json")
    specs = host_specs(released, Parallel(DeviceMesh(8, 1, 8), engram_placement="host"))
    assert sum(spec.nbytes for spec in specs.values()) == 202_758_032_400
    assert (
        leaf_specs(released, parallel=Parallel(engram_placement="host")).keys() | specs.keys()
        == leaf_specs(released).keys()
    )


def test_a_file_that_is_cut_short_stops_the_step(built, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    """On a mesh, where a rank that raised inside its step would leave the others waiting. Last: it ruins the copy."""
    scorer = Scorer(built("dp2cp2ep2", "host"), "whole")
    file = checkpoint / "model.safetensors"
    with open_checkpoint(checkpoint) as reader:
        first = min(entry.offset for entry in reader.entries.values())
    os.truncate(file, first)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{file}: truncated while in use"):
            list(scorer.run(prompts()[:1]))
        scorer.parts.runner.reset()
        scorer = Scorer(scorer.parts, "whole")
