"""Engram: hashed n-gram memory, gated into the residual streams (numerics 12)."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from di_jax.model.config import ENGRAM_GATE_CLAMP, ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Linear, Numerics, parameter
from di_jax.model.quantization import expand_rows
from di_jax.model.rows import Rows
from di_jax.parallel.exchange import capacity_of, exchange
from di_jax.parallel.mesh import Parallel, padded

DEAD = -1  # a position inside an image span: it has no n-gram id


class HashTable(nnx.Variable):
    """Side data derived from the tokenizer; on device like a weight, but in no checkpoint."""


class NgramHash(nnx.Module):
    """Table rows of every token, on device, in 32-bit arithmetic: the next step's tokens never visit the host.

    64-bit products c * m are tabulated as two uint32 limbs; the remainder is taken byte by byte from the top, and
    stays below 2^32 because every prime is below 2^24 (numerics 12.4).
    """

    def __init__(self, config: ModelConfig, tables: EngramTables | None = None) -> None:
        c = self.config = config
        layers, ids = len(c.engram_layer_ids), c.engram_compressed_vocab_size
        if tables is None:  # abstract construction: shapes only
            self.token_map = HashTable(jnp.zeros(c.vocab_size, jnp.int32))
            self.limbs = HashTable(jnp.zeros((layers, c.engram_max_ngram_size, ids, 2), jnp.uint32))
            self.prime = HashTable(jnp.ones((layers, c.engram_columns), jnp.uint32))
            self.offset = HashTable(jnp.zeros((layers, c.engram_columns), jnp.int32))
            self.pad = HashTable(jnp.zeros((), jnp.int32))
        else:
            self.token_map = HashTable(jnp.asarray(tables.token_map))
            self.limbs = HashTable(jnp.asarray(tables.product_limbs))
            self.prime = HashTable(jnp.asarray(tables.primes.astype(np.uint32)))
            self.offset = HashTable(jnp.asarray(tables.offsets.astype(np.int32)))
            self.pad = HashTable(jnp.asarray(tables.pad, jnp.int32))

    def lookback(self, rows: Rows, history: Array) -> tuple[Array, Array]:
        """Compressed ids int32 [T, max_ngram] of the last tokens of each row, and the history with this step stored.

        history int32 [slots, ring] holds ids by position mod ring, DEAD inside images: what a decode step looks back
        at. A prefill step, which may be the slot's first, gets the tokens before its own with its rows. From the first
        look-back that leaves the sequence or meets a dead token on, all are the pad id (numerics 12.5).
        """
        ring, slots, size = history.shape[1], history.shape[0], self.config.engram_max_ngram_size
        ids = jnp.where(rows.image, DEAD, self.token_map[...][rows.token])
        back = jnp.arange(size, dtype=jnp.int32)
        position = rows.position[:, None] - back
        sequence = rows.sequence[:, None]
        fresh = ids[rows.row_of(position, sequence)]
        start = rows.row_start()[:, None]
        if rows.decode:
            old = history[rows.slot[sequence], position % ring]
        else:
            # As many as any row looks back at, however many the host sent.
            given = jnp.pad(rows.history, ((0, 0), (size - 1, 0)), constant_values=DEAD)[:, 1 - size :]
            given = jnp.where(given < 0, DEAD, self.token_map[...][given])
            old = given[sequence, jnp.clip(position - start + size - 1, 0, size - 2)]
        look = jnp.where(position >= start, fresh, old)
        blocked = jnp.cumsum((position < 0) | (look == DEAD), axis=-1) > 0
        look = jnp.where(blocked, self.pad[...], look)
        slot = rows.slot_of_rows(slots)
        slot = jnp.where(rows.position >= rows.end[rows.sequence] - ring, slot, slots)
        return look, history.at[slot, rows.position % ring].set(ids, mode="drop")

    def __call__(self, look: Array) -> Array:
        """ids [T, max_ngram] -> table rows int32 [G, T, columns]."""
        c = self.config
        limbs = self.limbs[...]  # [G, n, ids, 2]
        product = jnp.stack([limbs[:, s][:, look[:, s]] for s in range(c.engram_max_ngram_size)], axis=2)
        rolling, per_size = product[:, :, 0], []
        for s in range(1, c.engram_max_ngram_size):
            rolling = rolling ^ product[:, :, s]
            per_size.append(jnp.repeat(rolling[:, :, None], c.engram_n_heads, axis=2))
        value = jnp.concatenate(per_size, axis=2)  # [G, T, columns, 2]
        prime = self.prime[...][:, None]
        remainder = jnp.zeros(value.shape[:-1], jnp.uint32)
        for limb in (1, 0):
            for shift in (24, 16, 8, 0):
                byte = (value[..., limb] >> shift) & 0xFF
                remainder = (remainder * 256 + byte) % prime
        return remainder.astype(jnp.int32) + self.offset[...][:, None]


class EngramTable(nnx.Module):
    """One layer's memory [rows, head_dim], e4m3 with a ue8m0 scale per 32 channels (bf16 when unquantized).

    Its rows are spread over the ranks of `engram_rows`, padded to equal shares. Row numbers fit int32 (384 M in a
    released table); bytes do not, and are only ever addressed row by row.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, rows: int, parallel: Parallel) -> None:
        axes = ("engram_rows", None)
        self.numerics, self.parallel = numerics, parallel
        rows = padded(rows, parallel.mesh.size("engram_rows"))
        self.scale: nnx.Param | None
        if config.quantization:
            self.weight = parameter((rows, config.engram_head_dim), jnp.float8_e4m3fn, axes)
            self.scale = parameter((rows, -(-config.engram_head_dim // 32)), jnp.uint8, axes)
        else:
            self.weight = parameter((rows, config.engram_head_dim), jnp.bfloat16, axes)
            self.scale = None

    def __call__(self, row: Array, valid: Array) -> Array:
        """row int32 [T, columns] -> [T, columns * head_dim], exact: the stored bytes are wkv's operand as they are.

        valid bool [T]: rows that nobody reads are not looked up on other ranks.
        """
        dtype = self.numerics.dtype
        ranks = self.parallel.mesh.size("engram_rows")
        flat = row.reshape(-1)
        weight, scale = (
            self._stored(flat) if ranks == 1 else self._fetched(flat, jnp.repeat(valid, row.shape[1]), ranks)
        )
        return expand_rows(weight, scale, dtype).reshape(row.shape[0], -1)

    def _stored(self, row: Array) -> tuple[Array, Array | None]:
        """Weights and scales of rows int32 [N] that are here."""
        return self.weight[...][row], None if self.scale is None else self.scale[...][row]

    def _fetched(self, row: Array, wanted: Array, ranks: int) -> tuple[Array, Array | None]:
        """`_stored` from the ranks that own the rows."""
        local = self.weight.shape[0]  # inside shard_map: this rank's share

        def serve(row: Array, valid: Array) -> tuple[Array, Array | None]:
            weight, scale = self._stored(row)
            # Collectives move bytes: not every backend has an all_to_all of float8.
            return lax.bitcast_convert_type(weight, jnp.uint8), scale

        data, scale = exchange(
            lambda item: row[item] % local,
            jnp.where(wanted, row // local, ranks),
            serve,
            axes=self.parallel.mesh.axes("engram_rows"),
            ranks=ranks,
            capacity=capacity_of(row.shape[0], ranks, self.parallel.dispatch_capacity),
        )
        return lax.bitcast_convert_type(data, self.weight.dtype), scale


class RowSource(Protocol):
    """Tables in host memory (`checkpoint.host_tables`). Hashed by identity: a part of the compiled step."""

    def __call__(self, row: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
        """What `host_memory` asks for, on the host. Must not raise: other devices would wait for this one forever."""

    def raise_failure(self) -> None:
        """Raises what went wrong since the last call. For whoever waits for the step."""


def host_memory(
    source: RowSource | None, config: ModelConfig, dtype: jnp.dtype, row: Array, valid: Array
) -> list[Array]:
    """What `EngramTable` gives for each layer, from tables in host memory: row int32 [G, T, columns].

    One call for all layers: the device stops until the host has answered, however little is asked, and on CPU devices
    so does whoever launches the step. Each rank asks for its own rows. source None: a step that is traced, never run.
    """

    def serve(row: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
        raise RuntimeError("the Engram tables were not opened: this model was made to be planned, not run")

    channels = config.engram_head_dim
    widths = (channels, -(-channels // 32)) if config.quantization else (2 * channels,)
    answer = tuple(jax.ShapeDtypeStruct((*row.shape, width), jnp.uint8) for width in widths)
    data, *scales = jax.pure_callback(source or serve, answer, row, valid)
    if config.quantization:
        memory = expand_rows(lax.bitcast_convert_type(data, jnp.float8_e4m3fn), scales[0], dtype)
    else:
        pairs = data.reshape(*row.shape, channels, 2)
        memory = expand_rows(lax.bitcast_convert_type(pairs, jnp.bfloat16), None, dtype)
    return list(memory.reshape(*row.shape[:2], -1))


class Engram(nnx.Module):
    """A stack [G] of projections and gates; called at the entry of its layer, before the layer's mixes."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        c = self.config = config
        self.numerics = numerics
        stack = (len(c.engram_layer_ids),)
        width = (c.hc_mult + 1) * c.hidden_size
        self.wkv = Linear(
            c, numerics, stack, width, c.engram_columns * c.engram_head_dim, storage="fp8", axes=("layers", None, None)
        )
        gates = (*stack, c.hc_mult, c.hidden_size)
        self.q_weight = parameter(gates, jnp.bfloat16, ("layers", None, None))
        self.k_weight = parameter(gates, jnp.bfloat16, ("layers", None, None))

    def __call__(self, ordinal: int, streams: Array, memory: Array, dead: Array) -> Array:
        """streams [T, hc, D], memory [T, columns * head_dim], dead bool [T] -> streams with the memory written."""
        c = self.config
        kv = self.wkv(memory, ordinal, quantize=False).reshape(-1, c.hc_mult + 1, c.hidden_size)
        key, value = kv[:, : c.hc_mult].astype(jnp.float32), kv[:, c.hc_mult :].astype(jnp.float32)
        x = streams.astype(jnp.float32)
        weight = self.q_weight[ordinal].astype(jnp.float32) * self.k_weight[ordinal].astype(jnp.float32)
        dot = jnp.sum(x * weight * key, axis=-1)
        for v in (x, key):
            dot = dot / jnp.sqrt(jnp.mean(v * v, axis=-1) + c.rms_norm_eps)
        gate = engram_gate(dot * c.hidden_size**-0.5)
        written = (x + gate[..., None] * value).astype(streams.dtype)
        return jnp.where(dead[:, None, None], streams, written)


def engram_gate(d: Array) -> Array:
    """sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)): open by half at zero, on the side of zero's sign (numerics 12.6)."""
    root = jnp.sqrt(jnp.maximum(jnp.abs(d), ENGRAM_GATE_CLAMP))
    return jax.nn.sigmoid(jnp.where(jnp.signbit(d), -root, root))
