"""Steps that verify drafts, as the host runs them: answers are those without drafts; no budget sees what is too new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import DeviceError, Drafting, FakeDevice, FakeVerification, packed_draft
from fake_engine import Setup
from fake_session import Letters, Session, ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_properties import TEXT, Arrival, Scenario, draftings, greedy, play, scenarios

from di_jax.engine import matching, verification
from di_jax.engine.batch import DecodeBatch, DecodePart
from di_jax.engine.cache_chores import CacheChores
from di_jax.engine.extra_sampling import NEUTRAL, OF_REQUEST, ExtraSampling
from di_jax.engine.results import Results
from di_jax.engine.runtime_estimator import LEAST_PER_BUCKET
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request, Sequence, Status
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.speculation import FRACTIONS, Began, Outlook, Speculation
from di_jax.engine.speculative_programs import DRAFT_COLUMNS
from di_jax.engine.step_output import StepOutput
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_profile import StepProfile
from di_jax.engine.verification import HISTORY, JUDGED_STEPS, LEAST_PAUSE, TELLING_BLOCKS, RateLedger, Round
from di_jax.sampling_params import SamplingParams

ALL = Drafting(5, right=1.0, confidence=0.9)
NONE = Drafting(5, right=0.0, ids=(1,), confidence=0.9)  # the end token, which nobody here draws
OFF = {"replay": {"decoder": "off", "encoder": "off"}}
ROOMY = Setup(block_size=16, num_blocks=99, num_slots=4, max_model_len=160, tokens=128, config=OFF, varlen=False)


def few(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


def with_drafts(scenario: Scenario, drafting: Drafting | None) -> Scenario:
    return dataclasses.replace(scenario, setup=dataclasses.replace(scenario.setup, drafting=drafting))


# ---- answers ----


@few(25)
@given(
    scenario=scenarios(("off", "off"), ("compact", "on")),
    drafting=draftings(),
    curve=st.sampled_from(["flat", "stairs", "steep"]),
)
def test_answers_are_those_without_drafts(scenario: Scenario, drafting: Drafting, curve: str) -> None:
    """`Session` compares every token with the model; here every scenario drafts."""
    setup = dataclasses.replace(scenario.setup, drafting=drafting, curve=curve)
    play(dataclasses.replace(scenario, setup=setup))


@pytest.mark.slow
@few(600)
@given(
    scenario=scenarios(*((decoder, encoder) for decoder in ("off", "mask", "compact") for encoder in ("off", "on"))),
    drafting=draftings(),
)
def test_many_more_with_drafts(scenario: Scenario, drafting: Drafting) -> None:
    play(with_drafts(scenario, drafting))


@few(10)
@given(scenario=scenarios(("off", "off"), mesh=False), drafting=draftings())
def test_what_ends_answers_ends_them_at_the_same_token(scenario: Scenario, drafting: Drafting) -> None:
    """Stop ids inside a block, max_tokens and the longest context; without what depends on time."""
    arrivals = tuple(
        dataclasses.replace(
            one,
            at=0,
            abort=None,
            follows=None,
            sampling=dataclasses.replace(one.sampling, deadline_s=None, stop_token_ids=tuple(range(40, 80))),
        )
        for one in scenario.arrivals
    )
    config = {**scenario.setup.config, "max_waiting": None}
    setup = dataclasses.replace(scenario.setup, config=config)
    scenario = dataclasses.replace(scenario, setup=setup, arrivals=arrivals, jumps=(), faults=())
    told = [
        [
            (s.output_ids, s.logprobs, s.finish_reason, s.stop_reason, s.tops)
            for request in play(with_drafts(scenario, each)).requests
            for s in request.sequences
        ]
        for each in (None, drafting)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_right_drafts_are_all_kept_and_others_are_not(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {}
    for drafting in (ALL, NONE, None):
        config = {**OFF, "async_scheduling": asynchronous}
        session = Session(dataclasses.replace(ROOMY, config=config, drafting=drafting), monkeypatch)
        session.add(ids(20), greedy(max_tokens=61))
        session.finish()
        device, (answer,) = session.device, session.requests[0].sequences
        steps[drafting] = sum(call[0] in ("verify", "execute") and call[1].decode for call in device.calls)
        assert device.accepted == (device.verified if drafting is ALL else 0)
        assert answer.accepted == device.accepted and answer.verified == device.verified
        if drafting is not None:
            assert device.verified > 40 and answer.drafted % 5 == 0
            assert sum(call[0] == "draft" for call in device.calls) == 1 + steps[drafting]
    # 60 tokens, six a step; one more step is launched before the host knows that the answer is full.
    assert steps[ALL] == 10 + asynchronous and steps[NONE] == steps[None] == 60


def test_several_tokens_of_a_step_are_seen_by_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window state of an answer's last boundary is kept, and is that boundary's."""
    setup = dataclasses.replace(ROOMY, drafting=Drafting(5, right=0.9), window=16)
    session = Session(setup, monkeypatch)
    first = session.add(ids(20), greedy(max_tokens=70))
    session.finish()
    known = first.prompt_ids + first.sequences[0].output_ids
    kept = session.kept
    assert kept == 1 + 4, "the prompt's boundary, and those of the answer at 32 to 80"
    second = session.add(known + ids(30), greedy(max_tokens=10))
    session.finish()
    assert second.sequences[0].num_cached_tokens == 80 and session.restored == 1


