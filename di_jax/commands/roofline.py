"""The least time a step of the model could take on a device, from what it must read and multiply.

Lower bounds, so that a fraction of the roofline is never flattered: each weight is read once a step in its stored
format (only the experts and table rows that the tokens can touch), each cache entry once a sequence, activations not
at all. `bench` measures bandwidth and matmul rate on the device at hand, for no data sheet lists every one; `plan` has
those of the data sheets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.parallel.mesh import DeviceMesh
from kernels_pallas.benchmark import H200_BYTES, H200_FLOPS, H200_FP8_FLOPS

ONE_DEVICE = DeviceMesh()
NOTE = (
    "fraction = least time / measured time; least time = max(bytes / copy bandwidth, flops / matmul rate), both rates "
    "measured on this device; bytes = stored weights once a step (experts and table rows that the tokens can reach), "
    "cache entries once a sequence; activations, padding and launches are not counted"
)


@dataclass(frozen=True)
class Peaks:
    """Rates of one device: bytes read plus written by a copy, and multiply-add flops of a large matmul.

    quantized_flops_per_s: of products whose operands are both 8-bit; None: no faster than others.
    """

    bytes_per_s: float
    flops_per_s: float
    quantized_flops_per_s: float | None = None


@dataclass(frozen=True)
class StepCost:
    """What one step cannot do without on one device. quantized_flops: those of `flops` with fp8 or fp4 weights."""

    bytes: float
    flops: float
    quantized_flops: float = 0.0

    def memory_seconds(self, peaks: Peaks) -> float:
        return self.bytes / peaks.bytes_per_s

    def compute_seconds(self, peaks: Peaks) -> float:
        quantized = self.quantized_flops / (peaks.quantized_flops_per_s or peaks.flops_per_s)
        return (self.flops - self.quantized_flops) / peaks.flops_per_s + quantized

    def seconds(self, peaks: Peaks) -> float:
        return max(self.memory_seconds(peaks), self.compute_seconds(peaks))

    def bound(self, peaks: Peaks) -> str:
        """memory or compute: which of the two takes longer."""
        return "memory" if self.memory_seconds(peaks) >= self.compute_seconds(peaks) else "compute"


def step_cost(
    leaves: Mapping[str, jax.ShapeDtypeStruct | Array],
    layout: CacheLayout,
    *,
    tokens: int,
    sequences: int,
    context: float,
    mesh: DeviceMesh = ONE_DEVICE,
) -> StepCost:
    """The cost, on one device of a mesh, of a step in which each device feeds `tokens` tokens of `sequences` sequences
    of its own, with `context` positions before a token on average.

    leaves: weights of the whole mesh by path, as stored (checkpoint.mapping). The rows of the ranks that share the
    experts are taken to spread evenly over them.
    """
    c = layout.config
    total_bytes = flops = quantized_flops = 0.0
    for path, leaf in leaves.items():
        size = leaf.size * leaf.dtype.itemsize
        elements = leaf.size * (2 if path.startswith("layers.ffn.experts.") and leaf.dtype == jnp.uint8 else 1)
        is_matrix = leaf.ndim >= 2 and not path.endswith((".scale", ".bias", ".bias_vl"))
        product = 2 * tokens * elements if is_matrix else 0.0
        if path.startswith("embed."):
            total_bytes += tokens * size / leaf.shape[0]
            continue
        if path.startswith("engram_tables."):
            total_bytes += tokens * c.engram_columns * size / leaf.shape[0]
            continue
        if path.startswith("layers.ffn.experts."):
            slots, ranks = leaf.shape[1], mesh.size("expert")
            total_bytes += min(1.0, tokens * ranks * c.num_experts_per_tok / slots) * size / ranks
            product *= c.num_experts_per_tok / slots
        else:
            total_bytes += size
            product *= sequences / tokens if path.startswith("head.") else 1
        flops += product
        quantized_flops += product if leaf.dtype.itemsize == 1 else 0.0
    cache = _cache_cost(layout, context)
    return StepCost(total_bytes + sequences * cache.bytes, flops + tokens * cache.flops, quantized_flops)


def _cache_cost(layout: CacheLayout, context: float) -> StepCost:
    """Bytes of cache that one sequence's step reads, and attention flops of one token."""
    c, formats = layout.config, layout.formats
    window_row = formats.window.record(c.head_dim) * formats.window.dtype.itemsize
    entry = formats.compressed.record(c.head_dim) * formats.compressed.dtype.itemsize
    index_key = formats.index.record(c.index_head_dim) * formats.index.dtype.itemsize
    total_bytes = flops = 0.0
    for plan in c.layers:
        window = min(context + 1, c.sliding_window)
        selected = min(context / plan.ratio, c.index_topk) if plan.ratio else 0.0
        total_bytes += window * window_row + selected * entry
        flops += 4 * c.num_attention_heads * c.head_dim * (window + selected)
        if plan.owns_index:
            keys = context / plan.ratio
            total_bytes += keys * index_key
            flops += 2 * c.index_n_heads * c.index_head_dim * keys
    return StepCost(total_bytes, flops)


def published_peaks(device_kind: str) -> Peaks | None:
    """Rates of a device whose ceilings were measured once for all floors; None for others.

    H200: 4.3 TB/s, and products of 760 TFLOP/s in bf16 and 1,469 in e4m3, the most that programs reach there. A copy by
    XLA makes 3.2 TB/s of it: floors from that would flatter kernels that do better.
    """
    return Peaks(H200_BYTES, H200_FLOPS, H200_FP8_FLOPS) if "H200" in device_kind else None


def measure_peaks(dtype: str) -> Peaks:
    """Median of five timed runs each: negating 256 MB of fp32, and a square matmul in `dtype`."""
    device = jax.devices()[0]
    side = 2048 if device.platform == "cpu" else 8192
    array = jnp.ones((2**26,), jnp.float32)
    square = jnp.ones((side, side), jnp.dtype(dtype))
    copy = jax.jit(jnp.negative)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    return Peaks(
        bytes_per_s=2 * array.nbytes / _seconds(copy, array),
        flops_per_s=2 * side**3 / _seconds(multiply, square),
    )


def _seconds(function: jax.stages.Wrapped, argument: Array) -> float:
    function(argument).block_until_ready()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function(argument).block_until_ready()
        times.append(time.perf_counter() - began)
    return median(times)
