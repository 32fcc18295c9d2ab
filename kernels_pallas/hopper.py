"""Where the kernels in the Mosaic GPU dialect for Hopper (`mosaic_gpu_sm90`) run."""

from __future__ import annotations

from collections.abc import Callable

import jax

from di_jax.errors import UserError
from kernels_pallas.choice import choose

KERNEL = "mosaic_gpu_sm90"


class UnsupportedShape(UserError):
    """The named kernel cannot run here; the message says what does not fit."""


def unavailable() -> str | None:
    """Why this machine cannot run them; None where it can."""
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the default backend is {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability == "9.0" else f"it needs compute capability 9.0 (Hopper), the device has {capability}"


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
