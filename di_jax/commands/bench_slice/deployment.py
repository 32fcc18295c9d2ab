"""The deployment whose one rank a slice is: its config, what a slice refuses to measure, and the tokens/s of steps."""

from __future__ import annotations

from di_jax.config import Config
from di_jax.errors import ConfigError

# By bench.slice.ep: redundant expert slots of a rank, which with the released model's 384 experts makes 7, 49 and 104
# slots a rank; and the ranks that share the Engram tables.
EXTRA_SLOTS = {64: 1, 8: 1, 4: 8}
WORLD = {64: 64, 8: 8, 4: 64}
ENGRAM_NOTE = {
    4: "a rank's quarter of the Engram tables (50.7 GB) does not fit beside its 104 experts a layer (78.2 GB): 1/64 of "
    "the rows are here, look-ups are as many"
}


def deployment(config: Config) -> Config:
    """The config of all ranks, from that of a slice: `mesh` and `eplb` as the deployment of `bench.slice.ep` has them.

    Raises ConfigError for what a slice does not measure.
    """
    ep, replay = config.bench.slice.ep, config.engine.replay
    if config.mesh.world > 1 or config.mesh.ep > 1:
        raise ConfigError(
            f"mesh: dp {config.mesh.dp}, cp {config.mesh.cp}, ep {config.mesh.ep}: a slice runs on one device, as one "
            "rank of bench.slice.ep; leave the mesh out"
        )
    if config.eplb.preset != "none" or config.eplb.force not in ("none", "balanced"):
        raise ConfigError(
            "eplb: a slice forces balance and moves no expert; leave the group out (bench.slice.ep says how many slots)"
        )
    if not config.speculative.enabled:
        raise ConfigError("speculative.enabled: false: the step of a slice verifies and drafts; set it to true")
    if config.speculative.varlen:
        raise ConfigError(
            "speculative.varlen: true is refused by bench.kind: slice: tau = 1 + num_draft_tokens x accept_rate takes "
            "every draft for verified, so the drafts that varlen leaves out, the unlikely ones, would count twice: as "
            "rows saved and as tokens; set it to false"
        )
    if replay.decoder != "compact":
        raise ConfigError(
            f"engine.replay.decoder: {replay.decoder}: the prefill of a slice runs the last engine.replay.keep_tokens "
            "rows through the decoder layers; set it to compact"
        )
    if config.model.engram_placement != "device":
        raise ConfigError(
            "model.engram_placement: host: a slice has its share of the tables on device; set it to device"
        )
    return config.with_values(
        {
            "mesh.dp": WORLD[ep],
            "mesh.ep": ep,
            "eplb.extra_per_rank": EXTRA_SLOTS[ep],
            "eplb.interval": 0,
            "eplb.force": "balanced",
        }
    )


def tokens_per_step(num_drafts: int, accept_rate: float) -> float:
    """tau, the tokens that a request gains in a step that verifies all its drafts: 3.25 with 3 of them at 75% (dspark
    5)."""
    return 1 + num_drafts * accept_rate


def decode_speed(requests: int, num_drafts: int, accept_rate: float, step_s: float) -> dict[str, float]:
    """Tokens/s of a GPU with so many requests, and of each of them (dspark 5: steps/s x requests x tau)."""
    each = tokens_per_step(num_drafts, accept_rate) / step_s
    return {"tokens_per_s": requests * each, "tokens_per_s_per_user": each}


def prefill_speed(rows: int, step_s: float) -> dict[str, float]:
    """Tokens/s of a GPU that a chunk of so many rows fills."""
    return {"tokens_per_s": rows / step_s}
