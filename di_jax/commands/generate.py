"""`generate`: answers of many prompts as JSON lines (cli-contract, generate)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from di_jax.commands.lines import LineFile
from di_jax.commands.records import Record, print_result, read_records, records_of_texts, refuse_input_as_output
from di_jax.config import Config
from di_jax.errors import UserError
from di_jax.llm import LLM, Logprob, RequestOutput
from di_jax.parallel import processes
from di_jax.platforms.devices import configure_jax, require_devices

INVALID = "invalid_request"


def run(config: Config, args: argparse.Namespace) -> int:
    """Answers the records of --input, --prompt or the config, and writes one record each in their order.

    Returns 1 when some failed, else 0. Raises UserError for devices, files, config or checkpoint that cannot be used.
    Input and output are opened before the model is loaded, and what the output held is dropped after. Without records
    no model is loaded. Of several processes, which all read the input, the first one writes.
    """
    configure_jax(config)
    require_devices(config)
    records = _records(config, args)
    writes = processes.current().is_first
    if args.output is not None:
        refuse_input_as_output(args.output, args.input or config.generate.input)
    results: list[dict[str, Any]] = []
    with LineFile(args.output, "output") if writes and args.output is not None else contextlib.nullcontext() as output:
        if records:
            with LLM(config) as llm:
                if output is not None:
                    output.clear()
                began = time.perf_counter()
                for result in _results(llm, records):
                    if output is not None:
                        output.write(_json_line(result, output.file.encoding))
                    elif writes:
                        print_result(_json_line(result, sys.stdout.encoding))
                    results.append(result)
                summary = summary_of(results, time.perf_counter() - began, llm.engine.compiles_after_warmup)
        else:
            if output is not None:
                output.clear()
            summary = summary_of([], 0.0, 0)
    if writes and not args.json and args.output is None:
        print(readable(records, results, summary), file=sys.stderr)
    if writes and args.json:
        print_result(json.dumps(summary))
    return 1 if summary["failed"] else 0


def _records(config: Config, args: argparse.Namespace) -> list[Record]:
    if args.input is not None:
        return read_records(args.input)
    if args.prompt:
        return records_of_texts(args.prompt)
    if config.generate.input is not None:
        return read_records(Path(config.generate.input))
    if config.generate.prompts is not None:
        return records_of_texts(config.generate.prompts)
    raise UserError("generate: nothing to answer; give --input, --prompt, or generate.prompts in the config")


def _results(llm: LLM, records: list[Record]) -> Iterator[dict[str, Any]]:
    """Output records in input order, each as soon as it and those before it are known."""
    good = [index for index, record in enumerate(records) if record.error is None]
    outputs = llm.generate_iter([records[i].prompt for i in good], [records[i].sampling for i in good])
    known = {
        index: {"id": record.id, "error": {"type": INVALID, "message": record.error}}
        for index, record in enumerate(records)
        if record.error is not None
    }
    following = 0
    with contextlib.closing(outputs):
        while following < len(records):
            if following in known:
                yield known.pop(following)
                following += 1
            else:
                output = next(outputs)
                index = good[output.index]
                known[index] = output_record(records[index].id, output)


def _json_line(value: Any, encoding: str) -> str:
    """One line of JSON, escaped where the file's encoding cannot hold its text (an id may be half a surrogate pair)."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value)
    return line


def output_record(identity: str, output: RequestOutput) -> dict[str, Any]:
    """An output record of the contract; seq_seed on top, so that a sampled answer can be asked for again."""
    if output.error is not None:
        return {"id": identity, "error": output.error}
    return {
        "id": identity,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "cumulative_logprob": answer.cumulative_logprob,
                **({} if answer.logprobs is None else {"logprobs": _told(answer.logprobs)}),
            }
            for answer in output.outputs
        ],
        "metrics": output.metrics,
        "seq_seed": output.seq_seed,
    }


def _told(logprobs: list[dict[int, Logprob]]) -> list[dict[str, dict[str, Any]]]:
    """Of every token: what is known of it and of the likeliest, by id."""
    return [{str(token): dataclasses.asdict(known) for token, known in place.items()} for place in logprobs]


def summary_of(results: list[dict[str, Any]], wall_s: float, compiles: int) -> dict[str, Any]:
    """The --json object. wall_s: from the first request to the last record, without loading and warm-up;
    tokens_per_s: output tokens over wall_s."""
    good = [result for result in results if "error" not in result]
    output_tokens = sum(len(answer["token_ids"]) for result in good for answer in result["outputs"])
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "prompt_tokens": sum(len(result["prompt_token_ids"]) for result in good),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "compiles_after_warmup": compiles,
        "tokens_per_s": output_tokens / wall_s if wall_s > 0 else 0.0,
    }


def readable(records: list[Record], results: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    """What a person wants to see of the run: prompt, answer, token counts and speed."""
    width = shutil.get_terminal_size((100, 24)).columns
    lines = [""]
    for record, result in zip(records, results, strict=True):
        lines.append(_shortened(f"[{record.id}] {_question(record, result)}", width))
        if "error" in result:
            lines.append(f"    error: {result['error']['message']}")
            continue
        seconds = result["metrics"]["total_s"]
        for answer in result["outputs"]:
            fed, made = len(result["prompt_token_ids"]), len(answer["token_ids"])
            lines.append(_shortened(f"    {answer['text']!r}", width))
            ending = f"{answer['finish_reason']}, {made / seconds:.1f} tokens/s"
            lines.append(f"    {fed} prompt tokens, {made} output tokens, {ending}")
    lines.append(
        f"{summary['requests']} requests, {summary['failed']} failed: {summary['prompt_tokens']} prompt tokens and "
        f"{summary['output_tokens']} output tokens in {summary['wall_s']:.2f} s, {summary['tokens_per_s']:.1f} tokens/s"
    )
    return "\n".join(lines)


def _question(record: Record, result: dict[str, Any]) -> str:
    """The prompt, the last message of a chat, or how many ids there were."""
    if "prompt" in record.prompt:
        return repr(record.prompt["prompt"])
    if "messages" in record.prompt and "error" not in result:
        last = record.prompt["messages"][-1]
        return f"{last.get('role')}: {last.get('content')!r}"
    return f"({len(result.get('prompt_token_ids', ()))} tokens)"


def _shortened(text: str, width: int) -> str:
    """At most `width` characters: of a longer text its beginning and its end."""
    tail = width // 4
    return text if len(text) <= width else f"{text[: width - tail - 5]} ... {text[len(text) - tail :]}"
