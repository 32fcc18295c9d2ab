"""Compressed KV and index keys of the KV source layers (numerics 7 and 8.1)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.linear import Linear, Numerics, RMSNorm
from di_jax.model.quantization import matmul
from di_jax.model.rows import Rows
from kernels_pallas.choice import KernelChoice
from kernels_pallas.compress_store import api as compress_store


class CompressorGate(nnx.Module):
    """Pooling gates of the sources that pool [P, head_dim, D]; a ratio-1 source has none."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        axes = ("layers", None, None)
        pooled = (len(config.pooled_sources),)
        self.wgate = Linear(config, numerics, pooled, config.head_dim, config.hidden_size, storage="bf16", axes=axes)


class Compressor(nnx.Module):
    """A stack of compressors [S], one per KV source."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice) -> None:
        c = self.config = config
        self.numerics = numerics
        self.implementation = kernels.of("compress_store")
        stack, axes = (len(c.kv_source_layer_ids),), ("layers", None, None)
        self.wkv = Linear(c, numerics, stack, c.head_dim, c.hidden_size, storage="bf16", axes=axes)
        self.norm = RMSNorm(c, numerics, stack, c.head_dim)
        self.wk = Linear(c, numerics, stack, c.index_head_dim, c.head_dim, storage="bf16", axes=axes)
        self.k_norm = RMSNorm(c, numerics, stack, c.index_head_dim)

    def __call__(
        self,
        source: int,
        gate: CompressorGate | None,
        x: Array,
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
    ) -> EngineState:
        """Stores the entries and index keys that x [T, D] completes. `gate` is that of all pooled sources."""
        if self.config.kv_source_ratios[source] == 1:
            pair_gate, latent = None, rows.gathered(self.wkv(x, source))
        else:
            assert gate is not None
            ordinal = self.config.pooled_sources.index(source)
            # fp32 from the accumulator on: pairs may wait in the ring for their group to complete.
            pair = jnp.stack([self._fp32(gate.wgate, x, ordinal), self._fp32(self.wkv, x, source)], axis=1)
            pair = rows.gathered(pair)
            pair_gate, latent = pair[:, 0], pair[:, 1]
        compressed, ring, latent = compress_store.store_entries(
            state.compressed,
            state.compressor,
            source,
            pair_gate,
            latent,
            self.norm.weight[...],
            rows.stored,
            layout,
            dtype=self.numerics.dtype,
            implementation=self.implementation,
        )
        # Keys serve the choice of entries alone, which has no gradient: in training their own loss ends here.
        key = self.wk(lax.stop_gradient(latent), source)
        index = compress_store.store_keys(
            state.index,
            source,
            key,
            self.k_norm.weight[...],
            rows.stored,
            layout,
            implementation=self.implementation,
        )
        return state.replace(compressed=compressed, compressor=ring, index=index)

    @staticmethod
    def _fp32(linear: Linear, x: Array, index: int) -> Array:
        return matmul(x, linear.expanded(index), jnp.dtype(jnp.float32))
