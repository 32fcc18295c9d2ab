"""One data-parallel rank: which sequences it runs, and what they hold of its blocks, slots and cached prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from di_jax.config import EngineGroup
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.preemption import Candidate
from di_jax.engine.prefix_cache import BlockKeys, Hit, choose_hit
from di_jax.engine.sequence import NO_HIT, Holding, Sequence, Status
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.step_plan import BucketLadder
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig


@dataclass(frozen=True)
class CacheRules:
    """How prefixes are reused.

    prefix_caching: whether at all. look_back: tokens at the end of a prompt that are always computed, window + 6.
    replay: encoder replay. keep_tokens: rows at the end of a prompt that go through the decoder layers; 0: all of them.
    history: tokens before a chunk that the Engram sees. watermark: share of the blocks in use above which no prompt is
    taken in.
    """

    prefix_caching: bool = True
    look_back: int = 134
    replay: bool = True
    keep_tokens: int = 0
    history: int = 3
    watermark: float = 0.9

    @classmethod
    def of(cls, config: EngineGroup, model: ModelConfig) -> CacheRules:
        """The rules of an engine."""
        return cls(
            prefix_caching=config.prefix_caching,
            look_back=model.window_ring,
            replay=config.replay.encoder == "on",
            keep_tokens=0 if config.replay.decoder == "off" else config.replay.keep_tokens,
            history=model.engram_max_ngram_size - 1,
            watermark=config.watermark,
        )

    def snapshot_layers(self, model: ModelConfig) -> int:
        """Layers whose window rings a snapshot holds: those of the encoder, or without decoder replay, which would
        compute the others anew, all."""
        return model.candidate_source_layer_id if self.keep_tokens else model.num_hidden_layers


class DataRank:
    """The sequences of a data-parallel rank, and the ledgers and slot tables of its context ranks.

    prompts: sequences whose prefill is under way, in order of admission. decoding: those that get a token a step.
    """

    def __init__(
        self,
        ledgers: SequenceOf[BlockManager],
        max_blocks: int,
        rules: CacheRules | None = None,
        snapshots: WindowStateCache | None = None,
        num_drafts: int = 0,
    ) -> None:
        self.ledgers = list(ledgers)
        self.tables = [SlotTable(ledger.num_slots, max_blocks, num_drafts) for ledger in ledgers]
        self.rules = rules or CacheRules(prefix_caching=False)
        self.snapshots = WindowStateCache(0) if snapshots is None else snapshots  # an empty one is false
        self.block_size = self.ledgers[0].block_size
        self.prompts: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}

    @property
    def running(self) -> Iterator[Sequence]:
        yield from self.prompts
        yield from self.decoding

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    @property
    def available(self) -> int:
        """Blocks to be had on the context rank that has the fewest: a prompt needs blocks on all of them."""
        return min(ledger.num_available for ledger in self.ledgers)

    def new_keys(self, salt: str | None) -> BlockKeys | None:
        """For a new sequence; None without a prefix cache."""
        return BlockKeys(self.block_size, salt) if self.rules.prefix_caching else None

    @property
    def has_slot(self) -> bool:
        return all(ledger.num_free_slots for ledger in self.ledgers)

    # -- admission

    def chain(self, sequence: Sequence) -> list[list[int]]:
        """The cached blocks of a sequence's tokens, on each context rank; as many on all of them."""
        if not self.rules.prefix_caching or sequence.keys is None:
            return [[] for _ in self.ledgers]
        keys = sequence.keys
        if keys.num_tokens < len(sequence):
            keys.extend(sequence.tokens(keys.num_tokens, len(sequence)))
        found = [ledger.lookup(keys.keys) for ledger in self.ledgers]
        shortest = min(map(len, found))
        return [blocks[:shortest] for blocks in found]

    def hit(self, sequence: Sequence, chain: SequenceOf[SequenceOf[int]]) -> Hit:
        """How much of `chain` the sequence may use."""
        if not chain[0]:
            return NO_HIT
        assert sequence.keys is not None
        keys = sequence.keys.keys
        return choose_hit(
            len(chain[0]),
            len(sequence),
            self.rules.look_back,
            lambda boundary: keys[boundary // self.block_size - 1] in self.snapshots,
            self.rules.replay,
            self.block_size,
        )

    def can_admit(self, sequence: Sequence, chain: SequenceOf[SequenceOf[int]] | None = None) -> bool:
        """Whether there are a slot and blocks for all its tokens, with one more for every sequence that decodes.

        While something runs, the blocks in use have to be within the watermark. Alone, every sequence fits that
        `Scheduler.never_fits` let pass.
        """
        if not self.has_slot:
            return False
        chain = self.chain(sequence) if chain is None else chain
        used = self.hit(sequence, chain).length // self.block_size
        for ledger, blocks in zip(self.ledgers, chain, strict=True):
            held = ledger.num_held_blocks
            if held and (held > self.rules.watermark * ledger.num_blocks):
                return False
            need = ledger.blocks_of(len(sequence)) - used + (len(self.decoding) if held else 0)
            if need > ledger.num_available - ledger.num_cached_of(blocks[:used]):
                return False
        return True

    def admit(self, sequence: Sequence) -> None:
        """Gives it a slot and blocks for all its tokens, the cached ones first."""
        chain = self.chain(sequence)
        sequence.hit = self.hit(sequence, chain)
        used = sequence.hit.length // self.block_size
        for ledger, blocks in zip(self.ledgers, chain, strict=True):
            shared = list(blocks[:used])
            for block in shared:
                ledger.share(block)
            blocks = shared + ledger.allocate(ledger.blocks_of(len(sequence)) - used)
            sequence.held.append(Holding(ledger.rank, blocks, ledger.take_slot()))
        sequence.goal, sequence.num_computed, sequence.num_registered = len(sequence), sequence.hit.start, used
        sequence.status = Status.PREFILL
        self.prompts[sequence] = None

    # -- from prompt to answer

    def settle(self, sequence: Sequence) -> list[Holding]:
        """The last step of its prefill is being launched: from the next one on it decodes, on the context rank with the
        most room. Returns what it held on the others, to be released after that step."""
        keep = 0
        if len(sequence.held) > 1:
            keep = max(range(len(sequence.held)), key=lambda at: self._room(sequence.held[at].rank))
        left = sequence.held[:keep] + sequence.held[keep + 1 :]
        sequence.held = [sequence.held[keep]]
        del self.prompts[sequence]
        self._begin(sequence)
        return left

    def _room(self, rank: int) -> tuple[float, float]:
        """To decode on a context rank: the lesser of the shares of slots and of blocks that are free, as a new prompt
        needs both on all of them; then that of slots. A slot is free where nobody decodes: prompts leave most of theirs
        soon."""
        ledger, table = self._ledger(rank), self._table(rank)
        slots = sum(sequence is None for sequence in table.sequences) / ledger.num_slots
        return min(slots, ledger.num_available / ledger.num_blocks), slots

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Lets `child`, another answer to the prompt that `parent` has just settled, go on from its caches: it shares
        the full blocks, and gets a block for the partial one. The blocks (source, destination) to be copied after the
        step; (-1, -1) when there is no partial one. None, and nothing happens, without room."""
        (held,) = parent.held
        ledger = self._ledger(held.rank)
        full, partial = divmod(len(parent.prompt_ids), self.block_size)
        need = bool(partial) + len(self.decoding)
        if not ledger.num_free_slots or ledger.num_available < need:
            return None
        blocks = held.blocks[:full]
        for block in blocks:
            ledger.share(block)
        copied = (-1, -1)
        if partial:
            blocks = blocks + ledger.allocate(1)
            copied = held.blocks[full], blocks[full]
        child.held = [Holding(held.rank, blocks, ledger.take_slot())]
        child.goal = child.num_computed = parent.goal
        child.num_registered = full
        child.hit, child.num_cached_tokens = parent.hit, len(parent.prompt_ids)
        if parent.keys is not None:
            child.keys = parent.keys.copy()
        self._begin(child)
        return copied

    def _begin(self, sequence: Sequence) -> None:
        """Its next steps are decode steps; the step being launched samples the token that the first of them feeds."""
        (held,) = sequence.held
        sequence.status = Status.RUNNING
        self.decoding[sequence] = None
        at = len(sequence.output_ids) + 1
        self._table(held.rank).begin(held.slot, sequence, sequence.goal, at, held.blocks)

    def tell(self, sequence: Sequence, now: float) -> None:
        """A running sequence got its first token since it was taken in."""
        (held,) = sequence.held
        self._table(held.rank).told[held.slot] = now

    def grow(self, rank: int, slot: int) -> None:
        """One more block for the sequence that decodes in a slot."""
        ledger, table = self._ledger(rank), self._table(rank)
        (block,) = ledger.allocate(1)
        sequence = table.sequences[slot]
        assert sequence is not None
        sequence.held[0].blocks.append(block)
        table.grow(slot, block)

    def shrink(self, rank: int, slot: int) -> None:
        """Takes the last block of the sequence that decodes in a slot, which no step has reached."""
        sequence = self._table(rank).sequences[slot]
        assert sequence is not None
        self._ledger(rank).release([sequence.held[0].blocks.pop()])
        self._table(rank).shrink(slot)

    def computed(self, sequence: Sequence, held: SequenceOf[Holding], end: int) -> None:
        """The first `end` tokens are in the caches of these holdings, and known: complete blocks can be found."""
        if not self.rules.prefix_caching or sequence.keys is None:
            return
        keys, complete = sequence.keys, end // self.block_size
        if keys.num_tokens < end:
            keys.extend(sequence.tokens(keys.num_tokens, end))
        for holding in held:
            ledger = self._ledger(holding.rank)
            for at in range(sequence.num_registered, complete):
                ledger.register(holding.blocks[at], keys.keys[at])
        sequence.num_registered = max(sequence.num_registered, complete)

    def leave(self, sequence: Sequence) -> list[Holding]:
        """It runs here no more. Returns what it held, to be released when no step writes there any more."""
        self.prompts.pop(sequence, None)
        self.decoding.pop(sequence, None)
        for holding in sequence.held:
            if self._table(holding.rank).sequences[holding.slot] is sequence:
                self._table(holding.rank).end(holding.slot)
        held, sequence.held = sequence.held, []
        return held

    def release(self, holding: Holding) -> None:
        ledger = self._ledger(holding.rank)
        ledger.release(holding.blocks)
        ledger.give_slot(holding.slot)

    def reset(self) -> None:
        """Everything is free and nothing cached: the caches on device were emptied."""
        self.prompts.clear()
        self.decoding.clear()
        for ledger, table in zip(self.ledgers, self.tables, strict=True):
            ledger.reset()
            for slot in np.flatnonzero([sequence is not None for sequence in table.sequences]).tolist():
                table.end(slot)

    # -- preemption

    def candidates(
        self, ledger: BlockManager, known: Callable[[Sequence], int]
    ) -> tuple[list[Sequence], list[Candidate]]:
        """Who could be preempted to free blocks of a ledger, and what that costs. known: tokens that would have to be
        computed again."""
        holders = [(s, held) for s in self.running if (held := s.holding(ledger.rank)) is not None]
        return [s for s, _ in holders], [
            Candidate(s.priority, s.arrival, known(s), len(held.blocks)) for s, held in holders
        ]

    def _at(self, rank: int) -> int:
        return rank - self.ledgers[0].rank

    def _ledger(self, rank: int) -> BlockManager:
        return self.ledgers[self._at(rank)]

    def _table(self, rank: int) -> SlotTable:
        return self.tables[self._at(rank)]


def data_ranks(
    local_ranks: SequenceOf[int],
    ladder: BucketLadder,
    layout: CacheLayout,
    rules: CacheRules | None = None,
    snapshots: WindowStateCache | None = None,
) -> list[DataRank]:
    """The data-parallel ranks made of this process's ranks, `ladder.cp` neighbours each, with empty ledgers."""
    ledgers = [BlockManager(layout.num_blocks, layout.num_slots, layout.block_size, rank) for rank in local_ranks]
    cp, width = ladder.cp, ladder.context_blocks[-1]
    return [
        DataRank(ledgers[at : at + cp], width, rules, snapshots, ladder.drafts) for at in range(0, len(ledgers), cp)
    ]