def test_words_are_matched_with_drafts_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, accepted = [], []
    for drafting in (None, Drafting(5, right=0.0, ids=Letters.IDS)):
        for asynchronous in (True, False):
            config = {**OFF, "async_scheduling": asynchronous}
            setup = dataclasses.replace(ROOMY, drafting=drafting, config=config)
            session = Session(setup, monkeypatch)
            for number in range(6):
                matcher = Letters if number % 3 else None
                session.add(ids(20, number), greedy(max_tokens=40, temperature=1.0, seq_seed=number), matcher=matcher)
            session.finish()
            answers.append([request.sequences[0].output_ids for request in session.requests])
            accepted.append(session.device.accepted)
    assert all(each == answers[0] for each in answers)
    assert accepted[:2] == [0, 0] and min(accepted[2:]) > 20


def test_results_that_came_before_a_step_failed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a matcher the step before is handled while the next one is launched."""
    setup = dataclasses.replace(ROOMY, num_slots=1, drafting=Drafting(2, right=0.5, ids=Letters.IDS))
    session = Session(setup, monkeypatch)
    lost = session.add(ids(5), greedy(max_tokens=30), matcher=Letters)
    waits = session.add(ids(5, 1), greedy(max_tokens=4))
    for _ in range(4):
        session.step()
    session.device.fail_launch, session.device.fail_program = DeviceError("accept"), "accept"
    assert session.step() is None and lost.failure is not None
    report = session.step()
    assert report is not None and report.kind == "decode" and lost in report.requests
    session.finish()
    assert len(waits.sequences[0].output_ids) == 4


# ---- what a budget may see ----


def until_seen(calls: list[Any], draft: int) -> list[Any]:
    """What was launched before the second step that verifies after a draft: the first that may know its confidences."""
    at = [index for index, call in enumerate(calls) if call[0] == "draft"][draft]
    verified = [index for index, call in enumerate(calls) if call[0] == "verify" and index > at]
    return calls[: verified[1]] if len(verified) > 1 else calls


def falsify(scenario: Scenario, draft: int) -> tuple[bool, bool]:
    """Runs a scenario twice, the second time the host is told other confidences of one draft. Whether all is launched
    alike until they may be seen, and whether something was launched otherwise later. Budgets see one block alone, so
    that it weighs more."""
    calls = []
    for falsified in (None, draft):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "HISTORY", 1)
            session = Session(scenario.setup, patch, scenario.seed)
            session.device.falsified = falsified
            for number, arrival in enumerate(scenario.arrivals):
                session.add(ids(arrival.length, number), arrival.sampling)
            session.finish()
            calls.append(session.device.calls)
    drafts = sum(call[0] == "draft" for call in calls[0])
    if draft >= drafts:
        return True, False
    return until_seen(calls[0], draft) == until_seen(calls[1], draft), calls[0] != calls[1]


def some_answers(asynchronous: bool, count: int, seed: int, curve: str = "stairs") -> Scenario:
    setup = Setup(
        block_size=16,
        num_blocks=99,
        num_slots=8,
        max_model_len=160,
        config={**OFF, "async_scheduling": asynchronous},
        drafting=Drafting(4, right=0.7),
        decode=(4, 8),
        curve=curve,
    )
    sampling = greedy(max_tokens=30, temperature=1.0, seq_seed=seed)
    return Scenario(setup, tuple(Arrival(0, 0, 10 + 7 * at, sampling) for at in range(count)), seed=seed)


@few(15)
@given(
    asynchronous=st.booleans(),
    count=st.integers(1, 6),
    draft=st.integers(0, 12),
    seed=st.integers(0, 99),
    curve=st.sampled_from(["stairs", "stairs", "steep"]),
)
def test_no_step_sees_the_confidences_of_what_it_verifies(
    asynchronous: bool, count: int, draft: int, seed: int, curve: str
) -> None:
    alike, _ = falsify(some_answers(asynchronous, count, seed, curve), draft)
    assert alike


def test_later_steps_do_see_them() -> None:
    assert any(
        falsify(some_answers(asynchronous, 3, seed), 5)[1] for asynchronous in (True, False) for seed in range(5)
    )


def test_a_budget_from_the_newest_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = RateLedger.schedule

    def newest(ledger: RateLedger, slots: np.ndarray, look: bool = True) -> Round:
        ledger.scheduled[slots] += 1
        found = schedule(ledger, slots, look)
        ledger.scheduled[slots] -= 1
        return found

    monkeypatch.setattr(RateLedger, "schedule", newest)
    assert not all(falsify(some_answers(False, 3, seed), 5)[0] for seed in range(8))


# ---- whether steps draft ----


def test_drafting_that_does_not_pay_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TRIAL_SHARE", 1e9)  # trials cost nothing: the pause is the shortest
    setup = dataclasses.replace(ROOMY, drafting=NONE, varlen=True, curve="steep")
    session = Session(setup, monkeypatch)
    session.add(ids(20), greedy(max_tokens=100))
    session.finish()
    # Decode steps, of which those in a pause are plain, and drafts.
    calls = [call for call in session.device.calls if call[0] in ("verify", "draft", "execute")]
    steps = ["draft" if name == "draft" else name * bucket.decode for name, bucket, *_ in calls]
    drafts = [after == "draft" for call, after in zip(steps, [*steps[1:], ""]) if call in ("verify", "execute")]
    pause = drafts.index(False)
    # Right after the drafts end the place is not known to the host; then steps are plain.
    assert steps.count("execute") >= LEAST_PAUSE - 2
    # Of the first steps nothing is known.
    assert JUDGED_STEPS <= pause <= JUDGED_STEPS + 2
    assert not any(drafts[pause : pause + LEAST_PAUSE]) and drafts[pause + LEAST_PAUSE]


def decodes_of(session: Session) -> list[tuple[bool, bool]]:
    """(bare, drafted) of every decode step."""
    found: list[tuple[bool, bool]] = []
    decode = False
    for name, *what in (call for call in session.device.calls if not isinstance(call, str)):
        if name in ("execute", "verify"):
            decode = what[0].decode
            found += [(what[0].bare, False)] * decode
        elif name == "draft" and decode:
            found[-1] = found[-1][0], True
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_pause_leaves_the_draft_no_context_until_a_window_before_its_end(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "TRIAL_SHARE", 1e9)
    config = {**OFF, "async_scheduling": asynchronous}
    setup = dataclasses.replace(ROOMY, drafting=NONE, varlen=True, curve="steep", config=config)
    session = Session(setup, monkeypatch)
    session.add(ids(20), greedy(max_tokens=100))
    session.finish()
    steps = decodes_of(session)
    pause = [drafted for _, drafted in steps].index(False)
    again = pause + LEAST_PAUSE
    assert steps[again] == (False, True)
    # The newest place of the window is that of the step that drafts.
    assert [bare for bare, _ in steps[again - setup.window - 1 : again + 1]] == [True] * 2 + [False] * setup.window
    assert sum(bare for bare, _ in steps[pause:again]) >= LEAST_PAUSE - setup.window - 2


def test_context_that_comes_a_step_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the device's check: as in the test before, but for one step."""
    monkeypatch.setattr(verification, "TRIAL_SHARE", 1e9)
    monkeypatch.setattr(Speculation, "plan", early_context)
    monkeypatch.setattr(SlotTable, "has_context", lambda table, slots, *_: np.ones(len(slots), bool))
    session = Session(dataclasses.replace(ROOMY, drafting=NONE, varlen=True, curve="steep"), monkeypatch)
    session.add(ids(20), greedy(max_tokens=100))
    with pytest.raises(AssertionError, match="windows without context"):
        session.finish()


