"""verify, accept and draft against decoding without drafts: answers, caches, books and what must not be touched.

The numbers T1, T2, ... are those of the test list of dspark 7.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_model import REAL, tiny_numerics
from hypothesis import given, settings
from hypothesis import strategies as st
from speculative_lab import CUT, DRAFTS, FULL, IDS, PLAIN, REQUESTS, SLOTS, Lab, Lane, verify_bucket

from di_jax.engine.acceptance import COUPLED, ONE_HOT, PROBABILISTIC, Proposal
from di_jax.engine.allocation import allocate_reference
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.runner import ModelRunner
from di_jax.engine.speculative_programs import DraftSettings
from di_jax.engine.speculative_steps import plain_accept
from di_jax.engine.step_plan import Bucket, StepPlan
from di_jax.model import transformer
from di_jax.model.attention import Attention
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows
from di_jax.parallel.mesh import DeviceMesh, Parallel

CLOSE = 1e-4  # of log-probabilities: other sums for other numbers of rows
LONG = 40  # tokens of an answer
PROMPTS = [np.random.default_rng(n).integers(3, 500, n).tolist() for n in (7, 61)]
PLACES = ((2, (1, 2)), (0, (4, 3)))  # slot and blocks of the two answers
TWINS = ((1, (5, 6)), (3, (7, 8)))  # of the same without drafts


def lanes_at(places: Sequence[Any], prompts: Sequence[Sequence[int]] = PROMPTS, **changes: Any) -> list[Lane]:
    return [Lane(prompt, slot, blocks, **changes) for prompt, (slot, blocks) in zip(prompts, places)]


@pytest.fixture(scope="module")
def lab() -> Lab:
    made = Lab()
    made.runner.warm_up([made.prefills, PLAIN, FULL])
    return made


@pytest.fixture
def way(lab: Lab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The lab's runner drafts in this way, for one test."""
    if request.param not in WAYS:
        WAYS[request.param] = lab.drafting(request.param)
    monkeypatch.setattr(lab.runner, "_speculative", WAYS[request.param])
    return str(request.param)


WAYS: dict[str, Any] = {}


def undrafted(lab: Lab, lanes: Sequence[Lane], count: int = LONG) -> list[Lane]:
    """The lanes' twins after `count` tokens decoded without drafts."""
    twins = [
        dataclasses.replace(lane, slot=slot, blocks=blocks, said=[], logprobs=[])
        for lane, (slot, blocks) in zip(lanes, TWINS)
    ]
    lab.prefill(twins)
    while len(twins[0].said) < count:
        lab.plain(twins)
    return twins


@pytest.fixture(scope="module")
def truth(lab: Lab) -> list[Lane]:
    """Greedy answers, without drafts."""
    return undrafted(lab, lanes_at(PLACES))


def assert_same(lanes: Sequence[Lane], twins: Sequence[Lane]) -> None:
    for lane, twin in zip(lanes, twins):
        count = min(len(lane.said), len(twin.said))
        assert lane.said[:count] == twin.said[:count]
        np.testing.assert_allclose(lane.logprobs[:count], twin.logprobs[:count], atol=CLOSE)


# ---- answers ----

OWN, GARBAGE, RIGHT, NOISE, NONE = "own", "garbage", "right", "noise", "none"


def give(lab: Lab, lane: Lane, twin: Lane, kind: str, seed: int) -> None:
    """Drafts of a kind in place of the draft's own."""
    rng, at = np.random.default_rng(seed), len(lane.said)
    if kind == GARBAGE:
        lab.give(lane, rng.integers(0, IDS, DRAFTS))
    elif kind == RIGHT:
        lab.give(lane, twin.said[at : at + DRAFTS])
    elif kind == NOISE:
        lab.give(lane, [CUT.dspark_noise_token_id] * DRAFTS)
    elif kind == NONE:  # placeholders from some place on
        drafts = lab.host("draft_token")[lane.slot]
        drafts[rng.integers(0, DRAFTS) :] = -1
        lab.give(lane, drafts)


one_step = st.tuples(
    st.lists(st.sampled_from((OWN, GARBAGE, RIGHT, NOISE, NONE)), min_size=REQUESTS, max_size=REQUESTS),
    st.lists(st.integers(0, DRAFTS), min_size=REQUESTS, max_size=REQUESTS),
    st.integers(0, 1000),
)


@settings(max_examples=12)
@given(steps=st.lists(one_step, min_size=4, max_size=7))
def test_any_drafts_and_lengths_give_the_greedy_answer(lab: Lab, truth: list[Lane], steps: list[Any]) -> None:
    """T1, T2, T20: whatever is drafted and verified. Right drafts are all kept, and nothing compiles."""
    lanes = lanes_at(PLACES)
    compilations = COMPILATIONS.count
    lab.prefill(lanes)
    for kinds, caps, seed in steps:
        lab.draft(lanes)
        for lane, twin, kind in zip(lanes, truth, kinds):
            give(lab, lane, twin, kind, seed)
        known = [(lab.host("draft_token")[lane.slot] >= 0).sum() for lane in lanes]
        output = lab.verify(lanes, caps)
        emitted = (output.token >= 0).sum(axis=1)
        assert output.verified.tolist() == np.minimum(caps, known).tolist()
        assert (emitted <= output.verified + 1).all() and (emitted >= 1).all()
        for place, kind in enumerate(kinds):
            if kind == RIGHT:
                assert emitted[place] == output.verified[place] + 1
        assert lab.host("length")[[lane.slot for lane in lanes]].tolist() == [lane.length for lane in lanes]
        assert (lab.host("draft_token")[[lane.slot for lane in lanes]] == -1).all()
    assert_same(lanes, truth)
    assert COMPILATIONS.count == compilations


