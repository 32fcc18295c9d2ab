"""float32 logits, selections, experts and caches equal the goldens, however the tokens are fed.

Bars: the goldens' own (three independent programs agree to 1e-5 without cache quantization). With it, a value may sit
on a rounding edge for one more summation order; then later positions move, and the flipped codes are counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from golden_model import (
    BLOCKS_PER_SEQUENCE,
    CHECKPOINT,
    PROMPTS,
    TINY,
    Fed,
    Feeder,
    Lane,
    golden,
    golden_file,
    lanes_of,
    own_blocks,
    tiny_numerics,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts
from di_jax.tokenizer import Tokenizer

EXACT, ROUNDED = 1e-4, 2e-3
SOURCES = TINY.kv_source_layer_ids
EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33)


@dataclasses.dataclass
class Subject:
    """The compiled model under test. variant: nokvq or kvq."""

    variant: str
    feeder: Feeder

    def golden(self, prompt: str) -> dict[str, np.ndarray]:
        return golden(self.variant, prompt)

    def ids(self, prompt: str) -> list[int]:
        return self.golden(prompt)["input_ids"].tolist()

    @property
    def bar(self) -> float:
        return EXACT if self.variant == "nokvq" else ROUNDED

    def first_flip(self, prompt: str, lane: Lane) -> tuple[int, int]:
        """(first position that can see a cache code other than the golden's, number of such codes)."""
        expected, first, flips = self.golden(prompt), len(lane.tokens), 0
        for layer in SOURCES:
            for mine, name in zip(self.feeder.stored(layer, lane), ("compressed_kv", "index_k")):
                differs = np.abs(mine - expected[f"L{layer}/{name}"][: len(mine)]) > 1e-5
                flips += int(differs.sum())
                for entry in np.flatnonzero(differs.any(axis=-1))[:1]:
                    first = min(first, (int(entry) + 1) * TINY.compress_ratios[layer] - 1)
        return first, flips

    def check(self, prompt: str, lane: Lane, fed: Fed) -> None:
        """Asserts that a lane of the first tokens of `prompt` gave what the golden holds."""
        expected, count = self.golden(prompt), len(lane.tokens)
        difference = np.abs(fed.logits - expected["logits"][:count])
        clean, flips = self.first_flip(prompt, lane)
        codes = sum((count // TINY.compress_ratios[n]) * (TINY.head_dim + TINY.index_head_dim) for n in SOURCES)
        if self.variant == "nokvq":
            assert (clean, flips) == (count, 0), "the caches hold other values"
        assert flips <= codes / 1000, f"{flips} of {codes} cache codes differ: not rounding"
        assert difference[:clean].max(initial=0) <= self.bar, (prompt, difference.max(axis=-1).argmax())
        for layer in range(TINY.num_hidden_layers):
            np.testing.assert_array_equal(fed.experts[layer, :clean], expected[f"L{layer}/expert_ids"][:clean])
        for layer, mine in fed.selected.items():
            np.testing.assert_array_equal(mine[:clean], expected[f"L{layer}/topk_idx"][:clean])
        if clean < count:
            assert (difference.max(axis=-1) <= ROUNDED).mean() >= 0.7, f"{flips} flipped codes"
            assert difference.mean() <= 0.05, f"{flips} flipped codes"

    def differs(self, prompt: str, fed: Fed) -> bool:
        """Whether the logits are wrong beyond any rounding: the negative controls."""
        difference = np.abs(fed.logits - self.golden(prompt)["logits"][: len(fed.logits)])
        return bool(difference.max() > 0.05 and difference.mean() > ROUNDED)


@pytest.fixture(scope="module", params=["nokvq", "kvq"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """nokvq has two sizes of each step, kvq one."""
    sizes = {"prefill_rows": (32, 320), "decode_rows": (1, 4)} if request.param == "nokvq" else {}
    return Subject(request.param, Feeder(tiny_numerics(request.param), **sizes))


def check_all(subject: Subject, cuts: tuple[int, ...], *, decode: bool = False) -> None:
    lanes = lanes_of([subject.ids(p) for p in PROMPTS], cuts, decode=decode)
    for prompt, lane, fed in zip(PROMPTS, lanes, subject.feeder.feed(lanes)):
        subject.check(prompt, lane, fed)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_whole(subject: Subject, prompt: str) -> None:
    lane = Lane(subject.ids(prompt))
    subject.check(prompt, lane, subject.feeder.feed([lane])[0])


def test_stepwise(subject: Subject) -> None:
    check_all(subject, (1,), decode=True)


def test_stepwise_alone(subject: Subject) -> None:
    """One sequence in the decode step: its smallest bucket where there are two."""
    lane = Lane(subject.ids("p64"), decode=True)
    subject.check("p64", lane, subject.feeder.feed([lane])[0])


@pytest.mark.parametrize("cuts", [(64,), (5, 1, 10, 16, 3, 33, 64)])
def test_chunks_across_the_window_and_the_rings(subject: Subject, cuts: tuple[int, ...]) -> None:
    check_all(subject, cuts)


def test_every_chunk_size(subject: Subject) -> None:
    """Sizes 2 to 17, all side by side in the same steps: every seam in the window, in the groups and in the rings."""
    lanes = [Lane(subject.ids("p300"), (size,), i, own_blocks(i)) for i, size in enumerate(range(2, 18))]
    for lane, fed in zip(lanes, subject.feeder.feed(lanes)):
        subject.check("p300", lane, fed)


def test_every_chunk_size_of_another_prompt(subject: Subject) -> None:
    """Chunks of one token through the prefill step as well."""
    lanes = [Lane(subject.ids("p150"), (size,), i, own_blocks(i)) for i, size in enumerate(range(1, 17))]
    for lane, fed in zip(lanes, subject.feeder.feed(lanes)):
        subject.check("p150", lane, fed)


@settings(max_examples=12)
@given(data=st.data())
def test_random_cuts_of_several_requests(subject: Subject, data: st.DataObject) -> None:
    """Requests that share steps at unequal cuts, some in decode steps, compute what each computes alone."""
    chosen, lanes = [], []
    for i in range(data.draw(st.integers(1, 4), label="requests")):
        prompt = data.draw(st.sampled_from(PROMPTS[1:]), label="prompt")
        ids = subject.ids(prompt)
        ids = ids[: data.draw(st.integers(1, len(ids)), label="length")]
        decode = data.draw(st.booleans(), label="decode") and len(ids) < 80
        cuts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12), label="cuts")
        chosen.append(prompt)
        lanes.append(Lane(ids, tuple(cuts) + (40,), i + 3, own_blocks(17 - i), decode))
    for prompt, lane, fed in zip(chosen, lanes, subject.feeder.feed(lanes)):
        subject.check(prompt, lane, fed)


def test_edge_lengths(subject: Subject) -> None:
    """Around the window (16) and group boundaries: logits of the prompt and 12 ids through real decode steps."""
    edge = golden_file("tiny-v41.edge")
    names = [f"{subject.variant}/e{length}" for length in EDGES]
    lanes = lanes_of([edge[f"{name}/input_ids"].tolist() for name in names])
    for name, fed in zip(names, subject.feeder.feed(lanes)):
        assert np.abs(fed.logits - edge[f"{name}/logits"]).max() <= subject.bar, name
    for name, ids in zip(names, subject.feeder.greedy(lanes, 12)):
        assert ids == edge[f"{name}/greedy_ids"].tolist(), name


@pytest.mark.parametrize("cuts", [(320,), (13,)])
def test_greedy_continuations(subject: Subject, cuts: tuple[int, ...]) -> None:
    """32 tokens of each prompt, each read from the state by the next step; equal up to a margin under the error."""
    lanes = lanes_of([subject.ids(p) for p in PROMPTS], cuts)
    for prompt, ids in zip(PROMPTS, subject.feeder.greedy(lanes, 32)):
        expected = subject.golden(prompt)
        decided = int(np.argmax([*(expected["greedy_margin"] < 2 * subject.bar), True]))
        assert decided == 32, "the goldens' margins all lie above the error"
        assert ids[:decided] == expected["greedy_ids"][:decided].tolist(), prompt


def test_greedy_logits(subject: Subject) -> None:
    """The logits of the continuation itself, teacher-forced through decode steps after a prefill."""
    if "greedy_logits" not in subject.golden("p64"):
        assert subject.variant == "kvq"
        return
    prompt, ids = subject.ids("p64"), subject.golden("p64")["greedy_ids"].tolist()
    subject.feeder.feed([Lane(prompt)])
    fed = subject.feeder.feed([Lane(ids[:-1], before=prompt, decode=True)])[0]
    assert np.abs(fed.logits - subject.golden("p64")["greedy_logits"][1:]).max() <= subject.bar


def test_window_rings(subject: Subject) -> None:
    """The rings hold the last rows of every layer at position mod ring, whatever the chunks."""
    trace = golden_file(f"tiny-v41.trace-{subject.variant}")
    lane = Lane(subject.ids("p64"), (7, 30, 1), slot=5)
    subject.feeder.feed([lane])
    layout = subject.feeder.runner.layout
    rings = np.asarray(layout.formats.window.decode(subject.feeder.runner.state.window[:, lane.slot]))
    position = np.arange(64 - TINY.window_ring, 64)
    for layer in range(TINY.num_hidden_layers):
        if f"L{layer}/window_kv" in trace:
            mine, expected = rings[layer, position % TINY.window_ring], trace[f"L{layer}/window_kv"][position]
            assert (np.abs(mine - expected) > 1e-5).mean() <= (0.001 if subject.variant == "kvq" else 0), layer


def test_slots_and_blocks_are_reused_without_a_trace(subject: Subject) -> None:
    """A finished sequence leaves its caches as they are; the next one in the same slot and blocks reads none of it."""
    for prompt in ("p300", "p64", "p7", "p150"):
        lane = Lane(subject.ids(prompt), (48,), slot=2, blocks=own_blocks(3))
        subject.check(prompt, lane, subject.feeder.feed([lane])[0])


def test_a_wrong_block_table_is_seen(subject: Subject) -> None:
    """Control: the second half of the prompt reads the entries of another sequence."""
    subject.feeder.feed([Lane(subject.ids("p300")[::-1], blocks=own_blocks(9))])
    ids, expected = subject.ids("p150"), subject.golden("p150")["logits"][100:]
    for blocks, right in ((own_blocks(9), False), (own_blocks(0), True)):
        subject.feeder.feed([Lane(ids[:100], blocks=own_blocks(0))])
        rest = subject.feeder.feed([Lane(ids[100:], blocks=blocks, before=ids[:100])])[0]
        difference = np.abs(rest.logits - expected).max()
        assert difference <= subject.bar if right else difference > 0.05


def test_a_sequence_that_does_not_start_at_zero_is_seen(subject: Subject) -> None:
    """Control: a wrong start makes the first rows read what the last sequence left in the rings."""
    subject.feeder.feed([Lane(subject.ids("p300"))])
    late = subject.feeder.feed([Lane(subject.ids("p64"), before=subject.ids("p300")[:40])])[0]
    assert subject.differs("p64", late)


def test_a_sequence_in_the_slot_of_another_is_seen(subject: Subject) -> None:
    """Control: the window and the open group are read from the slot."""
    ids = subject.ids("p150")
    subject.feeder.feed([Lane(ids[:75]), Lane(subject.ids("p300"), slot=1, blocks=own_blocks(1))])
    wrong = subject.feeder.feed([Lane(ids[75:], slot=1, before=ids[:75])])[0]
    assert np.abs(wrong.logits - subject.golden("p150")["logits"][75:]).max() > 0.05


@pytest.mark.parametrize("feed", ["whole", "chunked", "stepwise"])
def test_scorer(subject: Subject, feed: str) -> None:
    """The scorer's rows are the goldens', with their trace, for requests that finish in any order."""
    runner = subject.feeder.runner
    parts = EngineParts(
        TINY,
        CHECKPOINT,
        Tokenizer.from_folder(Path(CHECKPOINT), TINY),
        runner,
        subject.feeder.ladder,
        runner.layout,
    )
    scores = {s.request_id: s for s in Scorer(parts, feed, 37, trace=True).run([(p, subject.ids(p)) for p in PROMPTS])}
    assert scores.keys() == set(PROMPTS)
    trace = golden_file(f"tiny-v41.trace-{subject.variant}")
    for prompt, score in scores.items():
        expected = subject.golden(prompt)
        close = np.abs(score.logits - expected["logits"]).max(axis=-1) <= subject.bar
        assert close.mean() >= (1.0 if subject.variant == "nokvq" else 0.7)
        logits = expected["logits"].astype(np.float64)
        chosen = np.take_along_axis(logits[:-1], expected["input_ids"][1:, None], axis=-1)[:, 0]
        reference = np.log(np.exp(logits[:-1]).sum(axis=-1)) - chosen
        assert np.abs(score.negative_log_likelihood() - reference)[close[:-1]].max() <= 2 * subject.bar
        assert score.hidden.keys() == score.experts.keys() == set(range(TINY.num_hidden_layers))
        assert score.selected.keys() == set(TINY.index_source_layer_ids)
        for layer in TINY.index_source_layer_ids:
            same = score.selected[layer] == expected[f"L{layer}/topk_idx"]
            assert same.all() or subject.variant == "kvq"
    hidden = scores["p64"].hidden
    for layer in range(TINY.num_hidden_layers):
        off = np.abs(hidden[layer] - trace[f"L{layer}/streams_out"]).max(axis=(1, 2)) > subject.bar
        assert off.mean() <= (0 if subject.variant == "nokvq" else 0.3), layer


def test_blocks_of_the_context_bucket_are_enough() -> None:
    assert BLOCKS_PER_SEQUENCE * 128 >= 300 + 32
