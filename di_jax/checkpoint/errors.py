"""The error of everything that reads or writes checkpoints."""

from __future__ import annotations

from di_jax.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file, the tensor and what to do."""
