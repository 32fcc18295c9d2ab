"""Time of sparse attention beside XLA's: `python -m kernels_pallas.sparse_attention.bench [--json]`.

Random records in the released shapes; two selections, each in a layer of its own, take turns, together larger than the
L2 cache. Calls are enqueued back to back inside one program, each on the result of the one before. Where the records of
a selection are is worked out once per program, as the layers of a model share it; "plan" is its time. Into how many
splits a row should go is measured by `bench_splits`. No library reads these records: its peers (`--peers`) are
attentions of PyTorch and JAX, and the formula compiled by PyTorch, on as many keys a row, already decoded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, jax_peer, main, measured, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.peers import (
    Measured,
    Peer,
    compiled,
    difference,
    torch_attention,
    torch_of,
    torch_peer,
    torch_sink_attention,
)
from kernels_pallas.sparse_attention import api
from kernels_pallas.sparse_attention.mosaic_gpu_sm90 import plan

BLOCKS, CONTEXT, SELECTIONS = 4096, 131_072, 2
NO_SINK = -1e30
PEER_BOUND = 0.02  # of a peer's results, root mean square; logits and probabilities rounded to bf16 are 0.004


@dataclasses.dataclass(frozen=True)
class Workload:
    """rows of one step, each a sequence in decode, all of one in prefill; entries selected for each."""

    name: str
    rows: int
    entries: int = 512
    decode: bool = True
    calls: int = 24
    reference_calls: int = 2

    @property
    def flops(self) -> int:
        return 4 * 64 * 512 * (128 + self.entries) * self.rows

    @property
    def bytes(self) -> int:
        """Of records (in prefill those of windows overlap), queries and results."""
        windows = self.rows * 128 if self.decode else self.rows + 127
        return 528 * windows + 288 * self.entries * self.rows + 2 * 64 * 512 * 2 * self.rows


WORKLOADS = (
    Workload("decode, 256 rows", 256),
    Workload("decode, 1,024 rows", 1024, calls=8),
    Workload("decode, 32 rows", 32),
    Workload("decode, 256 rows, window only", 256, entries=0),
    Workload("prefill, 8,192 rows", 8192, decode=False, calls=2, reference_calls=1),
)


@lru_cache(maxsize=1)
def inputs(work: Workload) -> tuple[CacheLayout, Rows, dict[str, Any]]:
    config = ModelConfig.from_file(RELEASED)
    sequences = work.rows if work.decode else 1
    layout = CacheLayout(config, CacheFormats.quantized(), num_blocks=BLOCKS, num_slots=sequences)
    each = jnp.arange(sequences, dtype=jnp.int32)
    count = work.rows // sequences
    keys = jax.random.split(jax.random.key(0), 8)
    rows = make_rows(
        jnp.ones(work.rows, jnp.int32),
        each if work.decode else jnp.zeros(work.rows // 128, jnp.int32),
        start=jnp.full(sequences, CONTEXT - count, jnp.int32),
        first_row=each * count,
        count=jnp.full(sequences, count, jnp.int32),
        slot=each,
        block_table=jax.random.randint(keys[0], (sequences, CONTEXT // 128), 0, BLOCKS),
        decode=work.decode,
    )

    def stored(key: Array, codec: Any, *shape: int) -> Array:
        return jax.jit(lambda: codec.encode(jax.random.normal(key, (*shape, 512), jnp.bfloat16)))()

    selected = jax.random.randint(keys[1], (SELECTIONS, work.rows, 512), 0, CONTEXT - count)
    arrays = {
        "query": jax.random.normal(keys[2], (work.rows, 64, 512), jnp.bfloat16),
        "step_kv": jax.random.normal(keys[3], (work.rows, 512), jnp.bfloat16),
        "window": stored(keys[4], layout.formats.window, SELECTIONS, sequences, config.window_ring),
        "pool": stored(keys[5], layout.formats.compressed, BLOCKS, layout.rows_per_block) if work.entries else None,
        "selected": jnp.sort(selected[..., : work.entries], axis=-1) if work.entries else None,
        "sink": jax.random.normal(keys[6], (SELECTIONS, 64)),
        "cos_sin": rotation(config, True, rows.position),
    }
    return layout, rows, jax.block_until_ready(arrays)


def source_of(layout: CacheLayout) -> int:
    """The KV source whose entries are read: one of ratio 1."""
    return max(i for i, ratio in enumerate(layout.config.kv_source_ratios) if ratio == 1)


def chain(operation: Callable[..., Array], layout: CacheLayout, rows: Rows, calls: int) -> Callable[..., Array]:
    """A program of `calls` calls of an operation with the arguments of `api.sparse_attention`, of the arrays."""

    def call(query: Array, a: dict[str, Any], turn: int) -> Array:
        selected = None if a["selected"] is None else a["selected"][turn]
        rest = (a["step_kv"], a["window"], a["pool"], selected, a["sink"], a["cos_sin"], rows, layout)
        return operation(turn, query, *rest, source=source_of(layout), scale=layout.config.head_dim**-0.5)

    @jax.jit
    def run(a: dict[str, Any]) -> Array:
        def body(_: int, query: Array) -> Array:
            for turn in range(SELECTIONS):
                query = call(query, a, turn)
            return query

        return lax.fori_loop(0, calls // SELECTIONS, body, a["query"])

    return run


def measure(work: Workload) -> dict[str, Any]:
    layout, rows, arrays = inputs(work)

    def timed(name: str, calls: int) -> float:
        operation = partial(api.sparse_attention, implementation=name)
        return seconds(chain(operation, layout, rows, calls), (arrays,), calls)

    each = {KERNEL: work.calls, "reference": max(SELECTIONS, work.reference_calls)}
    row = measured(work, {name: partial(timed, name, calls) for name, calls in each.items()})
    if work.entries:

        @jax.jit
        def plans(a: dict[str, Any]) -> Array:
            def body(_: int, shift: Array) -> Array:
                selected = a["selected"][0] + shift
                made = plan(rows, layout, selected, source_of(layout), ring_slots=a["window"].shape[1])
                return jnp.minimum(lax.optimization_barrier(made)[1][0], 0)

            return lax.fori_loop(0, 20, body, jnp.int32(0))

        row["plan_us"] = seconds(plans, (arrays,), 20) * 1e6
    return row


# ---- peers ----


@lru_cache(maxsize=1)
def keys_of(work: Workload) -> tuple[Array, Array]:
    """(bf16 [N, 512] decoded keys of the first selection, int32 [T, 128 + entries] which of them each row attends to).

    All of a row's window and entries exist, so that there is nothing to mask.
    """
    layout, rows, a = inputs(work)
    ring, count = layout.config.window_ring, layout.config.sliding_window

    @jax.jit
    def make(rows: Rows, a: dict[str, Any]) -> tuple[Array, Array]:
        sequence, formats = rows.sequence[:, None], layout.formats
        window = formats.window.decode(a["window"][0]).astype(jnp.bfloat16).reshape(-1, 512)
        span = rows.position[:, None] - (count - 1) + jnp.arange(count, dtype=jnp.int32)
        place = rows.num_rows + rows.slot[sequence] * ring + span % ring
        if not rows.decode:
            place = jnp.where(span >= rows.start[sequence], rows.row_of(span, sequence), place)
        keys, places = [a["step_kv"], window], [place]
        if work.entries:
            source, before = source_of(layout), rows.num_rows + len(window)
            keys.append(formats.compressed.decode(a["pool"]).astype(jnp.bfloat16).reshape(-1, 512))
            places.append(before + layout.entry_row(source, rows.block_table[rows.sequence], a["selected"][0]))
        return jnp.concatenate(keys), jnp.concatenate(places, axis=-1)

    return make(rows, a)


def wanted(work: Workload, whole: bool) -> np.ndarray:
    """What the reference gives of the first selection [T, 64, 512]; not `whole`: without sinks and rotation."""
    layout, rows, a = inputs(work)
    sink, (cos, sin) = a["sink"], a["cos_sin"]
    if not whole:
        sink, cos, sin = jnp.full_like(sink, NO_SINK), jnp.ones_like(cos), jnp.zeros_like(sin)

    @jax.jit
    def run(a: dict[str, Any], sink: Array, cos_sin: tuple[Array, Array]) -> Array:
        selected = None if a["selected"] is None else a["selected"][0]
        rest = (a["step_kv"], a["window"], a["pool"], selected, sink, cos_sin, rows, layout)
        options: dict[str, Any] = {"source": source_of(layout), "scale": layout.config.head_dim**-0.5}
        return api.sparse_attention(0, a["query"], *rest, **options, implementation="reference")

    return np.asarray(run(a, sink, (cos, sin))).astype(np.float32)


def backend_call(torch: Any, device: str, work: Workload, backend: str) -> Callable[[], Any]:
    query, (keys, places) = inputs(work)[2]["query"], keys_of(work)
    q = torch_of(torch, query, device)[:, None]
    kv = torch_of(torch, keys, device)[torch_of(torch, places, device).long()][:, None]
    return lambda: torch_attention(torch, q, kv, 512**-0.5, backend)[:, 0]


def formula_call(torch: Any, device: str, work: Workload, gather: bool) -> Callable[[], Any]:
    a, (keys, places) = inputs(work)[2], (torch_of(torch, x, device) for x in keys_of(work))
    query, sink, *cos_sin = (torch_of(torch, x, device) for x in (a["query"], a["sink"][0], *a["cos_sin"]))
    run = compiled(torch, partial(torch_sink_attention, torch, scale=512**-0.5, gather=gather))
    kv = (keys, places.long()) if gather else keys[places.long()]
    return lambda: run(query, kv, sink, *cos_sin)


def jax_arrays(work: Workload) -> tuple[Array, Array]:
    """query [T, 64, 512] and its gathered keys [T, K, 512]."""
    keys, places = keys_of(work)
    return inputs(work)[2]["query"], jax.jit(lambda keys, places: keys[places])(keys, places)


def cudnn_attention(query: Array, kv: Array) -> Array:
    found = jax.nn.dot_product_attention(
        query[:, :, None], kv[:, :, None], kv[:, :, None], scale=512**-0.5, implementation="cudnn"
    )
    return found[:, :, 0]


def triton_attention(query: Array, kv: Array, *, block_h: int, interpret: bool = False) -> Array:
    """JAX's Pallas kernel of multi-query decode, without split-KV. block_h: heads of a block of threads."""
    mqa = importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention").mqa
    blocks = {"block_h": block_h, "block_k": 32, "num_warps": 8 if block_h > 16 else 4}
    found = mqa(query, kv, kv, sm_scale=512**-0.5, k_splits=1, num_stages=1, interpret=interpret, **blocks)
    return found.astype(query.dtype)


