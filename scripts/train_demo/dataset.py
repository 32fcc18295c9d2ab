"""Batches for training, from a folder that `scripts.train_demo.prepare` made.

Needs that folder, numpy and tokenizers. A batch is a pure function of (seed, step), so training resumes at any step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from scripts.train_demo.tasks import (
    ANSWER,
    CALC,
    CLASSES,
    DISTANCES,
    IGNORE,
    PROMPT,
    RAW_TASKS,
    RECALL_END,
    TEXT,
    Example,
    Packed,
    Split,
    Tasks,
)
from scripts.train_demo.tokenizer import EOS_ID, PAD_ID

POOLS = {"json": 30_000, "chat": 30_000, "tool": 4_000}  # examples made once; the other tasks are made as needed
# Shares of the tokens. A recall row counts as recall, with the text in it.
FRACTIONS: Mapping[str, float] = {
    "english": 0.26,
    "python": 0.06,
    "recall": 0.25,
    "copy": 0.04,
    "reverse": 0.04,
    "sort": 0.04,
    "calc": 0.14,
    "fact": 0.05,
    "json": 0.04,
    "chat": 0.05,
    "tool": 0.03,
}
# Of the loss, by class. A recalled value is one token of ten at most and of hundreds at least.
WEIGHTS: Mapping[int, float] = {TEXT: 1.0, PROMPT: 0.05, ANSWER: 2.0, IGNORE: 0.0, CALC: 3.0, RECALL_END: 1.0}
RECALL_WEIGHT = 6.0


def loss_weights() -> np.ndarray:
    """float32 [classes]: loss weight of each class."""
    return np.array([WEIGHTS.get(token_class, RECALL_WEIGHT) for token_class in range(len(CLASSES))], np.float32)


@dataclass(frozen=True)
class Mix:
    """What batches are made of.

    fractions: shares of the tokens by source (they are normalised). max_distance: of recall questions, in tokens; a row
    bounds it too. density: least and most share of a recall row in notes and questions, drawn log-uniformly. span:
    longest piece of running text.
    """

    fractions: Mapping[str, float] = field(default_factory=lambda: dict(FRACTIONS))
    max_distance: int = max(DISTANCES)
    density: tuple[float, float] = (0.02, 0.5)
    span: int = 1024

    def with_recall(self, share: float) -> Mix:
        """The same with recall at `share` of the tokens and the other sources in proportion."""
        rest = sum(v for name, v in self.fractions.items() if name != "recall")
        scaled = {name: v / rest * (1 - share) for name, v in self.fractions.items() if name != "recall"}
        return replace(self, fractions={**scaled, "recall": share})


def check_prepared(folder: Path) -> None:
    """FileNotFoundError that names what is missing of the files that `prepare` made, before hours are spent on it."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise FileNotFoundError(f"{folder}: not prepared; run python -m scripts.train_demo.prepare --folder {folder}")
    made = json.loads(manifest.read_text(encoding="utf-8")).get("sha256", {})
    if missing := sorted(name for name in made if not (folder / name).is_file()):
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(made)} prepared files, the first {missing[0]}: copy all of it, or "
            f"run python -m scripts.train_demo.prepare --folder {folder}"
        )


