"""The bench command of kind host: an engine over a device that does nothing, and what its steps cost the host."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from di_jax import run
from di_jax.commands import bench_host
from di_jax.config import Config, load_config
from di_jax.engine.engine import Engine
from di_jax.engine.metrics import StepReport
from di_jax.engine.step_plan import Bucket
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.errors import ConfigError, UserError
from di_jax.sampling_params import SamplingParams
from di_jax.tokenizer import Tokenizer

PLOT = Path(__file__).parents[1] / "scripts" / "plot_bench.py"
SMALL = {
    "engine.max_num_seqs": 8,
    "engine.max_model_len": 512,
    "engine.max_num_batched_tokens": 512,
    "bench.batch_sizes": [1, 8],
    "bench.prompt_len": 200,
    "bench.output_len": 20,
    "bench.repeats": 2,
}
SET = [word for name, value in SMALL.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def small(**values: Any) -> Config:
    return load_config("host_bench").with_values({**SMALL, **values})


@pytest.fixture
def engine() -> Engine:
    return bench_host.null_engine(small())


def test_rows_of_both_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host-cpu.json"
    assert run.main(["bench", "--config", "host_bench", *SET, "--json", "--output", str(file)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result, committed = json.loads(last), json.loads(file.read_text())
    assert {"kind", "device", "versions", "rows"} <= set(result)
    assert (result["kind"], result["device"], result["rows"]) == ("host", "cpu", committed["rows"])
    rows = result["rows"]
    assert [(r["phase"], r["batch"]) for r in rows] == [("prefill", 1), ("decode", 1), ("prefill", 8), ("decode", 8)]
    for row in rows:
        assert (row["prompt_len"], row["output_len"], row["max_model_len"]) == (200, 20, 512)
        for name in ("schedule", "launch", "post", "host", *(["admission"] if row["phase"] == PREFILL else [])):
            assert 0 < row[f"{name}_us"] <= row[f"{name}_us_p99"]
        assert row["roofline_fraction"] == pytest.approx(300 / row["host_us"])
    # Of 19 decode steps of one request the last is not counted, in each of two runs.
    assert (rows[1]["steps"], rows[1]["tokens_per_step"]) == (36, 1)
    assert rows[3]["steps"] > 10 and rows[3]["tokens_per_step"] == 8
    assert len(table) == 5
    drawn = subprocess.run([sys.executable, PLOT, file], capture_output=True, text=True, check=True)
    assert Path(drawn.stdout.strip()).read_bytes().startswith(b"\x89PNG")


def test_results_of_another_kind_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine-cpu.json"
    file.write_text(text := json.dumps({"kind": "engine", "device": "cpu", "rows": []}))
    assert run.main(["bench", "--config", "host_bench", "--output", str(file)]) == 2
    assert "write to host-cpu.json" in capsys.readouterr().err and file.read_text() == text


def test_requests_that_never_decode_together_are_no_measurement() -> None:
    config = small(**{"bench.batch_sizes": [8], "bench.output_len": 1})
    with pytest.raises(UserError, match=r"bench.output_len: 8 requests of 200 \+ 1 tokens never decoded together"):
        bench_host.measure(config, partial(tqdm, disable=True))


def test_answers_are_tokens_and_never_the_end(engine: Engine) -> None:
    model, runner = engine.parts.model_config, engine.runner
    for _ in range(bench_host.ANSWERS):
        (output,) = runner.execute([]).host()
        assert output.token.min() >= 0 and output.token.max() < model.vocab_size
        assert (output.token != model.eos_token_id).all() and (output.logprob < 0).all()


def report(schedule: float, launch: float, wait: float) -> StepReport:
    bucket = Bucket(True, 1, 1)
    return StepReport(DECODE, bucket, 1, 1, 1.0, [], schedule_s=schedule, launch_s=launch, wait_s=wait)


def test_a_call_is_split_into_the_step_launched_and_the_step_handled() -> None:
    reports = [report(1, 2, 4), report(8, 16, 32), report(64, 128, 256), report(512, 1024, 2048)]
    # Ahead: each call launches the next step; the first one its own too, the last one none.
    calls = list(zip([1 + 2 + 8 + 16 + 4 + 0.25, 64 + 128 + 32 + 0.5, 512 + 1024 + 256 + 0.75, 9.0], reports))
    assert [step.post for step in bench_host._times(calls, ahead=True)] == [0.25, 0.5, 0.75]
    calls = list(zip([7.25, 56.5, 448.75, 9.0], reports))
    times = bench_host._times(calls, ahead=False)
    assert [step.post for step in times] == [0.25, 0.5, 0.75]
    assert [step.host for step in times] == [1.25, 8.5, 64.75]


def test_a_synchronous_engine_is_measured_too() -> None:
    config = small(**{"engine.async_scheduling": False, "bench.batch_sizes": [2]})
    rows = bench_host.measure(config, partial(tqdm, disable=True))
    assert [row["phase"] for row in rows] == [PREFILL, DECODE]
    assert all(row["host_us"] > 0 and row["post_us"] > 0 for row in rows)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steps_with_drafts_are_measured_too(asynchronous: bool) -> None:
    config = small(**{"engine.async_scheduling": asynchronous, "speculative.enabled": True, "bench.batch_sizes": [8]})
    _, decode = bench_host.measure(config, partial(tqdm, disable=True))
    assert decode["phase"] == DECODE and decode["batch"] == 8 and decode["host_us"] > 0
    assert 2 * 8 < decode["tokens_per_step"] < 6 * 8, "several tokens of each request"


@pytest.mark.parametrize("varlen", [True, False])
def test_a_device_that_does_nothing_drafts_verifies_and_accepts(varlen: bool) -> None:
    """As the books of an engine have it: every step drafts, blocks are given back, and answers are as long as asked."""
    engine = bench_host.null_engine(small(**{"speculative.enabled": True, "speculative.varlen": varlen}))
    books, sampling = (
        engine.speculation,
        SamplingParams(temperature=1.0, max_tokens=101, ignore_eos=True, detokenize=False, n=2),
    )
    assert books is not None and (books.profile is not None) == varlen
    requests = [engine.add_request([5] * (100 + at), sampling) for at in range(4)]
    while (report := engine.step()) is not None:
        engine.scheduler.check()
        assert bool(report.bucket.drafts) == (report.kind == DECODE) and not books.switch.pause
    for one in (one for request in requests for one in request.sequences):
        assert len(one.output_ids) == len(one.logprobs) == 101 and one.finish_reason == "length"
        assert one.drafted == 5 * one.decode_steps or one.drafted == 5 * (one.decode_steps - 1)
        assert 1.5 < one.accepted / one.decode_steps < 3.2 and one.accepted < one.verified <= one.drafted
    assert all(ledger.num_available == ledger.num_blocks for ledger in engine.scheduler.ledgers)


def test_more_drafts_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative.num_draft_tokens: 6 is more than the 5 drafts"):
        bench_host.null_engine(small(**{"speculative.enabled": True, "speculative.num_draft_tokens": 6}))


def test_answers_become_text_only_when_it_is_asked_for(engine: Engine, golden: Path) -> None:
    engine.parts.tokenizer = Tokenizer.from_folder(golden / "tiny-v41-fp8", engine.parts.model_config)
    plain = engine.add_request([5] * 9, SamplingParams(max_tokens=6, ignore_eos=True)).sequences[0]
    stopping = engine.add_request([5] * 9, SamplingParams(max_tokens=6, ignore_eos=True, stop="\0")).sequences[0]
    while engine.step() is not None:
        pass
    assert plain.detokenizer is not None and stopping.detokenizer is not None
    assert (plain.detokenizer.num_ids, stopping.detokenizer.num_ids) == (0, 6)
    assert isinstance(plain.text, str) and plain.detokenizer.num_ids == 6


def test_what_ended_is_gone_without_the_collector(engine: Engine) -> None:
    """Rings of references would cost pauses of up to 0.3 s every few thousand requests."""
    gc.collect()
    gc.disable()
    try:
        sampling = SamplingParams(max_tokens=3, n=2, detokenize=False)
        requests = [engine.add_request([7] * 200, sampling) for _ in range(3)]
        engine.step()
        engine.abort(requests[2].request_id)
        while engine.step() is not None:
            pass
        ended = [weakref.ref(one) for request in requests for one in (request, *request.sequences)]
        del requests
        assert [one() for one in ended] == [None] * 9
    finally:
        gc.enable()
