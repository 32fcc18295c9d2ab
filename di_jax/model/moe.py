"""Mixture of experts: bias-corrected sqrt-softplus router, routed experts, one shared expert (numerics 11)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from di_jax.model.config import ROUTER_TEMPERATURE, ROUTER_WEIGHT_EPS, ModelConfig
from di_jax.model.linear import Linear, Numerics, parameter
from di_jax.parallel.eplb import expert_map, initial_slots
from di_jax.parallel.exchange import capacity_of, exchange
from di_jax.parallel.mesh import Parallel
from di_jax.parallel.replica_choice import forced_slot_factors, forced_slot_scores, mix, replica_index
from kernels_pallas.choice import KernelChoice
from kernels_pallas.expert_ffn import api
from kernels_pallas.expert_ffn.reference import swiglu

FORCED_RATIO = 1.8  # rows of the busiest rank over those of another, when imbalance is forced (engine 7.2)


class SlotTable(nnx.Variable):
    """Which slots hold an expert: on device like a weight, rewritten when experts move, and in no checkpoint."""


def slot_tables(slot_experts: np.ndarray, experts: int) -> dict[str, SlotTable]:
    """The variables of `MoE` that say where the experts of slot_experts int32 [L, slots] are, by attribute."""
    table = expert_map(slot_experts, experts)
    return {name: SlotTable(jnp.asarray(getattr(table, name))) for name in ("replica_slots", "num_replicas")}


class Router(nnx.Module):
    """noaux_tc: the biases choose, the unbiased scores weigh. A stack [L, E]."""

    def __init__(self, config: ModelConfig, layers: int) -> None:
        c = self.config = config
        self.weight = parameter((layers, c.n_routed_experts, c.hidden_size), jnp.bfloat16, ("layers", None, None))
        self.bias = parameter((layers, c.n_routed_experts), jnp.float32, ("layers", None))
        self.bias_vl = parameter((layers, c.n_routed_experts), jnp.float32, ("layers", None))

    def __call__(self, layer: Array | int, x: Array, image: Array) -> tuple[Array, Array]:
        """x [T, D], image bool [T] -> expert ids int32 [T, k], best biased score first, and fp32 weights [T, k]."""
        logits = jnp.einsum(
            "ti,ei->te",
            x.astype(jnp.float32),
            self.weight[layer].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        score = jnp.sqrt(jax.nn.softplus(logits / ROUTER_TEMPERATURE))
        bias = jnp.where(image[:, None], self.bias_vl[layer], self.bias[layer])
        _, expert = lax.top_k(score + bias, self.config.num_experts_per_tok)  # ties take the lower id
        weight = jnp.take_along_axis(score, expert, axis=-1)
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + ROUTER_WEIGHT_EPS)
        return expert.astype(jnp.int32), weight * self.config.routed_scaling_factor


class FeedForward(nnx.Module):
    """w2(swiglu(w1 x, w3 x)): the weights of a stack of experts; w1 is the gate, w3 the up projection."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        stack: tuple[int, ...],
        *,
        storage: str,
        axes: tuple[str | None, ...],
    ) -> None:
        width, dim = config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.dtype = numerics.dtype

        def linear(out_features: int, in_features: int) -> Linear:
            stacked = (*axes, None, None)
            return Linear(config, numerics, stack, out_features, in_features, storage=storage, axes=stacked)

        self.w1, self.w3, self.w2 = linear(width, dim), linear(width, dim), linear(dim, width)

    def __call__(self, x: Array, *index: Array | int) -> Array:
        """x [T, D] through one member of the stack."""
        hidden = swiglu(self.w1(x, *index), self.w3(x, *index), self.limit)
        return self.w2(hidden.astype(self.dtype), *index)


