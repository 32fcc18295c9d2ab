"""Hyper-connection parameters: one site before attention and one before the experts of every layer (numerics 10)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from di_jax.model.config import ModelConfig
from di_jax.model.linear import RMSNorm, parameter
from kernels_pallas.choice import KernelChoice
from kernels_pallas.hyper_connections import api


class HyperConnection(nnx.Module):
    """A stack of sites [L]: how the residual streams are read (pre), written (post) and mixed (comb)."""

    def __init__(self, config: ModelConfig, kernels: KernelChoice, layers: int) -> None:
        self.config = config
        self.implementation = kernels.of("hyper_connections")
        width = config.hc_mult * config.hidden_size
        self.fn = parameter((layers, config.n_mixes, width), jnp.float32, ("layers", None, None))
        self.base = parameter((layers, config.n_mixes), jnp.float32, ("layers", None))
        self.scale = parameter((layers, 3), jnp.float32, ("layers", None))

    def __call__(self, layer: Array | int, streams: Array, pre: Array) -> tuple[Array, Array, Array, Array]:
        """streams [T, hc, D], pre [T, hc] of the site before -> collapsed [T, D], pre', post, comb of this site."""
        c = self.config
        return api.site(
            streams,
            pre,
            self.fn[layer],
            self.base[layer],
            self.scale[layer],
            iterations=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
            rms_eps=c.rms_norm_eps,
            implementation=self.implementation,
        )

    def fused(
        self,
        layer: Array | int,
        written: tuple[Array, Array, Array] | None,
        streams: Array,
        pre: Array,
        norm: RMSNorm,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Streams [T, hc, D] with `written` (y, post, comb of the site before) in them, the normed input of this one
        [T, D], pre', post, comb: `expand`, the call above and `norm`, in two launches where a kernel runs."""
        c = self.config
        y, post, comb = written or (None, None, None)
        return api.fused_site(
            layer,
            y,
            streams,
            post,
            comb,
            pre,
            self.fn[...],
            self.base[...],
            self.scale[...],
            norm.weight[...],
            iterations=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
            rms_eps=c.rms_norm_eps,
            implementation=self.implementation,
        )

    def expand(self, y: Array, streams: Array, post: Array, comb: Array) -> Array:
        return api.expand(y, streams, post, comb, implementation=self.implementation)
