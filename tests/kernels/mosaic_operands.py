"""Where operands of Mosaic GPU kernels come from: a slice that XLA leaves in place must begin at 256 bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxlib.mlir import ir

ALIGNMENT = 256  # of every buffer that a Mosaic GPU kernel is given, as its runtime checks
SAME_BYTES = ("stablehlo.reshape", "stablehlo.bitcast_convert")
MANY = ("stablehlo.optimization_barrier",)


def misaligned(function: Callable[..., Any], *arguments: Any) -> tuple[int, list[str]]:
    """How many Mosaic GPU kernels `function` calls, and which of their operands may begin elsewhere than they should.

    Lowers for a GPU without one. An operand is followed back through loops, calls and reshapes: XLA gives a kernel the
    address of a slice of another array where the slice is contiguous; everything else is computed into a buffer of its
    own. A dynamic slice may begin at any multiple of its step.
    """
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    functions = {str(f.attributes["sym_name"]): f for f in module.body.operations}
    operations = [op for f in functions.values() for op in _all(f)]
    callers: dict[str, list[Any]] = {}
    for op in operations:
        if op.operation.name == "func.call":
            callers.setdefault(_callee(op), []).append(op)
    kernels = [op for op in operations if op.operation.name == "stablehlo.custom_call" and "mosaic_gpu" in _target(op)]
    found = []
    for kernel in kernels:
        for number, operand in enumerate(kernel.operands):
            for slice_, offset in _slices(operand, functions, callers, set()):
                if offset % ALIGNMENT:
                    found.append(
                        f"operand {number}, {operand.type}: {slice_.operation.name} at a multiple of {offset} bytes"
                    )
    return len(kernels), found


def _all(function: Any) -> Iterator[Any]:
    pending = [function]
    while pending:
        op = pending.pop()
        yield op
        pending += [inner for region in op.regions for block in region.blocks for inner in block.operations]


def _target(op: Any) -> str:
    return str(op.attributes["call_target_name"])


def _callee(op: Any) -> str:
    return '"' + str(op.attributes["callee"]).removeprefix("@").strip('"') + '"'


def _slices(value: Any, functions: dict[str, Any], callers: dict[str, list[Any]], seen: set[Any]) -> Iterator[Any]:
    """(operation, bytes at a multiple of which the slice begins) of the slices that a value may be."""
    if value in seen:
        return
    seen.add(value)
    sources: list[Any] = []
    if isinstance(value, ir.BlockArgument):
        block, number = value.owner, value.arg_number
        parent = block.owner
        if parent.operation.name == "func.func":
            sources = [call.operands[number] for call in callers.get(str(parent.attributes["sym_name"]), [])]
        elif parent.operation.name == "stablehlo.while":
            sources = [parent.operands[number], _returned(block, number)]
    else:
        op, number = value.owner, value.result_number
        if op.operation.name in ("stablehlo.slice", "stablehlo.dynamic_slice"):
            yield op, _step(op)
        elif op.operation.name in SAME_BYTES or (
            op.operation.name == "stablehlo.broadcast_in_dim" and _size(value) == _size(op.operands[0])
        ):
            sources = [op.operands[0]]
        elif op.operation.name in MANY:
            sources = [op.operands[number]]
        elif op.operation.name == "func.call":
            sources = [_returned(functions[_callee(op)].regions[0].blocks[0], number)]
        elif op.operation.name == "stablehlo.while":
            sources = [op.operands[number], _returned(op.regions[1].blocks[0], number)]
        elif op.operation.name in ("stablehlo.case", "stablehlo.if"):
            sources = [_returned(region.blocks[0], number) for region in op.regions]
    for source in sources:
        yield from _slices(source, functions, callers, seen)


def _returned(block: Any, number: int) -> Any:
    return list(block.operations)[-1].operands[number]


def _size(value: Any) -> int:
    return math.prod(value.type.shape)


def _step(op: Any) -> int:
    """Bytes of which the offset of a slice is a multiple; 0 for one that begins where its operand does."""
    kind = op.operands[0].type
    item = max(1, kind.element_type.width // 8)
    strides = [item * math.prod(kind.shape[i + 1 :]) for i in range(kind.rank)]
    if op.operation.name == "stablehlo.slice":
        return sum(start * stride for start, stride in zip(op.attributes["start_indices"], strides, strict=True))
    sizes = list(op.attributes["slice_sizes"])
    return math.gcd(*(s for s, n, size in zip(strides, kind.shape, sizes, strict=True) if size < n))
