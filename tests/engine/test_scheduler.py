"""Scheduling policy, driven without a device."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.scheduler import DECODE, PREFILL, Batch, DataRank, Scheduler, rank_plans
from di_jax.engine.sequence import Sequence, Status
from di_jax.engine.step_plan import DEVICE_TOKEN, FREE_TOKEN, BucketLadder, Chunk
from di_jax.engine.step_policy import MAX_PREFILL_STREAK, Demand, StepPolicy
from di_jax.sampling_params import SamplingParams


class Driven(Scheduler):
    """A scheduler with the engine's policy for the kind of its steps."""

    policy: StepPolicy

    def next(self) -> Batch | None:
        kind = self.policy.choose([Demand(self.can_prefill, self.can_decode)])
        return None if kind is None else self.schedule(kind)

    @property
    def blocks(self) -> BlockManager:
        return self.ledgers[0]


def make_scheduler(
    *,
    rows: int = 128,
    seqs: int = 4,
    tokens: int = 128,
    num_blocks: int = 12,
    context: int = 8,
    dp: int = 1,
    cp: int = 1,
) -> Driven:
    ladder = BucketLadder.derive(max_num_batched_tokens=rows, max_num_seqs=seqs, max_context_blocks=context, cp=cp)
    ledgers = [BlockManager(num_blocks, seqs, 128, rank) for rank in range(dp * cp)]
    ranks = [DataRank(ledgers[d * cp : (d + 1) * cp]) for d in range(dp)]
    scheduler = Driven(ranks, ladder, max_num_batched_tokens=tokens)
    scheduler.policy = StepPolicy()
    return scheduler


def chunks(batch: Batch) -> list[Chunk]:
    return [work.chunk for work in batch.work]


def sequences(batch: Batch) -> list[Sequence]:
    return [work.sequence for work in batch.work]


def sequence(prompt: int, answer: int = 4, name: str = "a", forced: tuple[int, ...] | None = None) -> Sequence:
    ids = [at % 97 for at in range(prompt)]
    return Sequence(name, 0, ids, SamplingParams(temperature=0, forced_token_ids=forced), 7, max_tokens=answer)


def run(scheduler: Scheduler, batch: Batch) -> None:
    """What the engine does with a batch: count it, append a token to what was sampled, end by length."""
    scheduler.computed(batch)
    for chunk, one in zip(chunks(batch), sequences(batch), strict=True):
        if chunk.sample:
            one.output_ids.append(1)
            if len(one.output_ids) >= one.max_tokens:
                scheduler.finish(one, "length")


def counts(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [len(chunk.tokens) for chunk in chunks(batch)]


def test_several_prompts_share_a_step_and_the_last_is_cut_where_the_rows_end() -> None:
    scheduler = make_scheduler()
    for prompt in (33, 20, 90):
        scheduler.add(sequence(prompt))
    batch = scheduler.next()
    # Tiles of 16 rows: 33 tokens take 48, 20 take 32, so 48 rows are left.
    assert batch is not None and batch.kind == PREFILL and counts(batch) == [33, 20, 48]
    assert [c.sample for c in chunks(batch)] == [True, True, False]
    run(scheduler, batch)
    assert [s.status for s in sequences(batch)] == [Status.RUNNING, Status.RUNNING, Status.PREFILL]
    rest = scheduler.next()
    assert rest is not None and rest.kind == PREFILL and counts(rest) == [42]
    assert (chunks(rest)[0].start, chunks(rest)[0].sample) == (48, True)
    assert chunks(rest)[0].tokens == sequences(rest)[0].prompt_ids[48:]
    run(scheduler, rest)
    decode = scheduler.next()
    assert decode is not None and decode.kind == DECODE and counts(decode) == [1, 1, 1]
    assert all(c.tokens == [DEVICE_TOKEN] and c.sample for c in chunks(decode))
    assert [c.start for c in chunks(decode)] == [33, 20, 90]
    assert [c.output_index for c in chunks(decode)] == [1, 1, 1]


def test_the_token_budget_holds_beside_the_rows() -> None:
    scheduler = make_scheduler(rows=256, tokens=130)
    for prompt in (97, 97):
        scheduler.add(sequence(prompt))
    assert counts(scheduler.next()) == [97, 33]


def test_decodes_wait_for_a_few_prefill_steps_at_most() -> None:
    scheduler = make_scheduler(seqs=2, num_blocks=40, context=20)
    scheduler.add(sequence(10, answer=50))
    first = scheduler.next()
    assert first is not None
    run(scheduler, first)
    scheduler.add(sequence(128 * 12))
    kinds = []
    while (batch := scheduler.next()) is not None and len(kinds) < 15:
        kinds.append(batch.kind)
        run(scheduler, batch)
    # The streak counts the first prompt's step too.
    want = [PREFILL] * 3 + [DECODE] + [PREFILL] * 4 + [DECODE] + [PREFILL] * 4 + [DECODE] + [PREFILL]
    assert kinds == want


def test_without_decodes_prompts_run_on() -> None:
    scheduler = make_scheduler(num_blocks=40, context=20)
    scheduler.add(sequence(128 * 10))
    kinds = []
    for _ in range(10):
        batch = scheduler.next()
        assert batch is not None
        kinds.append(batch.kind)
        run(scheduler, batch)
    assert kinds == [PREFILL] * 10


def test_the_first_in_line_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=4)
    big, small = sequence(300, 1), sequence(10, 1, "small")
    holder = sequence(100, 100, "holder")
    for one in (holder, big, small):
        scheduler.add(one)
    batch = scheduler.next()
    assert batch is not None and sequences(batch) == [holder]
    assert (big.status, small.status, small.held) == (Status.WAITING, Status.WAITING, [])
    run(scheduler, batch)
    scheduler.finish(holder, "abort")
    batch = scheduler.next()
    assert batch is not None and sequences(batch) == [big] and big.status is Status.PREFILL


