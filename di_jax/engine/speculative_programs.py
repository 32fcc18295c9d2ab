"""A decode step with drafts: three programs, launched one after the other without waiting for the host (dspark 0).

    verify   the target on packed rows: the newest token of each sequence and its likeliest drafts. Which drafts, and
             so how many rows a sequence has, is decided on device (`allocation`).
    accept   head, sampling, acceptance; moves `length` and `last_token` on.
    draft    the draft's block after the newest token; what it drew stays in the sequence's slot until it is verified.

A rejected draft is not undone. All that a row stores is found by its position, and rows from `length` on are written
again before anybody reads them (dspark 4). `verify` stores the draft's context of all its rows for the same reason.

R sequences, T rows, k drafts of a sequence at most. L is a sequence's length: its newest token sits at position L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.engine.extra_sampling import OF_REQUEST, SlotState
from di_jax.engine.sampling_programs import mask_words
from di_jax.engine.speculative_steps import (
    ACCEPT_FIELDS,
    DRAFT_COLUMNS,
    DraftSettings,
    Verification,
    accept,
    draft,
    plain_accept,
)
from di_jax.engine.step_output import DraftOutput, VerifiedOutput
from di_jax.engine.step_plan import Bucket
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.parallel.mesh import DeviceMesh, rows_of_ranks
from di_jax.platforms.compiler import XLA_DEFAULTS, Compiler

__all__ = ["DRAFT_COLUMNS", "DraftSettings", "SpeculativePrograms", "Verification"]


class SpeculativePrograms:
    """`accept` and `draft` over one mesh, each compiled at first use or by `jobs` (`verify` is compiled as any step).

    graphs, specs: of the weights of target and draft, nnx.split and PartitionSpecs. hidden: dtype of hidden rows.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        plan: DeviceMesh,
        layout: CacheLayout,
        settings: DraftSettings,
        graphs: tuple[Any, Any],
        specs: tuple[Any, Any],
        hidden: Any,
        compiler: Compiler = XLA_DEFAULTS,
    ) -> None:
        settings.check(layout)
        self.mesh, self.plan, self.layout, self.settings = mesh, plan, layout, settings
        self.graphs, self.specs, self._hidden = graphs, specs, jnp.dtype(hidden)
        self._ranks = NamedSharding(mesh, PartitionSpec(plan.rank_axes))
        self._compiler = compiler
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def jobs(self, params: tuple[Any, Any], slots: Any, buckets: Iterable[Bucket]) -> list[Callable[[], Any]]:
        """What compiles all that follows steps of these buckets, but for masks."""
        shapes = sorted({(b.requests, b.rows) for b in buckets if b.drafts})
        jobs: list[Callable[[], Any]] = [
            partial(self._accept, params, slots, requests, rows, extra)
            for requests, rows in shapes
            for extra in (False, True)
        ]
        return jobs + [partial(self._draft, params, requests) for requests in sorted({r for r, _ in shapes})]

    def accept(
        self,
        params: tuple[Any, Any],
        state: EngineState,
        slots: SlotState,
        verification: Verification,
        rows: Sequence[np.ndarray] | None,
        allowed: Sequence[np.ndarray] | None,
    ) -> tuple[VerifiedOutput, EngineState, SlotState]:
        """(answer with a leading axis of ranks, state, slots). state is donated, slots too where `rows` are given."""
        if allowed is not None and rows is None:
            raise ValueError("masks are of the rows with extra sampling: give neutral rows with them")
        requests, count = verification.verified.shape[1], verification.hidden.shape[1]
        program = self._accept(params, slots, requests, count, rows is not None, allowed is not None)
        v = verification
        given = (v.hidden, v.verified, v.sequences, *(self._place(a) for a in (rows, allowed) if a is not None))
        if rows is None:
            answer, state = program(_head(params), state, *given)
            return answer, state, slots
        return program(_head(params), state, slots, *given)

    def draft(
        self, params: tuple[Any, Any], state: EngineState, rows: Sequence[np.ndarray]
    ) -> tuple[DraftOutput, EngineState]:
        """(drafts with a leading axis of ranks, state); state is donated. rows: int32 [DRAFT_COLUMNS, R] of each."""
        placed = self._place(rows)
        return self._draft(params, placed.shape[-1])(params, state, placed)

    def _place(self, local: Sequence[np.ndarray]) -> Array | np.ndarray:
        return rows_of_ranks(self._ranks, np.stack(local))

    def _over_ranks(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((self.plan.world, *shape), dtype, sharding=self._ranks)

    def _accept(
        self, params: tuple[Any, Any], slots: Any, requests: int, rows: int, extra: bool, masked: bool = False
    ) -> Any:
        """The executable of `accept`."""
        key = "accept", requests, rows, extra, masked
        if key not in self._compiled:
            traced = self.trace_accept(params, slots, requests, rows, extra, masked)
            self._compiled[key] = self._compiler(traced.lower())
        return self._compiled[key]

    def _draft(self, params: tuple[Any, Any], requests: int) -> Any:
        """The executable of `draft`."""
        key = "draft", requests
        if key not in self._compiled:
            self._compiled[key] = self._compiler(self.trace_draft(params, requests).lower())
        return self._compiled[key]

    def trace_accept(
        self, params: tuple[Any, Any], slots: Any, requests: int, rows: int, extra: bool = False, masked: bool = False
    ) -> Any:
        """`accept` of so many sequences and rows, from arrays or from ShapeDtypeStructs alone: nothing runs.

        slots: the state of `SamplingPrograms`. extra: with rows of extra sampling; masked: and with masks.
        """
        head, k, over = _head(params), self.settings.num_drafts, self._over_ranks
        given = [
            over((rows, head.shape[1]), self._hidden),
            over((requests,)),
            over((len(ACCEPT_FIELDS), requests)),
            *([over((len(OF_REQUEST), requests))] if extra else []),
            *([over((requests, k + 1, mask_words(head.shape[0])))] if masked else []),
        ]
        state, state_specs, ranks = self._state()
        spec = _head(self.specs)
        placed = jax.ShapeDtypeStruct(head.shape, head.dtype, sharding=NamedSharding(self.mesh, spec))
        own = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._ranks), slots)] * extra
        body = jax.shard_map(
            partial(accept if extra else plain_accept, self.settings),
            mesh=self.mesh,
            in_specs=(spec, state_specs, *[ranks] * (len(own) + len(given))),
            out_specs=(ranks, state_specs, *[ranks] * len(own)),
            check_vma=False,  # specs of weights and state leave out axes of size 1, the ranks' do not
        )
        return jax.jit(body, donate_argnums=(1, 2) if extra else 1).trace(placed, state, *own, *given)

    def trace_draft(self, params: tuple[Any, Any], requests: int) -> Any:
        """`draft` of so many sequences, as `trace_accept`."""
        state, state_specs, ranks = self._state()
        body = jax.shard_map(
            partial(draft, self.graphs, self.settings, self.layout),
            mesh=self.mesh,
            in_specs=(self.specs, state_specs, ranks),
            out_specs=(ranks, state_specs),
            check_vma=False,
        )
        rows = self._over_ranks((len(DRAFT_COLUMNS), requests))
        return jax.jit(body, donate_argnums=1).trace(abstract(params, self.specs, self.mesh), state, rows)

    def _state(self) -> tuple[Any, Any, PartitionSpec]:
        state = self.layout.global_abstract(self.mesh, self.plan)
        return state, jax.tree.map(lambda leaf: leaf.sharding.spec, state), self._ranks.spec


def abstract(params: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """Weights as ShapeDtypeStructs, laid over the mesh by their PartitionSpecs."""

    def placed(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, params, specs)


def _head(params: tuple[Any, Any]) -> Any:
    """The target's vocabulary matrix, or its spec."""
    head: Any = params[0]["head"]
    return head["weight"].get_value()
