"""Time of a layer's cache writes beside XLA's: `python -m kernels_pallas.compress_store.bench [--json]`.

Random rows in the released shapes. Layers are enqueued back to back inside one program, each on the caches that the
one before leaves. A layer with a source pools, norms, rotates and stores its entries, its index keys and its window
rows, and works out for itself where all of them go; a window layer shares that with the layers around it, as in a
model. The product between latents and keys is a projection and not among them. What a layer reads was just computed in
a model, and lies in the L2 cache here too. A launch takes the host longer than the GPU: `kernel_us` is the time of the
GPU alone, all kernels of a layer added up. No library writes these records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import profiler

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, main, measured, seconds
from kernels_pallas.compress_store import api
from kernels_pallas.hopper import KERNEL

CONTEXT, BLOCKS, LAYERS = 131_072, 512, 4
BF16 = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Workload:
    """rows of one step, each a sequence in decode, all of one in prefill. source: whose entries are written too."""

    name: str
    rows: int
    source: int | None = None
    decode: bool = True
    calls: int = 400
    reference_calls: int = 100
    flops: int = 0

    @property
    def bytes(self) -> int:
        """Window rows; of a source pairs in and out, the pair of an earlier step, latent, key and their records."""
        total = (2 * 512 + 528) * (self.rows if self.decode else 134)
        if self.source == 1:
            pair, groups = 2 * 512 * 4, self.rows // 2
            stored, history = (self.rows, groups) if self.decode else (7, 1)
            total += pair * (self.rows + stored + history) + (2 * 512 + 288 + 2 * 128 + 68) * groups
        elif self.source == 3:
            total += (2 * 2 * 512 + 288 + 2 * 128 + 68) * self.rows
        return total


WORKLOADS = (
    *(Workload(f"source of ratio 2, {rows} rows", rows, 1) for rows in (8, 64, 256)),
    Workload("source of ratio 1, 256 rows", 256, 3),
    *(Workload(f"window, {rows} rows", rows) for rows in (8, 64, 256)),
    Workload("source of ratio 2, prefill of 1,024 rows", 1024, 1, decode=False),
    Workload("window, prefill of 1,024 rows", 1024, decode=False),
)


def inputs(work: Workload) -> tuple[CacheLayout, Rows, dict[str, Array]]:
    config = ModelConfig.from_file(RELEASED)
    sequences = work.rows if work.decode else 1
    layout = CacheLayout(config, CacheFormats.quantized(), num_blocks=BLOCKS, num_slots=sequences)
    each, count = jnp.arange(sequences, dtype=jnp.int32), work.rows // sequences
    keys = jax.random.split(jax.random.key(0), 8)
    rows = make_rows(
        jnp.ones(work.rows, jnp.int32),
        each if work.decode else jnp.zeros(work.rows // 128, jnp.int32),
        start=CONTEXT - 4096 + each,
        first_row=each * count,
        count=jnp.full(sequences, count, jnp.int32),
        slot=each,
        block_table=jax.random.randint(keys[0], (sequences, CONTEXT // 128), 0, BLOCKS),
        decode=work.decode,
    )
    ratio = 1 if work.source is None else config.kv_source_ratios[work.source]
    made = work.rows if work.decode else work.rows // ratio

    def normal(key: Array, *shape: int, dtype: Any = BF16) -> Array:
        return jax.random.normal(key, shape, dtype)

    dtype = BF16 if ratio == 1 else jnp.dtype(jnp.float32)
    arrays = {
        "projected": normal(keys[1], work.rows, 512),
        "kv_norm": normal(keys[2], LAYERS, 512),
        "gate": normal(keys[3], work.rows, 512, dtype=dtype),
        "latent": normal(keys[4], work.rows, 512, dtype=dtype),
        "norm": normal(keys[5], len(config.kv_source_ratios), 512),
        "key": normal(keys[6], made, 128),
        "key_norm": normal(keys[7], len(config.kv_source_ratios), 128),
    }
    return layout, rows, jax.block_until_ready(arrays)


def one_layer(
    work: Workload,
    layout: CacheLayout,
    implementation: str,
    layer: Array,
    rows: Rows,
    cos_sin: tuple[Array, Array],
    a: dict[str, Array],
    state: Any,
) -> Any:
    """Caches (compressed, index, window, compressor) after a layer, and its latents. cos_sin: of window rows."""
    compressed, index, window, pairs, latent = state
    options: dict[str, Any] = {"implementation": implementation}
    if work.source is not None:
        gate = a["gate"] if layout.config.kv_source_ratios[work.source] > 1 else None
        compressed, pairs, latent = api.store_entries(
            compressed, pairs, work.source, gate, a["latent"], a["norm"], rows, layout, dtype=BF16, **options
        )
        index = api.store_keys(index, work.source, a["key"], a["key_norm"], rows, layout, **options)
    if work.decode:
        window = api.store_projected(window, layer, a["projected"], a["kv_norm"], cos_sin, rows, layout, **options)
    else:
        window = api.store_window(window, layer, a["projected"], rows, layout, **options)
    return compressed, index, window, pairs, latent


def many(
    work: Workload, layout: CacheLayout, calls: int, run: Callable[..., Any], shared: bool
) -> Callable[[Rows, dict[str, Array]], Array]:
    """`calls` layers in one program; `shared`: all of the same rows, else each of rows one position further.

    run(layer, rows, cos_sin, arrays, caches).
    """

    @jax.jit
    def program(rows: Rows, a: dict[str, Array]) -> Array:
        empty: EngineState = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), layout.abstract())
        made = a["key"].shape[0]
        window = jnp.zeros((LAYERS, *empty.window.shape[1:]), empty.window.dtype)
        start = (empty.compressed, empty.index, window, empty.compressor, jnp.zeros((made, 512), BF16))

        cos_sin = rotation(layout.config, True, rows.position)

        def body(i: Array, state: Any) -> Any:
            if shared:
                return run(i % LAYERS, rows, cos_sin, a, state)
            moved = dataclasses.replace(rows, position=rows.position + i, start=rows.start + i)
            return run(i % LAYERS, moved, rotation(layout.config, True, moved.position), a, state)

        return jax.tree.map(lambda x: x.ravel()[0], lax.fori_loop(0, calls, body, start))

    return program


def measure(work: Workload) -> dict[str, Any]:
    layout, rows, arrays = inputs(work)

    @cache
    def program(name: str, calls: int) -> Callable[..., Any]:
        return many(work, layout, calls, partial(one_layer, work, layout, name), shared=work.source is None)

    def timed(name: str, calls: int) -> float:
        return seconds(program(name, calls), (rows, arrays), calls)

    each = {KERNEL: work.calls, "reference": work.reference_calls}
    row = measured(work, {name: partial(timed, name, calls) for name, calls in each.items()})
    if jax.default_backend() == "gpu":
        for name, calls in each.items():
            if isinstance(row[name], dict):
                _, milliseconds = profiler.measure(program(name, calls))(rows, arrays)
                row[name]["kernel_us"] = (milliseconds or 0.0) * 1e3 / calls
    return row


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure)
