"""The machine of `kernels_pallas.compress_store.lanes` in numpy, all threads of a block in lock step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import lockstep
import ml_dtypes
import numpy as np
from jax import Array
from lockstep import Global, Scalar


class StoreMachine(lockstep.Machine):
    def reciprocal(self, a: Scalar) -> Scalar:
        """As wrong as it may be."""
        return Scalar(np.nextafter(1 / a.value, np.float32(0)))

    def inverse_root(self, a: Scalar) -> Scalar:
        return Scalar(1 / np.sqrt(a.value))

    def power_of_two(self, a: Scalar) -> Scalar:
        return Scalar(np.exp2(a.value))

    def bf16_pair(self, low: Scalar, high: Scalar) -> Scalar:
        pair = np.stack([low.value, high.value], axis=1).astype(ml_dtypes.bfloat16)
        return Scalar(pair.view(np.int32)[:, 0])

    def e4m3_pair(self, low: Scalar, high: Scalar) -> Scalar:
        """Saturates, as the instruction does."""
        return super().e4m3_pair(*(Scalar(np.clip(x.value, -448, 448)) for x in (low, high)))

    def either(self, condition: Scalar, yes: Global, no: Global) -> Global:
        """Of one array, the longer of two behind each other."""
        data = np.concatenate([yes.data, no.data])
        return Global(self, data, np.where(condition.value, yes.start, no.start + yes.data.size))

    def store_elements(self, memory: Global, index: Scalar, values: Sequence[Scalar]) -> None:
        assert (memory._at(index)[self.mask] % len(values) == 0).all(), "misaligned"
        for i, value in enumerate(values):
            memory.store(index + i, value)

    def store_bytes(self, memory: Global, record: Scalar, size: int, offset: Scalar, words: Sequence[Scalar]) -> None:
        for i, word in enumerate(words):
            self._bytes(memory, record, size, offset, word, 4, 4 * i, 4 * len(words))

    def store_part(self, memory: Global, record: Scalar, size: int, offset: Scalar, value: Scalar, bits: int) -> None:
        self._bytes(memory, record, size, offset, value, bits // 8, 0, bits // 8)

    def _bytes(
        self, memory: Global, record: Scalar, size: int, offset: Scalar, word: Scalar, count: int, at: int, align: int
    ) -> None:
        start = record.value.astype(np.int64) * size + offset.value
        live = start[self.mask]
        assert (live % align == 0).all(), "misaligned"
        assert ((live >= 0) & (live + at + count <= memory.data.size)).all(), "store outside of the pool"
        assert ((offset.value[self.mask] >= 0) & (offset.value[self.mask] + at + count <= size)).all()
        for i in range(count):
            memory.data[live + at + i] = (word.value[self.mask] >> (8 * i)) & 255


def run(
    body: Callable[[Any, list[Any]], None],
    name: str,
    blocks: int,
    warpgroups: int,
    inputs: Sequence[Array],
    pools: Sequence[Array],
    out_type: Sequence[Any] = (),
) -> tuple[list[Array], list[Array]]:
    """In place of `lanes.run`: every block by itself, outputs NaN before."""

    def compute(*arrays: Any) -> tuple[np.ndarray, ...]:
        changed = [np.array(a) for a in arrays[len(inputs) :]]
        out = [np.full(o.shape, np.nan, o.dtype) for o in out_type]
        flat = [lockstep._elements(np.asarray(a)) for a in (*arrays[: len(inputs)], *changed, *out)]
        for block in range(blocks):
            machine = StoreMachine(128 * warpgroups, block, 0)
            body(machine, [Global(machine, data) for data in flat])
        return (*out, *changed)

    types = [*out_type, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)]
    made = jax.pure_callback(compute, types, *inputs, *pools)
    return made[: len(out_type)], made[len(out_type) :]
