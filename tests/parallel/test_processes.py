"""Runs of several processes: how they find one another, what they refuse, and that they answer as one does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from di_jax.config import Config
from di_jax.errors import ConfigError
from di_jax.llm import LLM
from di_jax.parallel import processes
from di_jax.parallel.agreement import Agreement
from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.processes import Start, check_owners, check_same_config, data_rank_owners, find_start

PATIENCE_S = 600  # a hang is a failure; the runs themselves take a minute where nothing else computes

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


def distributed(**values: object) -> Config:
    return Config.from_dict({"distributed": values})


HERE = {"coordinator": "node1:1234", "num_processes": 4, "process_id": 2}


@pytest.mark.parametrize(
    ("values", "environment", "start"),
    [
        ({}, {}, None),
        (HERE, {}, Start("node1:1234", 4, 2)),
        (HERE, SLURM, Start("node1:1234", 4, 2, 1)),
        ({}, SLURM, Start(None, 4, 3, 1)),
        ({"coordinator": "node1:1234"}, SLURM, Start("node1:1234", 4, 3, 1)),
        ({"num_processes": 1}, SLURM, None),
        ({}, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({}, {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),
        ({}, OPEN_MPI, Start(None, 2, 1, 0)),
        ({}, OPEN_MPI | SLURM, Start(None, 2, 1, 0)),
        ({"coordinator": "node1:1234"}, HYDRA, Start("node1:1234", 2, 1)),
        ({"coordinator": "node1:1234", "num_processes": 8}, KUBERNETES, Start("node1:1234", 8, 2)),
    ],
)
def test_who_a_process_is(values: dict[str, Any], environment: dict[str, str], start: Start | None) -> None:
    assert find_start(distributed(**values), environment) == start


@pytest.mark.parametrize("installed", [True, False])
def test_kubernetes_is_asked_by_a_package(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(processes, "_installed", lambda package: installed and package == "kubernetes")
    assert find_start(distributed(), KUBERNETES) == (Start(None, None, 2) if installed else None)


def test_a_plan_is_made_by_one_process() -> None:
    assert find_start(Config.from_dict({"command": "plan", "distributed": HERE}), SLURM) is None


@pytest.mark.parametrize(
    ("values", "environment", "message"),
    [
        ({"num_processes": 2}, {}, "distributed.coordinator: is not set, and no launcher says it"),
        ({"coordinator": "a:1", "process_id": 0}, {}, "distributed.num_processes: is not set"),
        ({"coordinator": "a:1", "num_processes": 2}, {}, "distributed.process_id: is not set"),
        ({}, HYDRA, "distributed.coordinator: is not set, and MPICH or Intel MPI does not say it"),
        (
            {"num_processes": 2},
            SLURM,
            "distributed.process_id: 3 is not one of distributed.num_processes = 2",
        ),
        ({}, SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS: 'many' is not a number"),
    ],
)
def test_half_a_start_is_refused(values: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_start(distributed(**values), environment)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"distributed": {"coordinator": "node1"}}, "distributed.coordinator: node1 is not HOST:PORT"),
        (
            {"distributed": {"num_processes": 2, "process_id": 2}},
            "distributed.process_id: 2 is not one of distributed.num_processes = 2, counted from 0",
        ),
        (
            {"mesh": {"dp": 8, "simulate_devices": 3}, "distributed": {"num_processes": 2}},
            "mesh.simulate_devices: 3 in each of distributed.num_processes = 2 is less than mesh.dp x mesh.cp = 8 x 1",
        ),
        ({"mesh": {"dp": 8, "simulate_devices": 4}}, "mesh.simulate_devices: 4 is less than mesh.dp x mesh.cp = 8 x 1"),
    ],
)
def test_keys_that_do_not_fit(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_dict(raw)


def test_simulated_devices_are_of_each_process() -> None:
    Config.from_dict({"mesh": {"dp": 8, "simulate_devices": 4}, "distributed": {"num_processes": 2}})


def test_who_owns_the_ranks_of_a_mesh() -> None:
    check_owners([0, 0, 1, 1], 2, 2)
    check_owners([1, 0], 1, 2)
    for owners, cp, count, message in (
        ([0, 0, 1, 1], 1, 3, "mesh.dp x mesh.cp: 4 x 1 = 4 ranks over 3 processes: process 2 has none"),
        ([0, 0, 0, 1], 1, 2, "4 x 1 = 4 ranks over 2 processes: they have 3, 1; give each as many devices"),
        (
            [0, 0, 0, 1, 1, 1],
            2,
            2,
            "3 x 2 = 6 ranks over 2 processes: the 2 context-parallel ranks of data-parallel rank 1",
        ),
        ([0, 1], 2, 2, "ranks of data-parallel rank 0 lie in processes 0, 1, but one process schedules them"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_owners(owners, cp, count)


def test_every_device_must_have_a_rank() -> None:
    with pytest.raises(ConfigError, match=r"the 2 processes have 8: every device of every process must have a rank"):
        DeviceMesh(dp=4).check_devices(8, "cpu", 2)
    with pytest.raises(ConfigError, match=r"16 devices asked, 8 present"):
        DeviceMesh(dp=16).check_devices(8, "cpu", 2)


def test_one_process_owns_everything() -> None:
    plan = DeviceMesh(dp=4, cp=2, ep=2)
    assert data_rank_owners(plan.build(), plan) == [0] * 4


def test_processes_must_have_the_same_config() -> None:
    class Two(Agreement):
        num_processes = 2
        other: Config

        def exchange(self, payload: bytes, what: str) -> list[bytes]:
            raw = json.loads(payload)
            raw |= {"engine.max_num_seqs": 5} if "num_seqs" in self.difference else {}
            return [payload, json.dumps(raw).encode()]

        difference = ""

    config, two = distributed(**HERE), Two()
    check_same_config(two, config)
    two.difference = "num_seqs"
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs: processes 0 and 1 .* \(16 and 5\)"):
        check_same_config(two, config)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class Processes:
    """As many as asked of one command, each with its own number; what they say is in files."""

    def __init__(self, folder: Path, count: int, command: Callable[[int, int], list[str]]) -> None:
        self.folder = folder
        port = free_port()
        self.running = []
        for index in range(count):
            with (folder / f"out{index}").open("wb") as out, (folder / f"err{index}").open("wb") as err:
                process = subprocess.Popen(command(index, port), stdout=out, stderr=err, env=environment())
            self.running.append(process)

    def out(self, index: int) -> str:
        return (self.folder / f"out{index}").read_text()

    def err(self, index: int) -> str:
        return (self.folder / f"err{index}").read_text()

    def wait(self) -> list[int]:
        """Exit codes of all, by then ended by themselves."""
        deadline = time.monotonic() + PATIENCE_S
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in self.running]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            ended = [process.poll() for process in self.running]
            assert ended == [None] * len(ended), "\n".join(self.err(index)[-3000:] for index in range(len(ended)))
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def environment() -> dict[str, str]:
    """This one's, without a launcher that a test may run under."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def start(count: int, command: Callable[[int, int], list[str]]) -> Processes:
        made.append(Processes(tmp_path, count, command))
        return made[-1]

    yield start
    for one in made:
        one.end()


