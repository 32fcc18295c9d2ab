"""A file that gets results a line at a time, so that an interrupted run keeps what it had."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from di_jax.errors import UserError


class LineFile:
    """Lines written at once, each flushed. What the file held is kept until `clear`: a run may still fail to start.

    label: how messages call it. Raises UserError when it cannot be opened or written.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        with self._explained("; give a file in a folder you own"):
            self.file = path.open("a", encoding="utf-8")

    def clear(self) -> None:
        """Drops what the file held; a device or a pipe holds nothing."""
        if stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
            self.file.truncate(0)

    def write(self, line: str) -> None:
        with self._explained("; the lines before are in it"):
            print(line, file=self.file, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After a failed write closing fails once more; the first error is the one to report.
        with self._explained() if error is None else contextlib.suppress(OSError):
            self.file.close()

    @contextlib.contextmanager
    def _explained(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.label} {self.path}: cannot be written: {error.strerror}{advice}") from error
