"""Bounded replay against its own definition (`replay_oracle`): what is kept is what the definition says, whatever the
cuts and the neighbours, whether other rows are computed and hidden or not computed at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import (
    BLOCKS_PER_SEQUENCE,
    CHECKPOINT,
    TINY,
    golden,
    own_blocks,
    tiny_model,
    tiny_numerics,
    tiny_tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import NamedSharding
from replay_oracle import OracleRun, ReplayOracle

from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.engine.runner import LOGITS, TOKENS, TRACE, ModelRunner, step_rows
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, Bucket, BucketLadder, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.transformer import Transformer, abstract_model, assemble, parameter_paths
from di_jax.parallel.mesh import ONE_DEVICE, DeviceMesh, Parallel

EXACT, SEEN = 1e-4, 1e-2
NUMERICS = tiny_numerics("nokvq")
LADDER = BucketLadder((256,), (4,), (BLOCKS_PER_SEQUENCE,), kept_rows=(64,))
LEAST = TINY.window_ring  # the fewest rows that may be kept: window 16, 5 drafts, 1
BLOCK, WINDOW = 128, TINY.sliding_window
LAYOUT = CacheLayout(TINY, NUMERICS.formats, num_blocks=40, num_slots=10)


def text(length: int, turn: int = 0) -> list[int]:
    """Up to 450 tokens of the goldens' prompts. turn: other text from there on."""
    ids = golden("nokvq", "p300")["input_ids"].tolist() + golden("nokvq", "p150")["input_ids"].tolist()
    return ids[:turn] + ids[turn:][::-1][: length - turn] if turn else ids[:length]


@dataclasses.dataclass
class Prompt:
    """A prompt as the scheduler would feed it. hit: tokens whose entries its blocks hold. first: position of its first
    row."""

    tokens: list[int]
    slot: int
    blocks: Sequence[int]
    cuts: Sequence[int] = (256,)
    keep: int | None = None
    hit: int = 0
    replayed: int = 0  # tokens before the hit that are run again; 0: the windows before it are there

    @property
    def first(self) -> int:
        return max(0, self.hit - self.replayed)

    @property
    def window_start(self) -> int:
        return self.first if self.replayed else 0

    @property
    def decoder_start(self) -> int:
        return self.window_start if self.keep is None else max(self.first, len(self.tokens) - self.keep)

    def chunks(self, **changes: Any) -> Iterator[Chunk]:
        at, number = self.first, 0
        while at < len(self.tokens):
            end = min(at + self.cuts[min(number, len(self.cuts) - 1)], len(self.tokens))
            chunk = Chunk(
                self.tokens[at:end],
                at,
                self.slot,
                self.blocks,
                sample=end == len(self.tokens),
                window_start=self.window_start,
                decoder_start=self.decoder_start,
                cached=self.hit,
                history=self.tokens[max(0, at - 3) : at],
            )
            yield dataclasses.replace(chunk, **changes)
            at, number = end, number + 1