def test_sequences_end_in_any_state() -> None:
    scheduler = make_scheduler(seqs=1)
    running, waiting = sequence(200), sequence(10)
    scheduler.add(running)
    scheduler.add(waiting)
    assert scheduler.next() is not None and running.status is Status.PREFILL
    scheduler.finish(waiting, "abort")
    scheduler.finish(running, "abort")
    scheduler.finish(running, "stop")  # it ended before
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert not scheduler.has_work and scheduler.next() is None
    assert scheduler.blocks.num_free_blocks == 12
    scheduler.blocks.check()


def test_what_can_never_fit_is_told_apart() -> None:
    scheduler = make_scheduler(num_blocks=3, context=8)
    assert scheduler.never_fits(3 * 128) is None
    why = scheduler.never_fits(3 * 128 + 1)
    assert why is not None and "385 tokens, 4 blocks of 128; the engine has 3" in why
    assert make_scheduler(num_blocks=12, context=2).never_fits(300) is not None


def test_forced_tokens_go_with_their_output_index() -> None:
    scheduler = make_scheduler()
    one = sequence(5, 4, forced=(9, -1, 8))
    scheduler.add(one)
    seen = []
    while (batch := scheduler.next()) is not None:
        seen.append(chunks(batch)[0].forced)
        run(scheduler, batch)
    assert seen == [9, FREE_TOKEN, 8, FREE_TOKEN]


def test_a_chunk_that_is_not_sampled_forces_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence(200, 4, forced=(9,)))
    batch = scheduler.next()
    assert batch is not None and not chunks(batch)[0].sample and chunks(batch)[0].forced == FREE_TOKEN


