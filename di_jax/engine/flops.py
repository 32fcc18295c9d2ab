"""Floating-point operations that the model asks of a step, for the share of a device's peak that it reaches (MFU).

In FP8-equivalents (engine.md 12.4): a multiply-add is 2 operations with 8-bit and 4-bit weights, 4 with 16-bit ones, 8
in fp32 (hyper-connections), so that the peak is twice the 16-bit rate whatever the formats. Not counted: the draft,
padding, redundant experts, norms, vision.
"""

from __future__ import annotations

import re

import numpy as np

from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.platforms.accelerators import ACCELERATORS

_ENDLESS = float(2**40)  # entries; no context has as many

Starts = np.ndarray | int  # of each sequence, or 0


class ModelFlops:
    """The costs of one model, made once; `step` adds them up for scheduled rows.

    compact: decoder layers compute only the rows from `decoder_start` on (engine.replay.decoder).
    """

    def __init__(self, config: ModelConfig, *, compact: bool = False) -> None:
        self.compact = compact
        first = config.candidate_source_layer_id
        encoder = [plan for plan in config.layers if plan.layer < first]
        decoder = [plan for plan in config.layers if plan.layer >= first]
        mixes = _mix_flops(config)
        # In compact mode the boundary layer normalizes and reads the streams of all rows, and all of them reach its KV
        # source.
        boundary = mixes if compact and decoder else 0
        self.per_row = boundary + sum(_row_flops(config, plan) + _source_flops(config, plan) for plan in encoder)
        self.per_row += sum(_source_flops(config, plan) for plan in decoder)
        self.per_kept_row = sum(_row_flops(config, plan) for plan in decoder) - boundary
        self.per_kept_row += 8 * config.hc_mult * config.hidden_size
        self.per_logits = 4 * config.hidden_size * config.vocab_size
        encoder_terms = [term for plan in encoder for term in _context_terms(config, plan)]
        self._terms = _Terms(encoder_terms, [term for plan in decoder for term in _context_terms(config, plan)])

    def step(
        self,
        count: np.ndarray,
        length: np.ndarray,
        *,
        window_start: Starts = 0,
        decoder_start: Starts = 0,
        decode: bool = False,
    ) -> float:
        """Operations of a step. count, length: int [S], rows of each sequence and its tokens after them. window_start,
        decoder_start: int [S], first positions that windows of the encoder layers, and windows and rows of the decoder
        layers, reach (0: nothing is cut). decode: logits of every row, else of one row of each sequence."""
        rows = float(count.sum())
        start = length - count
        first = start
        kept_rows = rows
        if self.compact and not isinstance(decoder_start, int):
            # A chunk wholly before the cut keeps its last row, so that every chunk has one to sample from.
            first = np.minimum(np.maximum(start, decoder_start), np.maximum(length - 1, start))
            kept_rows = float((length - first).sum())
        total = rows * self.per_row + kept_rows * self.per_kept_row
        total += self.per_logits * (rows if decode else len(count))
        if rows == len(count) and int(count.max(initial=0)) == 1:
            return total + self._terms.at(length, window_start, decoder_start)
        return total + self._terms.between(start, first, length, window_start, decoder_start)

    def decode(self, length: np.ndarray) -> float:
        """Operations of one row of each sequence: `step` of a decode step. length: int [S], tokens with that row."""
        per_row = self.per_row + self.per_kept_row + self.per_logits
        return len(length) * per_row + self._terms.at(length, 0, 0)


def peak_flops(device_kind: str) -> float | None:
    """FP8-equivalent operations per second of a device that jax calls `device_kind`: twice its 16-bit rate
    (platforms.accelerators); None for one whose rate is not known, such as a CPU."""
    name = _plain(device_kind.lower().removeprefix("nvidia"))
    for accelerator in ACCELERATORS.values():
        if accelerator.name != "cpu" and _plain(accelerator.name) == name:
            return 2 * accelerator.flops_per_s
    return None


def _plain(name: str) -> str:
    """TPU v7x and TPU7x are one."""
    return re.sub("[^a-z0-9]", "", name).replace("tpuv", "tpu")


# Whether it is the window's, then divisor, cap, shift and weight of weight * min(floor((t + shift) / divisor), cap) for
# a row that sees t positions, itself included; of the window, t positions from where it may begin.
Term = tuple[bool, float, float, float, float]


