"""What the stores need of one thread beyond the vocabulary of `index_topk.lanes`, and their launch.

The tests have another machine with the same words, which computes a kernel with numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.index_topk import lanes
from kernels_pallas.index_topk.lanes import Global, Scalar
from kernels_pallas.mosaic import stably_named

WARPGROUP = 128


class StoreLanes(lanes.Lanes):
    """Emits the code of one thread."""

    # Values.

    # To 2 ulps. What rounds correctly has a branch for its rare cases, which the others around it wait for.

    def reciprocal(self, a: Scalar) -> Scalar:
        return self._real("rcp.approx.f32 $0, $1;", a)

    def inverse_root(self, a: Scalar) -> Scalar:
        return self._real("rsqrt.approx.f32 $0, $1;", a)

    def power_of_two(self, a: Scalar) -> Scalar:
        return self._real("ex2.approx.f32 $0, $1;", a)

    def _real(self, text: str, a: Scalar) -> Scalar:
        return Scalar(llvm.inline_asm(ir.F32Type.get(), [a.value], text, "=f,f", has_side_effects=False))

    def bf16_pair(self, low: Scalar, high: Scalar) -> Scalar:
        """Two fp32 rounded to bf16, the first in the lower half."""
        i32 = ir.IntegerType.get_signless(32)
        text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return Scalar(llvm.inline_asm(i32, [low.value, high.value], text, "=r,f,f", has_side_effects=False))

    # Memory.

    def either(self, condition: Scalar, yes: Global, no: Global) -> Global:
        """A place that this thread reads."""
        return Global(arith.select(condition.value, yes.address, no.address), yes.kind)

    def store_elements(self, memory: Global, index: Scalar, values: Sequence[Scalar]) -> None:
        """One, two or four elements of 32 bits at an index that their number divides, in one access."""
        self._store(memory._pointer(index), values, 4 * len(values))

    def store_bytes(self, memory: Global, record: Scalar, size: int, offset: Scalar, words: Sequence[Scalar]) -> None:
        """One or two words at byte `offset` of a record of `size` bytes; the words' size divides the address."""
        self._store(self._byte(memory, record, size, offset), words, 4 * len(words))

    def store_part(self, memory: Global, record: Scalar, size: int, offset: Scalar, value: Scalar, bits: int) -> None:
        """The lowest 8 or 16 bits of a word at byte `offset` of a record."""
        part = arith.trunci(ir.IntegerType.get_signless(bits), value.value)
        llvm.store(part, self._byte(memory, record, size, offset), alignment=bits // 8)

    def _byte(self, memory: Global, record: Scalar, size: int, offset: Scalar) -> ir.Value:
        address = Global(memory._moved(record, size), memory.kind)._moved(offset, 1)
        return llvm.inttoptr(llvm.PointerType.get(1), address)

    @staticmethod
    def _store(pointer: ir.Value, values: Sequence[Scalar], alignment: int) -> None:
        if len(values) == 1:
            llvm.store(values[0].value, pointer, alignment=alignment)
            return
        vector = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].value.type))
        for i, value in enumerate(values):
            at = mgpu.c(i, ir.IntegerType.get_signless(32))
            vector = llvm.insertelement(vector, value.value, at)
        llvm.store(vector, pointer, alignment=alignment)


def run(
    body: Callable[[Any, list[Any]], None],
    name: str,
    blocks: int,
    warpgroups: int,
    inputs: Sequence[Array],
    pools: Sequence[Array],
    out_type: Sequence[Any] = (),
) -> tuple[list[Array], list[Array]]:
    """Launches body(machine, memory of inputs, pools and outputs) on a grid of blocks: outputs, and the pools after it.

    The pools are changed in place where XLA need not keep them.
    """
    arrays = (*inputs, *pools, *out_type)

    def kernel_body(*references: Any) -> None:
        def emit(_: Any, *refs: Any) -> None:
            memory = [lanes.global_memory(r, real=a.dtype == jnp.float32) for r, a in zip(refs, arrays, strict=True)]
            body(StoreLanes(WARPGROUP * warpgroups), memory)

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(references))(emit)(*references)

    kernel = plgpu.kernel(
        stably_named(kernel_body),
        out_type=tuple(out_type),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
    )
    refs = [jax.new_ref(pool) for pool in pools]
    # A kernel takes outputs behind its operands: a pool that is operand and output at once is the former.
    made = kernel(*inputs, *refs)
    return list(made), [jax.freeze(ref) for ref in refs]
