"""Leaves on device: equal to the file byte for byte, whatever the slab size and sharding."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_files import Parts, decoded, weights
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from di_jax.checkpoint.cache import load_or_convert
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.loader import load_leaves, plan_slabs
from di_jax.checkpoint.mapping import all_sources, leaf_specs
from di_jax.checkpoint.reader import CheckpointReader, open_checkpoint
from di_jax.checkpoint.writer import write_checkpoint
from di_jax.parallel.mesh import DeviceMesh, Parallel


def assert_equal_to_file(leaves: dict[str, jax.Array], reader: CheckpointReader) -> None:
    sources = all_sources(reader.config)
    assert set(leaves) == set(sources)
    for path, array in leaves.items():
        host = np.asarray(array)
        for position, name in sources[path]:
            assert host[position].tobytes() == reader.read(name).tobytes(), (path, name)


@pytest.mark.parametrize("slab_bytes", [2**25, 20_000, 3_000])
def test_leaves_equal_the_file(tiny: Path, slab_bytes: int) -> None:
    with open_checkpoint(tiny) as reader:
        leaves = load_leaves(reader, reader.config, None, slab_bytes=slab_bytes)
        assert_equal_to_file(leaves, reader)
        for path, spec in leaf_specs(reader.config).items():
            assert (leaves[path].shape, leaves[path].dtype) == (spec.shape, spec.dtype)


def test_device_bytes_equal_file_bytes(tiny: Path) -> None:
    with open_checkpoint(tiny) as reader:
        leaves = load_leaves(reader, reader.config, None)
        backbone = [name for name in reader.inventory if not name.startswith("mtp.")]
        assert sum(array.nbytes for array in leaves.values()) == reader.payload_bytes(backbone)
        on_device = sum(shard.data.nbytes for array in leaves.values() for shard in array.addressable_shards)
        assert on_device == reader.payload_bytes(backbone)


def test_unquantized_variant_holds_the_same_values(tiny: Path, tmp_path: Path) -> None:
    """bf16 holds every dequantized weight exactly, so the two variants differ in storage only (checkpoint 6)."""
    with open_checkpoint(tiny) as reader:
        raw = json.loads((tiny / "config.json").read_text())
        plain_json = {key: value for key, value in raw.items() if key != "quantization_config"}
        folder = write_checkpoint(
            tmp_path / "plain", plain_json, ((name, decoded(reader, name)) for name in weights(reader))
        )
        with open_checkpoint(folder) as plain:
            leaves = load_leaves(plain, plain.config, None, slab_bytes=20_000)
            assert_equal_to_file(leaves, plain)
            for name in weights(reader):
                assert np.array_equal(decoded(plain, name), decoded(reader, name)), name


def test_bad_scale_byte_stops_the_load(damage: Callable[[Callable[[Parts], None]], Path]) -> None:
    name = "layers.9.ffn.experts.15.w3.scale"

    def change(parts: Parts) -> None:
        entry, data = parts[name]
        parts[name] = (entry, data[:-1] + b"\xff")

    with open_checkpoint(damage(change)) as reader, pytest.raises(CheckpointError, match=name):
        load_leaves(reader, reader.config, None)


def test_a_rewritten_file_does_not_reach_loaded_weights(copy: Path) -> None:
    with open_checkpoint(copy) as reader:
        leaves = load_leaves(reader, reader.config, None)
        before = np.asarray(leaves["embed.weight"]).tobytes()
        entry = reader.entries["embed.weight"]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            file.write(b"\x01" * entry.nbytes)
        assert reader.read("embed.weight").tobytes() == b"\x01" * entry.nbytes
        assert np.asarray(leaves["embed.weight"]).tobytes() == before


def test_leaf_without_sharding_is_named(tiny: Path) -> None:
    with open_checkpoint(tiny) as reader:
        shardings = dict.fromkeys(leaf_specs(reader.config), SingleDeviceSharding(jax.devices()[0]))
        del shardings["head.weight"]
        with pytest.raises(ValueError, match=r"head\.weight"):
            load_leaves(reader, reader.config, shardings)


def test_one_program_per_shape(tiny: Path) -> None:
    """Slabs of a leaf have one shape: compilations are bounded by leaves, not by tensors or slabs."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    with open_checkpoint(tiny) as reader:
        shapes = {(spec.shape, spec.dtype) for spec in leaf_specs(reader.config).values()}
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            load_leaves(reader, reader.config, None, slab_bytes=2_999)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert 0 < len(compiled) <= 2 * len(shapes)  # a zeroed buffer and an update each


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4]),
    limit=st.integers(4, 300),
)
def test_slabs_cover_every_element(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    plan = plan_slabs(shape, itemsize, limit)
    assert np.prod(plan.slab_shape) * itemsize <= limit
    seen = np.zeros(shape, int)
    fresh_rows = 0
    for start, fresh in plan.starts():
        assert all(a >= 0 and a + n <= size for a, n, size in zip(start, plan.slab_shape, shape, strict=True))
        seen[tuple(slice(a, a + n) for a, n in zip(start, plan.slab_shape, strict=True))] += 1
        fresh_rows += fresh
    assert seen.min() >= 1
    assert fresh_rows * np.prod(plan.slab_shape) // plan.count == seen.size


SHARDED = """
import sys
from pathlib import Path
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from di_jax.checkpoint.cache import load_or_convert
from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.mapping import leaf_specs
from di_jax.checkpoint.reader import open_checkpoint

assert len(jax.devices()) == 4
reader = open_checkpoint(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
rules = {
    "layers.ffn.experts.w1.weight": P(None, ("a", "b")),
    "layers.ffn.experts.w1.scale": P(None, ("b", "a")),
    "layers.ffn.experts.w2.weight": P("b", "a"),
    "layers.ffn.experts.w3.weight": P(None, None, "a", "b"),
    "engram_tables.0.weight": P("b"),
    "engram_tables.1.weight": P("a", "b"),
    "embed.weight": P("b", "a"),
    "norm.weight": P(("a", "b")),
}
shardings = {path: NamedSharding(mesh, rules.get(path, P())) for path in leaf_specs(reader.config)}
single = load_leaves(reader, reader.config, None)
cached = load_or_convert(sys.argv[1], reader.config, sys.argv[2], shardings)
reads = reader.reads
again = load_or_convert(sys.argv[1], reader.config, sys.argv[2], shardings)
for leaves in (*(load_leaves(reader, reader.config, shardings, slab_bytes=n) for n in (2**25, 8000)), cached, again):
    for path, array in leaves.items():
        assert array.sharding == shardings[path], path
        assert np.asarray(array).tobytes() == np.asarray(single[path]).tobytes(), path
        whole = np.asarray(array)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), path
print("equal")
"""


def test_sharded_over_four_devices(tiny: Path, tmp_path: Path) -> None:
    """Stack, expert, row and column shardings, replicas, and a restore from the cache: each equals the file."""
    flags = "--xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tiny), str(tmp_path / "cache")],
        env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "equal", result.stderr[-3000:]


@pytest.mark.slow
def test_the_draft_on_a_mesh(tiny: Path, tmp_path: Path) -> None:
    """Its experts spread over the expert ranks, the rest replicated: each shard is the file's, also from the cache."""
    plan = DeviceMesh(dp=4, cp=2, ep=4)
    mesh = plan.build()
    with open_checkpoint(tiny) as reader:
        specs, config = leaf_specs(reader.config, draft=True), reader.config
        stacked = plan.spec(("layers", "expert", None, None))
        places = {p: NamedSharding(mesh, stacked if ".ffn.experts." in p else PartitionSpec()) for p in specs}
        mine = [path for path in specs if path.startswith("draft.")]
        whole = load_leaves(reader, config, None, draft=True, only=mine)
        assert list(whole) == mine
        spread = load_leaves(reader, config, places, draft=True, only=mine, slab_bytes=3_000)
        for again in (False, True):
            cached = load_or_convert(tiny, config, tmp_path, places, Parallel(plan), draft=True)
            assert cached.keys() == specs.keys(), again
            for path, one in whole.items():
                for array in (spread[path], cached[path]):
                    assert array.sharding == places[path]
                    assert np.asarray(array).tobytes() == np.asarray(one).tobytes()
        experts = spread["draft.stages.ffn.experts.w1.weight"]
        assert {shard.data.shape[:2] for shard in experts.addressable_shards} == {(2, 2)}, "eight experts, four owners"


def test_config_of_another_model_is_refused(tiny: Path) -> None:
    with open_checkpoint(tiny) as reader:
        other = dataclasses.replace(
            reader.config, num_hidden_layers=11, compress_ratios=(*reader.config.compress_ratios, 1)
        )
        with pytest.raises(KeyError):
            load_leaves(reader, other, None)
