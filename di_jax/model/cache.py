"""What stays on device between steps: one pytree, donated whole to every step (numerics 4 and 14).

Global caches are paged in blocks of 128 positions; per-sequence caches are rings in a state slot. Both store the
byte records of `quantization`: 288 B and 68 B per compressed entry, 528 B per window row in the released sizes.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.parallel.mesh import DeviceMesh


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything on device but the weights. `CacheLayout` gives shapes and logical axes."""

    compressed: Array  # [blocks, rows_per_block, record] compressed KV of every source
    index: Array  # [blocks, rows_per_block, record] index keys of every source
    window: Array  # [layers + draft stages, slots, window_ring, record] window KV, row = position mod window_ring
    compressor: Array  # fp32 [pooled sources, slots, compressor_ring, 2, head_dim] (gate, latent) of open groups
    engram_history: Array  # int32 [slots, engram_history] compressed ids by position, -1 = dead
    last_token: Array  # int32 [slots] last sampled token
    length: Array  # int32 [slots] tokens in the caches
    draft_token: Any  # int32 [slots, drafts] that follow last_token, -1 = none; until the next step verifies them
    draft_confidence: Any  # fp32 [slots, drafts] chance of each, given that all before it are accepted
    draft_logits: Any  # bf16 [slots, drafts, V] and
    draft_norm: Any  # fp32 [slots, drafts] what they were drawn from (`engine.acceptance.Proposal`)

    def replace(self, **changes: Array) -> EngineState:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Sizes and addresses of the caches of one rank; every device of a mesh has its own.

    draft_stages: window rings beyond those of the backbone's layers, for the draft's stages as if they were its
    layers L, L+1, ...; 0 without speculation. num_drafts: drafts that a slot keeps. keeps_proposal: whether it keeps
    the distributions that they were drawn from too.
    """

    config: ModelConfig
    formats: CacheFormats
    num_blocks: int
    num_slots: int
    block_size: int = 128
    draft_stages: int = 0
    num_drafts: int = 0
    keeps_proposal: bool = True

    @cached_property
    def entries_per_block(self) -> tuple[int, ...]:
        """Compressed entries that one block holds of each KV source."""
        return tuple(self.block_size // r for r in self.config.kv_source_ratios)

    @cached_property
    def source_offset(self) -> tuple[int, ...]:
        """First row of each KV source inside a block."""
        return tuple(sum(self.entries_per_block[:s]) for s in range(len(self.entries_per_block)))

    @property
    def rows_per_block(self) -> int:
        return sum(self.entries_per_block)

    @property
    def window_layers(self) -> int:
        """Window rings of a slot: one per backbone layer, then one per draft stage."""
        return self.config.num_hidden_layers + self.draft_stages

    def entry_row(self, source: int, block_table: Array, entry: Array) -> Array:
        """Row in the flattened pool [blocks * rows_per_block] of compressed entry `entry` [...] of `source`.

        block_table: [..., blocks], leading axes broadcast against those of `entry` less its last.
        """
        per_block = self.entries_per_block[source]
        block = jnp.take_along_axis(block_table, entry // per_block, axis=-1)
        return block * self.rows_per_block + self.source_offset[source] + entry % per_block

    def abstract(self) -> EngineState:
        """The state as ShapeDtypeStructs."""
        c, f = self.config, self.formats
        shape: Any = jax.ShapeDtypeStruct
        proposal = self.num_drafts and self.keeps_proposal
        pages, drafts = (self.num_blocks, self.rows_per_block), (self.num_slots, self.num_drafts)
        return EngineState(
            compressed=shape((*pages, f.compressed.record(c.head_dim)), f.compressed.dtype),
            index=shape((*pages, f.index.record(c.index_head_dim)), f.index.dtype),
            window=shape(
                (self.window_layers, self.num_slots, c.window_ring, f.window.record(c.head_dim)), f.window.dtype
            ),
            compressor=shape(
                (len(c.pooled_sources), self.num_slots, c.compressor_ring, 2, c.head_dim), jnp.dtype(jnp.float32)
            ),
            engram_history=shape((self.num_slots, c.engram_history), jnp.dtype(jnp.int32)),
            last_token=shape((self.num_slots,), jnp.dtype(jnp.int32)),
            length=shape((self.num_slots,), jnp.dtype(jnp.int32)),
            draft_token=shape(drafts, jnp.dtype(jnp.int32)) if self.num_drafts else None,
            draft_confidence=shape(drafts, jnp.dtype(jnp.float32)) if self.num_drafts else None,
            draft_logits=shape((*drafts, c.vocab_size), jnp.dtype(jnp.bfloat16)) if proposal else None,
            draft_norm=shape(drafts, jnp.dtype(jnp.float32)) if proposal else None,
        )

    @staticmethod
    def logical_axes() -> dict[str, tuple[str | None, ...]]:
        """Logical axis names of every state array; the mesh rules map them (architecture 4)."""
        return {
            "compressed": ("blocks", None, None),
            "index": ("blocks", None, None),
            "window": ("layers", "slots", None, None),
            "compressor": ("layers", "slots", None, None, None),
            "engram_history": ("slots", None),
            "last_token": ("slots",),
            "length": ("slots",),
            "draft_token": ("slots", None),
            "draft_confidence": ("slots", None),
            "draft_logits": ("slots", None, None),
            "draft_norm": ("slots", None),
        }

    def allocate(self) -> EngineState:
        """Zeroed caches of one rank on the default device."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.abstract())

    def global_abstract(self, mesh: jax.sharding.Mesh, plan: DeviceMesh) -> EngineState:
        """The caches of all ranks as sharded ShapeDtypeStructs: a rank's share has the shapes of `abstract`."""
        axes = self.logical_axes()

        def whole(name: str, local: Any) -> Any:
            if local is None:
                return None
            shape = tuple(n * (plan.world if a in ("blocks", "slots") else 1) for n, a in zip(local.shape, axes[name]))
            return jax.ShapeDtypeStruct(shape, local.dtype, sharding=NamedSharding(mesh, plan.spec(axes[name])))

        local = self.abstract()
        return EngineState(**{f.name: whole(f.name, getattr(local, f.name)) for f in dataclasses.fields(local)})

    @property
    def bytes_per_token(self) -> float:
        """Bytes of paged cache per token: 890 in the released model."""
        state = self.abstract()
        return sum(a.size * a.dtype.itemsize for a in (state.compressed, state.index)) / (
            self.num_blocks * self.block_size
        )

    @property
    def bytes_per_slot(self) -> float:
        """Bytes of per-sequence state."""
        axes, state = self.logical_axes(), self.abstract()
        own = [getattr(state, name) for name in axes if "slots" in axes[name]]
        return sum(a.size * a.dtype.itemsize for a in own if a is not None) / self.num_slots
