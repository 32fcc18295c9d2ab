"""How many blocks the caches get: what the fullest step leaves of a device's memory (engine 4.6).

    engine.memory_utilization x memory >= what is in use (weights) + sequence slots + the fullest step + blocks

A step's share comes from its compiled program. Temporaries do not depend on the number of blocks, since the pools are
updated in place: so the largest shapes are compiled over the smallest pool, and that says how large it may be. What is
left over, 1 - memory_utilization, is for copies and snapshots of sequences and for what libraries take for themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from di_jax.config import EngineGroup
from di_jax.engine.sampling_programs import slot_bytes
from di_jax.engine.step_plan import Bucket, BucketLadder
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.platforms.devices import MemoryRoom

IN_FLIGHT = 2  # steps whose plan and results exist at once
MOST_BLOCKS = 2**20  # of a prefix cache: more would only cost the host, which keeps the books of each


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a device that a compiled step needs beside weights and caches. buffers: plans and results of the steps
    in flight; code: of all shapes of the engine."""

    name: str
    temporaries: int
    buffers: int
    code: int

    @property
    def total(self) -> int:
        return self.temporaries + self.buffers + self.code

    def __str__(self) -> str:
        parts = f"temporaries {_size(self.temporaries)}, plans and results {_size(self.buffers)}"
        return f"{_size(self.total)} for {self.name} ({parts}, code of all shapes {_size(self.code)})"


def fullest_buckets(ladder: BucketLadder) -> list[Bucket]:
    """The shapes that can need the most memory: of decode and prefill those of most rows and longest context, however
    many rows they keep."""
    most = {kind: max(b.rows for b in ladder.buckets() if b.decode == kind) for kind in (True, False)}
    return [b for b in ladder.buckets() if b.rows == most[b.decode] and b.context_blocks == ladder.context_blocks[-1]]


def step_memory(bucket: Bucket, executable: Any, num_shapes: int) -> StepMemory:
    """Of a compiled step of `bucket`. num_shapes: of the engine; their code is taken to be as long as this one's."""
    memory = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    rows = f"{bucket.rows} rows" + (f", {bucket.kept_rows} of them kept," if bucket.drops_rows else "")
    return StepMemory(
        f"a {'decode' if bucket.decode else 'prefill'} step of {rows} and {bucket.context_blocks} blocks of context",
        memory.temp_size_in_bytes,
        IN_FLIGHT * (results + bucket.size * np.dtype(np.int32).itemsize),
        memory.generated_code_size_in_bytes * num_shapes,
    )


def program_memory(name: str, executable: Any, num_shapes: int = 1) -> StepMemory:
    """Of a compiled program that runs after a step. num_shapes: as for a step."""
    memory = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes * num_shapes
    return StepMemory(name, memory.temp_size_in_bytes, IN_FLIGHT * results, code)


def in_turn(programs: Sequence[StepMemory]) -> StepMemory:
    """Of programs that a step runs one after the other: the temporaries of the fullest, and what all of them leave."""
    fullest = max(programs, key=lambda program: program.temporaries)
    return dataclasses.replace(
        fullest, buffers=sum(program.buffers for program in programs), code=sum(program.code for program in programs)
    )


