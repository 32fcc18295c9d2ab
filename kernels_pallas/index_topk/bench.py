"""Time of index scores and top-k beside XLA's: `python -m kernels_pallas.index_topk.bench [--json]`.

Random keys in the released shapes, every row with its own; they exceed the L2 cache many times over. Calls are
enqueued back to back inside one program, each depends on the one before. No library has this operation: its peer
(`--peers`) is what PyTorch has, a product, a compiled sum over the heads and topk.
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
from di_jax.model.quantization import CacheFormats, fake_quantize
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, main, measured, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.index_topk import api
from kernels_pallas.peers import Peer, torch_index, torch_peer, torch_weigh


@dataclasses.dataclass(frozen=True)
class Workload:
    """rows of one step over `context` entries of a ratio-1 source. sequences: rows of one share its keys."""

    name: str
    rows: int
    sequences: int
    context: int
    inside: bool = False  # of candidates
    makes: bool = False
    reference_calls: int = 4

    @property
    def scored(self) -> int:
        """Entries that a row scores."""
        return min(self.context, 16_384) if self.inside else self.context

    @property
    def bytes(self) -> int:
        return 68 * self.scored * (self.rows if self.inside else self.sequences)

    @property
    def flops(self) -> int:
        return 2 * 32 * 128 * self.scored * self.rows


WORKLOADS = (
    Workload("decode, 64 rows x 65,536", 64, 64, 65_536),
    Workload("decode, 64 rows x 65,536, making candidates", 64, 64, 65_536, makes=True),
    Workload("decode, 16 rows x 131,072", 16, 16, 131_072),
    Workload("decode, 64 rows inside candidates", 64, 64, 65_536, inside=True),
    Workload("prefill, 1,024 rows of one sequence x 65,536", 1024, 1, 65_536, reference_calls=1),
)


def inputs(work: Workload) -> tuple[CacheLayout, Rows, tuple[Array, ...]]:
    """Layout, rows and (weights, query, pool, candidates or none)."""
    config = ModelConfig.from_file(RELEASED)
    pages = work.context // 128
    layout = CacheLayout(config, CacheFormats.quantized(), num_blocks=work.sequences * pages, num_slots=1)
    count, tile = work.rows // work.sequences, 1 if work.rows == work.sequences else 128
    sequences = jnp.arange(work.sequences, dtype=jnp.int32)
    rows = make_rows(
        jnp.ones(work.rows, jnp.int32),
        jnp.repeat(sequences, count // tile),
        start=jnp.full(work.sequences, work.context - count, jnp.int32),
        first_row=sequences * count,
        count=jnp.full(work.sequences, count, jnp.int32),
        slot=jnp.zeros(work.sequences, jnp.int32),
        block_table=jax.random.permutation(jax.random.key(0), layout.num_blocks)
        .astype(jnp.int32)
        .reshape(work.sequences, pages),
        decode=tile == 1,
    )
    keys = jax.random.split(jax.random.key(1), 4)
    shape = (layout.num_blocks, layout.rows_per_block)
    query = fake_quantize(layout.formats.index, jax.random.normal(keys[0], (work.rows, 32, 128), jnp.bfloat16))
    weights = jax.random.normal(keys[1], (work.rows, 32)) / 64
    values = jax.random.bits(keys[2], (*shape, 64), jnp.uint8)
    scales = jax.random.randint(keys[3], (*shape, 4), 122, 128).astype(jnp.uint8)
    arrays: tuple[Array, ...] = (weights, query, jnp.concatenate([values, scales], axis=-1))
    if work.inside:
        blocks = jnp.arange(config.candidate_topk_blocks, dtype=jnp.int32) * (work.context // 8 // 2048)
        arrays += (jnp.broadcast_to(blocks, (work.rows, blocks.size)),)
    return layout, rows, jax.block_until_ready(arrays)


def chain(call: Callable[..., Array], calls: int) -> Callable[..., Array]:
    """`calls` calls in a row in one program, each on what the one before leaves."""

    @jax.jit
    def run(weights: Array, *rest: Array) -> Array:
        def body(_: int, weights: Array) -> Array:
            return weights + jnp.where(call(weights, *rest)[:, :1] < -1, 1.0, 0.0)  # waits, changes nothing

        return lax.fori_loop(0, calls, body, weights)

    return run


def measure(work: Workload) -> dict[str, Any]:
    layout, rows, arrays = inputs(work)
    source = max(i for i, ratio in enumerate(layout.config.kv_source_ratios) if ratio == 1)

    def call(implementation: str, weights: Array, query: Array, pool: Array, candidates: Array | None = None) -> Array:
        chosen, blocks = api.index_topk(
            query, weights, pool, rows, layout, source=source, candidates=candidates, make_candidates=work.makes,
            implementation=implementation,
        )  # fmt: skip
        return chosen if blocks is None else chosen + blocks[:, :1] * 0

    def timed(name: str, calls: int) -> float:
        return seconds(chain(partial(call, name), calls), arrays, calls)

    return measured(
        work, {KERNEL: partial(timed, KERNEL, 50), "reference": partial(timed, "reference", work.reference_calls)}
    )


def peers(work: Workload) -> tuple[Peer, ...]:
    def prepare(torch: Any, device: str) -> Callable[[], Any]:
        own = work.rows if work.inside else work.sequences
        query = torch.randn(work.rows, 32, 128, device=device, dtype=torch.bfloat16)
        keys = torch.randn(own, work.scored, 128, device=device, dtype=torch.bfloat16)
        weights = torch.randn(work.rows, 32, device=device) / 64
        weigh = torch.compile(torch_weigh)
        return lambda: torch_index(torch, query, weights, keys, 512, weigh)

    omits = "pages and decoding (its keys are bf16, 256 bytes, in order), masks, " + (
        "the gather of candidates, " if work.inside else "the choice of candidates, " if work.makes else ""
    )
    omits += "the order of the entries, and rounds each product to bf16"
    return (torch_peer("torch matmul, torch.compile of the sum, topk", omits, prepare, calls=4),)


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers)
