"""The check of whole engines by `auto`: what it lets pass, what its requests cover, a spoilt kernel that it sees."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.commands.bench_slice.random_arrays import uniform
from di_jax.engine.engine import Engine
from di_jax.engine.prefix_cache import hit_limit
from di_jax.engine.runner import ModelRunner
from di_jax.engine.setup import build_ladder
from di_jax.model.cache import EngineState
from di_jax.model.config import check_decoder_replay
from di_jax.platforms.compiler import Compiler
from kernels_pallas import hopper
from kernels_pallas.sparse_attention import api as sparse_attention
from scripts import kernel_check, kernel_check_layers
from scripts import kernel_check_engine as check
from scripts.kernel_check_engine import (
    DEFINITION,
    MESHES,
    REFERENCE,
    EngineSizes,
    Judgement,
    distances,
    inexact,
    too_far,
)

SIZES = {"released": check.released_engine(), "small": check.small_engine()}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's optimizations take longer than what they save here."""
    monkeypatch.setattr(kernel_check_layers, "compiler", lambda: Compiler({"xla_backend_optimization_level": 0}))


# ---- what passes ----


def errors(scale: float, seed: int = 0) -> np.ndarray:
    return scale * np.abs(np.random.default_rng(seed).normal(size=192))


NONE, EVEN = np.zeros(192), np.full(192, 0.1)


def found(error: np.ndarray, regret: np.ndarray = NONE, spread: np.ndarray = EVEN) -> dict[str, float]:
    return distances(Judgement(error, regret, spread))


def test_what_passes_and_what_does_not() -> None:
    bar = found(errors(0.1))

    def problems(error: np.ndarray, regret: np.ndarray = NONE, spread: np.ndarray = EVEN) -> list[str]:
        return [each.split(" ")[0] for each in too_far(found(error, regret, spread), bar)]

    assert problems(errors(0.1)) == [] and problems(errors(0.14)) == [] and problems(NONE) == []
    assert problems(errors(0.2)) == ["median", "p90"] and problems(errors(0.4)) == ["median", "p90", "worst_in_spreads"]
    assert problems(errors(0.2).clip(max=0.1)) == ["median"]
    one = errors(0.1)
    one[7] = 2.9 * bar["worst"]
    assert problems(one) == []
    one[7] = 3.1 * bar["worst"]
    assert problems(one) == ["worst_in_spreads"]
    wide = EVEN.copy()
    wide[7] = 0.4  # at that token the definition itself moves far
    assert problems(one, spread=wide) == [] and problems(np.roll(one, 1), spread=wide) == ["worst_in_spreads"]
    one[7] = 12.1 * bar["worst"]
    assert problems(one, spread=wide) == ["worst_in_spreads"]
    one[7] = 0.8 * bar["worst"]
    assert problems(one) == [] and problems(one, spread=EVEN - wide / 5) == ["worst_in_spreads"]
    one[7] = np.nan
    assert problems(one) == ["median", "p90", "worst_in_spreads"]
    behind = NONE.copy()
    behind[3] = 2.9 * bar["worst"]  # both logits off by nearly 1.5 times the reference's worst
    assert problems(errors(0.1), behind) == []
    behind[3] = 3.1 * bar["worst"]
    assert problems(errors(0.1), behind) == ["regret_in_spreads"]
    assert problems(errors(0.1), behind, wide) == ["regret_in_spreads"]
    wide[3] = 0.4
    assert problems(errors(0.1), behind, wide) == []
    assert found(errors(0.1), behind)["best_same"] == 191 / 192


def test_what_is_exact() -> None:
    def problems(error: np.ndarray, regret: np.ndarray = NONE) -> list[str]:
        return [each.split(" ")[0] for each in inexact(found(error, regret))]

    one = NONE.copy()
    one[7] = 0.9 * check.EXACT
    assert problems(one, one) == []
    one[7] = 1.1 * check.EXACT
    assert problems(one) == ["worst"] and problems(NONE, one) == ["worst_regret"]
    one[7] = np.nan
    assert problems(one, one) == ["worst", "worst_regret"]