SAMPLED = {"temperature": 0.9}


@pytest.mark.parametrize("way", [PROBABILISTIC, COUPLED, ONE_HOT], indirect=True)
def test_nothing_verified_is_plain_sampling(lab: Lab, way: str) -> None:
    """T3: the same tokens as without drafts, from the same noise."""
    lanes = lanes_at(PLACES, **SAMPLED, seed=2**63 + 11)
    twins = undrafted(lab, lanes, 12)
    lab.prefill(lanes)
    for step in range(11):
        lab.draft(lanes)
        if step % 2:
            lab.verify(lanes, 0)
        else:
            for lane in lanes:
                lab.give(lane, [-1] * DRAFTS)
            lab.verify(lanes)
    assert_same(lanes, twins)
    assert len(set(lanes[0].said)) > 5, "they are sampled"


@pytest.mark.parametrize("way", [COUPLED], indirect=True)
def test_coupled_drafts_change_no_sampled_token(lab: Lab, way: str) -> None:
    """Any drafts and lengths; one lane is greedy."""
    lanes = lanes_at(PLACES, **SAMPLED, seed=5)
    lanes[1].temperature = 0.0
    twins = undrafted(lab, lanes)
    rng = np.random.default_rng(0)
    lab.prefill(lanes)
    kept = 0
    while max(len(lane.said) for lane in lanes) < LONG - DRAFTS:
        lab.draft(lanes)
        kind = rng.choice([OWN, OWN, GARBAGE, RIGHT])
        for lane, twin in zip(lanes, twins):
            give(lab, lane, twin, str(kind), int(rng.integers(99)))
        output = lab.verify(lanes, rng.integers(0, DRAFTS + 1, REQUESTS).tolist())
        kept += int((output.token >= 0).sum()) - REQUESTS
    assert_same(lanes, twins)
    assert kept > 0


def test_probabilistic_drafts_change_the_draws(lab: Lab) -> None:
    """Control of the test above: there the tokens are others, though as likely."""
    lanes = lanes_at(PLACES, **SAMPLED, seed=5)
    twins = undrafted(lab, lanes, 20)
    lab.prefill(lanes)
    while len(lanes[0].said) < 20:
        lab.draft(lanes)
        lab.verify(lanes)
    assert lanes[0].said[:20] != twins[0].said[:20]


def test_a_forced_token(lab: Lab, truth: list[Lane]) -> None:
    lanes = lanes_at(PLACES)
    lab.prefill(lanes)
    lab.draft(lanes)
    output = lab.verify(lanes, [0, DRAFTS], forced=[77, -1])
    assert output.token[0].tolist() == [77] + [-1] * DRAFTS
    assert lab.host("last_token")[lanes[0].slot] == 77
    assert lanes[1].said == truth[1].said[: len(lanes[1].said)]


# ---- extra sampling and masks ----

PENALTIES = {"chosen": 1, "has_state": 1, "frequency": 0.7, "presence": 0.4, "repetition": 1.3, "top": 3}
CUTS = {"chosen": 1, "top_p": 0.8, "top_k": 30, "min_p": 0.01}


@pytest.mark.parametrize("way", [COUPLED], indirect=True)
def test_penalties_words_and_cuts_in_a_block(lab: Lab, truth: list[Lane], way: str) -> None:
    """As by the second program, token by token: a draft counts for the rows behind it, and only emitted ones stay."""
    lanes = lanes_at(PLACES)
    lanes[0].numbers, lanes[1].numbers, lanes[1].temperature = PENALTIES, CUTS, 1.1
    lanes[0].words = [truth[0].said[1:3], truth[0].said[4:7]]
    twins = undrafted(lab, lanes)
    assert twins[0].said != truth[0].said
    rng = np.random.default_rng(0)
    lab.prefill(lanes)
    compilations, kept = -1, 0
    for _ in range(12):
        lab.draft(lanes)
        kind = str(rng.choice([OWN, GARBAGE, RIGHT]))
        for lane, twin in zip(lanes, twins):
            give(lab, lane, twin, kind, int(rng.integers(99)))
        before = len(lanes[0].said)
        output = lab.verify(lanes, rng.integers(0, DRAFTS + 1, REQUESTS).tolist())
        if max(len(lane.said) for lane in lanes) > LONG:
            break
        emitted = len(lanes[0].said) - before
        kept += emitted - 1
        assert output.top is not None
        best = output.top.ids[0, :emitted, 0]
        assert ((output.top.rank[0, :emitted] == 1) == (best == lanes[0].said[before:])).all()
        stated = output.top.logprobs[0, :emitted, 0][output.top.rank[0, :emitted] == 1]
        np.testing.assert_allclose(stated, output.logprob[0, :emitted][output.top.rank[0, :emitted] == 1], atol=1e-6)
        assert compilations in (-1, COMPILATIONS.count)
        compilations = COMPILATIONS.count
    assert_same(lanes, twins)
    assert kept > 0