def paused(monkeypatch: pytest.MonkeyPatch, slots: int) -> tuple[Session, Request]:
    """One answer in a long pause; batches of more than one have not been judged."""
    setup = dataclasses.replace(ROOMY, num_slots=slots, drafting=NONE, varlen=True, curve="steep")
    session = Session(setup, monkeypatch)
    one = session.add(ids(20), greedy(max_tokens=100))
    for _ in range(30):
        session.step()
    assert decodes_of(session)[-1] == (True, False)
    return session, one


def test_a_batch_waits_until_the_draft_has_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four sequences has a hole in its window: none drafts, not even after a prompt, until it is filled."""
    session, one = paused(monkeypatch, 4)
    before, drafts = len(decodes_of(session)), session.device.drafts_made
    others = [session.add(ids(20, number), greedy(max_tokens=60)) for number in range(1, 4)]
    while session.device.drafts_made == drafts:
        session.step()
    # The step that found the other batch was bare; then a window of steps leaves context.
    steps = decodes_of(session)[before:]
    last_bare = max(at for at, (bare, _) in enumerate(steps) if bare)
    assert len(steps) - 1 - last_bare == ROOMY.window and steps[-1] == (False, True)
    assert not any(drafted for _, drafted in steps[:-1])
    session.finish()
    assert all(request.sequences[0].drafted for request in (one, *others))


def test_most_of_a_batch_drafts_and_the_others_verify_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of sixteen have a hole: they draft when their windows are whole again, and till then count for nothing."""
    session, first = paused(monkeypatch, 16)
    second = session.add(ids(20, 1), greedy(max_tokens=60))
    books = session.engine.speculation
    assert books is not None
    while not books._waits:
        session.step()
    before = first.sequences[0].drafted
    assert not second.sequences[0].drafted and not books.switch.pause
    others = [session.add(ids(14, number), greedy(max_tokens=60)) for number in range(2, 16)]
    for _ in range(8):
        session.step()
    assert all(request.sequences[0].drafted for request in others)
    assert first.sequences[0].drafted == before and not second.sequences[0].drafted
    table, ledger = books.tables[0], books.ledgers[0]
    slots = [s for s, each in enumerate(table.sequences) if each in (first.sequences[0], second.sequences[0])]
    newest = (ledger.processed - 1) % (HISTORY + 1)
    found = ledger._rounds[np.arange(16), newest]
    assert np.isnan(found[slots]).all() and not np.isnan(np.delete(found, slots, axis=0)).any()
    session.finish()


