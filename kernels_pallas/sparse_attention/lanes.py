"""What one thread of a warpgroup does, written once: emitted as machine code, or run on arrays of all 128 threads.

A kernel passes a function `body(lanes, refs, scalars, words, accumulators)`. `call` either inlines it through Mosaic
GPU, where every word is a register of the running thread, or, in interpret mode, calls it once with uint32 [128].
The operators & | ^ << >> + * on words are those of unsigned 32-bit integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

THREADS = 128
MATRIX = (64, 128)  # of bfloat16 in shared memory, as WGMMA reads it
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
MATRIX_BYTES, TILE_ROW_BYTES, TILE_BYTES = 64 * 128 * 2, 8 * 128 * 2, 8 * 64 * 2
MATRICES = 4  # hold 512 channels


def call(
    body: Callable[..., Any],
    refs: Sequence[Any],
    *,
    scalars: Sequence[Any] = (),
    words: Sequence[Array] = (),
    accumulators: Sequence[Array] = (),
    results: Sequence[int] = (),
    interpret: bool,
) -> list[Array]:
    """Runs body(lanes, refs, scalars, words, accumulators) in all threads of the calling warpgroup.

    refs: whole references to global memory or to bfloat16 [n, 64, 128] in shared memory, stored as TILED. scalars:
    int32. words: what earlier calls returned, each a list of words in the body. accumulators: fp32 [64, 128] of
    matrix products. results: words per thread of each list that the body returns; between calls a list is int32
    [128 * words].
    """
    if interpret:
        lists = [list(lax.bitcast_convert_type(w, jnp.uint32).reshape(-1, THREADS)) for w in words]
        lanes = ArrayLanes()
        out = body(lanes, refs, [jnp.asarray(s).astype(jnp.uint32) for s in scalars], lists, accumulators) or []
        lanes.finish()
        return [lax.bitcast_convert_type(jnp.concatenate(o), jnp.int32) for o in out]

    def carried(n: int) -> Any:
        return plgpu.Layout.WG_STRIDED((THREADS * n,), vec_size=1)

    kinds: list[Any] = [
        plgpu.RefType(TILED if ref.dtype == jnp.bfloat16 and ref.shape[1:] == MATRIX else ()) for ref in refs
    ]
    kinds += [plgpu.Layout.WG_SPLAT(())] * len(scalars) + [carried(w.size // THREADS) for w in words]
    kinds += [plgpu.Layout.WGMMA] * len(accumulators)
    shapes = [plgpu.ShapeDtypeStruct((THREADS * n,), jnp.int32, layout=carried(n)) for n in results]

    @plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=shapes)
    def inline(_: Any, *operands: Any) -> list[FragmentedArray]:
        lanes, values = RegisterLanes(), list(operands)
        memory = [values.pop(0) for _ in refs]
        numbers = [Word(values.pop(0).registers.item()) for _ in scalars]
        lists = [[Word(utils.bitcast(r, lanes.i32)) for r in values.pop(0).registers] for _ in words]
        return [lanes.packed(o) for o in body(lanes, memory, numbers, lists, values) or []]

    return inline(*refs, *[jnp.int32(s) for s in scalars], *words, *accumulators)


def _is_tiled(ref: Any) -> bool:
    return ref.dtype == jnp.bfloat16 and ref.shape[1:] == MATRIX


@dataclasses.dataclass(frozen=True, eq=False)
class Word:
    """A register of 32 bits."""

    value: ir.Value

    def _with(self, other: Any, operation: Callable[..., ir.Value]) -> Word:
        return Word(operation(self.value, constant(other).value))

    def __and__(self, other: Any) -> Word:
        return self._with(other, arith.andi)

    def __or__(self, other: Any) -> Word:
        return self._with(other, arith.ori)

    def __xor__(self, other: Any) -> Word:
        return self._with(other, arith.xori)

    def __lshift__(self, other: Any) -> Word:
        return self._with(other, arith.shli)

    def __rshift__(self, other: Any) -> Word:
        return self._with(other, arith.shrui)

    def __add__(self, other: Any) -> Word:
        return self._with(other, arith.addi)

    def __mul__(self, other: Any) -> Word:
        return self._with(other, arith.muli)


def constant(value: Any) -> Word:
    if isinstance(value, Word):
        return value
    i32, value = ir.IntegerType.get_signless(32), int(value)
    return Word(utils.c(value - (1 << 32) if value >> 31 else value, i32))


class RegisterLanes:
    """Emits the code of one thread."""

    def __init__(self) -> None:
        self.i32, self.i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        # Read anew in every call: addresses kept from one call to the next would spill.
        self.thread = self._ptx("mov.u32 $0, %tid.x;", effects=True)[0] & (THREADS - 1)

    def packed(self, words: Sequence[Word]) -> FragmentedArray:
        vector = ir.VectorType.get((1,), self.i32)
        registers = np.array([utils.bitcast(w.value, vector) for w in words], dtype=object)
        layout = plgpu.Layout.WG_STRIDED((THREADS * len(words),), vec_size=1).to_mgpu()
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    def _ptx(self, text: str, *words: Word | ir.Value | int, count: int = 1, effects: bool = False) -> list[Word]:
        values = [w if isinstance(w, ir.Value) else constant(w).value for w in words]
        out = utils.inline_ptx(text, *values, result_types=[self.i32] * count, has_side_effects=effects)
        return [Word(v) for v in out]

    # Memory. A record is the innermost dimension of a reference to global memory; offsets are bytes. Loads keep their
    # place in the program, ahead of the wait that hides their latency, and take what nobody writes meanwhile.

    def _place(self, ref: Any) -> tuple[ir.Value, int]:
        if isinstance(ref, tuple):
            condition, (a, size), (b, _) = ref[0], self._place(ref[1]), self._place(ref[2])
            return arith.select(condition, a, b), size
        kind = ir.MemRefType(ref.type)
        return llvm.ptrtoint(self.i64, utils.memref_ptr(ref)), kind.shape[-1] * utils.bytewidth(kind.element_type)

    def _address(self, ref: Any, record: Word, offset: Word | int) -> ir.Value:
        base, size = self._place(ref)
        wide = arith.muli(arith.extui(self.i64, record.value), utils.c(size, self.i64))
        return arith.addi(arith.addi(base, wide), arith.extui(self.i64, constant(offset).value))

    def load(self, ref: Any, record: Word, offset: Word | int, count: int) -> list[Word]:
        """`count` words, 1, 2 or 4, aligned. ref may be (condition, a, b): a where it holds, else b."""
        address, vector = self._address(ref, record, offset), "" if count == 1 else f".v{count}"
        outs = ", ".join(f"${i}" for i in range(count))
        outs = outs if count == 1 else f"{{{outs}}}"
        return self._ptx(f"ld.global.nc{vector}.b32 {outs}, [${count}];", address, count=count, effects=True)

    def load_part(self, ref: Any, record: Word, offset: Word | int, bits: int) -> Word:
        """8 or 16 bits, zero-extended."""
        address = self._address(ref, record, offset)
        text = f"{{ .reg .u16 t; ld.global.nc.u{bits} t, [$1]; cvt.u32.u16 $0, t; }}"
        return self._ptx(text, address, effects=True)[0]

    def prefetch(
        self, ref: Any, record: Word, offset: Word | int, count: int, condition: ir.Value | None = None
    ) -> None:
        """Has the lines of `count` bytes brought into the L2 cache, where the condition holds."""
        for further in range(0, count, 128):
            address = self._address(ref, record, constant(offset) + further)
            utils.inline_ptx("prefetch.global.L2 [$0];", address, predicate=condition)

    def store_output(
        self, ref: Any, row: Word, part: Word, head: Word, chunk: Word, words: Sequence[Word], width: int
    ) -> None:
        """16 bytes: a chunk in a part of `width` channels of a head; ref [rows, heads, 512] bfloat16."""
        heads = ir.MemRefType(ref.type).shape[1]
        address = self._address(ref, row * heads + head, part * (2 * width) + chunk * 16)
        values = [w.value for w in words]
        utils.inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", address, *values)

    def matrix_address(self, ref: Any, first: Word | int, row: Word, place: Word | int, chunk: Word) -> Word:
        """Of 16 bytes in a row of MATRICES matrices from `first` on, under TILED: chunk 0..7 of 64 columns' tile
        `place`, 0 or more."""
        base, inner, place = Word(llvm.ptrtoint(self.i32, utils.memref_ptr(ref))), row & 7, constant(place)
        tile = (constant(first) + (place >> 1)) * MATRIX_BYTES + (place & 1) * TILE_BYTES + (row >> 3) * TILE_ROW_BYTES
        return base + tile + inner * 128 + ((chunk ^ inner) << 4)

    def store_matrix(self, ref: Any, at: Word, further: int, words: Sequence[Word]) -> None:
        """16 bytes; `further`, 0..3, tiles behind a matrix address of an even (or for 0 and 1 any fitting) place."""
        offset = further // 2 * MATRIX_BYTES + further % 2 * TILE_BYTES
        pointer = llvm.inttoptr(llvm.PointerType.get(3), (at + offset).value)
        value = llvm.mlir_undef(ir.VectorType.get((4,), self.i32))
        for i, word in enumerate(words):
            value = llvm.insertelement(value, word.value, constant(i).value)
        llvm.store(value, pointer, alignment=16)

    # Arithmetic.

    def permute(self, a: Word, b: Word | int, selector: int) -> Word:
        """Four of the eight bytes of (a, b), chosen by the hexadecimal digits of the selector, lowest byte first."""
        return self._ptx("prmt.b32 $0, $1, $2, $3;", a, b, selector)[0]

    def times(self, a: Word, b: Word | int) -> Word:
        """Products of two pairs of bfloat16; subnormals count."""
        return self._ptx("mul.rn.bf16x2 $0, $1, $2;", a, b)[0]

    def negative(self, a: Word) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.slt, a.value, constant(0).value)

    def less(self, a: Word, b: Word | int) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.ult, a.value, constant(b).value)

    def where(self, condition: ir.Value, a: Word | int, b: Word | int) -> Word:
        return Word(arith.select(condition, constant(a).value, constant(b).value))

    def pick(self, a: Word, lane: Word) -> Word:
        """The word of this lane, 0..31, of the thread's warp."""
        everyone, clamp = constant(0xFFFFFFFF).value, constant(31).value
        return Word(nvvm.shfl_sync(everyone, a.value, lane.value, clamp, nvvm.ShflKind.idx))

    def exchange(self, a: Word, bit: int) -> Word:
        """The word of the thread whose number differs in this bit (1, 2, 4, 8 or 16)."""
        return Word(utils.shfl_bfly(a.value, bit))

    def _pair(self, low: ir.Value, high: ir.Value) -> Word:
        return self._ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low)[0]

    def accumulated(self, accumulator: FragmentedArray, below: int, chunk: int) -> Word:
        """bfloat16 of columns 8 chunk + 2 (t % 4) + (0, 1) in row 16 (t / 32) + 8 below + t % 32 / 4, t the thread."""
        pair = accumulator.registers[0, chunk, 0, 0, below, 0, 0, 0, 0]
        return self._pair(*(llvm.extractelement(pair, constant(i).value) for i in range(2)))

    def rotate(self, word: Word, cos: Word, sin: Word) -> Word:
        """(a, b) bfloat16 -> (a cos + b sin, b cos - a sin); cos and sin fp32."""
        f32 = ir.F32Type.get()
        a, b, cosine, sine = (utils.bitcast(w.value, f32) for w in (word << 16, word & np.uint32(0xFFFF0000), cos, sin))
        first = arith.addf(arith.mulf(a, cosine), arith.mulf(b, sine))
        return self._pair(first, arith.subf(arith.mulf(b, cosine), arith.mulf(a, sine)))


