"""Model FLOPs of a step against sums over every row, layer and weight."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.checkpoint.mapping import leaf_specs
from di_jax.engine.flops import ModelFlops, peak_flops
from di_jax.model.config import ModelConfig
from di_jax.platforms.accelerators import ACCELERATORS

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ModelConfig.from_file(GOLDEN / "tiny-v41-fp8")
# Few candidates and entries, so that short contexts reach every cap.
SMALL = dataclasses.replace(TINY, index_topk=9, sliding_window=6, candidate_block_size=4, candidate_topk_blocks=3)
RELEASED = ModelConfig.from_file(GOLDEN / "config_real.json")


def context_flops(c: ModelConfig, layer: int, t: int, window_t: int) -> float:
    """engine.md 12.4 for one row of one layer that sees t positions, window_t of them from where windows begin."""
    plan = c.layers[layer]
    pair = 8 * c.num_attention_heads * c.head_dim
    flops = pair * min(max(window_t, 0), c.sliding_window)
    if plan.ratio:
        flops += pair * min(t // plan.ratio, c.index_topk)
    if plan.owns_index:
        entries = t // plan.ratio
        if plan.is_reindex:
            entries = c.candidate_block_size * min(-(-entries // c.candidate_block_size), c.candidate_topk_blocks)
        flops += c.index_n_heads * c.index_head_dim * entries
    return flops


def by_rows(
    c: ModelConfig, flops: ModelFlops, count: int, length: int, begin: int, cut: int, *, compact: bool, decode: bool
) -> float:
    """Of one sequence, row by row."""
    start, total = length - count, float(flops.per_logits * (count if decode else 1))
    for position in range(start, length):
        total += flops.per_row
        kept = not compact or position >= cut or position == length - 1
        total += flops.per_kept_row if kept else 0
        for plan in c.layers:
            decoder = plan.layer >= c.candidate_source_layer_id
            if kept or not decoder:
                total += context_flops(c, plan.layer, position + 1, position + 1 - (cut if decoder else begin))
    return total


chunks = st.tuples(st.integers(1, 40), st.integers(0, 80), st.integers(0, 90), st.integers(0, 130))


@given(st.lists(chunks, min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_closed_sums_equal_sums_over_rows(
    many: list[tuple[int, int, int, int]], compact: bool, one_row: bool, decode: bool
) -> None:
    flops = ModelFlops(SMALL, compact=compact)
    many = [(1 if one_row else count, start, min(begin, start), cut) for count, start, begin, cut in many]
    count, start, begin, cut = np.array(many).T
    found = flops.step(count, start + count, window_start=begin, decoder_start=cut, decode=decode)
    expected = sum(by_rows(SMALL, flops, n, s + n, b, d, compact=compact, decode=decode) for n, s, b, d in many)
    assert found == pytest.approx(expected, rel=1e-12)


def test_decode_steps_take_the_short_way_to_the_same_sum() -> None:
    flops = ModelFlops(SMALL)
    length = np.arange(1, 200)
    step = flops.step(np.ones_like(length), length, decode=True)
    assert flops.decode(length) == pytest.approx(step)
    assert step == pytest.approx(sum(by_rows(SMALL, flops, 1, n, 0, 0, compact=False, decode=True) for n in length))
    whole = flops.step(np.array([199]), np.array([199]), decode=True)
    assert step == pytest.approx(whole), "a prompt costs what its rows do one by one"
    forks = flops.step(np.array([199, 0]), np.array([199, 199]))
    assert forks == pytest.approx(flops.step(np.array([199]), np.array([199])) + flops.per_logits)


@pytest.mark.parametrize("config", [RELEASED, SMALL, dataclasses.replace(SMALL, quantization=None)])
def test_a_row_costs_every_weight_that_it_meets(config: ModelConfig) -> None:
    """By the stored leaves: none is forgotten, each once. The hyper-connections' sums have no weights."""
    c, flops = config, ModelFlops(config)
    total = 0.0
    for path, leaf in leaf_specs(c).items():
        name = path.removesuffix(".weight")
        if len(leaf.shape) < 3 or name.startswith(("engram_tables.", "engrams.q", "engrams.k")) or "scale" in name:
            continue
        size = float(np.prod(leaf.shape)) * (2 if leaf.dtype == np.uint8 else 1)  # packed in pairs
        if name == "compressors.wk":
            total += sum(4 * size / len(c.kv_source_ratios) / ratio for ratio in c.kv_source_ratios)
        elif name.startswith(("compressors.", "gates.", "indexers.weights_proj", "layers.ffn.gate")):
            total += 4 * size
        elif name.startswith("layers.hc_"):
            total += 8 * size
        elif name.startswith("layers.ffn.experts."):
            total += (4 if c.quantization is None else 2) * size * c.num_experts_per_tok / c.n_routed_experts
        else:
            total += (4 if c.quantization is None else 2) * size
    streams, layers = 8 * c.hc_mult * c.hidden_size, c.num_hidden_layers
    total += streams * (2 * layers * (1 + c.hc_mult + 1) + 1 + len(c.engram_layer_ids))
    assert flops.per_row + flops.per_kept_row == pytest.approx(total, rel=1e-12)
    head = leaf_specs(c)["head.weight"].shape
    assert flops.per_logits == 4 * head[0] * head[1]


def test_compact_prefill_saves_the_decoder_layers() -> None:
    """Of the released model at 32,768 tokens with 140 kept rows about half; the prefix of one chunk keeps one row."""
    count = length = np.array([32_768])
    cut = length - 140
    whole = ModelFlops(RELEASED).step(count, length)
    compact = ModelFlops(RELEASED, compact=True)
    assert 0.4 < compact.step(count, length, decoder_start=cut) / whole < 0.55
    masked = ModelFlops(RELEASED).step(count, length, decoder_start=cut)
    assert compact.step(count, length, decoder_start=cut) < masked < whole
    before = compact.step(count, length, decoder_start=np.array([10**6]))
    kept_less = compact.step(count, length, decoder_start=length - 1)
    assert before == pytest.approx(kept_less, rel=1e-4)


def test_peaks_are_twice_the_16_bit_rate_or_unknown() -> None:
    assert peak_flops("NVIDIA H200") == 2 * ACCELERATORS["h200"].flops_per_s
    assert peak_flops("NVIDIA B200") == 2 * ACCELERATORS["b200"].flops_per_s
    assert peak_flops("TPU7x") == peak_flops("TPU v7x") == 2 * ACCELERATORS["tpu-v7x"].flops_per_s
    for kind in ("cpu", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB", ""):
        assert peak_flops(kind) is None