def test_drafting_that_pays_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(dataclasses.replace(ROOMY, drafting=ALL, varlen=True, curve="flat"), monkeypatch)
    session.add(ids(20), greedy(max_tokens=100))
    session.finish()
    calls = [call[0] for call in session.device.calls if call[0] in ("verify", "draft")]
    assert calls[0] == "draft" and calls.count("draft") == calls.count("verify") + 1


# ---- blocks for drafts ----


@pytest.mark.parametrize("spare", [0, 1])
def test_nobody_is_preempted_for_drafts(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four answers end in their third block, and there are just as many."""
    setup = dataclasses.replace(ROOMY, num_blocks=12 + spare, drafting=Drafting(5, right=0.5))
    session = Session(setup, monkeypatch)
    for number in range(4):
        session.add(ids(14 + number, number), greedy(max_tokens=48 - 14 - number))
    session.finish()
    assert not session.engine.scheduler.preemptions and session.device.accepted > 20


def test_a_block_taken_for_drafts_is_given_back_before_anybody_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are never kept, so that steps are the same as without. The first answer looks ahead into the last free
    block before the second one needs it for a row."""
    for drafting in (None, NONE):
        setup = dataclasses.replace(ROOMY, drafting=drafting, num_blocks=3, num_slots=2, max_model_len=48)
        session = Session(setup, monkeypatch)
        session.add(ids(11), greedy(max_tokens=20))
        session.add(ids(12, 1), greedy(max_tokens=6))
        session.finish()
        assert not session.engine.scheduler.preemptions, drafting


@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_are_verified_behind_what_is_forced(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**OFF, "async_scheduling": asynchronous}
    session = Session(dataclasses.replace(ROOMY, drafting=ALL, config=config), monkeypatch)
    request = session.add(ids(20), greedy(max_tokens=65, forced_token_ids=(7, -1, 9)))
    session.finish()
    (answer,) = request.sequences
    assert answer.output_ids[0] == 7 and answer.output_ids[2] == 9
    # Outputs 1 and 2 come alone, then six a step.
    assert answer.decode_steps == 2 + 11 and answer.accepted == answer.verified == 62 - 11


# ---- the books alone ----

LADDER = BucketLadder.derive(
    max_num_batched_tokens=64, max_num_seqs=4, max_context_blocks=4, decode=(2, 4), drafts=3, varlen=True
)
WINDOW = 16
STEEP = StepProfile(
    {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0, 12: 12.0, 16: 16.0},
    {2: 0.5, 4: 0.5},
    {2: 1.0, 4: 1.0},
    {2: 2.5, 4: 4.5},
    {2: 2.5, 4: 4.5},
)


def sequence(prompt: int = 20, answer: int = 9, **sampling: Any) -> Sequence:
    given = SamplingParams(**{"temperature": 0.5, "detokenize": False, **sampling})
    extra = ExtraSampling.of(given, None)  # type: ignore[arg-type]
    return Sequence("a", 0, list(range(3, 3 + prompt)), given, 7 << 40 | 5, max_tokens=answer, extra=extra)


def decoding(count: int, **sampling: Any) -> tuple[SlotTable, DecodeBatch]:
    """A step of the first slots of a table of four, all of which have drafts."""
    table = SlotTable(4, 4, 3)
    for slot in range(count):
        table.begin(slot, sequence(**sampling), 20 + slot, 1, [slot, 9])
    table.drafted[:count] = True
    return table, DecodeBatch([part_of(table)], num_drafts=3)


def part_of(table: SlotTable) -> DecodePart:
    slots = table.ready()
    sequences: list[Any] = [table.sequences[slot] for slot in slots]
    return DecodePart(0, table, slots, table.position[slots], sequences, table.caps(slots), table.drafted[slots])


def outputs(confidence: Any = None) -> dict[int, StepOutput]:
    draft = None
    if confidence is not None:
        own = np.array(confidence, np.float32)
        draft = packed_draft(np.arange(own.size).reshape(own.shape), own)
    return {0: StepOutput(None, None, None, None, None, draft=draft)}  # type: ignore[arg-type]


def test_rows_follow_from_the_block_before_the_last() -> None:
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, STEEP, WINDOW)
    low, high = np.full((2, 3), 0.1), np.ones((2, 3))
    rows = []
    for confidence in (low, high, high, low, low):
        planned = books.plan(batch)
        rows.append(planned.parts[0].rows)
        books.completed(books.begin(planned, True), outputs(confidence))
    assert rows[:3] == [8, 8, 2], "before the first block that is known they count as certain, then as that one"
    seen = books.plan(batch).parts[0].round
    assert seen is not None and seen.known[:, 0].tolist() == [True] * 4 + [False] * (HISTORY - 4)
    assert np.allclose(seen.survival[:4, 0, 0], [0.1, 1, 1, 0.1]), "the newest first, and nothing of the round before"
    books.completed({0: Began(batch.parts[0].slots, seen.owners, np.ones(2, bool))}, outputs(low))
    for _ in range(HISTORY + 1):
        planned = books.plan(batch)
        books.completed(books.begin(planned, True), outputs(low))
    assert planned.parts[0].rows == 2


