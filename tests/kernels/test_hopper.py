"""Kernels for Hopper: by name or by `auto`, where they can run."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest

from kernels_pallas import hopper
from kernels_pallas.choice import OPERATIONS, UnknownImplementation
from kernels_pallas.hopper import KERNEL, WITH_KERNELS, UnsupportedShape, choose_kernel, not_imported, unavailable


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that says it is one, whose kernels nobody has imported."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    not_imported.cache_clear()
    yield
    not_imported.cache_clear()


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


def test_all_operations_with_a_kernel_are_named() -> None:
    assert set(WITH_KERNELS) == {
        name for name in OPERATIONS if importlib.util.find_spec(f"kernels_pallas.{name}.{KERNEL}") is not None
    }


@pytest.mark.usefixtures("on_hopper")
def test_kernels_are_imported_once_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced in several threads; all of them find the modules whole."""
    inside, imported, asked = threading.Lock(), [], threading.Barrier(8)

    def import_module(name: str) -> None:
        assert inside.acquire(blocking=False), f"{name} is imported beside another"
        threading.Event().wait(0.002)
        imported.append(name)
        inside.release()

    def ask(_: int) -> tuple[str | None, int]:
        asked.wait()
        return unavailable(), len(imported)

    monkeypatch.setattr(hopper.importlib, "import_module", import_module)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [(None, len(WITH_KERNELS))] * 8
    assert imported == [f"kernels_pallas.{operation}.{KERNEL}" for operation in WITH_KERNELS]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("error", [ImportError("no mosaic_gpu"), AttributeError("no barrier")])
def test_under_a_jax_that_they_do_not_know_they_say_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def import_module(name: str) -> None:
        if "index_topk" in name:
            raise error

    monkeypatch.setattr(hopper.importlib, "import_module", import_module)
    why = unavailable()
    assert why == f"its kernel of index_topk cannot be imported under jax {jax.__version__}: {error}"
    assert choose_kernel("index_topk", "auto", kernel, reference, why) is reference
    with pytest.raises(UnsupportedShape, match=f"cannot be imported under jax {jax.__version__}"):
        choose_kernel("index_topk", KERNEL, kernel, reference, why)
