"""The bench command of kind slice: one rank of a deployment, its steps, parts, floors, arithmetic and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from di_jax import run
from di_jax.commands import plan
from di_jax.commands.bench_slice import deployment, floors, measuring, parts
from di_jax.commands.bench_slice.points import DecodePoint, Point, PrefillPoint
from di_jax.commands.bench_slice.random_arrays import local_params, random_params, random_state
from di_jax.commands.bench_slice.rank import Rank, tree_bytes
from di_jax.commands.plan import DECODE, Planner, released_config
from di_jax.commands.roofline import Peaks, published_peaks
from di_jax.config import Config, load_config
from di_jax.errors import ConfigError
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.devices import MemoryRoom

PLOT = Path(__file__).parents[1] / "scripts" / "plot_bench.py"
H200 = Peaks(4.3e12, 760e12, 1469e12)
# Four layers are the least that have all there is: window-only, pooled source with Engram, decoder boundary, Reindex.
FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [2914],
    "dspark_target_layer_ids": [3],
    "num_nextn_predict_layers": 1,
}
SMALL = {
    "model.dtype": "bfloat16",
    "engine.max_model_len": 512,
    "engine.max_num_batched_tokens": 512,
    "engine.max_num_seqs": 2,
    "bench.batch_sizes": [2],
    "bench.repeats": 2,
    "bench.slice.ep": 4,
    "bench.slice.prefill_rows": [256],
    "kernels.implementation": "reference",
    "platform.compiler_options": {"xla_backend_optimization_level": 0},
}


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers in the released formats; no weights."""
    config = json.loads((golden / "tiny-v41-fp8" / "config.json").read_text())
    config["text_config"].update(FOUR_LAYERS)
    made = tmp_path_factory.mktemp("four-layers")
    (made / "config.json").write_text(json.dumps(config))
    return made


def small(folder: Path, **changes: Any) -> Config:
    return load_config("h200_slice").with_values({**SMALL, "model.path": str(folder), **changes})


def rank_of(config: Config) -> Rank:
    model_config = released_config(config.model.path)
    return Rank(deployment.deployment(config), model_config, jax.devices()[0])


def real_rank(ep: int) -> Rank:
    return rank_of(load_config("h200_slice", [f"bench.slice.ep={ep}"]))


# ---- a whole run, in small ----


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """What a run of both phases leaves: results, their file, and what it printed."""
    file = tmp_path_factory.mktemp("results") / "slice-cpu.json"
    settings = {**SMALL, "model.path": str(folder)}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("di_jax.commands.bench.print_result", printed.append)
        assert run.main(["bench", "--config", "h200_slice", *words, "--json", "--output", str(file)]) == 0
    return json.loads(printed[-1]), file, printed[0]


def test_rows_of_both_steps(results: tuple[dict[str, Any], Path, str]) -> None:
    result, file, table = results
    assert (result["kind"], result["rows"]) == ("slice", json.loads(file.read_text())["rows"])
    decode, prefill = result["rows"]
    assert [row["label"] for row in (decode, prefill)] == ["XLA", "XLA"]
    assert (decode["phase"], decode["batch"], decode["rows"], decode["tau"]) == ("decode", 2, 8, 3.25)
    assert (prefill["phase"], prefill["rows"], prefill["kept_rows"], prefill["context"]) == ("prefill", 256, 144, 512)
    for row in (decode, prefill):
        assert row["fits"] and row["local_slots"] == 12 and "1/64 of the rows" in row["engram"]
        assert row["roofline_fraction"] == pytest.approx(row["roofline_ms"] / row["step_ms"])
        assert row["roofline_ms"] == pytest.approx(sum(part["floor_ms"] for part in row["parts"].values()))
        assert all(part["ms"] > 0 and part["floor_ms"] > 0 for part in row["parts"].values())
        told = sum(part["ms"] for part in row["parts"].values())
        assert row["other_ms"] == pytest.approx(row["step_ms"] - told)
        wire = row["with_communication"]
        assert wire["step_ms"] == pytest.approx(row["step_ms"] + wire["communication_ms"])
        assert "not measured" in wire["note"] and wire["collectives"] > 8
        for seconds in row["compile_s"].values():
            assert all(seconds[name] > 0 for name in ("trace", "cold", "warm"))
        assert 1 <= row["expert_rounds"] < 3
        assert row["memory"]["peak"] > row["memory"]["weights"] + row["memory"]["caches"]
    assert set(decode["programs_ms"]) == {"verify", "accept", "draft"} and prefill["programs_ms"] == {}
    assert set(decode["parts"]) == {*parts.RUNS, "sampling", "draft"} and set(prefill["parts"]) == set(parts.RUNS)
    assert list(decode["compile_s"]) == ["verify", "accept", "draft"]
    assert decode["tokens_per_s"] == pytest.approx(2 * 3.25 * 1e3 / decode["step_ms"])
    assert decode["tokens_per_s_per_user"] == pytest.approx(3.25 * 1e3 / decode["step_ms"])
    assert prefill["tokens_per_s"] == pytest.approx(256 * 1e3 / prefill["step_ms"])
    assert [line.split()[0] for line in table.splitlines() if not line.startswith(" ")] == [
        "phase",
        "decode",
        "prefill",
    ]