@pytest.mark.parametrize(("cost", "rows"), [(0.0, 8), (0.01, 8), (1.0, 4)])
def test_the_end_of_an_answer_takes_another_shape_only_where_that_saves(cost: float, rows: int) -> None:
    """cost: seconds of a row, beyond 4 of every step. Two requests may verify one draft each; the shape was for six."""
    profile = dataclasses.replace(STEEP, forward={n: 4 + cost * n for n in STEEP.forward})
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, profile, WINDOW)
    assert books.plan(batch).parts[0].rows == 8
    part = batch.parts[0]
    ending = dataclasses.replace(batch, parts=[dataclasses.replace(part, caps=np.minimum(part.caps, 1))])
    books = Speculation(LADDER, {0: table}, profile, WINDOW)
    assert books.plan(ending).parts[0].rows == rows
    books.completed({0: Began(part.slots, np.zeros(2, np.int64), np.ones(2, bool))}, outputs(np.ones((2, 3))))
    assert books.plan(batch).parts[0].rows == 8, "the next answers have the shape that all together chose"


def one_step(books: Speculation, batch: DecodeBatch, confidence: float, rows: int = 16) -> DecodeBatch:
    """A step of the books as an engine makes it, that drafts with these confidences."""
    planned = books.plan(batch)
    count = len(batch.parts[0].slots)
    drafted = books.drafts(books.outlook(planned), LADDER.bucket(True, rows, 4, requests=2))
    assert drafted
    books.completed(books.begin(planned, True), outputs(np.full((count, 3), confidence)))
    return planned


def test_drafting_that_pays_looks_at_confidences_every_fourth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step looks until it was seen to pay, and again when it is not seen to any more."""
    cheap = StepProfile(dict.fromkeys(STEEP.forward, 1.0), {2: 0.1, 4: 0.1}, {2: 0.1, 4: 0.1}, *[{2: 1.1, 4: 1.1}] * 2)
    table, batch = decoding(2)
    books, looked = Speculation(LADDER, {0: table}, cheap, WINDOW), list[bool]()
    schedule = RateLedger.schedule

    def seen(ledger: RateLedger, slots: np.ndarray, look: bool = True) -> Round:
        looked.append(look)
        return schedule(ledger, slots, look)

    monkeypatch.setattr(RateLedger, "schedule", seen)
    while not books.switch.pays:
        one_step(books, batch, 0.9)
    first = len(looked)
    assert JUDGED_STEPS <= first <= JUDGED_STEPS + 2 and all(looked)
    for _ in range(20):
        assert books.switch.pays
        one_step(books, batch, 0.9)
    assert np.flatnonzero(looked[first:]).tolist() == [at for at in range(20) if (first + at) % 4 == 0]
    looked.clear()
    for _ in range(20):
        books.switch.pays = False
        one_step(books, batch, 0.9)
    assert all(looked)


def test_rows_follow_from_what_steps_take() -> None:
    """By the profile rows cost much, and few are verified; by the steps that ran they cost nothing. What sampling and
    drafting take is not the forward's: a step that drafted and one that did not tell the same."""
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, STEEP, WINDOW)

    def chosen() -> int:
        books._chosen.clear()
        return books._part(batch.parts[0]).rows

    for _ in range(2):
        books.completed(books.begin(books.plan(batch), True), outputs(np.full((2, 3), 0.5)))
    assert chosen() == 2
    for drafted in (True, False):
        for rows in (2, 4, 6, 8):
            for _ in range(LEAST_PER_BUCKET):
                bucket = LADDER.bucket(True, rows, 4, requests=2)
                books.observe(bucket, 3.0 + 0.5 + 1.0 * drafted, drafted)
        assert books._times(2).seconds == pytest.approx([4.5] * 4)
    assert chosen() == 8
    before = books._times(2).seconds
    for _ in range(5 * LEAST_PER_BUCKET):
        books.observe(LADDER.bucket(True, 2, 4), 99.0, False)
    assert np.array_equal(books._times(2).seconds, before), "plain steps are no verified ones"


