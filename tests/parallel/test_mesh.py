"""Mesh sizes, rules and specs: plain arithmetic, no devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from di_jax.config import Config, load_config
from di_jax.engine.setup import build_ladder, build_parallel
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.linear import Numerics
from di_jax.model.transformer import abstract_model, parameter_paths
from di_jax.parallel.mesh import AXES, RULES, DeviceMesh, Parallel, padded
from tests.golden_model import TINY


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_divisor_of_the_world_factors(dp: int, cp: int, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
    mesh = DeviceMesh(dp, cp, ep)
    sizes = mesh.axis_sizes
    assert (sizes["d0"] * sizes["d1"], sizes["c0"] * sizes["c1"]) == (dp, cp)
    assert sizes["d1"] * sizes["c1"] == ep == mesh.size("expert")
    assert mesh.size("batch") == dp and mesh.size("sequence") == cp and mesh.size("blocks") == dp * cp
    # When either divides the other, an expert group is `ep` neighbours, as in the released system (engine 10).
    if ep % cp == 0 or cp % ep == 0:
        groups = [rank // ep for rank in range(dp * cp)]
        d0, _, c0, _ = np.unravel_index(np.arange(dp * cp), tuple(sizes[axis] for axis in AXES))
        assert groups == (d0 * sizes["c0"] + c0).tolist()


def test_specs() -> None:
    mesh = DeviceMesh(dp=4, cp=2, ep=4)
    assert mesh.axis_sizes == {"d0": 2, "d1": 2, "c0": 1, "c1": 2}
    assert mesh.spec(("layers", "expert", None, None)) == P(None, ("d1", "c1"), None, None)
    assert mesh.spec(("layers", "slots", None)) == P(None, ("d0", "d1", "c1"), None)
    assert mesh.spec(("engram_rows", None)) == P(("d0", "d1", "c1"), None)
    assert DeviceMesh(dp=8, ep=2).spec(("expert",)) == P("d1")
    assert DeviceMesh().spec(("expert", "blocks")) == P(None, None)


def test_every_parameter_and_state_array_has_a_spec() -> None:
    """Experts, Engram rows and caches are spread, everything else is replicated."""
    mesh = DeviceMesh(dp=4, cp=2, ep=4)
    numerics = Numerics.create("float32")
    spread = set()
    for path, leaf in parameter_paths(abstract_model(TINY, numerics, parallel=Parallel(mesh))).items():
        logical = leaf.get_metadata()["logical_axes"]
        shape = leaf.get_value().shape
        spec = mesh.spec(logical)
        assert len(spec) == len(shape)
        for size, name in zip(shape, logical, strict=True):
            assert size % mesh.size(name or "") == 0, path
        if any(spec):
            spread.add(path.rpartition(".")[0].rpartition(".")[0] if "experts" in path else path.partition(".")[0])
    assert spread == {"layers.ffn.experts", "engram_tables"}
    layout = CacheLayout(TINY, numerics.formats, 3, 2, num_drafts=5)
    state = layout.abstract()
    for name, logical in layout.logical_axes().items():
        assert len(getattr(state, name).shape) == len(logical)
        assert sum(axis is not None for axis in mesh.spec(logical)) == 1


def test_rules_can_be_changed() -> None:
    # Experts over the data axes alone, Engram rows over the context axes alone.
    mesh = DeviceMesh(dp=2, cp=2, ep=4, rules=(("engram_rows", ("c0", "c1")),))
    assert mesh.spec(("engram_rows",)) == P("c1") and mesh.size("engram_rows") == 2
    replicated = DeviceMesh(dp=2, cp=2, rules=(("engram_rows", ()),))
    assert replicated.spec(("engram_rows",)) == P(None)
    config = Config().with_values({"mesh.dp": 4, "mesh.ep": 2, "mesh.rules": {"engram_rows": ["d1"]}})
    assert config.mesh.plan.spec(("engram_rows", None)) == P("d1", None)
    assert load_config("ep64").mesh.plan.axis_sizes == {"d0": 1, "d1": 64, "c0": 1, "c1": 1}


def fake_devices(count: int) -> Any:
    return [SimpleNamespace(device_kind="abacus")] * count


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DeviceMesh(4, 2, 3),
            "mesh.ep: 3 does not divide mesh.dp x mesh.cp = 4 x 2 = 8; give one of 1, 2, 4, 8",
        ),
        (lambda: DeviceMesh(rules=(("heads", ("d0",)),)), "mesh.rules.heads: no such logical name; there are batch, "),
        (
            lambda: DeviceMesh(rules=(("expert", ("x",)),)),
            "mesh.rules.expert: no such axis 'x'; there are d0, d1, c0, c1",
        ),
        (lambda: DeviceMesh(rules=(("expert", ("d1", "d1")),)), "mesh.rules.expert: d1, d1 names an axis twice"),
        (
            lambda: DeviceMesh(rules=(("batch", ("d0",)),)),
            "mesh.rules: batch and sequence together must name each of d0, d1, c0, c1 once, they name d0, c0, c1",
        ),
        (
            lambda: DeviceMesh(8, 1, 4, rules=(("expert", ("d0",)),)),
            "mesh.rules.expert: d0 2 = 2 ranks, mesh.ep is 4; the axes of dp 8, cp 1, ep 4 are d0 2, d1 4, c0 1, c1 1",
        ),
        (
            lambda: DeviceMesh(8, 1, 4, rules=(("expert", ()),)),
            "mesh.rules.expert: no axis = 1 ranks, mesh.ep is 4",
        ),
        (
            lambda: DeviceMesh(8, 1, 4).check_experts(382, 0),
            "mesh.ep: 4 does not divide n_routed_experts + redundant experts = 382 + 0 = 382",
        ),
        (
            lambda: DeviceMesh(8, 2).check_devices(4, "abacus"),
            "mesh.dp x mesh.cp: 8 x 2 = 16 devices asked, 4 present (abacus): lower mesh.dp or mesh.cp, or set "
            "mesh.simulate_devices: 16",
        ),
        (
            lambda: DeviceMesh(8).check_devices(16, "abacus", processes=2),
            "mesh.dp x mesh.cp: 8 x 1 = 8 devices, but the 2 processes have 16: every device of every process must",
        ),
        (lambda: DeviceMesh(2).build(fake_devices(1)), "2 x 1 = 2 devices asked, 1 present (abacus)"),
        (
            lambda: Config().with_values({"mesh.rules": {"expert": "d1"}}),
            "mesh.rules.expert: d1 is not a list of mesh axes",
        ),
        (
            lambda: Config().with_values({"mesh.dp": 4, "mesh.cp": 2, "mesh.simulate_devices": 4}),
            "mesh.simulate_devices: 4 is less than mesh.dp x mesh.cp = 4 x 2 = 8",
        ),
        (
            lambda: Config().with_values({"eplb.interval": 10, "eplb.window": 20}),
            "eplb.window: 20 must be at least 1 and at most eplb.interval = 10",
        ),
        (lambda: Config().with_values({"eplb.interval": 10}), "eplb.window: 0 must be at least 1"),
        (
            lambda: build_parallel(Config().with_values({"eplb.force": "balanced"}), TINY),
            "eplb.force: balanced does not fit this mesh: imbalance 1.8 of 16 slots on 1 ranks",
        ),
        (
            lambda: build_ladder(
                Config().with_values(
                    {"mesh.cp": 3, "engine.prefill_buckets": [256], "engine.max_num_batched_tokens": 256}
                )
            ),
            "engine.prefill_buckets: 256 is not a multiple of 96 rows, its tiles in each of 2 x mesh.cp = 6 blocks; "
            "give 288",
        ),
        (
            lambda: build_ladder(Config().with_values({"engine.prefill_buckets": [320, 1024, 4096]})),
            "engine.prefill_buckets: 1024 rows are 16 chunks of at least 64, fewer than the 20 of the bucket before it",
        ),
    ],
)
def test_constraints_say_their_numbers(make: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_redundant_experts_are_rounded_up_to_the_ranks() -> None:
    """16 experts on 8 ranks: any number of extra slots a rank divides; ep 1 has nothing to balance."""
    config = Config().with_values({"mesh.dp": 8, "mesh.ep": 8, "eplb.preset": "decode"})
    parallel = build_parallel(config, TINY)
    assert (parallel.extra_experts, parallel.balanced) == (8, True)
    alone = build_parallel(Config().with_values({"eplb.preset": "decode"}), TINY)
    assert (alone.extra_experts, alone.balanced) == (0, False)
    with pytest.raises(ValueError, match="never reached without EPLB"):
        Parallel(extra_experts=4)


def test_the_devices_of_a_mesh_are_in_rank_order() -> None:
    plan = DeviceMesh(dp=2, cp=4, ep=2)
    mesh = plan.build()
    assert mesh.axis_names == AXES and list(mesh.devices.flat) == jax.devices()[:8]
    assert plan.rank_axes == RULES["batch"] + RULES["sequence"] == AXES
    assert padded(9, 4) == 12 and padded(8, 4) == 8
