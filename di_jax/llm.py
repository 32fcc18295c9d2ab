"""The offline API: prompts in, answers out (serving 4).

with LLM("quickstart") as llm:
    for output in llm.generate(["The river", {"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=32)):
        print(output.error or output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from di_jax.config import Config, load_config
from di_jax.engine.engine import Engine
from di_jax.engine.extra_sampling import LOGPROB_FLOOR
from di_jax.engine.sequence import Request, RequestFailure, Sequence
from di_jax.engine.setup import build_engine_parts
from di_jax.errors import UserError
from di_jax.parallel.agreement import ProcessError
from di_jax.prompts import PromptEncoder
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "Prompt", "RequestOutput", "SamplingParams"]

# A text, or one of {"prompt": text}, {"prompt_token_ids": ids}, {"messages": chat}.
Prompt = str | Mapping[str, Any]
Sampling = SamplingParams | Mapping[str, Any]


@dataclass(frozen=True)
class Logprob:
    """A token in one place of an answer, under the raw logits; -inf is told as -9999. rank: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, so far or whole.

    token_ids: with the end token or stop id that ended it, which `text` leaves out. cumulative_logprob: natural, under
    the raw logits. finish_reason: stop, length, abort; None while it runs. stop_reason: the stop id or stop text, None
    for the end token. logprobs: when sampling.logprobs = k was given, for every token of the answer the token itself
    and the k likeliest ids.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt.

    index: position of the prompt in the call. outputs: one per choice, empty when `error` = {"type", "message"} is
    set. seq_seed: what reproduces the answers when given back. metrics: as in an output record (cli-contract).
    """

    request_id: str
    index: int
    prompt: str | None  # None when ids or messages were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seq_seed: int | None = None
    metrics: dict[str, float | int | None] | None = None
    error: dict[str, str] | None = None


@dataclass(eq=False)
class _Job:
    """One prompt of a call: its request, or why there is none; of another process's, the output."""

    request_id: str
    index: int
    prompt: str | None
    request: Request | None
    failure: RequestFailure | None = None
    told: int = 0  # tokens of its answers when it was last looked at
    known: RequestOutput | None = None
    logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)  # by choice, as far as they were told

    @property
    def finished(self) -> bool:
        return self.request is None or self.request.finished

    def moved(self) -> bool:
        """Whether it has more tokens than when this was last asked, or has ended."""
        before, self.told = self.told, 0 if self.request is None else self.request.num_output_tokens
        return self.finished or self.told > before

    def output(self, tokenizer: Tokenizer) -> RequestOutput:
        if self.known is not None:
            return self.known
        if self.request is None or self.request.failure is not None:
            failure = self.failure if self.request is None else self.request.failure
            assert failure is not None
            ids = [] if self.request is None else self.request.prompt_ids
            error = {"type": failure.type, "message": failure.message}
            return RequestOutput(self.request_id, self.index, self.prompt, ids, [], True, error=error)
        request = self.request
        outputs = [
            CompletionOutput(
                s.index,
                s.text,
                list(s.output_ids),
                math.fsum(s.logprobs),
                s.finish_reason,
                s.stop_reason,
                self._logprobs(s, tokenizer),
            )
            for s in request.sequences
        ]
        return RequestOutput(
            self.request_id,
            self.index,
            self.prompt,
            request.prompt_ids,
            outputs,
            request.finished,
            request.seq_seed,
            request.metrics(),
        )

    def _logprobs(self, sequence: Sequence, tokenizer: Tokenizer) -> list[dict[int, Logprob]] | None:
        if sequence.sampling.logprobs is None:
            return None
        told = self.logprobs.setdefault(sequence.index, [])
        for at in range(len(told), len(sequence.output_ids)):
            top, token = sequence.tops[at], sequence.output_ids[at]
            ranks = {token: (sequence.logprobs[at], top.rank)}
            for rank, (other, logprob) in enumerate(zip(top.ids, top.logprobs), 1):
                ranks.setdefault(other, (logprob, rank))
            told.append(
                {
                    other: Logprob(max(logprob, LOGPROB_FLOOR), rank, tokenizer.token_text(other))
                    for other, (logprob, rank) in ranks.items()
                }
            )
        return list(told)


