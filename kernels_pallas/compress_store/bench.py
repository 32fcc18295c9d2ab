"""Time of a layer's cache writes beside XLA's: `python -m kernels_pallas.compress_store.bench [--json]`.

Random rows in the released shapes. Layers are enqueued back to back inside one program, each on the caches that the
one before leaves. A layer with a source pools, norms, rotates and stores its entries, its index keys and its window
rows, and works out for itself where all of them go; a window layer shares that with the layers around it, as in a
model. The product between latents and keys is a projection and not among them. What a layer reads was just computed in
a model, and lies in the L2 cache here too. A launch takes the host longer than the GPU: `kernel_us` is the time of the
GPU alone, all kernels of a layer added up. No library writes these records: its peers (`--peers`) are the same formulas
in PyTorch's operations, one by one and compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import profiler

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import inverse_frequencies, rotation
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, main, measured, seconds
from kernels_pallas.compress_store import api, peer
from kernels_pallas.hopper import KERNEL
from kernels_pallas.peers import Peer, compiled, difference, torch_of, torch_peer

CONTEXT, BLOCKS, LAYERS = 131_072, 512, 4
BF16 = jnp.dtype(jnp.bfloat16)
# Of the records that a peer wrote, decoded, root mean square: a quotient or a sum that is rounded otherwise moves a few
# fp4 codes of a hundred to their neighbours, 0.1; channels that were not rotated, an eighth of all, are 0.5.
PEER_BOUND = 0.2


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


@lru_cache(maxsize=1)
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


def empty_caches(layout: CacheLayout, layers: int) -> tuple[Array, Array, Array, Array]:
    """Zeroed compressed, index, window of so many layers, and compressor."""
    empty: EngineState = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), layout.abstract())
    window = jnp.zeros((layers, *empty.window.shape[1:]), empty.window.dtype)
    return empty.compressed, empty.index, window, empty.compressor


def many(
    work: Workload, layout: CacheLayout, calls: int, run: Callable[..., Any], shared: bool
) -> Callable[[Rows, dict[str, Array]], Array]:
    """`calls` layers in one program; `shared`: all of the same rows, else each of rows one position further.

    run(layer, rows, cos_sin, arrays, caches).
    """

    @jax.jit
    def program(rows: Rows, a: dict[str, Array]) -> Array:
        start = (*empty_caches(layout, LAYERS), jnp.zeros((a["key"].shape[0], 512), BF16))
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


# ---- peers ----


def wanted(work: Workload) -> tuple[np.ndarray, ...]:
    """What the reference leaves of empty caches after one layer: those that it writes, decoded (see `decoded`)."""
    layout, rows, arrays = inputs(work)

    @jax.jit
    def layer(rows: Rows, a: dict[str, Array]) -> Any:
        state = (*empty_caches(layout, 1), jnp.zeros((a["key"].shape[0], 512), BF16))
        cos_sin = rotation(layout.config, True, rows.position)
        return one_layer(work, layout, "reference", jnp.int32(0), rows, cos_sin, a, state)

    compressed, index, window, pairs, _ = layer(rows, arrays)
    return decoded(work, layout, compressed, index, window, pairs)


def decoded(work: Workload, layout: CacheLayout, *caches: Any) -> tuple[np.ndarray, ...]:
    """fp32 of the window alone, or of compressed, index, window and, of a pooled source, pairs, in that order."""
    formats = layout.formats
    codecs = (formats.compressed, formats.index, formats.window)
    values = [
        np.asarray(jax.jit(codec.decode)(jnp.asarray(cache)).reshape(-1, 512 if codec is not formats.index else 128))
        for codec, cache in zip(codecs, caches, strict=False)
        if work.source is not None or codec is formats.window
    ]
    if work.source is not None and layout.config.kv_source_ratios[work.source] > 1:
        values.append(np.asarray(caches[3]).reshape(-1, 2, 512))
    return tuple(values)


def torch_layer(torch: Any, device: str, work: Workload, compile_it: bool) -> Callable[[], tuple[Any, ...]]:
    """A layer's writes of the bench's rows into flat caches of their own, compressed, index, window and pairs."""
    layout, rows, arrays = inputs(work)
    c, source = layout.config, work.source
    ratio = 1 if source is None else c.kv_source_ratios[source]
    sizes = peer.Sizes(
        source=source,
        ratio=ratio,
        ordinal=c.pooled_sources.index(source) if source in c.pooled_sources else 0,
        decode=work.decode,
        tile=rows.tile,
        slots=layout.num_slots,
        window_ring=c.window_ring,
        pair_ring=c.compressor_ring,
        first=0 if source is None else layout.source_offset[source],
        per_block=layout.block_size // ratio,
        rows_per_block=layout.rows_per_block,
        eps=c.rms_norm_eps,
    )
    names = [field.name for field in dataclasses.fields(peer.Rows)]
    own = {name: torch_of(torch, getattr(rows, name), device) for name in names}
    numbers = peer.Rows(**{name: x if x.dtype == torch.bool else x.long() for name, x in own.items()})
    a = {name: torch_of(torch, x, device) for name, x in arrays.items()}
    a |= {"kv_norm": a["kv_norm"][0], "norm": a["norm"][source or 0], "key_norm": a["key_norm"][source or 0]}
    a["frequencies"] = torch_of(torch, inverse_frequencies(c, True), device)
    caches: dict[str, Any] = {}
    for name, empty in zip(("compressed", "index", "window", "pairs"), empty_caches(layout, 1), strict=True):
        inner = empty.shape[-2:] if name == "pairs" else empty.shape[-1:]
        records = empty.size // int(np.prod(inner))
        kind = torch.float32 if name == "pairs" else torch.uint8
        caches[name] = torch.zeros(records + 1, *inner, dtype=kind, device=device)

    def written() -> tuple[Any, ...]:
        return tuple(flat[:-1] for flat in caches.values())

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        whole = partial(function, torch, sizes)
        return compiled(torch, whole) if compile_it else whole

    if source is None:
        shared = peer.window_places(torch, sizes, a, numbers)
        store = of(peer.store_window)
        return lambda: (store(caches, a, numbers, *shared), written())[1]
    layer = of(peer.store_layer)
    return lambda: (layer(caches, a, numbers), written())[1]


def peers(work: Workload) -> tuple[Peer, ...]:
    @cache
    def exact() -> tuple[np.ndarray, ...]:
        return wanted(work)

    def error(caches: tuple[np.ndarray, ...]) -> float:
        return difference(decoded(work, inputs(work)[0], *caches), exact())

    def made(name: str, compile_it: bool) -> Peer:
        omits = "nothing, and computes every call on the same rows"
        omits += " and writes them into the same layer" if work.source is None else ""
        prepare = partial(torch_layer, work=work, compile_it=compile_it)
        return torch_peer(name, omits, prepare, error, PEER_BOUND)

    return made("torch.compile of the formulas", True), made("torch, operation by operation", False)


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers)
