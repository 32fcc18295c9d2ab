"""Prepares everything that training the demo model needs, once:

    python -m scripts.train_demo.prepare --folder build/train_demo

fetches the texts, trains the tokenizer, and writes token arrays, example pools, held-out sets and the model's config.
The same seed and the same versions (they are in manifest.json) give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from di_jax.model.engram_tables import token_map
from scripts.train_demo import corpus, tokenizer
from scripts.train_demo.architecture import config_json
from scripts.train_demo.chat_format import ChatFormat, Conversation
from scripts.train_demo.chat_tasks import chat_examples, tool_examples
from scripts.train_demo.dataset import POOLS, save_pool
from scripts.train_demo.tasks import DISTANCES, Example, Split, Tasks, json_examples
from scripts.train_demo.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE

SEED = corpus.SEED
EVAL_ITEMS = {"copy": 200, "reverse": 200, "sort": 200, "calc": 300, "fact": 300, "json": 200, "chat": 200, "tool": 100}
EVAL_RECALLS = 100  # of each distance
SMALL_SHARE = 50  # a trial has one of so many examples
SMALL_DISTANCES = (256,)
# Rules of di_jax.evaluation.judges; the other tasks are judged by their exact text.
JUDGES = {"json": "json", "calc": "number"}


def prepare(
    folder: Path,
    packages: Path | None = None,
    seed: int = SEED,
    *,
    small: bool = False,
    tokenizer_file: Path | None = None,
) -> dict[str, Any]:
    """Makes everything in `folder` anew and returns the manifest: token counts, versions, SHA-256 of every file.

    packages: where the fetched archives are kept (27 MB; training needs none of them), default beside `folder`.
    small: a few documents that are at hand, few examples and a small model, to try all of the training on a CPU.
    tokenizer_file: taken in place of one trained on the texts, which other versions of Python have others of: to train
    on from weights that were trained with it. Raises ValueError for one that is not of `tokenizer.train`.
    """
    packages = folder.with_name(f"{folder.name}_packages") if packages is None else packages
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    found = corpus.small_documents() if small else corpus.documents(corpus.fetch(packages))
    share = SMALL_SHARE if small else 1
    if tokenizer_file is None:
        trained = tokenizer.train(d.text for d in found if not d.held_out)
    else:
        trained = tokenizer.load(tokenizer_file)
    (folder / "tokenizer.json").write_text(trained.to_str(pretty=True) + "\n", encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer.settings())
    mapped = token_map(trained, VOCAB_SIZE, PAD_ID)
    np.save(folder / "token_map.npy", mapped)
    _write_json(folder / "config.json", config_json(VOCAB_SIZE, int(mapped.max()) + 1, VOCAB_SIZE - 1, small=small))
    counts = write_texts(folder, trained, found)
    for number, (name, count) in enumerate(POOLS.items()):
        made = examples(name, trained, np.random.default_rng([seed, number]), "train")
        save_pool(folder / f"pool_{name}.npz", _take(made, count // share, f"making {name}"))
    write_eval(folder, trained, seed, share, SMALL_DISTANCES if small else DISTANCES)
    manifest = {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("numpy", "tokenizers")}},
        "tokens": counts,
        "sha256": {
            p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != "manifest.json"
        },
    }
    _write_json(folder / "manifest.json", manifest)
    return manifest


def write_texts(folder: Path, trained: Tokenizer, found: Sequence[corpus.Document]) -> dict[str, int]:
    """`english` and `python` as `_train` and `_eval` token arrays; returns tokens by source and split."""
    streams: dict[str, list[int]] = {f"{k}_{s}": [] for k in ("english", "python") for s in ("train", "eval")}
    counts: Counter[str] = Counter()
    for document in tqdm(found, desc="encoding texts", unit="document", disable=None):
        ids = [*trained.encode(document.text, add_special_tokens=False).ids, EOS_ID]
        split = "eval" if document.held_out else "train"
        streams[f"{'english' if document.english else 'python'}_{split}"] += ids
        counts[f"{document.source}_{split}"] += len(ids)
    for name, ids in streams.items():
        np.save(folder / f"{name}.npy", np.array(ids, np.uint16))
        counts[name] = len(ids)
    return dict(counts)


def examples(task: str, trained: Tokenizer, rng: np.random.Generator, split: Split) -> Iterator[Example]:
    """Examples of any task but recall, without end."""
    if task == "chat":
        return chat_examples(ChatFormat(trained), rng, split)
    if task == "tool":
        return tool_examples(ChatFormat(trained), rng, split)
    tasks = Tasks(trained)
    if task == "json":
        return json_examples(tasks.lexicon, rng, split)
    return (tasks.sample(task, rng, split) for _ in itertools.count())


def write_eval(
    folder: Path, trained: Tokenizer, seed: int, share: int = 1, distances: Sequence[int] = DISTANCES
) -> None:
    """Held-out items of every task as JSON lines in `folder/eval`; recall's filler is held-out English.

    share: one of so many is made.
    """
    (folder / "eval").mkdir(exist_ok=True)
    for number, (task, count) in enumerate(EVAL_ITEMS.items()):
        made = examples(task, trained, np.random.default_rng([seed, 100, number]), "eval")
        _write_items(folder, task, trained, _distinct(made, count // share))
    tasks, english = Tasks(trained), np.load(folder / "english_eval.npy")
    # A prompt that is typed holds no end token, and documents already end with a line end.
    text = english[english != EOS_ID]
    for distance in distances:
        rng = np.random.default_rng([seed, 200, distance])
        made = (tasks.recall(rng, distance, text, "eval") for _ in itertools.count())
        _write_items(folder, f"recall_{distance}", trained, itertools.islice(made, EVAL_RECALLS // share))


def _distinct(made: Iterator[Example], count: int) -> Iterator[Example]:
    """The first `count` different prompts; small talk has few of them, so it repeats rather than never ends."""
    seen: set[tuple[int, ...]] = set()
    kept = 0
    for example in made:
        prompt = tuple(example.prompt_ids)
        if prompt in seen and example.meta.get("kind") != "small_talk":
            continue
        seen.add(prompt)
        yield example
        kept += 1
        if kept == count:
            return


def _write_items(folder: Path, name: str, trained: Tokenizer, made: Iterator[Example]) -> None:
    lines = []
    for number, example in enumerate(made):
        meta = {**example.meta, "judge": JUDGES.get(example.task, "exact")}
        conversation: Conversation | None = meta.pop("conversation", None)
        record: dict[str, Any] = {"id": f"{name}-{number:04d}", "task": name}
        if conversation is not None:
            record |= {"messages": conversation.messages(), "tools": conversation.tool_list()}
        answer = trained.decode(example.answer_ids, skip_special_tokens=True)
        record |= {
            "answer": answer,
            "prompt_token_ids": example.prompt_ids,
            "answer_token_ids": example.answer_ids,
            "meta": meta,
        }
        lines.append(json.dumps(record, ensure_ascii=False))
    (folder / "eval" / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _take(made: Iterator[Example], count: int, what: str) -> list[Example]:
    return list(tqdm(itertools.islice(made, count), total=count, desc=what, unit="example", disable=None))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="prepare the data of the demo model")
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written")
    parser.add_argument("--packages", type=Path, help="where fetched archives are kept; default: FOLDER_packages")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--small", action="store_true", help="few texts, examples and weights, to try the training on")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the tokenizer.json of weights to train on from; default: a new one",
    )
    options = parser.parse_args(arguments)
    if options.small and options.packages:
        parser.error("--packages: not read with --small, whose texts are at hand")
    try:
        manifest = prepare(
            options.folder.absolute(),
            options.packages,
            options.seed,
            small=options.small,
            tokenizer_file=options.tokenizer,
        )
    except (corpus.CorpusError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({k: manifest[k] for k in ("seconds", "versions", "tokens")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