def test_neutral_rows_are_drawn_as_without(lab: Lab) -> None:
    """To the last bit, beside a neighbour that asks for more."""
    outputs = []
    for numbers in ({}, PENALTIES):
        lanes = lanes_at(PLACES, temperature=0.8, seed=3)
        lab.prefill(lanes)
        lab.draft(lanes)
        lanes[0].numbers = numbers
        outputs.append(lab.verify(lanes))
    for name in ("token", "logprob", "verified", "error"):
        np.testing.assert_array_equal(getattr(outputs[0], name)[1], getattr(outputs[1], name)[1], err_msg=name)


def rule(index: int) -> np.ndarray:
    """A toy automaton: ids leave 0, 1, 2, 0, ... divided by 3."""
    return np.arange(IDS) % 3 == index % 3


def speculate_masked(lab: Lab, lanes: Sequence[Lane], twins: Sequence[Lane]) -> tuple[int, int]:
    """Steps with the lanes' own drafts, garbage and the twins' tokens, to `LONG` tokens at most. Returns what came of
    the first lane's verified drafts: (kept, illegal at their places)."""
    rng = np.random.default_rng(1)
    lab.prefill(lanes)
    kept, illegal, first = 0, 0, lanes[0]
    while max(len(lane.said) for lane in lanes) < LONG - DRAFTS:
        lab.draft(lanes)
        kind = str(rng.choice([OWN, GARBAGE, RIGHT]))
        for lane, twin in zip(lanes, twins):
            give(lab, lane, twin, kind, int(rng.integers(99)))
        drafts, at = lab.host("draft_token")[first.slot], len(first.said)
        output = lab.verify(lanes, rng.integers(0, DRAFTS + 1, REQUESTS).tolist())
        illegal += sum(not rule(at + place)[token] for place, token in enumerate(drafts[: output.verified[0]]))
        kept += len(first.said) - at - 1
    return kept, illegal


def legal(lane: Lane) -> bool:
    return all(rule(index)[token] for index, token in enumerate(lane.said))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", [COUPLED, PROBABILISTIC, ONE_HOT], indirect=True)
def test_masks_by_place(lab: Lab, way: str, temperature: float) -> None:
    """T18: every token obeys its place, whatever was drafted, and the answer is that without drafts, but for sampled
    ones of uncoupled drafts. The second lane is the control that nobody masks."""
    lanes = lanes_at(PLACES, seed=9, temperature=temperature)
    lanes[0].rule, lanes[1].temperature = rule, 1.0
    twins = undrafted(lab, lanes)
    assert legal(twins[0]) and not legal(twins[1])
    kept, illegal = speculate_masked(lab, lanes, twins)
    assert kept > 0 and illegal > 0, "masks judged drafts of both kinds"
    assert legal(lanes[0]) and not legal(lanes[1])
    for lane, twin in zip(lanes, twins):
        count = min(len(lane.said), len(twin.said))
        if way == COUPLED or not lane.temperature:
            assert_same([lane], [twin])
        else:
            assert lane.said[:count] != twin.said[:count], "drafts change the draws"


