"""A fused hyper-connection site against float64, over every implementation that this machine can run (numerics 10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hyper_connections_oracle import oracle
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_operands import misaligned

from di_jax.model.linear import rms_norm
from kernels_pallas.choice import UnknownImplementation
from kernels_pallas.hopper import KERNEL, UnsupportedShape, unavailable
from kernels_pallas.hyper_connections import api, config, mosaic_gpu_sm90, reference
from kernels_pallas.hyper_connections.config import Tuning, tuned, tuning_for

HC, DIM, LAYERS, LAYER = 4, 1024, 3, 1
CONSTANTS: dict[str, Any] = {"iterations": 20, "eps": 1e-6, "rms_eps": 1e-20}
ON_HOPPER = unavailable() is None
RESULTS = Path(__file__).parents[3] / "scripts" / "results" / "kernel-hyper-connections-nvidia-h200.json"
# 16 CTAs a row or 32; one warpgroup or two; every width of a chunk.
TUNINGS = [Tuning(1, (16, 16)), Tuning(2, (32, 32), 2), Tuning(2, (32, 16, 16), 1), Tuning(1, (64,))]

Run = Callable[..., tuple[jax.Array, ...]]


def implementations() -> list[Any]:
    runs = [pytest.param(partial(api.fused_site, implementation="reference"), id="reference")]
    mode = {} if ON_HOPPER else {"overlap": False, "interpret": plgpu.InterpretGPUParams()}
    for tuning in TUNINGS:
        run = partial(mosaic_gpu_sm90.fused_site, tuning=tuning, **mode)
        runs.append(pytest.param(run, id=f"mosaic-{tuning.warpgroups}-{'-'.join(map(str, tuning.chunks))}"))
    return runs


def inputs(rows: int, *, seed: int = 0, dim: int = DIM) -> dict[str, np.ndarray]:
    """Arrays of a site in the dtypes of the bfloat16 model."""
    generator = np.random.default_rng(seed)
    normal = partial(generator.normal, size=None)
    bf16, f32 = ml_dtypes.bfloat16, np.float32
    comb = np.exp(normal(size=(rows, HC, HC)))
    return {
        "y": normal(size=(rows, dim)).astype(bf16),
        "streams": normal(size=(rows, HC, dim)).astype(bf16),
        "post": generator.uniform(0, 2, size=(rows, HC)).astype(f32),
        "comb": (comb / comb.sum(axis=1, keepdims=True)).astype(f32),
        "pre": generator.uniform(size=(rows, HC)).astype(f32),
        "fn": (normal(size=(LAYERS, (2 + HC) * HC, HC * dim)) * 0.02).astype(f32),
        "base": normal(size=(LAYERS, (2 + HC) * HC)).astype(f32),
        "scale": (1 + 0.3 * normal(size=(LAYERS, 3))).astype(f32),
        "norm_weight": (1 + 0.1 * normal(size=(LAYERS, dim))).astype(bf16),
    }


def oracle_streams(y: np.ndarray, streams: np.ndarray, post: np.ndarray, comb: np.ndarray, **_: Any) -> np.ndarray:
    x, value = streams.astype(np.float64), y.astype(np.float64)
    return post[:, :, None] * value[:, None] + np.einsum("tjk,tjd->tkd", comb.astype(np.float64), x)


def oracle_rest(streams: np.ndarray, pre: np.ndarray, fn: np.ndarray, **weights: np.ndarray) -> list[np.ndarray]:
    """normed, pre', post', comb' in float64 of the new streams, rounded as they are stored."""
    x = streams.astype(np.float64)
    base, scale, weight = (weights[name][LAYER].astype(np.float64) for name in ("base", "scale", "norm_weight"))
    collapsed = np.einsum("tj,tjd->td", pre, x).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    normed = weight * collapsed / np.sqrt((collapsed**2).mean(axis=-1, keepdims=True) + 1e-20)
    return [normed, *oracle(x, fn[LAYER], base, scale)]


def run_site(run: Run, case: dict[str, np.ndarray]) -> list[np.ndarray]:
    # The interpreter's callbacks wait for one another: nothing else may be on its way.
    arrays = jax.block_until_ready({name: jnp.asarray(a) for name, a in case.items()})
    for shape in (case["streams"].shape, case["y"].shape, (len(case["y"]), HC, HC)):
        jax.block_until_ready(jnp.full(shape, jnp.nan))  # memory that an unwritten output would show
    return [np.asarray(a) for a in run(LAYER, **arrays, **CONSTANTS)]


