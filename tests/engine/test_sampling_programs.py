"""The second program against the transforms over the step's own logits: what it draws, keeps and leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_model import TINY

from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.extra_sampling import COLUMNS, NEUTRAL, NO_ID, ExtraSampling, pack_rows
from di_jax.engine.runner import LOGITS, ModelRunner
from di_jax.engine.sampling_programs import NO_SLOT, slot_bytes
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, Bucket, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout
from di_jax.model.linear import Numerics
from di_jax.model.transformer import Transformer, parameter_paths
from di_jax.sampling_params import SamplingParams

SMALL = dataclasses.replace(
    TINY,
    num_hidden_layers=2,
    compress_ratios=(0, 0),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    engram_layer_ids=(),
    engram_num_embeddings=(),
    quantization=None,
)
PREFILL, DECODE = Bucket(False, 32, 1), Bucket(True, 2, 1)
PROMPT = [5, 6, 7, 8, 9]
IDS = SMALL.vocab_size


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """Two layers of random weights, warm."""
    numerics = Numerics.create("float32")
    model = Transformer(SMALL, numerics)
    generator = np.random.default_rng(0)
    for parameter in parameter_paths(model).values():
        shape, dtype = parameter[...].shape, parameter[...].dtype
        parameter[...] = jnp.asarray(generator.normal(size=shape) * 0.3, dtype)
    made = ModelRunner(model, CacheLayout(SMALL, numerics.formats, num_blocks=6, num_slots=5))
    made.warm_up((PREFILL, DECODE))
    made.warm_up((PREFILL, DECODE), LOGITS)
    return made


class NoTokenizer:
    """For requests without words."""


def extra_of(**fields: Any) -> ExtraSampling:
    extra = ExtraSampling.of(SamplingParams(**fields), NoTokenizer())  # type: ignore[arg-type]
    assert extra is not None
    return extra


def begin(
    runner: ModelRunner, slot: int, extra: ExtraSampling, outputs: Sequence[int] = (), stops: Sequence[int] = ()
) -> None:
    runner.begin_answers([slot], [extra.slot_state(PROMPT, outputs, stops, IDS)])


def prompts(*chunks: Chunk) -> StepPlan:
    return build_plan(PREFILL, chunks)


def decodes(*chunks: Chunk) -> StepPlan:
    return build_plan(DECODE, chunks)


def numbers(*extras: ExtraSampling | None) -> list[np.ndarray]:
    return [NEUTRAL if extra is None else extra.numbers for extra in extras]


def both(runner: ModelRunner, plan: StepPlan, *extras: ExtraSampling | None) -> tuple[Any, Any, np.ndarray]:
    """Results of the step, of the second program after it, and the logits [S, V] of the rows that were drawn from."""
    fields = plan.bucket.unpack(plan.buffer)
    before = np.asarray(runner.state.length), np.asarray(runner.state.last_token)
    logits = runner.execute([plan], LOGITS).host()[0].logits
    length, last_token = map(jnp.asarray, before)
    runner.state = runner.state.replace(length=length, last_token=last_token)
    step = runner.execute([plan])
    drawn = runner.resample(step, [pack_rows(plan, numbers(*extras))])
    rows = fields["first_row"] if plan.bucket.decode else fields["sample_row"]
    return step.host()[0], drawn.host()[0], logits[rows]


def test_bytes_of_a_slot() -> None:
    """Of the released vocabulary: 1.04 MB."""
    assert slot_bytes(129_280) == 8 * 129_280 + 64 * 8 * 4 + 7 * 4 == 1_036_316


def test_rows_are_packed_in_the_order_of_the_columns() -> None:
    chunk = Chunk(PROMPT, 0, 3, [0], temperature=0.5, seed=2**32 * 7 + 9, output_index=4, forced=11)
    extra = extra_of(top_p=0.25, top_k=6, logprobs=3)
    rows = pack_rows(prompts(chunk, dataclasses.replace(chunk, slot=2)), numbers(extra, None))
    assert rows.shape == (len(COLUMNS), PREFILL.sequences)
    column = dict(zip(COLUMNS, rows))
    for name in ("temperature", "top_p", "repetition"):
        column[name] = column[name].view(np.float32)
    found = {name: values[:2].tolist() for name, values in column.items()}
    assert found == {
        "sample": [1, 1], "slot": [3, 2], "temperature": [0.5, 0.5], "seed_low": [9, 9], "seed_high": [7, 7],
        "output_index": [4, 4], "forced": [11, 11], "chosen": [1, 0], "has_state": [0, 0], "min_p": [0, 0],
        "top_k": [6, 0], "top_p": [0.25, 1], "presence": [0, 0], "frequency": [0, 0], "repetition": [1, 1],
        "min_tokens": [0, 0], "top": [3, 0],
    }  # fmt: skip


def test_neighbours_keep_their_plain_tokens_to_the_last_bit(runner: ModelRunner) -> None:
    plain = Chunk(PROMPT, 0, 0, [0], temperature=0.7, seed=3)
    shaped = Chunk(PROMPT[::-1], 0, 1, [1], temperature=0.7, seed=4)
    extra = extra_of(top_k=1, presence_penalty=1.0)
    begin(runner, 1, extra)
    step, drawn, logits = both(runner, prompts(plain, shaped), None, extra)
    assert drawn.token[0] == step.token[0] and drawn.logprob[0] == step.logprob[0]
    assert drawn.token[1] == logits[1].argmax() != step.token[1]
    assert np.asarray(runner.state.last_token)[:2].tolist() == drawn.token[:2].tolist()
    # And a batch without such requests gives its tokens unchanged, logprobs too.
    step, drawn, _ = both(runner, prompts(plain, shaped), None, None)
    np.testing.assert_array_equal(drawn.token, step.token)
    np.testing.assert_array_equal(drawn.logprob, step.logprob)


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row.astype(np.float64) - row.max())
    return e / e.sum()


def gumbel_draw(logits: np.ndarray, seed: int, index: int) -> int:
    """The draw by its definition."""
    words = jnp.asarray([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), index)
    return int((logits + np.asarray(jax.random.gumbel(key, (IDS,), jnp.float32))).argmax())


@pytest.mark.parametrize("seed", range(4))
def test_filtered_tokens_are_drawn_from_the_filtered_logits(runner: ModelRunner, seed: int) -> None:
    first = extra_of(temperature=3.0, top_k=7)
    second = extra_of(temperature=3.0, top_p=0.3, min_p=0.02)
    chunks = [Chunk(PROMPT, 0, s, [s], temperature=3.0, seed=seed * 2**32 + s, output_index=9) for s in (0, 1)]
    _, drawn, logits = both(runner, prompts(*chunks), first, second)
    heated = logits[:2] / np.float32(3)
    best = np.argsort(-heated[0])[:7]
    kept = np.full(IDS, -np.inf)
    kept[best] = heated[0][best]
    assert drawn.token[0] == gumbel_draw(kept, chunks[0].seed, 9)
    p = softmax(heated[1])
    order = np.argsort(-p)
    order = order[p[order] >= 0.02 * p.max()]
    held = p[order] / p[order].sum()
    order = order[: 1 + int(np.searchsorted(np.cumsum(held)[:-1], 0.3))]
    kept = np.full(IDS, -np.inf)
    kept[order] = heated[1][order]
    assert drawn.token[1] == gumbel_draw(kept, chunks[1].seed, 9)


def test_penalties_follow_the_answer_on_device(runner: ModelRunner) -> None:
    """Six steps of which the host knows no token before the end; each against the definition over its own logits."""
    extra = extra_of(temperature=0, repetition_penalty=1.7, frequency_penalty=1.5, presence_penalty=0.5, logprobs=2)
    begin(runner, 2, extra)
    told: list[int] = []
    for index in range(6):
        chunk = (
            Chunk(PROMPT, 0, 2, [2]) if not index else Chunk([DEVICE_TOKEN], DEVICE_LENGTH, 2, [2], output_index=index)
        )
        plan = prompts(chunk) if not index else decodes(chunk)
        _, drawn, (row, *_) = both(runner, plan, extra)
        count = np.bincount(told, minlength=IDS)
        seen = (count > 0) | np.isin(np.arange(IDS), PROMPT)
        want = np.where(seen, np.where(row > 0, row / np.float32(1.7), row * np.float32(1.7)), row)
        want = want - np.float32(1.5) * count - np.float32(0.5) * (count > 0)
        assert drawn.token[0] == want.argmax()
        assert drawn.logprob[0] == pytest.approx(np.log(softmax(row)[drawn.token[0]]), abs=1e-4)
        told.append(int(drawn.token[0]))
    # Without penalties the same model says something else.
    assert len(set(told)) > 3


def test_a_slot_without_state_ignores_what_an_earlier_answer_left(runner: ModelRunner) -> None:
    left = extra_of(temperature=0, logit_bias={3: 100.0})
    begin(runner, 3, left)
    chunk = Chunk(PROMPT, 0, 3, [3])
    _, drawn, _ = both(runner, prompts(chunk), left)
    assert drawn.token[0] == 3
    step, drawn, logits = both(runner, prompts(chunk), extra_of(temperature=0, logprobs=1))
    assert drawn.token[0] == step.token[0] == logits[0].argmax() != 3


def test_begun_again_an_answer_goes_on_with_its_counts(runner: ModelRunner) -> None:
    """After a preemption: the same state as if it had never stopped."""
    extra = extra_of(temperature=0, frequency_penalty=2.0)
    begin(runner, 0, extra)
    told = []
    for index in range(3):
        chunk = (
            Chunk(PROMPT, 0, 0, [0]) if not index else Chunk([DEVICE_TOKEN], DEVICE_LENGTH, 0, [0], output_index=index)
        )
        _, drawn, _ = both(runner, prompts(chunk) if not index else decodes(chunk), extra)
        told.append(int(drawn.token[0]))
    before = jax.tree.map(lambda leaf: np.asarray(leaf)[0], runner._sampling.state)
    begin(runner, 4, extra, told)
    after = jax.tree.map(lambda leaf: np.asarray(leaf)[4], runner._sampling.state)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_no_id_that_ends_the_answer_before_min_tokens(runner: ModelRunner) -> None:
    extra = extra_of(temperature=0, min_tokens=2)
    chunk = Chunk(PROMPT, 0, 1, [1])
    _, _, logits = both(runner, prompts(chunk), extra)
    best, next_best = np.argsort(-logits[0])[:2]
    begin(runner, 1, extra, stops=[int(best)])
    for index, want in ((0, next_best), (1, next_best), (2, best)):
        _, drawn, _ = both(runner, prompts(dataclasses.replace(chunk, output_index=index)), extra)
        assert drawn.token[0] == want


def test_a_word_is_kept_out_by_its_last_token(runner: ModelRunner) -> None:
    """Whose beginning only the device knows yet."""
    free = extra_of(temperature=0, logprobs=0)
    told: list[int] = []
    chunks = [Chunk(PROMPT, 0, 0, [0])] + [Chunk([DEVICE_TOKEN], DEVICE_LENGTH, 0, [0], output_index=i) for i in (1, 2)]

    def answer(extra: ExtraSampling) -> list[int]:
        begin(runner, 0, extra)
        return [int(both(runner, prompts(c) if c.tokens is PROMPT else decodes(c), extra)[1].token[0]) for c in chunks]

    told = answer(free)
    worded = dataclasses.replace(extra_of(temperature=0, min_tokens=1), words=(tuple(told[:2]), (told[2], told[0])))
    other = answer(worded)
    assert other[0] == told[0] and other[1] != told[1]
    # The first token alone, or after others, is free.
    assert answer(dataclasses.replace(worded, words=((told[1], told[0]),))) == told


def test_top_tokens_are_those_of_the_raw_logits(runner: ModelRunner) -> None:
    """Whatever was drawn: a forced id and a filtered one have their place among all."""
    extra = extra_of(top_k=1, logprobs=5, temperature=0.3)
    chunks = (Chunk(PROMPT, 0, 0, [0], forced=400), Chunk(PROMPT[1:], 0, 1, [1], temperature=0.3))
    _, drawn, logits = both(runner, prompts(*chunks), extra, extra)
    for at in (0, 1):
        p = softmax(logits[at])
        order = np.argsort(-p)
        np.testing.assert_array_equal(drawn.top.ids[at, :5], order[:5])
        np.testing.assert_allclose(drawn.top.logprobs[at, :20], np.log(p[order[:20]]), atol=1e-4)
        assert drawn.top.rank[at] == 1 + list(order).index(drawn.token[at])
    assert drawn.token[0] == 400 and drawn.top.rank[1] == 1


def test_chunks_that_draw_nothing_leave_their_slot(runner: ModelRunner) -> None:
    extra = extra_of(temperature=0, presence_penalty=1.0)
    begin(runner, 2, extra)
    before = jax.tree.map(np.asarray, runner._sampling.state)
    last = np.asarray(runner.state.last_token)
    both(runner, prompts(Chunk(PROMPT, 0, 2, [2], sample=False)), extra)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, runner._sampling.state))
    np.testing.assert_array_equal(last, runner.state.last_token)
    runner.begin_answers([NO_SLOT], [None])
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, runner._sampling.state))


def test_warm_programs_compile_nothing(runner: ModelRunner) -> None:
    extra = extra_of(top_p=0.5, logit_bias={1: 1.0})
    plan = decodes(Chunk([4], 5, 0, [0]))
    runner.execute([plan])
    before = COMPILATIONS.count
    begin(runner, 0, extra)
    runner.resample(runner.execute([plan]), [pack_rows(plan, numbers(extra))])
    assert COMPILATIONS.count == before


class Interrupt(BaseException):
    """What Ctrl-C raises, told apart from a real one."""


def test_a_draw_cut_short_empties_the_caches(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, plan = extra_of(top_k=2), decodes(Chunk([4], 5, 0, [0]))
    step, resets = runner.execute([plan]), runner.resets
    key = next(key for key in runner._sampling._compiled if key[:2] == ("sample", 2))
    executable = runner._sampling._compiled[key]

    def cut_short(*arguments: Any) -> Any:
        executable(*arguments)
        raise Interrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setitem(runner._sampling._compiled, key, cut_short)
        runner.resample(step, [pack_rows(plan, numbers(extra))])
    assert runner.resets == resets + 1
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((runner.state, runner._sampling.state)))


def test_a_step_of_logits_cannot_be_drawn_again(runner: ModelRunner) -> None:
    plan = decodes(Chunk([4], 5, 0, [0]))
    with pytest.raises(ValueError, match="left no hidden rows"):
        runner.resample(runner.execute([plan], LOGITS), [pack_rows(plan, [])])


def test_biases_count_among_the_allowed_ids() -> None:
    bias = extra_of(allowed_token_ids=(3, 4), logit_bias={4: 2.0, 5: 50.0}).slot_state(PROMPT, [], [], IDS).bias
    assert np.flatnonzero(bias > -np.inf).tolist() == [3, 4] and bias[3:5].tolist() == [0, 2]
    bias = extra_of(logit_bias={4: 2.0}).slot_state(PROMPT, [], [], IDS).bias
    assert np.flatnonzero(bias).tolist() == [4]


def test_words_of_a_slot_are_right_aligned() -> None:
    extra = dataclasses.replace(extra_of(min_tokens=1), words=((4, 5), tuple(range(8))))
    state = extra.slot_state(PROMPT, list(range(20)), [1], IDS)
    assert state.words[:2].tolist() == [[NO_ID] * 6 + [4, 5], list(range(8))] and (state.words[2:] == NO_ID).all()
    assert state.recent.tolist() == list(range(13, 20))
    assert extra.slot_state(PROMPT, [3], [], IDS).recent.tolist() == [NO_ID] * 6 + [3]
