"""scripts/train_demo, training: the curriculum, the clock, the learning rate, what is logged and drawn."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import threading
from pathlib import Path

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
from scripts.train_demo import train
from scripts.train_demo.architecture import config_json
from scripts.train_demo.curriculum import FLOOR, STAGES, WARM_UP, Clock, Rate, curriculum, plan_of
from scripts.train_demo.identity import tokenizer_mismatch
from scripts.train_demo.parameters import TrainingTransformer, builder, initial, storages
from scripts.train_demo.tasks import CALC, CLASSES, RECALL
from scripts.train_demo.train import BIAS_STEP, LOGGED_EVERY, Stretch, balanced, by_form, by_kind, sample_positions
from scripts.train_demo.train_report import join, join_drafts, kernel_table, main, plot


def test_stages_are_named_with_their_minutes() -> None:
    plan = plan_of(["dense:5", "sparse:1.5", "long"])
    assert [(stage.name, seconds) for stage, seconds in plan] == [("dense", 300), ("sparse", 90), ("long", math.inf)]
    with pytest.raises(ValueError, match=r"unknown stage 'thick'; there are dense, sparse"):
        plan_of(["thick:2"])
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
    opt = train.optimizer(1e-3)
    step = train.make_step(config, tables, stage, opt)
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
