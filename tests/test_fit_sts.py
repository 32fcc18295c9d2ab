"""scripts/fit_sts.py: teacher-forced blocks are the engine's draft; lengths, end tokens, calibration, the files."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.errors import UserError
from di_jax.model.dspark import DraftModel
from di_jax.model.transformer import Transformer
from di_jax.prompts import PromptEncoder
from di_jax.tokenizer import Tokenizer
from scripts import fit_sts
from scripts.fit_sts import Blocks, Rows, calibrate, collect, load_models, text_rows
from scripts.train_demo.forward import training_layout, training_rows
from scripts.train_demo.tasks import ANSWER, PROMPT, TEXT
from scripts.train_demo.train_draft import blocks

END = 1


@pytest.fixture(scope="module")
def models(golden: Path) -> tuple[Tokenizer, Transformer, DraftModel]:
    return load_models(golden / "tiny-v41-fp8")


def made(score: np.ndarray, overlap: np.ndarray, live: np.ndarray | None = None) -> Blocks:
    count, drafts = score.shape
    live = np.ones((count, drafts), bool) if live is None else live
    return Blocks(score, overlap, overlap > 0.5, live, np.full(count, TEXT), np.arange(count))


@pytest.mark.slow
def test_blocks_are_what_the_draft_gives_after_a_prefill(models: tuple) -> None:
    _, target, draft = models
    start, vocabulary = 128, target.config.vocab_size
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (2, 257)), jnp.int32)
    graphs, states = zip(*(nnx.split(model) for model in (target, draft)))

    @jax.jit
    def packed(states: tuple) -> tuple[jax.Array, jax.Array]:
        target, draft = (nnx.merge(graph, state) for graph, state in zip(graphs, states))
        layout = training_layout(target.config, target.numerics, 2, 256)
        out = target(training_rows(tokens[:, :-1]), layout.allocate(), layout, taps=True)
        found = blocks(draft, target, tokens, out.hidden, out.taps, jnp.int32(start % 8 + 7))
        return found["log_q"], found["score"]

    @jax.jit
    def decoded(states: tuple) -> tuple[jax.Array, jax.Array]:
        target, draft = (nnx.merge(graph, state) for graph, state in zip(graphs, states))
        layout = training_layout(target.config, target.numerics, 2, start)
        layout = dataclasses.replace(layout, draft_stages=draft.config.num_nextn_predict_layers)
        rows = training_rows(tokens[:, :start])
        out = target(rows, layout.allocate(), layout, taps=True)
        state = draft.store_context(out.taps, rows, out.state, layout)
        first = jnp.full(2, start, jnp.int32)
        context = draft.context(jnp.arange(2), first, state, layout)
        follows = lambda logits, number: (jnp.take(tokens, start + 1 + number, axis=1), None)  # noqa: E731
        block = draft(target, tokens[:, start], first, context, choose=follows)
        return jax.nn.log_softmax(block.logits), block.score

    each = [np.asarray(a) for a in packed(states)]
    per_row = len(each[0]) // 2
    at = np.array([0, per_row]) + start // 8 - 1  # anchors are 8, 16, ...
    for mine, expected in zip(each, decoded(states)):
        np.testing.assert_allclose(mine[at], expected, atol=2e-3)
        assert np.abs(mine[at + 1] - np.asarray(expected)).max() > 0.01


@pytest.mark.slow
def test_anchors_predict_text_or_answers(models: tuple) -> None:
    _, target, draft = models
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, target.config.vocab_size, (fit_sts.BATCH, 129)).astype(np.int32)
    classes = np.full((fit_sts.BATCH, 128), PROMPT, np.uint8)
    classes[0], classes[1] = TEXT, ANSWER
    tokens[1] = END
    found = collect(target, draft, Rows(tokens, classes), END)
    drafts = draft.config.draft_block
    assert set(found.row.tolist()) == {0, 1} and found.score.shape == (len(found.row), drafts)
    assert (found.overlap > 0).all() and (found.overlap <= 1 + 1e-6).all()
    assert found.live[found.row == 0].all()
    assert (found.live[found.row == 1] == (np.arange(drafts) == 0)).all()  # the end itself counts, nothing after it


def test_lengths_end_at_a_rejection_and_at_the_end_token() -> None:
    overlap = np.array([[0.9, 0.8, 0.1], [1.0, 1.0, 1.0]])
    live = np.array([[True, True, True], [True, False, False]])
    lengths = made(np.zeros((2, 3)), overlap, live).lengths()
    assert lengths == {"blocks": 2, "sampled": pytest.approx((0.9 + 0.72 + 0.072 + 1.0) / 2, abs=1e-4), "greedy": 1.5}


def test_temperatures_are_judged_on_rows_that_they_were_not_fitted_on() -> None:
    rng = np.random.default_rng(2)
    right = rng.normal(0.5, 1.5, (6000, 3))
    overlap = 1 / (1 + np.exp(-right))
    temperatures, measures, judged = calibrate(made(right * [4.0, 2.0, 1.0], overlap))
    assert (judged.row % 2 == 1).all()
    np.testing.assert_allclose(temperatures, [4.0, 2.0, 1.0], rtol=0.35)
    errors, ranking = measures["calibration_error"], measures["roc_auc"]
    assert errors["after"]["all"] < 0.02 < 0.04 < errors["before"]["all"]
    assert ranking["after"]["by_position"][0] == ranking["before"]["by_position"][0] > 0.7


def test_blocks_of_a_row_stay_in_one_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    fit = fit_sts.fit_temperatures
    monkeypatch.setattr(fit_sts, "fit_temperatures", lambda *words: told.append(words[2]) or fit(*words))
    rng = np.random.default_rng(2)
    calibrate(made(rng.normal(0, 1, (40, 2)), rng.random((40, 2))))
    assert [texts.tolist() for texts in told] == [list(range(0, 40, 2))]


def test_on_the_bundled_checkpoint_no_error_rises_and_the_ranking_stays() -> None:
    result = json.loads((Path(fit_sts.__file__).parent / "results" / "demo-sts.json").read_text(encoding="utf-8"))
    errors, ranking = result["calibration_error"], result["roc_auc"]
    positions = [errors[when]["by_position"] for when in ("before", "after")]
    assert len(positions[0]) == len(result["confidence_temperatures"]) == 5
    assert all(after <= before < 0.03 for before, after in zip(*positions, strict=True))
    assert errors["after"]["all"] <= errors["before"]["all"]
    ranks = [ranking[when]["by_position"] for when in ("before", "after")]
    np.testing.assert_allclose(ranks[1], ranks[0], atol=1e-3)
    assert min(ranks[0]) > 0.7


def test_texts_are_cut_into_rows(models: tuple, golden: Path, tmp_path: Path) -> None:
    encoder = PromptEncoder(golden / "tiny-v41-fp8", models[0])
    file = tmp_path / "texts.jsonl"
    ids = np.random.default_rng(3).integers(5, 60, 129 * 9).tolist()
    file.write_text(json.dumps({"prompt_token_ids": ids[:700]}) + "\n" + json.dumps({"prompt_token_ids": ids[700:]}))
    rows = text_rows(file, encoder, 128, 100)
    assert rows.tokens.reshape(-1).tolist() == ids[: 129 * 8] and (rows.classes == TEXT).all()
    with pytest.raises(ValueError, match=r"1161 tokens; 4 rows of 513 are needed"):
        text_rows(file, encoder, 512, 100)
    for line, why in (("# plain text", "line 2: not readable as JSON"), ('{"prompt": 5}', "prompt: expected text")):
        file.write_text(json.dumps({"prompt_token_ids": ids}) + "\n" + line)
        with pytest.raises(UserError, match=why):
            text_rows(file, encoder, 128, 100)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--length", "0"], "--length 0: not a multiple of 128"),
        (["--length", "200"], "--length 200: not a multiple of 128"),
        (["--rows", "3"], "--rows 3: at least 4 are needed"),
    ],
)
def test_what_cannot_be_cut_is_refused_at_once(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit_sts.main(["--input", "texts.jsonl", "--out", "sts.json", *words])
    assert why in capsys.readouterr().err


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}, "added_tokens": []}))
    with pytest.raises(SystemExit):
        fit_sts.main(["--checkpoint", "demo", "--data", str(tmp_path), "--out", str(tmp_path / "sts.json")])
    assert "its tokenizer is not that of --data" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_and_texts_give_temperatures_and_a_diagram(golden: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "texts.jsonl", tmp_path / "sts.json"
    ids = np.random.default_rng(4).integers(5, 500, 129 * 8).tolist()
    file.write_text(json.dumps({"prompt_token_ids": ids}))
    words = ["--checkpoint", str(golden / "tiny-v41-fp8"), "--input", str(file), "--length", "128", "--out", str(out)]
    assert fit_sts.main(words) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(result["confidence_temperatures"]) == len(result["calibration_error"]["after"]["by_position"])
    assert set(result["accepted_drafts"]) == {"all", "text"} and result["rows"] == 8
    assert out.with_suffix(".png").stat().st_size > 10_000
