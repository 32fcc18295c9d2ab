"""Time of a hyper-connection site beside XLA's: `python -m kernels_pallas.hyper_connections.bench [--json]`.

Random streams and mixing weights in the released shapes. Sites are enqueued back to back inside one program, each on
what the one before leaves, so that streams may lie in the L2 cache as in a model. A site is so short that the host's
launches take longer than the launches themselves: `kernel_us` is the time of the GPU alone, all kernels of a site
added up. Choices that are not the tuned ones are measured by `--tuning '{"warpgroups": 1, "chunks": [32]}'`, the fields
of `config.Tuning`. No library has this operation: its peers (`--peers`) are the same formula in PyTorch.
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

from di_jax.model.config import ModelConfig
from kernels_pallas.benchmark import RELEASED, main, measured, need_kernels, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.hyper_connections import api
from kernels_pallas.hyper_connections.config import Tuning
from kernels_pallas.peers import Peer, compiled, difference, torch_of, torch_peer, torch_site

LAYERS, CALLS = 4, 24
CONFIG = ModelConfig.from_file(RELEASED)
CONSTANTS: dict[str, Any] = {
    "iterations": CONFIG.hc_sinkhorn_iters,
    "eps": CONFIG.hc_eps,
    "rms_eps": CONFIG.rms_norm_eps,
}
PEER_BOUND = 0.01  # of a peer's results, root mean square; streams that round to another bf16 are 0.002


@dataclasses.dataclass(frozen=True)
class Workload:
    """rows of one step."""

    rows: int

    @property
    def name(self) -> str:
        return f"site, {self.rows:,} rows"

    @property
    def bytes(self) -> int:
        """y and the streams, the streams written and the sublayer's input, and fn."""
        width = CONFIG.hc_mult * CONFIG.hidden_size
        return 2 * (2 * CONFIG.hidden_size + 2 * width) * self.rows + 4 * CONFIG.n_mixes * width

    @property
    def flops(self) -> int:
        return 2 * CONFIG.n_mixes * CONFIG.hc_mult * CONFIG.hidden_size * self.rows


WORKLOADS = tuple(Workload(rows) for rows in (8, 64, 256, 1024))


@lru_cache(maxsize=1)
def inputs(work: Workload) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """(y, streams, post, comb, pre), what a site changes; and the stacks of weights."""
    rows, hc, dim, mixes = work.rows, CONFIG.hc_mult, CONFIG.hidden_size, CONFIG.n_mixes
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int, dtype: Any = jnp.float32) -> Array:
        return jax.random.normal(next(keys), shape, dtype)

    carry = (
        normal(rows, dim, dtype=jnp.bfloat16),
        normal(rows, hc, dim, dtype=jnp.bfloat16),
        2 * jax.nn.sigmoid(normal(rows, hc)),
        jax.nn.softmax(normal(rows, hc, hc)),
        jax.nn.sigmoid(normal(rows, hc)),
    )
    weights = (
        normal(LAYERS, mixes, hc * dim) * 0.02,
        normal(LAYERS, mixes),
        1 + 0.3 * normal(LAYERS, 3),
        1 + 0.1 * normal(LAYERS, dim, dtype=jnp.bfloat16),
    )
    return jax.block_until_ready((carry, weights))


def chain(implementation: str, tuning: Tuning | None = None) -> Callable[..., tuple[Array, ...]]:
    """`CALLS` sites in a row in one program, two in the body of a loop: the second writes where the first has read.

    tuning: of the kernel, by this choice instead of the tuned one; UnsupportedShape where it cannot run.
    """
    site: Callable[..., tuple[Array, ...]] = partial(api.fused_site, **CONSTANTS, implementation=implementation)
    if tuning is not None:
        need_kernels()
        from kernels_pallas.hyper_connections import mosaic_gpu_sm90

        site = partial(mosaic_gpu_sm90.fused_site, **CONSTANTS, tuning=tuning)

    @jax.jit
    def run(carry: tuple[Array, ...], weights: tuple[Array, ...]) -> tuple[Array, ...]:
        def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            for layer in (2 * i, 2 * i + 1):
                y, streams, post, comb, pre = carry
                streams, y, pre, post, comb = site(layer % LAYERS, y, streams, post, comb, pre, *weights)
                carry = y, streams, post, comb, pre
            return carry

        return lax.fori_loop(0, CALLS // 2, body, carry)

    return run


def measure(work: Workload) -> dict[str, Any]:
    return times(work, {name: partial(chain, name) for name in (KERNEL, "reference")})


def measure_tuning(work: Workload, fields: dict[str, Any]) -> dict[str, Any]:
    """Raises TypeError or ValueError for what no `Tuning` can have; the row tells of one that does not divide D."""
    tuning = Tuning(**fields | ({"chunks": tuple(fields["chunks"])} if "chunks" in fields else {}))
    if CONFIG.hidden_size % tuning.channels or CONFIG.hidden_size // tuning.channels % 8:
        why = f"{tuning.channels} channels a CTA do not split {CONFIG.hidden_size} into a multiple of 8 CTAs"
        return measured(work, {}) | {KERNEL: why}
    return times(work, {KERNEL: partial(chain, KERNEL, tuning)})


def times(work: Workload, runs: dict[str, Callable[[], Callable[..., Any]]]) -> dict[str, Any]:
    """A row of the programs that `runs` make, by name."""
    arrays, programs = inputs(work), {name: cache(make) for name, make in runs.items()}

    def taken(make: Callable[[], Callable[..., Any]]) -> float:
        return seconds(make(), arrays, CALLS)

    row = measured(work, {name: partial(taken, make) for name, make in programs.items()})
    if jax.default_backend() == "gpu":
        for name, make in programs.items():
            if isinstance(row[name], dict):
                _, milliseconds = profiler.measure(make())(*arrays)
                row[name]["kernel_us"] = (milliseconds or 0.0) * 1e3 / CALLS
    return row


def peers(work: Workload) -> tuple[Peer, ...]:
    @cache
    def exact() -> tuple[Array, ...]:
        return jax.jit(partial(api.fused_site, 0, **CONSTANTS, implementation="reference"))(
            *inputs(work)[0], *inputs(work)[1]
        )

    def error(results: tuple[np.ndarray, ...]) -> float:
        return difference(results, exact())

    def prepare(torch: Any, device: str, compile_it: bool) -> Callable[[], Any]:
        carry, weights = inputs(work)
        arrays = tuple(torch_of(torch, x, device) for x in (*carry, *(stack[0] for stack in weights)))
        site: Callable[..., Any] = partial(torch_site, torch, **CONSTANTS)
        run = compiled(torch, site) if compile_it else site
        return lambda: run(arrays)

    omits = "nothing, and computes every call on the same arrays"
    return tuple(
        torch_peer(name, omits, partial(prepare, compile_it=compile_it), error, PEER_BOUND)
        for name, compile_it in (("torch.compile of the formula", True), ("torch, operation by operation", False))
    )


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers, measure_tuning=measure_tuning)
