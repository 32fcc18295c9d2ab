"""Speculation through the engine, over the golden tiny model: whatever is drafted and verified, answers are those of
plain decoding (dspark 7: T1, T2, T17, T19, T20, T25; T3 is in test_speculative_programs.py). Without cache quantizers,
in float32, without replay."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_session import ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_answers import GREEDY, Arrival, Model, arrivals, config_of, drain, run_mix, same

from di_jax.engine import engine as engine_module
from di_jax.engine.cache_chores import Pending
from di_jax.engine.engine import Engine
from di_jax.engine.launch_thread import LaunchThread
from di_jax.engine.runner import ModelRunner
from di_jax.engine.setup import build_engine_parts
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_profile import StepProfile
from di_jax.sampling_params import SamplingParams

DRAFTS = 5
SLOW = pytest.mark.slow


def flat(runner: ModelRunner, ladder: BucketLadder) -> StepProfile:
    """Steps that take as long whatever they verify."""
    return profile(ladder, 0.0)


def steep(runner: ModelRunner, ladder: BucketLadder) -> StepProfile:
    """Steps of which each row takes long: the budget varies, and drafting soon ceases for a while. Not so long that no
    draft could ever pay: then there would be none."""
    return profile(ladder, 0.2)


def profile(ladder: BucketLadder, per_row: float) -> StepProfile:
    rows = [rows for requests in ladder.decode_rows for rows in ladder.verify_rows(requests)]
    each = dict.fromkeys(ladder.decode_rows, 1e-4)
    forward = {n: 1e-3 * (1 + per_row * n) for n in sorted(rows)}
    plain = {n: forward[n] + 1e-4 for n in ladder.decode_rows}
    return StepProfile(forward, each, each, plain, plain)


@dataclasses.dataclass
class Speculating(Model):
    """A warm runner with drafts. plain: the same model without; answers are compared with what it gives alone."""

    plain: Model | None = None
    truth: float = 0.0  # the share of drafts that are made right
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(5))

    def engine(self, num_blocks: int | None = None, **changes: Any) -> Engine:
        engine = super().engine(num_blocks, **changes)
        if self.truth:
            with_oracle(engine, self)
        return engine

    def alone(self, prompt: list[int], sampling: SamplingParams, index: int = 0) -> tuple[list[int], list[float]]:
        assert self.plain is not None
        return self.plain.alone(prompt, sampling, index)


def with_oracle(engine: Engine, model: Speculating) -> None:
    """Random weights draft badly: this puts right tokens into the slots after every draft."""
    runner, drafted = engine.runner, ModelRunner.draft

    def draft(rows: Sequence[np.ndarray]) -> Any:
        output = drafted(runner, rows)
        tokens, length = (np.array(a) for a in (runner.state.draft_token, runner.state.length))
        table = engine.scheduler.ranks[0].tables[0]
        for slot, sequence in enumerate(table.sequences):
            if sequence is None or sequence.request is None or tokens[slot, 0] < 0:
                continue
            request = sequence.request
            known, _ = model.alone(request.prompt_ids, request.sampling, sequence.index)  # on a runner of its own
            first = int(length[slot]) + 1 - len(sequence.prompt_ids)
            for at, right in enumerate(known[first : first + DRAFTS]):
                if model.rng.random() < model.truth:
                    tokens[slot, at] = right
        runner.state = runner.state.replace(draft_token=jax.device_put(tokens, runner.state.draft_token.sharding))
        return output

    runner.draft = draft  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def plain(golden: Path) -> Iterator[Model]:
    config = config_of(golden)
    made = Model(build_engine_parts(config), config.engine)
    made.engine()
    yield made


def speculating(golden: Path, plain: Model, **speculative: Any) -> Speculating:
    config = config_of(golden).with_values({f"speculative.{k}": v for k, v in {"enabled": True, **speculative}.items()})
    made = Speculating(build_engine_parts(config), config.engine, plain=plain)
    made.engine()
    return made


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module.step_profile, "measure", flat)
        yield patch


@pytest.fixture(scope="module")
def model(golden: Path, plain: Model, patched: pytest.MonkeyPatch) -> Speculating:
    return speculating(golden, plain)


@pytest.fixture(scope="module")
def coupled(golden: Path, plain: Model, patched: pytest.MonkeyPatch) -> Speculating:
    return speculating(golden, plain, coupled=True)


CHANGES = st.fixed_dictionaries(
    {
        "async_scheduling": st.sampled_from([True, True, False]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "state_cache_bytes": st.sampled_from([2**30, 2**30, 300_000, 0]),
    }
)


def run_with(
    model: Speculating,
    patched: pytest.MonkeyPatch,
    mix: list[Arrival],
    num_blocks: int,
    changes: dict[str, Any],
    truth: float,
    curve: Any,
) -> None:
    """`run_mix` with a share of right drafts, and steps that take what `curve` says."""
    model.truth = truth
    with patched.context() as patch:
        patch.setattr(engine_module.step_profile, "measure", curve)
        run_mix(model, mix, num_blocks, changes)


def greedy(mix: list[Arrival]) -> list[Arrival]:
    return [dataclasses.replace(a, sampling=dataclasses.replace(a.sampling, temperature=0.0)) for a in mix]


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(
    mix=arrivals(),
    num_blocks=st.sampled_from([4, 5, 7, 16]),
    changes=CHANGES,
    truth=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    curve=st.sampled_from([flat, steep]),
)
def test_any_greedy_mix_is_answered_as_each_request_alone(
    model: Speculating,
    patched: pytest.MonkeyPatch,
    mix: list[Arrival],
    num_blocks: int,
    changes: dict[str, Any],
    truth: float,
    curve: Any,
) -> None:
    run_with(model, patched, greedy(mix), num_blocks, changes, truth, curve)


@SLOW  # a third model to compile: 130 s
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    mix=arrivals(),
    num_blocks=st.sampled_from([5, 16]),
    changes=CHANGES,
    truth=st.sampled_from([0.0, 0.7]),
    curve=st.sampled_from([flat, steep]),
)
def test_coupled_answers_depend_on_their_seed_alone(
    coupled: Speculating,
    patched: pytest.MonkeyPatch,
    mix: list[Arrival],
    num_blocks: int,
    changes: dict[str, Any],
    truth: float,
    curve: Any,
) -> None:
    """T25: sampled too, with any companions, drafts, lengths and schedule."""
    run_with(coupled, patched, mix, num_blocks, changes, truth, curve)


def sampled_answers(model: Speculating, varlen: bool, which: Sequence[int]) -> tuple[list[list[int]], int]:
    """The seeded answers of five sampled requests, of which those `which` come in this order with up to two steps in
    between, [] for the others; and how many drafts were accepted. Blocks are for all: nobody is preempted."""
    parts = dataclasses.replace(model.parts, ladder=dataclasses.replace(model.parts.ladder, varlen=varlen))
    engine, requests = Engine(parts, model.config), {}
    for at in which:
        sampling = dataclasses.replace(GREEDY, temperature=1.0, seq_seed=77 + at, max_tokens=30)
        requests[at] = engine.add_request(ids(110 + 5 * at % 17, 7000 + at, 500), sampling)
        for _ in range(at % 3):
            engine.step()
    drain(engine)
    assert not engine.scheduler.preemptions
    accepted = sum(request.sequences[0].accepted for request in requests.values())
    return [requests[at].sequences[0].output_ids if at in requests else [] for at in range(5)], accepted


@pytest.mark.parametrize("varlen", [False, True])
def test_of_a_fixed_length_seeded_answers_depend_on_their_seed_alone(
    model: Speculating, patched: pytest.MonkeyPatch, varlen: bool
) -> None:
    """T25 without coupling, where nobody is preempted: the draft's noise is that of the place where a block starts, and
    blocks start where they do alone while all drafts are verified. varlen: the control, of which only the distribution
    is promised."""
    model.parts.runner.__dict__.pop("draft", None)  # not that of an earlier test's oracle
    with patched.context() as patch:
        patch.setattr(engine_module.step_profile, "measure", steep)
        alone = [sampled_answers(model, varlen, [at]) for at in range(5)]
        together, accepted = sampled_answers(model, varlen, [3, 0, 4, 1, 2])
    assert accepted > 3 and sum(count for _, count in alone) > 3
    assert (together == [answers[at] for at, (answers, _) in enumerate(alone)]) != varlen


LONG = dataclasses.replace(GREEDY, max_tokens=40)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_right_drafts_save_steps(model: Speculating, asynchronous: bool) -> None:
    """Six tokens a step, prefill's one first, and the books say so."""
    model.truth = 1.0
    engine = model.engine(async_scheduling=asynchronous)
    request = engine.add_request(ids(90, 3, 500), LONG)
    drain(engine)
    (sequence,) = request.sequences
    assert same(sequence, model.alone(request.prompt_ids, LONG)) and len(sequence.output_ids) == 40
    assert sequence.decode_steps == 7 and sequence.accepted == 32  # 39 = 6 x 6 + 3: the last step needs two drafts
    assert (sequence.drafted, sequence.verified) == (35, 32)
    metrics = request.metrics()
    assert metrics["accepted_tokens"] == 32 and 0 <= (metrics["confidence_error"] or 0) <= 1
    names = ("accept_rate", "accepted_length", "verified_length")
    means = 32 / 32, 1 + 32 / 7, 32 / 7  # six steps of five drafts, one of two
    assert tuple(metrics[name] for name in names) == means
    assert tuple(getattr(engine.metrics.drafts, name) for name in names) == means
    short = engine.add_request(ids(20, 4, 500), dataclasses.replace(GREEDY, max_tokens=1))
    drain(engine)
    assert [short.metrics()[name] for name in names] == [None] * 3, "it ends before anything is verified"
    assert tuple(getattr(engine.metrics.drafts, name) for name in names) == means


