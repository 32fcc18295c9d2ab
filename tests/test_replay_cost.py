"""scripts/replay_cost.py: forced perplexity equals the scorer's; what the config refuses is reported."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.config import Config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import build_engine_parts
from di_jax.errors import ConfigError
from di_jax.llm import LLM
from scripts import replay_cost


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_cost, "PROMPT", 40)
    monkeypatch.setattr(replay_cost, "FOLLOWING", 8)


def test_forced_perplexity_is_that_of_the_scorer(short: None, llm: LLM, tiny_config: Config) -> None:
    text = np.random.default_rng(0).integers(5, 60, 130)
    found = replay_cost.forced_perplexity(llm, text, count=2)
    scores = Scorer(build_engine_parts(tiny_config)).run([(str(at), text[at : at + 48].tolist()) for at in (0, 40)])
    losses = np.concatenate([score.negative_log_likelihood()[39:] for score in scores])
    assert len(losses) == 16 and found == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert replay_cost.forced_perplexity(llm, text, count=1) != pytest.approx(found, rel=1e-3)


def test_recall_is_the_share_of_right_answers(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    prompts = [[7, 8, 9], [10, 11, 12, 13]]
    said = [out.outputs[0].text for out in llm.generate([{"prompt_token_ids": p} for p in prompts])]
    items = [
        {"id": str(i), "task": "recall", "prompt_token_ids": p, "answer": answer}
        for i, (p, answer) in enumerate(zip(prompts, [said[0], "never said"]))
    ]
    (tmp_path / "eval" / "recall_256.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    assert replay_cost.recall(llm, tmp_path, 256, 2) == 0.5
    assert replay_cost.recall(llm, tmp_path, 256, 1) == 1.0


def test_modes_that_the_config_refuses_are_listed_as_such(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    for mode in replay_cost.MODES:
        try:
            replay_cost.config_of(tiny_config, mode)
        except ConfigError:
            refused.append(mode)
    assert "off" not in refused
    monkeypatch.setattr(replay_cost, "measure", lambda config, *_: {"mode": config.engine.replay.decoder})
    out = tmp_path / "replay.json"
    (tmp_path / "manifest.json").write_text("{}")
    tokenizer = shutil.copy(demo_checkpoint() / "tokenizer.json", tmp_path)
    assert replay_cost.main(["--data", str(tmp_path), "--out", str(out)]) == 0
    rows = {row["replay_decoder"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert list(rows) == list(replay_cost.MODES)
    for mode, row in rows.items():
        if mode in refused:
            assert "engine.replay.decoder" in row["unavailable"] and mode in row["unavailable"]
        else:
            assert row["mode"] == mode
    Path(tokenizer).write_text(json.dumps({"model": {}, "added_tokens": []}))
    with pytest.raises(SystemExit):
        replay_cost.main(["--data", str(tmp_path), "--out", str(out)])