def test_the_plot_has_a_curve_for_each_label(results: tuple[dict[str, Any], Path, str], tmp_path: Path) -> None:
    committed = json.loads(results[1].read_text())
    later = [{**row, "label": "faster", "step_ms": row["step_ms"] / 2} for row in committed["rows"]]
    unfit = {**committed["rows"][1], "fits": False, "problem": "does not fit"}
    for name in ("step_ms", "parts", "with_communication", "tokens_per_s"):
        unfit.pop(name)
    file = tmp_path / "slice.json"
    file.write_text(json.dumps({**committed, "rows": [*committed["rows"], *later, unfit]}))
    drawn = subprocess.run([sys.executable, PLOT, file], capture_output=True, text=True, check=True)
    assert Path(drawn.stdout.strip()).read_bytes().startswith(b"\x89PNG")


# ---- the rank ----


@pytest.mark.parametrize(
    ("ep", "slots", "gigabytes", "table_rows"), [(64, 7, 5.3, 6.0e6), (8, 49, 36.9, 48.0e6), (4, 104, 78.2, 6.0e6)]
)
def test_local_slots_of_the_released_model(ep: int, slots: int, gigabytes: float, table_rows: float) -> None:
    rank = real_rank(ep)
    leaves = floors.leaves(rank.params[0])
    experts = {path: leaf for path, leaf in leaves.items() if path.startswith("layers.ffn.experts.")}
    assert rank.local_slots == slots and {leaf.shape[:2] for leaf in experts.values()} == {(40, slots)}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in experts.values()) / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert leaves["engram_tables.0.weight"].shape[0] == pytest.approx(table_rows, rel=0.01)
    # What is not shared out is whole: the router chooses among all experts.
    assert leaves["layers.ffn.gate.weight"].shape == (40, 384, 5120)
    assert floors.leaves(rank.params[1])["stages.ffn.experts.w1.weight"].shape[1] == 128 // ep


@pytest.mark.slow
def test_a_rank_gets_as_many_expert_rows_as_it_sends(folder: Path) -> None:
    """Alone in its mesh it serves its own rows for all ranks: of each pair the slot that stands in for its own."""
    rank = rank_of(small(folder))
    model = nnx.merge(rank.graphs[0], rank.make_weights()[0])
    ffn, rows, k = model.layers.ffn, 16, rank.model_config.num_experts_per_tok
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 128)), jnp.bfloat16)
    slot = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.arange(48), (rows, 1)), axis=1)[:, :k], jnp.int32)
    weight = jnp.full((rows, k), 0.25, jnp.float32)
    spec = jax.sharding.PartitionSpec()
    body = jax.shard_map(
        lambda x, slot, weight: ffn._dispatched(1, x, slot, weight, 4),
        mesh=rank.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    sent = jax.jit(body)(x, slot, weight)
    here = ffn._routed(1, x, slot % rank.local_slots, weight)
    other = ffn._routed(1, x, (slot + 1) % rank.local_slots, weight)
    scale = float(jnp.max(jnp.abs(here)))
    assert float(jnp.max(jnp.abs(sent - here))) < 0.02 * scale < float(jnp.max(jnp.abs(other - here)))


@pytest.mark.slow
def test_random_weights_keep_their_formats(folder: Path) -> None:
    rank = rank_of(small(folder))
    for abstract, made in zip(rank.params, rank.make_weights()):
        for spec, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(made)):
            assert (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                assert np.isfinite(np.asarray(leaf, np.float32)).all()
    again = random_params(rank.params[0], rank.model_config, rank.sharding, 48)
    first = jax.tree.leaves(rank.make_weights()[0])
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(again), first))
    query = floors.leaves(again)["layers.attn.wq_b.weight"]
    assert len(np.unique(np.asarray(query[0]).view(np.uint8))) == 128  # all of e4m3 below 2, no NaN