@SLOW
def test_preemptions_hits_and_forks_change_no_answer(model: Speculating) -> None:
    """Whatever is accepted, one of the crowd is preempted: of a pool of 5 blocks each of the three needs a second by
    its fifth decode step, before which it has 25 of its 40 tokens at most (prefill's one and 4 x 6), so that all still
    run. After 118 tokens, answers of 24 could be complete before."""
    model.truth, model.rng = 0.6, np.random.default_rng(5)
    crowd = [Arrival(0, 0, 126 - number, LONG, None) for number in range(3)]
    idle = 400  # a step that is never reached: a request comes when all before it are answered
    later = [
        Arrival(3, 120, 30, dataclasses.replace(LONG, n=3), None),
        Arrival(idle, 140, 60, dataclasses.replace(LONG, n=2), None),  # alone: there are blocks to fork at once
        Arrival(idle, 118, 3, LONG, 6),
        Arrival(idle, 140, 20, GREEDY, None),  # hits the pair's first block
    ]
    engine = run_mix(model, crowd + later, 5, {})
    assert engine.scheduler.preemptions and engine.metrics.prefix_hits and engine.scheduler.ledgers[0].evictions


@pytest.mark.slow
@pytest.mark.parametrize("truth", [pytest.param(0.0, marks=SLOW), 0.7, pytest.param(1.0, marks=SLOW)])
@pytest.mark.parametrize(
    ("first", "said"), [(100, 40), pytest.param(120, 20, marks=SLOW), (126, 9), pytest.param(200, 90, marks=SLOW)]
)
def test_the_next_turn_goes_on_from_what_was_speculated(
    model: Speculating, truth: float, first: int, said: int
) -> None:
    """Blocks and window state of speculated positions are those of plain decoding: snapshots are taken while the
    window still ends at the block's end."""
    model.truth = truth
    prompt, sampling = ids(first, 70 + first, 500), dataclasses.replace(GREEDY, max_tokens=said)
    engine = model.engine()
    one = engine.add_request(prompt, sampling)
    drain(engine)
    assert same(one.sequences[0], model.alone(prompt, sampling))
    turn = prompt + one.sequences[0].output_ids + ids(60, 71, 500)
    two = engine.add_request(turn, GREEDY)
    drain(engine)
    assert two.sequences[0].num_cached_tokens == (first + said) // 128 * 128
    assert same(two.sequences[0], model.alone(turn, GREEDY))