@given(data=st.data())
def test_everything_runs_once_in_order_and_within_the_limits(data: st.DataObject) -> None:
    seqs = data.draw(st.integers(1, 5))
    rows = data.draw(st.sampled_from([128, 256, 512]))
    tokens = data.draw(st.integers(1, rows))
    scheduler = make_scheduler(rows=rows, seqs=seqs, tokens=tokens, num_blocks=data.draw(st.integers(8, 20)))
    sizes = st.tuples(st.integers(1, 700), st.integers(1, 12), st.integers(0, 6))
    arrivals = [(sequence(p, a, str(n)), d) for n, (p, a, d) in enumerate(data.draw(st.lists(sizes, max_size=8)))]
    everything = [one for one, _ in arrivals]
    fed: Counter[str] = Counter()
    admitted: list[Sequence] = []
    streak = steps = 0
    while arrivals or scheduler.has_work:
        while arrivals and (arrivals[0][1] <= steps or not scheduler.has_work):
            scheduler.add(arrivals.pop(0)[0])
        could_decode = any(s.status is Status.RUNNING for s in scheduler.running)
        batch = scheduler.next()
        assert batch is not None and chunks(batch)
        steps += 1
        assert steps < 5000
        streak = streak + 1 if batch.kind == PREFILL and could_decode else 0
        assert streak <= MAX_PREFILL_STREAK
        assert batch.kind == DECODE or sum(counts(batch)) <= tokens
        _, context = scheduler.need(batch)
        rank_plans(scheduler.ladder.bucket(batch.kind == DECODE, *scheduler.need(batch)), batch, [0])
        assert len(scheduler.running) <= seqs
        assert len({c.slot for c in chunks(batch)}) == len(chunks(batch))
        for chunk, one in zip(chunks(batch), sequences(batch), strict=True):
            assert chunk.start == one.num_computed == fed[one.request_id]
            fed[one.request_id] += len(chunk.tokens)
            end = chunk.start + len(chunk.tokens)
            assert -(-end // 128) <= context <= 8
            assert len(one.held[0].blocks) * 128 >= end
            if batch.kind == PREFILL:
                assert chunk.tokens == one.prompt_ids[chunk.start : end]
                assert chunk.sample == (end == len(one.prompt_ids))
            else:
                assert chunk.start == len(one) - 1
            if one not in admitted:
                admitted.append(one)
        scheduler.blocks.check()
        run(scheduler, batch)
    assert admitted == everything
    assert all(s.finish_reason == "length" and len(s.output_ids) == s.max_tokens for s in everything)
    # The last token of an answer is never fed.
    assert all(fed[s.request_id] == len(s) - 1 for s in everything)
    scheduler.blocks.check()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    assert scheduler.blocks.num_free_slots == seqs


@given(data=st.data())
def test_on_a_mesh_everything_runs_once_and_is_freed_everywhere(data: st.DataObject) -> None:
    """Any mix of prompts over data and context ranks, with aborts in any state; every step fits one bucket."""
    dp, cp = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    scheduler = make_scheduler(rows=512, tokens=512, seqs=3, num_blocks=12, dp=dp, cp=cp)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6)), min_size=1, max_size=10))
    everything = [sequence(p, a, str(n)) for n, (p, a) in enumerate(lengths)]
    for one in everything:
        scheduler.add(one)
    fed: Counter[str] = Counter()
    while scheduler.has_work:
        batch = scheduler.next()
        assert batch is not None and batch.work
        bucket = scheduler.ladder.bucket(batch.kind == DECODE, *scheduler.need(batch))
        rank_plans(bucket, batch, range(dp * cp))
        places = [(rank, place) for rank, place, _ in batch.results()]
        assert len(set(places)) == len(places)
        for work in batch.work:
            ranks = sorted(work.chunks)
            if batch.kind == PREFILL:
                assert len(ranks) == cp and ranks[0] % cp == 0 and ranks[-1] - ranks[0] == cp - 1
            else:
                assert len(ranks) == 1
            fed[work.sequence.request_id] += len(work.chunk.tokens)
        run(scheduler, batch)
        if data.draw(st.integers(0, 4)) == 0 and (alive := [s for s in everything if not s.finished]):
            scheduler.finish(data.draw(st.sampled_from(alive)), "abort")
        for ledger in scheduler.ledgers:
            ledger.check()
    assert all(one.finished and not one.held for one in everything)
    assert all(fed[s.request_id] == len(s) - 1 for s in everything if s.finish_reason == "length")
    assert all((r.num_free_blocks, r.num_free_slots) == (12, 3) for r in scheduler.ledgers)


def test_a_settled_prompt_stays_where_the_scarcer_room_is() -> None:
    """Slots count as well as blocks: short answers beside a long one do not pile up on one context rank."""
    scheduler = make_scheduler(seqs=4, num_blocks=128, context=64, rows=512, tokens=512, cp=2)
    scheduler.add(sequence(1000, 3000))
    for n in range(9):
        scheduler.add(sequence(20, 200, str(n)))
    for _ in range(30):
        batch = scheduler.next()
        assert batch is not None
        run(scheduler, batch)
    # A prompt needs a slot on both ranks while it runs: the last one of all cannot be taken.
    assert sum(ledger.num_free_slots for ledger in scheduler.ledgers) <= 1