def check(run: Run, case: dict[str, np.ndarray]) -> None:
    streams, normed, *mixes = run_site(run, case)
    assert streams.dtype == normed.dtype == ml_dtypes.bfloat16
    # One rounding: half a bf16 ulp, and fp32 noise of a row's size where terms cancel.
    size = np.maximum(1, np.abs(case["streams"].astype(np.float64)).max(axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(
        streams.astype(np.float64) / size, oracle_streams(**case) / size, rtol=2.0**-8, atol=2e-6
    )
    expected, *expected_mixes = oracle_rest(
        streams, **{n: case[n] for n in ("pre", "fn", "base", "scale", "norm_weight")}
    )
    # A collapsed value next to a rounding boundary may fall on its other side.
    np.testing.assert_allclose(normed.astype(np.float64), expected, rtol=2.0**-7 * 1.01, atol=1e-5)
    assert np.mean(np.abs(normed - expected) > 2.0**-8 * 1.01 * np.abs(expected) + 1e-5) < 1e-3
    for mine, exact in zip(mixes, expected_mixes, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 13, 72])
@pytest.mark.slow
@pytest.mark.parametrize("run", implementations())
def test_against_float64(run: Run, rows: int) -> None:
    check(run, inputs(rows, seed=rows))


@pytest.mark.slow
@pytest.mark.parametrize("run", implementations()[:2])
def test_large_and_vanishing_rows(run: Run) -> None:
    """Rows of zeros stay finite, and steep logits saturate as they should."""
    case = inputs(8)
    case["streams"][2], case["y"][2] = 0, 0
    case["streams"][3] *= 1e4
    case["base"][:] *= 30
    check(run, case)


@pytest.mark.slow
@pytest.mark.parametrize("run", implementations()[:2])
def test_fn_is_not_rounded_to_bf16(run: Run) -> None:
    """The products are those of fp32: with fn rounded to bf16 the check above must fail."""
    case = inputs(8)
    case["fn"] *= 10
    rounded = case | {"fn": case["fn"].astype(ml_dtypes.bfloat16).astype(np.float32)}
    check(run, case)
    for mine, other in zip(run_site(run, case)[2:], run_site(run, rounded)[2:], strict=True):
        assert np.abs(mine - other).max() > 1e-4


@pytest.mark.parametrize("run", implementations()[:2])
def test_nothing_written_leaves_the_streams(run: Run) -> None:
    case = inputs(8)
    y, post, comb = api.nothing_written(jnp.asarray(case["streams"]))
    case |= {"y": np.asarray(y), "post": np.asarray(post), "comb": np.asarray(comb)}
    np.testing.assert_array_equal(run_site(run, case)[0], case["streams"])


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [1, 8, 40, 63, 64, 65, 256, 1000])
def test_released_width_on_the_gpu(rows: int) -> None:
    case = inputs(rows, seed=rows, dim=5120)
    run = partial(api.fused_site, implementation=KERNEL)
    check(run, case)
    for first, second in zip(run_site(run, case), run_site(run, case), strict=True):
        np.testing.assert_array_equal(first, second)  # no order of additions is left to chance


def abstract(rows: int, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(rows, dim=dim).items()}


