"""Random weights and caches in their stored formats, made on device: a slice's are 20 to 100 GB.

A word is a hash of its place, so that the same numbers come out everywhere, one pass writes them and nothing waits in
memory. Weights are about orthonormal, which keeps activations finite through all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.engram import NgramHash
from di_jax.model.engram_tables import EngramTables
from di_jax.model.moe import slot_tables
from di_jax.model.quantization import Codec, Fp4Block, Fp4Micro
from di_jax.parallel.eplb import initial_slots
from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.replica_choice import mix

SEED = 20260910
# e4m3 without the top bit of its exponent: below 2 and no NaN.
FINITE_E4M3 = 0xBF
E4M3_RMS = float(
    np.sqrt(np.mean((np.arange(256, dtype=np.uint8) & FINITE_E4M3).view(jnp.float8_e4m3fn).astype(np.float32) ** 2))
)
E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
RECORDS = 4096  # different ones of a cache; a power of two
ONES = ("norm", "q_weight", "k_weight", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "k_norm", "main_norm")
ZEROS = ("bias", "bias_vl", "base", "attn_sink")

Path = tuple[Any, ...]


def words(shape: tuple[int, ...], seed: Array | int) -> Array:
    """uint32 of `shape` that look random, of any seeds unrelated.

    Of an array of 2^n rows the places alone would go through all values of n bits: seeds that differ in those would
    give the same rows in another order. So a seed is mixed first, by the finaliser of MurmurHash3 (`mix`); the odd
    constant keeps seed 0 off its fixed point.
    """
    word = jnp.full(shape, mix(jnp.asarray(seed, jnp.uint32) + jnp.uint32(0x9E3779B9)), jnp.uint32)
    for axis in range(len(shape)):
        word = mix(word ^ (lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(0x9E3779B9)))
    return word


def uniform(shape: tuple[int, ...], seed: Array | int, deviation: float, dtype: Any) -> Array:
    """Numbers of mean 0 and that standard deviation, evenly spread."""
    unit = words(shape, seed).astype(jnp.float32) * jnp.float32(2.0**-32) - 0.5
    return (unit * jnp.float32(deviation * math.sqrt(12))).astype(dtype)


def local_params(params: nnx.State, plan: DeviceMesh) -> nnx.State:
    """The weights of one rank of `plan` as ShapeDtypeStructs, from those of all."""

    def local(leaf: Any) -> Any:
        whole = leaf.get_value()
        axes = leaf.get_metadata().get("logical_axes") or (None,) * len(whole.shape)
        shape = tuple(n // (plan.size(axis) if axis else 1) for n, axis in zip(whole.shape, axes))
        return leaf.replace(jax.ShapeDtypeStruct(shape, whole.dtype))

    return nnx.from_flat_state({path: local(leaf) for path, leaf in nnx.to_flat_state(params)})


def random_params(params: nnx.State, config: ModelConfig, sharding: Any, num_slots: int) -> nnx.State:
    """Arrays for `local_params`; tables that say where experts and n-grams are get their real contents.

    num_slots: expert slots of all ranks together.
    """
    flat = dict(nnx.to_flat_state(params))
    weights = {path: leaf for path, leaf in flat.items() if isinstance(leaf, nnx.Param)}
    specs = {path: leaf.get_value() for path, leaf in weights.items()}

    def make() -> list[Array]:
        return [_weight(path, spec, specs, SEED + number) for number, (path, spec) in enumerate(specs.items())]

    made = dict(zip(specs, jax.jit(make, out_shardings=sharding)()))
    tables = _tables(config, num_slots)
    values = {path: made[path] if path in made else jax.device_put(tables[str(path[-1])], sharding) for path in flat}
    return nnx.from_flat_state({path: leaf.replace(values[path]) for path, leaf in flat.items()})


def _weight(path: Path, spec: Any, specs: Mapping[Path, Any], seed: int) -> Array:
    """One weight; traced."""
    name = path[-1]
    if spec.dtype == jnp.uint8 and name == "scale":
        packed = specs[(*path[:-1], "weight")].dtype == jnp.uint8
        deviation = (32 * spec.shape[-1]) ** -0.5 / (E2M1_RMS if packed else E4M3_RMS)
        return jnp.full(spec.shape, 127 + round(math.log2(deviation)), jnp.uint8)
    if spec.dtype == jnp.uint8:
        return words(spec.shape, seed).astype(jnp.uint8)
    if spec.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type((words(spec.shape, seed) & FINITE_E4M3).astype(jnp.uint8), spec.dtype)
    if name == "scale" or any(part in ONES for part in path):
        return jnp.ones(spec.shape, spec.dtype)
    if name in ZEROS:
        return jnp.zeros(spec.shape, spec.dtype)
    return uniform(spec.shape, seed, 1.0 if "embed" in path else spec.shape[-1] ** -0.5, spec.dtype)


def _tables(config: ModelConfig, num_slots: int) -> dict[str, Any]:
    """Contents of what is no weight, by attribute."""
    experts, layers = config.n_routed_experts, config.num_hidden_layers
    variables: dict[str, Any] = dict(slot_tables(initial_slots(layers, experts, num_slots), experts))
    if config.engram_layer_ids:
        ids = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
        hashes = NgramHash(config, EngramTables.build(config, ids))
        variables |= {n: getattr(hashes, n) for n in ("token_map", "limbs", "prime", "offset", "pad")}
    return {name: variable.get_value() for name, variable in variables.items()}


def random_state(layout: CacheLayout, length: int, sharding: Any) -> EngineState:
    """Caches of sequences of `length` tokens, all slots in use, every block written; no drafts yet."""
    abstract, c, formats = layout.abstract(), layout.config, layout.formats

    def make() -> EngineState:
        def floats(leaf: Any, seed: int) -> Array:
            return uniform(leaf.shape, seed, 1.0, leaf.dtype)

        def ids(leaf: Any, count: int, seed: int) -> Array:
            return (words(leaf.shape, seed) % jnp.uint32(count)).astype(jnp.int32)

        return EngineState(
            compressed=_records(abstract.compressed, formats.compressed, c.head_dim, SEED + 1),
            index=_records(abstract.index, formats.index, c.index_head_dim, SEED + 2),
            window=_records(abstract.window, formats.window, c.head_dim, SEED + 3),
            compressor=floats(abstract.compressor, SEED + 4),
            engram_history=ids(abstract.engram_history, max(1, c.engram_compressed_vocab_size), SEED + 5),
            last_token=ids(abstract.last_token, c.vocab_size, SEED + 6),
            length=jnp.full(abstract.length.shape, length, jnp.int32),
            draft_token=_constant(abstract.draft_token, -1),
            draft_confidence=_constant(abstract.draft_confidence, 0),
            draft_logits=_constant(abstract.draft_logits, 0),
            draft_norm=_constant(abstract.draft_norm, 0),
        )

    return jax.jit(make, out_shardings=sharding)()


def _constant(leaf: Any, value: int) -> Any:
    return None if leaf is None else jnp.full(leaf.shape, value, leaf.dtype)


def _records(leaf: Any, codec: Codec, channels: int, seed: int) -> Array:
    """A cache full of records of `codec`, in which every fp4 value is drawn anew."""
    samples = codec.encode(uniform((RECORDS, channels), seed, 1.0, jnp.float32))
    *places, width = leaf.shape
    record = samples[words(tuple(places), seed) & (RECORDS - 1)]
    if isinstance(codec, Fp4Block | Fp4Micro):
        values = words(leaf.shape, seed).astype(jnp.uint8)
        record = jnp.where(jnp.arange(width) < channels // 2, values, record)
    return record


def seeds(requests: int) -> tuple[np.ndarray, np.ndarray]:
    """The two words int32 [R] of each request's sampling seed."""
    word = mix(np.arange(requests, dtype=np.uint32) + np.uint32(SEED))
    return word.view(np.int32), mix(word).view(np.int32)