def test_caches_hold_what_their_codecs_write(folder: Path) -> None:
    rank = rank_of(small(folder))
    layout = rank.layout(2)
    state = random_state(layout, 300, jax.tree.map(lambda _: rank.sharding, layout.abstract()))
    assert tree_bytes(state) == tree_bytes(layout.abstract())
    for name in ("compressed", "index", "window"):
        values = np.asarray(getattr(layout.formats, name).decode(getattr(state, name)))
        assert np.isfinite(values).all() and 0.1 < np.abs(values).mean() < 10
    assert (np.asarray(state.length) == 300).all() and (np.asarray(state.draft_token) == -1).all()
    assert np.asarray(state.last_token).max() < rank.model_config.vocab_size


def test_shares_of_a_rank() -> None:
    leaf = nnx.Param(jax.ShapeDtypeStruct((3, 16, 8), jnp.float32), logical_axes=("layers", "expert", None))
    table = nnx.Param(jax.ShapeDtypeStruct((64, 8), jnp.float32), logical_axes=("engram_rows", None))
    plain = nnx.Variable(jax.ShapeDtypeStruct((5,), jnp.int32))
    params = nnx.State({"experts": leaf, "table": table, "plain": plain})
    found = local_params(params, DeviceMesh(dp=64, ep=4))
    shapes = {path[0]: value.get_value().shape for path, value in nnx.to_flat_state(found)}
    assert shapes == {"experts": (3, 4, 8), "table": (1, 8), "plain": (5,)}


# ---- plan ----


def test_a_row_tells_what_plan_says(folder: Path) -> None:
    config = small(folder, **{"bench.slice.ep": 8, "engine.decode_buckets": [2]})
    model_config = released_config(str(folder))
    point = DecodePoint(Rank(deployment.deployment(config), model_config, jax.devices()[0]), 2)
    for program in point.programs.values():
        program.traced = program.trace()
    planner = Planner(deployment.deployment(config), model_config)
    told = measuring.plan_of(point, 10**6)
    assert planner.buckets[DECODE] == point.bucket
    assert told["weights"] == sum(array.bytes_per_device for array in planner.weights) == point.rank.weights_bytes
    assert told["caches"] == sum(array.bytes_per_device for array in planner.state) == point.state_bytes
    waiting = planner.waiting_bytes(DECODE)
    traced = [planner.trace(name) for name in planner.programs[DECODE]]
    planned = waiting + max(measuring.temporary_bytes(program.jaxpr.jaxpr) for program in traced)
    assert told["temporaries"] == pytest.approx(planned, rel=0.02)
    assert told["over_memory_analysis"] == pytest.approx(told["peak"] / 10**6)


@pytest.mark.slow
def test_plan_of_a_slice_is_that_of_its_deployment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def planner(config: Config, model_config: Any) -> None:
        raise Asked(config.mesh.dp, config.mesh.ep, config.eplb.value("extra_per_rank"), config.eplb.force)

    monkeypatch.setattr(plan, "Planner", planner)
    words = ["plan", "--config", "h200_slice", "--set", f"model.path={folder}"]
    for ep, expected in ((64, (64, 64, 1, "balanced")), (4, (64, 4, 8, "balanced"))):
        with pytest.raises(Asked) as asked:
            run.main([*words, "--set", f"bench.slice.ep={ep}"])
        assert asked.value.args == expected
    with pytest.raises(Asked) as asked:
        run.main(["plan", "--config", "ep8", "--set", f"model.path={folder}"])
    assert asked.value.args == (8, 8, 0, "none")


# ---- arithmetic ----


def test_tau_and_speeds_are_the_published_ones() -> None:
    assert deployment.tokens_per_step(3, 0.75) == 3.25
    assert deployment.tokens_per_step(5, 0.0) == 1
    # 34 ms a step, 256 requests: about 24,000 tokens/s of a GPU (h200-baseline).
    speed = deployment.decode_speed(256, 3, 0.75, 34e-3)
    assert speed["tokens_per_s"] == pytest.approx(24_470, rel=1e-3)
    assert speed["tokens_per_s"] == 256 * speed["tokens_per_s_per_user"]
    assert deployment.prefill_speed(4096, 0.5) == {"tokens_per_s": 8192}


def point_of(ep: int, requests: int = 0, rows: int = 0) -> Point:
    return DecodePoint(real_rank(ep), requests) if requests else PrefillPoint(real_rank(ep), rows)


