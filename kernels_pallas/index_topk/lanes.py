"""One thread's view of a CUDA block: the vocabulary in which the Hopper kernels of this folder are written.

A kernel is a Python function of a `Lanes` and of addresses. This machine emits MLIR from inside `plgpu.inline_mgpu`;
the tests have another one that computes the same kernel with numpy, all threads of a block in lock step, because
Pallas does not interpret inlined code. Scalars are i32, f32 or i1; shifts to the right are logical, comparisons of
integers signed. Shared memory is addressed in bytes by an i32, global memory by `Global`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf
from jaxlib.mlir.dialects import math as math_dialect

WARP = 32
EVERYONE = 0xFFFFFFFF
EVICT_FIRST = 0x12F0000000000000  # the policy that createpolicy.fractional gives for all of a copy


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _constant(value: float, kind: ir.Type) -> ir.Value:
    if isinstance(kind, ir.IntegerType):
        width = ir.IntegerType(kind).width
        value = int(value) & (2**width - 1)
        if width > 1 and value >= 2 ** (width - 1):
            value -= 2**width
    return mgpu.c(value, kind)


class Scalar:
    """An i32, f32 or i1 of each thread."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    @property
    def is_float(self) -> bool:
        return isinstance(self.value.type, ir.F32Type)

    def _operand(self, other: Scalar | float) -> ir.Value:
        return other.value if isinstance(other, Scalar) else _constant(other, self.value.type)

    def _arith(self, other: Scalar | float, integer: Any, real: Any) -> Scalar:
        return Scalar((real if self.is_float else integer)(self.value, self._operand(other)))

    def __add__(self, other: Scalar | float) -> Scalar:
        return self._arith(other, arith.addi, arith.addf)

    def __sub__(self, other: Scalar | float) -> Scalar:
        return self._arith(other, arith.subi, arith.subf)

    def __mul__(self, other: Scalar | float) -> Scalar:
        return self._arith(other, arith.muli, arith.mulf)

    def __and__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.andi(self.value, self._operand(other)))

    def __or__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.ori(self.value, self._operand(other)))

    def __xor__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.xori(self.value, self._operand(other)))

    def __lshift__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.shli(self.value, self._operand(other)))

    def __rshift__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.shrui(self.value, self._operand(other)))

    def sign_fill(self) -> Scalar:
        """-1 where negative, else 0."""
        return Scalar(arith.shrsi(self.value, _constant(31, self.value.type)))

    def divided(self, by: int) -> Scalar:
        """Unsigned quotient by a constant."""
        return Scalar(arith.divui(self.value, _constant(by, self.value.type)))

    def _compare(self, other: Scalar | float, predicate: arith.CmpIPredicate) -> Scalar:
        return Scalar(arith.cmpi(predicate, self.value, self._operand(other)))

    def __lt__(self, other: Scalar | int) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.slt)

    def __gt__(self, other: Scalar | int) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.sgt)

    def __ge__(self, other: Scalar | int) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.sge)

    def below(self, other: Scalar | int) -> Scalar:
        """Less, both unsigned."""
        return self._compare(other, arith.CmpIPredicate.ult)

    def equals(self, other: Scalar | int) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.eq)

    def at_most(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.minsi(self.value, self._operand(other)))

    def at_least(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.maxsi(self.value, self._operand(other)))


class Global:
    """A pointer into global memory; `load`, `store` and `row` count 32-bit elements."""

    def __init__(self, address: ir.Value, kind: ir.Type) -> None:
        self.address, self.kind = address, kind

    def row(self, index: Scalar, size: int) -> Global:
        return Global(self._moved(index, 4 * size), self.kind)

    def _moved(self, index: Scalar, size: int) -> ir.Value:
        flags = llvm.IntegerOverflowFlags.none
        offset = llvm.mul(arith.extsi(_i64(), index.value), _constant(size, _i64()), overflow_flags=flags)
        return llvm.add(self.address, offset, overflow_flags=flags)

    def _pointer(self, index: Scalar) -> ir.Value:
        return llvm.inttoptr(llvm.PointerType.get(1), self._moved(index, 4))

    def load(self, index: Scalar) -> Scalar:
        return Scalar(llvm.load(self.kind, self._pointer(index), alignment=4))

    def load4(self, index: Scalar) -> list[Scalar]:
        """Four elements at an index that 4 divides, in one access."""
        return _unpacked(llvm.load(ir.VectorType.get((4,), self.kind), self._pointer(index), alignment=16))

    def store(self, index: Scalar, value: Scalar) -> None:
        llvm.store(value.value, self._pointer(index), alignment=4)