@pytest.mark.slow
def test_a_snapshot_kept_late_is_seen(model: Speculating, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of the snapshots that were taken because a step might cross, one of a step that came after."""
    model.truth = 1.0
    prompt, sampling = ids(120, 190, 500), dataclasses.replace(GREEDY, max_tokens=30)
    engine = model.engine()
    keep, late = engine.chores.keep, list[int]()

    def keep_late(pending: Pending, before: Mapping[Any, int] | None = None) -> None:
        if before is None:
            keep(pending)
            return
        for snapshot, owners in pending.taken:
            behind = {rank: one for rank, one in owners.items() if before[one[0]] - 1 >= one[1]}
            late.extend(behind)
            keep(Pending([(snapshot, behind)]))

    monkeypatch.setattr(engine.chores, "keep", keep_late)
    one = engine.add_request(prompt, sampling)
    drain(engine)
    turn = prompt + one.sequences[0].output_ids + ids(60, 71, 500)
    two = engine.add_request(turn, GREEDY)
    drain(engine)
    assert late and two.sequences[0].num_cached_tokens == 128
    assert not same(two.sequences[0], model.alone(turn, GREEDY))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "bias": {"logit_bias": {"7": 9.0, "11": 9.5, "13": 9.2}, "frequency_penalty": 1.0},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": list(range(3, 400))},
    "allowed": {"allowed_token_ids": [5, 6, 7, 8], "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("truth", [pytest.param(0.0, marks=SLOW), 0.8])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n in ("min_tokens", "allowed") else ()) for n in SAMPLINGS]
)
def test_penalties_limits_and_log_probabilities_of_each_row(model: Speculating, name: str, truth: float) -> None:
    """T17 and the transforms of a row with the drafts before it, beside neighbours that ask for nothing."""
    model.truth = truth
    assert model.plain is not None
    sampling = dataclasses.replace(LONG, **SAMPLINGS[name])
    prompts = [ids(60 + n, 300 + n, 500) for n in range(3)]
    engines = [model.engine(), model.plain.engine(async_scheduling=False, prefix_caching=False)]
    found = []
    for engine in engines:
        requests = [engine.add_request(prompt, sampling) for prompt in prompts]
        others = [engine.add_request(ids(50, 400, 500), LONG)]
        drain(engine)
        found.append([request.sequences[0] for request in requests + others])
    for mine, want in zip(*found, strict=True):
        assert same(mine, (want.output_ids, want.logprobs)) and len(mine.output_ids) == len(want.output_ids)
        assert mine.finish_reason == want.finish_reason
        assert [top.ids for top in mine.tops] == [top.ids for top in want.tops]
        assert [top.rank for top in mine.tops] == [top.rank for top in want.tops]


@pytest.mark.parametrize("truth", [pytest.param(0.0, marks=SLOW), 1.0])
def test_a_stop_inside_a_block_ends_the_answer_there(model: Speculating, truth: float) -> None:
    """T19: at every place of a block, and so does max_tokens."""
    model.truth = truth
    prompt = ids(64, 500, 500)
    known, _ = model.alone(prompt, LONG)
    for at in range(12):
        stop = dataclasses.replace(LONG, stop_token_ids=(known[at],))
        short = dataclasses.replace(LONG, max_tokens=at + 1)
        engine = model.engine()
        requests = [engine.add_request(prompt, sampling) for sampling in (stop, short)]
        drain(engine)
        first = known.index(known[at])
        assert requests[0].sequences[0].output_ids == known[: first + 1]
        assert requests[0].sequences[0].stop_reason == known[at]
        assert requests[1].sequences[0].output_ids == known[: at + 1]


def test_forced_tokens_are_what_comes(model: Speculating) -> None:
    model.truth = 1.0
    forced = dataclasses.replace(LONG, forced_token_ids=(7, -1, 9, 11, -1, 13))
    engine = model.engine()
    prompts = [ids(40, 600, 500), ids(41, 601, 500)]
    requests = [engine.add_request(prompts[0], forced), engine.add_request(prompts[1], LONG)]
    drain(engine)
    assert same(requests[0].sequences[0], model.alone(prompts[0], forced))
    assert same(requests[1].sequences[0], model.alone(prompts[1], LONG))
    # Nothing is verified while outputs are forced, so that the host knows which comes next.
    assert 0 < requests[0].sequences[0].verified < requests[1].sequences[0].verified


def test_the_end_of_the_context_is_never_passed(model: Speculating) -> None:
    """An answer that fills the longest sequence, 384 tokens, with its last drafts beyond it."""
    model.truth = 1.0
    for length in (340, 343, 346):
        prompt, sampling = ids(length, 700 + length, 500), dataclasses.replace(GREEDY, max_tokens=384)
        engine = model.engine()
        request = engine.add_request(prompt, sampling)
        drain(engine)
        assert len(request.sequences[0].output_ids) == 384 - length
        assert same(request.sequences[0], model.alone(prompt, sampling))


@SLOW
def test_a_thousand_steps_compile_nothing(model: Speculating, patched: pytest.MonkeyPatch) -> None:
    """T20, with steps that verify all and budgets that vary, pauses of drafting and all shapes."""
    shapes, plain = set(), 0
    for curve, truth in ((flat, 0.0), (steep, 0.5)):
        model.truth = truth
        with patched.context() as patch:
            patch.setattr(engine_module.step_profile, "measure", curve)
            engine = model.engine()
            rng = np.random.default_rng(0)
            for step in range(500):
                while len(engine.requests) < 1 + step % 6:
                    engine.add_request(ids(int(rng.integers(1, 200)), step, 500), LONG)
                report = engine.step()
                if report is not None and report.bucket.decode:
                    shapes.add(report.bucket.rows if report.bucket.drafts else 0)
                    plain += not report.bucket.drafts
            for request in list(engine.requests):
                engine.abort(request)
            drain(engine)
        assert engine.compiles_after_warmup == 0
    assert shapes == {0, 6, 12, 24, 36} and plain > 50


@pytest.fixture
def laned(model: Speculating, monkeypatch: pytest.MonkeyPatch) -> Speculating:
    """`model` with its steps launched by a thread, as on a GPU."""
    runner = model.parts.runner
    monkeypatch.setattr(runner, "_thread", LaunchThread())
    monkeypatch.setattr(runner, "draft", partial(ModelRunner.draft, runner))  # not that of an earlier test's oracle
    model.truth = 0.0
    return model


def test_steps_launched_by_a_thread_give_the_same_answers(laned: Speculating, monkeypatch: pytest.MonkeyPatch) -> None:
    """While prompts come in between, and one asks for more than a temperature."""
    threads = set()
    programs: Any = laned.parts.runner._speculative
    launch = programs.draft
    monkeypatch.setattr(programs, "draft", lambda *a: (threads.add(threading.current_thread().name), launch(*a))[1])
    engine, asked = laned.engine(), []
    for number in range(6):
        sampling = dataclasses.replace(LONG, repetition_penalty=1.3) if number == 3 else LONG
        prompt = ids(20 + 30 * number, 900 + number, 500)
        asked.append((engine.add_request(prompt, sampling), prompt, sampling))
        for _ in range(3):
            engine.step()
    drain(engine)
    for request, prompt, sampling in asked:
        assert same(request.sequences[0], laned.alone(prompt, sampling))
    assert threads and all(name.startswith("launches") for name in threads)


@pytest.mark.parametrize("program", ["accept", "draft"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_launch_that_fails_in_its_thread(
    laned: Speculating, monkeypatch: pytest.MonkeyPatch, program: str, error: type[BaseException]
) -> None:
    """It costs those in the caches their answers, who are told why; the engine goes on."""
    programs: Any = laned.parts.runner._speculative
    launch, left = getattr(programs, program), [4]

    def fails(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            launch(*arguments)  # donates the state
            raise error("no such luck")
        return launch(*arguments)

    monkeypatch.setattr(programs, program, fails)
    engine = laned.engine()
    lost = [engine.add_request(ids(40, number, 500), LONG) for number in range(2)]
    with pytest.raises(error, match="no such luck"):
        drain(engine)
    assert left[0] == 0, "nothing was launched behind it"
    for request in lost:
        assert request.failure is not None and request.finished
        assert request.failure.type == ("model_error" if error is ValueError else "interrupted")
    prompt = ids(50, 77, 500)
    request = engine.add_request(prompt, LONG)
    drain(engine)
    assert same(request.sequences[0], laned.alone(prompt, LONG))


def test_wrong_books_are_seen(model: Speculating, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: drafts that are accepted although they are wrong."""
    model.truth = 0.0
    prompt = ids(64, 800, 500)
    engine = model.engine()
    accepted = engine.runner.accept

    def careless(*arguments: Any) -> Any:
        output = accepted(*arguments)
        state = engine.runner.state
        engine.runner.state = state.replace(last_token=(state.last_token + 1) % 500)
        return output

    monkeypatch.setattr(engine.runner, "accept", careless)
    request = engine.add_request(prompt, LONG)
    drain(engine)
    assert not same(request.sequences[0], model.alone(prompt, LONG))


# ---- meshes ----


@SLOW
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}], ids=lambda m: "-".join(m)
)
def test_on_a_mesh_answers_are_those_of_one_device(
    golden: Path, plain: Model, patched: pytest.MonkeyPatch, mesh: Mapping[str, int]
) -> None:
    """Several data ranks whose steps have one number of rows, prompts cut over context ranks, experts over all."""
    config = config_of(golden).with_values({"speculative.enabled": True, **{f"mesh.{k}": v for k, v in mesh.items()}})
    made = Speculating(build_engine_parts(config), config.engine, plain=plain)
    engine = made.engine()
    sampled = [dataclasses.replace(GREEDY, max_tokens=most) for most in (1, 5, 12, 20, 9, 14)]
    asked = [(ids(10 + 37 * n, 700 + n, 500), sampling) for n, sampling in enumerate(sampled)]
    requests = [engine.add_request(prompt, sampling) for prompt, sampling in asked]
    drain(engine)
    for request, (prompt, sampling) in zip(requests, asked, strict=True):
        assert request.sequences[0].output_ids == made.alone(prompt, sampling)[0]
    assert engine.metrics.drafts.verified > 0
