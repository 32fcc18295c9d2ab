"""Booking verified steps: tokens that end nothing are booked together, with the effects of one after another."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from di_jax.commands import bench_host
from di_jax.config import load_config
from di_jax.engine.engine import Engine
from di_jax.engine.results import Results
from di_jax.engine.sequence import Sequence
from di_jax.sampling_params import SamplingParams

VALUES = {
    "engine.max_num_seqs": 8,
    "engine.max_model_len": 1024,
    "engine.max_num_batched_tokens": 2048,
    "bench.prompt_len": 200,
    "bench.batch_sizes": [8],
    "speculative.enabled": True,
    "speculative.varlen": False,  # of a varied length times of steps decide
}


def answered(monkeypatch: pytest.MonkeyPatch, one_by_one: bool) -> tuple[dict[str, Any], int]:
    """All that the books say after 8 requests with drafts, and how many sequences' tokens of a step were booked one
    after another. one_by_one: all of them, as by a request that has a stop text."""
    counted = 0
    append = Results._append_each

    def counting(self: Results, *arguments: Any) -> int:
        nonlocal counted
        counted += 1
        return append(self, *arguments)

    monkeypatch.setattr(Results, "_append_each", counting)
    engine: Engine = bench_host.null_engine(
        load_config("host_bench", [f"{name}={value}" for name, value in VALUES.items()])
    )
    random = np.random.default_rng(1)
    sequences: list[Sequence] = []
    for number in range(8):
        # Blocks of 128 tokens are completed in the middle of answers, and some answers end at a stop id.
        prompt = random.integers(0, 1000, 100 + 17 * number).tolist()
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=150 + 20 * number,
            detokenize=False,
            stop_token_ids=tuple(range(0, 100_000, 397)),
        )
        engine.add_request(prompt, sampling)
    for request in engine.requests.values():
        for sequence in request.sequences:
            sequences.append(sequence)
            if one_by_one:
                sequence.sampling = replace(sequence.sampling, detokenize=True, stop=("never",))
    emitted, steps, moved, blocks = [], [], [], []
    while (report := engine.step()) is not None:
        emitted.append({rank: got.tolist() for rank, got in engine.results.emitted.items()})
        steps.append((report.kind, report.num_sequences, report.num_tokens))
        moved.append(sorted(request.request_id for request in report.requests))
        blocks.append([sequence.num_registered for sequence in sequences])
    (rank,) = engine.scheduler.ranks
    books = {
        "answers": [(s.output_ids, s.logprobs, s.finish_reason, s.stop_reason, s.text_tokens) for s in sequences],
        "blocks": blocks,
        "counts": [(s.decode_steps, s.drafted, s.verified, s.accepted, s.confidence_error) for s in sequences],
        "found": [sorted(ledger._block_of) for ledger in rank.ledgers],
        "drafts": asdict(engine.results.drafts),
        "steps": (steps, moved, emitted),
    }
    return books, counted


def test_tokens_booked_together_are_as_booked_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    together, few = answered(monkeypatch, one_by_one=False)
    apart, all_of_them = answered(monkeypatch, one_by_one=True)
    assert together == apart
    assert 0 < few < all_of_them / 4  # the fast way was gone, and the other where answers end
    assert {reason for _, _, reason, _, _ in together["answers"]} == {"stop", "length"}
    assert min(together["blocks"][-1]) >= 1 and together["drafts"]["accepted"] > 0
