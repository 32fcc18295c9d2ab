"""scripts/train_demo/average.py: averages of the ends of training, and logits that are cooled."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from scripts.train_demo import average as averaging
from scripts.train_demo.architecture import config_json
from scripts.train_demo.average import (
    LOOKING_SHARES,
    OTHER_SHARES,
    PRECISION,
    TEMPERATURE,
    average,
    cool,
    fit_temperature,
    read_end,
)
from scripts.train_demo.forward import forward
from scripts.train_demo.parameters import builder, initial, load_parts, save_parts
from scripts.train_demo.train_draft import blocks, draft_builder

CONFIG = ModelConfig.from_dict(config_json(64, 64, 63))
TABLES = EngramTables.build(CONFIG, np.arange(64, dtype=np.int32))
NUMERICS = Numerics(jnp.dtype(jnp.float32), CacheFormats.plain(jnp.dtype(jnp.float32)), False, False)


def test_shares_are_by_what_a_weight_does() -> None:
    assert sum(LOOKING_SHARES) == pytest.approx(1) == sum(OTHER_SHARES)
    paths = ("layers.attn.wq_a.weight", "indexers.wq_b.weight", "layers.ffn.w1.weight", "embed.weight")
    ends = [{path: np.full((2, 2), float(i), np.float32) for path in paths} for i in range(3)]
    made = average(ends)
    expected = [LOOKING_SHARES, LOOKING_SHARES, OTHER_SHARES, OTHER_SHARES]
    for path, shares in zip(paths, expected):
        np.testing.assert_allclose(made[path], shares[1] + 2 * shares[2], rtol=1e-6)
    same = average([ends[1]] * 3)
    assert all(np.allclose(same[path], ends[1][path]) for path in paths)


def test_ends_that_differ_are_refused(tmp_path: Path) -> None:
    end = {"embed.weight": np.zeros((2, 2))}
    with pytest.raises(ValueError, match="3 ends of training are needed, found 1"):
        average([end])
    with pytest.raises(ValueError, match=r"end 3: embed\.weight is not as in the first"):
        average([end, end, {"embed.weight": np.zeros((2, 3))}])
    with pytest.raises(FileNotFoundError, match="neither a checkpoint nor weights"):
        read_end(tmp_path, CONFIG)


def test_weights_that_training_left_are_read(tmp_path: Path) -> None:
    save_parts(tmp_path, {"embed.weight": jnp.ones((4, 2))}, "weights")
    assert read_end(tmp_path, CONFIG)["embed.weight"].tolist() == np.ones((4, 2)).tolist()


def surprise(logits: np.ndarray, targets: np.ndarray, temperature: float) -> float:
    scaled = logits / temperature
    return float(np.mean(np.log(np.exp(scaled).sum(axis=1)) - scaled[np.arange(len(targets)), targets]))


@pytest.mark.parametrize("true", [1.1, 1.4, 2.2])
def test_the_temperature_is_the_least_surprised(true: float) -> None:
    """Targets drawn from softmax(logits / true): that temperature is found again."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(20_000, 8))
    targets = np.argmax(logits / true + rng.gumbel(size=logits.shape), axis=1)
    tried: list[float] = []
    found = fit_temperature(lambda temperature: tried.append(temperature) or surprise(logits, targets, temperature))
    grid = np.arange(1, 2.5, PRECISION)
    best = grid[np.argmin([surprise(logits, targets, temperature) for temperature in grid])]
    assert found == pytest.approx(best, abs=2 * PRECISION) and found == pytest.approx(true, rel=0.05)
    assert len(tried) == len(set(tried)) < 16


@pytest.mark.parametrize(("slope", "edge"), [(1.0, 1.0), (-1.0, 2.5)])
def test_the_temperature_stays_between_its_bounds(slope: float, edge: float) -> None:
    assert fit_temperature(lambda temperature: slope * temperature) == pytest.approx(edge, abs=2 * PRECISION)


def test_the_average_is_cooled_as_texts_say_that_the_evaluation_has_not(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(64, 64, 63, small=True)), encoding="utf-8")
    np.save(tmp_path / "token_map.npy", np.arange(64, dtype=np.int32))
    for text, length in (("english", 85_000), ("python", 100_000)):
        np.save(tmp_path / f"{text}_eval.npy", np.arange(length) // 1000)
    texts: list[np.ndarray] = []

    def measure(*_):
        """Least surprised where the final norm is 1 / 1.75 of what training left."""
        return lambda weights, text: texts.append(text) or math.exp((1 / weights["norm.weight"][0] - 1.75) ** 2)

    ends = [{"norm.weight": np.ones(4, np.float32), "embed.weight": np.full((2, 2), i, np.float32)} for i in range(3)]
    monkeypatch.setattr(averaging, "measure", measure)
    monkeypatch.setattr(averaging, "read_end", lambda folder, _: ends[int(folder.name)])
    out = tmp_path / "averaged"
    words = ["--data", str(tmp_path), "--out", str(out), "--ends", "0", "1", "2"]
    assert averaging.main(words) == 0
    found = json.loads((out / averaging.CHOSEN).read_text(encoding="utf-8"))["temperature"]
    assert found == pytest.approx(1.75, abs=PRECISION) and f"temperature {found:g}" in capsys.readouterr().out
    made = load_parts(sorted(out.glob("weights-*.npz")))
    np.testing.assert_allclose(made["norm.weight"], 1 / found, rtol=0.01)
    np.testing.assert_allclose(made["embed.weight"], average(ends)["embed.weight"], rtol=0.01)
    assert {(len(text), int(text[0]), int(text[-1])) for text in texts} == {(20_000, 65, 84), (20_000, 80, 99)}
    texts.clear()
    assert averaging.main([*words, "--temperature", "1.4"]) == 0 and not texts
    assert json.loads((out / averaging.CHOSEN).read_text(encoding="utf-8")) == {"temperature": 1.4}
    for wrong in (["--temperature", "0"], ["--text-tokens", "1"], ["--row-length", "100"]):
        with pytest.raises(SystemExit):
            averaging.main([*words, *wrong])
        assert f"{wrong[0]} {wrong[1]}" in capsys.readouterr().err


@pytest.mark.slow
def test_cooling_divides_all_logits() -> None:
    build, shapes = builder(CONFIG, NUMERICS, TABLES)
    build_draft, draft_shapes = draft_builder(CONFIG, NUMERICS)
    params = {path: np.asarray(v) for path, v in initial(CONFIG, shapes, 1).items()}
    draft = {LEAF_PREFIX + path: np.asarray(v) for path, v in initial(CONFIG, draft_shapes, 2).items()}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 129)), jnp.int32)

    @jax.jit
    def logits(weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Of the target at every position, and of the draft at every anchor, up to a constant a row."""
        target = build({path: v for path, v in weights.items() if not path.startswith(LEAF_PREFIX)})
        own = {path.removeprefix(LEAF_PREFIX): v for path, v in weights.items() if path.startswith(LEAF_PREFIX)}
        out = forward(target, tokens[:, :-1], None)
        found = blocks(build_draft(own), target, tokens, out.hidden, out.taps, jnp.int32(0))
        return target.logits(out.hidden), found["log_q"]

    hot, cold = logits(params | draft), logits(cool(params) | cool(draft))
    for before, after in zip(hot, cold):
        before, after = (np.asarray(a) - np.asarray(a).mean(axis=-1, keepdims=True) for a in (before, after))
        np.testing.assert_allclose(after, before / TEMPERATURE, atol=1e-4)
        assert np.abs(after - before).max() > 0.1
