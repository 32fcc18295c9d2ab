"""Drawing the next token on device, reproducible from (seed, output index) alone (engine 8, architecture 7.5).

`sample` is all that most requests need: greedy, or a temperature. `process` gives the distribution of those that ask
for more, in the order penalties, bias, forbidden ids; temperature; min-p; top-k; top-p. N rows of logits, V ids.

Every draw is argmax(logits + Gumbel noise), the noise keyed by (seed, output index): a token does not depend on its
batch, its bucket or the schedule (engine 15.10), and ids that are -inf are never drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.engine.extra_sampling import COUNT, ENDS_ANSWER, IN_PROMPT, LOGPROB_FLOOR, NO_ID

# Keys of further noise at a place: no output index reaches the first one.
_STREAMS = 1 << 31


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """How each of N rows is drawn: arrays [N], fp32 or int32. The values of `neutral` change nothing.

    index: of the token to come among the answer's outputs. seed_low, seed_high: words of the 64-bit seed. forced: the
    id to emit whatever the logits say. min_tokens: while `index` is below it, ids that end the answer are forbidden.
    """

    temperature: Array  # 0: greedy
    seed_low: Array
    seed_high: Array
    index: Array
    forced: Array  # NO_ID: free
    min_p: Array  # 0: off
    top_k: Array  # below 1: off
    top_p: Array  # 1: off
    presence: Array
    frequency: Array
    repetition: Array  # 1: off
    min_tokens: Array

    @classmethod
    def neutral(
        cls, temperature: Array, seed_low: Array, seed_high: Array, index: Array, **changes: Array
    ) -> RowSampling:
        """Rows that are drawn as `sample` does, but for `changes`."""
        zero, one, none = (jnp.full_like(temperature, x) for x in (0.0, 1.0, 0.0))
        whole = jnp.zeros_like(index)
        fields = {
            "forced": whole + NO_ID,
            "min_p": zero,
            "top_k": whole,
            "top_p": one,
            "presence": none,
            "frequency": none,
            "repetition": one,
            "min_tokens": whole,
        }
        return cls(temperature, seed_low, seed_high, index, **(fields | changes))

    def rows(self, of: Array) -> RowSampling:
        """The rows numbered by `of`, int32 of any shape."""
        return jax.tree.map(lambda a: a[of], self)


def sample(
    logits: Array, temperature: Array, seed_low: Array, seed_high: Array, output_index: Array, forced: Array
) -> tuple[Array, Array]:
    """(token int32 [N], its log-probability fp32 [N] under the raw logits).

    logits fp32 [N, V]; temperature fp32 [N], 0 = argmax (ties take the lower id); the 64-bit seed as two int32 words;
    forced int32 [N], -1 = free.
    """
    token = draw(scaled(logits, temperature), temperature, seed_low, seed_high, output_index)
    token = jnp.where(forced >= 0, forced, token)
    return token, logprob_of(logits, token)


def scaled(logits: Array, temperature: Array) -> Array:
    """fp32 [N, V] divided by the temperature fp32 [N]; greedy rows are left alone."""
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def draw(logits: Array, temperature: Array, seed_low: Array, seed_high: Array, index: Array) -> Array:
    """int32 [N]: from softmax of fp32 [N, V], or its argmax where the temperature is 0 (ties take the lower id)."""
    greedy = jnp.argmax(logits, axis=-1)
    noise = gumbel(place_keys(seed_low, seed_high, index), logits.shape[-1])
    drawn = jnp.argmax(logits + noise, axis=-1)
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)


def place_keys(seed_low: Array, seed_high: Array, index: Array, stream: int = 0) -> Array:
    """Keys [N] of the noise at output `index` int32 [N]; those of two streams have nothing in common. Stream 0 draws
    the token that is emitted there, once the answer is known up to it."""

    def place(low: Array, high: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([low, high]).astype(jnp.uint32), impl="threefry2x32")
        if stream:
            key = jax.random.fold_in(key, jnp.uint32(_STREAMS + stream))
        return jax.random.fold_in(key, index)

    return jax.vmap(place)(seed_low, seed_high, index)


def gumbel(keys: Array, size: int) -> Array:
    """fp32 [N, size] from keys [N]."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)


