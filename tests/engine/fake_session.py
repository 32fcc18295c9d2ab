"""Runs requests through an engine over a fake device, and checks everything that can be checked after every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from fake_device import DeviceError
from fake_engine import Setup, fake_engine
from fake_model import COLD, Past

from di_jax.engine.batch import DecodeBatch
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.data_rank import DataRank
from di_jax.engine.engine import Engine
from di_jax.engine.matching import Matcher
from di_jax.engine.metrics import StepReport
from di_jax.engine.sequence import Holding, Request, Sequence
from di_jax.sampling_params import SamplingParams

STEPS = 20_000  # more than any test needs: requests that do not get on


@dataclasses.dataclass
class Segment:
    """A prefill and what was decoded after it. first: output index of its first token. pasts: by rank. rank: that
    decodes it, once known."""

    first: int
    pasts: dict[int, Past]
    rank: int


class Letters:
    """A toy `Matcher`: a word of two letters whose sum modulo 3 says which of them may come next, or the word's end.

    known: tokens accepted.
    """

    END = 1
    IDS = (10, 11)
    NEXT = (IDS, (*IDS, END), (10,))

    def __init__(self, vocabulary: int = 211) -> None:
        self.vocabulary = vocabulary
        self.known: list[int] = []

    def allowed(self) -> np.ndarray:
        found = np.zeros(self.vocabulary, bool)
        found[list(self.NEXT[sum(self.known) % 3])] = True
        return found

    def accept(self, token: int) -> bool:
        if token not in self.NEXT[sum(self.known) % 3]:
            return False
        self.known.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.known)
        del self.known[len(self.known) - count :]


class Session:
    """An engine whose answers are compared with those of `FakeModel.hidden`.

    Without replay nothing but the tokens counts. With decoder replay alone, where the decoder's rows begin counts too;
    with encoder replay, what the blocks of a hit held when they were found.
    """

    def __init__(
        self, setup: Setup, monkeypatch: Any = None, seed: int = 0, local_ranks: SequenceOf[int] | None = None
    ) -> None:
        self.setup = setup
        self.engine, self.device = fake_engine(setup, monkeypatch, local_ranks, seed)
        self.rng = np.random.default_rng(seed)
        self.segments: dict[Sequence, list[Segment]] = {}
        self.requests: list[Request] = []
        self.told: set[Request] = set()  # reported after their end
        self.silent: set[Request] = set()  # ended outside of steps
        self.answers: dict[Request, list[list[int]]] = {}  # when they ended
        self.matchers: dict[Request, Callable[[], Matcher]] = {}
        self.leaving: list[tuple[int, Holding]] = []  # step by which it has to be released
        self._reported = self._unseen = 0  # reports given, and steps that were complete without one
        self.steps = self.forks = self.hits = self.restored = self.kept = 0
        self.paused = False  # whether a step left the draft no context
        self._watch(self.engine)

    def _watch(self, engine: Engine) -> None:
        """Notes what every prefill finds in the caches, and looks at what is kept and who is preempted."""
        scheduler = engine.scheduler
        admit, preempt, put = scheduler._admit, scheduler._preempt, engine.snapshots.put

        def preempted(rank: DataRank, ledger: BlockManager, now: float) -> None:
            table = rank._table(ledger.rank)
            slots, size = table.ready(), ledger.block_size
            short = table.position[slots] // size >= table.num_blocks[slots]
            assert not table.ahead[slots].any() and short.sum() > ledger.num_available, "preempted for drafts"
            assert (table.num_blocks[slots] <= table.position[slots] // size + 1).all(), "a block is kept for drafts"
            preempt(rank, ledger, now)

        def kept(key: bytes, ring: np.ndarray) -> bool:
            self._check_snapshot(key, ring)
            return put(key, ring)

        scheduler._preempt = preempted  # type: ignore[method-assign]
        engine.snapshots.put = kept  # type: ignore[method-assign]

        def admitted(rank: DataRank, sequence: Sequence) -> None:
            admit(rank, sequence)
            pasts = {held.rank: self._past(rank, sequence, held) for held in sequence.held}
            self.segments.setdefault(sequence, []).append(Segment(len(sequence.output_ids), pasts, -1))
            self.hits += sequence.hit.length > 0
            self.restored += sequence.hit.start == sequence.hit.length > 0

        scheduler._admit = admitted  # type: ignore[method-assign]
        for rank in scheduler.ranks:
            self._watch_rank(rank)

    def _check_snapshot(self, key: bytes, ring: np.ndarray) -> None:
        """A snapshot holds the window before the boundary that it is kept for."""
        keys = (s.keys.keys for request in self.requests for s in request.sequences if s.keys is not None)
        boundary = self.setup.block_size * next(1 + own.index(key) for own in keys if key in own)
        at = ring[1].astype(np.int64)
        wanted = np.arange(max(0, boundary - self.setup.window + 1), boundary)
        assert (at[:, wanted % at.shape[1]] == wanted).all(), f"not the window before {boundary}"
        self.kept += 1

    def _watch_rank(self, rank: DataRank) -> None:
        settle, fork = rank.settle, rank.fork

        def settled(sequence: Sequence) -> list[Holding]:
            left = settle(sequence)
            self.segments[sequence][-1].rank = sequence.held[0].rank
            return left

        def forked(parent: Sequence, child: Sequence) -> tuple[int, int] | None:
            ledger = next(one for one in rank.ledgers if one.rank == parent.held[0].rank)
            before = ledger.num_available
            copied = fork(parent, child)
            if copied is None:
                assert ledger.num_available == before and not child.held
                return None
            full = len(parent.prompt_ids) // ledger.block_size
            assert child.held[0].blocks[:full] == parent.held[0].blocks[:full]
            assert before - ledger.num_available == len(child.held[0].blocks) - full == (copied != (-1, -1))
            assert child not in self.segments
            self.segments[child] = [dataclasses.replace(self.segments[parent][-1], first=0)]
            self.forks += 1
            return copied

        rank.settle, rank.fork = settled, forked  # type: ignore[method-assign]

    def _past(self, rank: DataRank, sequence: Sequence, held: Holding) -> Past:
        hit, keep, size = sequence.hit, rank.rules.keep_tokens, rank.block_size
        assert hit.length % size == 0 and hit.length <= max(0, len(sequence) - rank.rules.look_back)
        start = max(sequence.goal - keep, hit.start) if keep else hit.window_start
        past = Past(hit.length, hit.start, hit.window_start, start)
        if not hit.length:
            assert hit.start == hit.window_start == 0
            return past
        assert sequence.keys is not None
        rings: dict[int, dict[int, int]] = {}
        if hit.start == hit.length:
            assert hit.window_start == 0
            kept = self.engine.snapshots._snapshots[sequence.keys.keys[hit.length // size - 1]]
            for layer, (values, at) in enumerate(zip(kept[0].tolist(), kept[1].astype(np.int64).tolist())):
                # After replay the rows below its start hold what the slot had before.
                rings[layer] = {p: value for row, (p, value) in enumerate(zip(at, values)) if p % len(at) == row}
        else:
            assert hit.start == hit.window_start == hit.length - size and rank.rules.replay
        entries = self.device.entries(held.rank, held.blocks[: hit.length // size])
        return dataclasses.replace(past, entries=entries, rings=rings)

    # -- driving

    def add(
        self,
        prompt: SequenceOf[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        matcher: Callable[[], Matcher] | None = None,
    ) -> Request:
        request = self.engine.add_request(list(prompt), sampling, request_id, matcher)
        self.requests.append(request)
        if matcher is not None:
            self.matchers[request] = matcher
        self.engine.scheduler.check()
        return request

    def abort(self, request: Request) -> None:
        held = [h for s in request.sequences for h in s.held]
        was_open = not request.finished
        self.engine.abort(request.request_id)
        assert request.finished and not any(s.held for s in request.sequences)
        if was_open:
            self.silent.add(request)
            self.leaving += [(self.steps + 2, holding) for holding in held]
        self.check()

    def step(self) -> StepReport | None:
        self.steps += 1
        assert self.steps < STEPS, "requests do not get on"
        inside = [s for r in self.requests for s in r.sequences if s.held]
        preempted = {sequence: sequence.num_preemptions for sequence in inside}
        try:
            report = self.engine.step()
        except DeviceError:
            # What was in the caches is lost, what waited is not; nor is what gave way to others in this very step.
            assert all(s.finished or s.num_preemptions > preempted[s] for s in inside)
            self.check()
            return None
        self._reported += report is not None
        # The last steps of all may be seen complete when a request is aborted, and those before a step that fails are
        # reported later.
        unseen = self.engine.num_steps - self._reported - len(self.engine._reports)
        assert unseen == self._unseen or (unseen > self._unseen and not self.engine.requests), "a step is not reported"
        self._unseen = unseen
        if report is None:
            assert not self.engine.has_unfinished, "a step did nothing, and requests are open"
        else:
            assert len(set(report.requests)) == len(report.requests)
            self.told |= {request for request in report.requests if request.finished}
        self.check()
        return report

    def step_with_others(self) -> None:
        """A step that other processes make too: this one may have nothing in it."""
        self.steps += 1
        assert self.steps < STEPS, "requests do not get on"
        report = self.engine.step()
        self.told |= {request for request in report.requests if request.finished} if report is not None else set()
        self.check()

    def check(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check()
        self.device.check_flights()
        self.device.scribble(self.rng)
        retired = [holding for _, _, holding in scheduler._retired]
        self.leaving = [(due, h) for due, h in self.leaving if any(h is one for one in retired)]
        assert all(due > self.steps for due, _ in self.leaving), "an aborted request holds blocks after two steps"
        self.check_books()
        for request in self.requests:
            if request.finished and request not in self.answers:
                self.answers[request] = [list(s.output_ids) for s in request.sequences]
                assert request.request_id not in self.engine.requests

    def check_books(self) -> None:
        """Of speculation and of matchers: nothing is left over from steps that are complete."""
        engine, speculation = self.engine, self.engine.speculation
        for request in self.matchers:
            for sequence in request.sequences:
                assert sequence.matcher.known == sequence.output_ids, "the matcher is not where its answer is"
        if speculation is None:
            return
        self.paused |= speculation._idle
        flying = [(r, s) for flight in engine._flights for r, began in flight.step.rounds.items() for s in began.slots]
        batches = [flight.batch for flight in engine._flights if isinstance(flight.batch, DecodeBatch)]
        busy = {(part.rank, int(slot)) for batch in batches for part in batch.parts for slot in part.slots}
        for rank, table in speculation.tables.items():
            ledger = speculation.ledgers[rank]
            for slot in table.ready().tolist():
                ahead = int(ledger.scheduled[slot] - ledger.processed[slot])
                assert 0 <= ahead <= 1 and ahead == flying.count((rank, slot)), "rounds do not add up"
                sequence = table.sequences[slot]
                assert sequence is not None
                if not sequence.num_preemptions:
                    rounds = bool(sequence.output_ids) + sequence.decode_steps
                    # Plain steps of a long pause are no rounds.
                    assert ledger.processed[slot] <= rounds, "rounds of another"
                    assert self.paused or ledger.processed[slot] == rounds, "rounds of another"
                if not ahead and (rank, slot) not in busy:
                    assert not table.ahead[slot], "the position is not known, and nothing is in flight"
                    assert table.position[slot] == len(sequence) - 1
                    assert table.left[slot] == sequence.max_tokens - len(sequence.output_ids)
                    assert table.output_index[slot] == len(sequence.output_ids)

    def finish(self) -> None:
        """Runs until nothing is left, and checks that everything is answered, and free."""
        while self.engine.has_unfinished:
            self.step()
        self.step()
        self.check_end()

    def check_end(self) -> None:
        engine = self.engine
        assert not engine.requests and not engine.scheduler.running and not engine.scheduler.num_waiting
        assert not engine.scheduler._followers and not engine.scheduler._retired and not self.device.flights
        for ledger in engine.scheduler.ledgers:
            assert ledger.num_available == ledger.num_blocks and ledger.num_free_slots == ledger.num_slots
        for rank in engine.scheduler.ranks:
            for table in rank.tables:
                assert not (table.left > 0).any() and not any(table.sequences) and not table._forced
        assert engine.snapshots.nbytes <= engine.snapshots.budget_bytes
        for request in self.requests:
            assert request.finished and request.ended is not None
            # One that fails for its deadline may do so in a call that has no step to report.
            reported = request in self.told or request in self.silent or request.failure is not None
            assert reported, "the end of a request was never reported"
            # Nothing was added after the end.
            assert [s.output_ids for s in request.sequences] == self.answers[request]
            for sequence in request.sequences:
                self.check_answer(request, sequence)

    def check_answer(self, request: Request, sequence: Sequence) -> None:
        count = len(sequence.output_ids)
        assert count == len(sequence.logprobs) <= sequence.max_tokens
        assert len(sequence) <= self.setup.max_model_len
        assert 0 <= sequence.accepted <= sequence.verified <= sequence.drafted
        self.check_tokens(sequence)
        if sequence.extra is not None and sequence.extra.top is not None and request.failure is None:
            assert [top.rank for top in sequence.tops] == [1 + token % 50 for token in sequence.output_ids]
            assert all(top.ids[:1] in ([], [token]) for top, token in zip(sequence.tops, sequence.output_ids))
        ended = [token in sequence.stop_ids for token in sequence.output_ids]
        assert not any(ended[:-1])
        if request.failure is not None:
            assert sequence.finish_reason in (None, "stop", "length")
        elif sequence.finish_reason == "stop":
            assert ended[-1]
        elif sequence.finish_reason == "length":
            assert len(sequence.output_ids) == sequence.max_tokens and not ended[-1]
        else:
            assert sequence.finish_reason == "abort" and request in self.silent

    def check_tokens(self, sequence: Sequence) -> None:
        """Every token, and its log-probability, is what the model says after the tokens before it."""
        model, output = self.device.model, sequence.output_ids
        segments = self.segments.get(sequence, [])
        assert bool(segments) or not output
        ends = [*(segment.first for segment in segments[1:]), len(output)]
        for segment, end in zip(segments, ends, strict=False):
            if segment.first == end:
                continue
            index = np.arange(segment.first, end)
            tokens = [*sequence.prompt_ids, *output[: end - 1]]
            h = model.hidden(tokens, self._definition(segment))[len(sequence.prompt_ids) - 1 + index]
            many = np.ones(len(index))
            drawn, logprob = model.draw(
                h,
                many * sequence.sampling.temperature,
                np.full(len(index), sequence.seed, np.uint64),
                index,
                self._allowed(sequence, segment.first, end),
            )
            forced = [sequence.forced_token(int(n)) for n in index]
            want = [given if given >= 0 else token for given, token in zip(forced, drawn.tolist())]
            assert output[segment.first : end] == want
            assert np.array_equal(np.array(sequence.logprobs[segment.first : end], np.float32), logprob)

    def _allowed(self, sequence: Sequence, first: int, end: int) -> np.ndarray | None:
        """bool [n, V] of an answer's outputs from `first` to `end`: what could come after those before it."""
        made = next((m for r, m in self.matchers.items() if sequence in r.sequences), None)
        if made is None:
            return None
        matcher, rows = made(), []
        for at, token in enumerate(sequence.output_ids[:end]):
            rows.append(matcher.allowed())
            assert matcher.accept(token), f"output {at} is not allowed"
        return np.array(rows[first:])

    def _definition(self, segment: Segment) -> Past:
        rules = self.engine.scheduler.ranks[0].rules
        past = segment.pasts[segment.rank]
        if rules.replay and rules.prefix_caching:
            return past
        return dataclasses.replace(COLD, decoder_start=past.decoder_start) if rules.keep_tokens else COLD


def ids(length: int, seed: int = 0, vocabulary: int = 200) -> list[int]:
    """Token ids that are no end token."""
    return np.random.default_rng(seed).integers(3, vocabulary, length).tolist()
