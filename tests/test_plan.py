"""The plan command: its report on a small mesh, and what it refuses. Device counts are simulated in own processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from di_jax import run
from di_jax.checkpoint.mapping import leaf_specs
from di_jax.commands import plan
from di_jax.commands.plan_cost import draft_cost
from di_jax.commands.plan_tables import tables
from di_jax.commands.roofline import Peaks, StepCost, step_cost
from di_jax.config import load_config
from di_jax.engine.step_plan import Bucket
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig, ModelConfigError
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.storage import StoragePlan
from di_jax.platforms.accelerators import ACCELERATORS
from di_jax.platforms.topologies import compile_only_devices

STEP_KEYS = [
    "devices", "axes", "weights_bytes", "kv_bytes_per_token", "state_bytes_per_sequence", "temp_bytes", "temp_source",
    "peak_bytes_per_device", "fits", "hbm_bytes", "max_concurrent_at_max_len", "collectives", "flops_per_step",
    "roofline", "compile_s",
]  # fmt: skip
# Runs the command and then says what the compiler saw: argument bytes and collectives of each executable.
SCRIPT = """
import json, sys
from di_jax import run
from di_jax.commands.plan import Planner
seen = {}
compile = Planner.compile
def recorded(self, traced):
    done = compile(self, traced)
    for name, (executable, _) in done.items():
        text = executable.as_text()
        ops = {op: text.count(f" {op}(") for op in ("all-to-all", "all-gather", "all-reduce")}
        seen[name] = {"arguments": executable.memory_analysis().argument_size_in_bytes, "ops": ops}
    return done