@pytest.mark.parametrize("told", [True, False])
def test_times_of_the_steps_that_ran_change_what_is_verified(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the profile a step takes 1 ms whatever it verifies, and all drafts are. The device takes 2 ms: so much for so
    many rows, and fewer are tried. told: the control is an engine that does not look at the time."""
    if not told:
        monkeypatch.setattr(Speculation, "observe", lambda *_: None)
    drafting = Drafting(5, right=0.3, confidence=0.3)
    session = Session(
        dataclasses.replace(ROOMY, decode=(4,), drafting=drafting, varlen=True, curve="flat"), monkeypatch
    )
    for number in range(4):
        session.add(ids(20, number), greedy(max_tokens=60))
    rows = []
    for _ in range(30):
        report = session.step()
        rows += [report.bucket.rows] * bool(report is not None and report.bucket.drafts)
    assert set(rows[:LEAST_PER_BUCKET]) == {24}
    assert (min(rows) < 24) == told


def test_rows_follow_from_what_became_of_promises() -> None:
    """Confidences that promised too much: drafts are certain by them, and none is accepted."""
    profile = dataclasses.replace(STEEP, forward={rows: 2 + 0.5 * rows for rows in STEEP.forward})
    table, batch = decoding(2)
    books, rows = Speculation(LADDER, {0: table}, profile, WINDOW), []
    for _ in range(120):
        planned = books.plan(batch)
        rows.append(planned.parts[0].rows)
        told = outputs(np.ones((2, 3)))[0]
        none = np.array([[7, -1, -1, -1]] * 2)
        books.completed(
            books.begin(planned, True), {0: dataclasses.replace(told, token=none, verified=np.full(2, 3, np.int32))}
        )
    assert rows[0] == 8 and rows[-1] == 2 and rows == sorted(rows, reverse=True)
    ratio, seen = books.promises.ratio, books.plan(batch).parts[0].round
    assert ratio < 0.3 and seen is not None and seen.survival == pytest.approx(ratio), "of blocks that promise 1"


def test_without_a_profile_all_is_verified_and_drafted() -> None:
    table, batch = decoding(3)
    books = Speculation(LADDER, {0: table}, None, WINDOW)
    for _ in range(4):
        planned = books.plan(batch)
        assert planned.parts[0].rows == 12  # of 4 sequences' shapes: 4, 8, 12 and 16
        outlook = books.outlook(planned)
        assert outlook.drafters == outlook.requests == 3
        assert books.drafts(outlook, LADDER.bucket(True, 12, 4, requests=4))
        books.completed(books.begin(planned, True), outputs(np.zeros((4, 3))))


def test_an_outlook_is_what_all_expect() -> None:
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, STEEP, WINDOW)
    for _ in range(HISTORY + 1):
        books.completed(books.begin(books.plan(batch), True), outputs(np.full((2, 3), 0.5)))
    planned = books.plan(batch)
    filled = dataclasses.replace(planned, parts=[dataclasses.replace(planned.parts[0], rows=4)])
    outlook = books.outlook(filled)
    assert outlook == Outlook(3 * FRACTIONS, 8 * FRACTIONS, 2, 2, 2, 2), "two tokens, and two drafts of one half"
    other = Outlook(5, 7, 3, 1, 2, 9)
    numbers = np.array([outlook.numbers(), other.numbers(), Outlook().numbers()])
    assert Outlook.of_all(numbers) == Outlook(3 * FRACTIONS + 5, 8 * FRACTIONS + 7, 5, 3, 4, 9)
    assert not books.drafts(Outlook(), LADDER.bucket(True, 2, 4, requests=2)), "nobody could draft"


def test_what_others_drafted_tells_what_a_batch_gains_at_most() -> None:
    """Until enough is known all drafts may be accepted; from then on the typical ones, however many are verified."""
    profile = dataclasses.replace(STEEP, forward={**dict.fromkeys(STEEP.forward, 2.0), 12: 8.0, 16: 9.0})
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, profile, WINDOW)
    planned = books.plan(batch)
    assert books.outlook(planned).typical == 2 * 4 * FRACTIONS
    # Of 2 requests: all 8 rows in 2 + 0.5 + 1 seconds, where plain steps take 2.5.
    assert books._most(books.outlook(planned), 2, 2.5) == pytest.approx(8 / 3.5 * 2.5 / 2)
    for _ in range(TELLING_BLOCKS):
        books.completed(books.begin(books.plan(batch), True), outputs(np.full((2, 3), 0.5)))
    outlook = books.outlook(books.plan(batch))
    tokens = 2 * (1 + 0.5 + 0.25 + 0.125)
    assert outlook.typical == pytest.approx(tokens * FRACTIONS, rel=0.02)
    assert books._most(outlook, 2, 2.5) == pytest.approx(tokens / 3.5 * 2.5 / 2, rel=0.02)


def test_what_a_draft_needs_to_know() -> None:
    table, batch = decoding(2, top_k=7, min_p=0.25)
    books = Speculation(LADDER, {0: table, 1: SlotTable(4, 4, 3)}, None, WINDOW)
    table.drafted[:] = False
    own, idle = books.rows(books.begin(books.plan(batch), True), [0, 1], Outlook(drafters=3))
    assert own.shape == idle.shape == (len(DRAFT_COLUMNS), 4)
    view = dict(zip(DRAFT_COLUMNS, own, strict=True))
    assert view["slot"].tolist() == [0, 1, -1, -1] and (idle[0] == -1).all()
    assert view["origin"][:2].tolist() == [20, 20]
    assert view["temperature"][:2].view(np.float32).tolist() == [0.5, 0.5]
    assert view["seed_low"][:2].tolist() == [5, 5] and view["seed_high"][:2].tolist() == [7 << 8, 7 << 8]
    for name, value in (("min_p", 0.25), ("top_p", 1.0)):
        assert view[name][:2].view(np.float32).tolist() == [value] * 2
    assert view["top_k"].tolist() == [7, 7, 0, 0]
    for name in ("min_p", "top_k", "top_p"):
        assert (dict(zip(DRAFT_COLUMNS, idle, strict=True))[name] == NEUTRAL[OF_REQUEST.index(name)]).all()
    assert table.drafted.tolist() == [True, True, False, False]
    plain = Speculation(LADDER, {0: table}, None, WINDOW, filters=False)
    (own,) = plain.rows(plain.begin(plain.plan(batch), True), [0], Outlook(drafters=3))
    view = dict(zip(DRAFT_COLUMNS, own, strict=True))
    assert view["temperature"][:2].view(np.float32).tolist() == [0.5, 0.5], "the temperature is no filter"
    for name in ("min_p", "top_k", "top_p"):
        assert (view[name] == NEUTRAL[OF_REQUEST.index(name)]).all()


def test_drafts_are_told_to_those_that_must_match() -> None:
    table, batch = decoding(2)
    books = Speculation(LADDER, {0: table}, None, WINDOW)
    matched, free = batch.parts[0].sequences
    matched.matcher, table.matched[0] = Letters(), True
    rounds = books.begin(books.plan(batch), True)
    books.completed(rounds, outputs(np.ones((2, 3))))
    assert matched.drafts == [0, 1, 2] and not free.drafts
    books.completed(books.begin(books.plan(batch), True), outputs())
    assert matched.drafts == [], "the step did not draft"


# ---- what results do ----


def booked(
    token: list[list[int]], *sequences: Sequence, verified: list[int] | None = None
) -> tuple[list[Sequence], SlotTable]:
    """Books a step that verified three drafts of each sequence; those that it ended."""
    session = Session(dataclasses.replace(ROOMY, drafting=Drafting(3)))
    scheduler, books = session.engine.scheduler, session.engine.results
    for one in sequences:
        scheduler.add([one], 0.0)
    while any(one.status is not Status.RUNNING for one in sequences):
        scheduler.schedule("prefill", 0.0)
        scheduler.completed(scheduler.launched())
    (table,) = scheduler.ranks[0].tables
    for one in sequences:
        one.output_ids, one.logprobs = [77], [0.0]
    table.drafted[:] = True
    batch = scheduler.schedule("decode", 0.0)
    assert isinstance(batch, DecodeBatch)
    batch.advance(True)
    order = [sequences.index(one) for one in batch.parts[0].sequences]
    rows = np.array([own + [-1] * (3 + 1 - len(own)) for own in token], np.int32)[order]
    told: Any = dict(token=rows, logprob=np.zeros(rows.shape), verified=np.array(verified or [3] * len(rows))[order])
    output = StepOutput(logits=None, trace=None, load=None, error=np.full(len(rows), 0.5), **told)
    _, ended, count = books.book(batch, {0: output}, 1.0, verified=True)
    assert count == sum(len(one.output_ids) - 1 for one in sequences)
    return ended, table


def asked(answer: int = 9, stop_ids: tuple[int, ...] = ()) -> Sequence:
    one = sequence(answer=answer, stop_token_ids=stop_ids)
    one.stop_ids = frozenset(stop_ids)
    one.request = Request("a", one.prompt_ids, one.sampling, 0, [one])
    return one


def test_what_is_behind_a_stop_goes() -> None:
    stops, runs = asked(stop_ids=(52,)), asked()
    ended, table = booked([[51, 52, 53, 54], [51, 52, 53]], stops, runs, verified=[3, 2])
    assert ended == [stops] and stops.output_ids == [77, 51, 52] and stops.finish_reason == "stop"
    assert runs.output_ids == [77, 51, 52, 53]
    assert (stops.drafted, stops.verified, stops.accepted, stops.decode_steps, stops.draft_steps) == (3, 3, 3, 1, 1)
    assert (runs.drafted, runs.verified, runs.accepted, runs.confidence_error) == (3, 2, 2, 0.5)
    (slot,) = table.ready().tolist()
    assert table.sequences[slot] is runs
    assert (table.position[slot], table.ahead[slot], table.left[slot], table.output_index[slot]) == (23, 0, 5, 4)


def test_no_answer_gets_longer_than_it_may() -> None:
    one = asked(answer=3)
    ended, _ = booked([[51, 52]], one, verified=[1])
    assert ended == [one] and one.output_ids == [77, 51, 52] and one.finish_reason == "length"


def test_a_device_that_gives_nothing_is_told() -> None:
    with pytest.raises(RuntimeError, match="request a: 1 of 9 tokens are out and the device gave no more"):
        booked([[]], asked(), verified=[-1])


# ---- what the checks see ----


def everything(session: Session) -> None:
    """Forks, hits with window state, preemptions, stops inside a block, words and aborts, with drafts."""
    for turn in range(3):
        requests = [
            session.add(
                TEXT[:70] + ids(20, number),
                greedy(temperature=0.5, seq_seed=number, max_tokens=30, n=1 + number % 3, stop_token_ids=stops),
                matcher=Letters if number == 3 else None,
            )
            for number, stops in enumerate([None, None, tuple(range(40, 60)), None])
        ]
        session.step()
        session.step()
        session.abort(requests[turn])
        session.finish()


SEEN = Setup(
    block_size=16,
    num_blocks=17,
    num_slots=6,
    max_model_len=160,
    tokens=128,
    config=OFF,
    drafting=Drafting(5, right=0.8, ids=Letters.IDS),
    curve="flat",
)
SYNCHRONOUS = dataclasses.replace(SEEN, config={**OFF, "async_scheduling": False})
PAUSING = dataclasses.replace(SYNCHRONOUS, curve="steep", drafting=dataclasses.replace(SEEN.drafting, confidence=0.0))


@pytest.mark.parametrize("setup", [SEEN, SYNCHRONOUS])
def test_the_requests_of_the_controls_meet_everything(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(setup, monkeypatch)
    everything(session)
    assert session.forks and session.restored and session.engine.scheduler.preemptions and session.kept > 10
    assert session.device.accepted > 50 and session.device.verified > session.device.accepted
    answers = [sequence for request in session.requests for sequence in request.sequences]
    assert any(one.finish_reason == "stop" for one in answers)
    assert any(one.matcher is not None and one.accepted for one in answers)


plan, settle, advance, keep, caps_of, book_verified, completed = (
    Speculation.plan,
    SlotTable.settle,
    SlotTable.advance,
    CacheChores.keep,
    SlotTable.caps,
    Results._verified,
    Speculation.completed,
)


def early(table: SlotTable, slots: np.ndarray, drafts: np.ndarray, emitted: np.ndarray) -> None:
    settle(table, slots, drafts, emitted - 1)


def late(table: SlotTable, slots: np.ndarray, drafts: np.ndarray, emitted: np.ndarray) -> None:
    settle(table, slots, drafts * 0, emitted)


def stale(table: SlotTable, slots: np.ndarray, drafts: np.ndarray | None = None, bare: bool = False) -> None:
    advance(table, slots, drafts, bare)
    table.drafted[slots] = True


def greedy_caps(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    return np.where(table.drafted[slots], table.num_drafts, 0).astype(np.int32)


def forgetful(ledger: RateLedger, *_: Any) -> None:
    pass


def in_the_dark(table: SlotTable, slots: np.ndarray, drafts: np.ndarray | None = None, bare: bool = False) -> None:
    advance(table, slots, drafts)


def early_context(books: Speculation, batch: DecodeBatch) -> DecodeBatch:
    """A step fewer with context than the window is long, and nobody asks whether it is whole."""
    planned = plan(books, batch)
    return dataclasses.replace(planned, bare=books.switch.pause >= books.window - 1)


def inherited(ledger: RateLedger, slots: np.ndarray) -> None:
    ledger._owner[slots] += 1


def anything(matcher: Letters, drafts: Any) -> Any:
    rows = [matcher.allowed() for _ in drafts]
    return iter([*rows, matcher.allowed()])


def without_rollback(matcher: Letters, drafts: Any) -> Any:
    yield matcher.allowed()
    for draft in drafts:
        if draft < 0 or not matcher.accept(draft):
            return
        yield matcher.allowed()


def unbounded(table: SlotTable, slots: np.ndarray, drafts: np.ndarray, block_size: int) -> np.ndarray:
    return drafts.astype(np.int32)


def hasty(scheduler: Scheduler, now: float, preempt: bool) -> Any:
    """Look-ahead counts as need."""
    short = SlotTable.short
    try:
        SlotTable.short = lambda t, slots, size, drafts=0: short(t, slots, size, t.caps(slots))  # type: ignore
        return decode(scheduler, now, preempt)
    finally:
        SlotTable.short = short  # type: ignore[method-assign]


decode = Scheduler._decode
BREAKS: dict[str, tuple[Any, str, Any]] = {
    "fewer tokens are booked than came": (SlotTable, "settle", early),
    "how far a step may have come is kept": (SlotTable, "settle", late),
    "drafts are verified again": (SlotTable, "advance", stale),
    "more is verified than an answer may have": (SlotTable, "caps", greedy_caps),
    "snapshots are kept whenever they were taken": (
        CacheChores,
        "keep",
        lambda c, pending, before=None: keep(c, pending),
    ),
    "drafts are made without context": (SlotTable, "has_context", lambda t, slots, *_: np.ones(len(slots), bool)),
    "steps that leave no context are not booked": (SlotTable, "advance", in_the_dark),
    "rounds do not come back": (RateLedger, "process", forgetful),
    "rounds of another count": (RateLedger, "reset", inherited),
    "masks do not follow the drafts": (matching, "rows_allowed", anything),
    "the matcher stays at the drafts": (matching, "rows_allowed", without_rollback),
    "drafts have no blocks": (SlotTable, "within_blocks", unbounded),
    "drafts preempt": (Scheduler, "_decode", hasty),
    "tokens behind a stop count": (Results, "finish", lambda *_: None),
}


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((AssertionError, RuntimeError)):
        for setup in (SEEN, SYNCHRONOUS, PAUSING):
            everything(Session(setup, monkeypatch))


def keeps_drafts(device: FakeDevice, rank: int, v: FakeVerification, allowed: Any) -> StepOutput:
    """Accepts, but the drafts stay where they are."""
    caches = device.state[rank]
    before = caches.draft_token.copy()
    output = accepts(device, rank, v, allowed)
    caches.draft_token[:] = before
    return output


def leaves_length(device: FakeDevice, rank: int, v: FakeVerification, allowed: Any) -> StepOutput:
    """Accepts, but what was rejected counts as stored."""
    output = accepts(device, rank, v, allowed)
    live = np.asarray(v.verified[rank]) >= 0
    slots = v.views[rank]["slot"][live]
    device.state[rank].length[slots] = (v.length[rank] + v.verified[rank] + 1)[live]
    return output


accepts = FakeDevice._accept


@pytest.mark.parametrize("broken", [keeps_drafts, leaves_length])
def test_a_device_that_keeps_what_was_rejected_is_seen(
    broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDevice, "_accept", broken)
    monkeypatch.setattr(SlotTable, "advance", stale)
    with pytest.raises((AssertionError, RuntimeError)):
        everything(Session(SEEN, monkeypatch))