class Machine:
    """The model's steps, with the logits of every row that the decoder layers ran."""

    def __init__(self) -> None:
        self.graph, self.params = nnx.split(tiny_model(NUMERICS))
        self.state = jax.device_put(LAYOUT.allocate(), jax.devices()[0])
        self._step = jax.jit(self._forward, static_argnums=0, donate_argnums=2)
        self.dropped = 0  # steps so far that dropped rows

    def _forward(self, bucket: Bucket, params: Any, state: EngineState, buffer: Array) -> tuple[Array, EngineState]:
        model: Transformer = nnx.merge(self.graph, params)
        rows, kept = step_rows(DeviceMesh(), bucket, bucket.unpack(buffer), state)
        out = model(rows, state, LAYOUT, kept=kept)
        return model.logits(out.hidden), out.state

    def step(self, bucket: Bucket, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Logits [rows, V] of each chunk: those from its decoder_start on."""
        plan = build_plan(bucket, chunks)
        logits, self.state = self._step(bucket, self.params, self.state, plan.buffer)
        self.dropped += bucket.drops_rows
        view, found, logits = bucket.unpack(plan.buffer), [], np.asarray(logits)
        for i, chunk in enumerate(chunks):
            kept = len(chunk.tokens) if bucket.decode else chunk.num_kept
            first = int(view["kept_first_row" if bucket.drops_rows else "first_row"][i])
            first += 0 if bucket.drops_rows else len(chunk.tokens) - kept
            found.append(logits[first : first + kept])
        return found

    def prefill(self, prompts: Sequence[Prompt], *, compact: bool, **changes: Any) -> list[np.ndarray]:
        """Runs prompts side by side: logits [rows, V] of each from its decoder_start on."""
        pending = [prompt.chunks(**changes) for prompt in prompts]
        found: list[list[np.ndarray]] = [[] for _ in prompts]
        while work := [(i, chunk) for i, chunks in enumerate(pending) if (chunk := next(chunks, None)) is not None]:
            for group in _groups(work):
                chunks = [chunk for _, chunk in group]
                counts, kept = [len(c.tokens) for c in chunks], [c.num_kept for c in chunks]
                bucket = LADDER.fit(False, counts, BLOCKS_PER_SEQUENCE, kept if compact else None)
                for (i, _), logits in zip(group, self.step(bucket, chunks)):
                    found[i].append(logits)
        return [np.concatenate(parts) for parts in found]

    def decode(self, prompts: Sequence[Prompt], tokens: Sequence[int], number: int) -> list[np.ndarray]:
        """Logits [V] of each prompt's token `number` after its end."""
        chunks = [Chunk([t], len(p.tokens) + number, p.slot, p.blocks) for p, t in zip(prompts, tokens)]
        bucket = LADDER.fit(True, [1] * len(chunks), BLOCKS_PER_SEQUENCE)
        return [logits[0] for logits in self.step(bucket, chunks)]

    def poison(self, slot: int) -> None:
        """Leaves in a slot what no sequence may read."""
        state = self.state
        self.state = state.replace(
            window=state.window.at[:, slot].set(jnp.nan),
            compressor=state.compressor.at[:, slot].set(jnp.nan),
            engram_history=state.engram_history.at[slot].set(7),
        )

    def rings(self, slot: int) -> np.ndarray:
        """[L, window_ring, record] window rings of a slot."""
        return np.asarray(self.state.window[:, slot])

    def restore(self, slot: int, rings: np.ndarray) -> None:
        """Puts rings of the first layers into a slot."""
        self.state = self.state.replace(window=self.state.window.at[: len(rings), slot].set(rings))

    def blocks(self, blocks: Sequence[int]) -> bytes:
        """Everything that blocks hold."""
        index = np.asarray(blocks)
        return np.asarray(self.state.compressed)[index].tobytes() + np.asarray(self.state.index)[index].tobytes()

    def entries(self, prompt: Prompt, source: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Compressed KV and index keys of the first `count` entries of a source."""
        row = np.asarray(LAYOUT.entry_row(source, jnp.asarray(prompt.blocks), jnp.arange(count)))
        pools = np.asarray(self.state.compressed), np.asarray(self.state.index)
        return tuple(pool.reshape(-1, pool.shape[-1])[row] for pool in pools)  # type: ignore[return-value]


def _groups(work: list[tuple[int, Chunk]]) -> Iterator[list[tuple[int, Chunk]]]:
    """Cuts a round into steps that the bucket holds."""
    group: list[tuple[int, Chunk]] = []
    for i, chunk in work:
        together = [len(c.tokens) for _, c in group] + [len(chunk.tokens)]
        if sum(LADDER.prefill_row_cost(n) for n in together) > LADDER.prefill_rows[-1]:
            yield group
            group = []
        group.append((i, chunk))
    yield group


@cache
def machine() -> Machine:
    return Machine()


@cache
def oracle() -> ReplayOracle:
    return ReplayOracle(tiny_model(NUMERICS), capacity=BLOCKS_PER_SEQUENCE * BLOCK)


@cache
def cold(length: int, keep: int | None = None) -> OracleRun:
    return oracle().prefill(text(length), keep_tokens=keep)


def check_entries(prompt: Prompt, expected: OracleRun) -> None:
    for source in range(len(TINY.kv_source_layer_ids)):
        wanted = expected.entries(source)
        for mine, right in zip(machine().entries(prompt, source, len(wanted[0])), wanted):
            assert np.abs(mine - right).max(initial=0) <= EXACT


def check_greedy(prompts: Sequence[Prompt], runs: Sequence[OracleRun], count: int) -> None:
    """The answers to prompts that were just prefilled, each token fed as the definition draws it."""
    runs = list(runs)
    for number in range(count):
        tokens = [run.token for run in runs]
        mine = machine().decode(prompts, tokens, number)
        runs = [oracle().decode(run, token) for run, token in zip(runs, tokens)]
        for logits, run in zip(mine, runs):
            assert np.abs(logits - run.logits[-1]).max() <= EXACT, number


CUTS = st.lists(st.integers(1, 120), min_size=1, max_size=6).map(lambda sizes: (*sizes, 200))


@pytest.mark.slow
def test_the_oracle_is_the_goldens_model() -> None:
    """Without replay: logits, entries and the greedy answer; a hit with restored windows is the same again."""
    for prompt in ("p7", "p64", "p300"):
        expected = golden("nokvq", prompt)
        run = oracle().prefill(expected["input_ids"].tolist())
        assert np.abs(run.logits - expected["logits"]).max() <= EXACT
        for source, layer in enumerate(TINY.kv_source_layer_ids):
            for mine, name in zip(run.entries(source), ("compressed_kv", "index_k")):
                np.testing.assert_allclose(mine, expected[f"L{layer}/{name}"], rtol=0, atol=EXACT)
        assert oracle().greedy(run, 32)[0] == expected["greedy_ids"].tolist()
    again = oracle().prefill(text(300), hit=256, earlier=run, restored=True)
    np.testing.assert_allclose(again.logits, run.logits[256:], rtol=0, atol=EXACT)


def test_replay_changes_what_it_may_and_nothing_else() -> None:
    """In the definition: entries know nothing of decoder replay; the last row does, unless all are kept. A hit differs
    after it when a window's worth of tokens is run again, as in the released model. With 128 the encoder's windows are
    rebuilt exactly, since six layers of 16 reach no further; the decoder's come short at first."""
    exact, kept = cold(300), cold(300, LEAST)
    for source in range(len(TINY.kv_source_layer_ids)):
        for a, b in zip(exact.entries(source), kept.entries(source)):
            np.testing.assert_array_equal(a, b)
    assert kept.start == 300 - LEAST and len(kept.logits) == LEAST
    assert np.abs(kept.logits[-1] - exact.logits[-1]).max() > SEEN
    np.testing.assert_array_equal(cold(300, 300).logits, exact.logits)
    short = oracle().prefill(text(300), hit=256, earlier=exact, replayed=WINDOW)
    assert short.start == 240 and np.abs(short.logits[-1] - exact.logits[-1]).max() > SEEN
    long = oracle().prefill(text(300), hit=256, earlier=exact)
    assert long.start == 128
    np.testing.assert_allclose(long.logits[-1], exact.logits[-1], rtol=0, atol=EXACT)
    assert np.abs(long.logits[0] - exact.logits[128]).max() > SEEN
    boundary = TINY.first_decoder_layer
    assert kept.window(boundary, 300 - LEAST - 1) is None and kept.window(boundary - 1, 0) is not None


def test_what_the_definition_does_not_provide_is_nan() -> None:
    """Control: a prompt that ends before the kept rows' windows are full, and a window row that is taken away."""
    run = cold(100)
    known = run.caches.known.at[3, 90].set(False)
    broken = dataclasses.replace(run, caches=dataclasses.replace(run.caches, known=known))
    assert np.isfinite(oracle().decode(run, 5).logits).all()
    assert np.isnan(oracle().decode(broken, 5).logits).all()


@pytest.mark.slow
@settings(max_examples=12)
@given(data=st.data())
def test_prompts_keep_what_the_definition_keeps(data: st.DataObject) -> None:
    """Several prompts in the same steps, cut anywhere, also inside the kept rows: masked and compact rows are those of
    the definition, and so are the entries of all rows and the answers that follow."""
    prompts, runs = [], []
    for i in range(data.draw(st.integers(1, 3), label="prompts")):
        length = data.draw(st.integers(20, 400), label="length")
        keep = data.draw(st.integers(LEAST, 48), label="keep")
        cuts = data.draw(CUTS, label="cuts")
        prompts.append(Prompt(text(length), i, own_blocks(i), cuts, keep))
        runs.append(cold(length, keep))
    results = []
    for compact in (False, True):
        for prompt in prompts:
            machine().poison(prompt.slot)
        results.append(machine().prefill(prompts, compact=compact))
        for prompt, run in zip(prompts, runs):
            check_entries(prompt, run)
        check_greedy(prompts, runs, 2)
    for masked, compact, run in zip(*results, runs):
        assert masked.shape == compact.shape == run.logits.shape
        assert np.abs(masked - compact).max() <= EXACT / 5
        assert np.abs(compact - run.logits).max() <= EXACT


@settings(max_examples=12)
@given(data=st.data())
def test_hits_are_the_definition(data: st.DataObject) -> None:
    """A prompt that shares the first blocks of an earlier one, their windows restored or run again in part or as far as
    a block goes, with and without decoder replay, cut anywhere; the shared blocks are not touched by a byte."""
    hit = data.draw(st.sampled_from([128, 256]), label="hit")
    keep = data.draw(st.none() | st.integers(LEAST, 60), label="keep")
    length = data.draw(st.integers(hit + LEAST, 420), label="length")
    replayed = data.draw(st.sampled_from([0, WINDOW, 40, BLOCK]), label="replayed")
    compact = data.draw(st.booleans(), label="compact")
    turn = data.draw(st.integers(hit, length), label="turn")
    tokens = text(length, turn)
    earlier = Prompt(text(300), 0, own_blocks(0), (hit, 300), keep)
    rings = first_rings(earlier, hit, compact)
    if keep is not None:
        rings = rings[: TINY.first_decoder_layer]
    blocks = (*earlier.blocks[: hit // BLOCK], *own_blocks(1)[hit // BLOCK :])
    prompt = Prompt(tokens, 1, blocks, data.draw(CUTS, label="cuts"), keep, hit, replayed)
    machine().poison(prompt.slot)
    if not replayed:
        machine().restore(prompt.slot, rings)
    before = machine().blocks(blocks[: hit // BLOCK])
    mine = machine().prefill([prompt], compact=compact)[0]
    assert machine().blocks(blocks[: hit // BLOCK]) == before
    how: dict[str, Any] = {"replayed": replayed} if replayed else {"restored": True}
    run = oracle().prefill(tokens, hit=hit, earlier=cold(300, keep), keep_tokens=keep, **how)
    assert np.abs(mine - run.logits).max() <= EXACT
    check_entries(prompt, run)
    check_greedy([prompt], [run], 3)


def first_rings(prompt: Prompt, at: int, compact: bool) -> np.ndarray:
    """Prefills a prompt that has a cut at `at`; the window rings of all layers as they were there."""
    chunks = list(prompt.chunks())
    assert any(chunk.start == at for chunk in chunks)
    rings = np.zeros(0)
    for chunk in chunks:
        if chunk.start == at:
            rings = machine().rings(prompt.slot)
        kept = [chunk.num_kept] if compact else None
        machine().step(LADDER.fit(False, [len(chunk.tokens)], BLOCKS_PER_SEQUENCE, kept), [chunk])
    return rings


def test_rows_are_really_dropped() -> None:
    """Prompts above use the small shape, and a chunk that lies before the kept rows alone keeps none."""
    prompt, before = Prompt(text(200), 0, own_blocks(0), (64,), LEAST), machine().dropped
    assert [chunk.num_kept for chunk in prompt.chunks()] == [0, 0, 14, 8]
    mine = machine().prefill([prompt], compact=True)[0]
    assert machine().dropped == before + 4
    assert np.abs(mine - cold(200, LEAST).logits).max() <= EXACT


def test_rows_below_the_kept_ones_stay_finite() -> None:
    """They have no window, so the selected entries and the sink are all that they see; nothing of them is kept."""
    machine().poison(0)
    chunk = next(Prompt(text(200), 0, own_blocks(0), (200,), LEAST).chunks())
    plan = build_plan(LADDER.fit(False, [200], BLOCKS_PER_SEQUENCE), [chunk])
    logits, machine().state = machine()._step(plan.bucket, machine().params, machine().state, plan.buffer)
    assert np.isfinite(np.asarray(logits)[:200]).all()
    rings, boundary = machine().rings(0), TINY.first_decoder_layer
    assert np.isfinite(rings).all(), "22 rows are kept, and a ring holds 22"
    machine().poison(0)
    machine().prefill([Prompt(text(200), 0, own_blocks(0), (100, 90), LEAST)], compact=False)
    short = dataclasses.replace(chunk, tokens=chunk.tokens[:185], decoder_start=178)
    machine().poison(0)
    machine().step(LADDER.fit(False, [185], BLOCKS_PER_SEQUENCE), [short])
    stored = np.isfinite(machine().rings(0)).all(axis=-1)
    assert stored[:boundary].all()
    assert (np.flatnonzero(stored[boundary]) == sorted(t % TINY.window_ring for t in range(178, 185))).all()


def test_restored_windows_are_exact() -> None:
    """Nothing cut: the tokens after a hit are those of the cold pass, whose goldens they are."""
    earlier = Prompt(text(300), 0, own_blocks(0), (256, 300))
    rings = first_rings(earlier, 256, compact=False)
    expected = golden("nokvq", "p300")["logits"][256:]
    prompt = Prompt(text(300), 1, (*own_blocks(0)[:2], *own_blocks(1)[2:]), (256,), hit=256)
    for right in (True, False):
        machine().poison(1)
        machine().restore(1, rings if right else np.roll(rings, 1, axis=1))
        mine = machine().prefill([prompt], compact=True)[0]
        difference = np.abs(mine - expected).max()
        assert difference <= EXACT if right else difference > SEEN


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("wrong", ["decoder_start", "window_start", "history", "cached block", "none"])
def test_what_is_wrong_is_seen(compact: bool, wrong: str) -> None:
    """Control: rows kept from one position earlier, windows that reach one row further (into what another sequence
    left), another id before the first row, a cached entry that is not the sequence's."""
    earlier = Prompt(text(300), 0, own_blocks(0))
    machine().prefill([Prompt(text(300)[::-1], 1, own_blocks(1))], compact=False)  # what slot 1 holds
    machine().prefill([earlier], compact=False)
    prompt = Prompt(text(300), 1, (*own_blocks(0)[:2], *own_blocks(1)[2:]), (256,), 60, 256, WINDOW)
    run = oracle().prefill(text(300), hit=256, earlier=cold(300), keep_tokens=60, replayed=WINDOW)
    changes: dict[str, Any] = {}
    if wrong == "decoder_start":
        changes = {"decoder_start": prompt.decoder_start - 1}
    elif wrong == "window_start":
        changes = {"window_start": prompt.window_start - WINDOW}
    elif wrong == "history":
        changes = {"history": [5, 6, 7]}
    elif wrong == "cached block":
        index = machine().state.index.at[prompt.blocks[0]].set(machine().state.index[prompt.blocks[1]])
        compressed = machine().state.compressed
        compressed = compressed.at[prompt.blocks[0]].set(compressed[prompt.blocks[1]])
        machine().state = machine().state.replace(index=index, compressed=compressed)
    mine = machine().prefill([prompt], compact=compact, **changes)[0][-len(run.logits) :]
    difference = np.abs(mine - run.logits).max()
    assert difference <= EXACT if wrong == "none" else difference > SEEN, difference


# ---- the compiled step ----


def runner_on(plan: DeviceMesh) -> ModelRunner:
    """The tiny model's runner on a mesh."""
    parallel = ONE_DEVICE if plan.world == 1 else Parallel(plan)
    mesh = plan.build()
    paths = parameter_paths(abstract_model(TINY, NUMERICS, parallel=parallel))
    places = {n: NamedSharding(mesh, plan.spec(p.get_metadata()["logical_axes"])) for n, p in paths.items()}
    with open_checkpoint(CHECKPOINT) as reader:
        leaves = load_leaves(reader, TINY, places, parallel=parallel)
    return ModelRunner(assemble(TINY, NUMERICS, leaves, tiny_tables(), parallel=parallel), LAYOUT, mesh)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_on(DeviceMesh())


def run_step(runner: ModelRunner, plan: StepPlan, outputs: str = TOKENS) -> Any:
    return runner.execute([plan], outputs).host()[0]


@pytest.mark.parametrize("kept_rows", [pytest.param(0, marks=pytest.mark.slow), 64])
def test_a_fork_samples_the_last_row_of_another_chunk(runner: ModelRunner, kept_rows: int) -> None:
    """With its own temperature and seed: what it would have drawn as the prompt's only sample. Of its slot it sets the
    last token and nothing else; forced ids and unsampled chunks as ever."""
    bucket = LADDER.bucket(False, 256, BLOCKS_PER_SEQUENCE, kept_rows)
    assert bucket.drops_rows == bool(kept_rows)
    keep = LEAST if kept_rows else None
    first, second = Prompt(text(60), 0, own_blocks(0), keep=keep), Prompt(text(90)[::-1], 1, own_blocks(1), keep=keep)
    a, b = (next(p.chunks(temperature=1.5, seed=11, output_index=3)) for p in (first, second))
    draws = [
        dataclasses.replace(Chunk([], 0, slot, [], **how), samples_of=of)
        for slot, of, how in (
            (2, 0, {"temperature": 1.5, "seed": 2**40 + 5}),
            (3, 1, {}),
            (4, 1, {"temperature": 0.8, "seed": 12, "output_index": 9}),
            (5, 0, {"forced": 77}),
            (6, 0, {"sample": False}),
        )
    ]
    runner.reset()
    before = jax.device_get(runner.state)
    output, after = run_step(runner, build_plan(bucket, [a, b, *draws])), jax.device_get(runner.state)
    for i, draw in enumerate(draws):
        one = dataclasses.replace(
            (a, b)[draw.samples_of or 0],
            temperature=draw.temperature,
            seed=draw.seed,
            output_index=draw.output_index,
            forced=draw.forced,
        )
        alone = run_step(runner, build_plan(bucket, [one]))
        assert output.token[2 + i] == alone.token[0]
        assert output.logprob[2 + i] == pytest.approx(alone.logprob[0], abs=1e-4)
    assert len({int(t) for t in output.token[:5]}) > 2, "the draws differ"
    assert after.last_token[:7].tolist() == [*output.token[:6].tolist(), before.last_token[6]]
    assert after.length[:7].tolist() == [60, 90, 0, 0, 0, 0, 0]
    for name in ("window", "compressor"):
        assert not getattr(after, name)[:, 2:].any()
    assert not after.engram_history[2:].any()


def test_a_step_that_drops_rows_updates_the_state_in_place(runner: ModelRunner) -> None:
    """Every byte of the donated caches is reused for the result."""
    memory = runner.compiled(LADDER.bucket(False, 256, BLOCKS_PER_SEQUENCE, 64)).memory_analysis()
    assert memory.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(LAYOUT.abstract()))


def test_a_decode_step_starts_where_the_caches_end(runner: ModelRunner) -> None:
    """The length of the slot, counted on device by prompts and by decode steps, equals the host's."""
    prompts = [Prompt(text(60), 3, own_blocks(0), (37,)), Prompt(text(41), 5, own_blocks(1), (41,))]
    bucket = LADDER.bucket(True, 4, BLOCKS_PER_SEQUENCE)
    answers = []
    for on_device in (True, False):
        runner.reset()
        for prompt in prompts:
            for chunk in prompt.chunks():
                run_step(runner, build_plan(LADDER.bucket(False, 256, BLOCKS_PER_SEQUENCE), [chunk]))
        rows = []
        for step in range(4):
            live = prompts[: 1 if step == 2 else 2]  # one pauses
            starts = [60 + step, 41 + step - (step > 2)]
            chunks = [
                Chunk([DEVICE_TOKEN], DEVICE_LENGTH if on_device else start, p.slot, p.blocks)
                for p, start in zip(live, starts)
            ]
            output = run_step(runner, build_plan(bucket, chunks))
            rows += [(output.token[i], output.logprob[i]) for i in range(len(live))]
        answers.append(rows)
        lengths = np.asarray(runner.state.length).tolist()
        assert lengths == [0, 0, 0, 64, 0, 44, 0, 0, 0, 0]
    assert answers[0] == answers[1]


def test_dropped_rows_cost_nothing(runner: ModelRunner) -> None:
    """What a row costs in all layers is known from a step of fewer rows. One that the decoder's 4 of 10 layers drop
    costs two thirds of it: the first of them still makes its entry, and the encoder has the n-gram memory as well."""

    def flops(rows: int, kept_rows: int) -> float:
        cost = runner.lower(Bucket(False, rows, BLOCKS_PER_SEQUENCE, kept_rows=kept_rows)).cost_analysis()
        return float(cost["flops"])

    whole, half, kept = flops(256, 256), flops(128, 128), flops(256, 128)
    assert 0.6 < (kept - half) / (whole - half) < 0.7


def test_results_of_every_row_are_not_given_where_rows_are_dropped(runner: ModelRunner) -> None:
    bucket = LADDER.bucket(False, 256, BLOCKS_PER_SEQUENCE, 64)
    for outputs in (LOGITS, TRACE):
        with pytest.raises(ValueError, match=f"{outputs} asked of a step that drops rows"):
            runner.lower(bucket, outputs)


def test_a_step_that_brings_too_little_history_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="the model looks back 3 tokens, the step has 2"):
        runner.lower(Bucket(False, 256, 1, history=2))


@pytest.mark.parametrize(
    "mesh", [DeviceMesh(cp=2, ep=2), pytest.param(DeviceMesh(dp=2, cp=4, ep=4), marks=pytest.mark.slow)], ids=str
)
def test_context_parallel_ranks_keep_the_same_rows(runner: ModelRunner, mesh: DeviceMesh) -> None:
    """Two prompts in two steps, some of whose kept rows lie in two chunks: every rank samples the same and stores the
    same as one device does, within the order of sums."""
    many = runner_on(mesh)
    prompts = [
        Prompt(text(200), 2, own_blocks(2), (180, 20), 40),
        Prompt(text(100), 4, own_blocks(1), (60, 40), LEAST),
    ]
    pending = [list(prompt.chunks(temperature=1.0, seed=7)) for prompt in prompts]
    one = LADDER.bucket(False, 256, BLOCKS_PER_SEQUENCE, 64)
    shared = Bucket(False, 256 * mesh.cp, BLOCKS_PER_SEQUENCE, cp=mesh.cp, kept_rows=64 * mesh.cp)
    runner.reset()
    for number in range(2):
        chunks = [chunks[number] for chunks in pending]
        alone = run_step(runner, build_plan(one, chunks))
        plans = [build_plan(shared, chunks, rank % mesh.cp) for rank in many.local_ranks]
        for output in many.execute(plans).host():
            sampled = [i for i, chunk in enumerate(chunks) if chunk.sample]
            assert output.token[sampled].tolist() == alone.token[sampled].tolist()
            np.testing.assert_allclose(output.logprob[sampled], alone.logprob[sampled], rtol=0, atol=EXACT)
    expected, state = jax.device_get(runner.state), jax.device_get(many.state)
    axes = CacheLayout.logical_axes()
    for field in dataclasses.fields(EngineState):
        whole, part = getattr(state, field.name), getattr(expected, field.name)
        if whole is None:
            continue  # drafts: there are none
        axis = next(i for i, a in enumerate(axes[field.name]) if a in ("blocks", "slots"))
        for mine in np.split(whole, mesh.world, axis=axis):
            np.testing.assert_allclose(mine, part, rtol=0, atol=EXACT, err_msg=field.name)
