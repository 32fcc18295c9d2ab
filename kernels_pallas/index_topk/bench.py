"""Time of index scores and top-k beside XLA's: `python -m kernels_pallas.index_topk.bench [--json]`.

Random keys in the released shapes, every row with its own; they exceed the L2 cache many times over. Calls are
enqueued back to back inside one program, each depends on the one before. Choices that are not the tuned one are
measured by `--tuning '{"units": 32}'`, the fields of `config.Tuning`. No library has this operation: its peer
(`--peers`) is what PyTorch has, a product, a compiled sum over the heads and topk.
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

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats, fake_quantize
from di_jax.model.rows import Rows, make_rows
from kernels_pallas.benchmark import RELEASED, main, measured, need_kernels, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.index_topk import api, reference
from kernels_pallas.index_topk.config import Tuning
from kernels_pallas.peers import Peer, compiled, torch_index, torch_of, torch_peer, torch_weigh

# Of the entries that the reference chooses, which a peer does not: of a row's 512 a few are so close to the first that
# it leaves out that products rounded to bf16 change their order.
PEER_BOUND = 0.1
CHECKED = 64  # rows, of the last: the scores of all 1,024 by every head would take 9 GB


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


@lru_cache(maxsize=1)
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


def source_of(layout: CacheLayout) -> int:
    """The KV source whose keys are read: one of ratio 1."""
    return max(i for i, ratio in enumerate(layout.config.kv_source_ratios) if ratio == 1)


def timed(work: Workload, operation: Callable[..., tuple[Array, Array | None]], calls: int) -> float:
    """Seconds of a call of an operation with the arguments of `api.index_topk`."""
    layout, rows, arrays = inputs(work)

    def call(weights: Array, query: Array, pool: Array, candidates: Array | None = None) -> Array:
        options: dict[str, Any] = {"candidates": candidates, "make_candidates": work.makes}
        chosen, blocks = operation(query, weights, pool, rows, layout, source=source_of(layout), **options)
        return chosen if blocks is None else chosen + blocks[:, :1] * 0

    return seconds(chain(call, calls), arrays, calls)


def measure(work: Workload) -> dict[str, Any]:
    each = {KERNEL: 50, "reference": work.reference_calls}
    operations = {name: partial(api.index_topk, implementation=name) for name in each}
    return measured(work, {name: partial(timed, work, operations[name], calls) for name, calls in each.items()})


def measure_tuning(work: Workload, fields: dict[str, Any]) -> dict[str, Any]:
    """Raises TypeError or ValueError for what no `Tuning` can have."""
    tuning = Tuning(**fields)

    def taken() -> float:
        need_kernels()
        from kernels_pallas.index_topk import mosaic_gpu_sm90

        return timed(work, partial(mosaic_gpu_sm90.index_topk, tuning=tuning), 50)

    return measured(work, {KERNEL: taken})


# ---- peers ----


@lru_cache(maxsize=1)
def keys_of(work: Workload) -> Array:
    """bf16 [sequences, scored, 128], of each row where rows score candidates: its keys in order, decoded."""
    layout, rows, (_, _, pool, *rest) = inputs(work)
    size = layout.config.candidate_block_size

    @jax.jit
    def make(pool: Array, table: Array, blocks: list[Array]) -> Array:
        entry = jnp.arange(work.context, dtype=jnp.int32)[None]
        if blocks:
            entry = (blocks[0][..., None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(work.rows, -1)
        row = layout.entry_row(source_of(layout), table, jnp.broadcast_to(entry, (len(table), entry.shape[-1])))
        return layout.formats.index.decode(pool.reshape(-1, pool.shape[-1])[row]).astype(jnp.bfloat16)

    return make(pool, rows.block_table[rows.sequence] if work.inside else rows.block_table, rest)


def wanted(work: Workload) -> np.ndarray:
    """The reference's choice [rows, 512] among all of `keys_of`, of the last `CHECKED` rows."""
    _, _, (weights, query, *_) = inputs(work)
    keys, some = keys_of(work), slice(max(0, work.rows - CHECKED), None)
    keys = keys[0] if len(keys) == 1 < work.rows else keys[some]

    @jax.jit
    def choose(query: Array, weights: Array, keys: Array) -> Array:
        return reference.best_entries(reference.scores(query, weights, keys), 512)

    return np.asarray(choose(query[some], weights[some], keys))


def missed(chosen: np.ndarray, exact: np.ndarray) -> float:
    """Share of the entries exact [rows, k] that are not among chosen [>= rows, k]: of the last rows."""
    rows = zip(chosen[-len(exact) :], exact, strict=True)
    return float(np.mean([len(np.setdiff1d(wanted, found)) / len(wanted) for found, wanted in rows]))


def peers(work: Workload) -> tuple[Peer, ...]:
    @cache
    def exact() -> np.ndarray:
        return wanted(work)

    def prepare(torch: Any, device: str) -> Callable[[], Any]:
        weights, query, *_ = inputs(work)[2]
        query, weights, keys = (torch_of(torch, x, device) for x in (query, weights, keys_of(work)))
        weigh = compiled(torch, torch_weigh)
        return lambda: torch_index(torch, query, weights, keys, 512, weigh)

    omits = "pages and decoding (its keys are bf16, 256 bytes, in order), masks, " + (
        "the gather of candidates, " if work.inside else "the choice of candidates, " if work.makes else ""
    )
    omits += "the order of the entries, and rounds each product to bf16"
    name = "torch matmul, torch.compile of the sum, topk"
    return (torch_peer(name, omits, prepare, lambda found: missed(found[0], exact()), PEER_BOUND, calls=4),)


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers, measure_tuning=measure_tuning)
