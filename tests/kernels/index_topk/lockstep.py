"""A CUDA block in numpy: the machine of `kernels_pallas.index_topk.lanes`, all threads in lock step.

A scalar is an array over the block's threads. Copies and products happen at once, barriers do nothing; what the
hardware defines is followed bit by bit: fragments of the matrix instructions, the swizzle of their operand, the
order of lanes. Reading what was never written gives NaN or canary words, writing outside an array raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kernels_pallas.index_topk.launch import placed

CANARY = 0x7FABCDEF
# By bits: in the threads that run callbacks XLA has subnormal operands taken as zero.
with np.errstate(invalid="ignore"):
    BF16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


class Scalar:
    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def _other(self, other: Any) -> Any:
        if isinstance(other, Scalar):
            return other.value
        if self.value.dtype == np.int32:
            return np.array(other & 0xFFFFFFFF, np.uint32).view(np.int32)
        return self.value.dtype.type(other)

    def __add__(self, other: Any) -> Scalar:
        return Scalar(self.value + self._other(other))

    def __sub__(self, other: Any) -> Scalar:
        return Scalar(self.value - self._other(other))

    def __mul__(self, other: Any) -> Scalar:
        return Scalar(self.value * self._other(other))

    def __and__(self, other: Any) -> Scalar:
        return Scalar(self.value & self._other(other))

    def __or__(self, other: Any) -> Scalar:
        return Scalar(self.value | self._other(other))

    def __xor__(self, other: Any) -> Scalar:
        return Scalar(self.value ^ self._other(other))

    def __lshift__(self, other: Any) -> Scalar:
        return Scalar((self.value.view(np.uint32) << self._amount(other)).view(np.int32))

    def __rshift__(self, other: Any) -> Scalar:
        return Scalar((self.value.view(np.uint32) >> self._amount(other)).view(np.int32))

    def _amount(self, other: Any) -> np.ndarray:
        amount = np.broadcast_to(np.asarray(self._other(other)), self.value.shape).astype(np.uint32)
        assert (amount < 32).all(), "a shift by 32 or more is undefined"
        return amount

    def sign_fill(self) -> Scalar:
        return Scalar(self.value >> 31)

    def divided(self, by: int) -> Scalar:
        return Scalar((self.value.view(np.uint32) // np.uint32(by)).view(np.int32))

    def __lt__(self, other: Any) -> Scalar:
        return Scalar(self.value < self._other(other))

    def __gt__(self, other: Any) -> Scalar:
        return Scalar(self.value > self._other(other))

    def __ge__(self, other: Any) -> Scalar:
        return Scalar(self.value >= self._other(other))

    def below(self, other: Any) -> Scalar:
        bound = np.asarray(self._other(other), np.int32)
        return Scalar(self.value.view(np.uint32) < bound.view(np.uint32))

    def equals(self, other: Any) -> Scalar:
        return Scalar(self.value == self._other(other))

    def at_most(self, other: Any) -> Scalar:
        return Scalar(np.minimum(self.value, self._other(other)))

    def at_least(self, other: Any) -> Scalar:
        return Scalar(np.maximum(self.value, self._other(other)))


class Global:
    """A flat array of 32-bit elements, or of bytes (`copy` alone reads those)."""

    def __init__(self, machine: Machine, data: np.ndarray, start: np.ndarray | int = 0) -> None:
        self.machine, self.data, self.start = machine, data, start

    def row(self, index: Scalar, size: int) -> Global:
        return Global(self.machine, self.data, self.start + index.value.astype(np.int64) * size)

    def _at(self, index: Scalar) -> np.ndarray:
        at = self.start + index.value.astype(np.int64)
        live = at[self.machine.mask]
        assert ((live >= 0) & (live < self.data.size)).all(), "access outside of an array"
        return np.where(self.machine.mask, at, 0)

    def load(self, index: Scalar) -> Scalar:
        return Scalar(self.data[self._at(index)])

    def load4(self, index: Scalar) -> list[Scalar]:
        assert (self._at(index) % 4 == 0).all(), "misaligned"
        return [self.load(index + i) for i in range(4)]

    def store(self, index: Scalar, value: Scalar) -> None:
        mask, at = self.machine.mask, self._at(index)
        self.data[at[mask]] = np.broadcast_to(value.value, mask.shape)[mask]


class Machine:
    def __init__(self, num_threads: int, block: int, shared_bytes: int = 1 << 18) -> None:
        self.num_threads, self.number = num_threads, block
        self.mask = np.ones(num_threads, bool)
        self.shared = np.full(shared_bytes // 4, CANARY, np.uint32).view(np.uint8)
        self.arrived: dict[int, int] = {}
        self.expected: dict[int, int] = {}

    def _scalar(self, value: Any, dtype: Any) -> Scalar:
        return Scalar(np.full(self.num_threads, value, dtype))

    def thread(self) -> Scalar:
        return Scalar(np.arange(self.num_threads, dtype=np.int32))

    def block(self) -> Scalar:
        return self._scalar(self.number, np.int32)

    def integer(self, value: int) -> Scalar:
        return self._scalar(np.array(value & 0xFFFFFFFF, np.uint32).view(np.int32), np.int32)

    def real(self, value: float) -> Scalar:
        return self._scalar(value, np.float32)

    def select(self, condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
        return Scalar(np.where(condition.value, yes.value, no.value))

    def as_real(self, bits: Scalar) -> Scalar:
        return Scalar(bits.value.view(np.float32))

    def as_bits(self, real: Scalar) -> Scalar:
        return Scalar(real.value.view(np.int32))

    def flag(self, condition: Scalar) -> Scalar:
        return Scalar(condition.value.astype(np.int32))

    def fma(self, a: Scalar, b: Scalar, c: Scalar) -> Scalar:
        wide = a.value.astype(np.float64) * b.value + c.value
        return Scalar(wide.astype(np.float32))

    def magnitude(self, x: Scalar) -> Scalar:
        return Scalar(np.abs(x.value))

    def larger(self, a: Scalar, b: Scalar) -> Scalar:
        return Scalar(np.fmax(a.value, b.value))

    def leading_zeros(self, x: Scalar) -> Scalar:
        bits = np.frexp(x.value.view(np.uint32).astype(np.float64))[1]
        return Scalar((32 - bits).astype(np.int32))

    def product_bf16x2(self, a: Scalar, b: Scalar) -> Scalar:
        x, y = (BF16[halves(v.value.view(np.uint32), np.uint16)] for v in (a, b))
        return Scalar((x * y).astype(ml_dtypes.bfloat16).view(np.int32)[:, 0])

    def e4m3_pair(self, low: Scalar, high: Scalar) -> Scalar:
        a, b = (x.value.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32) for x in (low, high))
        return Scalar(a | (b << 8))

    def _lanes(self, x: Scalar) -> np.ndarray:
        assert self.mask.reshape(-1, 32).all(1)[self.mask.reshape(-1, 32).any(1)].all(), "a warp is divided"
        return x.value.reshape(-1, 32)

    def swap(self, x: Scalar, distance: int) -> Scalar:
        return Scalar(self._lanes(x)[:, np.arange(32) ^ distance].reshape(-1))

    def from_below(self, x: Scalar, distance: int) -> Scalar:
        lane = np.arange(32)
        return Scalar(self._lanes(x)[:, np.where(lane >= distance, lane - distance, lane)].reshape(-1))

    def _reduce(self, x: Scalar, kind: Any) -> Scalar:
        return Scalar(np.repeat(kind.reduce(self._lanes(x), axis=1, dtype=np.int32), 32))

    def warp_sum(self, x: Scalar) -> Scalar:
        return self._reduce(x, np.add)

    def warp_max(self, x: Scalar) -> Scalar:
        return self._reduce(x, np.maximum)

    def warp_min(self, x: Scalar) -> Scalar:
        return self._reduce(x, np.minimum)

    def sync(self) -> None:
        assert self.mask.all() or not self.mask.any(), "a barrier that some threads do not reach"

    def _word(self, address: Scalar, offset: int, width: int = 1) -> np.ndarray:
        at = address.value + offset
        assert (at[self.mask] % (4 * width) == 0).all(), "misaligned"
        return np.where(self.mask, at, 0) // 4

    def load_shared(self, address: Scalar, offset: int = 0) -> Scalar:
        return Scalar(self.shared.view(np.int32)[self._word(address, offset)])

    def load_shared2(self, address: Scalar, offset: int = 0) -> list[Scalar]:
        return self._load_words(address, offset, 2)

    def load_shared4(self, address: Scalar, offset: int = 0) -> list[Scalar]:
        return self._load_words(address, offset, 4)

    def _load_words(self, address: Scalar, offset: int, count: int) -> list[Scalar]:
        at = self._word(address, offset, count)
        return [Scalar(self.shared.view(np.int32)[at + i]) for i in range(count)]

    def load_shared_byte(self, address: Scalar, offset: int = 0) -> Scalar:
        return Scalar(self.shared[np.where(self.mask, address.value + offset, 0)].astype(np.int32))

    def store_shared(self, address: Scalar, value: Scalar, offset: int = 0) -> None:
        self.shared.view(np.int32)[self._word(address, offset)[self.mask]] = value.value[self.mask]

    def store_shared4(self, address: Scalar, values: Sequence[Scalar]) -> None:
        at = self._word(address, 0, 4)
        for i, value in enumerate(values):
            self.shared.view(np.int32)[(at + i)[self.mask]] = value.value.view(np.int32)[self.mask]

    def count_shared(self, address: Scalar, condition: Scalar) -> None:
        at = self._word(address, 0)
        np.add.at(self.shared.view(np.int32), at[self.mask & condition.value], 1)

    def init_barrier(self, barrier: Scalar) -> None:
        for at in barrier.value[self.mask].tolist():
            self.arrived[at] = self.expected[at] = 0

    def publish(self) -> None:
        pass

    def expect(self, barrier: Scalar, size: int) -> None:
        for at in barrier.value[self.mask].tolist():
            self.expected[at] += size

    def wait(self, barrier: Scalar, parity: Scalar) -> None:
        for at in set(barrier.value[self.mask].tolist()):
            assert self.arrived[at] == self.expected[at] > 0, "a wait that does not end"
            self.arrived[at] = self.expected[at] = 0

    def copy(
        self, target: Scalar, source: Global, index: Scalar, stride: int, size: int, barrier: Scalar, once: bool
    ) -> None:
        for thread in np.flatnonzero(self.mask):
            begin, to = int(index.value[thread]) * stride, int(target.value[thread])
            assert begin % 16 == to % 16 == size % 16 == 0, "misaligned"
            assert begin >= 0 and begin + size <= source.data.size, "copy outside of the pool"
            self.shared[to : to + size] = source.data[begin : begin + size]
            self.arrived[int(barrier.value[thread])] += size

    def product(
        self, keys: Sequence[Sequence[Scalar]], query: Scalar, columns: int, kind: str, separate: bool = False
    ) -> list[Scalar]:
        """See `lanes.Lanes.product`; PTX ISA, register fragments of wgmma."""
        groups = [
            self._product([[r.value[at : at + 128] for r in step] for step in keys], query, columns, kind, separate)
            for at in range(0, self.num_threads, 128)
        ]
        return [Scalar(np.concatenate(parts)) for parts in zip(*groups)]

    def _product(
        self, keys: Sequence[Sequence[np.ndarray]], query: Scalar, columns: int, kind: str, separate: bool
    ) -> list[np.ndarray]:
        size = {"bf16": 2, "e4m3": 1}[kind]
        dtype = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}[kind]
        thread = np.arange(128)
        row, corner = thread // 32 * 16 + thread % 32 // 4, thread % 4
        begin, parts = int(query.value[0]), []
        for step, registers in enumerate(keys):
            a = np.zeros((64, 32 // size), dtype)
            for i, register in enumerate(registers):
                values = halves(register.view(np.uint32), dtype)
                first = 4 // size * corner + (i // 2) * (16 // size)
                for t in range(4 // size):
                    a[row + 8 * (i % 2), first + t] = values[:, t]
            byte = begin % 128 + np.arange(32)[None, :] + step % 4 * 32  # the swizzle goes by addresses
            head = np.arange(columns)[:, None]
            physical = head * 128 + ((byte // 16 ^ head % 8) * 16 + byte % 16)
            b = self.shared[begin // 128 * 128 + step // 4 * columns * 128 + physical].view(dtype)
            parts.append(a.astype(np.float64) @ b.astype(np.float64).T)
        sums = parts if separate else [np.sum(parts, axis=0)]
        return [
            total[row + 8 * h, 8 * j + 2 * corner + t].astype(np.float32)
            for total in sums
            for j in range(columns // 8)
            for h in range(2)
            for t in range(2)
        ]

    def products_done(self, fragments: Sequence[Scalar], in_flight: int) -> list[Scalar]:
        return list(fragments)

    @contextlib.contextmanager
    def when(self, condition: Scalar) -> Iterator[None]:
        before = self.mask
        self.mask = before & condition.value
        try:
            yield
        finally:
            self.mask = before

    def loop(self, count: Scalar, carry: Sequence[Scalar], body: Callable[..., Any]) -> list[Scalar]:
        values, before = list(carry), self.mask
        bound = np.where(before, count.value, 0)
        warps = bound.reshape(-1, 128)
        assert (warps == warps[:, :1]).all(), "a bound that differs in a warpgroup"
        for i in range(bound.max()):
            self.mask = before & (i < bound)
            out = body(self._scalar(i, np.int32), values)
            values = [Scalar(np.where(self.mask, new.value, old.value)) for new, old in zip(out, values)]
        self.mask = before
        return values

    def repeat(self, carry: Sequence[Scalar], more: Callable[..., Any], body: Callable[..., Any]) -> list[Scalar]:
        values = list(carry)
        while (condition := more(values).value)[self.mask].any():
            assert condition[self.mask].all(), "a condition that differs between threads"
            values = list(body(values))
        return values


def halves(words: np.ndarray, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(words)[:, None].view(dtype)


def launch(
    body: Any, name: str, out_type: Any, scratch: Any, blocks: int, threads: int, *arguments: Any
) -> list[jax.Array]:
    """In place of `launch.run`: every block by itself, outputs NaN or -77 before."""

    def run(*arrays: Any) -> list[np.ndarray]:
        out = [np.full(o.shape, np.nan if o.dtype == np.float32 else -77, o.dtype) for o in out_type]
        addresses = {key: 1024 + at for key, at in placed(scratch).items()}
        flat = [_elements(np.asarray(a)) for a in arrays] + [o.reshape(-1) for o in out]
        for block in range(blocks):
            machine = Machine(threads, block, addresses["end"])
            shared = {key: machine.integer(value) for key, value in addresses.items()}
            body(machine, [Global(machine, data) for data in flat], shared)
        return out

    return list(jax.pure_callback(run, out_type, *arguments))


def _elements(array: np.ndarray) -> np.ndarray:
    """fp32 and bytes as they are, anything else as 32-bit words."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat if flat.dtype in (np.float32, np.uint8) else flat.view(np.int32)