def logprob_of(logits: Array, token: Array) -> Array:
    """fp32 [N]: log-softmax of fp32 [N, V] at int32 [N]."""
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def top_logprobs(logits: Array, count: int) -> tuple[Array, Array]:
    """(ids int32 [N, count], log-probabilities fp32 [N, count]) of the likeliest, best first, equals by rising id.

    Of the raw logits fp32 [N, V]; -inf is told as -9999.
    """
    best, ids = lax.top_k(logits, count)
    logprobs = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return ids.astype(jnp.int32), jnp.maximum(logprobs, LOGPROB_FLOOR)


def rank_of(logits: Array, token: Array) -> Array:
    """int32 [N]: 1 + how many ids are likelier than the token; equals share a rank."""
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)
    return 1 + jnp.sum(logits > picked, axis=-1, dtype=jnp.int32)


# ---- the distribution that a request asks for ----


def process(
    logits: Array,
    rows: RowSampling,
    *,
    marks: Array | None = None,
    bias: Array | None = None,
    banned: Array | None = None,
    allowed: Array | None = None,
) -> Array:
    """fp32 [N, V] whose softmax is what the rows are drawn from; -inf for ids that are out. The argmax is always in.

    logits fp32 [N, V]. marks int32 [N, V]: count of outputs, IN_PROMPT, ENDS_ANSWER; None: no penalties, no
    min_tokens. bias fp32 [N, V] is added. banned int32 [N, B]: ids that are out, NO_ID none. allowed bool [N, V].
    Definitions of penalties, min-p, top-k and top-p are those of vLLM and the papers: repetition divides positive and
    multiplies negative logits of ids in prompt or outputs, frequency subtracts per output, presence once. top-k and
    top-p keep the fewest ids, equals by rising id. Where nothing at all would be left, the logits stand as they are.
    """
    z = logits
    if marks is not None:
        z = penalized(z, marks, rows)
        early = (rows.index < rows.min_tokens)[:, None]
        z = jnp.where(early & (marks & ENDS_ANSWER != 0), -jnp.inf, z)
    if bias is not None:
        z = z + bias
    if banned is not None:
        z = forbid(z, banned)
    if allowed is not None:
        z = jnp.where(allowed, z, -jnp.inf)
    if z is not logits:
        z = jnp.where(jnp.any(z > -jnp.inf, axis=-1, keepdims=True), z, logits)
    z = scaled(z, rows.temperature)
    best = jnp.max(z, axis=-1, keepdims=True)
    z = jnp.where(z >= best + jnp.log(rows.min_p)[:, None], z, -jnp.inf)
    z = keep_top_k(z, rows.top_k)
    return keep_top_p(z, rows.top_p)


def penalized(logits: Array, marks: Array, rows: RowSampling) -> Array:
    """Logits fp32 [N, V] less the rows' penalties; marks int32 [N, V]."""
    count = marks & COUNT
    repetition = jnp.where(marks & (IN_PROMPT | COUNT) != 0, rows.repetition[:, None], 1.0)
    z = jnp.where(logits > 0, logits / repetition, logits * repetition)
    z = z - rows.frequency[:, None] * count.astype(jnp.float32)
    return z - jnp.where(count > 0, rows.presence[:, None], 0.0)


def forbid(logits: Array, banned: Array) -> Array:
    """-inf at the ids int32 [N, B] of fp32 [N, V]; NO_ID forbids nothing."""
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, jnp.where(banned < 0, logits.shape[1], banned)].set(-jnp.inf, mode="drop")


def endings(words: Array, recent: Array) -> Array:
    """int32 [N, B]: the id that would complete each of the words after these tokens, NO_ID where none would.

    words int32 [N, B, L]: token sequences that must not appear, NO_ID before and instead of them. recent int32
    [N, L - 1]: the newest tokens of each row, the last one last.
    """
    begun = words[..., :-1]
    matches = jnp.all((begun == recent[:, None]) | (begun == NO_ID), axis=-1)
    return jnp.where(matches, words[..., -1], NO_ID)


