"""scripts/train_demo/train_draft.py: which drafts count, the losses, text drawn anew, a run judged and saved."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo import prepare
from scripts.train_demo.architecture import config_json
from scripts.train_demo.dataset import POOLS, Data
from scripts.train_demo.parameters import builder, initial, load_parts, save_parts
from scripts.train_demo.state import progress
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
def test_a_run_is_judged_on_held_out_rows_saves_an_average_and_goes_on(
    demo_data: Data, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(demo_data.folder, folder)
    (folder / "eval").mkdir(exist_ok=True)
    for name in POOLS:
        held_out = itertools.islice(prepare.examples(name, demo_tokenizer, np.random.default_rng(0), "eval"), 10)
        items = [{"prompt_token_ids": e.prompt_ids, "answer_token_ids": e.answer_ids, "task": name} for e in held_out]
        lines = [json.dumps(item) for item in items]
        (folder / f"eval/{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = 32 * -(-demo_tokenizer.get_vocab_size() // 32)
    raw = config_json(vocabulary, vocabulary, vocabulary - 1, small=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    np.save(folder / "token_map.npy", np.arange(vocabulary, dtype=np.int32))
    config = ModelConfig.from_dict(raw)
    tables = EngramTables.build(config, np.arange(vocabulary, dtype=np.int32))
    numerics = Numerics.training("float32")
    save_parts(tmp_path, initial(config, builder(config, numerics, tables)[1], 0), "weights")
    shapes = draft_builder(config, numerics)[1]
    start = initial(config, shapes, 1)
    save_parts(tmp_path, {LEAF_PREFIX + path: value for path, value in start.items()}, "start")
    call = [
        *("--data", str(folder), "--target", *map(str, sorted(tmp_path.glob("weights-*.npz")))),
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
