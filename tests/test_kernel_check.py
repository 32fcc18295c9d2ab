"""The check of whole models by every implementation: what it lets pass, and spoilt kernels that it does not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.engine.compiling import compile_together
from di_jax.platforms.compiler import Compiler
from kernels_pallas.choice import OPERATIONS, KernelChoice
from kernels_pallas.hopper import KERNEL, WITH_KERNELS
from kernels_pallas.hyper_connections import api as hyper_connections
from kernels_pallas.index_topk import api as index_topk
from kernels_pallas.sparse_attention import api as sparse_attention
from scripts import kernel_check
from scripts import kernel_check_layers as layers
from scripts.kernel_check import GoldenFeeder
from scripts.kernel_check_layers import Computed, LayerModel, distances, too_far
from tests import golden_model as tiny

SMALL = layers.small_sizes()
# Window-only and candidate source: the least in which a selection is read.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "compress_ratios": (0, 1),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1,),
    "candidate_source_layer_id": 1,
}
TWO = dataclasses.replace(SMALL, config=dataclasses.replace(SMALL.config, **TWO_LAYERS))


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """XLA's optimizations take longer than what they save here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernel_check, layers):
            patch.setattr(module, "compiler", lambda: Compiler({"xla_backend_optimization_level": 0}))
        yield