def blocks_per_sequence(engine: EngineGroup) -> int:
    """Blocks of the longest request."""
    return -(-engine.max_model_len // engine.block_size)


def choose_blocks(
    engine: EngineGroup, layout: CacheLayout, room: MemoryRoom | None, step: StepMemory | None
) -> tuple[int, str]:
    """The number of blocks of a rank's pool, and why in words.

    `engine.num_blocks`; else enough for all sequences at full length, with prefix caching on a device with a memory of
    its own all that fits; else what fits, at least one request of `engine.max_model_len`. room: of the device that has
    the least, None when nothing is known of it; step: the fullest, None when it was not measured. Raises ConfigError
    when that does not fit.
    """
    longest = blocks_per_sequence(engine)
    wanted, why = longest * engine.max_num_seqs, "as many as all sequences need at full length"
    if engine.num_blocks is not None:
        wanted, why = engine.num_blocks, "as engine.num_blocks says"
    elif engine.prefix_caching and room is not None and not room.shared:
        wanted, why = max(wanted, MOST_BLOCKS), "as many as are of use"
    if room is None:
        return wanted, f"{why}; nobody tells how much memory there is"
    block, slots = block_bytes(layout), slots_bytes(layout)
    free = room.free(engine.memory_utilization) - slots - (step.total if step else 0)
    fits = max(0, free // block)
    parts = [f"{_size(room.used)} in use", f"{_size(slots)} for {layout.num_slots} sequence slots"]
    parts += [str(step)] if step else []
    left = (
        f"engine.memory_utilization = {engine.memory_utilization:g} of {_size(room.limit)}, less "
        f"{', '.join(parts[:-1])} and {parts[-1]}, leaves {_size(max(0, free))}: {fits} blocks of {_size(block)}"
    )
    least = engine.num_blocks or longest
    if fits < least:
        asked = f"engine.num_blocks: {least} blocks do not fit"
        if engine.num_blocks is None:
            asked = (
                f"engine.max_model_len: the {least} blocks of one request of {engine.max_model_len} tokens do not fit"
            )
        raise ConfigError(
            f"{asked}: {left}; lower {'engine.num_blocks, ' if engine.num_blocks else ''}engine.max_model_len, "
            "engine.max_num_seqs or engine.max_num_batched_tokens, or raise engine.memory_utilization"
        )
    if wanted <= fits:
        return wanted, f"{why}; {left}"
    return max(least, _steady(fits)), f"all that fits; {left}"


def block_bytes(layout: CacheLayout) -> int:
    return math.ceil(layout.bytes_per_token * layout.block_size)


def slots_bytes(layout: CacheLayout) -> int:
    """Of the caches, and of what sampling keeps."""
    return layout.num_slots * (math.ceil(layout.bytes_per_slot) + slot_bytes(layout.config.vocab_size))


def draft_bytes(layout: CacheLayout) -> tuple[int, int]:
    """Of a slot: the windows of the draft's stages, and the drafts with what they were drawn from. 212,256 B and, of 5
    drafts over 129,280 ids, 1,292,860 B in the released model."""
    state = layout.abstract()
    drafts = jax.tree.leaves((state.draft_token, state.draft_confidence, state.draft_logits, state.draft_norm))
    ring = state.window.size * state.window.dtype.itemsize // (layout.window_layers * layout.num_slots)
    return layout.draft_stages * ring, sum(a.size * a.dtype.itemsize for a in drafts) // layout.num_slots


def describe(engine: EngineGroup, layout: CacheLayout, why: str) -> str:
    """What was decided, in one line. layout: with its number of blocks."""
    slots = _size(slots_bytes(layout))
    if layout.num_drafts:
        windows, drafts = draft_bytes(layout)
        slots += f"; of each sequence {_size(windows)} are windows of the draft and {_size(drafts)} its drafts"
    tokens = layout.num_blocks * layout.block_size
    requests = layout.num_blocks // blocks_per_sequence(engine)
    return (
        f"caches of a rank: {layout.num_blocks} blocks of {layout.block_size} tokens "
        f"({_size(layout.num_blocks * block_bytes(layout))}, {tokens:,} tokens, {requests} requests of "
        f"engine.max_model_len = {engine.max_model_len}), {layout.num_slots} sequence slots ({slots}): {why}"
    )


def _steady(blocks: int) -> int:
    """`blocks` less at most a 64th: programs depend on it, and the next start may find a few bytes more or less."""
    grain = 1 << max(0, blocks.bit_length() - 7)
    return blocks // grain * grain


def _size(count: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:,.2f} {name}"