class MoE(nnx.Module):
    """A stack of expert layers [L]. Its expert slots are spread over the expert axes of the mesh, the rest is not."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice, layers: int, parallel: Parallel
    ) -> None:
        self.config, self.numerics, self.parallel = config, numerics, parallel
        self.implementation = kernels.of("expert_ffn")
        self.gate = Router(config, layers)
        self.shared_experts = FeedForward(config, numerics, (layers,), storage="fp8", axes=("layers",))
        self.num_slots = config.n_routed_experts + parallel.extra_experts
        self.experts = FeedForward(config, numerics, (layers, self.num_slots), storage="fp4", axes=("layers", "expert"))
        if parallel.balanced:
            table = slot_tables(initial_slots(layers, config.n_routed_experts, self.num_slots), config.n_routed_experts)
            self.replica_slots, self.num_replicas = table["replica_slots"], table["num_replicas"]

    def __call__(
        self, layer: Array | int, x: Array, image: Array, valid: Array, lot: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """x [T, D], image and valid bool [T] -> the sublayer's output [T, D], the expert ids [T, k] and the slots
        [T, k] that computed them, the number of slots on rows that are not valid.

        lot: uint32 [T], `row_hash` of the rows, which picks among an expert's copies; not needed without EPLB.
        """
        expert, weight = self.gate(layer, x, image)
        slot = jnp.where(valid[:, None], self._slots(layer, expert, lot), self.num_slots)
        ranks = self.parallel.mesh.size("expert")
        routed = self._routed(layer, x, slot, weight) if ranks == 1 else self._dispatched(layer, x, slot, weight, ranks)
        shared = self.shared_experts(x, layer).astype(jnp.float32)
        return (routed + shared).astype(self.numerics.dtype), expert, slot

    def _slots(self, layer: Array | int, expert: Array, lot: Array | None) -> Array:
        """int32 [T, k]: a slot for each of a row's experts."""
        if self.parallel.force != "none":
            assert lot is not None
            ratio = FORCED_RATIO if self.parallel.force == "imbalanced" else 1.0
            ranks, k = self.parallel.mesh.size("expert"), expert.shape[1]
            factors = jnp.asarray(forced_slot_factors(ratio, ranks, self.num_slots, k))
            scores = forced_slot_scores(
                mix(lot + jnp.uint32(layer)), jnp.arange(self.num_slots, dtype=jnp.uint32), factors
            )
            return lax.top_k(scores, k)[1].astype(jnp.int32)
        if not self.parallel.balanced:
            return expert
        assert lot is not None
        replica = replica_index(lot[:, None], self.num_replicas[layer][expert])
        return self.replica_slots[layer][expert, replica]

    def _dispatched(self, layer: Array | int, x: Array, slot: Array, weight: Array, ranks: int) -> Array:
        """`_routed` on the ranks that hold the slots: fp32 [T, D], the choices of a row summed in their order."""
        rows, k = slot.shape
        local = self.num_slots // ranks
        flat_slot, flat_weight = slot.reshape(-1), weight.reshape(-1)

        def serve(items: tuple[Array, Array, Array], valid: Array) -> Array:
            x, slot, weight = items
            slot = jnp.where(valid, slot, local)
            return self._routed(layer, x, slot[:, None], weight[:, None]).astype(x.dtype)  # rounded to it already

        answers = exchange(
            lambda pair: (x[pair // k], flat_slot[pair] % local, flat_weight[pair]),
            flat_slot // local,
            serve,
            axes=self.parallel.mesh.axes("expert"),
            ranks=ranks,
            capacity=capacity_of(rows * k, ranks, self.parallel.dispatch_capacity),
        )
        return jnp.sum(answers.reshape(rows, k, -1).astype(jnp.float32), axis=1)

    def _routed(self, layer: Array | int, x: Array, slot: Array, weight: Array) -> Array:
        """fp32 [T, D] of rows whose slots [T, k] are all here; the number of slots here means none."""

        def stored(linear: Linear) -> tuple[Array, Array | None]:
            return linear.weight[...], None if linear.scale is None else linear.scale[...]

        return api.expert_ffn(
            x,
            slot,
            weight,
            stored(self.experts.w1),
            stored(self.experts.w3),
            stored(self.experts.w2),
            layer,
            limit=self.config.swiglu_limit,
            quantize=self.numerics.quantize_activations and self.experts.w1.quantized,
            implementation=self.implementation,
        )
