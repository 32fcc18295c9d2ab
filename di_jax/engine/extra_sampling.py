"""What a request asks of its sampling beyond greedy or a temperature, as the numbers that the device gets.

Such a request is answered by a second program after the step (`sampling_programs`); the others never see it. Numbers
go with every step; what depends on the answer so far lives in a state slot on device and is written there when the
answer begins, or begins again. Plain NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from di_jax.engine.step_plan import StepPlan
from di_jax.prompts import RequestError
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import Tokenizer

NO_ID = -1
LOGPROB_FLOOR = -9999.0  # what a log-probability of -inf is told as (engine 1.6)
WORDS, WORD_LENGTH = 64, 8  # token sequences that must not appear, and their tokens, at most
# A slot's marks, int32 [V]: how often the id is among the outputs, and whether it is one of these.
COUNT = (1 << 24) - 1
IN_PROMPT = 1 << 24
ENDS_ANSWER = 1 << 25
# What a sequence is drawn by, int32, floats by their bits: first what the step's own plan has too, then the request's.
OF_PLAN = ("sample", "slot", "temperature", "seed_low", "seed_high", "output_index", "forced")
OF_REQUEST = (
    "chosen",  # 1: drawn by the second program
    "has_state",  # 1: its slot is used and kept up
    "min_p",
    "top_k",
    "top_p",
    "presence",
    "frequency",
    "repetition",
    "min_tokens",
    "top",  # likeliest ids to be told
)
COLUMNS = OF_PLAN + OF_REQUEST
FLOATS = ("temperature", "min_p", "top_p", "presence", "frequency", "repetition")


def _numbers(**changes: float) -> np.ndarray:
    values = dict.fromkeys(OF_REQUEST, 0) | {"top_p": 1.0, "repetition": 1.0} | changes
    bits = [np.float32(v).view(np.int32) if name in FLOATS else np.int32(v) for name, v in values.items()]
    return np.array(bits, np.int32)


NEUTRAL = _numbers()


@dataclass(frozen=True)
class SlotState:
    """What the slots of a rank keep of answers with penalties, biases or forbidden words; leading axis of slots on
    device, none for one slot."""

    marks: Any  # int32 [V]
    bias: Any  # fp32 [V] added to logits
    words: Any  # int32 [WORDS, WORD_LENGTH] that must not appear, NO_ID before and instead of them
    recent: Any  # int32 [WORD_LENGTH - 1] newest tokens of the answer, the last one last


@dataclass(frozen=True)
class ExtraSampling:
    """Of one request. numbers: int32, the columns OF_REQUEST. bias: by id; -inf forbids it. allowed: None for all ids.
    words: token sequences that must not appear, longer than one. has_state: something is kept in its slot. top:
    log-probabilities told beside each token, None for not even its own."""

    numbers: np.ndarray
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    words: tuple[tuple[int, ...], ...] = ()
    has_state: bool = False
    top: int | None = None
    min_tokens: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: Tokenizer) -> ExtraSampling | None:
        """None for a request that needs nothing of it. Raises RequestError for bad_words that cannot be kept."""
        s = sampling
        singles, words = _words(s.bad_words or (), tokenizer)
        bias: dict[int, float] = {int(token): value for token, value in (s.logit_bias or {}).items()}
        bias |= dict.fromkeys(singles, -np.inf)
        allowed = None if s.allowed_token_ids is None else frozenset(s.allowed_token_ids)
        penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0, 0, 1)
        has_state = bool(penalties or bias or allowed or words or s.min_tokens)
        cut = bool(s.temperature) and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)  # of no effect on the best id
        if not (has_state or cut or s.logprobs is not None):
            return None
        numbers = _numbers(
            chosen=1,
            has_state=has_state,
            min_p=s.min_p,
            top_k=s.top_k,
            top_p=s.top_p,
            presence=s.presence_penalty,
            frequency=s.frequency_penalty,
            repetition=s.repetition_penalty,
            min_tokens=s.min_tokens,
            top=s.logprobs or 0,
        )
        return cls(numbers, bias, allowed, words, has_state, s.logprobs, s.min_tokens)

    @classmethod
    def plain(cls) -> ExtraSampling:
        """Of a request that the second program draws as the step would, for its mask alone."""
        return cls(_numbers(chosen=1))

    def check(self, stop_ids: Iterable[int], vocab_size: int) -> None:
        """Raises RequestError when every id is forbidden. stop_ids: forbidden before min_tokens."""
        out = {token for token, value in self.bias.items() if value == -np.inf}
        if self.min_tokens:
            out |= set(stop_ids)
        left = vocab_size - len(out) if self.allowed is None else len(self.allowed - out)
        if left <= 0:
            raise RequestError(
                "sampling.allowed_token_ids: bad_words and, before min_tokens, the ids that end the answer leave none "
                "of them"
            )

    def slot_state(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], stop_ids: Sequence[int], vocab_size: int
    ) -> SlotState:
        """What the slot of an answer starts from."""
        marks = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size).astype(np.int32)
        marks[np.unique(np.asarray(prompt_ids, np.int64))] |= IN_PROMPT
        marks[np.asarray(stop_ids, np.int64)] |= ENDS_ANSWER
        bias = np.full(vocab_size, 0.0 if self.allowed is None else -np.inf, np.float32)
        bias[list(self.allowed or ())] = 0.0
        bias[list(self.bias)] += np.array(list(self.bias.values()), np.float32)
        words = np.full((WORDS, WORD_LENGTH), NO_ID, np.int32)
        for row, word in zip(words, self.words):
            row[-len(word) :] = word
        recent = np.full(WORD_LENGTH - 1, NO_ID, np.int32)
        # Only what was answered: a word that the prompt begins may be said to its end.
        if known := list(output_ids)[1 - WORD_LENGTH :]:
            recent[-len(known) :] = known
        return SlotState(marks, bias, words, recent)


def _words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[set[int], tuple[tuple[int, ...], ...]]:
    """(single tokens, longer sequences) that the texts become, at the beginning of a text and after a space."""
    found = dict.fromkeys(
        tuple(tokenizer.raw.encode(spelled, add_special_tokens=False).ids)
        for text in texts
        for spelled in ((text.lstrip(), " " + text.lstrip()) if text.lstrip() else (text,))
    )
    longer = tuple(word for word in found if len(word) > 1)
    if too_long := [word for word in longer if len(word) > WORD_LENGTH]:
        text = tokenizer.decode(too_long[0])
        raise RequestError(f"sampling.bad_words: {text!r} has {len(too_long[0])} tokens; at most {WORD_LENGTH} are")
    if len(longer) > WORDS:
        raise RequestError(
            f"sampling.bad_words: they become {len(longer)} sequences of several tokens; at most {WORDS} can be kept "
            "out (words of one token: any number)"
        )
    return {word[0] for word in found if len(word) == 1}, longer


def pack_rows(plan: StepPlan, numbers: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """int32 [columns, S]: how the second program draws each sequence of a rank's step. numbers: `ExtraSampling.numbers`
    of the sequences that there are, in the plan's order."""
    view: dict[str, Any] = plan.bucket.unpack(plan.buffer)
    rows = np.empty((len(COLUMNS), plan.bucket.sequences), np.int32)
    for row, name in zip(rows, OF_PLAN):
        row[:] = view[name]
    rows[len(OF_PLAN) :] = NEUTRAL[:, None]
    if len(numbers):
        rows[len(OF_PLAN) :, : len(numbers)] = np.asarray(numbers).T
    return rows
