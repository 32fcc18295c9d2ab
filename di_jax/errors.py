"""Errors that the user can act on: wrong config, arguments, input files or checkpoint.

The command line prints a `UserError` as one line on stderr, without a traceback, and exits with its `exit_code`.
Every other exception is a defect of the program and keeps its traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """What the user gave cannot be used; the message names the field, file or request and says what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A config file, a key of it, or a `--set` assignment cannot be used."""