def keep_top_k(logits: Array, top_k: Array) -> Array:
    """The `top_k` int32 [N] largest of fp32 [N, V], of equals the lower ids; the rest -inf. Below 1: all."""

    def count(inside: Array) -> Array:
        return jnp.sum(inside, axis=-1, dtype=jnp.int32).astype(jnp.float32)

    return _keep_head(logits, jnp.ones((), jnp.float32), count, top_k.astype(jnp.float32), top_k > 0)


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """The fewest of fp32 [N, V], likeliest first and of equals the lower ids, whose softmax reaches `top_p` fp32 [N].

    The rest -inf; 1: all. Masses are summed as integers of 30 bits in two halves: which ids are in depends neither on
    the order of a sum nor on the shape of the batch.
    """
    # Halves of a mass whose sums over V ids stay below 2^32: 15 bits for the released vocabulary.
    bits = min(15, 32 - logits.shape[-1].bit_length())
    exponent = logits - jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.round(jnp.exp(exponent) * 2.0 ** (2 * bits)).astype(jnp.uint32)

    def total(inside: Array) -> Array:
        held = jnp.where(inside, mass, 0)
        low = jnp.sum(held & ((1 << bits) - 1), axis=-1, dtype=jnp.uint32)
        high = jnp.sum(held >> bits, axis=-1, dtype=jnp.uint32) + (low >> bits)
        low = low & ((1 << bits) - 1)
        return high.astype(jnp.float32) * 2.0**bits + low.astype(jnp.float32)

    target = top_p * total(jnp.ones(logits.shape, bool))
    return _keep_head(logits, mass.astype(jnp.float32), total, target, top_p < 1)


def _keep_head(logits: Array, weight: Array, total: Callable[[Array], Array], target: Array, active: Array) -> Array:
    """The shortest head of each row, in falling order and of equals by rising id, whose weight reaches `target` [N].

    Without a sort: the last value of the head is found by bisection of the bits of floats, at most 32 passes over the
    row and mostly half as many; another 17 for its id where equals are cut apart. weight: of each id, fp32 [N, V] or
    []; total: bool [N, V] -> fp32 [N], the weight of those. Rows that are not `active` bool [N] stay as they are.
    """
    key = _ordered_bits(logits)
    last_id = jnp.full(target.shape, logits.shape[-1] - 1, jnp.int32)

    def members(inside: Array) -> Array:
        return jnp.sum(inside, axis=-1, dtype=jnp.int32)

    # Ids from `low` on reach the target, those from `high` on do not.
    def unsettled(state: tuple[Array, Array, Array, Array]) -> Array:
        low, high, from_low, from_high = state
        return jnp.any(active & (high - low > 1) & (from_low - from_high > 1))

    def halve(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        low, high, from_low, from_high = state
        middle = low + (high - low) // 2
        inside = key >= middle[:, None]
        enough, count = total(inside) >= target, members(inside)
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, count, from_low),
            jnp.where(enough, from_high, count),
        )

    low, high = jnp.min(key, axis=-1), jnp.max(key, axis=-1) + 1
    _, high, _, _ = lax.while_loop(unsettled, halve, (low, high, last_id + 1, jnp.zeros_like(last_id)))
    last = jnp.max(jnp.where(key < high[:, None], key, 0), axis=-1, keepdims=True)
    above, equal = key > last, key == last
    each = jnp.max(jnp.where(equal, weight, 0.0), axis=-1)
    wanted = jnp.ceil((target - total(above)) / jnp.maximum(each, 1.0))
    wanted = jnp.clip(wanted, 1, logits.shape[-1]).astype(jnp.int32)
    split = active & (members(equal) > wanted)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)

    def halve_ids(state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = low + (high - low) // 2
        enough = members(equal & (ids <= middle[:, None])) >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    _, cut = lax.while_loop(
        lambda state: jnp.any(split & (state[0] < state[1])), halve_ids, (jnp.zeros_like(last_id), last_id)
    )
    kept = above | (equal & (ids <= cut[:, None])) | ~active[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def _ordered_bits(values: Array) -> Array:
    """uint32 in the order of the fp32 `values`; -0 is +0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    ordered = jnp.where(bits >> 31 != 0, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.minimum(ordered, jnp.uint32(2**32 - 2))  # one more must not wrap around; only a NaN is that large
