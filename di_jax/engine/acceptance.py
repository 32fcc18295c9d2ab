"""Which drafts of a block are kept, and the token that follows them (dspark 2; Leviathan et al. 2023).

R requests, G drafts each. Position j of a request's block stands for output `index + j` of its answer: its target row,
whose context ends in draft x_j, gives p of x_{j+1}; x_1..x_l are verified, l = `verified` varies by request. The
step emits x_1..x_a and one token more: a correction when a < l, else a draw from row l, which nobody drafted.

Three ways to draft, all with tokens distributed exactly as without drafts:
  one_hot        the draft's best id; kept with probability p(x).
  probabilistic  a draw from q, kept with probability min(1, p(x) / q(x)); else a draw from max(p - q, 0).
  coupled        draft and target draw with the same noise, which only (seed, output index) chooses; kept when equal.
                 What is emitted is what would have been drawn without drafts, to the last token, whatever was drafted
                 or verified: at the price of accepting less than the other two (at least (1 - TV) / (1 + TV); Daliri et
                 al. 2025).

Noise (dspark 2.1) is keyed by (seed, output index, stream): stream 0 of the sampler draws what is emitted, drafts and
coins have their own. A draft's key holds the start of its block too: an id drafted again for the same output must not
be the one that may have decided, through its confidence, whether it is looked at.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.engine.sampler import RowSampling, draw, gumbel, place_keys

NOT_FIXED = -1
ONE_HOT, PROBABILISTIC, COUPLED = "one_hot", "probabilistic", "coupled"
_DRAFT, _COIN = 1, 2  # streams


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Proposal:
    """The distributions q that drafts were drawn from, as kept until they are verified: 2 V + 4 bytes a draft, so
    1,292,820 B a sequence with 5 drafts over 129,280 ids (fp32: 2,585,600 B). The other two ways to draft keep nothing.

    Drafts are drawn from the rounded numbers that are kept. Logits count from the best one down: bf16 is finest near 0.
    """

    logits: Array  # bf16 [..., V], at most 0, -inf for ids that are out
    norm: Array  # fp32 [...] log-sum-exp of those

    @classmethod
    def of(cls, logits: Array) -> Proposal:
        """From processed fp32 logits [..., V]."""
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        # Not by the cast alone: XLA may undo one that is widened again, and drafts would come from other numbers.
        rounded = lax.reduce_precision(below, exponent_bits=8, mantissa_bits=7)
        return cls(rounded.astype(jnp.bfloat16), jax.nn.logsumexp(rounded, axis=-1))

    def logprobs(self) -> Array:
        """fp32 [..., V]: log q."""
        return self.logits.astype(jnp.float32) - self.norm[..., None]

    def logprob_of(self, token: Array) -> Array:
        """fp32 [...]: log q of int32 [...]."""
        picked = jnp.take_along_axis(self.logits, token[..., None], axis=-1)[..., 0]
        return picked.astype(jnp.float32) - self.norm


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Accepted:
    """What a block came to."""

    count: Array  # int32 [R] drafts kept, a
    token: Array  # int32 [R, G + 1]: x_1..x_a, then the drawn one, then -1

    @property
    def newest(self) -> Array:
        """int32 [R]: the token that the next step feeds."""
        return jnp.take_along_axis(self.token, self.count[:, None], axis=1)[:, 0]


# ---- drafting ----


def draft(way: str, logits: Array, rows: RowSampling, block_start: Array) -> tuple[Array, Proposal | None]:
    """Drafts int32 [R] for outputs `rows.index`, with the q of probabilistic ones.

    logits fp32 [R, V], processed as the target's are; block_start int32 [R]: output index of the block's first draft.
    Greedy rows draft their best id in every way.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if way == ONE_HOT:
        return best, None
    if way == COUPLED:
        return draw(logits, rows.temperature, rows.seed_low, rows.seed_high, rows.index), None
    proposal = Proposal.of(logits)
    keys = jax.vmap(jax.random.fold_in)(place_keys(rows.seed_low, rows.seed_high, rows.index, _DRAFT), block_start)
    noisy = proposal.logits.astype(jnp.float32) + gumbel(keys, logits.shape[-1])
    return jnp.where(rows.temperature > 0, jnp.argmax(noisy, axis=-1).astype(jnp.int32), best), proposal


# ---- verification ----


