"""The lightning indexer of the index source layers: which compressed entries each query attends to (numerics 8)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.linear import Linear, Numerics
from di_jax.model.quantization import fake_quantize
from di_jax.model.rope import rotate
from di_jax.model.rows import Rows
from kernels_pallas.choice import KernelChoice
from kernels_pallas.index_topk import api


class Indexer(nnx.Module):
    """A stack of indexers [I], one per index source."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice) -> None:
        c = self.config = config
        self.numerics = numerics
        self.implementation = kernels.of("index_topk")
        stack, axes = (len(c.index_source_layer_ids),), ("layers", None, None)
        width = c.index_n_heads * c.index_head_dim
        self.wq_b = Linear(c, numerics, stack, width, c.q_lora_rank, storage="fp8", axes=axes)
        self.weights_proj = Linear(c, numerics, stack, c.index_n_heads, c.hidden_size, storage="bf16", axes=axes)

    def query(self, index: int, latent_query: Array, cos_sin: tuple[Array, Array]) -> Array:
        """[T, q_lora_rank] -> rotated, quantized index queries [T, heads, index_head_dim]."""
        c = self.config
        query = self.wq_b(latent_query, index).reshape(-1, c.index_n_heads, c.index_head_dim)
        cos, sin = cos_sin
        return fake_quantize(self.numerics.formats.index, rotate(query, (cos[:, None], sin[:, None])))

    def head_weights(self, index: int, x: Array) -> Array:
        """Signed head weights fp32 [T, heads], scaled by index_head_dim^-1/2 heads^-1/2."""
        c = self.config
        scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        return self.weights_proj(x, index).astype(jnp.float32) * scale

    def __call__(
        self,
        plan: LayerPlan,
        x: Array,
        latent_query: Array,
        cos_sin: tuple[Array, Array],
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
        candidates: Array | None,
    ) -> tuple[Array, Array | None]:
        """(selected entries [T, index_topk], candidate blocks or None) of an index source layer.

        Only Reindex layers look at `candidates`; the candidate source returns new ones.
        """
        return api.index_topk(
            self.query(plan.index_source, latent_query, cos_sin),
            self.head_weights(plan.index_source, x),
            state.index,
            rows,
            layout,
            source=plan.kv_source,
            candidates=candidates if plan.is_reindex else None,
            make_candidates=plan.is_candidate_source,
            implementation=self.implementation,
        )
