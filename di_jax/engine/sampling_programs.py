"""The second program of a step: tokens of requests whose sampling asks for more than greedy or a temperature.

Every step draws a plain token for each of its sequences and leaves their hidden rows behind on device. Where a batch
holds requests that want more, this program runs after it: head, transforms, draw, log-probabilities; their tokens
replace the plain ones, their neighbours' stay to the last bit. So the model is compiled once per bucket, this once per
number of sequences (1.5 CPU seconds each), and who needs none of it pays nothing. The price is the head a second time:
1.3 GB of weights in the released model, 0.4 ms of an H200's memory.

A slot keeps counts and biases of all ids, 8 V + 2,076 bytes: 1.04 MB of 129,280 ids. A list of the ids that were said
would be smaller up to a context of 65,536 tokens, but every row of every step would have to scatter it over V counts
first, which costs more than to read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.engine.extra_sampling import COLUMNS, FLOATS, NO_ID, WORD_LENGTH, WORDS, SlotState
from di_jax.engine.sampler import RowSampling, draw, endings, logprob_of, process, rank_of, top_logprobs
from di_jax.model.cache import CacheLayout
from di_jax.model.transformer import head_logits
from di_jax.parallel.mesh import DeviceMesh, rows_of_ranks
from di_jax.platforms.compiler import XLA_DEFAULTS, Compiler

TOP = 20  # likeliest ids told at most
NO_SLOT = -1
MASK_BITS = 32  # ids of one word of a mask

jax.tree_util.register_dataclass(SlotState)


def slot_shapes(vocab_size: int) -> SlotState:
    """The state of one slot as ShapeDtypeStructs."""
    shape: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(jnp.int32))
    bias = jax.ShapeDtypeStruct((vocab_size,), jnp.dtype(jnp.float32))
    return SlotState(shape((vocab_size,)), bias, shape((WORDS, WORD_LENGTH)), shape((WORD_LENGTH - 1,)))


def slot_bytes(vocab_size: int) -> int:
    """Bytes that a slot keeps."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slot_shapes(vocab_size)))


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class TopTokens:
    """Of S sequences, under the raw logits: which place the emitted token has (1 the best), and the likeliest ids."""

    rank: Array  # int32 [S]
    ids: Array  # int32 [S, TOP]
    logprobs: Array  # fp32 [S, TOP], best first; none where nobody asked


