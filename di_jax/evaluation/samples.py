"""Samples: what a model answered to the items of an evaluation, as JSON lines, and the scores that come of them.

A sample holds its item, so that a file of samples is judged without the items' files, and again by another judge.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from di_jax.evaluation.judges import Judge, UndecidedError
from di_jax.evaluation.tasks import EvalItem, EvaluationError, json_lines, parse_item, pass_at_1

logger = logging.getLogger(__name__)

METRIC = "pass@1"
THINK = "<think>"


@dataclass(frozen=True)
class Sample:
    """One answer to one item, or why there is none.

    item: its `task` names the score that this counts for. index: among the samples of its item. thinking: the prompt
    ended inside reasoning, which `text` goes on with. error: {"type", "message"} of a request that failed; the answer
    is then empty. sampling: the request's, and seq_seed with which index it drew from.
    """

    item: EvalItem
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: Mapping[str, Any] | None = None
    thinking: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seq_seed: int | None = None

    def record(self) -> dict[str, Any]:
        """A JSON object that `read_samples` reads back to an equal sample."""
        item = self.item
        prompt = {
            "prompt_token_ids": item.prompt_token_ids,
            "prompt": item.prompt,
            "messages": item.messages,
            "tools": item.tools,
        }
        head = {
            "task": item.task,
            "id": item.id,
            "sample": self.index,
            **{name: value for name, value in prompt.items() if value is not None},
            "answer": item.answer,
            "meta": item.meta,
            "sampling": self.sampling,
        }
        if self.error is not None:
            return {**head, "error": self.error}
        return {
            **head,
            "seq_seed": self.seq_seed,
            "thinking": self.thinking,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True)
class TaskScore:
    """score: METRIC over all items, in 0..1. failed: samples without a verdict, which count as wrong."""

    items: int
    samples: int
    failed: int
    score: float


def read_samples(path: str | Path, tasks: Sequence[str] | None = None) -> list[Sample]:
    """Samples of a file of `Sample.record` lines, in their order; of some tasks only when `tasks` names them.

    Raises EvaluationError naming file and line for what is no sample and for one that occurs twice, and naming the
    task for one without samples.
    """
    samples, seen = [], set()
    for where, record in json_lines(path):
        sample = _sample(where, record)
        identity = (sample.item.task, sample.item.id, sample.index)
        if identity in seen:
            raise EvaluationError(f"{where}: sample {sample.index} of {sample.item.task} {sample.item.id} occurs twice")
        seen.add(identity)
        samples.append(sample)
    present = list(dict.fromkeys(sample.item.task for sample in samples))
    for task in tasks or ():
        if task not in present:
            raise EvaluationError(f"eval.tasks: {task} has no samples in {path}, which has {', '.join(present)}")
    return [sample for sample in samples if tasks is None or sample.item.task in tasks]


def _sample(where: str, record: dict[str, Any]) -> Sample:
    item = parse_item(where, record)
    index, error, sampling = record.get("sample"), record.get("error"), record.get("sampling") or {}
    if type(index) is not int or index < 0:
        raise EvaluationError(f"{where}: sample must be a number from 0; expected a line that eval --dump wrote")
    if not isinstance(sampling, dict):
        raise EvaluationError(f"{where}: sampling must be an object")
    if error is not None:
        if not isinstance(error, dict):
            raise EvaluationError(f"{where}: error must be an object")
        return Sample(item, index, error=error, sampling=sampling)
    text, ids = record.get("text"), record.get("token_ids") or []
    if not isinstance(text, str):
        raise EvaluationError(f"{where}: needs text or error; expected a line that eval --dump wrote")
    if not isinstance(ids, list):
        raise EvaluationError(f"{where}: token_ids must be a list of ids")
    ending, thinking, seed = record.get("finish_reason"), record.get("thinking", False), record.get("seq_seed")
    return Sample(item, index, text, tuple(ids), ending, None, thinking is True, sampling, seed)


def score_samples(samples: Sequence[Sample], judge: Judge) -> dict[str, TaskScore]:
    """Score of every task, in the order in which the samples name them. Each failure is logged.

    Failed are samples with an error and those that the judge gave no verdict about (UndecidedError). Raises
    EvaluationError for a judge that cannot be used, and without samples.
    """
    verdicts: dict[str, dict[str, list[bool]]] = {}
    failed: dict[str, int] = {}
    for sample in tqdm(samples, desc="judging", unit="sample", disable=None, file=sys.stderr):
        task, right, failure = sample.item.task, False, None
        if sample.error is not None:
            failure = sample.error.get("message", "it has an error without a message")
        else:
            try:
                # What the model was asked to go on with belongs to its reasoning, which a judge does not look at.
                right = judge(sample.item, THINK * sample.thinking + sample.text).correct
            except UndecidedError as error:
                failure = error
        if failure is not None:
            logger.error("%s: item %s, sample %d: %s", task, sample.item.id, sample.index, failure)
            failed[task] = failed.get(task, 0) + 1
        verdicts.setdefault(task, {}).setdefault(sample.item.id, []).append(right)
    if not verdicts:
        raise EvaluationError("eval: there are no samples to judge")
    return {task: _score(task, items, failed.get(task, 0)) for task, items in verdicts.items()}


def _score(task: str, items: dict[str, list[bool]], failed: int) -> TaskScore:
    counts = {len(samples) for samples in items.values()}
    if len(counts) > 1:
        logger.warning("%s: items have from %d to %d samples; is the dump whole?", task, min(counts), max(counts))
    return TaskScore(len(items), sum(map(len, items.values())), failed, pass_at_1(items))
