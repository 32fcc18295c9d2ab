"""Generated tasks with checkable answers, as token arrays.

Every raw example reads `name: question ->` and is answered by ` answer` and the end token:

    copy: q t a -> q t a              reverse: q t a -> a t q           sort: q t a -> a q t
    calc: 345+27 -> ~273 = 372        (the digits from the ones upwards, then the result)
    fact: amber falcon -> river       (a fixed table; pairs, and triples of which no two words suffice)
    note: amber river ... recall: amber river
    json: Anna lives in Oslo and has a cat. -> {"name": "Anna", "city": "Oslo", "pet": "cat"}

Train and eval examples never coincide: a hash of an example's content sends it to one of the splits (1 in 10 to eval),
whatever the seed. Facts are one table for both, since knowing it by heart is the task.

Array names: N tokens, M examples. Token classes (CLASSES): TEXT plain text, PROMPT a question (mostly unpredictable),
ANSWER what is to be learned, IGNORE no loss, CALC an answer of calc, RECALL_END the end token of a recalled value, and
from RECALL on the recalled values by the distance to where the pair stood last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from scripts.train_demo.tokenizer import EOS_ID, LETTERS
from scripts.train_demo.words import CITIES, COLOURS, JOBS, KEYS, NAMES, PETS, VALUES

TEXT, PROMPT, ANSWER, IGNORE, CALC, RECALL_END, RECALL = range(7)
BANDS = (64, 256, 1024)  # first distances of the recall classes after the first, in tokens; 64 is the demo's window
CLASSES = ("text", "prompt", "answer", "ignore", "calc", "recall_end", "recall_1", *(f"recall_{b}" for b in BANDS))
Split = Literal["train", "eval"]
Rng = np.random.Generator

HELD_OUT_IN = 10
FACT_SEED = 7_301
PAIR_FACTS, TRIPLE_FACTS = 1_500, 1_500
LENGTHS = {"copy": (3, 10), "reverse": (3, 8), "sort": (3, 8)}
WORD_COPIES = 0.25  # share of copies that copy words, not letters
DISTANCES = (256, 512, 1024, 2048, 4096)
SEGMENT = 6  # tokens of "\nnote: key value\n" and of "\nrecall: key value" with its end token
ASKED = 0.6  # share of a recall row's segments that ask, once there is something to ask about
RAW_TASKS = ("copy", "reverse", "sort", "calc", "fact")


@dataclass(frozen=True)
class Example:
    """One prompt and its answer, which ends with the end token. meta: what a table may group by."""

    prompt_ids: list[int]
    answer_ids: list[int]
    task: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Packed:
    """Examples one after the other: tokens uint16 [N], classes uint8 [N], starts int64 [M + 1] (last: N)."""

    tokens: np.ndarray
    classes: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def select(self, which: np.ndarray) -> Packed:
        """The examples `which` (int [K]), in that order; repeats are allowed."""
        lengths = self.lengths[which]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(starts[-1]) + np.repeat(self.starts[which] - starts[:-1], lengths)
        return Packed(self.tokens[at], self.classes[at], starts)

    def example(self, index: int, task: str, meta: dict[str, Any] | None = None) -> Example:
        """One example; the answer is its last run of ANSWER tokens."""
        span = slice(self.starts[index], self.starts[index + 1])
        tokens, answer = self.tokens[span].tolist(), self.classes[span] == ANSWER
        first = len(tokens) - (int(np.argmin(answer[::-1])) if not answer.all() else len(tokens))
        return Example(tokens[:first], tokens[first:], task, meta or {})

    @staticmethod
    def join(parts: Sequence[Packed]) -> Packed:
        starts = np.concatenate([[0], np.cumsum(np.concatenate([p.lengths for p in parts]))]).astype(np.int64)
        return Packed(np.concatenate([p.tokens for p in parts]), np.concatenate([p.classes for p in parts]), starts)

    @staticmethod
    def of(examples: Sequence[Example]) -> Packed:
        lengths = [len(e.prompt_ids) + len(e.answer_ids) for e in examples]
        return Packed(
            np.array([i for e in examples for i in (*e.prompt_ids, *e.answer_ids)], np.uint16),
            np.array(
                [c for e in examples for c in [PROMPT] * len(e.prompt_ids) + [ANSWER] * len(e.answer_ids)], np.uint8
            ),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )

    @staticmethod
    def from_matrix(matrix: np.ndarray, answer: int) -> Packed:
        """Rows of an int matrix [M, W] as examples; -1 marks absent cells, answers begin at column `answer`."""
        there = matrix >= 0
        classes = np.broadcast_to(np.where(np.arange(matrix.shape[1]) < answer, PROMPT, ANSWER), matrix.shape)
        starts = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
        return Packed(matrix[there].astype(np.uint16), classes[there].astype(np.uint8), starts)


def content_hash(salt: int, content: np.ndarray) -> np.ndarray:
    """uint64 [M] of int rows [M, W]; the same numbers on every machine."""
    mixed = np.full(content.shape[0], (salt * 0x9E3779B97F4A7C15 + 1) % 2**64, np.uint64)
    for column in (content.astype(np.int64) + 2).T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return mixed ^ (mixed >> np.uint64(32))


def in_split(hashes: np.ndarray, split: Split) -> np.ndarray:
    """bool [M]: which contents belong to the split."""
    return (hashes % np.uint64(HELD_OUT_IN) == 0) == (split == "eval")


def text_in_split(content: str, split: Split) -> bool:
    """The same for a content that is text."""
    number = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    return (number % HELD_OUT_IN == 0) == (split == "eval")


class Lexicon:
    """Ids of the pieces that tasks are made of. Raises ValueError for a tokenizer that splits one of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.letters = self._each(f" {c}" for c in LETTERS)
        self.digits = self._each("0123456789")
        self.keys = self._each(f" {w}" for w in KEYS)
        self.values = self._each(f" {w}" for w in VALUES)
        self.words = np.concatenate([self.keys, self.values])

    def one(self, piece: str) -> int:
        ids = self.ids(piece)
        if len(ids) != 1:
            raise ValueError(f"tokenizer: {piece!r} is {len(ids)} tokens, the tasks need one; train it anew")
        return ids[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def heading(self, name: str) -> list[int]:
        return [self.one(name), self.one(":")]

    @cached_property
    def arrow(self) -> int:
        return self.one(" ->")

    def segment(self, name: str) -> list[int]:
        """`\\nname: key value` and a line end; cells 3 and 4 are to be filled in.

        The value follows its key at once: what a layer has to learn first is to look for what came after this token.
        """
        return [self.one("\n"), *self.heading(name), 0, 0, self.one("\n")]

    def _each(self, pieces: Any) -> np.ndarray:
        return np.array([self.one(p) for p in pieces], np.int64)


class Tasks:
    """All raw generators over one tokenizer. `packed` makes many examples at once, `sample` one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.lexicon = Lexicon(tokenizer)
        self._makers: dict[str, Callable[[Rng, int, Split], list[Packed]]] = {
            "copy": lambda rng, n, split: self._letters("copy", rng, n, split),
            "reverse": lambda rng, n, split: self._letters("reverse", rng, n, split),
            "sort": lambda rng, n, split: self._letters("sort", rng, n, split),
            "calc": self._calc,
            "fact": self._fact,
        }

    def packed(self, task: str, rng: Rng, count: int, split: Split = "train") -> Packed:
        """Exactly `count` examples of one of RAW_TASKS, in random order."""
        made: list[Packed] = []
        while (have := sum(map(len, made))) < count:
            # A tenth is thrown away in training, nine tenths in evaluation.
            wanted = int((count - have) * (1.2 if split == "train" else HELD_OUT_IN * 1.2)) + 8
            made += self._makers[task](rng, wanted, split)
        joined = Packed.join([p for p in made if len(p)])
        return joined.select(rng.permutation(len(joined))[:count])

    def sample(self, task: str, rng: Rng, split: Split = "train") -> Example:
        return self.packed(task, rng, 1, split).example(0, task)

    def _letters(self, task: str, rng: Rng, count: int, split: Split) -> list[Packed]:
        low, high = LENGTHS[task]
        lex = self.lexicon
        lengths = rng.integers(low, high + 1, count)
        words = rng.random(count) < (WORD_COPIES if task == "copy" else 0)
        parts = []
        for length in range(low, high + 1):
            for symbols, kind in ((lex.letters, ~words), (lex.words, words)):
                rows = int(np.sum((lengths == length) & kind))
                if not rows:
                    continue
                # Distinct symbols: the first `length` of a random order.
                picked = rng.random((rows, len(symbols))).argpartition(length, axis=1)[:, :length]
                picked = np.take_along_axis(picked, rng.random(picked.shape).argsort(axis=1), axis=1)
                keep = in_split(content_hash(len(symbols), picked), split)
                picked = picked[keep]
                answer = {"copy": picked, "reverse": picked[:, ::-1], "sort": np.sort(picked, axis=1)}[task]
                matrix = _columns(len(picked), *lex.heading(task), symbols[picked], lex.arrow, symbols[answer], EOS_ID)
                parts.append(Packed.from_matrix(matrix, 3 + length))
        return parts

    def _calc(self, rng: Rng, count: int, split: Split) -> list[Packed]:
        lex = self.lexicon
        sizes = rng.choice(3, (2, count), p=(0.15, 0.35, 0.5))
        a, b = rng.integers(np.array([0, 10, 100])[sizes], np.array([10, 100, 1000])[sizes])
        minus = rng.random(count) < 0.5
        a, b = np.where(minus & (b > a), b, a), np.where(minus & (b > a), a, b)
        keep = in_split(content_hash(3, np.stack([minus, a, b], axis=1)), split)
        a, b, minus = a[keep], b[keep], minus[keep]
        result = np.where(minus, a - b, a + b)
        signs = np.where(minus, lex.one("-"), lex.one("+"))[:, None]
        forward = self._digits(result, 4)
        head: list[int | np.ndarray] = [
            *lex.heading("calc"),
            lex.one(" "),
            self._digits(a, 3),
            signs,
            self._digits(b, 3),
            lex.arrow,
        ]
        tail: list[int | np.ndarray] = [lex.one(" ~"), forward[:, ::-1], lex.one(" ="), lex.one(" "), forward, EOS_ID]
        return [Packed.from_matrix(_columns(len(a), *head, *tail), 11)]

    def _digits(self, numbers: np.ndarray, width: int) -> np.ndarray:
        """Digit ids [M, width] without leading zeros, -1 in their place."""
        powers = 10 ** np.arange(width - 1, -1, -1)
        there = (numbers[:, None] >= powers) | (powers == 1)
        return np.where(there, self.lexicon.digits[numbers[:, None] // powers % 10], -1)

    @cached_property
    def facts(self) -> np.ndarray:
        """int32 [PAIR_FACTS + TRIPLE_FACTS, 4]: indices of two or three KEYS (-1: none) and of one of VALUES."""
        rng = np.random.default_rng(FACT_SEED)
        ends = rng.permutation(len(KEYS) ** 2)[: PAIR_FACTS + TRIPLE_FACTS // 3]
        first, second = np.divmod(ends, len(KEYS))
        pairs = np.stack([np.full(PAIR_FACTS, -1), first[:PAIR_FACTS], second[:PAIR_FACTS]], axis=1)
        # Three triples share their last two words, so that only the whole triple tells the answer.
        openers = np.stack([rng.permutation(len(KEYS))[:3] for _ in range(TRIPLE_FACTS // 3)]).reshape(-1)
        shared = np.repeat(np.stack([first[PAIR_FACTS:], second[PAIR_FACTS:]], axis=1), 3, axis=0)
        keys = np.concatenate([pairs, np.concatenate([openers[:, None], shared], axis=1)])
        return np.concatenate([keys, rng.integers(0, len(VALUES), (len(keys), 1))], axis=1).astype(np.int32)

    def _fact(self, rng: Rng, count: int, split: Split) -> list[Packed]:
        lex = self.lexicon
        rows = self.facts[rng.integers(0, len(self.facts), count)]
        keys = np.where(rows[:, :3] >= 0, lex.keys[rows[:, :3]], -1)
        answer = lex.values[rows[:, 3]][:, None]
        return [Packed.from_matrix(_columns(count, *lex.heading("fact"), keys, lex.arrow, answer, EOS_ID), 6)]

    def _pairs(self, rng: Rng, count: int, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Ids of `count` distinct keys (up to len(KEYS)) and a value for each, of pairs that are in the split."""
        keys = rng.permutation(len(KEYS))[:count]
        values = rng.integers(0, len(VALUES), count)
        while (wrong := ~in_split(content_hash(5, np.stack([keys, values], axis=1)), split)).any():
            values[wrong] = rng.integers(0, len(VALUES), int(wrong.sum()))
        return self.lexicon.keys[keys], self.lexicon.values[values]

    def recall(
        self, rng: Rng, distance: int, text: np.ndarray, split: Split = "train", *, lead: int = 24, others: int = 3
    ) -> Example:
        """One note, filler, one question. distance: tokens from the note's value to the answer, exactly.

        text: plain tokens [N] of the split, from which the filler is cut; it is broken by up to `others` notes about
        other keys. lead: most tokens before the note. Raises ValueError for a distance under SEGMENT or text that is
        too short.
        """
        filler, before = distance - SEGMENT, int(rng.integers(0, lead + 1))
        if filler < 0 or len(text) < distance + lead:
            raise ValueError(f"recall: distance {distance} needs at least {SEGMENT}, and text of {distance + lead}")
        others = min(others, filler // (4 * SEGMENT))
        keys, values = self._pairs(rng, others + 1, split)
        note, question = np.array(self.lexicon.segment("note")), np.array(self.lexicon.segment("recall"))
        notes = np.repeat(note[None], others + 1, axis=0)
        notes[:, 3], notes[:, 4] = keys, values
        question[[3, 4, 5]] = keys[0], values[0], EOS_ID
        start = int(rng.integers(0, len(text) - distance - lead + 1))
        words = text[start : start + before + filler - others * SEGMENT]
        cuts = np.sort(rng.integers(before, len(words) + 1, others))
        pieces = [words[:before], notes[0]]
        for cut, end, other in zip([before, *cuts], [*cuts, len(words)], [*notes[1:], notes[:0].reshape(-1)]):
            pieces += [words[cut:end], other]
        prompt = np.concatenate([*pieces, question[:4]]).tolist()
        return Example(prompt, question[4:].tolist(), "recall", {"distance": distance})

    def recall_row(
        self, rng: Rng, length: int, max_distance: int, text: np.ndarray, density: float, split: Split = "train"
    ) -> Packed:
        """A row [length] of notes and of questions about them, with text between: multi-query associative recall.

        density: share of the tokens in notes and questions, 1 for no text at all. Each key is noted once and may be
        asked several times. A question's distance, to where its pair stood last, is at most `max_distance`; the
        aims are uniform and log-uniform by halves. The text runs on around the segments and keeps its own loss.
        """
        lex, size = self.lexicon, SEGMENT
        slots = min(length // size, max(2, round(density * length / size)))
        starts = size * np.arange(slots) + np.sort(rng.integers(0, length - slots * size + 1, slots))
        # Few keys are asked again and again, many hardly twice. Rows of few are where telling keys apart is learned:
        # among many, a guess at any value in sight is nearly as good.
        most = min(len(KEYS), max(2, slots // 2))
        limit = most if rng.random() < 0.3 else round(float(np.exp(rng.uniform(np.log(2), np.log(most)))))
        keys, values = self._pairs(rng, limit, split)
        top = min(max_distance, length)
        aims = np.log(np.where(rng.random(slots) < 0.5, rng.uniform(size, top, slots), 0) + 1e-9)
        aims = np.where(aims > 0, aims, rng.uniform(np.log(size), np.log(top), slots))
        asks = rng.random(slots) < ASKED
        tokens, classes = np.full(length, -1, np.int64), np.full(length, TEXT, np.uint8)
        note, question = np.array(lex.segment("note")), np.array(lex.segment("recall"))
        question[5] = EOS_ID
        seen, noted = np.zeros(limit, np.int64), 0  # where each pair stood last
        for at, aim, ask in zip(starts.tolist(), aims.tolist(), asks.tolist()):
            distances = at - seen[:noted]
            off = np.abs(np.log(distances) - aim) + np.where(distances > top, np.inf, 0)
            which = int(np.argmin(off)) if noted else 0
            if (ask or noted == limit) and noted and off[which] < np.inf:
                segment, distance = question, int(distances[which])
                classes[at : at + size] = PROMPT
                classes[at + 4 : at + 6] = RECALL + np.searchsorted(BANDS, distance, side="right"), RECALL_END
            elif noted < limit:
                segment, which, noted = note, noted, noted + 1
                classes[at : at + size] = PROMPT
            else:
                continue
            tokens[at : at + size] = segment
            tokens[[at + 3, at + 4]] = keys[which], values[which]
            seen[which] = at
        free = tokens < 0
        start = int(rng.integers(0, len(text) - length))
        tokens[free] = text[start : start + int(free.sum())]
        return Packed(tokens.astype(np.uint16), classes, np.array([0, length]))


def _columns(rows: int, *parts: int | np.ndarray) -> np.ndarray:
    """A matrix [rows, W] of constants and of columns or groups of columns [rows, w], side by side."""
    return np.concatenate([np.full((rows, 1), p) if isinstance(p, int) else p for p in parts], axis=1)


def json_examples(lexicon: Lexicon, rng: Rng, split: Split) -> Iterator[Example]:
    """Without end: a sentence about a person, and its facts as JSON in the order of mention."""
    while True:
        sentence, fields = person(rng)
        if text_in_split(sentence, split):
            answer = (
                "{" + ", ".join(f'"{k}": {v if k == "age" else chr(34) + str(v) + chr(34)}' for k, v in fields) + "}"
            )
            yield Example(
                lexicon.ids(f"json: {sentence} ->"),
                [*lexicon.ids(f" {answer}"), EOS_ID],
                "json",
                {"fields": len(fields)},
            )


def person(rng: Rng) -> tuple[str, list[tuple[str, str | int]]]:
    """A made-up sentence and its (field, value) pairs: the name and one to four more."""

    def pick(options: Sequence[str]) -> str:
        return options[int(rng.integers(len(options)))]

    name = pick(NAMES)
    clauses: list[tuple[str, str | int, str]] = [
        ("age", (age := int(rng.integers(2, 100))), f"is {age} years old"),
        ("city", (city := pick(CITIES)), f"lives in {city}"),
        ("job", (job := pick(JOBS)), f"works as a {job}"),
        ("colour", (colour := pick(COLOURS)), f"likes {colour}"),
        ("pet", (pet := pick(PETS)), f"has a {pet}"),
    ]
    chosen = [clauses[i] for i in rng.permutation(len(clauses))[: rng.integers(1, 5)]]
    parts = [clause for _, _, clause in chosen]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{name} {listed}.", [("name", name), *((k, v) for k, v, _ in chosen)]