def _unpacked(vector: ir.Value) -> list[Scalar]:
    count = ir.VectorType(vector.type).shape[0]
    return [Scalar(llvm.extractelement(vector, _constant(i, _i32()))) for i in range(count)]


class Lanes:
    """Emits the code of one thread. num_threads: of the block."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    # Where the thread is.

    def thread(self) -> Scalar:
        return Scalar(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))

    def block(self) -> Scalar:
        return Scalar(arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x)))

    # Values.

    def integer(self, value: int) -> Scalar:
        return Scalar(_constant(value, _i32()))

    def real(self, value: float) -> Scalar:
        return Scalar(_constant(value, ir.F32Type.get()))

    def select(self, condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
        return Scalar(arith.select(condition.value, yes.value, no.value))

    def as_real(self, bits: Scalar) -> Scalar:
        return Scalar(arith.bitcast(ir.F32Type.get(), bits.value))

    def as_bits(self, real: Scalar) -> Scalar:
        return Scalar(arith.bitcast(_i32(), real.value))

    def flag(self, condition: Scalar) -> Scalar:
        return Scalar(arith.extui(_i32(), condition.value))

    def fma(self, a: Scalar, b: Scalar, c: Scalar) -> Scalar:
        return Scalar(math_dialect.fma(a.value, b.value, c.value))

    def magnitude(self, x: Scalar) -> Scalar:
        return Scalar(math_dialect.absf(x.value))

    def larger(self, a: Scalar, b: Scalar) -> Scalar:
        return Scalar(arith.maxnumf(a.value, b.value))

    def leading_zeros(self, x: Scalar) -> Scalar:
        return Scalar(math_dialect.ctlz(x.value))

    def product_bf16x2(self, a: Scalar, b: Scalar) -> Scalar:
        return self._ptx("mul.rn.bf16x2 $0, $1, $2;", a, b)

    def e4m3_pair(self, low: Scalar, high: Scalar) -> Scalar:
        """Two fp32 as e4m3 in the lowest 16 bits."""
        text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }"
        values = [low.value, high.value]
        return Scalar(llvm.inline_asm(_i32(), values, text, "=r,f,f", has_side_effects=False))

    def _ptx(self, text: str, *arguments: Scalar) -> Scalar:
        constraints = ",".join(["=r", *("r" for _ in arguments)])
        values = [a.value for a in arguments]
        return Scalar(llvm.inline_asm(_i32(), values, text, constraints, has_side_effects=False))

    def _effect(self, text: str, constraints: str, *arguments: ir.Value) -> None:
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, arguments, text, constraints, has_side_effects=True, convergent=True)

    # Across the lanes of a warp.

    def _shuffle(self, x: Scalar, distance: int, kind: nvvm.ShflKind, clamp: int) -> Scalar:
        everyone, i32 = _constant(EVERYONE, _i32()), _i32()
        moved = nvvm.shfl_sync(everyone, x.value, _constant(distance, i32), _constant(clamp, i32), kind)
        return Scalar(moved)

    def swap(self, x: Scalar, distance: int) -> Scalar:
        """x of the lane whose number differs in the bits of `distance`."""
        return self._shuffle(x, distance, nvvm.ShflKind.bfly, 31)

    def from_below(self, x: Scalar, distance: int) -> Scalar:
        """x of the lane `distance` below; the own one in the lowest lanes."""
        return self._shuffle(x, distance, nvvm.ShflKind.up, 0)

    def _reduce(self, x: Scalar, kind: nvvm.ReductionKind) -> Scalar:
        return Scalar(nvvm.redux_sync(x.value, kind, _constant(EVERYONE, _i32())))

    def warp_sum(self, x: Scalar) -> Scalar:
        return self._reduce(x, nvvm.ReductionKind.ADD)

    def warp_max(self, x: Scalar) -> Scalar:
        return self._reduce(x, nvvm.ReductionKind.MAX)

    def warp_min(self, x: Scalar) -> Scalar:
        return self._reduce(x, nvvm.ReductionKind.MIN)

    # Shared memory.

    def _shared(self, address: Scalar, offset: int) -> ir.Value:
        pointer = llvm.inttoptr(llvm.PointerType.get(3), address.value)
        if not offset:
            return pointer
        i8 = ir.IntegerType.get_signless(8)
        return llvm.getelementptr(pointer.type, pointer, [], [offset], i8, llvm.GEPNoWrapFlags.none)

    def load_shared(self, address: Scalar, offset: int = 0) -> Scalar:
        return Scalar(llvm.load(_i32(), self._shared(address, offset), alignment=4))

    def load_shared2(self, address: Scalar, offset: int = 0) -> list[Scalar]:
        return self._load_words(address, offset, 2)

    def load_shared4(self, address: Scalar, offset: int = 0) -> list[Scalar]:
        return self._load_words(address, offset, 4)

    def _load_words(self, address: Scalar, offset: int, count: int) -> list[Scalar]:
        kind = ir.VectorType.get((count,), _i32())
        return _unpacked(llvm.load(kind, self._shared(address, offset), alignment=4 * count))

    def load_shared_byte(self, address: Scalar, offset: int = 0) -> Scalar:
        byte = llvm.load(ir.IntegerType.get_signless(8), self._shared(address, offset), alignment=1)
        return Scalar(arith.extui(_i32(), byte))

    def store_shared(self, address: Scalar, value: Scalar, offset: int = 0) -> None:
        llvm.store(value.value, self._shared(address, offset), alignment=4)

    def store_shared4(self, address: Scalar, values: Sequence[Scalar]) -> None:
        kind = ir.VectorType.get((4,), _i32())
        packed = llvm.mlir_undef(kind)
        for i, value in enumerate(values):
            packed = llvm.insertelement(packed, value.value, _constant(i, _i32()))
        llvm.store(packed, self._shared(address, 0), alignment=16)

    def count_shared(self, address: Scalar, condition: Scalar) -> None:
        """Adds 1 to the word at `address` where the condition holds, atomically in the block."""
        self._effect("@$1 red.shared::cta.add.u32 [$0], 1;", "r,b", address.value, condition.value)

    def sync(self) -> None:
        """Barrier of the block."""
        self._effect(f"bar.sync 0, {self.num_threads};", "")

    # Bulk copies into shared memory, counted by barriers of 8 bytes.

    def init_barrier(self, barrier: Scalar) -> None:
        self._effect("mbarrier.init.shared::cta.b64 [$0], 1;", "r", barrier.value)

    def publish(self) -> None:
        """Makes this thread's writes to shared memory visible to copies and products."""
        self._effect("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", "")

    def expect(self, barrier: Scalar, size: int) -> None:
        self._effect(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", "r", barrier.value)

    def wait(self, barrier: Scalar, parity: Scalar) -> None:
        nvvm.mbarrier_try_wait_parity(
            llvm.inttoptr(llvm.PointerType.get(3), barrier.value), parity.value, _constant(10_000_000, _i32())
        )

    def copy(
        self, target: Scalar, source: Global, index: Scalar, stride: int, size: int, barrier: Scalar, once: bool
    ) -> None:
        """`size` bytes from byte index * stride of `source`; 16 divides both and the addresses.

        once: nobody reads them again, so that they leave L2 first.
        """
        operands = [target.value, source._moved(index, stride), barrier.value]
        text, constraints = f"[$0], [$1], {size}, [$2]", "r,l,r"
        if once:
            operands.append(_constant(EVICT_FIRST, _i64()))
            text, constraints = text + ", $3", constraints + ",l"
        hint = ".L2::cache_hint" if once else ""
        self._effect(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} {text};", constraints, *operands
        )

    # Matrix products of the warpgroup.

    def product(
        self, keys: Sequence[Sequence[Scalar]], query: Scalar, columns: int, kind: str, separate: bool = False
    ) -> list[Scalar]:
        """Issues keys [64, K] times a query block [columns, K] -> fp32 fragments, valid after `products_done`.

        keys: per instruction the thread's four registers of A. query: shared address of K-major rows of 128 bytes in
        128-byte swizzle, one block of `columns` rows after the other. kind: "bf16" (16 of K each) or "e4m3" (32).
        separate: a fragment per instruction, one after the other, instead of their sum.
        """
        depth = {"bf16": 16, "e4m3": 32}[kind]
        size = columns // 2 * (len(keys) if separate else 1)
        descriptor = size + 4 * len(keys)
        transposed = ", 0" if kind == "bf16" else ""
        text = ["{ .reg .pred p; .reg .b64 d; wgmma.fence.sync.aligned; setp.ne.b32 p, 1, 1;"]
        for step in range(len(keys)):
            # 32 bytes of K a step; after 128 the next block. In the descriptor addresses count 16 bytes.
            advance = step % 4 * 2 + step // 4 * columns * 8
            first = step * columns // 2 if separate else 0
            results = ", ".join(f"${first + i}" for i in range(columns // 2))
            registers = ", ".join(f"${size + 4 * step + i}" for i in range(4))
            text.append(f"add.s64 d, ${descriptor}, {advance};")
            text.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} "
                f"{{{results}}}, {{{registers}}}, d, p, 1, 1{transposed};"
            )
            if step == 0 and not separate:
                text.append("setp.eq.b32 p, 1, 1;")
        text.append("wgmma.commit_group.sync.aligned; }")
        # Swizzle of 128 bytes (1 << 62), 1,024 bytes from one 8 rows to the next.
        high = (1 << 62) | (64 << 32) | (1 << 16)
        start = arith.ori(arith.extui(_i64(), (query >> 4).value), _constant(high, _i64()))
        flat = [register.value for step in keys for register in step]
        return self._fragments(" ".join(text), [*flat, start], ["r"] * len(flat) + ["l"], size)

    def _fragments(
        self, text: str, operands: Sequence[ir.Value], constraints: Sequence[str], size: int
    ) -> list[Scalar]:
        real = ir.F32Type.get()
        out = llvm.inline_asm(
            llvm.StructType.get_literal([real] * size),
            operands,
            text,
            ",".join([*["=f"] * size, *constraints]),
            has_side_effects=True,
            convergent=True,
        )
        return [Scalar(llvm.extractvalue(real, out, [i])) for i in range(size)]

    def products_done(self, fragments: Sequence[Scalar], in_flight: int) -> list[Scalar]:
        """`fragments` once no more than `in_flight` later products are outstanding."""
        size = len(fragments)
        tied = [str(i) for i in range(size)]
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        return self._fragments(text, [f.value for f in fragments], tied, size)

    # Control flow.

    @contextlib.contextmanager
    def when(self, condition: Scalar) -> Iterator[None]:
        with mgpu.when(condition.value):
            yield

    def loop(
        self, count: Scalar, carry: Sequence[Scalar], body: Callable[[Scalar, list[Scalar]], Sequence[Scalar]]
    ) -> list[Scalar]:
        """body(i, carry) for i below `count`, which is the same in all threads."""

        def step(i: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            return [x.value for x in body(Scalar(i), [Scalar(v) for v in values])]

        return [Scalar(v) for v in mgpu.fori(count.value, [c.value for c in carry])(step).results]

    def repeat(
        self,
        carry: Sequence[Scalar],
        more: Callable[[list[Scalar]], Scalar],
        body: Callable[[list[Scalar]], Sequence[Scalar]],
    ) -> list[Scalar]:
        """body(carry) while more(carry), which is the same in all threads."""
        types = [c.value.type for c in carry]
        op = scf.WhileOp(types, [c.value for c in carry])
        before = op.before.blocks.append(*types)
        with ir.InsertionPoint(before):
            scf.condition(more([Scalar(a) for a in before.arguments]).value, list(before.arguments))
        after = op.after.blocks.append(*types)
        with ir.InsertionPoint(after):
            scf.yield_([x.value for x in body([Scalar(a) for a in after.arguments])])
        return [Scalar(r) for r in op.results]


def shared_address(ref: ir.Value) -> Scalar:
    """Byte address of a shared memory reference."""
    return Scalar(llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref)))


def global_memory(ref: ir.Value, *, real: bool = False) -> Global:
    """A global memory reference as fp32 or 32-bit words."""
    return Global(llvm.ptrtoint(_i64(), mgpu.utils.memref_ptr(ref)), ir.F32Type.get() if real else _i32())
