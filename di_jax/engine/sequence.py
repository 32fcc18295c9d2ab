"""What the engine knows of a request on the host: its answers (sequences), and which blocks and slot each holds."""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass, field

from di_jax.engine.step_plan import FREE_TOKEN
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import IncrementalDetokenizer


class Status(enum.Enum):
    """Where a sequence is. WAITING holds no block, PREFILL and RUNNING do, FINISHED does no more."""

    WAITING = enum.auto()
    PREFILL = enum.auto()  # admitted; the caches do not hold the whole prompt yet
    RUNNING = enum.auto()  # one token a decode step
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Holding:
    """What a sequence holds on one rank: pool blocks by position, all that it may ever need, and a state slot."""

    rank: int
    blocks: tuple[int, ...]
    slot: int


@dataclass(eq=False)
class Sequence:
    """One answer of a request, choice `index`, from waiting to finished.

    max_tokens: clipped, so prompt and answer fit the engine's max_model_len. held: by rank, in rising order; on every
    context rank while the prompt runs, then on the one that decodes it (architecture 7.6). num_computed: positions in
    the caches. stop_reason: the stop id or text, None for the end token.
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # natural, of the raw logits
    held: list[Holding] = field(default_factory=list)
    num_computed: int = 0
    decode_steps: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: str | int | None = None
    detokenizer: IncrementalDetokenizer | None = None

    def __len__(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def capacity(self) -> int:
        """Positions that it may ever need."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens not in the caches yet."""
        return max(0, len(self.prompt_ids) - self.num_computed)

    @property
    def forced_token(self) -> int:
        """The id that the next output must be, or FREE_TOKEN."""
        forced = self.sampling.forced_token_ids or ()
        return forced[len(self.output_ids)] if len(self.output_ids) < len(forced) else FREE_TOKEN

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def text(self) -> str:
        return self.detokenizer.text if self.detokenizer else ""


@dataclass(frozen=True)
class RequestFailure:
    """Why a request has no answer. type: invalid_request, model_error, or interrupted (the step that computed it)."""

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
    first_token: float | None = None
    ended: float | None = None

    @property
    def finished(self) -> bool:
        return self.ended is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self.sequences)

    def metrics(self) -> dict[str, float | int | None]:
        """The `metrics` of an output record (cli-contract). Counts and decode_ppl, exp of the mean negative
        log-probability of the emitted tokens, are over all choices; ttft_s counts from arrival and so includes waiting.
        """
        logprobs = [p for s in self.sequences for p in s.logprobs]
        now = time.perf_counter() if self.ended is None else self.ended
        return {
            "num_cached_tokens": 0,
            "decode_steps": sum(s.decode_steps for s in self.sequences),
            "drafted_tokens": 0,
            "verified_tokens": 0,
            "accepted_tokens": 0,
            "decode_ppl": perplexity(logprobs),
            "confidence_error": None,
            "ttft_s": None if self.first_token is None else self.first_token - self.arrived,
            "total_s": now - self.arrived,
        }


def perplexity(logprobs: list[float]) -> float | None:
    """exp of the mean negative log-probability; None without tokens or past the range of a float (forced tokens)."""
    if not logprobs:
        return None
    mean = -math.fsum(logprobs) / len(logprobs)
    return math.exp(mean) if mean < 700 else None
