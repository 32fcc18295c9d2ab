"""What the engine knows of a request on the host: its answers (sequences), and which blocks and slot each holds."""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass, field
from typing import Any

from di_jax.engine.draft_totals import DraftTotals
from di_jax.engine.extra_sampling import ExtraSampling
from di_jax.engine.prefix_cache import BlockKeys, Hit
from di_jax.engine.step_plan import FREE_TOKEN
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import IncrementalDetokenizer

NO_HIT = Hit(0, 0, 0)


class Status(enum.Enum):
    """Where a sequence is. WAITING holds no block, PREFILL and RUNNING do, FINISHED does no more."""

    WAITING = enum.auto()  # new, or preempted
    PREFILL = enum.auto()  # admitted; steps for all its tokens are not launched yet
    RUNNING = enum.auto()  # one token a decode step
    FINISHED = enum.auto()


@dataclass
class Holding:
    """What a sequence holds on one rank: pool blocks by position, and a state slot."""

    rank: int
    blocks: list[int]
    slot: int


@dataclass(frozen=True)
class TokenTop:
    """Beside an emitted token, under the raw logits: which place it has (1: the best), and the likeliest ids, best
    first, as many as were asked for."""

    rank: int
    ids: list[int]
    logprobs: list[float]


@dataclass(eq=False, slots=True, weakref_slot=True)  # slots: past 30 attributes others take longer to reach
class Sequence:
    """One answer of a request, choice `index`, from waiting to finished.

    max_tokens: clipped, so prompt and answer fit the engine's max_model_len. priority, arrival: its place in the queue.
    held: by rank, in rising order; on every context rank while the prompt runs, then on the one that decodes it
    (architecture 7.6). num_computed: tokens of the running prefill whose steps are launched; `goal`: those that it has.
    stop_reason: the stop id or text, None for the end token.
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()  # ids that end the answer
    extra: ExtraSampling | None = None  # None: greedy or a temperature alone
    request: Request | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # natural, of the raw logits
    tops: list[TokenTop] = field(default_factory=list)  # as many, for a request that asks for them
    held: list[Holding] = field(default_factory=list)
    num_computed: int = 0
    goal: int = 0
    hit: Hit = NO_HIT  # what the running prefill found in the caches
    keys: BlockKeys | None = None  # of its complete blocks; None without a prefix cache
    num_registered: int = 0  # blocks that were offered to the prefix cache, or came from it
    num_cached_tokens: int = 0  # of the first prefill
    num_preemptions: int = 0
    snapshot: bytes = b""  # key of the window state kept last while it decoded
    waiting_since: float = 0.0
    decode_steps: int = 0
    draft_steps: int = 0  # of those, the ones that had drafts to verify
    drafted: int = 0  # drafts that steps could have verified, those that they did, and those that were accepted
    verified: int = 0
    accepted: int = 0
    confidence_error: float = 0.0  # summed over the verified drafts
    matcher: Any = None  # `matching.Matcher`: what the answer has to match
    drafts: list[int] = field(default_factory=list)  # that its next step may verify; only with a matcher
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: str | int | None = None
    detokenizer: IncrementalDetokenizer | None = None
    text_tokens: int | None = None  # of a finished answer: tokens that its text has
    _told: int = 0  # tokens that the detokenizer has seen

    def __len__(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens at positions start to end."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - prompt) : end - prompt]

    @property
    def capacity(self) -> int:
        """Positions that it may ever need."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def leader(self) -> Sequence:
        """The first answer to the same prompt."""
        return self if self.request is None else self.request.sequences[0]

    @property
    def remaining_prompt(self) -> int:
        """Tokens of the running prefill that no step was launched for."""
        return max(0, self.goal - self.num_computed)

    def forced_token(self, output_index: int) -> int:
        """The id that an output must be, or FREE_TOKEN."""
        forced = self.sampling.forced_token_ids or ()
        return forced[output_index] if output_index < len(forced) else FREE_TOKEN

    def holding(self, rank: int) -> Holding | None:
        """What it holds on a rank."""
        return next((holding for holding in self.held if holding.rank == rank), None)

    def count_drafts(self, drafted: int, verified: int, accepted: int, error: float) -> None:
        """A decode step of it is in, of whose drafts so many were verified and accepted."""
        self.decode_steps += 1
        self.draft_steps += drafted > 0
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.confidence_error += error

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def text(self) -> str:
        """The answer's text so far. Without stop texts to look for, tokens become text when it is asked for."""
        if self.detokenizer is None:
            return ""
        self.detokenize(len(self.output_ids) if self.text_tokens is None else self.text_tokens)
        if self.text_tokens is not None:
            self.detokenizer.flush()
        return self.detokenizer.text

    def detokenize(self, count: int) -> None:
        """Hands the answer's tokens up to `count` to the detokenizer. Before min_tokens no stop text ends it."""
        if self.detokenizer is not None and count > self._told:
            free = max(self._told, min(count, self.sampling.min_tokens))
            self.detokenizer.push(self.output_ids[self._told : free], check_stop=False)
            self.detokenizer.push(self.output_ids[free:count])
            self._told = count


