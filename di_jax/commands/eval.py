"""`eval`: answers to items with known answers, judged and scored (cli-contract, eval).

Generating and judging are separate: samples are judged only when all are there, and those of a dump are judged like
those just generated. Judging a dump loads no model and imports no jax.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from di_jax.chat import ChatEncoder
from di_jax.commands.lines import LineFile
from di_jax.commands.records import print_result, refuse_input_as_output
from di_jax.config import Config, EvalGroup
from di_jax.errors import ConfigError, UserError
from di_jax.evaluation.judges import EndpointJudge, Judge, judge_by_rule
from di_jax.evaluation.samples import METRIC, THINK, Sample, TaskScore, read_samples, score_samples
from di_jax.evaluation.tasks import EvalItem, EvaluationError, load_task
from di_jax.parallel import processes
from di_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from di_jax.llm import LLM, RequestOutput

logger = logging.getLogger(__name__)

HEADER = ("task", "items", "samples", "score", "metric")


def run(config: Config, args: argparse.Namespace) -> int:
    """Generates and judges the tasks of the config, or judges the samples of --judge-only, and prints their scores.

    Returns 1 when some samples failed, which count as wrong, else 0. Raises UserError for devices, files, config or
    checkpoint that cannot be used; all but the checkpoint before the model is loaded.
    """
    if args.judge_only is not None:
        judge = judge_of(config.eval)
        scores = score_samples(samples := read_samples(args.judge_only, config.eval.tasks), judge)
    else:
        from di_jax.platforms.devices import configure_jax, require_devices

        configure_jax(config)
        require_devices(config)
        judge = judge_of(config.eval)
        samples = _generate(config, items_of(config.eval), args.dump)
        if not processes.current().is_first:
            return 0  # of several processes the first one judges and reports
        try:
            scores = score_samples(samples, judge)
        except EvaluationError as error:
            advice = f"judge {args.dump} by --judge-only" if args.dump else "--dump would have kept the answers"
            raise EvaluationError(f"{error}; {advice}") from error
    # In the config's order: samples are in that in which they were finished.
    order = [*(config.eval.tasks or config.eval.files or ()), *scores]
    scores = {task: scores[task] for task in dict.fromkeys(order) if task in scores}
    for line in report(scores, samples, config.eval):
        print_result(line)
    if args.json:
        tasks = {task: {"n": s.items, "score": s.score, "metric": METRIC} for task, s in scores.items()}
        print_result(json.dumps({"tasks": tasks}))
    cut = sum(sample.finish_reason == "length" for sample in samples)
    if cut:
        logger.warning("%d of %d answers were cut off at their length; see sampling.max_tokens", cut, len(samples))
    failed = sum(score.failed for score in scores.values())
    if failed:
        logger.error("%d of %d samples failed and count as wrong", failed, len(samples))
    return 1 if failed else 0


def judge_of(group: EvalGroup) -> Judge:
    """The judge that `eval.judge` names. Raises ConfigError for a URL or a key file that cannot be used."""
    if group.judge == "rule":
        return judge_by_rule
    key_file = None if group.judge_key_file is None else _path(group.judge_key_file)
    judge = EndpointJudge(group.judge_url or "", group.judge_model or "", key_file)
    for name, part in (("judge_url", dataclasses.replace(judge, key_file=None)), ("judge_key_file", judge)):
        try:
            part.check()
        except EvaluationError as error:
            raise ConfigError(f"eval.{name}: {error}") from error
    return judge


def items_of(group: EvalGroup) -> list[EvalItem]:
    """Items of every task, in the order of `eval.tasks`.

    Raises ConfigError for tasks without a file, EvaluationError for files that cannot be read and, with the rule judge,
    for items that no rule can judge.
    """
    files = group.files or {}
    tasks = tuple(files) if group.tasks is None else group.tasks
    if not tasks:
        raise ConfigError(
            "eval.tasks: there is nothing to evaluate; give eval.files, a mapping of tasks to .jsonl files"
        )
    for task in tasks:
        if task not in files:
            known = f"it has {', '.join(files)}" if files else "it is not set"
            raise ConfigError(f"eval.files: has no file for task {task}, {known}; add {task}: FILE.jsonl")
    items = []
    for task in tasks:
        loaded = load_task(task, _path(files[task]))
        if group.judge == "rule":
            for item in loaded:
                try:
                    judge_by_rule(item, "")
                except EvaluationError as error:
                    raise EvaluationError(f"{files[task]}: {error}, or eval.judge: endpoint") from error
        items += loaded
    return items


def load_model(config: Config) -> LLM:
    from di_jax.llm import LLM

    return LLM(config)


def report(scores: dict[str, TaskScore], samples: Sequence[Sample], group: EvalGroup) -> Iterator[str]:
    """Lines of the table, then how the answers were drawn and judged."""
    rows = [(t, str(s.items), str(s.samples), f"{s.score:.4f}", METRIC) for t, s in scores.items()]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for name, *cells in (HEADER, *rows):
        line = [name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[:-1], widths[1:-1], strict=True))]
        yield "  ".join([*line, cells[-1]])
    for drawn in dict.fromkeys(_shown(sample.sampling) for sample in samples):
        yield f"sampling: {drawn}"
    yield f"judge: {group.judge}" + (f" ({group.judge_model})" if group.judge == "endpoint" else "")


def _shown(sampling: Any) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in sampling.items()) or "not known"


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _generate(config: Config, items: list[EvalItem], dump: Path | None) -> list[Sample]:
    """All samples, each also written to the dump as soon as it is there, in the order in which they are finished."""
    params = SamplingParams.from_dict({"n": config.eval.n}, config.sampling)
    if params.n > 1 and params.temperature == 0:
        logger.warning("sampling.temperature: is 0, so the eval.n = %d samples of an item are all alike", params.n)
    if dump is not None:
        for path in (config.eval.files or {}).values():
            refuse_input_as_output(dump, _path(path))
    replay = config.engine.replay.decoder
    logger.info("%d items, %s; engine.replay.decoder is %s", len(items), _shown(_drawn(params)), replay)
    samples = []
    with contextlib.ExitStack() as stack:
        if not processes.current().is_first:
            dump = None
        file = None if dump is None else stack.enter_context(LineFile(dump, "dump"))
        llm = stack.enter_context(load_model(config))
        if file is not None:
            file.clear()
        for sample in generate_samples(llm, items, params):
            if file is not None:
                # ASCII: a prompt may hold half a surrogate pair, which UTF-8 cannot.
                file.write(json.dumps(sample.record()))
            samples.append(sample)
    return samples


def generate_samples(llm: LLM, items: Sequence[EvalItem], params: SamplingParams) -> Iterator[Sample]:
    """`params.n` samples of each item, as its request is finished; a request that fails gives n with its error."""
    asked: list[tuple[EvalItem, dict[str, Any]]] = []
    sampling = _drawn(params)
    chat = ChatEncoder(llm.folder) if any(item.tools for item in items) else None
    for item in items:
        try:
            asked.append((item, _prompt(item, chat)))
        except UserError as error:
            failure = {"type": "invalid_request", "message": str(error)}
            yield from (Sample(item, index, error=failure, sampling=sampling) for index in range(params.n))
    with contextlib.closing(llm.generate_iter([prompt for _, prompt in asked], params)) as outputs:
        for output in outputs:
            yield from _samples_of(llm, asked[output.index][0], output, params.n, sampling)


def _samples_of(llm: LLM, item: EvalItem, output: RequestOutput, n: int, sampling: dict[str, Any]) -> Iterator[Sample]:
    if output.error is not None:
        yield from (Sample(item, index, error=output.error, sampling=sampling) for index in range(n))
        return
    thinking = llm.get_tokenizer().decode(output.prompt_token_ids[-1:], skip_special_tokens=False) == THINK
    for answer in output.outputs:
        ids, seed = tuple(answer.token_ids), output.seq_seed
        yield Sample(item, answer.index, answer.text, ids, answer.finish_reason, None, thinking, sampling, seed)


def _prompt(item: EvalItem, chat: ChatEncoder | None) -> dict[str, Any]:
    """What `LLM.generate` takes: ids where the item has tools, which it takes in no other way."""
    if chat is not None and item.tools:
        return {"prompt_token_ids": chat.encode(item.messages or (), item.tools)}
    given = {"prompt_token_ids": item.prompt_token_ids, "prompt": item.prompt, "messages": item.messages}
    return {name: value for name, value in given.items() if value is not None}


def _drawn(params: SamplingParams) -> dict[str, Any]:
    """The sampling as a record has it: temperature, max_tokens, n, and what is not as by default."""
    always = ("temperature", "max_tokens", "n")
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in always}
    defaults = SamplingParams()
    changed = {name: value for name, value in values.items() if value != getattr(defaults, name)}
    # Through JSON: a sample that was just drawn equals the one that is read from a dump.
    drawn: dict[str, Any] = json.loads(json.dumps({name: getattr(params, name) for name in always} | changed))
    return drawn
