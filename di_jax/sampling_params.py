"""How a request's tokens are drawn and when its answer ends (serving 4; cli-contract `sampling`)."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from di_jax.config import SamplingGroup
from di_jax.config_schema import key
from di_jax.errors import ConfigError, UserError

WORD = 2**64 - 1
# Outside of these, logits / temperature leaves the range in which fp32 still resolves it beside the Gumbel noise.
TEMPERATURES = (1e-4, 1e4)


class SamplingError(UserError):
    """A `sampling` field that is unknown, of the wrong type, out of range or not available yet; names the field."""


@dataclass(frozen=True)
class SamplingParams(SamplingGroup):
    """Sampling of one request. The fields of the config's `sampling` group, and those that only a request has.

    temperature: 0 is greedy. n: independent answers. max_tokens: clipped to what the context leaves. stop: a text or
    several. seq_seed: 64 bits, larger values are masked; None draws one, which the output reports. forced_token_ids:
    ids to emit by output index, -1 is free, and so is what follows the list. allowed_token_ids: no others are drawn.
    detokenize off leaves `text` empty.
    Raises SamplingError, a ValueError, naming the field.
    """

    n: int = key(1, low=1, high=1024)
    stop: str | tuple[str, ...] | None = None  # type: ignore[assignment]  # one text is kept as a tuple of it
    forced_token_ids: tuple[int, ...] | None = key(None, low=-1)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    allowed_token_ids: tuple[int, ...] | None = key(None, low=0)

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ConfigError as error:
            raise SamplingError(str(error)) from error
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(self.stop or ()):
            raise SamplingError(f"sampling.stop: {self.stop!r} holds an empty text, which would end every answer")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise SamplingError("sampling.allowed_token_ids: is empty, so nothing could be drawn; give ids or null")
        if self.stop and not self.detokenize:
            raise SamplingError("sampling.stop: needs sampling.detokenize, for stops are searched in the text")
        low, high = TEMPERATURES
        if self.temperature and not low <= self.temperature <= high:
            raise SamplingError(
                f"sampling.temperature: {self.temperature} is out of range; expected 0 (greedy) or {low} to {high:.0f}"
            )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], defaults: SamplingGroup | None = None) -> Self:
        """From a request's `sampling` object; fields that it leaves out come from the config's `sampling` group."""
        if not isinstance(raw, Mapping):
            raise SamplingError(f"sampling: expected an object of fields, found {type(raw).__name__}")
        shared = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(SamplingGroup)} if defaults else {}
        try:
            return super().from_dict({**shared, **raw})
        except ConfigError as error:
            raise SamplingError(str(error)) from error

    def resolved_seed(self) -> int:
        """`seq_seed` masked to 64 bits, or a fresh random one."""
        return secrets.randbits(64) if self.seq_seed is None else self.seq_seed & WORD


def choice_seed(seq_seed: int, index: int) -> int:
    """The 64-bit seed of choice `index`: a fold of (seq_seed, index) by the SplitMix64 generator; choice 0 has
    `seq_seed` itself, so that its answer does not depend on n."""
    if index == 0:
        return seq_seed
    z = (seq_seed + index * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)
