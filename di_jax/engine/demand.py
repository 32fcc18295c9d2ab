"""What the ranks of this process could do in the next step, as the step policies see it."""

from __future__ import annotations

from di_jax.engine.scheduler import Scheduler
from di_jax.engine.step_cost import StepCost
from di_jax.engine.step_policy import NO_QUOTA, Demand


def demand_of(
    scheduler: Scheduler, now: float, prefill_s: float, decode_s: float, cost: StepCost, quota_s: float | None
) -> Demand:
    """The demand of a process's scheduler. Times in seconds; now, of the clock of `Request.arrived`.

    prefill_s: of the last prefill step. decode_s: of a usual decode step. cost: of prefill steps. quota_s: that a
    prefill step may take, None for any time.
    """
    ledgers = scheduler.ledgers
    blocks, slots = sum(ledger.num_blocks for ledger in ledgers), sum(ledger.num_slots for ledger in ledgers)
    used = sum(ledger.num_held_blocks for ledger in ledgers)
    prompts = [sequence for rank in scheduler.ranks for sequence in rank.prompts]
    can_prefill = scheduler.can_prefill(now)
    quota = NO_QUOTA
    if can_prefill and quota_s is not None:
        context = max((sequence.num_computed for sequence in prompts), default=0)
        limits = scheduler.limits
        quota = cost.largest(quota_s, context, limits.max_num_batched_tokens, scheduler.block_size)
    # First come, first served: those in progress, and the head of the queue, came before all others.
    if (head := scheduler.waiting.head(now)) is not None:
        prompts.append(head)
    arrivals = [sequence.request.arrived for sequence in prompts if sequence.request is not None]
    return Demand(
        can_prefill=can_prefill,
        can_decode=scheduler.can_decode,
        waits=bool(prompts),
        used_percent=-(-100 * used // blocks),
        decoding_percent=100 * sum(len(rank.decoding) for rank in scheduler.ranks) // slots,
        waited_ms=int(1e3 * max((now - arrived for arrived in arrivals), default=0)),
        prefill_us=int(1e6 * prefill_s),
        decode_us=int(1e6 * decode_s),
        quota=quota,
    )
