"""Equal kernels are equal to a compilation cache: lowered for CUDA, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from kernels_pallas.mosaic import DUMP_NAME, stably_named

X = jax.ShapeDtypeStruct((128,), jnp.float32)


def doubled(x: Any, out: Any) -> None:
    out[...] = 2 * x[...]


def modules(body: Callable[..., None], name: str) -> list[bytes]:
    """Of the kernels in a program that launches `body` twice."""

    def launch(x: jax.Array) -> Any:
        return plgpu.kernel(body, out_type=X, num_threads=1, thread_name="group", kernel_name=name)(x)

    lowered = jax.jit(lambda x: launch(launch(x))).trace(X).lower(lowering_platforms=("cuda",))
    found: list[bytes] = []

    def walk(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.append(ir.StringAttr(operation.attributes["mhlo.backend_config"]["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(walk)
    return found


@pytest.mark.parametrize(("body", "different"), [(stably_named(doubled), 1), (doubled, 4)])
def test_launches_of_one_kernel_are_one_to_compile(body: Callable[..., None], different: int) -> None:
    """In one program and in the next. doubled: the control; if it fails, jaxlib counts no longer."""
    kernels = [*modules(body, "doubled"), *modules(body, "doubled")]
    assert len(kernels) == 4 and len({*kernels}) == different
    assert all(DUMP_NAME.encode() in kernel for kernel in kernels)


def test_another_kernel_is_another() -> None:
    def tripled(x: Any, out: Any) -> None:
        out[...] = 3 * x[...]

    kernels = {
        *modules(stably_named(doubled), "one"),
        *modules(stably_named(doubled), "other"),
        *modules(stably_named(tripled), "one"),
    }
    assert len(kernels) == 3
