"""What all tests share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import jax
import pytest

from di_jax.config import Config

if TYPE_CHECKING:
    from di_jax.llm import LLM

# A shell starts what runs in its background with interrupts ignored, which tests of interrupts and their children need.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Meshes are tested on virtual devices; whatever asks for one device gets the first.
jax.config.update("jax_num_cpu_devices", 8)

# No deadlines: a first example that compiles is not a failure.
hypothesis.settings.register_profile("di_jax", deadline=None)
hypothesis.settings.load_profile("di_jax")


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """A module's programs go with it: a worker that runs many modules would keep those of all, 7 to 9 GB of them."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden vectors and tiny checkpoints."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_config(golden: Path) -> Config:
    """The golden tiny model in float32 with one prefill and one decode shape: two programs to compile."""
    return Config.from_dict(
        {
            "model": {"path": str(golden / "tiny-v41-fp8"), "dtype": "float32"},
            "engine": {
                "max_num_seqs": 8,
                "max_num_batched_tokens": 128,
                "prefill_buckets": [128],
                "decode_buckets": [8],
                "max_model_len": 384,
                "log_interval": 0,
                "prefix_caching": False,
                "replay": {"decoder": "off", "encoder": "off"},
            },
            "sampling": {"temperature": 0, "max_tokens": 8},
        }
    )


@pytest.fixture(scope="session")
def llm(tiny_config: Config) -> Iterator[LLM]:
    """A warm engine over `tiny_config`, shared by all tests of this process: leave nothing running in it."""
    from di_jax.llm import LLM

    with LLM(tiny_config) as engine:
        yield engine
