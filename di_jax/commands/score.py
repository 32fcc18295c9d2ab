"""`score`: teacher-forced logits of given tokens through the engine's cached steps (cli-contract, score)."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from di_jax.commands.records import Record, read_records, records_of_texts
from di_jax.config import Config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import build_engine_parts
from di_jax.errors import UserError
from di_jax.prompts import PromptEncoder, RequestError, check_token_ids

logger = logging.getLogger(__name__)


def run(config: Config, args: argparse.Namespace) -> int:
    """Scores the records of --input and writes their logits to --output; the perplexity needs no output.

    Returns 1 when some record failed, which is logged with its id, else 0. Raises UserError for files, config or
    checkpoint that cannot be used.
    """
    records = _records(config, args)
    if args.output is not None:
        _check_writable(args.output)
    parts = build_engine_parts(config)
    encoder = PromptEncoder(parts.folder, parts.tokenizer)
    requests: list[tuple[str, list[int]]] = []
    failed = 0
    for record in records:
        try:
            requests.append((record.id, _token_ids(record, encoder, config, parts.model_config.vocab_size)))
        except UserError as error:
            logger.error("record %s: %s", record.id, error)
            failed += 1
    scorer = Scorer(parts, config.score.feed, config.score.chunk, trace=config.score.trace)
    tensors: dict[str, np.ndarray] = {}
    likelihoods = []
    # Names inside the file must differ; the index tells equal ids apart.
    names = _distinct([name for name, _ in requests])
    work = [(str(i), ids) for i, (_, ids) in enumerate(requests)]
    with tqdm(total=len(work), desc="scoring", unit="record", disable=None, file=sys.stderr) as bar:
        for score in scorer.run(work):
            name = names[int(score.request_id)]
            likelihoods.append(score.negative_log_likelihood())
            if args.output is not None:
                tensors[f"logits.{name}"] = score.logits
                for kind in ("hidden", "topk", "experts"):
                    layers = getattr(score, "selected" if kind == "topk" else kind)
                    tensors.update({f"{kind}.{name}.{layer}": value for layer, value in layers.items()})
            bar.update()
    if args.output is not None:
        save_file(tensors, args.output)
    tokens = np.concatenate(likelihoods) if likelihoods else np.zeros(0)
    perplexity = math.exp(tokens.mean()) if tokens.size else None
    if args.json:
        print(json.dumps({"requests": len(records), "perplexity": perplexity, "feed": config.score.feed}), flush=True)
    else:
        shown = "none (no token follows another)" if perplexity is None else f"{perplexity:.4f}"
        print(f"{len(records)} records, {failed} failed, perplexity {shown}, feed {config.score.feed}")
    return 1 if failed else 0


def _records(config: Config, args: argparse.Namespace) -> list[Record]:
    source = args.input or config.generate.input
    if source is not None:
        return read_records(Path(source))
    if config.generate.prompts is not None:
        return records_of_texts(config.generate.prompts)
    raise UserError("score: nothing to score; give --input, or generate.prompts in the config")


def _token_ids(record: Record, encoder: PromptEncoder, config: Config, vocab_size: int) -> list[int]:
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
    check_token_ids("prompt_token_ids", ids, vocab_size)
    return ids


def _check_writable(path: Path) -> None:
    """Before any work, not after: scoring may take hours."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"output {path}: cannot be written: {error.strerror}") from error


def _distinct(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name] = seen.get(name, -1) + 1
        result.append(f"{name}.{count}" if count else name)
    return result
