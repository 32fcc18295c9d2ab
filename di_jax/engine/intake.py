"""From a prompt and its sampling to a request of the engine, or to the error that says why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from di_jax.config import EngineGroup
from di_jax.engine.extra_sampling import ExtraSampling
from di_jax.engine.matching import Matcher
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request, Sequence
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_policy import PROMPT
from di_jax.prompts import RequestError, check_token_ids
from di_jax.sampling_params import SamplingParams, choice_seed
from di_jax.tokenizer import IncrementalDetokenizer


class Intake:
    """Checks requests against the limits of one engine and numbers them in the order of their arrival."""

    def __init__(self, parts: EngineParts, config: EngineGroup, scheduler: Scheduler) -> None:
        self.parts, self.config, self.scheduler = parts, config, scheduler
        self._arrivals = itertools.count()

    def request(
        self,
        request_id: str,
        prompt_ids: SequenceOf[int],
        sampling: SamplingParams,
        matcher: Callable[[], Matcher] | None = None,
    ) -> Request:
        """A request with its sequences, not queued yet. matcher: makes what each has to match. Raises RequestError."""
        ids, room = self._check(prompt_ids, sampling)
        seed, arrival = sampling.resolved_seed(), next(self._arrivals)
        request = Request(request_id, ids, sampling, seed)
        patience = self.config.deadline_s if sampling.deadline_s is None else sampling.deadline_s
        request.deadline = None if patience is None else request.arrived + patience
        stop_ids = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stop_ids.add(self.parts.model_config.eos_token_id)
        extra = ExtraSampling.of(sampling, self.parts.tokenizer)
        if extra is not None:
            extra.check(stop_ids, self.parts.model_config.vocab_size)
        elif matcher is not None:
            extra = ExtraSampling.plain()
        request.sequences = [
            Sequence(
                request_id,
                index,
                request.prompt_ids,
                sampling,
                choice_seed(seed, index),
                max_tokens=min(sampling.max_tokens, room),
                priority=sampling.priority,
                arrival=arrival,
                stop_ids=frozenset(stop_ids),
                extra=extra,
                request=request,
                keys=self.scheduler.ranks[0].new_keys(sampling.cache_salt),
                detokenizer=self._detokenizer(sampling),
                matcher=None if matcher is None else matcher(),
            )
            for index in range(sampling.n)
        ]
        return request

    def _check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> tuple[list[int], int]:
        """The prompt as plain integers, and the tokens that the context leaves for the answer."""
        limit, vocabulary = self.config.max_model_len, self.parts.model_config.vocab_size
        if not len(prompt_ids):  # not its truth: it may be an array
            raise RequestError("prompt: is empty; give at least one token")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"prompt: has {len(prompt_ids)} tokens; engine.max_model_len = {limit} leaves room for {limit - 1} and "
                "one token of answer: shorten the prompt or raise engine.max_model_len"
            )
        ids = check_token_ids("prompt_token_ids", prompt_ids, vocabulary)
        check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids or (), vocabulary)
        check_token_ids("sampling.logit_bias", sampling.logit_bias or (), vocabulary)
        check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), vocabulary)
        check_token_ids("sampling.forced_token_ids", sampling.forced_token_ids or (), vocabulary, low=-1)
        # A prompt engine gives one token: another engine goes on from it.
        room = 1 if self.config.type == PROMPT else limit - len(prompt_ids)
        unfit = self.scheduler.never_fits(len(prompt_ids) + min(sampling.max_tokens, room))
        if unfit:
            raise RequestError(unfit)
        return ids, room

    def _detokenizer(self, sampling: SamplingParams) -> IncrementalDetokenizer | None:
        if not sampling.detokenize:
            return None
        return IncrementalDetokenizer(
            self.parts.tokenizer,
            sampling.stop_texts,
            include_stop_str=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )
