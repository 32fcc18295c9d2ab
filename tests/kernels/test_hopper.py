"""Kernels for Hopper: by name or by `auto`, where they can run."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from kernels_pallas.choice import UnknownImplementation
from kernels_pallas.hopper import KERNEL, UnsupportedShape, choose_kernel, unavailable


def kernel() -> str:
    return "kernel"


def reference() -> str:
    return "reference"


def test_the_kernel_runs_by_name_or_says_why_not() -> None:
    assert choose_kernel("index_topk", KERNEL, kernel, reference, None) is kernel
    with pytest.raises(UnsupportedShape, match=r"index_topk cannot run mosaic_gpu_sm90 here: too few rows"):
        choose_kernel("index_topk", KERNEL, kernel, reference, "too few rows")


@pytest.mark.parametrize("why", [None, "too few rows"])
def test_auto_takes_the_kernel_where_it_can_run(why: str | None) -> None:
    assert choose_kernel("index_topk", "auto", kernel, reference, why) is (kernel if why is None else reference)
    assert choose_kernel("index_topk", "reference", kernel, reference, why) is reference
    with pytest.raises(UnknownImplementation, match="dense"):
        choose_kernel("index_topk", "dense", kernel, reference, why)


def test_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert unavailable() == "it needs a GPU, the default backend is tpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, words in (("9.0", None), ("10.0", "has 10.0"), (None, "has None")):
        monkeypatch.setattr(jax, "devices", lambda c=capability: [SimpleNamespace(compute_capability=c)])
        found = unavailable()
        assert (found is None) if words is None else words in str(found)