@dataclass(frozen=True)
class RequestFailure:
    """Why a request has no answer. type: invalid_request, model_error, interrupted (the step that computed it) or
    deadline_exceeded."""

    type: str
    message: str


@dataclass(eq=False)
class Request:
    """A prompt and its `n` sequences. Times are seconds of `time.perf_counter`."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seq_seed: int
    sequences: list[Sequence] = field(default_factory=list)
    failure: RequestFailure | None = None
    arrived: float = field(default_factory=time.perf_counter)
    deadline: float | None = None  # when it fails unless it has ended
    started: float | None = None  # its first step was launched
    first_token: float | None = None
    ended: float | None = None

    @property
    def finished(self) -> bool:
        return self.ended is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self.sequences)

    @property
    def drafts(self) -> DraftTotals:
        """What became of the drafts of all choices; not by their places."""
        return DraftTotals(
            steps=sum(s.draft_steps for s in self.sequences),
            drafted=sum(s.drafted for s in self.sequences),
            verified=sum(s.verified for s in self.sequences),
            accepted=sum(s.accepted for s in self.sequences),
            error=sum(s.confidence_error for s in self.sequences),
        )

    def metrics(self) -> dict[str, float | int | None]:
        """The `metrics` of an output record (cli-contract). Counts and decode_ppl, exp of the mean negative
        log-probability of the emitted tokens, are over all choices; num_cached_tokens is the first choice's, whose
        prompt the others share; ttft_s counts from arrival and so includes waiting.

        Where drafts were verified, else None: accept_rate, accepted drafts of the verified ones; accepted_length, mean
        tokens of a step that had drafts to verify, the one that is always drawn included; verified_length, mean drafts
        that it verified; confidence_error, mean over verified drafts of how far the confidence was from the chance of
        acceptance.
        """
        logprobs = [p for s in self.sequences for p in s.logprobs]
        now = time.perf_counter() if self.ended is None else self.ended
        drafts = self.drafts
        return {
            "num_cached_tokens": self.sequences[0].num_cached_tokens if self.sequences else 0,
            "decode_steps": sum(s.decode_steps for s in self.sequences),
            "drafted_tokens": drafts.drafted,
            "verified_tokens": drafts.verified,
            "accepted_tokens": drafts.accepted,
            "accept_rate": drafts.accept_rate,
            "accepted_length": drafts.accepted_length,
            "verified_length": drafts.verified_length,
            "decode_ppl": perplexity(logprobs),
            "confidence_error": drafts.confidence_error,
            "ttft_s": None if self.first_token is None else self.first_token - self.arrived,
            "total_s": now - self.arrived,
        }


def perplexity(logprobs: list[float]) -> float | None:
    """exp of the mean negative log-probability; None without tokens or past the range of a float (forced tokens)."""
    if not logprobs:
        return None
    mean = -math.fsum(logprobs) / len(logprobs)
    return math.exp(mean) if mean < 700 else None