def test_floors_are_those_of_the_baseline() -> None:
    """h200-baseline, at 1,024 rows or scaled to them: attention projections 0.34 ms a layer, a site 29 us, 256 rows of
    attention 0.029 ms a layer with entries, 64 requests of 65,536 keys 0.066 ms, the head 0.45 ms for 256 rows."""
    at = {name: cost.seconds(H200) * 1e3 for name, cost in floors.part_costs(point_of(64, requests=256)).items()}
    assert at["projections"] == pytest.approx(40 * 0.176, rel=0.03)  # as fp8: half of what bf16 weights take
    assert 40 * 2 * 0.0235 < at["hyper_connections"] < 40 * 2 * 0.029
    assert at["sparse_attention"] == pytest.approx(38 * 4 * 0.0283 + 2 * 4 * 0.0057, rel=0.02)
    assert at["head"] == pytest.approx(4 * 0.446, rel=0.01)
    assert at["experts"] == pytest.approx(40 * 6144 * 6 * 5120 * 2304 / 1469e9, rel=0.01)
    index = floors.part_costs(point_of(64, requests=64))["index_topk"]
    keys = 64 * (3 * 65_536 + 131_072 + 4 * 16_384) * 68
    assert index.bytes == pytest.approx(keys, rel=0.03) and index.bytes > keys
    total = sum(at.values())
    assert 32 < total < 40 and at["draft"] < 3.5


def test_floors_of_few_rows_are_those_of_the_weights() -> None:
    few, many = (floors.part_costs(point_of(ep, requests=8)) for ep in (64, 8))
    assert few["projections"].bytes == many["projections"].bytes == pytest.approx(5.07e9, rel=0.01)
    # 192 pairs reach all of 7 or 49 slots.
    assert few["experts"].bytes == pytest.approx(5.27e9, rel=0.01)
    assert many["experts"].bytes == pytest.approx(36.9e9, rel=0.01)
    assert few["experts"].flops == many["experts"].flops


def test_prefill_runs_its_decoder_layers_on_the_kept_rows() -> None:
    point = point_of(4, rows=4096)
    assert [(s.first, s.last, s.rows) for s in parts.layers_of_rows(point)] == [(0, 20, 4096), (20, 40, 144)]
    whole = [s for s in parts.layers_of_rows(point_of(4, rows=128))]
    assert [(s.first, s.last, s.rows) for s in whole] == [(0, 40, 128)]
    cost = floors.part_costs(point)
    assert "sampling" not in cost and "draft" not in cost
    assert cost["experts"].flops == pytest.approx(6 * 6 * 5120 * 2304 * 20 * (4096 + 144))


def test_exchanges_cost_what_was_measured_between_two() -> None:
    assert floors.exchange_seconds("all_to_all", 256) == floors.exchange_seconds("all_to_all", 1) == 144e-6
    assert floors.exchange_seconds("all_to_all", 4096) == 128e-6
    assert floors.exchange_seconds("all_to_all", 65_536) == 1059e-6
    assert floors.exchange_seconds("all_to_all", 131_072) == pytest.approx(2118e-6)
    assert floors.exchange_seconds("pmax", 0) == 133e-6