def fixed_tokens(way: str, logits: Array, rows: RowSampling) -> Array:
    """int32 [T]: the id that each target row has to give, NOT_FIXED where chance decides: the forced one, the best one
    of greedy rows, the drawn one where draft and target are coupled.

    logits fp32 [T, V], processed; rows: of [T], `index` that of the output that the row gives.
    """
    if way == COUPLED:
        token = draw(logits, rows.temperature, rows.seed_low, rows.seed_high, rows.index)
    else:
        token = jnp.where(rows.temperature > 0, NOT_FIXED, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
    return jnp.where(rows.forced >= 0, rows.forced, token)


def accept_fixed(fixed: Array, drafts: Array, verified: Array) -> Accepted:
    """The drafts that are what they have to be, up to the first that is not: greedy, coupled and forced rows.

    fixed int32 [R, G + 1]: of `fixed_tokens`, none NOT_FIXED up to row `verified`; drafts int32 [R, G]; verified int32
    [R], 0..G.
    """
    count = _leading(drafts == fixed[:, :-1], verified)
    return _emitted(count, drafts, jnp.take_along_axis(fixed, count[:, None], axis=1)[:, 0])


def accept(
    logits: Array,
    row: Array,
    fixed: Array,
    drafts: Array,
    verified: Array,
    rows: RowSampling,
    proposal: Proposal | None = None,
) -> Accepted:
    """Greedy and sampled requests in one batch, each by its own rule; nothing depends on how rows are packed.

    logits fp32 [T, V]: processed target rows, packed in any way; row int32 [R, G + 1]: which of them is position j of a
    request, any where j > verified. fixed int32 [R, G + 1]: of `fixed_tokens`, by position. drafts int32 [R, G]: below
    0 is never kept, and the token there comes from p. verified int32 [R], 0..G. rows: of [R], `index` that of position
    0. proposal: [R, G] of probabilistic drafts, None for one-hot ones.
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    checked, known = row[:, :-1], jnp.maximum(drafts, 0)
    log_p = logits[checked, known] - norm[checked]
    log_q = jnp.zeros_like(log_p) if proposal is None else proposal.logprob_of(known)
    ahead = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    coin = jax.vmap(lambda index: _coins(dataclasses.replace(rows, index=index)), 1, 1)(rows.index[:, None] + ahead)
    kept = (drafts >= 0) & (jnp.log(coin) + log_q < log_p)
    kept = jnp.where(fixed[:, :-1] >= 0, drafts == fixed[:, :-1], kept)
    count = _leading(kept, verified)

    at = jnp.take_along_axis(row, count[:, None], axis=1)[:, 0]
    p = logits[at]
    refused = jnp.minimum(count, drafts.shape[1] - 1)[:, None]
    x = jnp.take_along_axis(drafts, refused, axis=1)[:, 0]
    if proposal is None:
        rest = jnp.where(jnp.arange(p.shape[-1]) == x[:, None], -jnp.inf, p)
    else:
        q = jax.tree.map(lambda a: a[jnp.arange(len(count)), refused[:, 0]], proposal)
        rest = residual(p, norm[at], q)
    # Rounding may leave nothing of p - q where they are all but equal: then p itself is as good.
    corrected = (count < verified) & (x >= 0) & jnp.isfinite(jnp.max(rest, axis=-1))
    p = jnp.where(corrected[:, None], rest, p)
    noise = gumbel(place_keys(rows.seed_low, rows.seed_high, rows.index + count), p.shape[-1])
    drawn = jnp.argmax(p + noise, axis=-1).astype(jnp.int32)
    must = jnp.take_along_axis(fixed, count[:, None], axis=1)[:, 0]
    return _emitted(count, drafts, jnp.where(must >= 0, must, drawn))


def residual(logits: Array, norm: Array, proposal: Proposal) -> Array:
    """fp32 [R, V]: logits of max(p - q, 0), -inf where that is 0. logits of p fp32 [R, V], norm fp32 [R] their
    log-sum-exp."""
    ratio = proposal.logprobs() - (logits - norm[:, None])  # log q / p; NaN where both are 0
    return jnp.where(ratio < 0, logits + jnp.log1p(-jnp.exp(ratio)), -jnp.inf)


def overlap(logits: Array, drafts: Array, proposal: Proposal | None = None) -> Array:
    """fp32 [...]: the chance that a draft is kept, the sum of min(p, q) = 1 - TV(p, q); of one-hot drafts p(x).

    logits of p fp32 [..., V], drafts int32 [...]. What a confidence predicts, but not of coupled drafts.
    """
    log_p = jax.nn.log_softmax(logits, axis=-1)
    if proposal is None:
        return jnp.exp(jnp.take_along_axis(log_p, drafts[..., None], axis=-1)[..., 0])
    return jnp.sum(jnp.exp(jnp.minimum(log_p, proposal.logprobs())), axis=-1)


def block_marks(marks: Array, drafts: Array) -> Array:
    """Marks int32 [R, G + 1, V] of a block's rows from those of the requests int32 [R, V]: row j counts x_1..x_j too.

    drafts int32 [R, G]; below 0 counts as nothing.
    """
    requests, count = drafts.shape
    rows = jnp.broadcast_to(marks[:, None], (requests, count + 1, marks.shape[-1]))
    before = jnp.arange(count + 1)[:, None] > jnp.arange(count)  # of row j, the drafts k <= j
    token = jnp.where(before & (drafts >= 0)[:, None], drafts[:, None], marks.shape[-1])
    return rows.at[jnp.arange(requests)[:, None, None], jnp.arange(count + 1)[:, None], token].add(1, mode="drop")


def block_recent(recent: Array, drafts: Array) -> Array:
    """int32 [R, G + 1, W]: the W newest tokens before each row of a block, from those of the requests int32 [R, W].

    drafts int32 [R, G]. For `sampler.endings`, with marks of `block_marks`.
    """
    known, width = jnp.concatenate([recent, drafts], axis=1), recent.shape[1]
    return jnp.stack([known[:, j : j + width] for j in range(drafts.shape[1] + 1)], axis=1)


def _coins(rows: RowSampling) -> Array:
    """fp32 [R] in (0, 1)."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))
    return uniform(place_keys(rows.seed_low, rows.seed_high, rows.index, _COIN)) + 2.0**-24


def _leading(kept: Array, verified: Array) -> Array:
    """int32 [R]: how many of bool [R, G] hold before the first that does not, at most int32 [R]."""
    inside = jnp.arange(kept.shape[1], dtype=jnp.int32) < verified[:, None]
    return jnp.sum(jnp.cumprod((kept & inside).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _emitted(count: Array, drafts: Array, last: Array) -> Accepted:
    """x_1..x_a and then `last` int32 [R]."""
    place = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)
    token = jnp.where(place < count[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), -1)
    return Accepted(count, jnp.where(place == count[:, None], last[:, None], token))
