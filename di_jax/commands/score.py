"""`score`: teacher-forced logits of given tokens through the engine's cached steps (cli-contract, score)."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import math
import os
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save, save_file
from tqdm import tqdm

from di_jax.commands.records import (
    Record,
    print_result,
    printable,
    read_records,
    records_of_texts,
    refuse_input_as_output,
)
from di_jax.config import Config
from di_jax.engine.scorer import Score, Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.errors import UserError
from di_jax.parallel import processes
from di_jax.platforms.devices import configure_jax, require_devices
from di_jax.prompts import PromptEncoder, RequestError, check_token_ids

logger = logging.getLogger(__name__)

# What comes of a record: why there is no score, or arrays, among them fp64 [T - 1] of this name, which no tensor has.
LIKELIHOOD = "negative_log_likelihood"
Result = str | dict[str, np.ndarray]


def run(config: Config, args: argparse.Namespace) -> int:
    """Scores the records of --input and writes their logits to --output; the perplexity needs no output.

    Returns 1 when some record failed, which is logged with its id, else 0. Raises UserError for devices, files, config
    or checkpoint that cannot be used. Without records no model is loaded. Of several processes, which all read the
    input and score their share of it, the first one gets all scores and writes.
    """
    configure_jax(config)
    require_devices(config)
    records = _records(config, args)
    writes = processes.current().is_first
    if args.output is not None and writes:
        refuse_input_as_output(args.output, args.input or config.generate.input)
        _check_replaceable(args.output)
    tensors: dict[str, np.ndarray] = {}
    likelihoods: list[np.ndarray] = []
    failed = 0
    if records:
        names = tensor_names([record.id for record in records])
        results = (
            (index, outcome if isinstance(outcome, str) else _result(outcome, names[index], args.output is not None))
            for index, outcome in _outcomes(config, records)
        )
        for index, result in _brought_together(results, len(records)):
            if isinstance(result, str):
                logger.error("record %s: %s", printable(records[index].id), result)
                failed += 1
                continue
            likelihoods.append(result.pop(LIKELIHOOD))
            if result and names[index] != records[index].id:
                logger.warning("record %s: its tensors are named %s", printable(records[index].id), names[index])
            tensors.update(result)
    if not writes:
        return 0
    if args.output is not None:
        _save(tensors, args.output)
    if failed:
        logger.error("%d of %d records failed", failed, len(records))
    perplexity, shown = _perplexity(likelihoods)
    if args.json:
        print_result(json.dumps({"requests": len(records), "perplexity": perplexity, "feed": config.score.feed}))
    else:
        print_result(f"{len(records)} records, {failed} failed, perplexity {shown}, feed {config.score.feed}")
    return 1 if failed else 0


def _brought_together(results: Iterator[tuple[int, Result]], num_records: int) -> Iterator[tuple[int, Result]]:
    """The results of all processes in the first one, in the order of records; nothing in the others. Collective."""
    agreement = processes.current()
    if agreement.num_processes == 1:
        yield from results
        return
    own = dict(results)
    # One record at a time: the first process holds all of them at the end, but no more.
    for index in range(num_records):
        result = own.pop(index, None)
        told = b"" if result is None else result.encode() if isinstance(result, str) else save(result)
        kind = b"" if result is None else b"!" if isinstance(result, str) else b"="
        for payload in filter(None, agreement.collect(kind + told, f"record {index}")):
            yield index, payload[1:].decode() if payload[:1] == b"!" else load(payload[1:])


def _outcomes(config: Config, records: list[Record]) -> Iterator[tuple[int, Score | str]]:
    """(index of the record, its score or why there is none) of this process's records, in the order in which they are
    known."""
    parts = build_engine_parts(config)
    encoder = PromptEncoder(parts.folder, parts.tokenizer)
    work: list[tuple[str, list[int]]] = []
    owners = processes.data_rank_owners(parts.runner.mesh, parts.runner.plan)
    for index, record in enumerate(records):
        if owners[index % len(owners)] != processes.current().process_id:
            continue
        try:
            work.append((str(index), _token_ids(record, encoder, config, parts)))
        except UserError as error:
            yield index, str(error)
    scorer = Scorer(parts, config.score.feed, config.score.chunk, trace=config.score.trace)
    with tqdm(total=len(work), desc="scoring", unit="record", disable=None, file=sys.stderr) as bar:
        for score in scorer.run(work):
            odd = np.flatnonzero(~np.isfinite(score.logits).all(axis=-1))
            outcome: Score | str = score
            if odd.size:
                outcome = (
                    f"the model's logits are not finite at {odd.size} of {len(score.logits)} positions, from {odd[0]}"
                )
            yield int(score.request_id), outcome
            bar.update()


def _perplexity(likelihoods: list[np.ndarray]) -> tuple[float | None, str]:
    """exp of the mean negative log-likelihood over all tokens, and how to print it. None where there is no token that
    follows another, and where it exceeds a float (a mean over 709 nats)."""
    tokens = np.concatenate(likelihoods) if likelihoods else np.zeros(0)
    if not tokens.size:
        return None, "none (no token follows another)"
    mean = float(tokens.mean())
    try:
        value = math.exp(mean)
    except OverflowError:
        return None, f"too large for a number (exp of {mean:.1f} nats a token)"
    return value, f"{value:.4f}"


def _result(score: Score, name: str, whole: bool) -> dict[str, np.ndarray]:
    """The likelihood of the score's tokens, and, for a `whole` one, its arrays as the output file names them."""
    tensors = _tensors(name, score) if whole else {}
    return {LIKELIHOOD: score.negative_log_likelihood(), **tensors}


