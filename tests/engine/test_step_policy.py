"""Which kind the next step is, over what processes could do. No device, no clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.config import Config
from di_jax.engine.step_policy import (
    COMPLETION,
    DECODE,
    MAX_DECODE_STREAK,
    MAX_PREFILL_STREAK,
    NO_QUOTA,
    PREFILL,
    PROMPT,
    Demand,
    StepPolicy,
    VotingPolicy,
    make_policy,
)
from di_jax.errors import ConfigError

NOTHING = Demand(False, False, decoding_percent=0)
NEW = Demand(True, False, waits=True, decoding_percent=0)
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
    prefill_us=st.integers(0, 500_000),
    decode_us=st.integers(0, 100_000),
    quota=st.integers(1, 2048) | st.just(NO_QUOTA),
)
histories = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(demands, min_size=n, max_size=n), max_size=250))
targets = st.none() | st.integers(1, 2000)


def policies() -> list[StepPolicy]:
    targets = [
        (),
        (1000,),
        (None, 50),
        (300, 50),
        (None, None, COMPLETION),
        (300, 50, COMPLETION),
        (None, None, PROMPT),
    ]
    return [*(StepPolicy(*those) for those in targets), VotingPolicy()]


def kinds(policy: StepPolicy, steps: list[list[Demand]]) -> list[str | None]:
    return [policy.choose(step) for step in steps]


@pytest.mark.parametrize("policy", policies())
def test_work_of_one_kind_runs_at_once(policy: StepPolicy) -> None:
    """However the policy weighs one against the other; and a process without work does not count."""
    assert policy.choose([NOTHING, NOTHING]) is None
    for _ in range(3):
        assert policy.choose([NOTHING, NEW]) == PREFILL
    for _ in range(3):
        assert policy.choose([ANSWER, NOTHING]) == DECODE
    assert policy.choose([NEW, NEW]) == PREFILL


@given(steps=histories, which=st.integers(0, len(policies()) - 1))
def test_all_processes_choose_alike_and_never_an_empty_step(steps: list[list[Demand]], which: int) -> None:
    """Each feeds its own policy what it read off the exchange."""
    own = [policies()[which] for _ in range(3)]
    for step in steps:
        told = [Demand.from_numbers(demand.numbers()) for demand in step]
        chosen = {(policy.choose(told), policy.budget(told)) for policy in own}
        assert len(chosen) == 1
        kind, budget = chosen.pop()
        assert 1 <= budget <= NO_QUOTA
        possible = {PREFILL: any(d.can_prefill for d in step), DECODE: any(d.can_decode for d in step)}
        assert possible[kind] if kind else not any(possible.values())


@given(steps=histories, ttft=targets, itl=targets, engine_type=st.sampled_from(["normal", COMPLETION]))
def test_answers_stall_and_prompts_wait_for_a_bounded_number_of_steps(
    steps: list[list[Demand]], ttft: int | None, itl: int | None, engine_type: str
) -> None:
    policy = StepPolicy(ttft, itl, engine_type)
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
    assert policy.choose([early, dataclasses.replace(BOTH, decoding_percent=50)]) == PREFILL, "slots are empty"
    assert policy.choose([ANSWER, NEW]) == PREFILL, "a process idles"


def test_with_an_itl_target_prefill_steps_in_a_row_fit_in_it() -> None:
    def slow(ms: int, decode_ms: int = 0) -> list[Demand]:
        return [BOTH, dataclasses.replace(ANSWER, prefill_us=1000 * ms, decode_us=1000 * decode_ms)]

    for ms, decode_ms, streak in ((0, 0, 4), (10, 0, 4), (20, 0, 2), (20, 20, 1), (12, 25, 2), (50, 0, 1), (400, 0, 1)):
        steps = kinds(StepPolicy(itl_target_ms=50), [slow(ms, decode_ms)] * (2 * streak + 1))
        assert steps == [*[PREFILL] * streak, DECODE, *[PREFILL] * streak], (ms, decode_ms)


def test_the_quota_is_what_the_decode_step_leaves_of_the_target() -> None:
    assert StepPolicy().quota_s(0.01) is None and VotingPolicy().quota_s(0.01) is None
    policy = StepPolicy(itl_target_ms=50)
    assert policy.quota_s(0.0) == 0.05
    assert policy.quota_s(0.02) == pytest.approx(0.03)
    assert policy.quota_s(0.04) == policy.quota_s(0.9) == pytest.approx(0.0125), "a quarter at least"


def test_the_least_quota_of_those_who_prefill_counts_while_somebody_decodes() -> None:
    def budget(*step: Demand, itl: float | None = 50) -> int:
        policy = StepPolicy(itl_target_ms=itl)
        assert policy.choose(step) == PREFILL
        return policy.budget(step)

    wide, narrow = dataclasses.replace(NEW, quota=900), dataclasses.replace(NEW, quota=300)
    assert budget(wide, narrow, ANSWER) == 300
    assert budget(wide, narrow, NOTHING) == NO_QUOTA, "nobody waits for it"
    assert budget(wide, dataclasses.replace(ANSWER, quota=10)) == 900, "it has nothing to prefill"
    assert budget(BOTH, ANSWER) == NO_QUOTA, "its times are not known yet"
    assert budget(wide, ANSWER, itl=None) == NO_QUOTA
    assert budget(dataclasses.replace(NEW, quota=1), ANSWER) == 1


def test_prefill_steps_in_a_row_share_one_quota() -> None:
    """10 of 40 ms are spent, then 20 and 30; after the decode step the quota is whole again."""
    step = [dataclasses.replace(BOTH, quota=1000, prefill_us=10_000, decode_us=10_000)]
    policy, budgets = StepPolicy(itl_target_ms=50), []
    for _ in range(6):
        if policy.choose(step) == PREFILL:
            budgets.append(policy.budget(step))
    assert budgets == [1000, 750, 500, 250, 1000]


@given(steps=histories, itl=st.integers(1, 500))
def test_budgets_in_a_row_stay_within_the_quota(steps: list[list[Demand]], itl: int) -> None:
    policy = StepPolicy(itl_target_ms=itl)
    for step in steps:
        kind = policy.choose(step)
        budget = policy.budget(step)
        if kind == PREFILL and any(d.can_decode for d in step):
            assert budget == NO_QUOTA or budget <= min(d.quota for d in step if d.can_prefill)


def test_a_completion_engine_lets_answers_go_first() -> None:
    policy = StepPolicy(engine_type=COMPLETION)
    assert kinds(policy, [[BOTH]] * 71) == [*[DECODE] * 70, PREFILL], "MAX_DECODE_STREAK"
    assert kinds(policy, [[BOTH]] * 3) == [DECODE] * 3
    assert policy.choose([NOTHING, NEW]) == PREFILL, "nobody decodes"
    assert policy.choose([ANSWER, NEW]) == PREFILL, "a process idles"
    assert policy.choose([dataclasses.replace(BOTH, decoding_percent=51)]) == DECODE
    assert policy.choose([dataclasses.replace(BOTH, decoding_percent=50)]) == PREFILL
    late = dataclasses.replace(BOTH, waited_ms=500)
    assert StepPolicy(None, None, COMPLETION).choose([late]) == DECODE
    assert StepPolicy(1000, None, COMPLETION).choose([late]) == PREFILL


def test_a_prompt_engine_prefills_step_after_step() -> None:
    policy = StepPolicy(1000, 50, PROMPT)
    step = [dataclasses.replace(NEW, quota=7, prefill_us=10**6)]
    assert kinds(policy, [step] * 20) == [PREFILL] * 20
    assert policy.budget(step) == NO_QUOTA


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
    assert VotingPolicy(0.5).choose([dataclasses.replace(BOTH, used_percent=51)]) == DECODE
    assert VotingPolicy(0.29).max_used_percent == 29
    stuck = dataclasses.replace(BOTH, can_prefill=False)
    assert VotingPolicy().choose([stuck, stuck]) == DECODE, "all want, none has work"
    assert VotingPolicy().choose([stuck, BOTH]) == PREFILL


def test_demands_are_exchanged_as_whole_numbers() -> None:
    demand = Demand(True, False, True, 17, 33, 2**40, 12, 7, 300)
    numbers = demand.numbers()
    assert numbers.dtype == np.int32 and numbers.shape == (9,)
    assert Demand.from_numbers(numbers) == dataclasses.replace(demand, waited_ms=2**31 - 1)
    assert Demand.from_numbers(BOTH.numbers()) == BOTH


@dataclasses.dataclass
class Process:
    """Prompts of so many chunks that wait for a slot or run, and tokens that running answers have to go."""

    slots: int
    waiting: list[list[int]]  # arrival, chunks, tokens
    prompts: list[list[int]] = dataclasses.field(default_factory=list)
    answers: list[int] = dataclasses.field(default_factory=list)

    def demand(self, now: int) -> Demand:
        room = len(self.prompts) + len(self.answers) < self.slots
        first = [arrived for arrived, *_ in (*self.prompts, *self.waiting) if arrived <= now]
        return Demand(
            bool(self.prompts) or (room and bool(first)),
            bool(self.answers),
            bool(first),
            decoding_percent=100 * len(self.answers) // self.slots,
            waited_ms=10 * (now - min(first)) if first else 0,
            prefill_us=5000,
        )

    def run(self, kind: str, now: int) -> None:
        if kind == DECODE:
            self.answers = [tokens - 1 for tokens in self.answers if tokens > 1]
            return
        while self.waiting and self.waiting[0][0] <= now and len(self.prompts) + len(self.answers) < self.slots:
            self.prompts.append(self.waiting.pop(0))
        for prompt in self.prompts[:2]:  # chunks of a step
            prompt[1] -= 1
            if not prompt[1]:
                self.prompts.remove(prompt)
                self.answers += [prompt[2] - 1] if prompt[2] > 1 else []

    @property
    def left(self) -> bool:
        return bool(self.waiting or self.prompts or self.answers)


@given(data=st.data())
def test_processes_in_lockstep_finish_everything(data: st.DataObject) -> None:
    """Some idle, some full: all ends, and no answer stalls longer than the policy says."""
    policy = data.draw(st.sampled_from(policies()))
    requests = st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(1, 30)).map(list)
    crowd = st.lists(requests, max_size=6).map(lambda many: sorted(many, key=lambda one: one[0]))
    processes = [Process(data.draw(st.integers(1, 4)), data.draw(crowd)) for _ in range(data.draw(st.integers(1, 3)))]
    now = stalled = 0
    while any(process.left for process in processes):
        told = [process.demand(now) for process in processes]
        kind = policy.choose(told)
        if kind is not None:
            stalled = stalled + 1 if kind == PREFILL and any(d.can_decode for d in told) else 0
            assert stalled <= MAX_PREFILL_STREAK or isinstance(policy, VotingPolicy)
            for process in processes:
                process.run(kind, now)
        now += 1
        assert now < 5000


def test_the_config_names_the_policy() -> None:
    engine = Config.from_dict({"engine": {"policy": "deepinfer"}}).engine
    assert isinstance(make_policy(engine.policy, engine.ttft_target_ms, engine.itl_target_ms), VotingPolicy)
    with pytest.raises(ConfigError, match=r"engine\.policy: deepinfer knows no engine\.ttft_target_ms"):
        Config.from_dict({"engine": {"policy": "deepinfer", "ttft_target_ms": 100}})
    with pytest.raises(ConfigError, match=r"engine\.policy"):
        Config.from_dict({"engine": {"policy": "fifo"}})
    own = make_policy("default", 200.0, 40.0, engine_type=COMPLETION, watermark=0.5)
    assert (own.ttft_target_ms, own.itl_target_ms) == (200.0, 40.0) and not isinstance(own, VotingPolicy)
    assert own.engine_type == COMPLETION
    vote = make_policy("deepinfer", watermark=0.8)
    assert isinstance(vote, VotingPolicy) and vote.max_used_percent == 80
    with pytest.raises(ValueError, match=r"deepinfer has no vote with engine\.type = prompt"):
        make_policy("deepinfer", engine_type=PROMPT)
