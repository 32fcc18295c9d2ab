"""scripts/time_budget.py: what it counts, and the checkpoint with more positions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # scripts are run from a checkout, not installed

from di_jax.commands.bench_host import null_engine
from di_jax.config import load_config
from di_jax.errors import ConfigError
from di_jax.model.config import ModelConfig
from scripts import time_budget
from scripts.time_budget import Timeline


def test_a_gap_counts_for_the_prompt_that_was_read_during_a_part_of_it() -> None:
    #                  before     begins before  inside      ends after  after
    tokens = [(9.0, 0.5), (10.5, 1.0), (15.0, 1.0), (20.5, 3.0), (22.0, 1.5)]
    timeline = Timeline(tokens, [(9.5, 2.0), (12.0, 1.0)], arrived=10.0, answered=20.0, chunks=3)
    assert timeline.gaps(meanwhile=True).tolist() == [1.0, 1.0, 3.0]
    assert timeline.gaps(meanwhile=False).tolist() == [0.5, 1.5]
    row = time_budget.summary(timeline, 7.0)
    assert row["beside_prompt"]["tokens"] == 3 and row["beside_prompt"]["max_ms"] == 3000
    assert row["beside_prompt"]["first_token_p50_ms"] == 1000 and row["alone"]["first_token_p50_ms"] == 2000
    assert (row["ttft_s"], row["chunks"], row["itl_target_ms"]) == (10.0, 3, 7.0)


def test_chats_and_one_long_prompt_are_watched(tmp_path: Path) -> None:
    values = {"engine.max_num_seqs": 9, "engine.max_num_batched_tokens": 512, "bench.batch_sizes": [1]}
    engine = null_engine(load_config("host_bench").with_values(values))
    timeline = time_budget.watch(engine, 3000, alone_s=0.5)
    assert timeline.arrived < timeline.answered < float("inf")
    assert 6 <= timeline.chunks <= 12  # 3,000 tokens, 512 or half of them at a time
    assert len(timeline.gaps(meanwhile=False)) > 100 and not engine.requests and not engine.has_unfinished
    when = np.array(timeline.tokens)[:, 0]
    assert (np.diff(when) >= 0).all() and when[0] < timeline.arrived and when[-1] > timeline.answered
    picture = tmp_path / "picture.png"
    time_budget.draw({"without": timeline, "with": timeline}, 250.0, 3000, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("asked", "positions"), [(100, 65536), (100_000, 100_000)])
def test_more_positions_for_a_checkpoint(golden: Path, tmp_path: Path, asked: int, positions: int) -> None:
    checkpoint = golden / "tiny-v41-fp8"
    folder = time_budget.stretched(checkpoint, asked, tmp_path)
    assert ModelConfig.from_file(folder).max_position_embeddings == positions
    assert {file.name for file in folder.iterdir()} == {file.name for file in checkpoint.iterdir()}
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    assert text["max_position_embeddings"] == 65536, "the checkpoint itself is as it was"


def test_settings_take_overrides(tmp_path: Path) -> None:
    config = time_budget.settings(tmp_path, 3000, None)
    assert config.engine.prefill_buckets == (256, 512, 2048) and config.engine.context_buckets == (1024, 1536, 3072)
    changed = time_budget.settings(
        tmp_path, 3000, None, ["engine.prefill_buckets=[512, 2048]", "engine.replay.decoder=off"]
    )
    assert changed.engine.prefill_buckets == (512, 2048) and changed.engine.replay.decoder == "off"
    assert changed.engine.context_buckets == config.engine.context_buckets
    with pytest.raises(ConfigError, match=r"engine.prefill_buckets"):
        time_budget.settings(tmp_path, 3000, None, ["engine.prefill_buckets=[512]"])