@pytest.fixture(scope="module", params=["two", pytest.param("all", marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest) -> LayerModel:
    return LayerModel(TWO if request.param == "two" else SMALL, "float32", layers.REFERENCE)


@dataclasses.dataclass
class Measured:
    """Rows of the definition, and the reference's distances from them."""

    exact: Computed
    bar: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def measured(exact: LayerModel) -> Measured:
    plain = LayerModel(exact.sizes, "bfloat16", layers.REFERENCE, exact)
    compile_together([*exact.jobs(), *plain.jobs()])
    rows = exact.compute()
    return Measured(rows, distances(plain.compute(), rows))


def by_kernel(
    monkeypatch: pytest.MonkeyPatch, exact: LayerModel, api: Any, change: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Computed with `change` of the reference's results as the operation's kernel."""
    run = getattr(api.reference, {hyper_connections: "fused_site"}.get(api, api.OPERATION))

    def kernel(*args: Any, **options: Any) -> Any:
        args = args[1:] if api is hyper_connections else args  # its first one is the streams' shape
        return change(run(*args, **options))

    monkeypatch.setattr(api, "unavailable", lambda: None)
    monkeypatch.setattr(api, "unsupported", lambda *_: None)
    monkeypatch.setattr(api, "_kernel", kernel)
    model = LayerModel(exact.sizes, "bfloat16", KernelChoice("reference", ((api.OPERATION, KERNEL),)), exact)
    assert compile_together(model.jobs()) == [None, None]
    return {"found": distances(model.compute(), exact.compute())}


def test_selected_entries_that_are_shifted_are_seen(
    monkeypatch: pytest.MonkeyPatch, exact: LayerModel, measured: Measured
) -> None:
    def shifted(result: tuple[Any, Any]) -> tuple[Any, Any]:
        selected, blocks = result
        return jnp.where(selected > 0, selected - 1, selected), blocks

    found = by_kernel(monkeypatch, exact, index_topk, shifted)["found"]
    problems = too_far(found, measured.bar)
    for phase in ("prefill", "decode"):
        assert any(each.startswith(f"{phase}: median error after layer 1") for each in problems), problems
        assert any(each.startswith(f"{phase}: other entries in layer 1") for each in problems), problems
    assert not any("after layer 0" in each for each in problems)


@pytest.mark.slow
@pytest.mark.parametrize("exact", ["all"], indirect=True)
@pytest.mark.parametrize(
    ("api", "change", "wrong"),
    [
        (sparse_attention, lambda out: out, False),
        (sparse_attention, lambda out: jnp.roll(out, 1, axis=1), True),  # heads
        (sparse_attention, lambda out: out * 1.03, True),
        (hyper_connections, lambda site: site, False),
        (hyper_connections, lambda site: (site[0], site[1], *site[2:4], site[4].swapaxes(1, 2)), True),
        (index_topk, lambda found: found, False),
    ],
)
def test_kernels_right_and_wrong(
    monkeypatch: pytest.MonkeyPatch,
    exact: LayerModel,
    measured: Measured,
    api: Any,
    change: Callable[[Any], Any],
    wrong: bool,
) -> None:
    found = by_kernel(monkeypatch, exact, api, change)["found"]
    assert bool(too_far(found, measured.bar)) == wrong, too_far(found, measured.bar)


def test_the_reference_in_bfloat16_is_near_the_definition(measured: Measured) -> None:
    assert not too_far(measured.bar, measured.bar)
    for phase, rows in (("prefill", 163), ("decode", 24)):
        own = measured.bar[phase]
        assert own["rows"] == rows and 0 < own["median"] < 0.3 and own["argmax_same"] > 0.9
        assert own["median_by_layer"][0] < 0.02


def test_rows_of_one_decode_step_are_those_of_several(
    monkeypatch: pytest.MonkeyPatch, exact: LayerModel, measured: Measured
) -> None:
    def decoded(rows: Computed) -> dict[tuple[int, int], np.ndarray]:
        """Logits by slot and position."""
        places = [
            (chunk.slot, chunk.start + n)
            for plan in exact.sizes.steps()
            if plan.bucket.decode
            for chunk in plan.chunks
            for n in range(len(chunk.tokens))
        ]
        return dict(zip(places, rows.logits[rows.decode], strict=True))

    several = decoded(measured.exact)
    monkeypatch.setattr(layers, "DECODES", ((1, 1, 1),) * 8)
    single = decoded(exact.compute())
    assert several.keys() == single.keys() and len(single) == 24
    for place, logits in single.items():
        np.testing.assert_allclose(several[place], logits, atol=1e-3 * np.abs(logits).max())


def rows_of(scale: float, selected: np.ndarray) -> Computed:
    """Made-up rows with noise of so much on all of them."""
    lots = np.random.default_rng(3)
    logits, streams = lots.normal(size=(40, 64)), lots.normal(size=(5, 40, 32))
    noise = np.random.default_rng(int(scale * 1000))
    logits = logits + scale * noise.normal(size=logits.shape)
    streams = streams + scale * noise.normal(size=streams.shape)
    return Computed(np.arange(40) >= 30, logits, streams, {1: selected})


def test_what_passes_and_what_does_not() -> None:
    selected = np.sort(np.random.default_rng(1).permuted(np.tile(np.arange(50), (40, 1)), axis=1)[:, :8])
    selected[:5, 3:] = -1
    exact, plain = rows_of(0, selected), rows_of(0.01, selected)
    bar = distances(plain, exact)

    def problems(mine: Computed) -> list[str]:
        return too_far(distances(mine, exact), bar)

    assert not problems(rows_of(0.013, selected)) and not problems(exact)
    assert any("prefill: median error " in each for each in problems(rows_of(0.02, selected)))
    row = rows_of(0.01, selected)
    row.logits[35] += 0.1 * np.random.default_rng(0).normal(size=64)
    assert [each.split(" ")[:2] for each in problems(row)] == [["decode:", "worst"]]
    row.logits[35, 0] = np.nan
    assert any("decode: worst error nan" in each for each in problems(row))
    layer = rows_of(0.01, selected)
    layer.streams[2] += 0.02
    assert {each.split(", ")[0].rpartition(" ")[0] for each in problems(layer)} == {
        "prefill: median error after layer 2",
        "decode: median error after layer 2",
    }
    assert any("other entries in layer 1" in each for each in problems(rows_of(0.01, selected + 1)))


def test_shares_of_entries() -> None:
    exact = np.array([[1, 4, 7], [2, -1, -1], [-1, -1, -1]])
    assert layers.shared_entries(exact, exact) == 1
    assert layers.shared_entries(np.array([[4, 5, 7], [-1, -1, -1], [0, 1, 2]]), exact) == 0.5


def test_every_operation_with_a_kernel_is_tried_alone_and_together() -> None:
    operations = list(WITH_KERNELS)
    assert {"hyper_connections", "index_topk", "sparse_attention"} <= set(operations) <= set(OPERATIONS)
    assert "expert_ffn" not in operations
    choices = layers.layer_choices(operations)
    assert list(choices) == [*operations, "all"]
    for name in operations:
        assert [op for op in OPERATIONS if choices[name].of(op) == KERNEL] == [name]
    assert [op for op in OPERATIONS if choices["all"].of(op) == KERNEL] == operations


def test_a_kernel_that_cannot_run_says_why(exact: LayerModel) -> None:
    model = LayerModel(exact.sizes, "bfloat16", KernelChoice("reference", (("sparse_attention", KERNEL),)), exact)
    assert "it needs a GPU" in str(model.jobs()[0]())


def test_what_is_fed() -> None:
    """Odd seams; a context beyond all candidates, one beyond what is selected, one that begins; every kind of layer."""
    for sizes in (SMALL, layers.released_sizes()):
        c, plans = sizes.config, list(sizes.steps())
        assert [plan.bucket.decode for plan in plans] == [False, False] + [True] * len(layers.DECODES)
        assert all(chunk.start % 2 for chunk in plans[1].chunks[:2])
        first = plans[0].chunks
        assert first[0].start > c.candidate_topk_blocks * c.candidate_block_size > c.index_topk and not first[1].start
        ends = {chunk.slot: chunk.start + len(chunk.tokens) for plan in plans for chunk in plan.chunks}
        assert max(ends.values()) <= sizes.context
        kinds = {(p.ratio, p.owns_kv, p.owns_index, p.is_candidate_source, p.is_reindex) for p in c.layers}
        assert len(kinds) == 5 and [len(run) for run in c.layer_runs] == [1, 1, 2, 1, 1]


class Told(GoldenFeeder):
    """A feeder whose caches are those of the golden."""

    def __init__(self, variant: str, expected: dict[str, np.ndarray]) -> None:
        self.variant, self.expected = variant, expected

    def stored(self, layer: int, lane: tiny.Lane) -> tuple[np.ndarray, np.ndarray]:
        return self.expected[f"L{layer}/compressed_kv"], self.expected[f"L{layer}/index_k"]


@pytest.mark.parametrize("variant", ["nokvq", "kvq"])
def test_goldens_are_held_to_their_bars(variant: str) -> None:
    expected = tiny.golden(variant, "p64")
    lane = tiny.Lane(expected["input_ids"].tolist())
    count, numbers = len(lane.tokens), range(tiny.TINY.num_hidden_layers)
    right = tiny.Fed(
        expected["logits"],
        np.zeros(0),
        np.stack([expected[f"L{n}/expert_ids"] for n in numbers]),
        {n: expected[f"L{n}/topk_idx"] for n in tiny.TINY.index_source_layer_ids},
        0,
    )
    feeder = Told(variant, expected)
    assert feeder.compare(expected, lane, right) == (0.0, [])
    off = dataclasses.replace(right, logits=right.logits + 1.1 * feeder.bar)
    assert any("logits differ" in each for each in feeder.compare(expected, lane, off)[1])
    nan = dataclasses.replace(right, logits=np.where(np.arange(count)[:, None] == 5, np.nan, right.logits))
    assert feeder.compare(expected, lane, nan)[1]
    selected = {n: found.copy() for n, found in right.selected.items()}
    selected[2][40, 0] += 1
    assert feeder.compare(expected, lane, dataclasses.replace(right, selected=selected))[1] == [
        "other experts or entries were chosen"
    ]
    name = "L2/compressed_kv"
    flipped = Told(variant, {**expected, name: expected[name] + 0.5})
    assert any("cache codes differ" in each for each in flipped.compare(expected, lane, right)[1])


def test_quantizers_are_held_to_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_check.quantizer_problems() == []
    monkeypatch.setattr(kernel_check, "fake_quantize", lambda codec, x: x)
    assert len(kernel_check.quantizer_problems()) == 3


def test_the_command_writes_its_results_and_fails_on_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {name: getattr(jax.config, name) for name in CACHE}
    file = tmp_path / "results" / "check.json"
    try:
        for problems in ([], ["'copy' was answered 'b'"]):
            monkeypatch.setattr(kernel_check, "demo_result", lambda _, problems=problems: {"problems": problems})
            assert kernel_check.main(["--sections", "demo", "--output", str(file)]) == len(problems)
            result = json.loads(file.read_text())
            assert json.loads(capsys.readouterr().out) == result
            assert result["passed"] == (not problems) and result["demo"]["problems"] == problems
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)


def test_the_committed_check_passed_with_every_kernel() -> None:
    """On a GPU, where each runs: no farther from the definition than FACTOR times the reference in bfloat16. Its
    likeliest token is the definition's as often, within three standard errors of two shares: of random weights' logits
    many are close."""
    file = Path(__file__).parent.parent / "scripts" / "results" / "kernel-check-nvidia-h200.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept["passed"] and all(kept[name]["problems"] == [] for name in ("goldens", "layers"))
    results = kept["layers"]["results"]
    assert set(results) == {"reference", "all", *kept["operations"]} and len(kept["operations"]) == 4
    for name, found in results.items():
        for phase in ("prefill", "decode"):
            bar = results["reference"][phase]
            share, rows = bar["argmax_same"], bar["rows"]
            assert found[phase]["argmax_same"] >= share - 3 * (2 * share * (1 - share) / rows) ** 0.5, name
            assert found[phase]["median"] <= layers.FACTOR * results["reference"][phase]["median"], name


CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.mark.slow
def test_the_check_passes_in_small(tmp_path: Path) -> None:
    kept = {name: getattr(jax.config, name) for name in CACHE}
    file = tmp_path / "check.json"
    try:
        sections = ["goldens", "layers", "demo"]  # engines have a test of their own
        assert kernel_check.main(["--sections", *sections, "--output", str(file)]) == 0
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
    result = json.loads(file.read_text())
    assert result["passed"] and all(result[name]["problems"] == [] for name in sections)
    for name in [*result["operations"], "all"]:
        assert "it needs a GPU" in result["layers"]["results"][name]
    assert len(result["goldens"]["results"]) == 3