class _Terms:
    """What grows with the context: sums of terms over rows of the encoder and of the decoder layers, for all sequences
    at once. Equal terms are merged; the window's comes first in either part."""

    def __init__(self, encoder: list[Term], decoder: list[Term]) -> None:
        parts = [_merged(part) for part in (encoder, decoder)]
        self.split = len(parts[0])
        self.windows = [at if part else None for at, part in zip((0, self.split), parts)]
        numbers = np.array([(*key[1:], weight) for part in parts for key, weight in part.items()]).T
        self.divisor, self.cap, self.shift = numbers[:3, :, None]
        self.weight = numbers[3]
        self.knee = self.divisor * self.cap  # positions from which a term no longer grows

    def at(self, length: np.ndarray, window_start: Starts, decoder_start: Starts) -> float:
        """Of one row a sequence, the last one."""
        seen = np.empty((len(self.weight), len(length)))
        seen[:] = length
        self._begin_windows(seen, window_start, decoder_start)
        seen += self.shift
        seen /= self.divisor
        np.floor(seen, out=seen)
        return float(self.weight @ np.minimum(seen, self.cap, out=seen).sum(axis=1))

    def between(
        self, start: np.ndarray, first: np.ndarray, length: np.ndarray, window_start: Starts, decoder_start: Starts
    ) -> float:
        """Of the rows from `start` (encoder) or `first` (decoder) to `length`: a difference of closed sums.

        The sum over t <= n of floor(t / r) is b (n + 1) - r b (b + 1) / 2 with b = floor(n / r). Shifts are less than
        their divisors, so t <= 0 adds nothing.
        """
        seen = np.empty((2, len(self.weight), len(length)))
        seen[0, : self.split], seen[0, self.split :], seen[1] = start, first, length
        self._begin_windows(seen, window_start, decoder_start)
        seen += self.shift
        growing = np.minimum(seen, self.knee)
        b = np.floor(growing / self.divisor)
        seen -= growing
        seen *= self.cap
        growing += 1
        growing -= (0.5 * self.divisor) * (b + 1)
        growing *= b
        seen += growing
        low, high = seen.sum(axis=2)
        return float(self.weight @ (high - low))

    def _begin_windows(self, seen: np.ndarray, window_start: Starts, decoder_start: Starts) -> None:
        """Subtracts, in place, what is before the windows' beginnings."""
        for at, begin in zip(self.windows, (window_start, decoder_start)):
            if at is not None and not isinstance(begin, int):
                window = seen[..., at, :]
                window -= begin
                np.maximum(window, 0, out=window)


def _merged(terms: list[Term]) -> dict[tuple[bool, float, float, float], float]:
    """Weights of equal terms together, the window's first."""
    weights: dict[tuple[bool, float, float, float], float] = {}
    for *key, weight in sorted(terms, reverse=True):
        weights[tuple(key)] = weights.get(tuple(key), 0.0) + weight  # type: ignore[index,arg-type]
    return weights


def _mix_flops(c: ModelConfig) -> float:
    """Of one row at one hyper-connection site: all mixes from the streams, and one collapse of them."""
    return 8 * c.hc_mult * c.hidden_size * (c.n_mixes + 1)


def _row_flops(c: ModelConfig, plan: LayerPlan) -> float:
    """Of one row in one layer, whatever its context."""
    h, d, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    p = 4 if c.quantization is None else 2
    experts = p * 3 * h * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
    router = 4 * h * c.n_routed_experts
    sites = 2 * (_mix_flops(c) + 8 * c.hc_mult * (c.hc_mult + 1) * h)
    attention = p * (h * (c.q_lora_rank + d) + c.q_lora_rank * heads * d + heads * d * c.o_lora_rank)
    attention += p * c.o_groups * c.o_lora_rank * h
    if plan.owns_index:
        attention += p * c.q_lora_rank * c.index_n_heads * c.index_head_dim + 4 * h * c.index_n_heads
    engram = 0
    if plan.engram >= 0:
        width = c.engram_columns * c.engram_head_dim
        engram = p * width * h * (c.hc_mult + 1) + 8 * c.hc_mult * h
    return experts + router + sites + attention + engram


def _source_flops(c: ModelConfig, plan: LayerPlan) -> float:
    """Of one row at a KV source: its entry's values and gate, and the index key of every `ratio` rows."""
    if not plan.owns_kv:
        return 0.0
    entries = 4 * c.hidden_size * c.head_dim * (1 if plan.ratio == 1 else 2)
    return entries + 4 * c.head_dim * c.index_head_dim / plan.ratio


def _context_terms(c: ModelConfig, plan: LayerPlan) -> list[Term]:
    """What one row costs in one layer for every position or entry that it sees: window, selected entries, index."""
    pair = 8.0 * c.num_attention_heads * c.head_dim
    terms: list[Term] = [(True, 1, c.sliding_window, 0, pair)]
    if plan.ratio:
        terms.append((False, plan.ratio, c.index_topk, 0, pair))
    if plan.owns_index:
        key = float(c.index_n_heads * c.index_head_dim)
        if plan.is_reindex:
            # Whole candidate blocks: ceil(floor(t / r) / B) = floor((t + r (B - 1)) / (r B)).
            size, ratio = c.candidate_block_size, plan.ratio
            terms.append((False, ratio * size, c.candidate_topk_blocks, ratio * (size - 1), key * size))
        else:
            terms.append((False, plan.ratio, _ENDLESS, 0, key))
    return terms