def test_embeddings_move_by_a_unit_in_the_last_place_and_back() -> None:
    own = nnx.Param(uniform((512, 128), 3, 1.0, jnp.bfloat16).at[5].set(0))
    params = {"embed": {"weight": own}}
    turns = []
    for _ in check.moved_embeddings(cast(ModelRunner, SimpleNamespace(params=params))):
        turns.append(np.asarray(params["embed"]["weight"].get_value()))
    assert params["embed"]["weight"] is own and len(turns) == check.MOVED
    before = np.asarray(own.get_value())
    up, down = (
        np.asarray(jnp.nextafter(own.get_value(), jnp.full((), way, jnp.bfloat16))) for way in (np.inf, -np.inf)
    )
    ways = np.array([np.where(each == before, 0, np.where(each == up, 1, 2)) for each in turns])
    assert all(((each == before) | (each == up) | (each == down)).all() for each in turns)
    share = np.array([(ways == way).mean(axis=(1, 2)) for way in range(3)])
    np.testing.assert_allclose(share, 1 / 3, atol=0.02)
    # No two turns move alike: of pairs of unrelated ones a third of the numbers go the same way.
    alike = [(ways[i] == ways[j]).mean() for i in range(check.MOVED) for j in range(i)]
    np.testing.assert_allclose(alike, 1 / 3, atol=0.02)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({}, []),
        ({"num_cached_tokens": 0}, ["no prompt was found in the caches"]),
        ({"accepted": 0}, ["0 of 20 drafts were accepted"]),
        ({"accepted": 20}, ["20 of 20 drafts were accepted"]),
        ({"num_preemptions": 1}, ["a request was preempted: its replay keeps other rows"]),
    ],
)
def test_what_answers_have_to_show(counts: dict[str, int], problem: list[str]) -> None:
    right = {"num_cached_tokens": 256, "verified": 20, "accepted": 15, "num_preemptions": 0}
    assert right.keys() == set(check.COUNTS) and check.uncovered(right | counts) == problem


# ---- what is asked ----


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_the_requests_cover(sizes: EngineSizes) -> None:
    """Several chunks, more entries than are selected, rows that the decoder layers drop, two hits that leave the rows
    of the replay to compute, and room for all to be answered without preemption."""
    c, prompts, engine = sizes.config, sizes.prompts(), sizes.settings("auto").engine
    check_decoder_replay(c, sizes.keep_tokens)
    lengths = [len(prompt) for prompt in prompts]
    assert max(lengths) > 2 * sizes.rows and max(lengths) // 2 > c.index_topk and min(lengths) < c.sliding_window + 40
    assert max(lengths) + sizes.answer <= sizes.context and len(prompts) > sizes.running
    assert (engine.num_blocks or 0) * 128 >= len(prompts) * sizes.context
    texts = [number for _, number, shared, _ in sizes.asks if shared]
    assert sorted(texts) == [0, 0, 2, 2]
    for at, (_, number, hit, _) in enumerate(sizes.asks):
        first = next(n for n, (_, other, _, _) in enumerate(sizes.asks) if other == number)
        if first == at:
            continue
        assert hit % 128 == 0 and hit >= 256 and prompts[at][:hit] == prompts[first][:hit]
        assert prompts[at][hit] != prompts[first][hit]
        assert hit == lengths[first] // 128 * 128  # where the window state is kept
        assert hit <= hit_limit(lengths[at], c.window_ring, 128)
        assert hit <= lengths[at] - sizes.keep_tokens  # the decoder layers run what they run without the hit
    assert any(bucket.drops_rows for bucket in build_ladder(sizes.settings("auto")).buckets())


def test_the_definition_does_nothing_of_what_it_is_to_show() -> None:
    sizes = SIZES["small"]
    plain, reference = sizes.settings(DEFINITION), sizes.settings(REFERENCE)
    assert (plain.model.dtype, reference.model.dtype) == ("float32", "bfloat16")
    assert not (plain.drafting.enabled or plain.engine.prefix_caching or plain.engine.async_scheduling)
    assert not any(bucket.drops_rows for bucket in build_ladder(plain).buckets())
    assert reference.drafting.enabled and reference.engine.prefix_caching and reference.engine.async_scheduling
    for name, mesh in MESHES.items():
        own = sizes.settings(name)
        assert own.kernels.implementation == "auto" and own.mesh.plan == mesh
        assert dataclasses.replace(own, kernels=reference.kernels, mesh=reference.mesh) == reference


# ---- which implementation ran ----


@pytest.mark.parametrize("name", MESHES)
def test_the_implementation_is_told_by_mesh(name: str) -> None:
    def chosen(x: Any) -> Any:
        run = hopper.choose_kernel("index_topk", "auto", jnp.sin, jnp.cos, "it is Monday")
        hopper.choose_kernel("sparse_attention", "auto", jnp.sin, jnp.cos, None)
        hopper.choose_kernel("sparse_attention", "reference", jnp.sin, jnp.cos, None)
        return run(x)

    mesh = MESHES[name].build()
    spec = PartitionSpec(mesh.axis_names)
    with check.resolved() as found:
        jax.jit(jax.shard_map(chosen, mesh=mesh, in_specs=spec, out_specs=spec)).lower(jnp.zeros(2))
    assert found == {(name, "index_topk", "reference, as it is Monday"), (name, "sparse_attention", hopper.KERNEL)}


