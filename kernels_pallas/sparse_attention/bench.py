"""Time of sparse attention beside XLA's: `python -m kernels_pallas.sparse_attention.bench [--json]`.

Random records in the released shapes; two selections, each in a layer of its own, take turns, together larger than the
L2 cache. Calls are enqueued back to back inside one program, each on the result of the one before. Where the records of
a selection are is worked out once per program, as the layers of a model share it; "plan" is its time. No library reads
these records: its peers (`--peers`) are the backends of PyTorch's attention, on keys already gathered and decoded.
JAX's own Mosaic GPU attention keeps 128 rows and two steps of keys and values in shared memory, 384 KB at head_dim 512.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, main, measured, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.peers import Peer, torch_attention, torch_peer
from kernels_pallas.sparse_attention import api
from kernels_pallas.sparse_attention.mosaic_gpu_sm90 import plan

BLOCKS, CONTEXT, SELECTIONS = 4096, 131_072, 2


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


def measure(work: Workload) -> dict[str, Any]:
    layout, rows, arrays = inputs(work)
    source = max(i for i, ratio in enumerate(layout.config.kv_source_ratios) if ratio == 1)

    def many(implementation: str, calls: int) -> Callable[..., Array]:
        def call(query: Array, a: dict[str, Any], turn: int) -> Array:
            selected = None if a["selected"] is None else a["selected"][turn]
            rest = (a["step_kv"], a["window"], a["pool"], selected, a["sink"], a["cos_sin"], rows, layout)
            scale = layout.config.head_dim**-0.5
            return api.sparse_attention(turn, query, *rest, source=source, scale=scale, implementation=implementation)

        @jax.jit
        def run(a: dict[str, Any]) -> Array:
            def body(_: int, query: Array) -> Array:
                for turn in range(SELECTIONS):
                    query = call(query, a, turn)
                return query

            return lax.fori_loop(0, calls // SELECTIONS, body, a["query"])

        return run

    def timed(name: str, calls: int) -> float:
        return seconds(many(name, calls), (arrays,), calls)

    each = {KERNEL: work.calls, "reference": max(SELECTIONS, work.reference_calls)}
    row = measured(work, {name: partial(timed, name, calls) for name, calls in each.items()})
    if work.entries:

        @jax.jit
        def plans(a: dict[str, Any]) -> Array:
            def body(_: int, shift: Array) -> Array:
                selected = a["selected"][0] + shift
                made = plan(rows, layout, selected, source, ring_slots=a["window"].shape[1])
                return jnp.minimum(lax.optimization_barrier(made)[1][0], 0)

            return lax.fori_loop(0, 20, body, jnp.int32(0))

        row["plan_us"] = seconds(plans, (arrays,), 20) * 1e6
    return row


def peers(work: Workload) -> tuple[Peer, ...]:
    """A row's heads are the queries of a sequence, its window and entries the keys and values."""

    def peer(backend: str) -> Peer:
        def prepare(torch: Any, device: str) -> Callable[[], Any]:
            query = torch.randn(work.rows, 1, 64, 512, device=device, dtype=torch.bfloat16)
            kv = torch.randn(work.rows, 1, 128 + work.entries, 512, device=device, dtype=torch.bfloat16)
            return lambda: torch_attention(torch, query, kv, 512**-0.5, backend)

        omits = (
            "gather and decoding (keys of a row are bf16, 1,024 bytes each, in order), masks, sinks and the rotation"
        )
        return torch_peer(f"torch scaled_dot_product_attention, {backend}", omits, prepare, calls=4)

    return tuple(peer(f"{name}_ATTENTION") for name in ("FLASH", "CUDNN", "EFFICIENT")) + (peer("MATH"),)


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers)
