"""A small tokenizer and a small prepared folder for the tests of scripts/train_demo."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))  # the scripts are run from a checkout, not installed

from scripts.train_demo import prepare, tokenizer
from scripts.train_demo.architecture import config_json
from scripts.train_demo.corpus import Document
from scripts.train_demo.dataset import POOLS, Data, save_pool
from scripts.train_demo.tasks import Tasks

TEXTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.\n",
    'def add(a, b):\n    """Add two numbers: 12 + 345."""\n    return a + b\n',
    "You have access to a set of tools. The weather, the user and the assistant; Réné says: naïve.\n",
)


@pytest.fixture(scope="session")
def demo_texts() -> tuple[str, ...]:
    return TEXTS


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return tokenizer.train(TEXTS)


@pytest.fixture(scope="session")
def demo_tasks(demo_tokenizer: Tokenizer) -> Tasks:
    return Tasks(demo_tokenizer)


@pytest.fixture(scope="session")
def demo_data(demo_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """What `prepare` makes, from made-up documents and with small pools."""
    folder = tmp_path_factory.mktemp("train_demo")
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    documents = [
        Document(source, f"{source}/{i}", " ".join(rng.choice(words, 400)) + "\n", held_out)
        for source in ("kjv", "python")
        for i, held_out in enumerate((False, False, False, True, True))
    ]
    (folder / "tokenizer.json").write_text(demo_tokenizer.to_str(), encoding="utf-8")
    prepare.write_texts(folder, demo_tokenizer, documents)
    for name in ("json", "chat", "tool"):
        made = prepare.examples(name, demo_tokenizer, rng, "train")
        save_pool(folder / f"pool_{name}.npz", list(itertools.islice(made, 40)))
    (folder / "manifest.json").write_text(json.dumps({}), encoding="utf-8")
    return Data(folder)


@pytest.fixture(scope="session")
def demo_folder(demo_data: Data, demo_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`demo_data` with a small model's configuration and held-out items of the pools: enough for a training."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    shutil.copytree(demo_data.folder, folder)
    (folder / "eval").mkdir(exist_ok=True)
    for name in POOLS:
        held_out = itertools.islice(prepare.examples(name, demo_tokenizer, np.random.default_rng(0), "eval"), 10)
        items = [{"prompt_token_ids": e.prompt_ids, "answer_token_ids": e.answer_ids, "task": name} for e in held_out]
        lines = [json.dumps(item) for item in items]
        (folder / f"eval/{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = 32 * -(-demo_tokenizer.get_vocab_size() // 32)
    raw = config_json(vocabulary, vocabulary, vocabulary - 1, small=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    np.save(folder / "token_map.npy", np.arange(vocabulary, dtype=np.int32))
    return folder
