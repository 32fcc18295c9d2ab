"""Which kind the next step is, over what processes could do. No device, no clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.config import Config
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.scheduler import DECODE, PREFILL, DataRank, Scheduler
from di_jax.engine.sequence import Sequence, Status
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_policy import (
    MAX_DECODE_STREAK,
    MAX_PREFILL_STREAK,
    Demand,
    StepPolicy,
    VotingPolicy,
    demand_of,
    make_policy,
)
from di_jax.errors import ConfigError
from di_jax.sampling_params import SamplingParams

NOTHING = Demand(False, False, decoding_percent=0)
PROMPT = Demand(True, False, waits=True, decoding_percent=0)
ANSWER = Demand(False, True)
BOTH = Demand(True, True, waits=True)

demands = st.builds(
    Demand,
    can_prefill=st.booleans(),
    can_decode=st.booleans(),
    waits=st.booleans(),
    used_percent=st.integers(0, 100),
    decoding_percent=st.integers(0, 100),
    waited_ms=st.integers(0, 5000),
    prefill_ms=st.integers(0, 500),
)
histories = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(demands, min_size=n, max_size=n), max_size=250))
targets = st.none() | st.integers(1, 2000)


def policies() -> list[StepPolicy]:
    return [StepPolicy(), StepPolicy(ttft_target_ms=1000), StepPolicy(None, 50), StepPolicy(300, 50), VotingPolicy()]


def kinds(policy: StepPolicy, steps: list[list[Demand]]) -> list[str | None]:
    return [policy.choose(step) for step in steps]


@pytest.mark.parametrize("policy", policies(), ids=["plain", "ttft", "itl", "ttft and itl", "vote"])
def test_work_of_one_kind_runs_at_once(policy: StepPolicy) -> None:
    """However the policy weighs one against the other; and a process without work does not count."""
    assert policy.choose([NOTHING, NOTHING]) is None
    for _ in range(3):
        assert policy.choose([NOTHING, PROMPT]) == PREFILL
    for _ in range(3):
        assert policy.choose([ANSWER, NOTHING]) == DECODE
    assert policy.choose([PROMPT, PROMPT]) == PREFILL


@given(steps=histories, ttft=targets, itl=targets, name=st.sampled_from(["default", "deepinfer"]))
def test_all_processes_choose_alike_and_never_an_empty_step(
    steps: list[list[Demand]], ttft: int | None, itl: int | None, name: str
) -> None:
    """Each feeds its own policy what it read off the exchange."""
    own = [make_policy(name, ttft, itl) for _ in range(3)]
    for step in steps:
        told = [Demand.from_numbers(demand.numbers()) for demand in step]
        chosen = {policy.choose(told) for policy in own}
        assert len(chosen) == 1
        kind = chosen.pop()
        possible = {PREFILL: any(d.can_prefill for d in step), DECODE: any(d.can_decode for d in step)}
        assert possible[kind] if kind else not any(possible.values())


@given(steps=histories, ttft=targets, itl=targets)
def test_answers_stall_and_prompts_wait_for_a_bounded_number_of_steps(
    steps: list[list[Demand]], ttft: int | None, itl: int | None
) -> None:
    policy = StepPolicy(ttft, itl)
    stalled = waited = 0
    for step in steps:
        prefill, decode = any(d.can_prefill for d in step), any(d.can_decode for d in step)
        kind = policy.choose(step)
        stalled = stalled + 1 if kind == PREFILL and decode else 0
        waited = waited + 1 if kind == DECODE and prefill else 0
        assert stalled <= MAX_PREFILL_STREAK
        assert waited <= MAX_DECODE_STREAK


@given(steps=histories)
def test_the_vote_lets_a_prompt_through_within_its_longest_interval(steps: list[list[Demand]]) -> None:
    policy, waited = VotingPolicy(), 0
    for step in steps:
        wants = any(d.waits and d.used_percent <= 90 and d.can_prefill for d in step)
        kind = policy.choose(step)
        waited = waited + 1 if kind == DECODE and wants else 0
        assert waited <= VotingPolicy.ANY_INTERVAL


def test_without_targets_prompts_come_first_in_streaks() -> None:
    assert kinds(StepPolicy(), [[BOTH]] * 10) == [*[PREFILL] * 4, DECODE] * 2


def test_with_a_ttft_target_prompts_give_way_until_half_of_it_is_over() -> None:
    policy = StepPolicy(ttft_target_ms=1000)
    early, late = dataclasses.replace(BOTH, waited_ms=499), dataclasses.replace(BOTH, waited_ms=500)
    assert kinds(policy, [[early]] * 5) == [DECODE] * 5
    assert policy.choose([ANSWER, late]) == PREFILL
    assert policy.choose([dataclasses.replace(ANSWER, waited_ms=900), early]) == DECODE, "it has room for no prompt"
    assert policy.choose([early, dataclasses.replace(BOTH, decoding_percent=49)]) == PREFILL, "slots are empty"
    assert policy.choose([ANSWER, PROMPT]) == PREFILL, "a process idles"


def test_with_an_itl_target_prefill_steps_in_a_row_fit_in_it() -> None:
    def slow(ms: int) -> list[Demand]:
        return [BOTH, dataclasses.replace(ANSWER, prefill_ms=ms)]

    for ms, streak in ((0, 4), (10, 4), (20, 2), (50, 1), (400, 1)):
        steps = kinds(StepPolicy(itl_target_ms=50), [slow(ms)] * (streak + 1))
        assert steps == [*[PREFILL] * streak, DECODE], ms


def test_the_vote_counts_decode_steps_between_its_points() -> None:
    """engine.md 2.3: 0 ALL, 70 ALL, 100 ANY, 140 ALL, 200 ANY, 210 ALL."""

    def prefills(step: list[Demand], before: int) -> list[int]:
        """Where, counted in decode steps, `step` would prefill after so many decode steps."""
        found = []
        for count in range(before):
            policy = VotingPolicy()
            assert kinds(policy, [[ANSWER] * len(step)] * count) == [DECODE] * count
            if policy.choose(step) == PREFILL:
                found.append(count)
        return found

    assert prefills([BOTH], 211) == [0, 70, 100, 140, 200, 210]
    assert prefills([BOTH, BOTH], 211) == [0, 70, 100, 140, 200, 210]
    assert prefills([BOTH, ANSWER], 211) == [100, 200]


def test_the_vote_chains_prefills_and_restarts_its_count() -> None:
    policy = VotingPolicy()
    assert kinds(policy, [[BOTH]] * 6) == [PREFILL] * 6
    assert policy.choose([ANSWER]) == DECODE
    assert kinds(policy, [[BOTH]] * 70) == [*[DECODE] * 69, PREFILL]


def test_the_vote_of_a_full_pool_and_the_second_vote() -> None:
    full, fuller = dataclasses.replace(BOTH, used_percent=90), dataclasses.replace(BOTH, used_percent=91)
    assert VotingPolicy().choose([full]) == PREFILL
    assert VotingPolicy().choose([fuller]) == DECODE
    assert VotingPolicy().choose([BOTH, fuller]) == DECODE
    stuck = dataclasses.replace(BOTH, can_prefill=False)
    assert VotingPolicy().choose([stuck, stuck]) == DECODE, "all want, none has work"
    assert VotingPolicy().choose([stuck, BOTH]) == PREFILL


def test_demands_are_exchanged_as_whole_numbers() -> None:
    demand = Demand(True, False, True, 17, 33, 2**40, 12)
    numbers = demand.numbers()
    assert numbers.dtype == np.int32 and numbers.shape == (7,)
    assert Demand.from_numbers(numbers) == dataclasses.replace(demand, waited_ms=2**31 - 1)


def make_scheduler(num_blocks: int = 10, slots: int = 4, ranks: int = 1) -> Scheduler:
    ladder = BucketLadder.derive(max_num_batched_tokens=128, max_num_seqs=slots, max_context_blocks=8, cp=1)
    data_ranks = [DataRank([BlockManager(num_blocks, slots, 128, rank)]) for rank in range(ranks)]
    return Scheduler(data_ranks, ladder, max_num_batched_tokens=128)


def sequence(name: str, prompt: int, answer: int) -> Sequence:
    return Sequence(name, 0, [1] * prompt, SamplingParams(temperature=0), 7, max_tokens=answer)


def run(scheduler: Scheduler, kind: str) -> None:
    """A step: every sampled token is appended, answers end by length."""
    batch = scheduler.schedule(kind)
    scheduler.computed(batch)
    for work in batch.work:
        if work.chunk.sample:
            work.sequence.output_ids.append(1)
            if len(work.sequence.output_ids) >= work.sequence.max_tokens:
                scheduler.finish(work.sequence, "length")


def test_a_demand_says_what_a_scheduler_could_do() -> None:
    scheduler, arrived = make_scheduler(), {"long": 200.0, "next": 30.0, "last": 20.0}

    def demand() -> Demand:
        return demand_of(scheduler, lambda one: arrived[one.request_id], 12.7)

    assert demand() == Demand(False, False, False, 0, 0, 0, 12)
    scheduler.add(sequence("long", 200, 100))
    assert demand() == Demand(True, False, True, 0, 0, 200, 12)
    run(scheduler, PREFILL)
    assert demand() == Demand(True, False, True, 30, 0, 200, 12), "its second chunk waits"
    run(scheduler, PREFILL)
    assert demand() == Demand(False, True, False, 30, 25, 0, 12)
    scheduler.add(sequence("next", 900, 100))
    scheduler.add(sequence("last", 10, 10))
    assert demand() == Demand(False, True, True, 30, 25, 30, 12), "no room for the next, nor past it"


@given(data=st.data())
def test_processes_in_lockstep_finish_everything(data: st.DataObject) -> None:
    """Some idle, some full: every request of every process ends, and no answer stalls longer than the policy says."""
    make = data.draw(st.sampled_from(policies()))
    many = data.draw(st.integers(1, 3))
    schedulers = [
        make_scheduler(data.draw(st.integers(8, 16)), ranks=data.draw(st.integers(1, 2))) for _ in range(many)
    ]
    sizes = st.tuples(st.integers(1, 500), st.integers(1, 30), st.integers(0, 40), st.integers(0, many - 1))
    arrivals = data.draw(st.lists(sizes, max_size=10))
    everything = [(sequence(str(n), p, a), at, where) for n, (p, a, at, where) in enumerate(arrivals)]
    now = stalled = 0
    waiting = list(everything)
    while waiting or any(s.has_work for s in schedulers):
        idle = not any(s.has_work for s in schedulers)
        for arrival in [one for one in waiting if one[1] <= now or idle]:
            waiting.remove(arrival)
            schedulers[arrival[2]].add(arrival[0])
        told = [demand_of(s, lambda one, now=now: 10.0 * now, 5) for s in schedulers]
        kind = make.choose(told)
        assert kind is not None
        stalled = stalled + 1 if kind == PREFILL and any(d.can_decode for d in told) else 0
        assert stalled <= MAX_PREFILL_STREAK or isinstance(make, VotingPolicy)
        for scheduler in schedulers:
            run(scheduler, kind)
        now += 1
        assert now < 3000
    assert all(one.status is Status.FINISHED and len(one.output_ids) == one.max_tokens for one, _, _ in everything)


def test_the_config_names_the_policy() -> None:
    engine = Config.from_dict({"engine": {"policy": "deepinfer"}}).engine
    assert isinstance(make_policy(engine.policy, engine.ttft_target_ms, engine.itl_target_ms), VotingPolicy)
    with pytest.raises(ConfigError, match=r"engine\.policy: deepinfer knows no engine\.ttft_target_ms"):
        Config.from_dict({"engine": {"policy": "deepinfer", "ttft_target_ms": 100}})
    with pytest.raises(ConfigError, match=r"engine\.policy"):
        Config.from_dict({"engine": {"policy": "fifo"}})
    own = make_policy("default", 200.0, 40.0)
    assert (own.ttft_target_ms, own.itl_target_ms) == (200.0, 40.0) and not isinstance(own, VotingPolicy)
