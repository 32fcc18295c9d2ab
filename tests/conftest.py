"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# No deadlines: a first example that compiles is not a failure.
hypothesis.settings.register_profile("di_jax", deadline=None)
hypothesis.settings.load_profile("di_jax")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden vectors and tiny checkpoints."""
    return Path(__file__).parent / "golden"