Planner.compile = recorded
code = run.main(sys.argv[1:])
print(json.dumps(seen))
sys.exit(code)
"""
SMALL = [
    "engine.max_num_seqs=4", "engine.max_num_batched_tokens=128", "engine.max_model_len=512", "engine.num_blocks=16",
    "mesh.dp=4", "mesh.cp=2", "mesh.ep=4", "cache.compile_dir=null",
]  # fmt: skip


def arguments(model: Path, *settings: str) -> list[str]:
    words = ["plan", "--config", "quickstart", f"--set=model.path={model}"]
    return words + [f"--set={setting}" for setting in settings]


@pytest.fixture(scope="module")
def small(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the tiny model on eight devices, its table, its picture, and what the compiler saw. A kernel that
    cannot run here is named."""
    picture = tmp_path_factory.mktemp("plan") / "layout.svg"
    kernel = "kernels.ops.sparse_attention=mosaic_gpu_sm90"
    words = arguments(golden / "tiny-v41-fp8", *SMALL, "plan.device=b200", kernel)
    command = [sys.executable, "-c", SCRIPT, *words, "--json", "--output", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    *table, report, seen = result.stdout.strip().splitlines()
    return {
        "report": json.loads(report),
        "seen": json.loads(seen),
        "table": "\n".join(table),
        "picture": picture.read_text(),
        "log": result.stderr,
    }


def test_the_report_has_the_keys_of_the_contract(small: dict[str, Any]) -> None:
    report = small["report"]
    assert list(report) == ["prefill", "decode", "layout", "storage"]
    for name in ("prefill", "decode"):
        step = report[name]
        assert list(step) == STEP_KEYS
        assert step["devices"] == 8 and step["axes"] == {"d0": 2, "d1": 2, "c0": 1, "c1": 2}
        assert list(step["roofline"]) == ["compute_s", "memory_s", "network_s", "bound"]
        times = {bound: step["roofline"][f"{bound}_s"] for bound in ("compute", "memory", "network")}
        assert step["roofline"]["bound"] == max(times, key=lambda bound: times[bound]) and min(times.values()) > 0
        assert all(list(call) == ["op", "axes", "bytes", "per_step"] for call in step["collectives"])
        assert step["temp_source"] == "estimated" and step["temp_bytes"] > 0 and step["compile_s"] > 0
        assert step["fits"] and step["hbm_bytes"] == ACCELERATORS["b200"].hbm_bytes
        assert step["kv_bytes_per_token"] == 106
    assert all(list(a) == ["name", "shape", "dtype", "spec", "bytes_per_device"] for a in report["layout"])
    assert list(report["storage"]) == [field.name for field in dataclasses.fields(StoragePlan)]


def test_bytes_are_those_of_the_compiled_programs(small: dict[str, Any]) -> None:
    report = small["report"]
    sizes = {array["name"]: array["bytes_per_device"] for array in report["layout"]}
    state = sum(size for name, size in sizes.items() if name.startswith("state."))
    for name in ("prefill", "decode"):
        step, buffer = report[name], sizes[f"buffer.{name}"]
        assert step["weights_bytes"] + state + buffer == small["seen"][name]["arguments"]
        assert step["peak_bytes_per_device"] == step["weights_bytes"] + state + buffer + step["temp_bytes"]
    weights = sum(size for name, size in sizes.items() if not name.startswith(("state.", "buffer.")))
    assert weights == report["decode"]["weights_bytes"]
    specs = {array["name"]: array["spec"] for array in report["layout"]}
    assert "'d1', 'c1'" in specs["layers.ffn.experts.w1.weight"] and "'" not in specs["layers.attn.wq_a.weight"]


def test_collectives_are_those_of_the_compiled_programs(small: dict[str, Any]) -> None:
    names = {"all_to_all": "all-to-all", "all_gather": "all-gather", "pmax": "all-reduce"}
    for name in ("prefill", "decode"):
        calls = small["report"][name]["collectives"]
        found = {op for op, count in small["seen"][name]["ops"].items() if count}
        assert {names[call["op"]] for call in calls} == found
        experts = [c for c in calls if c["axes"] == ["d1", "c1"] and c["op"] == "all_to_all"]
        # Rows there and answers back in each of the ten layers are the largest thing that is sent.
        assert experts[0] == max(experts, key=lambda c: c["bytes"]) and experts[0]["per_step"] == 20
    gathers = [c for c in small["report"]["prefill"]["collectives"] if c["op"] == "all_gather"]
    assert gathers and all(call["axes"] == ["c1"] for call in gathers), "context ranks share a prompt in prefill alone"


def test_requests_that_fit(small: dict[str, Any]) -> None:
    report = small["report"]
    request = 512 * 106 + report["decode"]["state_bytes_per_sequence"]
    for name, ranks in (("decode", 8), ("prefill", 4)):
        step = report[name]
        left = step["hbm_bytes"] * 0.9 - step["weights_bytes"] - step["temp_bytes"]
        assert step["max_concurrent_at_max_len"] == pytest.approx(left / request * ranks, rel=1e-3)


DRAFTING = [
    "engine.max_num_seqs=4", "engine.max_num_batched_tokens=128", "engine.prefill_buckets=[128]",
    "engine.decode_buckets=[4]", "engine.max_model_len=512", "engine.context_buckets=[512]", "engine.num_blocks=16",
    "engine.replay.decoder=off", "mesh.dp=2", "mesh.ep=2", "cache.compile_dir=null", "plan.device=h200",
]  # fmt: skip


def planned(golden: Path, *settings: str) -> tuple[plan.Planner, dict[str, dict[str, Any]]]:
    """The planner of the tiny model on two devices that are not here, and its steps: traced, not compiled."""
    overrides = [f"model.path={golden / 'tiny-v41-fp8'}", "speculative.num_draft_tokens=3", *DRAFTING, *settings]
    config = load_config("quickstart", overrides)
    assert len(jax.devices()) == 8, "the process has them before the plan asks for two"
    planner = plan.Planner(config, plan.released_config(config.model.path))
    traced = {name: planner.trace(name) for programs in planner.programs.values() for name in programs}
    seconds = dict.fromkeys(traced, (None, 1.5))
    return planner, {n: dataclasses.asdict(planner.step_report(n, traced, seconds)) for n in planner.buckets}


@pytest.mark.parametrize("way", ["probabilistic", pytest.param("one_hot", marks=pytest.mark.slow)])
def test_a_plan_counts_the_draft(golden: Path, way: str) -> None:
    """Its weights, its state and its programs; a plan without drafts knows nothing of them."""
    plain, without = planned(golden)
    drafting, report = planned(golden, "speculative.enabled=true", f"speculative.draft_sampling={way}")
    config = drafting.model_config
    sizes = {array.name: array.bytes_per_device for array in drafting.weights + drafting.state}
    drafts = {name: size for name, size in sizes.items() if name.startswith("draft.")}
    kept = {name for name in sizes if name.startswith("state.draft_")}
    assert {array.name for array in plain.weights + plain.state} == sizes.keys() - drafts.keys() - kept
    assert kept and not any("draft" in line for line in plain.describe())
    specs = {path: spec for path, spec in leaf_specs(config, draft=True).items() if path.startswith("draft.")}
    assert drafts.keys() == specs.keys()
    for path, spec in specs.items():
        assert drafts[path] == spec.nbytes // (2 if ".ffn.experts." in path else 1), path
    window = sizes["state.window"] // (12 * 4)  # of one layer and slot
    kept_bytes = 3 * (2 * config.vocab_size + 4 + 4 + 4) if way == "probabilistic" else 3 * (4 + 4)
    for name in ("prefill", "decode"):
        step, before = report[name], without[name]
        assert step["weights_bytes"] == before["weights_bytes"] + sum(drafts.values())
        assert step["state_bytes_per_sequence"] == before["state_bytes_per_sequence"] + 2 * window + kept_bytes
        assert step["flops_per_step"] > before["flops_per_step"]
        assert step["kv_bytes_per_token"] == before["kv_bytes_per_token"]
        assert step["peak_bytes_per_device"] > before["peak_bytes_per_device"]
    assert report["decode"]["compile_s"] == 4.5 and without["decode"]["compile_s"] == 1.5, "three programs and one"

    def exchanges(step: dict[str, Any]) -> int:
        return sum(call["per_step"] for call in step["collectives"] if call["op"] == "all_to_all")

    # Each of two stages sends rows, slots and weights there and answers back, as each of ten layers does, and the
    # Engrams of the target send a few more.
    layers = 10 * 5
    assert exchanges(report["decode"]) - exchanges(without["decode"]) == 2 * layers // 10
    assert exchanges(without["decode"]) >= layers and exchanges(report["prefill"]) == exchanges(without["prefill"])
    words = f"drafts: 3 a step, {way}; a decode step is verify, accept, draft; weights of "
    assert any(line.startswith(words) for line in drafting.describe())


@pytest.mark.slow
def test_the_command_with_drafts(golden: Path) -> None:
    """All of its programs compile, and each says so."""
    words = arguments(golden / "tiny-v41-fp8", *DRAFTING, "speculative.enabled=true")
    command = [sys.executable, "-m", "di_jax.run", *words, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    *table, line = result.stdout.strip().splitlines()
    report = json.loads(line)
    assert list(report) == ["prefill", "decode", "layout", "storage"] and list(report["decode"]) == STEP_KEYS
    assert "drafts: 5 a step, probabilistic" in "\n".join(table)
    for said in ("tracing the verify step: 24 rows", "compiled the accept step", "compiled the draft step"):
        assert said in result.stderr


def test_the_table_and_the_picture(small: dict[str, Any]) -> None:
    for words in (
        "on 8 b200 devices",
        "temporaries",
        "all_to_all     d1,c1",
        "layers.ffn.experts.w1.weight",
        "servers",
    ):
        assert words in small["table"]
    assert small["picture"].count("<g id=") == 8 and "experts 12-15" in small["picture"]
    for words in ("tracing the decode step", "compiled the prefill step"):
        assert words in small["log"]


def test_a_plan_that_does_not_fit_says_so(small: dict[str, Any]) -> None:
    step = plan.StepReport(**{**small["report"]["decode"], "fits": False, "collectives": ()})
    step = dataclasses.replace(step, roofline=plan.Roofline(1, 2, 3, "network"))
    report = plan.PlanReport(step, step, small["report"]["layout"], StoragePlan(1, 2, 3, 4))
    assert "NO" in tables(report, ["x"]) and "none" in tables(report, ["x"])


def test_what_drafts_cost(golden: Path) -> None:
    """Of the released model: the context of every row in prefill; in decode blocks, and the head for each draft."""
    config = ModelConfig.from_file(golden / "config_real.json")
    layout, mesh = CacheLayout(config, CacheFormats.quantized(), 1, 1, draft_stages=3, num_drafts=5), DeviceMesh()
    head = {"head.weight": jax.ShapeDtypeStruct((129_280, 5120), jnp.bfloat16)}
    drafts = {
        path.removeprefix("draft."): jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for path, spec in leaf_specs(config, draft=True).items()
        if path.startswith("draft.")
    }

    def cost(bucket: Bucket) -> StepCost:
        return draft_cost(bucket, layout, head, drafts, bucket.rows, 1000.0, mesh)

    context = 15_360 * 5120 + 3 * 512 * 5120
    prefill = cost(Bucket(False, 4096, 1))
    assert prefill.flops == prefill.quantized_flops == 2 * 4096 * context
    decode = cost(Bucket(True, 96, 1, drafts=5, requests=16))
    blocks, drafted = 16 * 5, 16 * 5
    dense = 1280 * 5120 + 32_768 * 1280 + 512 * 5120 + 8192 * 4096 + 5120 * 8192 + 3 * 2304 * 5120 + 128 * 5120
    sublayers = 3 * (dense + 2 * 24 * 20_480 + 3 * (3 * 2304 * 5120) + 2 * 64 * 512 * 128)
    heads = (96 - 16 + drafted) * 129_280 * 5120 + drafted * (129_280 * 256 + 5376)
    assert decode.flops == pytest.approx(2 * (96 * context + blocks * sublayers + heads), rel=0.01)
    # All experts of three stages are read, in four bits with a byte for 32, and nothing as often as it has rows.
    experts = 3 * 128 * 3 * 2304 * 5120 * (1 / 2 + 1 / 32)
    assert experts < decode.bytes < 1.2 * experts
    fewer = cost(Bucket(True, 48, 1, drafts=2, requests=16))
    assert fewer.bytes == decode.bytes and fewer.flops < decode.flops


def test_what_a_step_costs_on_a_device_of_a_mesh(golden: Path) -> None:
    """Owners of the experts read a share of them, for the rows of all; their products stay as many."""
    config = ModelConfig.from_file(golden / "config_real.json")
    layout = CacheLayout(config, CacheFormats.quantized(), 1, 1)
    path, leaf = "layers.ffn.experts.w1.weight", jax.ShapeDtypeStruct((40, 384, 2304, 2560), jnp.uint8)

    def cost(tokens: int, mesh: DeviceMesh) -> StepCost:
        bare, whole = (
            step_cost(x, layout, tokens=tokens, sequences=1, context=0, mesh=mesh) for x in ({}, {path: leaf})
        )
        return StepCost(whole.bytes - bare.bytes, whole.flops - bare.flops, whole.quantized_flops)

    alone, shared = cost(1000, DeviceMesh()), cost(1000, DeviceMesh(64, 1, 64))
    assert alone.bytes == leaf.size and shared.bytes == leaf.size / 64
    assert alone.flops == shared.flops == pytest.approx(2 * 1000 * 6 * 40 * 2304 * 5120)
    assert shared.quantized_flops == pytest.approx(shared.flops)
    # One token of one rank touches 6 of 384; a token of each of 8 ranks up to 48, an eighth of them on each.
    assert cost(1, DeviceMesh()).bytes == cost(1, DeviceMesh(8, 1, 8)).bytes == pytest.approx(leaf.size / 64)
    peaks = Peaks(1.0, 1.0, 2.0)
    assert shared.compute_seconds(peaks) == pytest.approx(shared.flops / 2)
    assert shared.compute_seconds(Peaks(1.0, 1.0)) == pytest.approx(shared.flops)


def test_the_released_config_comes_with_the_package(golden: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    released = plan.released_config("deepseek-ai/DeepSeek-V4.1-Flash")
    assert released == ModelConfig.from_file(golden / "config_real.json")
    assert len([r for r in caplog.records if "comes with this package" in r.getMessage()]) == 1
    tiny = plan.released_config(str(golden / "tiny-v41-fp8"))
    assert tiny == plan.released_config(str(golden / "tiny-v41-fp8" / "config.json")) != released
    assert plan.released_config("demo").vocab_size > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.path=someone/another-model"], ["model.path", "someone/another-model", "config.json"]),
        (["model.path=/no/such/folder"], ["model.path", "/no/such/folder"]),
        (["mesh.dp=5", "mesh.ep=5"], ["mesh.ep: 5", "384 + 0 = 384", "eplb.extra_per_rank"]),
        (["mesh.dp=6", "mesh.ep=4"], ["mesh.ep: 4", "6 x 1 = 6"]),
        (["mesh.dp=2", "mesh.rules={batch: [d0]}"], ["mesh.rules", "d1"]),
        (["plan.device=h201"], ["plan.device", "h201", "h200", "ascend950"]),
        (["plan.storage.fill=1.5"], ["plan.storage.fill", "1.5"]),
        (["plan.storage.data_shards=0"], ["plan.storage.data_shards"]),
    ],
)
def test_what_it_refuses(settings: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--config", "quickstart", "--set=model.path=deepseek-ai/DeepSeek-V4.1-Flash"]
    assert run.main(base + [f"--set={setting}" for setting in settings]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in words), error


def test_a_broken_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        plan.released_config(str(tmp_path))


def test_a_picture_that_cannot_be_written_stops_before_the_compilation(golden: Path, tmp_path: Path) -> None:
    words = arguments(golden / "tiny-v41-fp8", *SMALL)
    command = [sys.executable, "-m", "di_jax.run", *words, "--output", str(tmp_path / "no" / "x.svg")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "cannot be written" in result.stderr.splitlines()[-1]
    assert "tracing" not in result.stderr


def test_compilers_of_other_devices() -> None:
    assert compile_only_devices("h200", 8) is None and compile_only_devices("tpu-v7x", 7) is None
    devices = compile_only_devices("tpu-v7x", 8)  # None without libtpu
    assert devices is None or [device.platform for device in devices] == ["tpu"] * 8


@pytest.mark.parametrize(("name", "devices", "slots"), [("ep64", 64, 448), ("ep4_prefill", 4, 416), ("ep8", 8, 384)])
def test_the_packaged_deployments(name: str, devices: int, slots: int) -> None:
    config = load_config(name)
    assert config.mesh.world == config.mesh.ep == devices
    assert 384 + config.eplb.value("extra_per_rank") * config.mesh.ep == slots


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights", "fits"), [("ep64", 18.28e9, True), ("ep4_prefill", 138.7e9, True)])
def test_the_released_model(name: str, weights: float, fits: bool, tmp_path: Path) -> None:
    """The whole model on its mesh, in less than 8 GB of host memory."""
    script = (
        "import resource, sys\nfrom di_jax import run\ncode = run.main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\nsys.exit(code)"
    )
    words = ["plan", "--config", name, "--json", "--output", str(tmp_path / "layout.svg")]
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    *_, line, resident_kb = result.stdout.strip().splitlines()
    assert int(resident_kb) * 1024 < 8e9
    report = json.loads(line)
    for step in (report["prefill"], report["decode"]):
        assert step["weights_bytes"] == pytest.approx(weights, rel=0.01)
        assert step["kv_bytes_per_token"] == 890
        assert step["state_bytes_per_sequence"] == pytest.approx(40 * 70_752 + 3 * 28_672, rel=1e-4)
        assert step["fits"] is fits
        assert step["collectives"][0]["op"] == "all_to_all" and step["collectives"][0]["per_step"] == 80
    assert report["storage"]["window_bytes_per_sequence"] == 1_415_040
