"""scripts/train_demo, training: the curriculum, the clock, the learning rate, what is logged and drawn."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import fake_quantize_weight
from scripts.train_demo import train, train_report
from scripts.train_demo.architecture import config_json
from scripts.train_demo.curriculum import FLOOR, STAGES, WARM_UP, Clock, Rate, curriculum, plan_of
from scripts.train_demo.identity import tokenizer_mismatch
from scripts.train_demo.parameters import TrainingTransformer, builder, initial, load_parts, storages
from scripts.train_demo.state import State, progress
from scripts.train_demo.step import BIAS_STEP, balanced, make_step, optimizer, sample_positions
from scripts.train_demo.tasks import CALC, CLASSES, RECALL
from scripts.train_demo.train import LOGGED_EVERY, Stretch, by_form, by_kind
from scripts.train_demo.train_report import join, join_drafts, kernel_table, main, plot


def test_stages_are_named_with_their_minutes() -> None:
    plan = plan_of(["dense:5", "sparse:1.5", "long"])
    assert [(stage.name, seconds) for stage, seconds in plan] == [("dense", 300), ("sparse", 90), ("long", math.inf)]
    with pytest.raises(ValueError, match=r"unknown stage 'thick'; there are dense, sparse"):
        plan_of(["thick:2"])
    for word in ("dense:nan", "dense:-1", "dense:0", "dense:x"):
        with pytest.raises(ValueError, match=f"--stages {word}: minutes are a positive number"):
            plan_of([word])
    (small, _), (whole, _) = plan_of(["long"], rows=2, length=256)[0], plan_of(["long"])[0]
    assert (small.batch, small.length, small.name) == (2, 256, "long") and (whole.batch, whole.length) == (8, 4608)
    assert all(stage.length % 128 == 0 and stage.length % (2 * stage.stride) == 0 for stage in STAGES.values())


def test_a_later_stretch_goes_on_where_the_last_one_ended() -> None:
    plan = plan_of(["dense:5", "sparse:1.5", "long"])
    clock = Clock()
    assert clock.remaining(plan) == plan
    clock.enter(STAGES["sparse"])
    clock.stage_s = 30.0
    assert clock.remaining(plan) == plan[1:]
    clock.stage_done = True
    assert clock.remaining(plan) == plan[2:]
    assert clock.remaining(plan_of(["dense_long"])) == plan_of(["dense_long"])
    clock.enter(STAGES["sparse"])
    assert clock.stage_s == 30.0 and clock.stage_done
    clock.enter(STAGES["long"])
    assert clock.stage_s == 0.0 and not clock.stage_done


def test_the_rate_warms_up_after_every_restart_and_decays_once() -> None:
    rate = Rate(peak=2.0, decay_from=10, total=20)
    assert rate.at(0, 0) == pytest.approx(2.0 / WARM_UP) and rate.at(0, WARM_UP) == 2.0 == rate.at(10, 500)
    assert rate.at(15, 500) == pytest.approx(1.0) and rate.at(15, 0) == pytest.approx(1.0 / WARM_UP)
    assert rate.at(20, 500) == rate.at(25, 500) == pytest.approx(2.0 * FLOOR)


def test_text_comes_into_recall_rows_once_recall_has_begun() -> None:
    early, late = curriculum(STAGES["dense"], 0.1), curriculum(STAGES["dense"], 0.6)
    assert early.density[0] > late.density[0] and early.max_distance == STAGES["dense"].length
    assert curriculum(STAGES["long"], 0.0).max_distance == 4096


def test_half_of_the_sampled_queries_recall() -> None:
    classes = np.zeros((2, 256), np.uint8)
    places = np.arange(7, 256, 20)
    classes[0, places] = RECALL + 1
    made = np.asarray(sample_positions(jnp.asarray(classes), 8))
    assert made.shape == (2, 32) and made.min() >= 0 and made.max() < 256
    assert set(places) <= set(made[0].tolist()) and len(set(made[0, 16:].tolist())) == 16
    assert made[1, :16].tolist() == list(range(15, 256, 16))


def test_the_router_bias_goes_towards_the_mean_load() -> None:
    bias = jnp.asarray([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]])
    found = balanced(bias, jnp.asarray([[9, 3, 0], [2, 2, 2]]))  # of 4 in the mean, and of 2
    np.testing.assert_allclose(found - bias, BIAS_STEP * np.array([[-1, 1, 1], [0, 0, 0]]), atol=1e-7)
    assert BIAS_STEP == 0.001


def test_kinds_are_means_of_what_occurred() -> None:
    sums = np.zeros((len(CLASSES), 3), np.float32)
    sums[CALC] = 4.0, 6, 8
    sums[RECALL] = 1.0, 1, 1
    sums[RECALL + 1], sums[RECALL + 3] = (5.0, 1, 10), (1.0, 2, 2)
    kinds = by_kind(sums)
    assert kinds["calc"] == {"loss": 0.5, "right": 0.75, "tokens": 8}
    assert kinds["recall_far"] == {"loss": 0.5, "right": 0.25, "tokens": 12}
    assert set(kinds) == {"calc", "recall_1", "recall_64", "recall_1024", "recall_far"}


@pytest.mark.parametrize(("every", "before", "expected"), [(0, 0, []), (1, 0, [1, 2, 3]), (3, 4, [6, 9, 12])])
def test_each_nth_step_sees_the_masters(tmp_path: Path, every: int, before: int, expected: list[int]) -> None:
    """Steps are numbered as in the log, over all stretches."""
    clock, exact = Clock(step=before), []

    def step(params: None, state: None, tokens: int, classes: int, rate: jax.Array, flag: jax.Array) -> tuple:
        assert flag.dtype == bool and rate.dtype == np.float32
        if flag:
            exact.append(clock.step + 1)
        names = ("index", "covered", "covered_recall", "balance", "gradient")
        report = {"loss": jnp.float32(3.0 if flag else 2.0), "classes": np.zeros((len(CLASSES), 3))}
        return params, state, report | dict.fromkeys(names, np.zeros(1))

    stretch = Stretch(clock, Rate(1.0, 1.0, 1.0), math.inf, tmp_path / "log.jsonl", exact_every=every)
    (stage, _), *_ = plan_of(["sparse"], rows=1, length=128)
    stretch.run(stage, math.inf, step, iter([(0, 0)] * (1 + LOGGED_EVERY)), {}, None)
    assert clock.step == before + 1 + LOGGED_EVERY and exact[:3] == expected
    assert len(exact) == (clock.step // every - before // every if every else 0)
    first, second = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    forms = {0: {"quantized": 2.0}, 1: {"masters": 3.0}, 3: {"quantized": 2.0, "masters": 3.0}}
    assert first["exact_every"] == every == second["exact_every"] and second["loss_of"] == forms[every]
    assert first["loss_of"] == (forms[1] if every == 1 else forms[0])  # of the first step alone


def test_a_loss_is_told_by_the_weights_that_were_seen() -> None:
    steps = [{"loss": loss, "exact": exact} for loss, exact in ((1.0, False), (2.0, True), (2.0, False))]
    assert by_form(steps) == {"quantized": 1.5, "masters": 2.0}
    assert by_form(steps[:1]) == {"quantized": 1.0}


def test_a_negative_number_of_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(tmp_path), "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        train.main([*words, "--minutes", "1", "--total-minutes", "1", "--exact-every", "-1"])
    assert "--exact-every -1: a number of steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--row-length", "100"), ("--rows", "-1"), ("--rows", "0"), ("--peak", "nan"), ("--peak", "inf")),
        *(("--peak", "0"), ("--total-minutes", "nan"), ("--total-minutes", "-1"), ("--minutes", "nan")),
        *(("--decay-from", "nan"), ("--seed", "-1"), ("--stages", "dense:nan"), ("--stages", "thick")),
    ],
)
def test_what_nothing_can_be_trained_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    words = ["--data", str(tmp_path), "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        train.main([*words, "--minutes", "1", "--total-minutes", "1", option, value])
    told = capsys.readouterr().err
    assert told.startswith("usage: python -m scripts.train_demo.train ")
    assert f"error: argument {option}: {value}: not" in told or (f"error: {option}" in told and value in told)
    assert not (tmp_path / "out").exists()


class Killed(Exception):
    """Where a process would be gone without a word."""


class Steps:
    """Steps that add 1 to all weights, and do `at[call]` at some of them; no trace and no curves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, Any] = {}
        self.calls = 0
        monkeypatch.setattr(train, "compiled_step", lambda *_: self.step)
        monkeypatch.setattr(train, "plot", lambda *_: None)

    def step(self, params: Any, state: Any, *_: Any) -> tuple[Any, Any, dict[str, Any]]:
        self.calls += 1
        self.at.get(self.calls, lambda: None)()
        assert self.calls < 300, "nothing has ended it"
        names = ("index", "covered", "covered_recall", "balance", "gradient")
        report = {"loss": jnp.float32(2), "classes": np.zeros((len(CLASSES), 3)), **dict.fromkeys(names, np.zeros(1))}
        return jax.tree.map(lambda a: a + 1, params), state, report

    def dies(self) -> None:
        raise Killed


