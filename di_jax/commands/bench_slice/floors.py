"""The least that each part of a step must read and multiply on one rank (h200-baseline: "floor").

As in `roofline`: stored weights once a step and only the experts that rows reach, caches once, results of one kernel
that the next one reads not at all, but for the residual streams, which no sublayer can keep on chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from di_jax.commands.bench_slice.parts import Span, layers_of_rows
from di_jax.commands.bench_slice.points import DECODE, Point
from di_jax.commands.plan_cost import matrix_cost, total
from di_jax.commands.roofline import StepCost, step_cost
from di_jax.model.cache import CacheLayout
from di_jax.model.config import LayerPlan

# All-to-all and all-reduce between two H200s over NVLink, by rows of 5,120 bf16 that a rank has (h200-baseline).
ROWS = (256, 4096, 65_536)
ALL_TO_ALL_S = (144e-6, 128e-6, 1059e-6)
ALL_REDUCE_S = (133e-6, 196e-6, 2435e-6)
ROW_BYTES = 2 * 5120


def part_costs(point: Point) -> dict[str, StepCost]:
    """Of every part of `parts`, and of the programs `sampling` (what `accept` does after the head) and `draft`."""
    target, drafts = (leaves(params) for params in point.rank.params)
    c, spans, layout = point.rank.model_config, layers_of_rows(point), point.layout
    rows, context, requests = point.bucket.rows, float(point.rank.context), point.requests
    row_bytes = 2 * c.hidden_size

    def stacked(prefixes: tuple[str, ...]) -> StepCost:
        """Of layer weights with the rows of each layer."""
        parts = []
        for span in spans:
            share = (span.last - span.first) / c.num_hidden_layers
            cost = matrix_cost(target, prefixes, span.rows)
            parts.append(StepCost(cost.bytes * share, cost.flops * share, cost.quantized_flops * share))
        return total(*parts)

    drawn = rows if point.phase == DECODE else requests
    costs = {
        "projections": stacked(("layers.attn.",)),
        "hyper_connections": total(
            stacked(("layers.hc_attn.", "layers.hc_ffn.", "layers.attn_norm.", "layers.ffn_norm.")),
            # Streams are read and written, the sublayer's input written and its output read.
            *(
                StepCost(2 * (span.last - span.first) * span.rows * row_bytes * (2 * c.hc_mult + 2), 0.0)
                for span in spans
            ),
        ),
        "index_topk": total(matrix_cost(target, ("indexers.",), 0), *(_index(point, span, context) for span in spans)),
        "sparse_attention": total(*(_attention(point, span, context) for span in spans)),
        "compress_store": _stores(point, spans, target),
        "experts": total(*(_experts(point, span, target) for span in spans)),
        "router_shared": stacked(("layers.ffn.gate.", "layers.ffn.shared_experts.")),
        "engram": total(
            matrix_cost(target, ("engrams.",), rows),
            StepCost(rows * (row_bytes + len(c.engram_layer_ids) * c.engram_columns * table_row_bytes(target)), 0.0),
        ),
        "head": matrix_cost(target, ("head.",), drawn),
        "draft_context": matrix_cost(drafts, ("main_proj.", "stages.attn.wkv."), spans[-1].rows),
    }
    if point.phase == DECODE:
        drafted = requests * point.rank.settings.num_drafts
        # One read of the logits that are drawn from, and of what the drafts were drawn from.
        costs["sampling"] = StepCost((4 * drawn + 2 * drafted) * c.vocab_size, 0.0)
        costs["draft"] = total(
            step_cost(
                {f"layers.{p.removeprefix('stages.')}": leaf for p, leaf in drafts.items() if p.startswith("stages.")},
                CacheLayout(c.draft_config, layout.formats, 1, 1),
                tokens=requests * c.draft_block,
                sequences=requests,
                context=context,
            ),
            matrix_cost(target, ("head.",), drafted),
            matrix_cost(drafts, ("markov_head.head.", "confidence_head."), drafted),
        )
    return costs


def leaves(params: nnx.State) -> dict[str, Any]:
    """The weights of a rank, as ShapeDtypeStructs by dotted path."""
    return {
        ".".join(map(str, path)): leaf.get_value()
        for path, leaf in nnx.to_flat_state(params)
        if isinstance(leaf, nnx.Param)
    }


def table_row_bytes(target: Mapping[str, Any]) -> float:
    """Of one row of an Engram table."""
    first = [leaf for path, leaf in target.items() if path.startswith("engram_tables.0.")]
    return sum(leaf.size * leaf.dtype.itemsize / leaf.shape[0] for leaf in first)


def _plans(point: Point, span: Span) -> tuple[LayerPlan, ...]:
    return point.rank.model_config.layers[span.first : span.last]


def _index(point: Point, span: Span, context: float) -> StepCost:
    """Keys once for each request, scores for each row; layers after the candidate source look at candidates alone."""
    c, formats = point.rank.model_config, point.layout.formats
    key = formats.index.record(c.index_head_dim) * formats.index.dtype.itemsize
    nbytes = flops = quantized = 0.0
    for plan in _plans(point, span):
        if not plan.owns_index:
            continue
        keys = context / plan.ratio
        if plan.is_reindex:
            keys = min(keys, c.candidate_topk_blocks * c.candidate_block_size)
        nbytes += point.requests * keys * key
        products = 2.0 * span.rows * c.index_n_heads * c.index_head_dim
        flops += products * keys + 2.0 * span.rows * c.hidden_size * c.index_n_heads
        up = products * c.q_lora_rank
        flops, quantized = flops + up, quantized + (up if c.quantization else 0.0)
    return StepCost(nbytes, flops, quantized)


def _attention(point: Point, span: Span, context: float) -> StepCost:
    """Window and selected entries: in decode of each row, in prefill at most every entry once."""
    c, formats = point.rank.model_config, point.layout.formats
    window_row = formats.window.record(c.head_dim) * formats.window.dtype.itemsize
    entry = formats.compressed.record(c.head_dim) * formats.compressed.dtype.itemsize
    nbytes = flops = 0.0
    for plan in _plans(point, span):
        window = min(context, c.sliding_window)
        selected = min(context / plan.ratio, c.index_topk) if plan.ratio else 0.0
        entries = context / plan.ratio if plan.ratio else 0.0
        near = span.rows * window if point.phase == DECODE else window
        far = span.rows * selected if point.phase == DECODE else min(span.rows * selected, entries)
        nbytes += near * window_row + far * entry
        flops += 4.0 * span.rows * c.num_attention_heads * c.head_dim * (window + selected)
    return StepCost(nbytes, flops)


def _stores(point: Point, spans: tuple[Span, ...], target: Mapping[str, Any]) -> StepCost:
    """Inputs and weights of the compressors, entries and keys, and window rows that a ring can hold."""
    c, formats, rows = point.rank.model_config, point.layout.formats, point.bucket.rows
    window_row = formats.window.record(c.head_dim) * formats.window.dtype.itemsize
    entry = formats.compressed.record(c.head_dim) * formats.compressed.dtype.itemsize
    entry += formats.index.record(c.index_head_dim) * formats.index.dtype.itemsize
    pairs = [matrix_cost(target, (prefix,), rows) for prefix in ("compressors.wkv.", "gates.wgate.")]
    keys = matrix_cost(target, ("compressors.wk.",), rows)
    nbytes = sum(rows / ratio * entry + rows * 2 * c.hidden_size for ratio in c.kv_source_ratios)
    for span in spans:
        stored = min(span.rows, point.requests * c.window_ring)
        nbytes += (span.last - span.first) * stored * (window_row + 2 * c.head_dim)
    return total(*pairs, keys, StepCost(nbytes, 0.0))


def _experts(point: Point, span: Span, target: Mapping[str, Any]) -> StepCost:
    """Balanced: this rank gets as many rows as it sends, for its own slots."""
    c = point.rank.model_config
    layers, slots = span.last - span.first, point.rank.local_slots
    mine = {path: leaf for path, leaf in target.items() if path.startswith("layers.ffn.experts.")}
    per_slot = sum(leaf.size * leaf.dtype.itemsize for leaf in mine.values()) / c.num_hidden_layers / slots
    pairs = span.rows * c.num_experts_per_tok
    flops = 6.0 * pairs * c.hidden_size * c.moe_intermediate_size * layers
    return StepCost(min(slots, pairs) * per_slot * layers, flops, flops if c.quantization else 0.0)


def exchange_seconds(op: str, rows: float) -> float:
    """Of one collective between two H200s, between and beyond the measured sizes by straight lines, never less than the
    shortest. rows: of 5,120 bf16 that a rank has in it. Collectives but all-to-all are taken for all-reduces."""
    seconds = ALL_TO_ALL_S if op == "all_to_all" else ALL_REDUCE_S
    if rows > ROWS[-1]:
        return seconds[-1] * rows / ROWS[-1]
    return float(np.interp(rows, ROWS, seconds))