# ---- in small ----


@pytest.mark.slow
def test_a_kernel_that_loses_the_selected_entries_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And, on a machine that has the kernels, that others were not computed by theirs."""

    def kernel(*args: Any, **options: Any) -> Any:
        selected = args[5] if args[5] is None else jnp.full_like(args[5], -1)
        return sparse_attention.reference.sparse_attention(*args[:5], selected, *args[6:], **options)

    monkeypatch.setattr(sparse_attention, "unavailable", lambda: None)
    monkeypatch.setattr(sparse_attention, "unsupported", lambda *_: None)
    monkeypatch.setattr(sparse_attention, "_kernel", kernel)
    monkeypatch.setattr(hopper, "unavailable", lambda: None)
    result = check.engine_result(SIZES["small"], ["auto"])
    problems = result["problems"]
    assert any(each.startswith("auto: median ") for each in problems), problems
    assert any(each.startswith("auto: index_topk was computed by ['reference, as it needs a GPU") for each in problems)
    assert not any("sparse_attention" in each or each.startswith("reference") for each in problems)
    assert result["results"]["auto"]["kernels"]["sparse_attention"] == [hopper.KERNEL]


def other_token(state: EngineState) -> dict[str, Array]:
    return {"last_token": state.last_token ^ 1}


def lost_block(state: EngineState) -> dict[str, Array]:
    return {"compressed": state.compressed.at[0].set(0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "change", "seen"),
    [
        (False, other_token, ["worst_in_spreads", "regret_in_spreads"]),
        (True, lost_block, ["worst"]),  # of one request, by 0.2 nats: bfloat16 is off by as much
    ],
)
def test_a_state_spoilt_once_is_seen(
    monkeypatch: pytest.MonkeyPatch, exact: bool, change: Callable[[EngineState], dict[str, Array]], seen: list[str]
) -> None:
    """Of cp=2, before its tenth step, when it answers four requests; the reference is left alone."""
    with_oracle, spoilt = check.with_oracle, list[int]()

    def with_fault(engine: Engine, answers: Sequence[Sequence[int]]) -> None:
        with_oracle(engine, answers)
        runner, step = engine.runner, engine.step

        def spoiling() -> Any:
            if engine.num_steps == 9 and not spoilt:
                state = runner.state
                other = {name: jax.device_put(a, getattr(state, name).sharding) for name, a in change(state).items()}
                runner.state = state.replace(**other)
                spoilt.append(engine.num_steps)
            return step()

        if runner.plan.cp == 2:
            engine.step = spoiling  # type: ignore[method-assign]

    monkeypatch.setattr(check, "with_oracle", with_fault)
    result = check.engine_result(dataclasses.replace(SIZES["small"], exact=exact), ["cp=2"])
    assert spoilt == [9]
    assert [each.split(" ")[:2] for each in result["problems"]] == [["cp=2:", name] for name in seen]


@pytest.mark.slow
def test_engines_in_float32_are_exact_on_every_mesh() -> None:
    """So chunks, hits, replay, drafts and launches ahead are right at every token: in bfloat16 one of 192 may be off
    by 2.7 nats by rounding alone."""
    result = check.engine_result(dataclasses.replace(SIZES["small"], exact=True))
    assert result["problems"] == [] and set(result["results"]) == {REFERENCE, *MESHES}
    for name, found in result["results"].items():
        assert found["answers_same"] == 6 and found["worst"] < check.EXACT and found["best_same"] == 1, name
        assert found["num_cached_tokens"] == 768 and found["accepted"] > 20, name


@pytest.fixture
def kept_cache() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    kept = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in kept.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_engines_pass_in_small_on_every_mesh(kept_cache: None, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    assert kernel_check.main(["--sections", "engine", "--output", str(file)]) == 0
    engine = json.loads(file.read_text(encoding="utf-8"))["engine"]
    results = engine["results"]
    assert engine["problems"] == [] and set(results) == {REFERENCE, *MESHES}
    assert results["auto"]["median"] == results[REFERENCE]["median"]  # on a CPU the same programs
    for name, found in results.items():
        assert found["accepted"] > 20 and found["num_cached_tokens"] == 768 and found["best_same"] > 0.9, name
        assert bool(found["kernels"]) == (name != REFERENCE)
        assert all("it needs a GPU" in took for each in found["kernels"].values() for took in each)
