"""The engine with replay on, prefix hits and all, against replay's own definition (tests/replay_oracle.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from golden_model import tiny_model, tiny_numerics
from replay_oracle import OracleRun, ReplayOracle

from di_jax.config import Config
from di_jax.engine.engine import Engine
from di_jax.engine.sequence import Request
from di_jax.engine.setup import build_engine_parts
from di_jax.sampling_params import SamplingParams

KEEP = 32  # at least window + 6 = 22
ANSWER = 12
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
CERTAIN = 1e-3  # margin above which float32 sums in another order do not change the likeliest token


@dataclasses.dataclass
class Turn:
    """A finished request and what the oracle makes of it."""

    request: Request
    run: OracleRun

    @property
    def tokens(self) -> list[int]:
        return self.request.prompt_ids + self.request.sequences[0].output_ids


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


@pytest.fixture(scope="module")
def oracle() -> ReplayOracle:
    return ReplayOracle(tiny_model(tiny_numerics("nokvq")))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("compact", "on", 0), id="replays", marks=pytest.mark.slow),
        pytest.param(("compact", "on", 2**24), id="restores"),
        pytest.param(("mask", "on", 0), id="masks", marks=pytest.mark.slow),
        pytest.param(("compact", "off", 2**24), id="restores alone", marks=pytest.mark.slow),
    ],
)
def engine(request: pytest.FixtureRequest, tiny_config: Config) -> Engine:
    decoder, encoder, state_cache_bytes = request.param
    config = tiny_config.with_values(
        {
            "model.quantize_caches": False,
            "engine.prefix_caching": True,
            "engine.replay.decoder": decoder,
            "engine.replay.encoder": encoder,
            "engine.replay.keep_tokens": KEEP,
            "engine.state_cache_bytes": state_cache_bytes,
        }
    )
    return Engine(build_engine_parts(config), config.engine)


def answer(engine: Engine, prompt: list[int]) -> Request:
    request = engine.add_request(prompt, GREEDY)
    while not request.finished:
        assert engine.step() is not None
        engine.scheduler.check()
    assert request.failure is None
    return request


def check(oracle: ReplayOracle, request: Request, before: list[Turn]) -> Turn:
    """The answer is the definition's, given the hit that the engine had. Blocks are those of the first request that
    computed these tokens."""
    (sequence,) = request.sequences
    hit = sequence.hit
    earlier = None
    if hit.length:
        shared = request.prompt_ids[: hit.length]
        earlier = next(turn.run for turn in before if list(turn.run.tokens[: hit.length]) == shared)
    run = oracle.prefill(
        request.prompt_ids,
        hit=hit.length,
        earlier=earlier,
        restored=hit.length > 0 and hit.start == hit.length,
        keep_tokens=KEEP,
    )
    sure = True
    for token in sequence.output_ids:
        sure = sure and run.margin > CERTAIN
        assert not sure or token == run.token
        if len(run.tokens) < len(request.prompt_ids) + ANSWER - 1:
            run = oracle.decode(run, token)
    return Turn(request, run)


def test_answers_are_the_definition_of_replay(engine: Engine, oracle: ReplayOracle) -> None:
    """Conversations that share a beginning, turn by turn: every later turn finds blocks of the answer before it."""
    replay = engine.config.replay.encoder == "on"
    turns: list[Turn] = []
    beginning = text(140, 0)
    for conversation in range(2):
        said = beginning + text(16 + 3 * conversation, 10 + conversation)
        for turn in range(3):
            request = answer(engine, said)
            turns.append(check(oracle, request, turns))
            said = turns[-1].tokens + text((95, 60, 0)[turn], 20 + 3 * conversation + turn)
    hits = [turn.request.sequences[0].hit for turn in turns]
    assert hits[0].length == 0
    if replay:
        assert [hit.length for hit in hits[1:]] == [128, 256, 128, 128, 256]
    restored = [hit.length > 0 and hit.start == hit.length for hit in hits]
    assert any(restored) == (engine.snapshots.budget_bytes > 0)
    assert any(hit.start < hit.length for hit in hits) == (replay and not all(restored[1:]))


def test_the_same_prompt_again(engine: Engine, oracle: ReplayOracle) -> None:
    engine.scheduler.ledgers[0].forget_cached()
    prompt = text(301, 77)
    first = check(oracle, answer(engine, prompt), [])
    again = check(oracle, answer(engine, prompt), [first])
    assert first.request.sequences[0].num_cached_tokens == 0
    if engine.config.replay.encoder == "on":
        assert again.request.sequences[0].num_cached_tokens == 256
    assert engine.metrics.prefix_hits > 0 or engine.config.replay.encoder == "off"


def test_a_preempted_answer_goes_on_by_the_definition_over_all_its_tokens(engine: Engine, oracle: ReplayOracle) -> None:
    """Sent back by hand while it decodes: the rest of its answer is that of a prompt of all tokens so far."""
    engine.scheduler.ledgers[0].forget_cached()
    request = engine.add_request(text(150, 5), dataclasses.replace(GREEDY, max_tokens=20))
    (sequence,) = request.sequences
    while len(sequence.output_ids) < 7:
        engine.step()
    engine._drain()
    (rank,) = engine.scheduler.ranks
    engine.scheduler._preempt(rank, rank.ledgers[0], 0.0)
    known = list(sequence.output_ids)
    engine.scheduler.ledgers[0].forget_cached()
    while not request.finished:
        engine.step()
    assert sequence.num_preemptions == 1 and sequence.output_ids[: len(known)] == known
    run = oracle.prefill(request.prompt_ids + known, keep_tokens=KEEP)
    for token in sequence.output_ids[len(known) :]:
        if run.margin <= CERTAIN:
            break
        assert token == run.token
        run = oracle.decode(run, token)


def test_another_hit_is_seen(engine: Engine, oracle: ReplayOracle) -> None:
    """Negative control: an oracle that keeps other rows of the prompt says something else."""
    engine.scheduler.ledgers[0].forget_cached()
    prompt = text(320, 91)
    request = answer(engine, prompt)
    run, cut = oracle.prefill(prompt, keep_tokens=KEEP), oracle.prefill(prompt)
    assert np.abs(run.logits[-1] - cut.logits[-1]).max() > 1e-3
    found = request.sequences[0].logprobs[0]
    assert abs(found - logprob(run)) < abs(found - logprob(cut)) / 5


def logprob(run: OracleRun) -> float:
    """Of the likeliest token."""
    row = run.logits[-1].astype(np.float64)
    return -float(np.log(np.exp(row - row.max()).sum()))