@pytest.mark.slow
@pytest.mark.parametrize("way", [COUPLED, PROBABILISTIC, ONE_HOT], indirect=True)
def test_masks_of_other_places_are_seen(lab: Lab, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: all rows of a block get its first row's mask."""
    lanes = lanes_at(PLACES, seed=9, temperature=1.0)
    lanes[0].rule = rule
    twins = undrafted(lab, lanes)
    of_places = Lab._masks

    def of_the_first(lanes: Sequence[Lane], sequences: int, places: int) -> np.ndarray | None:
        masks = of_places(lanes, sequences, places)
        return None if masks is None else np.repeat(masks[:, :1], places, axis=1)

    monkeypatch.setattr(lab, "_masks", of_the_first)
    speculate_masked(lab, lanes, twins)
    assert not legal(lanes[0])


# ---- caches ----


def known(lab: Lab, lane: Lane) -> dict[str, np.ndarray]:
    """All that the caches hold of positions below the lane's length and that anybody may still read."""
    layout, end = lab.layout, lane.length
    c = layout.config
    host = {name: lab.host(name) for name in ("window", "compressed", "index", "compressor", "engram_history")}
    near = np.arange(max(0, end - c.sliding_window), end)
    found = {"window": host["window"][:, lane.slot, near % c.window_ring]}
    for source, ratio in enumerate(c.kv_source_ratios):
        rows = entry_rows(layout, source, lane)[: end // ratio]
        for name in ("compressed", "index"):
            found[f"{name} {source}"] = host[name].reshape(-1, host[name].shape[-1])[rows]
        if source in c.pooled_sources:
            group = np.arange(end // ratio * ratio, end)
            ring = host["compressor"][c.pooled_sources.index(source), lane.slot]
            found[f"open group {source}"] = ring[group % len(ring)]
    back = np.arange(max(0, end - c.engram_look_back), end)
    found["engram"] = host["engram_history"][lane.slot, back % c.engram_history]
    return found


def entry_rows(layout: CacheLayout, source: int, lane: Lane) -> np.ndarray:
    """Rows of the flat pools, of all entries that the lane's blocks have room for."""
    entries = jnp.arange(len(lane.blocks) * layout.block_size // layout.config.kv_source_ratios[source])
    return np.asarray(layout.entry_row(source, jnp.asarray(lane.blocks), entries))


def far(mine: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Which values differ by more than another order of sums explains; codes of bytes where they differ at all."""
    return np.abs(mine.astype(np.float64) - expected.astype(np.float64)) > 1e-4


def poison(lab: Lab, lanes: Sequence[Lane]) -> None:
    """NaN wherever `known` does not look, of the lanes' slots and blocks; strange ids in the Engram's history."""
    layout = lab.layout
    c = layout.config
    host = {name: lab.host(name) for name in ("window", "compressed", "index", "compressor", "engram_history")}
    for lane in lanes:
        end = lane.length
        dead = np.ones(c.window_ring, bool)
        dead[np.arange(max(0, end - c.sliding_window), end) % c.window_ring] = False
        host["window"][:, lane.slot, dead] = not_a_number(host["window"])
        for source, ratio in enumerate(c.kv_source_ratios):
            rows = entry_rows(layout, source, lane)[end // ratio :]
            for name in ("compressed", "index"):
                host[name].reshape(-1, host[name].shape[-1])[rows] = not_a_number(host[name])
            if source in c.pooled_sources:
                ring = host["compressor"][c.pooled_sources.index(source), lane.slot]
                dead = np.ones(len(ring), bool)
                dead[np.arange(end // ratio * ratio, end) % len(ring)] = False
                ring[dead] = np.nan
        dead = np.ones(c.engram_history, bool)
        dead[np.arange(max(0, end - c.engram_look_back), end) % c.engram_history] = False
        host["engram_history"][lane.slot, dead] = 5
    lab.set(**host)


def not_a_number(array: np.ndarray) -> Any:
    """0xFF is NaN as an e4m3 code, and the largest scale."""
    return np.nan if array.dtype == np.float32 else 255


# Accepted drafts by step: from an odd and from an even length every count occurs, read forwards and backwards. An even
# count, with the token behind it, turns an odd length into an even one.
ACCEPTED = (1, 3, 5, 0, 1, 3, 5, 0, 2, 2, 4, 4)
EVERY_COUNT = set(itertools.product((0, 1), range(DRAFTS + 1)))  # length mod 2, accepted drafts


def give_accepted(lab: Lab, lane: Lane, twin: Lane, accepted: int, rng: np.random.Generator) -> None:
    """Drafts of which a greedy lane keeps the first `accepted`: right ones, a wrong one and others behind it."""
    drafts, right = rng.integers(0, IDS, DRAFTS), twin.said[len(lane.said) :][:DRAFTS]
    drafts[:accepted] = right[:accepted]
    if accepted < DRAFTS:
        drafts[accepted] = (right[accepted] + 1) % IDS
    lab.give(lane, drafts)


def check_rollback(lab: Lab, rounding: float) -> None:
    """T10, after every step. rounding: the share of each cache's values that may differ from those of the twins."""
    prompts = [PROMPTS[0], np.random.default_rng(3).integers(3, 500, 118).tolist()]
    twins = lanes_at(TWINS, prompts)
    lab.prefill(twins, 64)
    books: list[dict[int, dict[str, np.ndarray]]] = [{}, {}]  # of each twin, what is known at each length
    while len(twins[0].said) <= sum(ACCEPTED) + len(ACCEPTED) + 1 + DRAFTS:
        for book, twin in zip(books, twins):
            book[twin.length] = known(lab, twin)
        lab.plain(twins)
    runs: list[list[Any]] = []
    for dirty in (False, True):
        rng = np.random.default_rng(4)
        lanes = lanes_at(PLACES, prompts)
        lab.prefill(lanes, 40)
        outputs: list[Any] = []
        counts: list[list[tuple[int, int]]] = [[], []]
        differs: dict[str, list[np.ndarray]] = {}
        for accepted in zip(ACCEPTED, reversed(ACCEPTED)):
            outputs.append(lab.draft(lanes))
            for lane, twin, count in zip(lanes, twins, accepted):
                give_accepted(lab, lane, twin, count, rng)
            before = [lane.length for lane in lanes]
            # The first lane's blocks end at a wrong draft, the second's there or at its cap.
            outputs.append(lab.verify(lanes, [DRAFTS, int(rng.integers(accepted[1], DRAFTS + 1))]))
            for place, (lane, book) in enumerate(zip(lanes, books)):
                counts[place].append((before[place] % 2, lane.length - before[place] - 1))
                for name, mine in known(lab, lane).items():
                    expected = book[lane.length][name]
                    assert expected.size or name.startswith("open"), name
                    differs.setdefault(name, []).append(far(mine, expected).reshape(-1))
            if accepted[0] < DRAFTS:
                # The control: one position more, and the rejected draft's row is seen in every ring.
                longer = dataclasses.replace(lanes[0], said=[*lanes[0].said, 0])
                seen = far(known(lab, longer)["window"], books[0][longer.length]["window"])
                assert seen[:, -1].any(axis=-1).all()
            if dirty:
                poison(lab, lanes)
        assert_same(lanes, twins)
        for found, script in zip(counts, (ACCEPTED, ACCEPTED[::-1])):
            assert [count for _, count in found] == list(script)
            assert set(found) == EVERY_COUNT
        assert lanes[1].length > lab.layout.block_size > len(prompts[1])
        assert lanes[0].length > 2 * lab.layout.config.window_ring, "around the rings"
        for name, parts in differs.items():
            assert np.concatenate(parts).mean() <= rounding, name
        runs.append(outputs)
    for clean, dirty in zip(*runs, strict=True):
        for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(one, other)


def test_caches_are_those_of_a_run_without_drafts(lab: Lab) -> None:
    """T10: every count of accepted drafts at odd and even lengths, over the end of a block and around the rings; dead
    rows are never read."""
    check_rollback(lab, 0.0)


def test_a_live_row_that_is_lost_is_seen(lab: Lab, truth: list[Lane]) -> None:
    """Control of the poison: one position more, and the next step's numbers are none."""
    lanes = lanes_at(PLACES)
    lab.prefill(lanes)
    lanes[1].said.pop()  # as if it were a token shorter
    poison(lab, lanes)
    lanes[1].said.append(truth[1].said[0])
    lab.draft(lanes)
    output = lab.verify(lanes, 0)
    assert np.isfinite(output.logprob[0, 0]) and not np.isfinite(output.logprob[1, 0])


def canary(lab: Lab) -> dict[str, np.ndarray]:
    """Fills the whole state with noise but for the books of the lanes, and returns it."""
    rng = np.random.default_rng(8)
    filled = {}
    for field in dataclasses.fields(EngineState):
        array = lab.host(field.name)
        values = rng.integers(1, 100, array.shape)
        filled[field.name] = values.astype(array.dtype)
    lab.set(**filled)
    return filled


def changed(lab: Lab, before: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Slots or blocks that differ from `before`, by array."""
    found = {}
    for name, axes in CacheLayout.logical_axes().items():
        axis = axes.index("blocks" if "blocks" in axes else "slots")
        differs = np.moveaxis(lab.host(name) != before[name], axis, 0)
        found[name] = np.flatnonzero(differs.reshape(len(differs), -1).any(axis=1)).tolist()
    return found


def test_padding_and_dead_sequences_write_nothing(lab: Lab) -> None:
    """T8: rows of nobody, a sequence without a cap and one whose answer is full leave every byte alone."""
    before = canary(lab)
    lane, full = lanes_at(PLACES)
    length, full_length = 20, 30
    lab.set(length=np.array([full_length, 3, length, 4, 5], np.int32))
    before["length"] = lab.host("length")
    lane.max_tokens = 60
    full.max_tokens = full_length + 1 - len(full.prompt)  # its last token is out
    output = lab.verify([lane, full], [2, 3])
    assert output.verified.tolist() == [2, -1]
    assert (output.token[1] == -1).all() and (output.logprob[1] == 0).all() and output.error[1] == 0
    touched = changed(lab, before)
    for name, where in touched.items():
        assert where in ([], [lane.slot], [lane.blocks[0]]), (name, where)
    assert touched["length"] == touched["draft_token"] == touched["window"] == [lane.slot]
    assert touched["compressed"] == touched["index"] == [lane.blocks[0]]
    before = {name: lab.host(name) for name in before}
    output = lab.verify([lane, full], [-1, -1])
    assert output.verified.tolist() == [-1, -1] and not any(changed(lab, before).values())
    lab.draft([])
    assert not any(changed(lab, before).values())
    lab.draft([lane])
    drafts = {name: [lane.slot] for name in ("draft_token", "draft_confidence", "draft_logits", "draft_norm")}
    assert {name: where for name, where in changed(lab, before).items() if where} == drafts
    lab.runner.reset()


def test_an_answer_never_grows_beyond_its_end(lab: Lab, truth: list[Lane]) -> None:
    """T19: right drafts up to max_tokens; the last token is never fed."""
    lanes = lanes_at(PLACES, max_tokens=13)
    lab.prefill(lanes)
    for _ in range(5):
        lab.draft(lanes)
        for lane, twin in zip(lanes, truth):
            lab.give(lane, twin.said[len(lane.said) : len(lane.said) + DRAFTS])
        output = lab.verify(lanes)
    assert [lane.said for lane in lanes] == [twin.said[:13] for twin in truth]
    assert output.verified.tolist() == [-1, -1]
    assert [lab.host("length")[lane.slot] for lane in lanes] == [len(lane.prompt) + 12 for lane in lanes]


def test_which_drafts_are_verified(lab: Lab) -> None:
    """T4, T7: the likeliest by survival, as the reference says, for any budget; more than the rows hold is cut."""
    rng = np.random.default_rng(5)
    small = verify_bucket(4)
    for budget in (0, 1, 4, 7, 99):
        for bucket in (FULL, small) if budget == 99 else (FULL,):
            lanes = lanes_at(PLACES)
            lab.prefill(lanes)
            stated = rng.uniform(0.2, 1, (REQUESTS, DRAFTS)).astype(np.float32)
            for lane, own in zip(lanes, stated):
                lab.give(lane, rng.integers(0, IDS, DRAFTS), own)
            caps = rng.integers(2, DRAFTS + 1, REQUESTS)
            output = lab.verify(lanes, caps.tolist(), budget, bucket)
            room = min(budget, bucket.rows - REQUESTS)
            assert output.verified.tolist() == allocate_reference(stated, caps, room).tolist()


# ---- books ----


@pytest.mark.parametrize("way", [ONE_HOT, COUPLED], indirect=True)
def test_errors_of_the_confidence(lab: Lab, truth: list[Lane], way: str) -> None:
    """Right drafts: one-hot ones should be kept by the chance that the target gives them, coupled ones always."""
    lanes = lanes_at(PLACES)
    lab.prefill(lanes)
    lab.draft(lanes)
    stated = np.array([0.9, 0.2, 0.6, 0.5, 0.7])
    for lane, twin in zip(lanes, truth):
        lab.give(lane, twin.said[1 : 1 + DRAFTS], stated)
    output = lab.verify(lanes, [5, 3])
    for place, verified in enumerate((5, 3)):
        chance = np.exp(output.logprob[place, :verified]) if way == ONE_HOT else 1.0
        assert output.error[place] == pytest.approx(np.abs(chance - stated[:verified]).sum(), abs=1e-4)
    lab.draft(lanes)
    lab.give(lanes[0], [*truth[0].said[7:9], 0, 0, 0], stated)
    assert 0 not in truth[0].said
    error = lab.verify(lanes, [5, 0]).error
    if way == COUPLED:
        assert error[0] == pytest.approx(0.1 + 0.8 + 0.6, abs=1e-6), "two kept, one not, the others undecided"
    assert error[1] == 0


def test_accept_by_the_numbers() -> None:
    """Probabilistic drafts, with logits that are given: errors, acceptance rates and the tokens behind them."""
    ids, k, requests = 6, 2, 4000
    rng = np.random.default_rng(6)
    p, q = (rng.normal(size=(k + 1, ids)).astype(np.float32) for _ in range(2))
    way = DraftSettings(k, PROBABILISTIC)
    config = dataclasses.replace(CUT, vocab_size=ids)
    layout = CacheLayout(config, tiny_numerics("nokvq").formats, 1, requests, num_drafts=k)
    state = layout.allocate()
    proposal = Proposal.of(jnp.asarray(np.broadcast_to(q[:k], (requests, k, ids))))
    chance_q = np.exp(np.asarray(proposal.logprobs())[0])
    drafts = np.stack([rng.choice(ids, requests, p=row / row.sum()) for row in chance_q], axis=1).astype(np.int32)
    stated = rng.uniform(size=(requests, k)).astype(np.float32)
    state = state.replace(
        length=jnp.full(requests, 9, jnp.int32),
        draft_token=jnp.asarray(drafts),
        draft_confidence=jnp.asarray(stated),
        draft_logits=proposal.logits,
        draft_norm=proposal.norm,
    )
    hidden = jnp.asarray(np.tile(p, (requests, 1)))[None]  # the head is the identity
    fields = np.zeros((1, 6, requests), np.int32)
    fields[0, 0], fields[0, 1], fields[0, 3], fields[0, 5] = np.arange(requests), 5, np.arange(requests) * 7, -1
    fields[0, 2] = np.float32(1).view(np.int32)
    verified = jnp.full((1, requests), k, jnp.int32)
    run = jax.jit(lambda *given: plain_accept(way, jnp.eye(ids), *given))
    output, after = run(state, hidden, verified, jnp.asarray(fields))
    (answer,) = output.host()
    chance_p = np.exp(p - np.log(np.exp(p).sum(axis=1, keepdims=True)))
    overlap = np.minimum(chance_p[:k], chance_q).sum(axis=1)
    np.testing.assert_allclose(answer.error, np.abs(overlap - stated).sum(axis=1), atol=1e-4)
    count = np.asarray(after.length) - 10
    np.testing.assert_array_equal((answer.token >= 0).sum(axis=1), count + 1)
    rates = [(count > 0).mean(), (count > 1).sum() / (count > 0).sum()]
    np.testing.assert_allclose(rates, overlap, atol=4 * 0.5 / np.sqrt(requests / 4))
    first = np.bincount(answer.token[:, 0], minlength=ids) / requests
    np.testing.assert_allclose(first, chance_p[0], atol=4 * 0.5 / np.sqrt(requests))
    assert np.abs(first - chance_q[0]).max() > 0.1, "drafts alone are distributed otherwise"
    np.testing.assert_array_equal(after.last_token, answer.token[np.arange(requests), count])
    logprob = np.log(chance_p)[np.arange(k + 1), np.maximum(answer.token, 0)]
    np.testing.assert_allclose(answer.logprob, np.where(answer.token >= 0, logprob, 0), atol=1e-4)


def test_the_whole_state_is_updated_in_place(lab: Lab) -> None:
    """By all programs: neither the caches nor the distributions of drafts, which most leave as they are, are copied."""
    runner: Any = lab.runner
    programs, weights, slots = runner._speculative, runner._weights, runner._sampling.abstract_state
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(lab.layout.abstract()))
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))
    sizes = {
        "prefill": (runner.compiled(lab.prefills), whole),
        "verify": (runner.compiled(FULL), whole),
        "accept": (programs._accept(weights, slots, REQUESTS, FULL.rows, False), whole),
        "extra": (programs._accept(weights, slots, REQUESTS, FULL.rows, True), whole + own),
        "draft": (programs._draft(weights, REQUESTS), whole),
    }
    for name, (executable, expected) in sizes.items():
        memory = executable.memory_analysis()
        assert memory.alias_size_in_bytes == expected, name
        # Results beside the state are small: a copy of what is passed through would be seen here.
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 64_000, name


def copies_of_rings(lab: Lab, bucket: Bucket) -> int:
    """Copies of all window rings in the step of a bucket."""
    window = lab.layout.abstract().window
    shape = f"f32[{','.join(map(str, window.shape))}]"
    assert window.dtype == np.float32
    text = lab.runner.lower(bucket).compile().as_text()
    assert shape in text
    return len(re.findall(rf"= {re.escape(shape)}\S* copy\(", text))


@pytest.mark.parametrize(
    "bucket", [pytest.param(PLAIN, marks=pytest.mark.slow, id="plain"), pytest.param(FULL, id="verify")]
)
def test_no_step_copies_its_rings(lab: Lab, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's context goes into the rings that the last layer reads, once it has read them. The control: when
    nothing says so, there are two versions of the rings."""
    assert copies_of_rings(lab, bucket) == 0
    monkeypatch.setattr(transformer.lax, "optimization_barrier", lambda values: values)
    assert copies_of_rings(lab, bucket) > 0


def test_a_bare_step_is_a_plain_one_that_leaves_the_draft_no_context(lab: Lab) -> None:
    bare = dataclasses.replace(PLAIN, bare=True)
    found = []
    for bucket in (PLAIN, bare):
        lab.runner.reset()
        lanes = lanes_at(PLACES)
        lab.prefill(lanes)
        lab.draft(lanes)
        before = lab.host("window")
        for _ in range(3):
            lab.plain(lanes, bucket=bucket)
        assert (lab.host("draft_token")[[2, 0]] == -1).all(), "drafts follow another token now"
        found.append(([lane.said for lane in lanes], [lane.logprobs for lane in lanes], before, lab.host("window")))
    layers = CUT.num_hidden_layers
    (said, logprobs, _, with_context), (same, close, before, without) = found
    assert said == same and max(map(len, said)) == 4
    np.testing.assert_allclose(logprobs, close, atol=CLOSE)
    np.testing.assert_allclose(with_context[:layers], without[:layers], atol=CLOSE)
    assert (without[layers:] == before[layers:]).all() and (with_context[layers:] != before[layers:]).any()
    lab.runner.reset()


def test_what_is_asked_in_the_wrong_way_is_refused(lab: Lab) -> None:
    with pytest.raises(ValueError, match="without drafts is for `execute`"):
        lab.runner.verify([step_plan(PLAIN)])
    with pytest.raises(ValueError, match="with drafts is for `verify`"):
        lab.runner.execute([step_plan(FULL)])
    with pytest.raises(ValueError, match="6 drafts of a block of 5"):
        DraftSettings(6).check(lab.layout)
    with pytest.raises(ValueError, match="caches for 5 drafts"):
        DraftSettings(3).check(lab.layout)
    with pytest.raises(ValueError, match="1 temperatures for 5 drafts"):
        DraftSettings(5, temperatures=(1.0,)).check(lab.layout)
    with pytest.raises(ValueError, match="give neutral rows with them"):
        lab.runner.accept(lab.runner.verify([step_plan(FULL)]), None, [np.zeros((REQUESTS, 6, 16), np.int32)])


def step_plan(bucket: Bucket) -> StepPlan:
    """All zeros: nobody's step."""
    return StepPlan(bucket, np.zeros(bucket.size, np.int32), ())


def test_a_program_cut_short_leaves_an_empty_state(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: Any = lab.runner._speculative
    for name in ("accept", "draft"):
        lanes = lanes_at(PLACES)
        lab.prefill(lanes)
        lab.draft(lanes)
        resets, whole = lab.runner.resets, getattr(programs, name)

        def cut_short(*arguments: Any, whole: Any = whole) -> Any:
            whole(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(programs, name, cut_short)
            lab.verify(lanes)
            lab.draft(lanes)
        assert lab.runner.resets == resets + 1
        assert not lab.host("length").any()


def test_drafts_of_an_earlier_owner_are_never_verified(lab: Lab) -> None:
    """T14: a prompt that is sampled in a slot throws its drafts away; one that is not yet at its end does not."""
    lanes = lanes_at(PLACES)
    lab.prefill(lanes)
    lab.draft(lanes)
    assert (lab.host("draft_token")[[2, 0]] >= 0).all()
    lab.prefill(lanes_at(PLACES)[:1])
    assert (lab.host("draft_token")[2] == -1).all() and (lab.host("draft_token")[0] >= 0).all()


# ---- what takes programs of its own ----


@pytest.fixture
def ring_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def changed(**rings: int) -> None:
        for name, size in rings.items():
            monkeypatch.setattr(ModelConfig, name, property(lambda self, size=size: size))

    yield changed


def stream_of(lab: Lab, count: int = 24) -> list[Lane]:
    """Greedy, with five drafts verified in every step of which none is kept."""
    lanes = lanes_at(PLACES)
    lab.prefill(lanes)
    rng = np.random.default_rng(7)
    while len(lanes[0].said) < count:
        for lane in lanes:
            lab.give(lane, rng.integers(0, IDS, DRAFTS))
        lab.verify(lanes)
    return lanes


def assert_rings_are_enough(truth: list[Lane], enough: bool) -> None:
    """With rings of the sizes that were set, the stream says what it does with ample ones; or else not `enough`."""
    lanes = stream_of(Lab())
    if enough:
        assert_same(lanes, truth)
    else:
        with pytest.raises(AssertionError):
            assert_same(lanes, truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rings", "enough"),
    [
        ({"window_ring": CUT.sliding_window + 5, "compressor_ring": 6, "engram_history": 8}, True),
        ({"window_ring": CUT.sliding_window + 4}, False),
        ({"compressor_ring": 5}, False),
        ({"engram_history": 7}, False),
    ],
)
def test_the_least_rings(truth: list[Lane], ring_sizes: Any, rings: dict[str, int], enough: bool) -> None:
    """T10: windows are stored before they are read, so that the last draft may not overwrite the row that leaves the
    first one's window. Open groups are read before they are stored, so a step's own rows are enough; a store that came
    first would need 7. Look-backs are read first too, and two ids of before the step must outlive it."""
    ring_sizes(**rings)
    assert_rings_are_enough(truth, enough)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "enough"), [(CUT.sliding_window + 4, True), (CUT.sliding_window + 3, False)])
def test_a_step_that_reads_its_windows_first_needs_a_row_less(
    truth: list[Lane], ring_sizes: Any, monkeypatch: pytest.MonkeyPatch, rows: int, enough: bool
) -> None:
    """T10: 132 rows of the released model, which are too few for a step that stores first (`test_the_least_rings`).
    Verification attends as prefill does here: to the ring as it was, and to its own rows beside it. This is of the
    target; a draft's window reaches a position further back and takes 133 in either order."""
    whole = Attention.__call__

    def read_first(
        self: Attention,
        plan: Any,
        layer: Any,
        x: Any,
        latent_query: Any,
        selected: Any,
        cos_sin: Any,
        rows: Rows,
        *caches: Any,
    ) -> Any:
        as_prefill = dataclasses.replace(rows, decode=False)
        return whole(self, plan, layer, x, latent_query, selected, cos_sin, as_prefill, *caches)

    monkeypatch.setattr(Attention, "__call__", read_first)
    ring_sizes(window_ring=rows)
    assert_rings_are_enough(truth, enough)


@pytest.mark.slow
def test_quantized_caches() -> None:
    """T10, with records of bytes: a code in a thousand may round otherwise for another number of rows."""
    check_rollback(Lab("kvq"), 1e-3)


@pytest.mark.slow
def test_fewer_drafts_than_the_block_has(truth: list[Lane]) -> None:
    """The first three are those of five; no distributions are kept for one-hot drafts."""
    five, three = Lab(way=ONE_HOT), Lab(way=ONE_HOT, num_drafts=3, temperatures=(2.0, 1.0, 0.5))
    assert three.runner.state.draft_logits is three.runner.state.draft_norm is None
    drafts = []
    for lab in (five, three):
        lanes = lanes_at(PLACES)
        lab.prefill(lanes)
        for _ in range(6):
            drafts.append(lab.draft(lanes))
            lab.verify(lanes)
        assert_same(lanes, truth)
    np.testing.assert_array_equal(drafts[0].token[:, :3], drafts[6].token)
    odds = [np.log(d.confidence[:, :3] / (1 - d.confidence[:, :3])) for d in (drafts[0], drafts[6])]
    np.testing.assert_allclose(odds[0], odds[1] * [2.0, 1.0, 0.5], atol=1e-3)


MESHES = {"dp2ep2": DeviceMesh(dp=2, ep=2), "cp2ep2": DeviceMesh(cp=2, ep=2), "dp2cp2ep4": DeviceMesh(2, 2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_meshes(truth: list[Lane], lab: Lab, name: str) -> None:
    """The same answers and drafts from every rank, the draft's experts spread over them; context ranks share a prompt
    and each stores the draft's context of all of it."""
    single = lanes_at(PLACES)
    lab.prefill(single)
    expected = lab.draft(single)
    spread = Lab(parallel=Parallel(MESHES[name]))
    lanes = lanes_at(PLACES)
    spread.prefill(lanes)
    drafts = spread.draft(lanes)
    np.testing.assert_array_equal(drafts.token, expected.token)
    np.testing.assert_allclose(drafts.confidence, expected.confidence, atol=1e-4)
    while len(lanes[0].said) < 20:
        spread.verify(lanes)
        spread.draft(lanes)
    assert_same(lanes, truth)
    for rank in range(1, spread.ranks):
        for array in ("draft_token", "length"):
            whole = spread.host(array)
            np.testing.assert_array_equal(whole[rank * SLOTS : (rank + 1) * SLOTS], whole[:SLOTS], err_msg=array)


def test_bytes_of_a_released_sequence() -> None:
    """Drafts take 1,505,116 B of a sequence: rings of three stages, distributions of five drafts, and 60 B."""
    plain = CacheLayout(REAL, CacheFormats.quantized(), 3, 2)
    drafting = dataclasses.replace(plain, draft_stages=3, num_drafts=5)
    rings, logits = 3 * 134 * 528, 5 * 129_280 * 2
    assert drafting.bytes_per_slot - plain.bytes_per_slot == rings + logits + 3 * 5 * 4 == 1_505_116
    keyed = dataclasses.replace(drafting, keeps_proposal=False)
    assert keyed.bytes_per_slot - plain.bytes_per_slot == rings + 2 * 5 * 4


def test_a_runner_without_a_draft(lab: Lab) -> None:
    layout = dataclasses.replace(lab.layout, draft_stages=0, num_drafts=0)
    plain = ModelRunner(lab.target, layout)
    assert not plain.speculates and lab.runner.speculates
    assert plain.state.draft_token is plain.state.draft_confidence is plain.state.draft_logits is None
    with pytest.raises(ValueError, match="without a draft"):
        plain.draft([np.zeros((8, 1), np.int32)])
