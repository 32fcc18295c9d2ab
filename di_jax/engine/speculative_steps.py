"""One rank's part of the programs of a decode step with drafts, inside `shard_map` (`speculative_programs`).

Arguments and results beside state, slots and weights have a leading axis of one, of ranks. R sequences, T rows, k
drafts of a sequence at most. L is a sequence's length: its newest token sits at position L.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.engine import acceptance
from di_jax.engine.acceptance import COUPLED, PROBABILISTIC, Accepted, Proposal
from di_jax.engine.allocation import RowLayout, allocate, pack
from di_jax.engine.extra_sampling import NO_ID, OF_REQUEST, SlotState
from di_jax.engine.sampler import RowSampling, endings, process, scaled
from di_jax.engine.sampling_programs import allowed_ids, top_tokens, unpacked
from di_jax.engine.step_output import DraftOutput, VerifiedOutput, side_by_side
from di_jax.engine.step_plan import Bucket
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.dspark import DraftModel, confidence
from di_jax.model.engram import RowSource
from di_jax.model.rows import META, Rows, make_rows
from di_jax.model.transformer import Transformer, head_logits

# What `draft` needs to know of a sequence, int32, floats by their bits; slot NO_SLOT where there is none.
DRAFT_COLUMNS = ("slot", "origin", "temperature", "seed_low", "seed_high", "min_p", "top_k", "top_p")
# What `accept` takes over from the plan of `verify`.
ACCEPT_FIELDS = ("slot", "origin", "temperature", "seed_low", "seed_high", "forced")


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """num_drafts: of a sequence at most, k. way: of `acceptance`. temperatures: of the confidences, one for each draft;
    None for 1."""

    num_drafts: int
    way: str = PROBABILISTIC
    temperatures: tuple[float, ...] | None = None

    def check(self, layout: CacheLayout) -> None:
        """Raises ValueError for caches or temperatures that are made for others."""
        k = self.num_drafts
        if not 0 < k <= layout.config.draft_block:
            raise ValueError(f"{k} drafts of a block of {layout.config.draft_block}")
        if layout.num_drafts != k or (self.way == PROBABILISTIC and not layout.keeps_proposal):
            raise ValueError(f"caches for {layout.num_drafts} drafts do not fit {self}")
        if self.temperatures is not None and len(self.temperatures) != k:
            raise ValueError(f"{len(self.temperatures)} temperatures for {k} drafts")


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Verification:
    """A verified step before it is accepted: on device, with a leading axis of ranks."""

    hidden: Array  # [T, D] normed
    verified: Array  # int32 [R] drafts that each sequence verified; -1: it had no row
    sequences: Array  # int32 [ACCEPT_FIELDS, R]
    load: Array | None  # as `StepOutput.load`
    host_tables: RowSource | None = dataclasses.field(default=None, metadata=META)


def verify(
    graphs: tuple[Any, Any],
    layout: CacheLayout,
    bucket: Bucket,
    params: tuple[Any, Any],
    state: EngineState,
    buffer: Array,
) -> tuple[Verification, EngineState]:
    """The target on the rows of a bucket with drafts, whose caches take them all in. buffer int32 [1, size]."""
    model: Transformer = nnx.merge(graphs[0], params[0])
    drafter: DraftModel = nnx.merge(graphs[1], params[1])
    fields = bucket.unpack(buffer[0])
    rows, verified = verified_rows(bucket, fields, state)
    out = model(rows, state, layout, taps=True)
    assert out.taps is not None
    state = drafter.store_context(out.taps, out.rows, out.state, layout)
    sequences = jnp.stack([fields[name] for name in ACCEPT_FIELDS])
    found = Verification(out.hidden, verified, sequences, out.load, model.host_tables)
    return jax.tree.map(lambda a: a[None], found), state


def verified_rows(bucket: Bucket, fields: dict[str, Array], state: EngineState) -> tuple[Rows, Array]:
    """The packed rows of a step, and the drafts int32 [R] that each sequence verifies, -1 where it has no row."""
    slot = fields["slot"]
    length, drafts = state.length[slot], state.draft_token[slot]
    # A sequence whose answer is full has had its last token, though the host may not know yet.
    live = (fields["cap"] >= 0) & (length < fields["capacity"] - 1)
    known = jnp.sum(jnp.cumprod((drafts >= 0).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    room = jnp.minimum(fields["capacity"] - length - 2, known)
    caps = jnp.where(live, jnp.maximum(jnp.minimum(fields["cap"], room), 0), -1)
    spare = bucket.rows - jnp.sum(live, dtype=jnp.int32)
    verified = allocate(state.draft_confidence[slot], caps, jnp.minimum(fields["budget"][0], spare))
    packed, request, offset = row_places(verified, bucket.rows)
    token = jnp.where(offset == 0, state.last_token[slot][request], drafts[request, offset - 1])
    rows = make_rows(
        token,
        request,
        length,
        packed.start[:-1],
        1 + verified,
        slot,
        fields["block_table"],
        decode=True,
        seed=lax.bitcast_convert_type(fields["seed_low"] ^ fields["seed_high"], jnp.uint32),
    )
    return rows, verified


def row_places(verified: Array, rows: int) -> tuple[RowLayout, Array, Array]:
    """`pack` and, for indexing, the request and the offset int32 [T] of each row. A row of nobody is one of the last
    request: its rows end before that one."""
    packed = pack(verified, rows)
    request = jnp.where(packed.valid, packed.request, len(verified) - 1)
    return packed, request, jnp.maximum(packed.offset, 0)


def plain_accept(
    settings: DraftSettings, head: Array, state: EngineState, hidden: Array, verified: Array, sequences: Array
) -> tuple[VerifiedOutput, EngineState]:
    """`accept` of sequences that are greedy, have a temperature or a forced token, and nothing more."""
    answer, state, _ = accept(settings, head, state, None, hidden, verified, sequences)
    return answer, state


def accept(
    settings: DraftSettings,
    head: Array,
    state: EngineState,
    slots: SlotState | None,
    hidden: Array,
    verified: Array,
    sequences: Array,
    rows: Array | None = None,
    allowed: Array | None = None,
) -> tuple[VerifiedOutput, EngineState, SlotState | None]:
    """Emits what was accepted and a token more, and commits it.

    hidden, verified, sequences: of `Verification`. slots, rows int32 [1, OF_REQUEST, R]: of extra sampling. allowed
    int32 [1, R, k + 1, words]: of `allowed_ids`, at each place of a block.
    """
    hidden, verified = hidden[0], verified[0]
    columns = unpacked(ACCEPT_FIELDS, sequences[0]) | (unpacked(OF_REQUEST, rows[0]) if rows is not None else {})
    slot, live = columns["slot"], verified >= 0
    packed, request, offset = row_places(verified, len(hidden))
    length, drafts = state.length[slot], state.draft_token[slot]
    each = _row_sampling(columns, length + 1 - columns["origin"])
    of_rows = each.rows(request)
    forced = jnp.where(offset == 0, of_rows.forced, NO_ID)
    of_rows = dataclasses.replace(of_rows, index=of_rows.index + offset, forced=forced)
    raw = head_logits(head, hidden)
    if slots is None:
        processed = scaled(raw, of_rows.temperature)
    else:
        own = jax.tree.map(lambda leaf: leaf[slot], slots)
        has_state = columns["has_state"] > 0
        processed = _processed(raw, of_rows, own, has_state, drafts, request, offset, allowed)
    count = drafts.shape[1]
    place = jnp.arange(count + 1, dtype=jnp.int32)
    row = jnp.minimum(packed.start[:-1, None] + place, len(hidden) - 1)
    fixed = acceptance.fixed_tokens(settings.way, processed, of_rows)[row]
    proposal = Proposal(state.draft_logits[slot], state.draft_norm[slot]) if settings.way == PROBABILISTIC else None
    accepted = acceptance.accept(processed, row, fixed, drafts, jnp.maximum(verified, 0), each, proposal)
    token = jnp.where(live[:, None], accepted.token, -1)

    logprob = raw[row, jnp.maximum(token, 0)] - jax.nn.logsumexp(raw, axis=-1)[row]
    top = None
    if slots is not None:
        told = jnp.maximum(token, 0)[request, offset]
        top = jax.tree.map(lambda a: a[row], top_tokens(raw, told, jnp.any(columns["top"] > 0)))
    stated = state.draft_confidence[slot]
    if settings.way == COUPLED:
        error = _decided_error(accepted.count, verified, stated)
    else:
        checked = packed.valid & (offset < verified[request])
        error = _overlap_error(processed, checked, request, offset, drafts, stated, proposal)
    answer = VerifiedOutput(side_by_side(token, jnp.where(token >= 0, logprob, 0.0), error, verified), top=top)

    target = jnp.where(live, slot, len(state.length))
    state = state.replace(
        length=state.length.at[target].set(length + accepted.count + 1, mode="drop"),
        last_token=state.last_token.at[target].set(accepted.newest, mode="drop"),
        draft_token=state.draft_token.at[target].set(-1, mode="drop"),
    )
    if slots is not None:
        slots = _said(slots, own.recent, jnp.where(has_state, target, len(state.length)), token, accepted)
    return jax.tree.map(lambda a: a[None], answer), state, slots


def draft(
    graphs: tuple[Any, Any],
    settings: DraftSettings,
    layout: CacheLayout,
    params: tuple[Any, Any],
    state: EngineState,
    rows: Array,
) -> tuple[DraftOutput, EngineState]:
    """Drafts what follows the newest tokens and leaves it in the slots. rows int32 [1, DRAFT_COLUMNS, R]."""
    target: Transformer = nnx.merge(graphs[0], params[0])
    drafter: DraftModel = nnx.merge(graphs[1], params[1])
    columns = unpacked(DRAFT_COLUMNS, rows[0])
    valid = columns["slot"] >= 0
    slot = jnp.maximum(columns["slot"], 0)
    start, anchor = state.length[slot], state.last_token[slot]
    first = start + 1 - columns["origin"]
    sampling = _row_sampling(columns, first)
    cuts = (sampling.min_p > 0) | (sampling.top_k > 0) | (sampling.top_p < 1)
    cut = jnp.any(valid & cuts & (sampling.temperature > 0))

    def choose(logits: Array, number: Array) -> tuple[Array, Proposal | None]:
        each = dataclasses.replace(sampling, index=first + number)
        plain = partial(scaled, logits, each.temperature)
        return acceptance.draft(settings.way, lax.cond(cut, partial(process, logits, each), plain), each, first)

    context = drafter.context(slot, start, state, layout)
    block = drafter(target, anchor, start, context, choose=choose, valid=valid, count=settings.num_drafts)
    temperatures = None if settings.temperatures is None else jnp.asarray(settings.temperatures, jnp.float32)
    chances = confidence(block.score, temperatures)
    at = jnp.where(valid, slot, len(state.length))
    changes = {"draft_token": block.token, "draft_confidence": chances}
    if block.kept is not None:
        changes |= {"draft_logits": block.kept.logits, "draft_norm": block.kept.norm}
    state = state.replace(**{n: getattr(state, n).at[at].set(new, mode="drop") for n, new in changes.items()})
    return jax.tree.map(lambda a: a[None], DraftOutput.of(block.token, chances)), state


# ---- parts of `accept` and `draft` ----


def _row_sampling(columns: dict[str, Array], index: Array) -> RowSampling:
    """Of the columns that there are; what is missing is neutral. index: of the next output."""
    given = {f.name: columns[f.name] for f in dataclasses.fields(RowSampling) if f.name in columns}
    return RowSampling.neutral(index=index, **given)


def _processed(
    raw: Array,
    rows: RowSampling,
    own: SlotState,
    has_state: Array,
    drafts: Array,
    request: Array,
    offset: Array,
    allowed: Array | None,
) -> Array:
    """fp32 [T, V]: what rows are drawn from. own: the slots [R, ...], which stand before the block."""
    stateful = has_state[request][:, None]
    marks = acceptance.block_marks(own.marks, drafts)[request, offset]
    recent = acceptance.block_recent(own.recent, drafts)[request, offset]
    if allowed is not None:
        allowed = allowed_ids(allowed[0][request, offset], raw.shape[1])
    return process(
        raw,
        rows,
        marks=jnp.where(stateful, marks, 0),
        bias=jnp.where(stateful, own.bias[request], 0.0),
        banned=jnp.where(stateful, endings(own.words[request], recent), NO_ID),
        allowed=allowed,
    )


def _overlap_error(
    processed: Array,
    checked: Array,
    request: Array,
    offset: Array,
    drafts: Array,
    stated: Array,
    proposal: Proposal | None,
) -> Array:
    """fp32 [R]: sum of |chance that the draft is kept - confidence| over the rows that check one, bool [T]."""
    at = request, jnp.minimum(offset, drafts.shape[1] - 1)
    q = None if proposal is None else jax.tree.map(lambda a: a[at], proposal)
    chance = acceptance.overlap(processed, jnp.maximum(drafts[at], 0), q)
    off = jnp.where(checked, jnp.abs(chance - stated[at]), 0.0)
    return jnp.zeros(len(drafts), jnp.float32).at[request].add(off)


def _decided_error(count: Array, verified: Array, stated: Array) -> Array:
    """fp32 [R]: sum of |kept - confidence| over the verified drafts up to the first that was not kept."""
    place = jnp.arange(stated.shape[1], dtype=jnp.int32)
    kept = place < count[:, None]
    decided = (place <= count[:, None]) & (place < verified[:, None])
    return jnp.sum(jnp.where(decided, jnp.abs(kept - stated), 0.0), axis=1)


def _said(slots: SlotState, recent: Array, at: Array, token: Array, accepted: Accepted) -> SlotState:
    """The slots `at` int32 [R], out of bounds for none, after the emitted tokens int32 [R, k + 1]."""
    emitted = jnp.where(token >= 0, token, slots.marks.shape[1])
    known = jnp.concatenate([recent, token], axis=1)
    newest = accepted.count[:, None] + 1 + jnp.arange(recent.shape[1], dtype=jnp.int32)
    return dataclasses.replace(
        slots,
        marks=slots.marks.at[at[:, None], emitted].add(1, mode="drop"),
        recent=slots.recent.at[at].set(jnp.take_along_axis(known, newest, axis=1), mode="drop"),
    )
