"""Time of a hyper-connection site beside XLA's: `python -m kernels_pallas.hyper_connections.bench [--json]`.

Random streams and mixing weights in the released shapes. Sites are enqueued back to back inside one program, each on
what the one before leaves, so that streams may lie in the L2 cache as in a model. A site is so short that the host's
launches take longer than the launches themselves: `kernel_us` is the time of the GPU alone, all kernels of a site
added up. No library has this operation: its peer (`--peers`) is the same formula compiled by PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import profiler

from di_jax.model.config import ModelConfig
from kernels_pallas.benchmark import RELEASED, main, measured, seconds
from kernels_pallas.hopper import KERNEL
from kernels_pallas.hyper_connections import api
from kernels_pallas.peers import Peer, torch_peer, torch_site

LAYERS, CALLS = 4, 24
CONFIG = ModelConfig.from_file(RELEASED)


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


def chain(implementation: str) -> Callable[..., tuple[Array, ...]]:
    """`CALLS` sites in a row in one program, two in the body of a loop: the second writes where the first has read."""
    site = partial(
        api.fused_site,
        iterations=CONFIG.hc_sinkhorn_iters,
        eps=CONFIG.hc_eps,
        rms_eps=CONFIG.rms_norm_eps,
        implementation=implementation,
    )

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
    arrays = inputs(work)
    runs = {name: chain(name) for name in (KERNEL, "reference")}
    row = measured(work, {name: partial(seconds, run, arrays, CALLS) for name, run in runs.items()})
    if jax.default_backend() == "gpu":
        for name, run in runs.items():
            if isinstance(row[name], dict):
                _, milliseconds = profiler.measure(run)(*arrays)
                row[name]["kernel_us"] = (milliseconds or 0.0) * 1e3 / CALLS
    return row


def peers(work: Workload) -> tuple[Peer, ...]:
    rows, hc, dim, mixes = work.rows, CONFIG.hc_mult, CONFIG.hidden_size, CONFIG.n_mixes
    constants: dict[str, Any] = {"iterations": CONFIG.hc_sinkhorn_iters, "eps": CONFIG.hc_eps}

    def prepare(torch: Any, device: str) -> Callable[[], Any]:
        def normal(*shape: int, dtype: Any = torch.float32) -> Any:
            return torch.randn(*shape, device=device).to(dtype)

        carried = normal(rows, dim, dtype=torch.bfloat16), normal(rows, hc, dim, dtype=torch.bfloat16)
        mixed = 2 * normal(rows, hc).sigmoid(), normal(rows, hc, hc).softmax(-1), normal(rows, hc).sigmoid()
        weights = normal(mixes, hc * dim) * 0.02, normal(mixes), 1 + 0.3 * normal(3)
        norm_weight = (1 + 0.1 * normal(dim)).to(torch.bfloat16)
        arrays = (*carried, *mixed, *weights, norm_weight)
        compiled = torch.compile(partial(torch_site, torch, **constants, rms_eps=CONFIG.rms_norm_eps))
        return lambda: compiled(arrays)

    return (torch_peer("torch.compile of the formula", "nothing, and computes every call on the same arrays", prepare),)


if __name__ == "__main__":
    main(__doc__, WORKLOADS, measure, peers)