# Steps without a model: an agreement and a collective of all devices, over and over.
STEPS = """
import logging, sys
import numpy as np
from di_jax.config import Config
from di_jax.parallel import processes
from di_jax.platforms.devices import configure_jax

index, count, port = (int(word) for word in sys.argv[1:])
logging.basicConfig(stream=sys.stderr)
distributed = {"coordinator": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
config = Config.from_dict({"mesh": {"dp": count, "simulate_devices": 1}, "distributed": distributed})
with processes.ending_together():
    configure_jax(config)
    agreement = processes.current()
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    plan = config.mesh.plan
    mesh = plan.build()
    ranks = NamedSharding(mesh, PartitionSpec(plan.rank_axes))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    ones = jax.make_array_from_process_local_data(ranks, np.ones(1, np.float32), (count,))
    step = 0
    while True:
        assert (agreement.gather(np.array([step]), "a step") == step).all()
        agreement.working(f"step {step}")
        for _ in range(20):
            assert total(ones) == count
        agreement.working(None)
        step += 1
        if step == 5:
            print("on its way", flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "signal_number", "why"),
    [(1, signal.SIGKILL, "died"), (0, signal.SIGKILL, "died"), (2, signal.SIGINT, "failed: KeyboardInterrupt")],
)
def test_when_one_goes_the_others_say_so_and_end(
    spawn: Callable[..., Processes], victim: int, signal_number: signal.Signals, why: str
) -> None:
    running = spawn(3, lambda index, port: [sys.executable, "-c", STEPS, str(index), "3", str(port)])
    running.wait_for(lambda: all("on its way" in running.out(index) for index in range(3)))
    running.running[victim].send_signal(signal_number)
    codes = running.wait()
    assert codes[victim] == (-signal.SIGKILL if signal_number == signal.SIGKILL else 130)
    for index in {0, 1, 2} - {victim}:
        assert re.search(rf"process {victim} \(pid \d+ on .*\) {why}.*; process {index} ends too", running.err(index))
        # jax ends a process itself, by SIGABRT, when the first one is gone; which of the two is faster does not matter.
        assert codes[index] == 1 or (victim == 0 and codes[index] == -signal.SIGABRT)
        assert running.out(index) == "on its way\n", "stdout is for results"


def test_a_frozen_process_is_noticed(spawn: Callable[..., Processes]) -> None:
    running = spawn(2, lambda index, port: [sys.executable, "-c", STEPS, str(index), "2", str(port)])
    running.wait_for(lambda: all("on its way" in running.out(index) for index in range(2)))
    running.running[1].send_signal(signal.SIGSTOP)
    assert running.running[0].wait(PATIENCE_S) != 0
    assert re.search(r"process 1 \(pid \d+ on .*\) gave no sign of life for 15 s; process 0 ends too", running.err(0))


def prompts() -> list[dict[str, Any]]:
    """Greedy and sampled, one that is refused, and a number that the processes cannot share evenly. Some need the
    second program of a step, which all processes launch when one has such a request."""
    drawn = np.random.default_rng(5)
    extra: dict[int, dict[str, Any]] = {1: {"top_p": 0.8, "logprobs": 2}, 4: {"repetition_penalty": 1.5}}
    records: list[dict[str, Any]] = [
        {
            "id": f"r{index}",
            "prompt_token_ids": drawn.integers(0, 90, 5 + 30 * index).tolist(),
            "sampling": {"temperature": index % 2, "seq_seed": 100 + index, "ignore_eos": True} | extra.get(index, {}),
        }
        for index in range(6)
    ]
    return [*records[:3], {"id": "bad", "prompt_token_ids": []}, *records[3:]]


def several(config: Config, count: int, folder: Path) -> Config:
    values = {
        "mesh.dp": 4,
        "mesh.ep": 4,
        "mesh.simulate_devices": 4 // count,
        "engine.max_num_seqs": 2,
        "engine.decode_buckets": [2],
        "distributed.num_processes": count,
        "cache.compile_dir": str(folder / "compiled"),
    }
    return config.with_values(values)


def command_line(config: Config, folder: Path, command: str, *options: str) -> Callable[[int, int], list[str]]:
    (folder / "config.yaml").write_text(config.to_yaml())

    def of(index: int, port: int) -> list[str]:
        own = [f"distributed.coordinator=127.0.0.1:{port}", f"distributed.process_id={index}"]
        sets = [word for value in own for word in ("--set", value)]
        return [sys.executable, "-m", "di_jax.run", command, "--config", str(folder / "config.yaml"), *sets, *options]

    return of


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(records: list[dict[str, Any]]) -> list[Any]:
    return [
        [answer["token_ids"] for answer in record["outputs"]] if "outputs" in record else None for record in records
    ]


@pytest.fixture
def expected(llm: LLM) -> list[Any]:
    """The tokens of one process on one device."""
    records = prompts()
    outputs = llm.generate(
        [{"prompt_token_ids": record["prompt_token_ids"]} for record in records],
        [record.get("sampling", {}) for record in records],
        use_tqdm=False,
    )
    return [None if output.error else [answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_answer_as_one(
    spawn: Callable[..., Processes], tiny_config: Config, tmp_path: Path, expected: list[Any], count: int
) -> None:
    """The first writes all records, in the order of the input; the others write nothing."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in prompts()))
    options = ["--input", str(source), "--output", str(target), "--json"]
    running = spawn(count, command_line(several(tiny_config, count, tmp_path), tmp_path, "generate", *options))
    assert running.wait() == [1] * count, running.err(0)[-3000:]  # one request is refused
    records = written(target)
    assert [record["id"] for record in records] == [record["id"] for record in prompts()]
    assert answers(records) == expected
    assert "is empty" in records[3]["error"]["message"]
    told = records[1]["outputs"][0]
    assert all(str(token) in place for token, place in zip(told["token_ids"], told["logprobs"], strict=True))
    summary = json.loads(running.out(0))
    assert (summary["requests"], summary["failed"], summary["compiles_after_warmup"]) == (7, 1, 0)
    assert all(running.out(index) == "" for index in range(1, count))
    assert f"process {count - 1}: di_jax.engine.runner: compiling" in running.err(count - 1)
    assert not any("ends too" in running.err(index) for index in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_killed_while_answering(
    spawn: Callable[..., Processes], tiny_config: Config, tmp_path: Path, expected: list[Any], victim: int
) -> None:
    """What was written until then is whole, and the same as ever."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    endless = [{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 380, "ignore_eos": True}}] * 200
    source.write_text("".join(json.dumps(record) + "\n" for record in [*prompts(), *endless]))
    options = ["--input", str(source), "--output", str(target)]
    running = spawn(2, command_line(several(tiny_config, 2, tmp_path), tmp_path, "generate", *options))
    running.wait_for(lambda: target.exists() and len(target.read_bytes().splitlines()) >= len(prompts()))
    running.running[victim].kill()
    code = running.wait()[1 - victim]
    assert code == 1 or (victim == 0 and code == -signal.SIGABRT)
    assert re.search(
        rf"process {victim} \(pid \d+ on .*\) died.*; process {1 - victim} ends too", running.err(1 - victim)
    )
    records = written(target)
    assert len(prompts()) <= len(records) < len(prompts()) + len(endless)
    assert answers(records)[: len(prompts())] == expected


@pytest.mark.slow
def test_several_processes_score_as_one(
    spawn: Callable[..., Processes], tiny_config: Config, tmp_path: Path, golden: Path
) -> None:
    from di_jax.engine.scorer import Scorer
    from di_jax.engine.setup import build_engine_parts

    source, target = tmp_path / "in.jsonl", tmp_path / "out.safetensors"
    records = [record for record in prompts()[:5]]
    source.write_text(
        "".join(json.dumps({k: record[k] for k in ("id", "prompt_token_ids")}) + "\n" for record in records)
    )
    config = several(tiny_config, 2, tmp_path).with_values({"score.trace": True, "engine.warmup": False})
    running = spawn(
        2, command_line(config, tmp_path, "score", "--input", str(source), "--output", str(target), "--json")
    )
    assert running.wait()[0] == 1, running.err(0)[-3000:]
    assert "record bad: " in running.err(0) and json.loads(running.out(0))["requests"] == 5 and running.out(1) == ""
    got = load_file(target)
    scorer = Scorer(build_engine_parts(tiny_config), trace=True)
    for score in scorer.run((r["id"], r["prompt_token_ids"]) for r in records if r["prompt_token_ids"]):
        np.testing.assert_allclose(got[f"logits.{score.request_id}"], score.logits, atol=2e-3)
        for layer, hidden in score.hidden.items():
            assert got[f"hidden.{score.request_id}.{layer}"].shape == hidden.shape