def _tensors(name: str, score: Score) -> dict[str, np.ndarray]:
    """The score's arrays as the output file names them."""
    traced = {"hidden": score.hidden, "topk": score.selected, "experts": score.experts}
    tensors = {f"{kind}.{name}.{layer}": value for kind, layers in traced.items() for layer, value in layers.items()}
    return {f"logits.{name}": score.logits, **tensors}


def _records(config: Config, args: argparse.Namespace) -> list[Record]:
    source = args.input or config.generate.input
    if source is not None:
        return read_records(Path(source))
    if config.generate.prompts is not None:
        return records_of_texts(config.generate.prompts)
    raise UserError("score: nothing to score; give --input, or generate.prompts in the config")


def _token_ids(record: Record, encoder: PromptEncoder, config: Config, parts: EngineParts) -> list[int]:
    """The record's tokens. Raises UserError; sampling does not matter here and is not looked at."""
    if record.error is not None:
        raise RequestError(record.error)
    _, ids = encoder.encode(record.prompt)
    if not ids:
        raise RequestError("prompt: is empty; give at least one token")
    if len(ids) > config.engine.max_model_len:
        raise RequestError(
            f"prompt: has {len(ids)} tokens, more than engine.max_model_len = {config.engine.max_model_len}"
        )
    held = min(parts.layout.num_blocks, parts.ladder.context_blocks[-1]) * parts.layout.block_size
    if len(ids) > held:
        raise RequestError(f"prompt: has {len(ids)} tokens, the caches hold {held}; raise engine.num_blocks")
    check_token_ids("prompt_token_ids", ids, parts.model_config.vocab_size)
    return ids


def tensor_names(ids: list[str]) -> list[str]:
    """A name for each id, no two equal: the first with an id has it as it is, later ones a suffix that makes a name
    which is nobody's id. What UTF-8 cannot hold (half a surrogate pair) is escaped."""
    plain = [printable(identity) for identity in ids]
    taken, given, result = set(plain), set(), []
    counts: Counter[str] = Counter()
    for name in plain:
        unique = name
        while unique in given or (unique != name and unique in taken):
            counts[name] += 1
            unique = f"{name}.{counts[name]}"
        given.add(unique)
        result.append(unique)
    return result


def _check_replaceable(path: Path) -> None:
    """Raises UserError when `_save` could not put a file there. Before any work: scoring may take hours."""
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        if not stat.S_ISREG(mode):
            raise UserError(f"output {path}: is not a regular file; a safetensors file is written as a whole")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _aside(path).unlink()
    except OSError as error:
        raise UserError(f"output {path}: cannot be written: {error.strerror}") from error


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file under another name and renames it: a write that fails leaves the old file. A link stays
    a link, a file keeps its mode and a new one gets the usual. Raises UserError when it cannot be written."""
    try:
        aside = _aside(path)
        try:
            # save_file makes files that only their owner may read.
            mode = (path if path.exists() else aside).stat().st_mode
            save_file(tensors, aside)
            aside.chmod(stat.S_IMODE(mode))
            aside.replace(path.resolve())
        finally:
            aside.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"output {path}: cannot be written: {error}") from error


def _aside(path: Path) -> Path:
    """A new, empty file beside the one that `path` leads to, with the mode of new files. Raises OSError."""
    aside = path.resolve().parent / f".{secrets.token_hex(8)}.partial"
    aside.touch(exist_ok=False)
    return aside
