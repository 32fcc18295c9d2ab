"""Where the kernels in the Mosaic GPU dialect for Hopper (`mosaic_gpu_sm90`) run."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import cache

import jax

from di_jax.errors import UserError
from kernels_pallas.choice import choose

KERNEL = "mosaic_gpu_sm90"
WITH_KERNELS = ("hyper_connections", "index_topk", "sparse_attention", "compress_store")
_importing = threading.Lock()


class UnsupportedShape(UserError):
    """The named kernel cannot run here; the message says what does not fit."""


def unavailable() -> str | None:
    """Why this machine cannot run them; None where it can."""
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the default backend is {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        return f"it needs compute capability 9.0 (Hopper), the device has {capability}"
    # Steps are traced in several threads, and modules of jax that import one another were found half imported by the
    # second of two threads (ImportError in two of a dozen benches on an H200): they are all here before one is used.
    with _importing:
        return not_imported()


@cache
def not_imported() -> str | None:
    """Imports the modules of all kernels. Why that fails, as under a jax whose Mosaic GPU is another one; or None."""
    for operation in WITH_KERNELS:
        try:
            importlib.import_module(f"kernels_pallas.{operation}.{KERNEL}")
        except (ImportError, AttributeError) as error:
            return f"its kernel of {operation} cannot be imported under jax {jax.__version__}: {error}"
    return None


def choose_kernel[F: Callable[..., object]](
    operation: str, implementation: str, kernel: F, reference: F, why: str | None
) -> F:
    """The kernel or the reference. why: what keeps the kernel from running this; None when it can.

    `auto` takes the kernel wherever it can run. Raises UnsupportedShape for the kernel where it cannot,
    UnknownImplementation for other names.
    """
    if implementation == KERNEL and why is not None:
        raise UnsupportedShape(f"kernels: {operation} cannot run {KERNEL} here: {why}")
    available = {"reference": reference} if why is not None else {KERNEL: kernel, "reference": reference}
    return choose(operation, implementation, available, why)