def mosaic_attention(_: Any) -> Measured:
    """`jax.experimental.pallas.ops.gpu.attention_mgpu`: two warpgroups have 64 rows each, the least a product takes."""
    raise NotImplementedError(
        "at head_dim 512 the queries of two warpgroups, 128 KB, and two steps of 64 keys and values, 256 KB, exceed "
        "the 227 KB of shared memory"
    )


def peers(work: Workload) -> tuple[Peer, ...]:
    """A row's heads are the queries of a sequence, its window and entries the keys and values."""

    @cache
    def exact(whole: bool) -> np.ndarray:
        return wanted(work, whole)

    def error(whole: bool, results: tuple[np.ndarray, ...]) -> float:
        return difference([x.reshape(exact(whole).shape) for x in results], [exact(whole)])

    decoding = "decoding (keys are bf16, 1,024 bytes each) and masks"
    plain = f"gather (a row's keys lie in order), {decoding}, sinks and the rotation"
    bare, whole = partial(error, False), partial(error, True)

    def backend(name: str) -> Peer:
        prepare = partial(backend_call, work=work, backend=f"{name}_ATTENTION")
        return torch_peer(f"torch scaled_dot_product_attention, {name}", plain, prepare, bare, PEER_BOUND, calls=4)

    def formula(gather: bool) -> Peer:
        name = "torch.compile of gather, products and softmax" if gather else "torch.compile of products and softmax"
        omits = decoding if gather else f"gather (a row's keys lie in order), {decoding}"
        prepare = partial(formula_call, work=work, gather=gather)
        return torch_peer(name, omits, prepare, whole, PEER_BOUND, calls=4)

    def of_jax(name: str, operation: Callable[..., Array]) -> Peer:
        return jax_peer(name, plain, operation, partial(jax_arrays, work), bare, PEER_BOUND, max(2, work.calls))

    return (
        *map(backend, ("FLASH", "CUDNN", "EFFICIENT")),
        formula(gather=False),
        formula(gather=True),
        of_jax("jax.nn.dot_product_attention, cudnn", cudnn_attention),
        *(
            of_jax(
                f"jax decode_attention.mqa (Triton), {heads} heads a block", partial(triton_attention, block_h=heads)
            )
            for heads in (16, 64)
        ),
        Peer("jax attention_mgpu (Mosaic GPU)", "jax", plain, mosaic_attention, PEER_BOUND),
    )


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers)