class Data:
    """A prepared folder, read once: what to train on, or the same from the held-out split.

    Token arrays are uint16; documents and examples end with the end token.
    """

    def __init__(self, folder: Path, split: Split = "train") -> None:
        check_prepared(folder)
        self.folder, self.split = folder, split
        self.tasks = Tasks(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.text = {name: np.load(folder / f"{name}_{split}.npy") for name in ("english", "python")}
        self.heads = {name: np.flatnonzero(text[:-1] == EOS_ID) + 1 for name, text in self.text.items()}
        if split == "train":
            self.pools = {name: load_pool(folder / f"pool_{name}.npz") for name in POOLS}
        else:
            self.pools = {name: Packed.of([self._example(item) for item in self.items(name)]) for name in POOLS}

    def items(self, task: str) -> list[dict[str, Any]]:
        """Held-out examples of a task as `di_jax.evaluation.tasks.load_items` reads them (as plain records)."""
        lines = (self.folder / "eval" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @staticmethod
    def _example(item: Mapping[str, Any]) -> Example:
        return Example(item["prompt_token_ids"], item["answer_token_ids"], item["task"])


class Batches:
    """An endless iterator of dict(tokens int32 [batch, length + 1], classes uint8 [batch, length]).

    classes[b, t] is the class of tokens[b, t + 1], the token to predict. Every row begins with the beginning of an
    example or a text; its last one is cut. mix: fixed, or a function of the step (a curriculum). start: the step of
    the first batch. `at(step)` gives any one.
    """

    def __init__(
        self,
        data: Data | Path,
        seed: int,
        batch: int,
        length: int,
        mix: Mix | Callable[[int], Mix] | None = None,
        *,
        start: int = 0,
    ) -> None:
        self.data = data if isinstance(data, Data) else Data(Path(data))
        self.seed, self.batch, self.length, self.start = seed, batch, length, start
        self.mix = Mix() if mix is None else mix

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self.at(step) for step in itertools.count(self.start))

    def at(self, step: int) -> dict[str, np.ndarray]:
        mix = self.mix(step) if callable(self.mix) else self.mix
        rng = np.random.default_rng([self.seed, step])
        width = self.length + 1
        shares = {name: share / sum(mix.fractions.values()) for name, share in mix.fractions.items() if share > 0}
        # Whole rows of recall; the fraction of a row is drawn, so that the share is right on average.
        recalls = int(self.batch * shares.pop("recall", 0.0) + rng.random())
        if not shares:
            recalls = self.batch
        rows = [self._recall(rng, width, mix) for _ in range(recalls)]
        if recalls < self.batch:
            rows += self._fill(rng, self.batch - recalls, width, shares, mix)
        order = rng.permutation(self.batch)
        tokens = np.stack([rows[i][0] for i in order]).astype(np.int32)
        classes = np.stack([rows[i][1] for i in order])
        return {"tokens": tokens, "classes": classes[:, 1:]}

    def _recall(self, rng: np.random.Generator, width: int, mix: Mix) -> tuple[np.ndarray, np.ndarray]:
        source = "python" if rng.random() < 0.15 else "english"
        density = float(np.exp(rng.uniform(*np.log(mix.density))))
        row = self.data.tasks.recall_row(rng, width, mix.max_distance, self.data.text[source], density, self.data.split)
        return row.tokens, row.classes

    def _fill(
        self, rng: np.random.Generator, rows: int, width: int, shares: Mapping[str, float], mix: Mix
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        total = rows * width / sum(shares.values())
        parts = [self._source(rng, name, share * total, width, mix) for name, share in shares.items()]
        joined = Packed.join(parts)
        joined = joined.select(rng.permutation(len(joined)))
        filled, first = [], 0
        for _ in range(rows):
            if joined.starts[-1] - joined.starts[first] < width:
                first = 0  # what was made falls short when rows cut off long ends: use it again
            begin = joined.starts[first]
            filled.append((joined.tokens[begin : begin + width], joined.classes[begin : begin + width]))
            first = int(np.searchsorted(joined.starts, begin + width))
        return filled

    def _source(self, rng: np.random.Generator, name: str, wanted: float, width: int, mix: Mix) -> Packed:
        """Examples of one source, `wanted` tokens and some more."""
        if name in self.data.text:
            return self._spans(rng, name, wanted, min(mix.span, width))
        if name in self.data.pools:
            pool = self.data.pools[name]
            count = int(wanted / pool.lengths.mean() + rng.random()) + 1
            return pool.select(rng.integers(0, len(pool), count))
        if name not in RAW_TASKS:
            raise ValueError(f"mix: unknown source {name!r}; sources are {', '.join(FRACTIONS)}")
        probe = self.data.tasks.packed(name, rng, 16, self.data.split)
        count = int(wanted / probe.lengths.mean() + rng.random()) + 1
        made = self.data.tasks.packed(name, rng, count, self.data.split)
        if name == "calc":
            made = replace(made, classes=np.where(made.classes == ANSWER, CALC, made.classes).astype(np.uint8))
        return made

    def _spans(self, rng: np.random.Generator, name: str, wanted: float, longest: int) -> Packed:
        """Pieces of running text, a quarter of them from a document's beginning on."""
        text, heads = self.data.text[name], self.data.heads[name]
        shortest = max(2, longest // 4)
        count = int(wanted / ((shortest + longest) / 2) + rng.random()) + 1
        lengths = rng.integers(shortest, longest + 1, count)
        begins = np.where(
            rng.random(count) < 0.25, rng.choice(heads, count), (rng.random(count) * len(text)).astype(np.int64)
        )
        begins = np.minimum(begins, len(text) - longest)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        at = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
        tokens, classes = text[at], np.full(starts[-1], TEXT, np.uint8)
        # A piece ends where it was cut, which nothing foretells; so does the beginning of the next.
        tokens[starts[1:] - 1], classes[starts[1:] - 1] = EOS_ID, IGNORE
        classes[starts[:-1]] = PROMPT
        return Packed(tokens, classes, starts)


def teacher_forced(items: Sequence[Mapping[str, Any]], length: int) -> dict[str, np.ndarray]:
    """Held-out items for a forward pass: dict(tokens int32 [N, length + 1], weights float32 [N, length]).

    weights is 1 where an answer token is predicted. When the likeliest token is right at all of them, greedy decoding
    gives this answer exactly. Raises ValueError for an item longer than `length` + 1.
    """
    tokens = np.full((len(items), length + 1), PAD_ID, np.int32)
    weights = np.zeros((len(items), length), np.float32)
    for row, item in enumerate(items):
        ids = [*item["prompt_token_ids"], *item["answer_token_ids"]]
        if len(ids) > length + 1:
            raise ValueError(f"item {item['id']}: {len(ids)} tokens, the rows hold {length + 1}")
        tokens[row, : len(ids)] = ids
        weights[row, len(item["prompt_token_ids"]) - 1 : len(ids) - 1] = 1.0
    return {"tokens": tokens, "weights": weights}


def text_rows(tokens: np.ndarray, length: int, context: int) -> dict[str, np.ndarray]:
    """A text cut into rows that overlap by `context` tokens, every token but the first predicted once.

    tokens: [N]. Returns dict(tokens int32 [R, length + 1], weights float32 [R, length]); weights is 1 where a token
    is to be counted; perplexity is exp(sum(weights * loss) / sum(weights)).
    """
    step = length - context
    if step < 1:
        raise ValueError(f"text_rows: context {context} leaves nothing of length {length}")
    begins = range(0, max(1, len(tokens) - 1 - context), step)
    rows = np.full((len(begins), length + 1), PAD_ID, np.int32)
    weights = np.zeros((len(begins), length), np.float32)
    for row, begin in enumerate(begins):
        piece = tokens[begin : begin + length + 1]
        rows[row, : len(piece)] = piece
        weights[row, (context if row else 0) : len(piece) - 1] = 1.0
    return {"tokens": rows, "weights": weights}


def save_pool(path: Path, examples: Sequence[Example]) -> None:
    lengths = np.array([[len(e.prompt_ids), len(e.answer_ids)] for e in examples], np.uint16)
    np.savez(path, tokens=Packed.of(examples).tokens, lengths=lengths)


def load_pool(path: Path) -> Packed:
    with np.load(path) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"].astype(np.int64)
    kinds = np.tile(np.array([PROMPT, ANSWER], np.uint8), len(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    return Packed(tokens, np.repeat(kinds, lengths.reshape(-1)), starts)