@pytest.mark.parametrize(
    "rows", [pytest.param(8, marks=pytest.mark.slow), 256, pytest.param(1024, marks=pytest.mark.slow)]
)
def test_tuned_choices_lower(rows: int) -> None:
    """Layouts, types and shared memory of the measured choices are checked by the lowering, which needs no GPU."""
    tuning = tuning_for("NVIDIA H200", 5120, rows)
    run = jax.jit(partial(mosaic_gpu_sm90.fused_site, tuning=tuning, **CONSTANTS))
    lowered = run.trace(jax.ShapeDtypeStruct((), jnp.int32), **abstract(rows, 5120)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 2


def test_operands_begin_where_a_kernel_takes_them() -> None:
    """Sites of scanned layers: the number of the layer is a slice of all numbers, stacks come whole."""
    names = ("y", "streams", "post", "comb", "pre")
    case = abstract(8, 1024)
    tuning = Tuning(1, (64,))

    def sites(whole: bool, numbers: jax.Array, carry: tuple[jax.Array, ...], weights: dict[str, jax.Array]) -> Any:
        def step(carry: tuple[jax.Array, ...], layer: jax.Array) -> Any:
            at = {} if whole else {"base": lax.dynamic_slice_in_dim(weights["base"], layer, 1)}
            run = partial(mosaic_gpu_sm90.fused_site, tuning=tuning, **CONSTANTS)
            streams, y, pre, post, comb = run(layer, **dict(zip(names, carry, strict=True)), **{**weights, **at})
            return (y, streams, post, comb, pre), None

        return lax.scan(step, carry, numbers)

    arguments = (
        jax.ShapeDtypeStruct((LAYERS,), jnp.int32),
        tuple(case[name] for name in names),
        {name: a for name, a in case.items() if name not in names},
    )
    kernels, found = misaligned(partial(sites, True), *arguments)
    assert kernels == 2 and not found
    assert misaligned(partial(sites, False), *arguments)[1], "a slice of a stack would be found"


def test_shared_memory_has_a_bound() -> None:
    run = jax.jit(partial(mosaic_gpu_sm90.fused_site, tuning=Tuning(2, (64, 64)), **CONSTANTS))
    with pytest.raises(ValueError, match="shared memory"):
        run.trace(jax.ShapeDtypeStruct((), jnp.int32), **abstract(64, 5120)).lower(lowering_platforms=("cuda",))


@pytest.mark.skipif(ON_HOPPER, reason="the kernel runs here")
def test_a_named_kernel_raises_where_it_cannot_run() -> None:
    case = inputs(2)
    with pytest.raises(UnsupportedShape, match="needs a GPU"):
        api.fused_site(LAYER, **case, **CONSTANTS, implementation=KERNEL)
    with pytest.raises(UnknownImplementation, match="cuda"):
        api.fused_site(LAYER, **case, **CONSTANTS, implementation="cuda")
    mine, expected = (api.fused_site(LAYER, **case, **CONSTANTS, implementation=i) for i in ("auto", "reference"))
    for a, b in zip(mine, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        compute_capability = "9.0"

    def why(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> str | None:
        return unavailable() or api.unsupported(jax.ShapeDtypeStruct(shape, dtype))

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert why((8, 4, 5120)) is None
    assert "bfloat16" in (why((8, 4, 5120), jnp.float32) or "")
    assert "hc_mult" in (why((8, 2, 5120)) or "")
    assert "hidden_size" in (why((8, 4, 640)) or "")
    monkeypatch.setattr(Device, "compute_capability", "10.0")
    assert "9.0" in (why((8, 4, 5120)) or "")


def test_tuning_is_chosen_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = {"warpgroups": 1, "chunks": [64]}, {"warpgroups": 2, "chunks": [64, 16]}
    (tmp_path / "tuned").mkdir()
    choices = {"5120": [{"rows": 64, "tuning": small}, {"rows": 1024, "tuning": large}]}
    (tmp_path / "tuned" / "some-gpu.json").write_text(json.dumps(choices))
    monkeypatch.setattr(config, "__file__", str(tmp_path / "config.py"))
    tuned.cache_clear()
    assert [tuning_for("Some GPU", 5120, rows).chunks for rows in (1, 64, 65, 9000)] == [
        (64,),
        (64,),
        (64, 16),
        (64, 16),
    ]
    assert tuning_for("Some GPU", 1024, 64) == tuning_for("another", 5120, 64) == Tuning()
    tuned.cache_clear()
    with pytest.raises(ValueError, match="chunks"):
        Tuning(chunks=(48,))
    with pytest.raises(ValueError, match="norm_groups"):
        Tuning(norm_groups=3)


def test_the_reference_is_the_composition_of_its_parts() -> None:
    case = {name: jnp.asarray(a) for name, a in inputs(5).items()}
    streams, normed, *mixed = reference.fused_site(LAYER, **case, **CONSTANTS)
    np.testing.assert_array_equal(streams, reference.expand(case["y"], case["streams"], case["post"], case["comb"]))
    collapsed, *expected = api.site(
        streams, case["pre"], case["fn"][LAYER], case["base"][LAYER], case["scale"][LAYER], **CONSTANTS
    )
    norm = rms_norm(collapsed, case["norm_weight"][LAYER], 1e-20)
    np.testing.assert_array_equal(normed, norm.astype(normed.dtype))
    for mine, other in zip(mixed, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_measurements_meet_the_first_target() -> None:
    """256 rows: 35 us. Nothing is faster than its floor, and the tuned choice is the fastest measured one."""
    rows = json.loads(RESULTS.read_text())["rows"]
    assert all(row["floor_us"] < row["us"] for row in rows)
    for count in {row["rows"] for row in rows}:
        best = min((row for row in rows if row["rows"] == count), key=lambda row: row["us"])
        tuning = Tuning(**best["tuning"] | {"chunks": tuple(best["tuning"]["chunks"])})
        if count != 64:  # one choice was measured there, between two others
            assert tuning_for("NVIDIA H200", 5120, count) == tuning
        if count == 256:
            assert best["us"] <= 35
    assert 256 in {row["rows"] for row in rows}
