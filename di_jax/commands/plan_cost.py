"""What drafting and verifying drafts add to a step, for `plan`: least bytes and flops, as `roofline` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from di_jax.commands.roofline import StepCost, step_cost
from di_jax.engine.step_plan import Bucket
from di_jax.model.cache import CacheLayout
from di_jax.parallel.mesh import DeviceMesh


def draft_cost(
    bucket: Bucket,
    layout: CacheLayout,
    target: Mapping[str, Any],
    drafts: Mapping[str, Any],
    tokens: int,
    context: float,
    mesh: DeviceMesh,
) -> StepCost:
    """On one device, beside the `step_cost` of the target for these tokens.

    target, drafts: weights by path, as stored. Every row of a step leaves its context to the draft. After a decode step
    the stages run a block for each request, and the target's head and the Markov head a row for each draft.
    """
    # Every device has these matrices whole.
    cost = matrix_cost(drafts, ("main_proj.", "stages.attn.wkv."), tokens)
    if not bucket.drafts:
        return cost
    drafted = bucket.requests * bucket.drafts
    stages = {f"layers.{p.removeprefix('stages.')}": leaf for p, leaf in drafts.items() if p.startswith("stages.")}
    return total(
        cost,
        # `step_cost` has one row of the head for each request; the drafts that are verified are the others.
        matrix_cost(target, ("head.",), tokens - bucket.requests + drafted, again=True),
        step_cost(
            stages,
            CacheLayout(layout.config.draft_config, layout.formats, 1, 1),
            tokens=bucket.requests * layout.config.draft_block,
            sequences=bucket.requests,
            context=context,
            mesh=mesh,
        ),
        matrix_cost(drafts, ("markov_head.head.", "confidence_head."), drafted),
    )


def matrix_cost(leaves: Mapping[str, Any], prefixes: tuple[str, ...], rows: int, *, again: bool = False) -> StepCost:
    """Of `rows` rows through the weights whose path begins so. again: the step has read them already."""
    mine = [(path, leaf) for path, leaf in leaves.items() if path.startswith(prefixes)]
    matrices = [leaf for path, leaf in mine if leaf.ndim >= 2 and not path.endswith(".scale")]
    nbytes = 0 if again else sum(leaf.size * leaf.dtype.itemsize for _, leaf in mine)
    quantized = sum(leaf.size for leaf in matrices if leaf.dtype.itemsize == 1)
    return StepCost(nbytes, 2.0 * rows * sum(leaf.size for leaf in matrices), 2.0 * rows * quantized)


def total(*costs: StepCost) -> StepCost:
    """Of parts of a step."""
    return StepCost(
        sum(cost.bytes for cost in costs),
        sum(cost.flops for cost in costs),
        sum(cost.quantized_flops for cost in costs),
    )
