"""scripts/train_demo/train_draft.py: which drafts count, the losses, text drawn anew, a run judged and saved."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo import train_draft
from scripts.train_demo.parameters import builder, initial, load_parts, save_parts
from scripts.train_demo.state import State, progress
from scripts.train_demo.tasks import ANSWER, IGNORE, PROMPT, TEXT
from scripts.train_demo.tokenizer import EOS_ID
from scripts.train_demo.train_draft import anchors, counted, draft_builder, losses, main, overlaps, redrawn

BLOCK = 5


def found(seed: int = 0, blocks: int = 12, vocabulary: int = 7) -> dict[str, jax.Array]:
    """Made-up blocks of draft and target."""
    rng = np.random.default_rng(seed)
    p, q = (jax.nn.log_softmax(rng.normal(size=(blocks, BLOCK, vocabulary)).astype(np.float32)) for _ in range(2))
    following = jnp.asarray(rng.integers(0, vocabulary, (blocks, BLOCK)), jnp.int32)
    return {"log_p": p, "log_q": q, "next": following, "score": jnp.asarray(rng.normal(size=(blocks, BLOCK)))}


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.sampled_from([4, 8]))
def test_drafts_count_unless_prompted_or_behind_an_end(seed: int, offset: int, stride: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random((2, 65)) < 0.15, EOS_ID, rng.integers(3, 9, (2, 65))).astype(np.int32)
    classes = rng.choice(np.array([TEXT, PROMPT, ANSWER, IGNORE], np.uint8), (2, 64))
    which, first = counted(jnp.asarray(tokens), jnp.asarray(classes), BLOCK, jnp.int32(offset), stride)
    start = np.asarray(anchors(64, BLOCK, jnp.int32(offset), stride))
    assert len(first) == 2 * len(start) and start[0] == offset + 1 and start[-1] + BLOCK <= 64
    for block, kind, row, at in zip(np.asarray(which), first, np.repeat([0, 1], len(start)), np.tile(start, 2)):
        assert kind == classes[row, at]
        expected = []
        for position in range(at + 1, at + 1 + BLOCK):
            expected.append(kind not in (PROMPT, IGNORE) and EOS_ID not in tokens[row, at + 1 : position])
        assert block.tolist() == expected


def test_the_default_loss_is_the_published_one() -> None:
    """Position weights exp(-k / 5), 0.1 cross entropy + 0.9 total variation + confidence (dspark 1.5)."""
    made = found()
    total, report = losses(made, jnp.ones((12, BLOCK), bool))
    p, q = np.exp(made["log_p"]), np.exp(made["log_q"])
    expected, survival = 0.0, np.ones(12)
    accepted = 0.0
    for k in range(BLOCK):
        variation = 0.5 * np.abs(p[:, k] - q[:, k]).sum(axis=-1)
        entropy = -np.log(q[np.arange(12), k, np.asarray(made["next"])[:, k]])
        c = 1 / (1 + np.exp(-np.asarray(made["score"])[:, k]))
        binary = -(1 - variation) * np.log(c) - variation * np.log(1 - c)
        expected += np.exp(-k / 5) * np.mean(0.1 * entropy + 0.9 * variation + binary) / 5
        survival = survival * (1 - variation)
        accepted += survival.mean()
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(report["accepted"]) == pytest.approx(accepted, rel=1e-5)
    longer, _ = losses(made, jnp.ones((12, BLOCK), bool), length_weight=2.0)
    assert float(longer) == pytest.approx(expected - 2 * accepted / 5, rel=1e-5)


def test_drafts_that_do_not_count_have_no_part() -> None:
    made, other = found(0), found(1)
    which = np.ones((12, BLOCK), bool)
    which[3] = False
    which[5, 2:] = False
    mixed = {k: jnp.where(which.reshape(which.shape + (1,) * (v.ndim - 2)), v, other[k]) for k, v in made.items()}
    for options in ({}, {"soft": True, "length_weight": 1.0}):
        values = [float(losses(f, jnp.asarray(which), **options)[0]) for f in (made, mixed)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)
        all_of_them = [float(losses(f, jnp.ones_like(which), **options)[0]) for f in (made, mixed)]
        assert abs(all_of_them[0] - all_of_them[1]) > 1e-3  # the blocks do differ there
    none, _ = losses(made, jnp.zeros_like(which))
    assert float(none) == 0.0


def test_soft_losses_are_least_at_the_target() -> None:
    """The gradient in the draft's logits vanishes where draft and target agree; to the text's tokens it does not."""
    made = found()
    which = jnp.ones((12, BLOCK), bool)

    def gradient(logits: jax.Array, soft: bool) -> float:
        def loss(x: jax.Array) -> jax.Array:
            # Away from the kink of |p - q|: only the cross entropy is looked at.
            return losses({**made, "log_q": jax.nn.log_softmax(x)}, which, soft=soft)[1]["entropy"]

        return float(jnp.abs(jax.grad(loss)(logits)).max())

    assert gradient(made["log_p"], True) < 1e-6 < 1e-3 < gradient(made["log_q"], True)
    assert gradient(made["log_p"], False) > 1e-3
    np.testing.assert_allclose(overlaps({**made, "log_q": made["log_p"]}), 1.0, atol=1e-6)


def test_only_text_is_drawn_anew() -> None:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 50, (4, 257)), jnp.int32)
    classes = jnp.asarray(rng.choice(np.array([TEXT, PROMPT, ANSWER], np.uint8), (4, 256)))
    drawn = jnp.full((4, 256), 99, jnp.int32)
    made = np.asarray(redrawn(tokens, classes, drawn, 0.3, jax.random.key(0)))
    changed = made != np.asarray(tokens)
    assert not changed[:, 0].any() and not changed[:, 1:][np.asarray(classes) != TEXT].any()
    assert (made[changed] == 99).all()
    assert changed[:, 1:][np.asarray(classes) == TEXT].mean() == pytest.approx(0.3, abs=0.08)
    np.testing.assert_array_equal(redrawn(tokens, classes, drawn, 0.0, jax.random.key(0)), tokens)


@pytest.mark.slow
def test_a_run_is_judged_on_held_out_rows_saves_an_average_and_goes_on(demo_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_file(demo_folder / "config.json")
    tables = EngramTables.build(config, np.load(demo_folder / "token_map.npy"))
    numerics = Numerics.training("float32")
    save_parts(tmp_path, initial(config, builder(config, numerics, tables)[1], 0), "weights")
    shapes = draft_builder(config, numerics)[1]
    start = initial(config, shapes, 1)
    save_parts(tmp_path, {LEAF_PREFIX + path: value for path, value in start.items()}, "start")
    call = [
        *("--data", str(demo_folder), "--target", *map(str, sorted(tmp_path.glob("weights-*.npz")))),
        *("--draft", str(tmp_path / "start-0.npz"), "--minutes", "30", "--batch", "2", "--row-length", "128"),
        *("--held-out-rows", "2", "--dtype", "float32", "--soft", "--length", "1", "--drawn", "0.3"),
        *("--state", str(tmp_path / "state"), "--total-minutes", "30", "--out", str(tmp_path / "out")),
    ]
    assert main([*call, "--steps", "4"]) == 0
    first = load_parts([tmp_path / "out/draft-0.npz"])
    assert main([*call, "--steps", "6"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out/draft_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 5, 6]
    # The optimizer went on: its warm-up did not begin anew.
    assert [line["rate"] / lines[0]["rate"] for line in lines] == pytest.approx([1, 4, 5, 6])
    for line in lines:
        assert ("held_out" in line) is (line["step"] != 5) and len(line["variation"]) == BLOCK
    for line in (line for line in lines if "held_out" in line):
        parts = sorted((line["held_out"]["text"], line["held_out"]["answers"]))
        assert parts[0] <= line["held_out"]["all"] <= parts[1]
    saved = load_parts([tmp_path / "out/draft-0.npz"])
    assert {path.removeprefix(LEAF_PREFIX): v.shape for path, v in saved.items()} == shapes
    for before in (start, {path.removeprefix(LEAF_PREFIX): v for path, v in first.items()}):
        assert any(np.abs(saved[LEAF_PREFIX + path] - before[path]).max() > 1e-4 for path in shapes)
    clock = progress(tmp_path / "out", "draft")
    assert clock is not None and clock.step == clock.optimizer_steps == 6 and clock.done


class Killed(Exception):
    """Where a process would be gone without a word."""


class Steps:
    """`make_steps` of a training whose steps add 1 to all weights, and do `at[call]` at some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, Any] = {}
        self.calls = 0
        monkeypatch.setattr(train_draft, "make_steps", lambda *_: (self.step, self.judge))

    def step(self, params: Any, average: Any, state: Any, frozen: Any, tokens: Any, *_: Any) -> tuple[Any, ...]:
        self.calls += 1
        self.at.get(self.calls, lambda: None)()
        assert self.calls < 300, "nothing has ended it"
        report = {"accepted": jnp.float32(1), "variation": jnp.full(BLOCK, 0.5)}
        return *(jax.tree.map(lambda a: a + 1, tree) for tree in (params, average)), state, report, tokens

    def judge(self, *_: Any) -> np.ndarray:
        return np.ones((2, 2))

    def dies(self) -> None:
        raise Killed