@given(st.floats(4096, 1e6), st.floats(4096, 1e6))
def test_more_rows_never_cost_less_beyond_the_latency(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert floors.exchange_seconds("all_to_all", low) <= floors.exchange_seconds("all_to_all", high)


def test_rounds_of_the_exchange_follow_the_fullest_rank() -> None:
    point = point_of(64, requests=256)
    even = np.zeros((40, 448), np.int32)
    even[:, ::7] = 96  # 6,144 pairs for 64 ranks; a round carries 120
    assert measuring.expert_rounds(point, even) == 1
    even[:10, 0] = 121
    assert measuring.expert_rounds(point, even) == 1.25
    even[0, :7] = 121
    assert measuring.expert_rounds(point, even) == (30 + 9 * 2 + -(-7 * 121 // 120)) / 40


def test_only_a_known_device_has_published_rates() -> None:
    assert published_peaks("NVIDIA H200") == H200 and published_peaks("cpu") is None


# ---- what does not fit, and what is refused ----


class _Memory:
    argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 30, 12, 10
    temp_size_in_bytes, generated_code_size_in_bytes = 50 * 10**9, 5


class _Compiled:
    def memory_analysis(self) -> _Memory:
        return _Memory()


def compiled(point: Point) -> Point:
    """With programs that take 50 GB of temporaries, none of them compiled."""
    for program in point.programs.values():
        program.traced, program.executable = program.trace(), _Compiled()
    return point


def test_a_point_that_does_not_fit_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(folder)
    point = compiled(PrefillPoint(rank_of(config), 256))
    rooms = {"room": MemoryRoom(60 * 10**9, 8 * 10**9)}
    monkeypatch.setattr(measuring, "memory_room", lambda devices, utilization: rooms["room"])
    row = measuring.describe(point, config)
    assert row["fits"] and row["memory"]["peak"] == row["memory"]["weights"] + row["memory"]["caches"] + 50 * 10**9 + 7
    rooms["room"] = MemoryRoom(50 * 10**9, 1000)
    row = measuring.describe(point, config)
    assert not row["fits"] and row["problem"] == "does not fit: 50.0 GB by memory_analysis, 50.0 GB free"
    assert measuring.table([row]).splitlines()[1].endswith(row["problem"])


def test_a_compiler_that_finds_no_room_is_a_row_too(folder: Path) -> None:
    config = small(folder)
    point = PrefillPoint(rank_of(config), 256)

    def refuse(lowered: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 200 GB\nmore")

    program = point.programs["prefill"]
    program.compiler = refuse  # type: ignore[assignment]
    program.compile()
    row = measuring.describe(point, config)
    assert not row["fits"] and "says the compiler: prefill: RESOURCE_EXHAUSTED: 200 GB" in row["problem"]


def test_a_step_takes_no_less_where_its_launch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of 9 ms in which the device does all but 1 ms of the step: every step that counts took 10 ms."""

    class Waiting:
        warm_up, now, launched = 2, 0.0, 0

        def step(self) -> Waiting:
            self.launched += 1
            self.now = max(self.now, 0.010 * (self.launched - 1)) + 0.009
            return self

        def block_until_ready(self) -> None:
            self.now = max(self.now, 0.010 * (self.launched - 1))

    point = Waiting()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: point.now)
    for repeats in (1, 4):
        seconds = measuring.step_seconds(point, repeats)  # type: ignore[arg-type]
        assert len(seconds) == repeats and min(seconds) > 0.0089


def test_steps_that_did_not_verify_are_no_measurement(folder: Path) -> None:
    point = DecodePoint(rank_of(small(folder)), 2)

    class Verification:
        verified = np.array([[3, 2]])
        hidden = jnp.ones((1, 8, 4))

    point._verification = Verification()
    assert point.fault() == "1 of 2 requests did not verify 3 drafts"
    Verification.verified = np.array([[3, 3]])
    assert point.fault() is None
    Verification.hidden = jnp.ones((1, 8, 4)).at[0, 5, 1].set(jnp.nan)
    assert point.fault() == "1 of 8 hidden rows are not finite"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative.varlen": True}, r"speculative.varlen: true is refused .* would count twice"),
        ({"speculative.enabled": False}, r"speculative.enabled: false"),
        ({"mesh.dp": 2}, r"mesh: dp 2, cp 1, ep 1: a slice runs on one device"),
        ({"eplb.preset": "decode"}, r"eplb: a slice forces balance"),
        ({"eplb.force": "imbalanced"}, r"eplb: a slice forces balance"),
        ({"engine.replay.decoder": "mask"}, r"engine.replay.decoder: mask"),
        ({"model.engram_placement": "host"}, r"model.engram_placement: host"),
    ],
)
def test_what_a_slice_does_not_measure_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployment.deployment(load_config("h200_slice").with_values(changes))


def test_keys_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"bench.slice.eps: unknown key; the nearest known key is bench.slice.ep"):
        load_config("h200_slice", ["bench.slice.eps=8"])
    with pytest.raises(ConfigError, match=r"bench.slice.ep: 16 is not known; expected one of 64, 8, 4"):
        load_config("h200_slice", ["bench.slice.ep=16"])
    with pytest.raises(ConfigError, match=r"bench.slice.prefill_rows: \[8192, 4096\] is not a list of ascending"):
        load_config("h200_slice", ["bench.slice.prefill_rows=[8192,4096]"])


def test_a_chunk_must_fit_its_context(folder: Path) -> None:
    rank = rank_of(small(folder))
    with pytest.raises(ConfigError, match=r"prefill_rows: 1024 rows are more than engine.max_model_len = 512"):
        PrefillPoint(rank, 1024)
    with pytest.raises(ConfigError, match=r"prefill_rows: 200 is not a multiple of 16 rows"):
        PrefillPoint(rank, 200)