class Training:
    """`train.main` in folders of its own, and what it has left there."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.out, self.state, self.data = folder / "out", folder / "state", data
        config = ModelConfig.from_file(data / "config.json")
        tables = EngramTables.build(config, np.load(data / "token_map.npy"))
        _, shapes = builder(config, Numerics.training("bfloat16"), tables)
        self.template = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}

    def __call__(self) -> int:
        words = ["--data", str(self.data), "--state", str(self.state), "--out", str(self.out), "--stages", "sparse"]
        return train.main([*words, "--minutes", "30", "--total-minutes", "9", "--rows", "1", "--row-length", "128"])

    def log(self) -> list[int]:
        lines = (self.out / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step"] for line in lines]

    def kept(self) -> tuple[float, int]:
        """(the first weight of the last norm, which is 1 at the beginning; the step) in the state."""
        found = State(self.state).restore({"weights": self.template})
        assert found is not None
        return float(found[0]["weights"]["norm.weight"][0]), found[1].step


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_is_saved_and_goes_on(
    demo_folder: Path, tmp_path: Path, monkeypatch, capsys, number: signal.Signals, status: int
) -> None:
    steps, training = Steps(monkeypatch), Training(demo_folder, tmp_path)
    steps.at = {7: lambda: signal.raise_signal(number)}
    assert training() == status
    told = capsys.readouterr().err
    assert f"stopped by {number.name}: step 7 is saved in {training.state} and {training.out}" in told
    assert training.log() == [1, 7] and training.kept() == (8, 7)
    clock = progress(training.out, "weights")
    assert clock is not None and clock.step == clock.optimizer_steps == 7 and not clock.done
    assert load_parts(sorted(training.out.glob("weights-*.npz")))["norm.weight"][0] == 8
    steps.at = {10: lambda: signal.raise_signal(number)}
    assert training() == status
    assert training.log() == [1, 7, 8, 10] and training.kept() == (11, 10)
    if number == signal.SIGTERM:
        return
    # On another machine, with a fresh optimizer.
    shutil.rmtree(training.state)
    steps.at = {12: lambda: signal.raise_signal(number)}
    assert training() == status
    clock = progress(training.out, "weights")
    assert clock is not None and (clock.step, clock.optimizer_steps, clock.stretch) == (12, 2, 2)


def test_a_killed_training_goes_on_from_the_last_state_and_its_log_with_it(
    demo_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    steps, training = Steps(monkeypatch), Training(demo_folder, tmp_path)
    steps.at = {50: steps.dies}
    with pytest.raises(Killed):
        training()
    assert training.log() == [1, 21, 41] and State(training.state).restore({}) is None
    # Nothing was saved: all is trained again, and the records go.
    steps.at = {steps.calls + 2: lambda: signal.raise_signal(signal.SIGINT)}
    assert training() == 130 and training.log() == [1, 2]
    # Saved now and then, by the minutes of training.
    monkeypatch.setattr(train, "KEPT_EVERY", 0.0)
    steps.at = {steps.calls + 30: steps.dies}
    with pytest.raises(Killed):
        training()
    assert training.log() == [1, 2, 3, 23] and training.kept() == (24, 23)
    monkeypatch.setattr(train, "KEPT_EVERY", math.inf)
    steps.at = {steps.calls + 30: steps.dies}
    with pytest.raises(Killed):
        training()
    assert training.log() == [1, 2, 3, 23, 24, 44] and training.kept() == (24, 23)
    steps.at = {steps.calls + 2: lambda: signal.raise_signal(signal.SIGINT)}
    assert training() == 130 and training.log() == [1, 2, 3, 23, 24, 25] and training.kept() == (26, 25)


def test_a_training_stopped_before_its_first_step_leaves_nothing(
    demo_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """While it compiles, in another thread."""
    steps, training = Steps(monkeypatch), Training(demo_folder, tmp_path)

    def compiled(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        while not train_stopped.is_set():
            train_stopped.wait(0.01)
        return steps.step

    train_stopped = threading.Event()
    status = train.Stop.status

    def told(stop: train.Stop, saved: str) -> int:
        train_stopped.set()  # it does not wait for the executable
        return status(stop, saved)

    monkeypatch.setattr(train, "compiled_step", compiled)
    monkeypatch.setattr(train.Stop, "status", told)
    assert training() == 143 and steps.calls == 0
    assert "before the first step, nothing to save" in capsys.readouterr().err
    assert State(training.state).restore({}) is None and list(training.out.iterdir()) == []


def test_a_checkpoint_of_tokenizer_mismatch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that mean something else: on from there a training learns everything anew, and nothing says so."""
    mine = json.loads((demo_checkpoint() / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer_mismatch(demo_checkpoint(), demo_checkpoint()) is None
    first, second, *rest = mine["model"]["merges"]
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint"
    for folder, merges in ((data, [first, second, *rest]), (checkpoint, [second, first, *rest])):
        folder.mkdir()
        changed = {**mine, "model": {**mine["model"], "merges": merges}}
        (folder / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
    words = ["--data", str(data), "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        train.main([*words, "--minutes", "1", "--total-minutes", "1", "--checkpoint", str(checkpoint)])
    assert f"prepare data with --tokenizer {checkpoint / 'tokenizer.json'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (checkpoint / "tokenizer.json").unlink()
    assert tokenizer_mismatch(data, checkpoint) == f"{checkpoint / 'tokenizer.json'}: no such file"


def test_batches_come_in_order_and_their_thread_ends() -> None:
    """One that was still making arrays when the interpreter ended would abort the process."""
    before = set(threading.enumerate())
    made = ({"tokens": np.full(2, i), "classes": np.zeros(2, np.uint8)} for i in itertools.count())
    batches = train.prefetch(made, depth=2)
    assert [int(next(batches)[0][0]) for _ in range(4)] == [0, 1, 2, 3]
    (thread,) = set(threading.enumerate()) - before
    batches.close()
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_step_has_the_loss_of_the_weights_that_it_sees() -> None:
    """Of the masters' formats, which are the same masters once they are rounded; or of the masters."""
    config = ModelConfig.from_dict(config_json(64, 64, 63, small=True))
    tables = EngramTables.build(config, np.arange(64, dtype=np.int32))
    (stage, _), *_ = plan_of(["sparse"], rows=1, length=128)
    numerics = Numerics.training("bfloat16")
    masters = initial(config, builder(config, numerics, tables)[1], seed=1)
    kinds = storages(nnx.eval_shape(lambda: TrainingTransformer(config, numerics, dense=False)))
    rounded = masters | {path: fake_quantize_weight(masters[path], kind) for path, kind in kinds.items()}
    opt = optimizer(1e-3)
    step = make_step(config, tables, stage, opt)
    tokens = np.random.default_rng(0).integers(0, 64, (1, 129)).astype(np.int32)

    def made(weights: dict[str, jax.Array], exact: bool) -> tuple[float, np.ndarray]:
        """(loss, an update)."""
        params = jax.tree.map(jnp.copy, weights)  # what the step is given it keeps
        report: dict[str, jax.Array]
        classes = np.zeros((1, 128), np.uint8)
        params, _, report = step(params, opt.init(params), tokens, classes, jnp.float32(1e-3), jnp.bool_(exact))
        path = "layers.attn.wq_a.weight"
        return float(report["loss"]), np.asarray(params[path] - weights[path])

    quantized, exact = made(masters, False), made(masters, True)
    for found in (made(rounded, False), made(rounded, True)):
        assert found[0] == quantized[0] != exact[0]
    # Both train the masters, each by its own gradient.
    assert all(np.abs(update).max() > 1e-4 for _, update in (quantized, exact))
    assert not np.array_equal(quantized[1], exact[1])


def test_logs_of_stretches_are_joined() -> None:
    first = [{"step": 10 * i, "trained_s": 1.0 * i, "length": 128} for i in range(1, 6)]
    second = [{"step": i, "trained_s": 2.0 * i, "length": 64, "stage": "long"} for i in range(1, 4)]
    made = join([first, second], every=2)
    assert [r["step"] for r in made] == [10, 30, 50, 51, 53] and [r["stretch"] for r in made] == [1, 1, 1, 2, 2]
    assert made[-1] == {"stretch": 2, "stage": "long", "step": 53, "trained_s": 11.0, "length": 64}
    assert made[0]["stage"] == "128 tokens" and len(join([first, second])) == 8


def test_draft_logs_are_joined_and_drawn(tmp_path: Path) -> None:
    def record(step: int, held_out: bool, **more: int) -> dict:
        judged = {"held_out": {"all": 1.5, "text": 1.0, "answers": 2.5}} if held_out else {}
        variation = [0.5 - step / 100] * 5
        return (
            {"step": step, "accepted": 1.0, "confidence": 0.5, "entropy": 3.0, "variation": variation} | judged | more
        )

    first, second = [record(1, False), record(21, True)], [record(1, True, stretch=1), record(9, False, stretch=2)]
    assert [r["stretch"] for r in join_drafts([first, second])] == [1, 1, 2, 3]
    assert join_drafts([join_drafts([first, second])]) == join_drafts([first, second])
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for file, log in zip(files, (first, second)):
        file.write_text("".join(json.dumps(r) + "\n" for r in log), encoding="utf-8")
    assert main([*map(str, files), "--out", str(tmp_path / "draft.jsonl")]) == 0
    assert len((tmp_path / "draft.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "draft.png").stat().st_size > 10_000


def test_a_log_whose_steps_go_on_is_drawn_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One training's, whose optimizer was fresh on another machine; steps that begin anew are another training's."""
    from matplotlib.axes import Axes

    drawn: list[list[float]] = []
    own = Axes.plot

    def plotted(axes: Any, steps: list[float], *others: Any, **more: Any) -> Any:
        drawn.append(steps)
        return own(axes, steps, *others, **more)

    monkeypatch.setattr(Axes, "plot", plotted)
    for second, expected in (((41, 61), [1, 21, 21, 41, 61]), ((1, 41), [1, 21, 21, 22, 62])):
        stretches = [(1, 1), (21, 1), (second[0], 2), (second[1], 2)]
        records = [{"step": step, "stretch": stretch, "variation": [0.5]} for step, stretch in stretches]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        drawn.clear()
        train_report.plot_drafts(tmp_path / "log.jsonl", tmp_path / "draft.png")
        assert drawn and all(steps == expected for steps in drawn)


def test_the_curves_and_the_kernel_table_are_written(tmp_path: Path) -> None:
    def record(minute: int, stage: str) -> dict:
        kinds = {"text": {"loss": 3.0, "right": 0.3, "tokens": 9}, "calc": {"loss": 1.0, "right": 0.5, "tokens": 9}}
        indexer = {"index": [0.1, 0.2], "covered": [0.5, 0.6], "covered_recall": [0.5, 0.6]}
        return {"trained_s": 60 * minute, "stage": stage, "loss": 2.0, "kinds": kinds, **indexer}

    lines = [json.dumps(record(i, "dense" if i < 3 else "long")) for i in range(5)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000

    def event(tid: int, name: str, microseconds: float) -> dict:
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, "dur": microseconds}

    threads = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "Stream #7(Compute)"), (2, "XLA Ops"))
    ]
    events = [*threads, event(1, "gemm", 2000), event(1, "sort", 500), event(1, "gemm", 1000), event(2, "gemm", 9000)]
    with gzip.open(tmp_path / "trace.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    table = [line.split() for line in kernel_table(tmp_path / "trace.json.gz").splitlines()]
    assert table == [["3.50", "ms", "3", "in", "all"], ["3.00", "ms", "2", "gemm"], ["0.50", "ms", "1", "sort"]]