def test_a_stopped_draft_is_saved_and_goes_on(demo_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    save_parts(tmp_path, {"frozen": np.zeros(32, np.float32)}, "weights")
    out, state = tmp_path / "out", tmp_path / "state"
    call = [
        *("--data", str(demo_folder), "--target", str(tmp_path / "weights-0.npz"), "--minutes", "30"),
        *("--batch", "2", "--row-length", "128", "--held-out-rows", "2", "--held-out-every", "20"),
        *("--state", str(state), "--out", str(out), "--dtype", "float32"),
    ]

    def log() -> list[tuple[int, int, bool]]:
        """(step, stretch, whether judged) of each record."""
        lines = (out / "draft_log.jsonl").read_text(encoding="utf-8").splitlines()
        return [(r["step"], r["stretch"], "held_out" in r) for r in map(json.loads, lines)]

    def kept() -> float:
        """Of the state: how many steps the weights have."""
        template = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
        found = State(state).restore({"weights": template, "average": template})
        assert found is not None and found[1].step == found[1].optimizer_steps
        return float(found[0]["weights"][path][0] - begun)

    config = ModelConfig.from_file(demo_folder / "config.json")
    _, shapes = draft_builder(config, Numerics.training("float32"))
    path = next(path for path in shapes if path.endswith("norm.weight") and len(shapes[path]) == 1)
    begun = float(initial(config, {path: shapes[path]}, 1)[path][0])

    steps = Steps(monkeypatch)
    steps.at = {5: lambda: signal.raise_signal(signal.SIGTERM)}
    assert main(call) == 143
    told = capsys.readouterr().err
    assert f"stopped by SIGTERM: step 5 is saved in {state} and {out}" in told and "Traceback" not in told
    assert log() == [(1, 1, True), (5, 1, False)] and kept() == 5
    clock = progress(out, "draft")
    assert clock is not None and clock.step == 5 and not clock.done
    saved = load_parts(sorted(out.glob("draft-*.npz")))[LEAF_PREFIX + path]
    assert saved[0] == begun + 5

    # A kill: the last judgement's state is there, and records of steps that are trained again go.
    steps.at = {steps.calls + 40: steps.dies}
    with pytest.raises(Killed):
        main(call)
    assert log()[2:] == [(6, 1, False), (26, 1, True)] and kept() == 26
    with (out / "draft_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 46, "stretch": 1}) + "\n" + '{"step": 47, "str')
    steps.at = {steps.calls + 2: lambda: signal.raise_signal(signal.SIGTERM)}
    assert main(call) == 143
    assert [step for step, *_ in log()] == [1, 5, 6, 26, 27, 28] and kept() == 28

    # Another machine: the weights go on with a fresh optimizer, which the log says.
    shutil.rmtree(state)
    steps.at = {steps.calls + 2: lambda: signal.raise_signal(signal.SIGTERM)}
    assert main(call) == 143
    assert log()[-3:] == [(28, 1, False), (29, 2, False), (30, 2, False)]
    assert main([*call, "--steps", "30"]) == 0  # one step beyond, as each call makes one, and no more
    clock = progress(out, "draft")
    assert log()[-1] == (31, 2, True) and clock is not None and clock.done


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--row-length", "100"), ("--batch", "0"), ("--stride", "0"), ("--stride", "62"), ("--length", "nan")),
        *(("--length", "-1"), ("--drawn", "2"), ("--peak", "nan"), ("--minutes", "nan"), ("--total-minutes", "nan")),
        *(("--held-out-rows", "0"), ("--held-out-every", "0"), ("--steps", "0")),
    ],
)
def test_what_no_draft_can_be_trained_with_is_refused(
    demo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    words = ["--data", str(demo_folder), "--target", "none.npz", "--state", str(tmp_path / "state")]
    with pytest.raises(SystemExit):
        main([*words, "--out", str(tmp_path / "out"), "--minutes", "1", "--row-length", "128", option, value])
    told = capsys.readouterr().err
    assert f"{option}: {value}: not" in told or f"{option} {value}: no anchor" in told
    assert told.startswith("usage: python -m scripts.train_demo.train_draft ")
    assert not (tmp_path / "out").exists()