class LLM:
    """A loaded model and its engine. One thread at a time; a `stream` left open may be interleaved with other calls.

    With several processes all make the same calls with the same prompts; each answers its share, and all get all
    outputs, in the same order.

    config: the tree, or path or bare name of its YAML file. Loads the weights and, with engine.warmup, compiles every
    step. Raises UserError for a config or checkpoint that cannot be used.
    """

    def __init__(self, config: Config | str | Path) -> None:
        self.config = config if isinstance(config, Config) else load_config(config)
        parts = build_engine_parts(self.config)
        self.folder, self.tokenizer = parts.folder, parts.tokenizer
        self._engine: Engine | None = Engine(parts, self.config.engine)
        self.prompts = PromptEncoder(parts.folder, parts.tokenizer)
        self._agreement = self._engine.agreement
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """Raises UserError after `shutdown`."""
        if self._engine is None:
            raise UserError("this LLM was shut down; make another")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers every prompt; outputs in the order of the prompts.

        sampling_params: None for the config's `sampling`, one for all, or one per prompt; a mapping counts as an input
        record's `sampling`, completed by the config's. A prompt or mapping that cannot be used gives an output with
        `error`, and its neighbours are answered. Interrupted, it aborts its requests and frees their blocks.
        Raises UserError when the numbers of prompts and parameters differ.
        """
        outputs = list(self.generate_iter(prompts, sampling_params, use_tqdm=use_tqdm))
        return sorted(outputs, key=lambda output: output.index)

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> Generator[RequestOutput]:
        """Like `generate`, yielding each output when it is finished; closing the iterator aborts the others."""
        return self._finished(self._pairs(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] | None = None,
    ) -> Generator[RequestOutput]:
        """Yields a prompt's output each time it has new tokens, cumulative (all text and ids so far) and with
        `finished` on the last; those that another process answers only then. Closing the iterator aborts what is
        unfinished and frees its blocks."""
        return self._streamed(self._pairs(prompts, sampling_params))

    def shutdown(self) -> None:
        """Aborts what runs and drops weights and caches. The LLM cannot be used afterwards; open streams end with
        `abort`."""
        if self._engine is not None:
            for request_id in list(self._engine.requests):
                self._engine.abort(request_id)
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _pairs(
        self, prompts: Prompt | Iterable[Prompt], sampling_params: Sampling | Iterable[Sampling] | None
    ) -> list[tuple[Prompt, Sampling]]:
        """Each prompt with its sampling. Raises UserError when there are not as many."""
        many: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if sampling_params is None:
            sampling_params = {}
        if isinstance(sampling_params, SamplingParams | Mapping):
            return [(prompt, sampling_params) for prompt in many]
        each = list(sampling_params)
        if len(each) != len(many):
            raise UserError(f"sampling_params: {len(each)} for {len(many)} prompts; give one for all or one per prompt")
        return list(zip(many, each, strict=True))

    def _streamed(self, pairs: list[tuple[Prompt, Sampling]]) -> Generator[RequestOutput]:
        with contextlib.closing(self._drive(pairs)) as jobs:
            for job in jobs:
                yield job.output(self.tokenizer)

    def _finished(self, pairs: list[tuple[Prompt, Sampling]], use_tqdm: bool) -> Generator[RequestOutput]:
        began, prompt_tokens, output_tokens = time.perf_counter(), 0, 0
        disable = None if use_tqdm and self._agreement.is_first else True
        with (
            contextlib.closing(self._drive(pairs)) as jobs,
            tqdm(total=len(pairs), desc="generating", unit="prompt", disable=disable, file=sys.stderr) as bar,
        ):
            for job in jobs:
                if not job.finished:
                    continue
                output = job.output(self.tokenizer)
                if output.error is None:
                    prompt_tokens += len(output.prompt_token_ids)
                    output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                    seconds = max(time.perf_counter() - began, 1e-9)
                    bar.set_postfix_str(
                        f"in {prompt_tokens / seconds:.0f} tok/s, out {output_tokens / seconds:.0f} tok/s"
                    )
                bar.update()
                yield output

    def _drive(self, pairs: list[tuple[Prompt, Sampling]]) -> Generator[_Job]:
        """Queues this process's prompts and steps the engine until all are finished, yielding each that got tokens or
        ended.

        Between two of our steps the engine may have changed: another call stepped, someone aborted a request, an error
        failed it. Only an engine that did nothing else is trusted to report what moved. With several processes it
        steps all the same: whether it does must not depend on what only one of them knows.
        """
        engine, alone = self.engine, self._agreement.num_processes == 1
        if not alone:
            self._check_same(pairs)
        # Known before anything is queued, so that an interrupt at any moment leaves nothing behind in the engine.
        ids = [str(next(self._ids)) for _ in pairs]
        try:
            todo = deque(index for index in range(len(pairs)) if engine.serves(index))
            open_jobs: dict[str, _Job] = {}
            ended: list[_Job] = []
            seen = engine.changes
            while True:
                # With engine.max_waiting the rest stays here until there is room: nothing given here is refused for it.
                while todo and engine.has_room:
                    job = self._submit(ids[todo[0]], todo[0], *pairs[todo[0]])
                    todo.popleft()
                    if job.finished:
                        ended.append(job)
                    else:
                        open_jobs[job.request_id] = job
                ended, working = self._everyones(ended, bool(open_jobs or todo))
                yield from ended
                if not working:
                    if not alone:
                        engine.step()  # handles what is in flight
                    break
                report, ended = engine.step() if engine.changes == seen or not alone else None, []
                if report is not None and engine.changes == seen + 1:
                    looked_at = [open_jobs[r.request_id] for r in report.requests if r.request_id in open_jobs]
                else:
                    looked_at = list(open_jobs.values())
                    if report is None and engine.changes == seen and open_jobs:
                        raise RuntimeError(f"the engine has nothing to do, requests {', '.join(open_jobs)} are open")
                seen = engine.changes
                for job in looked_at:
                    if not job.moved() or job.request_id not in open_jobs:
                        continue
                    if job.finished:
                        del open_jobs[job.request_id]
                        ended.append(job)
                    else:
                        yield job
        finally:
            for request_id in ids:
                engine.abort(request_id)

    def _everyones(self, ended: list[_Job], working: bool) -> tuple[list[_Job], bool]:
        """The jobs that ended in any process, in the order of processes, and whether one has more. Collective."""
        agreement = self._agreement
        if agreement.num_processes == 1:
            return ended, working
        own = {"working": working, "ended": [dataclasses.asdict(job.output(self.tokenizer)) for job in ended]}
        everyone = [json.loads(told) for told in agreement.exchange(json.dumps(own).encode(), "finished requests")]
        working = any(told["working"] for told in everyone)
        if not working:
            agreement.working(None)
        return [_known_job(raw) for told in everyone for raw in told["ended"]], working

    def _check_same(self, pairs: list[tuple[Prompt, Sampling]]) -> None:
        """Raises ProcessError unless all processes were given the same prompts and sampling. Collective."""
        own = np.array([len(pairs), zlib.crc32(repr(pairs).encode("utf-8", "replace"))], np.int64)
        everyones = self._agreement.gather(own, "the prompts")
        for process, (count, _) in enumerate(everyones):
            if (everyones[process] != everyones[0]).any():
                raise ProcessError(
                    f"process {process} was given other prompts or sampling ({count}) than process 0 "
                    f"({everyones[0][0]}); give all the same"
                )

    def _submit(self, request_id: str, index: int, prompt: Prompt, sampling: Sampling) -> _Job:
        """Queues one prompt; what is wrong with it becomes the job's failure."""
        text = prompt if isinstance(prompt, str) else None
        try:
            text, ids = self.prompts.encode(prompt)
            if not isinstance(sampling, SamplingParams):
                sampling = SamplingParams.from_dict(sampling, self.config.sampling)
            return _Job(request_id, index, text, self.engine.add_request(ids, sampling, request_id))
        except UserError as error:
            return _Job(request_id, index, text, None, RequestFailure("invalid_request", str(error)))


def _known_job(raw: dict[str, Any]) -> _Job:
    """A job that ended, from the fields of its output."""
    output = RequestOutput(**raw | {"outputs": [_known_answer(answer) for answer in raw["outputs"]]})
    return _Job(output.request_id, output.index, output.prompt, None, known=output)


def _known_answer(raw: dict[str, Any]) -> CompletionOutput:
    logprobs = raw["logprobs"] and [
        {int(token): Logprob(**told) for token, told in place.items()} for place in raw["logprobs"]
    ]
    return CompletionOutput(**raw | {"logprobs": logprobs})
