"""Decode steps planned from arrays by slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.sequence import Sequence
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.step_plan import DEVICE_LENGTH, DEVICE_TOKEN, Bucket, Chunk, StepPlan, build_plan
from di_jax.sampling_params import SamplingParams

SLOTS, BLOCKS = 8, 4
BUCKETS = [Bucket(True, rows, context) for rows in (4, 8) for context in (2, 4)]


def table_and_sequences() -> tuple[SlotTable, list[Sequence]]:
    """Every slot decodes; one sequence has outputs that are forced."""
    table, random = SlotTable(SLOTS, BLOCKS), np.random.default_rng(1)
    sequences = []
    for slot in range(SLOTS):
        forced = (5, -1, 6, 7) if slot == 3 else None
        sampling = SamplingParams(temperature=0.25 * slot, max_tokens=9, forced_token_ids=forced)
        seed = int(random.integers(2**63))
        sequences.append(Sequence(str(slot), 0, [1] * (100 + slot), sampling, seed, max_tokens=9))
        table.begin(slot, sequences[-1], 100 + slot, 1 + slot % 3, random.integers(1, 99, 1 + slot % 2).tolist())
    return table, sequences


def expected(table: SlotTable, sequences: list[Sequence], bucket: Bucket, slots: list[int]) -> StepPlan:
    """The same step from chunks."""
    chunks = [
        Chunk(
            (DEVICE_TOKEN,),
            DEVICE_LENGTH,
            slot,
            table.block_table[slot, : table.num_blocks[slot]].tolist(),
            temperature=sequences[slot].sampling.temperature,
            seed=sequences[slot].seed,
            output_index=int(table.output_index[slot]),
            forced=sequences[slot].forced_token(int(table.output_index[slot])),
        )
        for slot in slots
    ]
    return build_plan(bucket, chunks)


STEPS = st.lists(st.tuples(st.sampled_from(BUCKETS), st.sets(st.integers(0, SLOTS - 1))), min_size=1, max_size=6)


@given(STEPS)
def test_a_plan_is_what_its_chunks_would_give_and_the_plan_before_leaves_nothing(
    steps: list[tuple[Bucket, set[int]]],
) -> None:
    table, sequences = table_and_sequences()
    for bucket, chosen in steps:
        slots = sorted(chosen)[: bucket.rows]
        plan, wanted = table.plan(bucket, np.array(slots, int)), expected(table, sequences, bucket, slots)
        found, fields = bucket.unpack(plan.buffer), bucket.unpack(wanted.buffer)
        for name in fields:
            np.testing.assert_array_equal(found[name], fields[name], err_msg=name)
        table.advance(np.array(slots, int))
