"""What a request's record says of its drafts."""

from __future__ import annotations

import pytest

from di_jax.engine.sequence import Request, Sequence
from di_jax.sampling_params import SamplingParams

NAMES = ("decode_steps", "drafted_tokens", "verified_tokens", "accepted_tokens")
MEANS = ("accept_rate", "accepted_length", "verified_length", "confidence_error")


def request(*choices: list[tuple[int, int, int, float]]) -> Request:
    """With these decode steps of its choices: drafted, verified, accepted, error."""
    sampling = SamplingParams(n=len(choices))
    sequences = [Sequence("a", index, [5], sampling, 0, 99) for index in range(len(choices))]
    for sequence, steps in zip(sequences, choices, strict=True):
        for step in steps:
            sequence.count_drafts(*step)
    return Request("a", [5], sampling, 0, sequences)


def test_means_are_of_the_steps_that_had_drafts_of_all_choices() -> None:
    """A step that had drafts and verified none of them counts, one without drafts does not."""
    one = request([(5, 5, 4, 0.5), (0, 0, 0, 0.0), (5, 0, 0, 0.0)], [(5, 3, 2, 0.5), (5, 4, 0, 0.2)])
    metrics = one.metrics()
    assert [metrics[name] for name in NAMES] == [5, 20, 12, 6]
    assert [metrics[name] for name in MEANS] == [6 / 12, 1 + 6 / 4, 12 / 4, pytest.approx(1.2 / 12)]


@pytest.mark.parametrize("steps", [[], [(0, 0, 0, 0.0)] * 3, [(5, 0, 0, 0.0)]])
def test_nothing_verified_has_no_means(steps: list[tuple[int, int, int, float]]) -> None:
    metrics = request(steps).metrics()
    assert [metrics[name] for name in MEANS] == [None] * 4
    assert metrics["decode_steps"] == len(steps) and metrics["drafted_tokens"] == sum(drafted for drafted, *_ in steps)