class SamplingPrograms:
    """The programs over one mesh, and the slots' state. Each is compiled at first use, or by `jobs`.

    head: the model's vocabulary matrix [V, D], laid out by `spec`. Every process of a run calls the same ones in the
    same order, with one entry for each rank that it hosts. state: none before `reset`, nor when a failed call lost it;
    abstract_state: its ShapeDtypeStructs.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        plan: DeviceMesh,
        layout: CacheLayout,
        head: Array,
        spec: PartitionSpec,
        compiler: Compiler = XLA_DEFAULTS,
    ) -> None:
        self.mesh, self.plan, self.head = mesh, plan, head
        self._compiler = compiler
        self._last_token: Any = layout.global_abstract(mesh, plan).last_token
        self._spec = spec
        self._ranks = NamedSharding(mesh, PartitionSpec(plan.rank_axes))
        self._slot = slot_shapes(head.shape[0])
        self._compiled: dict[tuple[str, int, Any, bool], Any] = {}
        wanted = jax.tree.map(lambda leaf: self._over_ranks((layout.num_slots, *leaf.shape), leaf.dtype), self._slot)
        self.abstract_state = wanted
        self._allocate = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wanted),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted),
        )
        self.state: SlotState | None = None

    def jobs(self, sequences: Iterable[int], hidden: Any) -> list[Callable[[], Any]]:
        """What compiles everything but masks for steps of so many sequences, with hidden rows of the dtype `hidden`."""
        wanted: list[tuple[str, int, Any]] = [
            ("begin", 0, None),
            *(("sample", count, jnp.dtype(hidden)) for count in sorted(set(sequences))),
        ]
        return [partial(self.compiled, *key) for key in wanted if (*key, False) not in self._compiled]

    def compiled(self, name: str, count: int = 0, dtype: Any = None, masked: bool = False) -> Any:
        """The executable of `begin`, or of `sample` for `count` sequences, hidden rows of `dtype`, and with masks."""
        key = name, count, dtype, masked
        executable = self._compiled.get(key)
        if executable is None:
            executable = self._compiled[key] = self._compiler(self.lower(*key))
        return executable

    def begin(self, slots: Sequence[int], states: Sequence[SlotState | None]) -> None:
        """Writes what a slot of each rank starts from; NO_SLOT and None for ranks where none begins."""
        local = [jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._slot) if s is None else s for s in states]
        slot = rows_of_ranks(self._ranks, np.array(slots, np.int32))
        given = jax.tree.map(lambda *leaves: rows_of_ranks(self._ranks, np.stack(leaves)), *local)
        self.state = self.compiled("begin")(self.state, slot, given)

    def sample(
        self,
        last_token: Array,
        hidden: Array,
        token: Array,
        logprob: Array,
        rows: Sequence[np.ndarray],
        allowed: Sequence[np.ndarray] | None = None,
    ) -> tuple[Array, Array, TopTokens, Array]:
        """(token, logprob, top, last_token) after a step of `hidden` [ranks, S, D], token and logprob [ranks, S].

        rows: int32 [columns, S] of each rank. allowed: int32 [S, 1, words] of each, of `allowed_ids`; sequences that
        are not drawn here do not look at theirs. last_token is donated. Returns at once.
        """
        executable = self.compiled("sample", hidden.shape[1], hidden.dtype, allowed is not None)
        given = [rows_of_ranks(self._ranks, np.stack(own)) for own in (rows, allowed) if own is not None]
        *results, last_token, self.state = executable(self.head, last_token, self.state, hidden, token, logprob, *given)
        token, logprob, top = results
        return token, logprob, top, last_token

    @property
    def lost(self) -> bool:
        """Whether a program took the state and gave none back."""
        return self.state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def reset(self) -> None:
        """Empties the state."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = self._allocate()

    def _over_ranks(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((self.plan.world * shape[0], *shape[1:]), dtype, sharding=self._ranks)

    def lower(self, name: str, count: int = 0, dtype: Any = None, masked: bool = False) -> Any:
        """As `compiled`, but not compiled yet."""
        ranks, last_token, over = self._ranks.spec, self._last_token.sharding.spec, self._over_ranks
        if name == "begin":
            given = jax.tree.map(lambda leaf: over((1, *leaf.shape), leaf.dtype), self._slot)
            written = jax.shard_map(begin, mesh=self.mesh, in_specs=ranks, out_specs=ranks, check_vma=False)
            return jax.jit(written, donate_argnums=0).lower(self.abstract_state, over((1,), jnp.int32), given)
        body = jax.shard_map(
            sample,
            mesh=self.mesh,
            in_specs=(self._spec, last_token, *[ranks] * (6 if masked else 5)),
            out_specs=(ranks, ranks, ranks, last_token, ranks),
            check_vma=False,  # specs of weights and state leave out axes of size 1, the ranks' do not
        )
        head = jax.ShapeDtypeStruct(self.head.shape, self.head.dtype, sharding=NamedSharding(self.mesh, self._spec))
        return jax.jit(body, donate_argnums=(1, 2)).lower(
            head,
            self._last_token,
            self.abstract_state,
            over((1, count, self.head.shape[1]), dtype),
            over((1, count), jnp.int32),
            over((1, count), jnp.float32),
            over((1, len(COLUMNS), count), jnp.int32),
            *([over((1, count, 1, mask_words(len(self.head))), jnp.int32)] if masked else []),
        )


# ---- one rank's part of each program, inside shard_map; arguments and results beside the state have a leading 1 ----


def begin(state: SlotState, slot: Array, given: SlotState) -> SlotState:
    """The state with `given` in the slot, int32 [1]."""
    at = jnp.where(slot < 0, len(state.marks), slot)
    return jax.tree.map(lambda leaf, row: leaf.at[at].set(row, mode="drop"), state, given)


def sample(
    head: Array,
    last_token: Array,
    state: SlotState,
    hidden: Array,
    token: Array,
    logprob: Array,
    rows: Array,
    allowed: Array | None = None,
) -> tuple[Array, Array, TopTokens, Array, SlotState]:
    """Of S sequences: the tokens that were chosen to be drawn here, their log-probabilities under the raw logits, and
    the slots after them. hidden [1, S, D], token int32 [1, S], logprob fp32 [1, S], rows int32 [1, columns, S], allowed
    int32 [1, S, 1, words]."""
    columns = unpacked(COLUMNS, rows[0])
    chosen, slot, has_state = columns["chosen"] > 0, columns["slot"], columns["has_state"] > 0
    logits = head_logits(head, hidden[0])
    sampling = RowSampling(
        index=columns["output_index"],
        **{f.name: columns[f.name] for f in dataclasses.fields(RowSampling) if f.name != "index"},
    )
    own = jax.tree.map(lambda leaf: leaf[slot], state)
    processed = process(
        logits,
        sampling,
        marks=jnp.where(has_state[:, None], own.marks, 0),
        bias=jnp.where(has_state[:, None], own.bias, 0.0),
        banned=jnp.where(has_state[:, None], endings(own.words, own.recent), NO_ID),
        allowed=None if allowed is None else allowed_ids(allowed[0, :, 0], logits.shape[1]),
    )
    drawn = draw(processed, sampling.temperature, sampling.seed_low, sampling.seed_high, sampling.index)
    drawn = jnp.where(sampling.forced >= 0, sampling.forced, drawn)
    token = jnp.where(chosen, drawn, token[0])
    logprob = jnp.where(chosen, logprob_of(logits, token), logprob[0])
    top = top_tokens(logits, token, jnp.any(columns["top"] > 0))
    sampled = (columns["sample"] > 0) & chosen
    last_token = last_token.at[jnp.where(sampled, slot, len(last_token))].set(token, mode="drop")
    kept = jnp.where(sampled & has_state, slot, len(last_token))
    state = dataclasses.replace(
        state,
        marks=state.marks.at[kept, token].add(1, mode="drop"),
        recent=state.recent.at[kept].set(jnp.concatenate([own.recent[:, 1:], token[:, None]], axis=1), mode="drop"),
    )
    token, logprob, top = jax.tree.map(lambda leaf: leaf[None], (token, logprob, top))
    return token, logprob, top, last_token, state


def unpacked(names: Sequence[str], rows: Array) -> dict[str, Array]:
    """int32 [names, S] as arrays [S] by name, floats from their bits."""
    columns: dict[str, Array] = dict(zip(names, rows))
    return columns | {n: lax.bitcast_convert_type(columns[n], jnp.float32) for n in names if n in FLOATS}


def top_tokens(logits: Array, token: Array, asked: Array) -> TopTokens:
    """Of raw logits fp32 [N, V] and the tokens int32 [N]; the likeliest ids only if `asked`, bool []."""
    likeliest = partial(top_logprobs, logits, min(TOP, logits.shape[1]))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(likeliest))
    return TopTokens(rank_of(logits, token), *lax.cond(asked, likeliest, lambda: nothing))


def mask_words(vocab_size: int) -> int:
    """Words of a mask over so many ids."""
    return -(-vocab_size // MASK_BITS)


def allowed_ids(words: Array, vocab_size: int) -> Array:
    """bool [N, V] from masks int32 [N, words]: bit i of word w is id 32 w + i."""
    ids = jnp.arange(vocab_size, dtype=jnp.uint32)
    own = lax.bitcast_convert_type(words, jnp.uint32)[:, ids // MASK_BITS]
    return (own >> (ids % MASK_BITS)) & 1 != 0
