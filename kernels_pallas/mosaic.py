"""What kernels in the Mosaic GPU dialect have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

DUMP_NAME = "mosaic_gpu.dump_basename"


def stably_named(body: Callable[..., None]) -> Callable[..., None]:
    """The body of a kernel, such that two kernels of equal code are equal: one is compiled for all.

    jaxlib writes into every kernel under which name its code would be dumped, and counts the kernels of the process in
    that name (0.11.2, `mosaic_gpu.dump_basename`). So the 49 launches in a decode step were 49 kernels to compile, and
    a compilation cache never knew a step again: the numbers depend on the order in which threads trace. A name that is
    already there is kept. Dumps of kernels of one name then overwrite each other.
    """

    def named(*references: Any) -> None:
        plgpu.inline_mgpu()(_name)()
        body(*references)

    return named


def _name(_: Any) -> None:
    module = ir.InsertionPoint.current.block.owner.operation
    while module.parent is not None:
        module = module.parent.operation
    module.attributes[DUMP_NAME] = module.attributes["sym_name"]
