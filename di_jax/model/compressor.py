"""Compressed KV and index keys of the KV source layers (numerics 7 and 8.1)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.linear import Linear, Numerics, RMSNorm
from di_jax.model.quantization import matmul
from di_jax.model.rope import rotate, rotation
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
        ratio, share, rows = self.config.kv_source_ratios[source], rows, rows.stored
        if ratio == 1:
            latent, entry, emits = share.gathered(self.wkv(x, source)), rows.position, rows.valid
            row = jnp.arange(rows.num_rows, dtype=jnp.int32)
        else:
            assert gate is not None
            ordinal = self.config.pooled_sources.index(source)
            # fp32 from the accumulator on: pairs may wait in the ring for their group to complete.
            pair = jnp.stack([self._fp32(gate.wgate, x, ordinal), self._fp32(self.wkv, x, source)], axis=1)
            pair = share.gathered(pair)
            pooled, row, entry, emits = compress_store.pool_groups(
                pair, state.compressor[ordinal], rows, ratio, implementation=self.implementation
            )
            # The ring is read before it is written: an order that XLA sees lets the store run in place (three copies
            # of the ring a step on a CPU otherwise).
            pooled, pair = lax.optimization_barrier((pooled, pair))
            latent = pooled.astype(self.numerics.dtype)
            ring = compress_store.store_pairs(state.compressor, ordinal, pair, rows, implementation=self.implementation)
            state = state.replace(compressor=ring)
        latent = self.norm(latent, source)
        # Both the entry and its key rotate at the group's first token; the key uses the un-rotated latent.
        cos_sin = rotation(self.config, True, entry * ratio)
        # Keys serve the choice of entries alone, which has no gradient: in training their own loss ends here.
        key = rotate(self.k_norm(self.wk(lax.stop_gradient(latent), source), source), cos_sin)
        formats = layout.formats

        def store(pool: Array, record: Array) -> Array:
            return compress_store.store_entries(
                pool, source, record, row, entry, emits, rows, layout, implementation=self.implementation
            )

        return state.replace(
            compressed=store(state.compressed, formats.compressed.encode(rotate(latent, cos_sin))),
            index=store(state.index, formats.index.encode(key)),
        )

    @staticmethod
    def _fp32(linear: Linear, x: Array, index: int) -> Array:
        return matmul(x, linear.expanded(index), jnp.dtype(jnp.float32))
