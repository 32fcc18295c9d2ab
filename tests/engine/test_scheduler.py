"""What the scheduler puts into steps, what it gives to whom, and when it takes it back: driven without a device."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.batch import Batch, DecodeBatch
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.data_rank import CacheRules, DataRank
from di_jax.engine.draft_totals import DraftTotals
from di_jax.engine.matching import Matching
from di_jax.engine.results import Results
from di_jax.engine.runner import StepOutput
from di_jax.engine.scheduler import LOOK_AHEAD, PATIENCE_S, Limits, Scheduler
from di_jax.engine.sequence import Request, RequestFailure, Sequence, Status
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.step_plan import FREE_TOKEN, BucketLadder, Chunk, StepPlan
from di_jax.engine.step_policy import DECODE, MAX_PREFILL_STREAK, PREFILL, Demand, StepPolicy
from di_jax.sampling_params import SamplingParams

TOKEN, EOS = 7, 1  # what every step samples, and what it does not
EXACT = CacheRules(look_back=22, replay=False)  # of a window of 16
REPLAY = CacheRules(look_back=22, replay=True, keep_tokens=22)
RINGS = np.ones(4, np.int64)


class Driver:
    """A scheduler, and what the engine does around it: kinds are chosen, steps launched and their results booked."""

    def __init__(
        self,
        *,
        rows: int = 128,
        seqs: int = 4,
        tokens: int = 128,
        num_blocks: int = 12,
        block_size: int = 128,
        context: int = 8,
        dp: int = 1,
        cp: int = 1,
        rules: CacheRules | None = None,
        state_bytes: int = 0,
        max_sum_context: int | None = None,
        async_scheduling: bool = True,
        drafts: int = 0,
    ) -> None:
        keep = rules.keep_tokens if rules is not None and rules.keep_tokens else None
        ladder = BucketLadder.derive(
            max_num_batched_tokens=rows,
            max_num_seqs=seqs,
            max_context_blocks=context,
            cp=cp,
            keep_tokens=keep,
            drafts=drafts,
        )
        self.snapshots = WindowStateCache(state_bytes)
        ledgers = [BlockManager(num_blocks, seqs, block_size, rank) for rank in range(dp * cp)]
        ranks = [DataRank(ledgers[d * cp : (d + 1) * cp], context, rules, self.snapshots, drafts) for d in range(dp)]
        self.scheduler = Scheduler(ranks, ladder, Limits(tokens, max_sum_context, state_bytes > 0))
        self.results = Results(self.scheduler, EOS, self._fail, DraftTotals(), Matching(211))
        self.policy = StepPolicy()
        self.depth = 1 if async_scheduling else 0
        self.flights: deque[tuple[int, Batch | DecodeBatch]] = deque()
        self.now = 100.0
        self.plans: list[StepPlan] = []  # of the step launched last
        self._arrivals = 0

    def _fail(self, request: Request, now: float, failure: RequestFailure) -> None:
        raise AssertionError(failure.message)

    @property
    def ledger(self) -> BlockManager:
        return self.scheduler.ledgers[0]

    def add(self, prompt: int | SequenceOf[int], answer: int = 4, *, n: int = 1, **fields: Any) -> list[Sequence]:
        """The sequences of a request, queued. prompt: its ids, or how many."""
        ids = [3 + at % 97 for at in range(prompt)] if isinstance(prompt, int) else list(prompt)
        priority, name = fields.pop("priority", 0), str(self._arrivals)
        sampling = SamplingParams(temperature=0, n=n, **fields)
        request = Request(name, ids, sampling, 7, arrived=self.now)
        request.sequences = [
            Sequence(
                name,
                index,
                ids,
                sampling,
                7 + index,
                max_tokens=answer,
                priority=priority,
                arrival=self._arrivals,
                request=request,
                keys=self.scheduler.ranks[0].new_keys(sampling.cache_salt),
            )
            for index in range(n)
        ]
        self._arrivals += 1
        self.scheduler.add(request.sequences, self.now)
        return request.sequences

    def choose(self) -> str | None:
        scheduler = self.scheduler
        return self.policy.choose([Demand(scheduler.can_prefill(self.now), scheduler.can_decode)])

    def launch(self, kind: str | None = None, tokens: int | None = None) -> Batch | DecodeBatch | None:
        """Plans a step, and launches it if it has work. None when there is none, or steps in flight have to end."""
        kind = kind or self.choose()
        if kind is None:
            return None
        batch = self.scheduler.schedule(kind, self.now, tokens=tokens, preempt=not self.flights)
        if batch is None or not batch.num_sequences:
            return None
        need = batch.need(self.scheduler.ladder, self.scheduler.ledgers)
        bucket = need.bucket(self.scheduler.ladder, kind == DECODE)
        self.plans = batch.plans(bucket, range(len(self.scheduler.ledgers)))
        if isinstance(batch, DecodeBatch):
            batch.advance(bool(bucket.drafts))
        self.flights.append((self.scheduler.launched(), batch))
        return batch

    def complete(self) -> list[Sequence]:
        """Books the oldest step in flight; the sequences that it ended."""
        number, batch = self.flights.popleft()
        size = 64
        output = StepOutput(np.full(size, TOKEN), np.zeros(size), None, None, None)  # type: ignore[arg-type]
        outputs = {ledger.rank: output for ledger in self.scheduler.ledgers}
        _, ended, _ = self.results.book(batch, outputs, self.now)
        self.scheduler.completed(number)
        self.scheduler.check()
        return ended

    def step(self) -> Batch | DecodeBatch | None:
        """As `Engine.step`; the step that was launched."""
        batch = self.launch()
        while self.flights and (batch is None or len(self.flights) > self.depth):
            self.complete()
        return batch

    def run(self) -> None:
        """Until nothing is left, and everything is free."""
        for _ in range(5000):
            if not self.scheduler.has_work and not self.flights:
                break
            self.step()
        assert not self.scheduler.has_work and not self.flights, "sequences do not get on"
        self.check_free()

    def check_free(self) -> None:
        self.scheduler.check()
        for ledger in self.scheduler.ledgers:
            assert ledger.num_available == ledger.num_blocks and ledger.num_free_slots == ledger.num_slots


def chunks(batch: Batch | DecodeBatch | None) -> list[Chunk]:
    assert isinstance(batch, Batch)
    return [work.chunk for work in batch.work]


def counts(batch: Batch | DecodeBatch | None) -> list[int]:
    return [len(chunk.tokens) for chunk in chunks(batch)]


def sequences(batch: Batch | DecodeBatch | None) -> list[Sequence]:
    assert batch is not None
    if isinstance(batch, DecodeBatch):
        return [sequence for part in batch.parts for sequence in part.sequences]
    return [work.sequence for work in batch.work]


# ---- prompts in steps ----


def test_several_prompts_share_a_step_and_one_is_cut() -> None:
    driver = Driver()
    first, second, third = (driver.add(prompt)[0] for prompt in (33, 20, 300))
    batch = driver.launch()
    # Tiles of 16 rows: 33 tokens take 48, 20 take 32. The third is cut, and a cut prompt's share is of whole blocks.
    assert sequences(batch) == [first, second] and counts(batch) == [33, 20]
    assert third.status is Status.WAITING, "it would get no token of this step"
    assert [c.sample for c in chunks(batch)] == [True, True]
    batch = driver.launch()
    assert sequences(batch) == [third] and counts(batch) == [128] and not chunks(batch)[0].sample
    batch = driver.launch()
    assert counts(batch) == [128] and chunks(batch)[0].start == 128
    batch = driver.launch()
    assert counts(batch) == [44] and chunks(batch)[0].sample
    assert chunks(batch)[0].tokens == third.prompt_ids[256:]
    assert chunks(batch)[0].history == third.prompt_ids[253:256]
    decode = driver.launch()
    assert isinstance(decode, DecodeBatch) and decode.num_tokens == 3
    assert sorted(decode.parts[0].position.tolist()) == [20, 33, 300]


def test_the_token_budget_holds_beside_the_rows() -> None:
    driver = Driver(rows=512, tokens=256)
    for _ in range(3):
        driver.add(200)
    assert counts(driver.launch()) == [128, 128], "the oldest gets half"
    # Steps of 64 rows hold no block, and one of 256 takes as long however few of them are used.
    assert counts(driver.launch(PREFILL, tokens=1)) == [72, 72]
    assert counts(driver.launch()) == [200]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 128), (128, 128), (500, 128), (512, 512), (2000, 512), (9000, 2048)])
def test_a_time_budget_is_spent_on_a_whole_bucket(tokens: int, rows: int) -> None:
    driver = Driver(rows=2048, tokens=2048, num_blocks=64, context=64)
    driver.scheduler.ladder = dataclasses.replace(driver.scheduler.ladder, prefill_rows=(128, 512, 2048), kept_rows=())
    driver.add(5000)
    assert counts(driver.launch(PREFILL, tokens=tokens)) == [rows]


def test_short_prompts_are_served_beside_a_long_one_however_small_the_step() -> None:
    """Steps of one block cannot be split: the prompts take turns."""
    driver = Driver(num_blocks=40, context=32)
    (long,) = driver.add(3000)
    driver.launch(PREFILL)
    short = [driver.add(128, answer=2)[0] for _ in range(2)]
    shared = [sequences(driver.launch(PREFILL)) for _ in range(5)]
    assert shared == [[short[0]], [long], [short[1]], [long], [long]]
    assert [s.status for s in short] == [Status.RUNNING] * 2 and long.num_computed == 4 * 128


@pytest.mark.parametrize("dp", [1, 2])
def test_prompts_of_falling_length_are_taken_in_a_few_at_a_time(dp: int) -> None:
    """Each would take the tokens of the one before it."""
    driver = Driver(rows=2048, tokens=2048, seqs=128, num_blocks=2048, context=16, dp=dp)
    for at in range(200):
        driver.add(1400 - 5 * at, answer=1)
    batch = driver.launch(PREFILL)
    assert sum(counts(batch)) == dp * 2048, "the steps are full"
    assert driver.scheduler.num_running <= dp * 2 + LOOK_AHEAD
    taken_in = Counter(s.status for s in driver.scheduler.running)[Status.PREFILL]
    driver.launch(PREFILL)
    assert driver.scheduler.num_running - taken_in <= dp * 2 + LOOK_AHEAD
    driver.run()


def test_the_sum_of_contexts_holds_but_for_the_first() -> None:
    driver = Driver(rows=512, tokens=512, max_sum_context=150)
    long, *short = (driver.add(prompt)[0] for prompt in (200, 60, 60, 60))
    assert sequences(driver.launch()) == [long]
    assert sequences(driver.launch()) == short[:2]
    assert sequences(driver.launch()) == short[2:]


def test_decodes_wait_for_a_few_prefill_steps_at_most() -> None:
    driver = Driver(seqs=2, num_blocks=40, context=20)
    driver.add(10, answer=50)
    driver.step()
    driver.add(128 * 12)
    kinds = []
    while len(kinds) < 15:
        batch = driver.step()
        assert batch is not None
        kinds.append(batch.kind)
    # The streak counts the first prompt's step too.
    want = [PREFILL] * 3 + [DECODE] + [PREFILL] * 4 + [DECODE] + [PREFILL] * 4 + [DECODE] + [PREFILL]
    assert kinds == want


def test_forced_tokens_go_with_their_output_index() -> None:
    driver = Driver(async_scheduling=False)
    driver.add(200, 4, forced_token_ids=(9, -1, 8))
    seen = []
    while driver.scheduler.has_work:
        driver.step()
        seen.append(int(driver.plans[0].bucket.unpack(driver.plans[0].buffer)["forced"][0]))
    assert seen == [FREE_TOKEN, 9, FREE_TOKEN, 8, FREE_TOKEN], "a chunk that is not sampled forces nothing"


# ---- who comes in ----


def test_a_few_may_pass_one_that_finds_no_room_until_its_patience_ends() -> None:
    driver = Driver(num_blocks=5, seqs=8)
    holder = driver.add(120, 40)[0]
    assert sequences(driver.step()) == [holder]
    big, small = driver.add(128 * 4 - 10)[0], driver.add(10)[0]
    batch = driver.step()
    assert sequences(batch) == [small] and big.status is Status.WAITING
    driver.now += PATIENCE_S + 1
    late = driver.add(10)[0]
    assert not driver.scheduler.can_prefill(driver.now)
    assert driver.choose() == DECODE
    assert not driver.scheduler.schedule(PREFILL, driver.now).num_sequences  # type: ignore[union-attr]
    driver.scheduler.finish(holder, "abort", driver.now)
    driver.run()
    assert len(big.output_ids) == len(late.output_ids) == 4


def test_no_more_than_a_few_pass() -> None:
    driver = Driver(num_blocks=LOOK_AHEAD * 2, seqs=LOOK_AHEAD * 3, rows=512, tokens=512, context=LOOK_AHEAD * 2)
    driver.add(128 * LOOK_AHEAD, 300)
    driver.step(), driver.step(), driver.step()
    big = [driver.add(128 * (LOOK_AHEAD + 1))[0] for _ in range(LOOK_AHEAD)]
    small = driver.add(5)[0]
    assert driver.scheduler.can_prefill(driver.now)
    driver.scheduler.finish(small, "abort", driver.now)
    big.append(driver.add(128 * (LOOK_AHEAD + 1))[0])
    driver.add(5)
    assert not driver.scheduler.can_prefill(driver.now)
    assert not driver.launch(PREFILL) and all(one.status is Status.WAITING for one in big)


@given(
    blocks=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    waited=st.lists(st.sampled_from([0.0, 5.0, 11.0]), min_size=14, max_size=14),
    held=st.integers(0, 11),
    slots=st.integers(1, 3),
)
def test_a_prefill_has_work_exactly_if_it_says_so(
    blocks: list[int], waited: list[float], held: int, slots: int
) -> None:
    driver = Driver(num_blocks=12, context=12, seqs=slots, block_size=16, tokens=16)
    if held:
        driver.add(16 * held, 2)
        while driver.scheduler.ranks[0].prompts or driver.scheduler.waiting:
            driver.step()
    begin = driver.now
    for count, ago in zip(blocks, waited, strict=False):
        driver.now = begin + 20 - ago
        driver.add(16 * count)
    driver.now = begin + 20
    says = driver.scheduler.can_prefill(driver.now)
    assert says == bool(driver.scheduler.schedule(PREFILL, driver.now).num_sequences)  # type: ignore[union-attr]


def test_the_watermark_keeps_prompts_out_while_something_runs() -> None:
    rules = dataclasses.replace(EXACT, watermark=0.5)
    driver = Driver(num_blocks=10, rows=1024, tokens=1024, rules=rules)
    driver.add(128 * 6, 20)
    driver.step()
    driver.add(10)
    assert not driver.scheduler.can_prefill(driver.now)
    driver.run()
    alone = driver.add(128 * 8 - 8, 8)[0]
    assert sequences(driver.launch()) == [alone], "more than the watermark allows, but nothing else runs"


def test_what_can_never_fit_is_told_apart() -> None:
    scheduler = Driver(num_blocks=3).scheduler
    assert scheduler.never_fits(3 * 128) is None
    why = scheduler.never_fits(3 * 128 + 1)
    assert why is not None and "385 tokens, 4 blocks of 128; the engine has 3" in why
    assert Driver(num_blocks=12, context=2).scheduler.never_fits(300) is not None


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    driver = Driver(dp=2, rules=REPLAY, rows=512, tokens=512)
    first = driver.add(300)[0]
    other = driver.add([200] * 300)[0]
    driver.launch()
    homes = first.held[0].rank, other.held[0].rank
    assert sorted(homes) == [0, 1], "each goes where less is to be done"
    driver.run()
    again, another = driver.add(300)[0], driver.add([200] * 300)[0]
    driver.launch()
    assert (again.held[0].rank, another.held[0].rank) == homes
    assert again.num_cached_tokens == another.num_cached_tokens == 256


# ---- what is given back, and when ----


def test_sequences_end_in_any_state_and_keep_blocks_until_their_steps_are_complete() -> None:
    driver = Driver(seqs=1)
    running, waiting = driver.add(200)[0], driver.add(10)[0]
    assert driver.launch() and running.status is Status.PREFILL
    driver.scheduler.finish(waiting, "abort", driver.now)
    driver.scheduler.finish(running, "abort", driver.now)
    driver.scheduler.finish(running, "stop", driver.now)  # it ended before
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert not driver.scheduler.has_work and driver.choose() is None
    driver.scheduler.check()
    assert driver.ledger.num_free_blocks == 10 and not driver.ledger.num_free_slots, "the step may still write"
    driver.complete()
    driver.check_free()


def test_what_ends_while_the_next_step_is_in_flight_waits_for_it() -> None:
    driver = Driver()
    short, long = driver.add(10, 2)[0], driver.add(10, 9)[0]
    driver.launch()  # samples the first tokens
    driver.launch()  # the second ones
    driver.launch()  # of the long one alone: the short one's last step was launched
    assert [len(part.slots) for part in driver.flights[-1][1].parts] == [1]  # type: ignore[union-attr]
    driver.complete()
    assert driver.complete() == [short]
    driver.scheduler.finish(long, "stop", driver.now)
    held = driver.ledger.num_held_blocks
    assert held == 2, "the third step is not seen complete: both sequences were held when it was launched"
    driver.complete()
    driver.check_free()


def test_a_prompt_leaves_other_context_ranks_with_its_last_step() -> None:
    driver = Driver(cp=2, rows=256, tokens=256)
    one = driver.add(200)[0]
    driver.launch()
    assert [ledger.num_held_blocks for ledger in driver.scheduler.ledgers] == [2, 2]
    assert len(one.held) == 1 and one.status is Status.RUNNING
    driver.launch()
    driver.complete()
    assert sorted(ledger.num_held_blocks for ledger in driver.scheduler.ledgers) == [0, 2]
    driver.run()


def test_a_reset_frees_everything() -> None:
    driver = Driver(rules=EXACT, state_bytes=100)
    many = [driver.add(150, 9)[0] for _ in range(3)]
    waiting = driver.add(128 * 8 - 9)[0]
    for _ in range(4):
        driver.step()
    driver.scheduler.finish(many[0], "abort", driver.now)
    driver.flights.clear()
    driver.scheduler.reset()
    for one in many:
        driver.scheduler.finish(one, None, driver.now)
    driver.check_free()
    assert driver.ledger.num_free_blocks == 12, "nothing is cached: the device holds nothing"
    driver.run()
    assert len(waiting.output_ids) == 4


# ---- answers to one prompt ----


def test_answers_to_one_prompt_share_its_full_blocks() -> None:
    driver = Driver(rows=512, tokens=512)
    parent, *children = driver.add(300, 4, n=3)
    batch = driver.launch()
    assert sequences(batch) == [parent, *children] and counts(batch) == [300, 0, 0]
    assert all(chunk.sample for chunk in chunks(batch)) and len({chunk.slot for chunk in chunks(batch)}) == 3
    assert [chunk.seed for chunk in chunks(batch)] == [7, 8, 9]
    assert [chunk.samples_of for chunk in driver.plans[0].chunks] == [None, 0, 0]
    blocks = parent.held[0].blocks
    for child in children:
        assert child.held[0].blocks[:2] == blocks[:2] and child.held[0].blocks[2] not in blocks
        assert child.status is Status.RUNNING and child.num_cached_tokens == 300
    assert driver.ledger.num_held_blocks == 5
    chores = driver.scheduler.chores
    assert [move[1:] for move in chores.block_copies] == [(blocks[2], c.held[0].blocks[2]) for c in children]
    assert [move[1:] for move in chores.slot_copies] == [(parent.held[0].slot, c.held[0].slot) for c in children]
    decode = driver.launch()
    assert isinstance(decode, DecodeBatch) and decode.num_tokens == 3
    driver.run()
    assert all(len(one.output_ids) == 4 for one in (parent, *children))


def test_nothing_is_copied_of_a_prompt_of_whole_blocks() -> None:
    driver = Driver(rows=512, tokens=512)
    parent, child = driver.add(256, 4, n=2)
    driver.launch()
    assert parent.held[0].blocks == child.held[0].blocks and not driver.scheduler.chores.block_copies
    driver.run()


def test_answers_that_find_no_room_wait_and_find_the_prompt_cached() -> None:
    driver = Driver(seqs=2, rows=512, tokens=512, rules=REPLAY)
    parent, forked, third = driver.add(300, 9, n=3)
    assert driver.scheduler.num_waiting == 3
    assert sequences(driver.launch()) == [parent, forked]
    assert third.status is Status.WAITING and driver.scheduler.num_waiting == 1
    driver.run()
    assert third.num_cached_tokens == 256 and len(third.output_ids) == 9


def test_answers_of_an_aborted_prompt_go_on_without_it() -> None:
    driver = Driver(rows=512, tokens=128)
    parent, child = driver.add(300, 3, n=2)
    driver.step()
    driver.scheduler.finish(parent, "abort", driver.now)
    driver.run()
    assert len(child.output_ids) == 3


# ---- preemption ----


def crowd(**settings: Any) -> tuple[Driver, list[Sequence]]:
    """Three sequences of two blocks each that fill the pool and will need a third block."""
    driver = Driver(num_blocks=6, block_size=16, rows=128, tokens=128, context=6, **settings)
    return driver, [driver.add(30, 20)[0] for _ in range(3)]


def test_the_youngest_gives_way_and_continues() -> None:
    driver, many = crowd(rules=dataclasses.replace(EXACT, watermark=1.0, prefix_caching=False))
    driver.step()
    assert [one.status for one in many] == [Status.RUNNING, Status.RUNNING, Status.RUNNING]
    while not driver.scheduler.is_short:
        driver.step()
    assert driver.flights and driver.scheduler.schedule(DECODE, driver.now) is None, "a step is in flight"
    while driver.flights:
        driver.complete()
    known = list(many[2].output_ids)
    batch = driver.launch(DECODE)
    assert sequences(batch) == many[:2]
    assert many[2].status is Status.WAITING and many[2].num_preemptions == 1 and not many[2].held
    assert (driver.scheduler.preemptions, many[2].num_computed) == (1, 0)
    driver.run()
    assert [len(one.output_ids) for one in many] == [20] * 3 and many[2].output_ids[: len(known)] == known


def test_a_preempted_sequence_computes_all_its_tokens_again() -> None:
    driver, many = crowd(rules=dataclasses.replace(EXACT, watermark=1.0, prefix_caching=False))
    while not many[2].num_preemptions:
        driver.step()
    later = driver.add(5, 1)[0]
    tokens = many[2].prompt_ids + many[2].output_ids
    while many[2].status is Status.WAITING:
        batch = driver.step()
    assert isinstance(batch, Batch) and later.output_ids, "the small one passed it"
    work = next(work for work in batch.work if work.sequence is many[2])
    assert work.chunk.tokens == tokens and work.chunk.output_index == len(many[2].output_ids) and work.chunk.sample
    driver.run()


def test_only_sequences_that_hold_blocks_where_they_are_short_give_way() -> None:
    """Answers on another context rank would be computed again for nothing."""
    driver = Driver(num_blocks=8, block_size=16, rows=256, tokens=256, context=8, cp=2, seqs=8)
    many = [driver.add(14 if at % 2 else 30, 90)[0] for at in range(8)]
    before = 0
    while driver.scheduler.has_work:
        held = {one: [holding.rank for holding in one.held] for one in many if one.held}
        short = {
            ledger.rank
            for rank in driver.scheduler.ranks
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True)
            if len(table.short(table.ready(), 16)) > ledger.num_available
        }
        driver.step()
        gone = [one for one in held if one.status is Status.WAITING]
        assert all(short.intersection(held[one]) for one in gone)
        before += len(gone)
    assert before > 3, "nobody was preempted: the test shows nothing"


def test_the_oldest_of_the_most_important_class_runs_to_its_end() -> None:
    driver = Driver(num_blocks=8, block_size=16, rows=256, tokens=256, context=8, seqs=6)
    ordinary = [driver.add(20, 60)[0] for _ in range(3)]
    driver.step()
    vip = [driver.add(20, 60, priority=-1)[0] for _ in range(3)]
    driver.run()
    assert not vip[0].num_preemptions and all(len(one.output_ids) == 60 for one in ordinary + vip)
    assert driver.scheduler.preemptions > 2


# ---- prefixes ----


def test_a_hit_is_computed_from_its_snapshot_or_a_block_before_it() -> None:
    driver = Driver(rules=EXACT, state_bytes=1000, rows=512, tokens=512)
    first = driver.add(300)[0]
    driver.run()
    assert first.keys is not None
    missed = driver.add(300)[0]
    driver.run()
    assert missed.num_cached_tokens == 0, "without replay and without window state nothing is a hit"
    assert driver.snapshots.put(first.keys.keys[0], RINGS)
    hit = driver.add(300)[0]
    batch = driver.launch()
    assert (hit.num_cached_tokens, chunks(batch)[0].start, chunks(batch)[0].cached) == (128, 128, 128)
    assert [(rank, slot) for rank, slot, _ in driver.scheduler.chores.restores] == [(0, hit.held[0].slot)]
    assert chunks(batch)[0].history == hit.prompt_ids[125:128]
    driver.run()

    replayed = Driver(rules=REPLAY, rows=512, tokens=512)
    replayed.add(300)
    replayed.run()
    again = replayed.add(300)[0]
    (chunk,) = chunks(replayed.launch())
    assert (again.num_cached_tokens, chunk.start, chunk.window_start, chunk.cached) == (256, 128, 128, 256)
    assert chunk.decoder_start == 300 - 22 and replayed.scheduler.replays == 1
    assert not replayed.scheduler.chores.restores
    replayed.run()


def test_decoder_rows_begin_where_the_kept_ones_do_or_the_prefill_does() -> None:
    driver = Driver(rules=dataclasses.replace(REPLAY, keep_tokens=200), rows=512, tokens=512)
    driver.add(300)
    driver.run()
    driver.add(300)
    (chunk,) = chunks(driver.launch())
    assert (chunk.start, chunk.decoder_start) == (128, 128), "below it nothing is computed"
    plain = Driver(rules=dataclasses.replace(REPLAY, keep_tokens=0), rows=512, tokens=512)
    plain.add(300)
    plain.run()
    plain.add(300)
    (chunk,) = chunks(plain.launch())
    assert (chunk.start, chunk.window_start, chunk.decoder_start) == (128, 128, 128)


def test_window_state_is_asked_for_where_a_prompt_could_be_continued() -> None:
    driver = Driver(rules=EXACT, state_bytes=1000, rows=512, tokens=512)
    one = driver.add(400, 200)[0]
    ends: list[int] = []
    while driver.scheduler.has_work:
        if driver.launch():
            assert all(owner is one for _, _, owner, _ in driver.scheduler.chores.snapshots)
            ends += [end for *_, end in driver.scheduler.chores.snapshots]
        while driver.flights:
            driver.complete()
    # An equal prompt could hit 256, a longer one 384; 512 is crossed while it decodes.
    assert ends == [256, 384, 512]
    replay = Driver(rules=REPLAY, state_bytes=1000, rows=512, tokens=128)
    replay.add(400)
    ends = []
    while replay.scheduler.has_work:
        if replay.step():
            ends += [end for *_, end in replay.scheduler.chores.snapshots]
    assert ends == [384], "with replay at the last boundary of a prompt alone"
    nowhere = Driver(rules=EXACT, rows=512, tokens=512)
    nowhere.add(400, 200)
    assert counts(nowhere.launch()) == [400] and not nowhere.scheduler.chores.snapshots


def test_blocks_of_an_answer_are_found_by_the_next_turn() -> None:
    driver = Driver(rules=REPLAY, rows=512, tokens=512)
    one = driver.add(100, 300)[0]
    driver.run()
    two = driver.add(one.prompt_ids + one.output_ids + [9] * 100)[0]
    driver.launch()
    assert two.num_cached_tokens == 384 and driver.ledger.num_held_blocks == 4, "the last token was never fed"


def test_blocks_are_found_only_when_their_step_is_complete() -> None:
    driver = Driver(rules=REPLAY, rows=512, tokens=512)
    driver.add(300)
    driver.launch()
    early = driver.add(300)[0]
    driver.launch(PREFILL)
    assert early.num_cached_tokens == 0
    driver.complete()
    late = driver.add(300)[0]
    driver.launch(PREFILL)
    assert late.num_cached_tokens == 256
    driver.run()


def test_a_salt_keeps_prefixes_apart() -> None:
    driver = Driver(rules=REPLAY, rows=512, tokens=512)
    for salt, found in (("a", 0), ("b", 0), (None, 0), ("a", 256), ("", 0), (None, 256)):
        one = driver.add(300, cache_salt=salt)[0]
        driver.run()
        assert one.num_cached_tokens == found


# ---- everything together ----


@given(data=st.data())
def test_everything_runs_once_in_order_and_within_the_limits(data: st.DataObject) -> None:
    seqs, rows = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([128, 256, 512]))
    tokens = data.draw(st.integers(128, rows))
    driver = Driver(
        rows=rows,
        seqs=seqs,
        tokens=tokens,
        num_blocks=data.draw(st.integers(8, 20)),
        async_scheduling=data.draw(st.booleans()),
    )
    sizes = st.tuples(st.integers(1, 700), st.integers(1, 12), st.integers(0, 6), st.sampled_from([1, 1, 3]))
    arrivals = data.draw(st.lists(sizes, max_size=8))
    everything: list[Sequence] = []
    fed: Counter[tuple[str, int]] = Counter()
    streak = steps = 0
    scheduler = driver.scheduler
    while arrivals or scheduler.has_work or driver.flights:
        while arrivals and (arrivals[0][2] <= steps or not scheduler.has_work):
            prompt, answer, _, n = arrivals.pop(0)
            everything += driver.add(prompt, answer, n=n)
        could_decode = scheduler.can_decode
        batch = driver.launch()
        steps += 1
        assert steps < 5000
        if batch is not None:
            streak = streak + 1 if batch.kind == PREFILL and could_decode else 0
            assert streak <= MAX_PREFILL_STREAK
            assert scheduler.num_running <= seqs
            if isinstance(batch, Batch):
                assert 0 < sum(counts(batch)) <= tokens
                assert len({c.slot for c in chunks(batch)}) == len(chunks(batch))
                for work in batch.work:
                    one, chunk = work.sequence, work.chunk
                    assert one.num_preemptions or chunk.start == fed[one.request_id, one.index] or work.parent
                    fed[one.request_id, one.index] = work.end
                    assert chunk.tokens == ([] if work.parent else one.tokens(chunk.start, work.end)) or work.parent
                    assert chunk.sample == (work.end == one.goal)
                    assert len(chunk.blocks) * 128 >= work.end
            else:
                (part,) = batch.parts
                for one, position in zip(part.sequences, part.position.tolist(), strict=True):
                    assert position == fed[one.request_id, one.index]
                    fed[one.request_id, one.index] += 1
        while driver.flights and (batch is None or len(driver.flights) > driver.depth):
            driver.complete()
    assert all(s.finish_reason == "length" and len(s.output_ids) == s.max_tokens for s in everything)
    # The last token of an answer is never fed.
    assert all(fed[s.request_id, s.index] == len(s) - 1 for s in everything)
    driver.check_free()


@given(data=st.data())
def test_on_a_mesh_everything_runs_once_and_is_freed_everywhere(data: st.DataObject) -> None:
    """Any mix of prompts over data and context ranks, with aborts in any state; every step fits one bucket."""
    dp, cp = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    driver = Driver(rows=512, tokens=512, seqs=3, num_blocks=12, dp=dp, cp=cp)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6)), min_size=1, max_size=10))
    everything = [driver.add(prompt, answer)[0] for prompt, answer in lengths]
    steps = 0
    while driver.scheduler.has_work or driver.flights:
        batch = driver.launch()
        steps += 1
        assert steps < 2000
        if isinstance(batch, Batch):
            places = [(rank, place) for rank, place, _ in batch.results()]
            assert len(set(places)) == len(places)
            for work in batch.work:
                ranks = sorted(work.chunks)
                assert len(ranks) == cp and ranks[0] % cp == 0 and ranks[-1] - ranks[0] == cp - 1
        elif batch is not None:
            assert len({part.rank for part in batch.parts}) == len(batch.parts)
        if data.draw(st.integers(0, 4)) == 0 and (alive := [s for s in everything if not s.finished]):
            driver.scheduler.finish(data.draw(st.sampled_from(alive)), "abort", driver.now)
            driver.scheduler.check()
        while driver.flights and (batch is None or len(driver.flights) > driver.depth):
            driver.complete()
    assert all(one.finished and not one.held for one in everything)
    driver.check_free()


def test_a_settled_prompt_stays_where_the_scarcer_room_is() -> None:
    """Slots count as well as blocks: short answers beside a long one do not pile up on one context rank."""
    driver = Driver(seqs=4, num_blocks=128, context=64, rows=512, tokens=512, cp=2)
    driver.add(1000, 3000)
    for _ in range(9):
        driver.add(20, 200)
    for _ in range(30):
        driver.step()
    # A prompt needs a slot on both ranks while it runs: the last one of all cannot be taken.
    assert sum(ledger.num_free_slots for ledger in driver.scheduler.ledgers) <= 1


def test_prompts_that_settle_in_one_step_spread_over_the_context_ranks() -> None:
    driver = Driver(seqs=8, num_blocks=16, rows=512, tokens=512, cp=2)
    many = [driver.add(40, 20)[0] for _ in range(6)]
    driver.launch()
    assert Counter(one.held[0].rank for one in many) == {0: 3, 1: 3}
    driver.run()


# ---- drafts ----


def with_drafts(*prompts: int, answer: int = 50, **fields: Any) -> Driver:
    """Answers that decode, each of which has five drafts to verify; nothing is in flight."""
    driver = Driver(rows=512, tokens=512, drafts=5, async_scheduling=False, **fields)
    for prompt in prompts:
        driver.add(prompt, answer)
    while driver.scheduler.ranks[0].num_running < len(prompts) or driver.scheduler.ranks[0].prompts:
        driver.launch(PREFILL)
        driver.complete()
    (table,) = driver.scheduler.ranks[0].tables
    table.drafted[:] = True
    return driver


def caps(batch: Batch | DecodeBatch | None) -> list[int]:
    """By prompt length."""
    assert isinstance(batch, DecodeBatch)
    (part,) = batch.parts
    found: list[int] = part.caps[np.argsort([len(s.prompt_ids) for s in part.sequences])].tolist()
    return found


def test_drafts_get_blocks_where_there_are_some() -> None:
    driver = with_drafts(10, 125, 126, num_blocks=4)
    batch = driver.launch(DECODE)
    assert driver.ledger.num_available == 0
    # One of the two that may cross the end of their block finds another, the other stays inside its own.
    assert caps(batch) in ([5, 5, 1], [5, 2, 5]) and not driver.scheduler.preemptions
    full = with_drafts(10, 125, 126, num_blocks=3)
    assert caps(full.launch(DECODE)) == [5, 2, 1] and not full.scheduler.preemptions


def test_what_may_have_been_accepted_counts_as_fed() -> None:
    """The step in flight may have come to the end of the block: the next one needs another."""
    driver = with_drafts(122, num_blocks=2)
    (table,) = driver.scheduler.ranks[0].tables
    assert caps(driver.launch(DECODE)) == [5] and driver.ledger.num_available == 1
    assert not driver.scheduler.is_short
    table.drafted[:] = True
    batch = driver.launch(DECODE)
    assert caps(batch) == [5] and driver.ledger.num_available == 0, "122 + 6 + 5 is in the second block"
    tight = with_drafts(122, num_blocks=1, answer=6)
    assert caps(tight.launch(DECODE)) == [4], "its answer ends at 127"
    assert not tight.scheduler.is_short


def test_the_control_needs_the_block_before_its_row() -> None:
    driver = with_drafts(122, num_blocks=1, context=1, answer=6)
    (table,) = driver.scheduler.ranks[0].tables
    table.capacity[:] = 200
    table.ahead[:] = 6
    assert driver.scheduler.is_short


def test_window_state_is_asked_for_where_a_step_may_cross() -> None:
    fields: dict[str, Any] = {"rules": EXACT, "state_bytes": 1000}
    for prompt, ends in ((121, []), (122, [128]), (127, [128]), (128, [])):
        driver = with_drafts(prompt, **fields)
        driver.launch(DECODE)
        assert [end for *_, end in driver.scheduler.chores.snapshots] == ends, prompt
    driver = with_drafts(118, **fields)
    driver.launch(DECODE)
    assert not driver.scheduler.chores.snapshots
    (table,) = driver.scheduler.ranks[0].tables
    table.drafted[:] = True
    driver.launch(DECODE)
    # At 119 to 124, and up to five rows more.
    assert [end for *_, end in driver.scheduler.chores.snapshots] == [128]
