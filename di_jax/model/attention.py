"""Shared-KV latent attention: low-rank queries, one latent as key and value, grouped low-rank output (numerics 6)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.linear import Linear, Numerics, RMSNorm, parameter
from di_jax.model.quantization import fake_quantize, quantize_activation
from di_jax.model.rope import rotate
from di_jax.model.rows import Rows
from kernels_pallas.choice import KernelChoice
from kernels_pallas.compress_store import api as compress_store
from kernels_pallas.sparse_attention import api as sparse_attention


class Attention(nnx.Module):
    """A stack of attention layers [L]. The compressed entries come from the layer's KV source."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice, layers: int) -> None:
        c = self.config = config
        self.numerics = numerics
        self.kernels = kernels
        group_inputs = c.num_attention_heads // c.o_groups * c.head_dim

        def linear(out_features: int, in_features: int, out_axis: str | None, in_axis: str | None) -> Linear:
            axes = ("layers", out_axis, in_axis)
            return Linear(c, numerics, (layers,), out_features, in_features, storage="fp8", axes=axes)

        self.wq_a = linear(c.q_lora_rank, c.hidden_size, None, None)
        self.wq_b = linear(c.num_attention_heads * c.head_dim, c.q_lora_rank, "heads", None)
        self.wkv = linear(c.head_dim, c.hidden_size, None, None)
        self.wo_a = linear(c.o_groups * c.o_lora_rank, group_inputs, "heads", None)
        self.wo_b = linear(c.hidden_size, c.o_groups * c.o_lora_rank, None, "heads")
        self.q_norm = RMSNorm(c, numerics, (layers,), c.q_lora_rank)
        self.kv_norm = RMSNorm(c, numerics, (layers,), c.head_dim)
        self.attn_sink = parameter((layers, c.num_attention_heads), jnp.float32, ("layers", "heads"))

    def latent_query(self, layer: Array | int, x: Array) -> Array:
        """x [T, D] -> the normed low-rank query [T, q_lora_rank], shared with the indexer."""
        return self.q_norm(self.wq_a(x, layer), layer)

    def query(self, layer: Array | int, latent_query: Array, cos_sin: tuple[Array, Array]) -> Array:
        """[T, q_lora_rank] -> rotated queries [T, H, head_dim] (numerics 6.1)."""
        c = self.config
        query = self.wq_b(latent_query, layer).reshape(-1, c.num_attention_heads, c.head_dim)
        cos, sin = cos_sin
        return rotate(query, (cos[:, None], sin[:, None]))

    def window_kv(self, layer: Array | int, x: Array, cos_sin: tuple[Array, Array]) -> Array:
        """x [T, D] -> rotated and cache-quantized window KV [T, head_dim] (numerics 6.2)."""
        return self._finished_kv(layer, self.wkv(x, layer), cos_sin)

    def _finished_kv(self, layer: Array | int, projected: Array, cos_sin: tuple[Array, Array]) -> Array:
        return fake_quantize(self.numerics.formats.window, rotate(self.kv_norm(projected, layer), cos_sin))

    def __call__(
        self,
        plan: LayerPlan,
        layer: Array | int,
        x: Array,
        latent_query: Array,
        selected: Array | None,
        cos_sin: tuple[Array, Array],
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
    ) -> tuple[Array, EngineState]:
        """x [T, D] -> the sublayer's output [T, D] and the state with this step's window rows stored.

        plan: the layer's kind (static; any member of a run); layer: its number, traced inside a run.
        """
        projected = self.wkv(x, layer)
        kv = rows.gathered(self._finished_kv(layer, projected, cos_sin))  # in decode nobody reads it, nor makes it
        query = self.query(layer, latent_query, cos_sin)

        def store(window: Array) -> Array:
            implementation = self.kernels.of("compress_store")
            if rows.decode and rows.whole is None:
                weight = self.kv_norm.weight[...]
                return compress_store.store_projected(
                    window, layer, projected, weight, cos_sin, rows, layout, implementation=implementation
                )
            return compress_store.store_window(window, layer, kv, rows.stored, layout, implementation=implementation)

        # Decode stores first and reads the ring; a prefill chunk reads the history that its own rows overwrite.
        window = store(state.window) if rows.decode else state.window
        out = sparse_attention.sparse_attention(
            layer,
            query,
            kv,
            window,
            None if selected is None else state.compressed,
            selected,
            self.attn_sink[...],
            cos_sin,
            rows,
            layout,
            source=plan.kv_source,
            scale=self.config.head_dim**-0.5,
            implementation=self.kernels.of("sparse_attention"),
        )
        if not rows.decode:
            # Stored after it was read: else XLA copies the rings of all layers, twice in every layer.
            out, window = lax.optimization_barrier((out, window))
            window = store(window)
        return self.output(layer, out), state.replace(window=window)

    def output(self, layer: Array | int, out: Array) -> Array:
        """[T, H, d] -> [T, D]: each group of heads goes down to its rank, then all up together (numerics 6.6)."""
        c, n = self.config, self.numerics
        grouped = out.reshape(-1, c.o_groups, c.num_attention_heads // c.o_groups * c.head_dim)
        if n.quantize_wo_a_input and self.wo_a.quantized:
            grouped = quantize_activation(grouped)
        weight = self.wo_a.expanded(layer).reshape(c.o_groups, c.o_lora_rank, -1)
        low = jnp.einsum(
            "tgi,goi->tgo", grouped, weight, precision="highest", preferred_element_type=jnp.float32
        ).astype(n.dtype)
        return self.wo_b(low.reshape(-1, c.o_groups * c.o_lora_rank), layer)
