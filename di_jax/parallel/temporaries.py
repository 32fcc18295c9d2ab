"""What a step's intermediate values take on a device at most, estimated from the traced program alone.

A compiler for the planned device is rarely on the machine that plans, and the CPU's gives no answer for another device:
without arithmetic below 32 bits it widens fp8 and bf16 values, and it keeps whole stacks of weights in the wider type.
Here every value has the type that the program gave it.

The model of a compiler: values are made in program order and freed after their last use. Elementwise results,
broadcasts, slices and gathers are computed inside whoever consumes them, unless that is an operation on arrays in
memory (a product, a sort, a collective, a loop). Updates of a buffer that nobody reads afterwards happen in place;
otherwise the buffer is copied first. A loop's carry lives in one buffer. Workspaces of libraries are not known here,
nor what a compiler copies to suit its layouts. So it is meant for devices with row-major arrays: of the released decode
step on 64 devices (128 rows, 131,072 positions) it says 2.7 GB, most of it the head in float32; the CPU's compiler says
26 GB, and the one for TPU7x, which lays out whole caches and tables anew, 53 GB.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jax.extend.core import Literal

from di_jax.parallel.collectives import SENT, subprograms

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "shard_map"}
# Their input, seen otherwise; a kernel that stores in place is given a reference to a value and leaves it another.
_VIEWS = {"reshape", "squeeze", "expand_dims", "stop_gradient", "optimization_barrier", "freeze"}
_UPDATES = {"scatter", "scatter-add", "dynamic_update_slice", "new_ref"}  # a new value of their first input
_LOOPS = {"scan", "while", "cond"}
_ON_ARRAYS = {"dot_general", "sort", "top_k", "cumsum", "cummax", "pallas_call", "custom_vmap_call", *SENT, *_LOOPS}


@dataclasses.dataclass
class _Buffer:
    """Memory of a value and of its updates in place, from one operation to another. size 0: it is the caller's."""

    size: int
    writable: bool
    born: int
    last: int


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation. inputs and outputs are numbers of values, None for a literal."""

    equation: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.equation.primitive.name)

    @property
    def values(self) -> Iterator[int]:
        return (value for value in self.inputs if value is not None)


def temporary_bytes(jaxpr: Any, writable: Collection[int] | None = None) -> int:
    """Bytes at the fullest moment of a jaxpr, without its inputs and what is updated in place in them.

    writable: positions of the inputs that may be updated in place; None: all, as of a step that is given its state
    (weights are never updated).
    """
    program = _Program()
    numbers = {variable: program.number(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    inputs = list(numbers.values())
    program.flatten(jaxpr, numbers)
    results = {numbers[v] for v in jaxpr.outvars if not isinstance(v, Literal)}
    end = len(program.operations)
    buffers = {
        value: _Buffer(0, writable is None or position in writable, -1, end) for position, value in enumerate(inputs)
    }
    stored = program.stored(results) | set(inputs)
    last = program.last_uses(stored)
    last.update(dict.fromkeys(results, end))
    made: list[_Buffer] = []
    for index, operation in enumerate(program.operations):
        homes = _in_place(operation)
        for value in operation.outputs:
            if value not in stored:
                continue
            old = homes.get(value)
            buffer = buffers.get(old) if old is not None and last.get(old, index) <= index else None
            if buffer is None or not buffer.writable:
                buffer = _Buffer(program.sizes[value], True, index, index)
                made.append(buffer)
            buffer.last = max(buffer.last, last.get(value, index))
            buffers[value] = buffer
    change = [0] * (end + 2)
    for buffer in made:
        change[buffer.born] += buffer.size
        change[buffer.last + 1] -= buffer.size
    live = itertools.accumulate(change)
    return max((size + program.workspace(operation) for size, operation in zip(live, program.operations)), default=0)


class _Program:
    """The operations of a jaxpr with called functions inlined and views resolved, and the sizes of its values."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.operations: list[_Operation] = []
        self.pinned: set[int] = set()  # values behind a barrier: no consumer computes them itself

    def number(self, variable: Any) -> int:
        """A number for a new value."""
        dtype = getattr(variable.aval, "dtype", None)
        self.sizes.append(getattr(variable.aval, "size", 0) * getattr(dtype, "itemsize", 8))  # 8: a random key
        return len(self.sizes) - 1

    def flatten(self, jaxpr: Any, numbers: dict[Any, int]) -> None:
        """Appends the operations of `jaxpr`, whose inputs have `numbers`, and adds the numbers of what it makes."""

        def numbered(atom: Any) -> int:
            return self.number(atom) if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in _CALLS:
                inner_jaxpr = next(subprograms(equation))
                inner = dict(zip(inner_jaxpr.invars, map(numbered, equation.invars), strict=True))
                inner.update((variable, self.number(variable)) for variable in inner_jaxpr.constvars)
                self.flatten(inner_jaxpr, inner)
                for variable, atom in zip(equation.outvars, inner_jaxpr.outvars, strict=True):
                    numbers[variable] = self.number(atom) if isinstance(atom, Literal) else inner[atom]
            elif name in _VIEWS:
                numbers.update(zip(equation.outvars, map(numbered, equation.invars)))
                if name == "optimization_barrier":
                    self.pinned.update(numbers[variable] for variable in equation.outvars)
            else:
                inputs = tuple(None if isinstance(atom, Literal) else numbers[atom] for atom in equation.invars)
                numbers.update((variable, self.number(variable)) for variable in equation.outvars)
                self.operations.append(_Operation(equation, inputs, tuple(numbers[v] for v in equation.outvars)))

    def stored(self, results: Iterable[int]) -> set[int]:
        """The values that are in memory: results of operations on arrays, and what those work on."""
        stored = {*results, *self.pinned}
        for operation in self.operations:
            name = operation.name
            if name in _ON_ARRAYS:
                stored.update(operation.values, operation.outputs)
            elif name in _UPDATES:
                stored.update(operation.outputs, itertools.islice(operation.values, 1))
            elif name == "gather":
                stored.update(itertools.islice(operation.values, 1))
            elif name.startswith(("reduce_", "arg")) and name != "reduce_precision":
                stored.update(operation.outputs)
        return stored

    def last_uses(self, stored: Collection[int]) -> dict[int, int]:
        """The last operation that reads each stored value, be it through values computed inside that operation."""
        sources: dict[int, frozenset[int]] = {}
        last: dict[int, int] = {}
        for index, operation in enumerate(self.operations):
            read: set[int] = set()
            for value in operation.values:
                read |= {value} if value in stored else sources.get(value, frozenset())
            if any(value in stored for value in operation.outputs):
                last.update(dict.fromkeys(read, index))
            sources.update((value, frozenset(read)) for value in operation.outputs if value not in stored)
        return last

    def workspace(self, operation: _Operation) -> int:
        """Bytes that an operation needs beside its inputs and outputs."""
        if operation.name == "top_k":  # a sort of the values and of their numbers
            operand = operation.equation.invars[0].aval
            return int(operand.size * (operand.dtype.itemsize + 4))
        if operation.name not in _LOOPS:
            return 0
        params, carried = operation.equation.params, {position for position, _ in _carries(operation)}
        if operation.name == "while":  # its condition has constants of its own, before those of its body
            carried = {position - params["cond_nconsts"] for position in carried}
            condition = temporary_bytes(params["cond_jaxpr"].jaxpr, ())
            return max(condition, temporary_bytes(params["body_jaxpr"].jaxpr, carried))
        return max(temporary_bytes(body, carried) for body in subprograms(operation.equation))


def _carries(operation: _Operation) -> list[tuple[int, int]]:
    """(position among the inputs, position among the outputs) of each carry of a loop."""
    equation = operation.equation
    if operation.name == "while":
        first = equation.params["cond_nconsts"] + equation.params["body_nconsts"]
        return [(first + i, i) for i in range(len(equation.outvars))]
    if operation.name == "scan":
        body = equation.params["jaxpr"].jaxpr
        # What is not carried has one more axis outside than inside.
        carried = sum(o.aval.shape == i.aval.shape for o, i in zip(equation.outvars, body.outvars))
        sliced = sum(o.aval.shape != i.aval.shape for o, i in zip(equation.invars, body.invars))
        first = len(equation.invars) - sliced - carried
        return [(first + i, i) for i in range(carried)]
    return []


def _in_place(operation: _Operation) -> dict[int, int | None]:
    """The input whose memory each output would take over."""
    if operation.name in _UPDATES:
        return {operation.outputs[0]: operation.inputs[0]}
    return {operation.outputs[out]: operation.inputs[input_] for input_, out in _carries(operation)}