class ArrayLanes:
    """The same on uint32 [128], one element per thread; what it stores lands at the end of the call."""

    def __init__(self) -> None:
        self.thread = jnp.arange(THREADS, dtype=jnp.uint32)
        self.destination: Any = None
        self.stores: list[tuple[Array, Array, Array]] = []  # row, first column, words [4, 128]

    def finish(self) -> None:
        """Stores of a call fill rows and columns of one region: four matrices, or a part of a row's output."""
        if not self.stores:
            return
        rows, columns, words = (jnp.concatenate(x, axis=-1) for x in zip(*self.stores, strict=True))
        values = lax.bitcast_convert_type(words.T, jnp.bfloat16).reshape(-1, 8)
        at = rows[:, None], columns[:, None] + jnp.arange(8, dtype=jnp.uint32)
        ref, first, part, width = self.destination
        first = first.astype(jnp.int32)
        if part is not None:
            block = jnp.zeros((ref.shape[1], width), jnp.bfloat16).at[at].set(values)
            ref[first, :, pl.ds(part.astype(jnp.int32) * width, width)] = block
            return
        block = jnp.concatenate([ref[first + i] for i in range(MATRICES)], axis=1).at[at].set(values)
        for i, matrix in enumerate(jnp.split(block, MATRICES, axis=1)):
            ref[first + i] = matrix

    def load(self, ref: Any, record: Array, offset: Array | int, count: int) -> list[Array]:
        words = self._bytes(ref, record, offset, 4 * count).reshape(THREADS, count, 4)
        return [*lax.bitcast_convert_type(words, jnp.uint32).T]

    def load_part(self, ref: Any, record: Array, offset: Array | int, bits: int) -> Array:
        parts = self._bytes(ref, record, offset, bits // 8).astype(jnp.uint32)
        return jnp.sum(parts << (8 * jnp.arange(bits // 8, dtype=jnp.uint32)), axis=1, dtype=jnp.uint32)

    def prefetch(self, ref: Any, record: Array, offset: Array | int, count: int, condition: Any = None) -> None:
        """Changes nothing that is computed."""

    def _bytes(self, ref: Any, record: Array, offset: Array | int, count: int) -> Array:
        if isinstance(ref, tuple):
            a, b = (self._bytes(r, record, offset, count) for r in ref[1:])
            return jnp.where(ref[0][:, None], a, b)
        stored = ref[...]
        raw = lax.bitcast_convert_type(stored, jnp.uint8).reshape(-1, stored.shape[-1] * stored.dtype.itemsize)
        at = jnp.broadcast_to(jnp.uint32(offset), THREADS)[:, None] + jnp.arange(count, dtype=jnp.uint32)
        return raw[jnp.broadcast_to(record, THREADS)[:, None], at]

    def store_output(
        self, ref: Any, row: Array, part: Array, head: Array, chunk: Array, words: Sequence[Array], width: int
    ) -> None:
        self.destination = ref, row, part, width
        self.stores.append((head, chunk * 8, jnp.stack(words)))

    def matrix_address(self, ref: Any, first: Array | int, row: Array, place: Array | int, chunk: Array) -> Any:
        self.destination = ref, jnp.uint32(first), None, 0
        return row, jnp.broadcast_to(jnp.uint32(place) * 64 + chunk * 8, THREADS)

    def store_matrix(self, ref: Any, at: Any, further: int, words: Sequence[Array]) -> None:
        self.stores.append((at[0], at[1] + jnp.uint32(64 * further), jnp.stack(words)))

    def permute(self, a: Array, b: Array | int, selector: int) -> Array:
        raw = [w >> (8 * i) & 255 for w in (a, jnp.uint32(b)) for i in range(4)]
        first, *others = (raw[selector >> (4 * i) & 7] << (8 * i) for i in range(4))
        return sum(others, first)

    def times(self, a: Array, b: Array | int) -> Array:
        """Through integers: a CPU drops subnormals."""
        shifts = 16 * jnp.arange(2, dtype=jnp.uint32)[:, None]
        halves = [jnp.uint32(w) >> shifts & 0xFFFF for w in (a, b)]
        exponents = [w >> 7 & 0xFF for w in halves]
        mantissa = [(w & 0x7F) | jnp.where(e > 0, 0x80, 0) for w, e in zip(halves, exponents, strict=True)]
        exponent = sum((jnp.maximum(e, 1) for e in exponents), jnp.uint32(2**32 + 127 - 2 * 134)) << 23
        product = (mantissa[0] * mantissa[1]).astype(jnp.float32) * lax.bitcast_convert_type(exponent, jnp.float32)
        low, high = jnp.where((halves[0] ^ halves[1]) >> 15 > 0, -product, product)
        return self._pair(low, high)

    def negative(self, a: Array) -> Array:
        return a >> 31 != 0

    def less(self, a: Array, b: Array | int) -> Array:
        return a < jnp.uint32(b)

    def where(self, condition: Array, a: Array | int, b: Array | int) -> Array:
        return jnp.where(condition, jnp.uint32(a), jnp.uint32(b))

    def pick(self, a: Array, lane: Array) -> Array:
        return a[(self.thread & 0x60) | lane]

    def exchange(self, a: Array, bit: int) -> Array:
        return a[self.thread ^ bit]

    @staticmethod
    def _pair(low: Array, high: Array) -> Array:
        return lax.bitcast_convert_type(jnp.stack([low, high], axis=-1).astype(jnp.bfloat16), jnp.uint32)

    def accumulated(self, accumulator: Array, below: int, chunk: int) -> Array:
        row = 16 * (self.thread >> 5) + 8 * below + ((self.thread & 31) >> 2)
        column = 8 * chunk + 2 * (self.thread & 3)
        return self._pair(accumulator[row, column], accumulator[row, column + 1])

    def rotate(self, word: Array, cos: Array, sin: Array) -> Array:
        a, b = lax.bitcast_convert_type(word, jnp.bfloat16).astype(jnp.float32).T
        c, s = (lax.bitcast_convert_type(w, jnp.float32) for w in (cos, sin))
        return self._pair(a * c + b * s, b * c - a * s)
