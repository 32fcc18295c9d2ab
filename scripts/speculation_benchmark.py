"""Tokens/s without drafts, with five always verified, and with as many as pay, at 1 to 128 running requests.

python -m scripts.speculation_benchmark --concurrency 1 4 16      writes scripts/results/speculation-cpu.json and .png
python -m scripts.speculation_benchmark --concurrency 64 128      adds to them

In two processes because a CPU's programs are many memory mappings, of which Linux gives a process 65,530.

Three engines of one process answer the same prompts with the same seeds, in turn, for several rounds; who begins
changes from round to round. An ended answer makes room for the next prompt, and a run ends when there is none left, so
that it always has as many requests as it says. tokens_per_s counts tokens of decode steps over the time of decode
steps, wall_tokens_per_s all tokens over all time, prompts included. Ratios are of the runs of one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import jax
import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from di_jax.commands.bench import device_slug
from di_jax.config import Config, load_config
from di_jax.config_schema import parse_yaml
from di_jax.engine.engine import Engine
from di_jax.engine.metrics import StepReport
from di_jax.engine.sequence import Request
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.platforms.devices import configure_jax
from di_jax.prompts import PromptEncoder
from di_jax.sampling_params import SamplingParams
from scripts import command_line
from scripts.train_demo.words import NAMES, PETS

RESULTS = Path(__file__).parent / "results"
DEMO = Path(__file__).parent.parent / "configs" / "demo.jsonl"
NONE, FIXED, VARLEN = MODES = ("none", "fixed", "varlen")
PAIRS = ((VARLEN, FIXED), (VARLEN, NONE), (FIXED, NONE))
CONCURRENCY = (1, 4, 16, 64, 128)
SEED = 20261130
ROUNDS = 5
ANSWER = (64, 128)  # tokens of an answer, drawn for each
TURNS, LEAST_REQUESTS = 2, 8  # requests of a run: so many for each place, and no fewer than so many
SHORT = (8, 24)  # tokens of an answer of the runs that are not counted
LEAST_ROUNDS = 3  # whatever the time: each mode has begun one
PREFILL_ROWS, CONTEXT = 256, 512
COUNTS = ("decode_steps", "drafted", "verified", "accepted")  # of a sequence


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request. seed: of its sampling."""

    prompt_ids: list[int]
    temperature: float
    max_tokens: int
    seed: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seq_seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )


@dataclasses.dataclass
class Run:
    """What one engine did with a list of requests.

    steps: reports of all steps. tokens: of decode steps. all_tokens, wall_s: of the whole run. counts: of `COUNTS`,
    summed over the sequences.
    """

    steps: list[StepReport]
    tokens: int
    all_tokens: int
    wall_s: float
    counts: dict[str, int]
    drafts: int  # of a sequence and step at most

    @property
    def decodes(self) -> list[StepReport]:
        return [step for step in self.steps if step.kind == DECODE]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(step.seconds for step in self.decodes)

    @property
    def wall_tokens_per_s(self) -> float:
        return self.all_tokens / self.wall_s

    def numbers(self) -> dict[str, float]:
        """As in a row of the results. Lengths are means over a sequence's steps; tau: tokens of one; drafted_share: of
        its steps, those that had drafts to verify; bare_share: of all decode steps, those that left a draft no context;
        rows: of a step, padded."""
        decodes = self.decodes
        sequence_steps = sum(step.num_sequences for step in decodes)
        live = max(1, self.counts["decode_steps"])
        row = {
            "tokens_per_s": self.tokens_per_s,
            "wall_tokens_per_s": self.wall_tokens_per_s,
            "step_ms": 1e3 * float(np.median([step.seconds for step in decodes])),
            "verified": self.counts["verified"] / live,
            "accepted": self.counts["accepted"] / live,
            "tau": self.tokens / live,
            "drafted_share": self.counts["drafted"] / (live * self.drafts) if self.drafts else 0.0,
            "bare_share": sum(step.bucket.bare for step in decodes) / len(decodes),
            "rows": sum(step.bucket.rows for step in decodes) / len(decodes),
            "ended_share": 1 - live / sequence_steps,  # of rows' sequences, those that had ended meanwhile
        }
        for part in ("schedule", "launch", "wait", "post"):
            row[f"{part}_ms"] = 1e3 * float(np.median([getattr(step, f"{part}_s") for step in decodes]))
        row["prefill_s"] = sum(step.seconds for step in self.steps if step.kind == PREFILL)
        return row


def requests(encoder: PromptEncoder, count: int, seed: Sequence[int], answer: tuple[int, int] = ANSWER) -> list[Ask]:
    """Of what the bundled checkpoint knows (configs/demo.jsonl): two in five go on with text, the others are tasks with
    names, numbers and letters of their own. Every other one is greedy, the rest have temperature 1."""
    records = {r["id"]: r for r in map(json.loads, DEMO.read_text(encoding="utf-8").splitlines())}
    sentences = [s for s in records["recall"]["prompt"].split(". ") if 40 < len(s) < 300]
    random = np.random.default_rng(seed)

    def pick(options: Sequence[str]) -> str:
        return options[int(random.integers(len(options)))]

    def record(kind: int) -> dict[str, Any]:
        letters = " ".join(random.permutation(list("abcdefghijklmnopqrstuvwxyz"))[: int(random.integers(3, 8))])
        if kind == 0:
            return {"prompt": f"\n{pick(sentences)}. And"}
        if kind == 1:
            return {"prompt": pick([records[name]["prompt"] for name in ("english", "play", "python")])}
        if kind == 2:
            return {"prompt": f"json: {pick(NAMES)} is {random.integers(2, 100)} years old and has a {pick(PETS)}. ->"}
        if kind == 3:
            return {"prompt": f"calc: {random.integers(100, 1000)}+{random.integers(10, 100)} ->"}
        # A chat turn in the model's own markup: what renders `messages` may be missing on an accelerator's machine.
        turn = f"<｜User｜>Please sort: {letters}<｜Assistant｜><think>"
        return {"prompt": f"<｜begin▁of▁sentence｜>{turn}"}

    asked = []
    for index in range(count):
        _, ids = encoder.encode(record(int(random.integers(5))))
        length = int(random.integers(answer[0], answer[1] + 1))
        asked.append(Ask(ids, float(index % 2), length, int(random.integers(2**31))))
    return asked


def settings(checkpoint: str, concurrency: Sequence[int], mode: str, overrides: Sequence[str] = ()) -> Config:
    """The engine of a mode. One prefill shape and one context: every shape takes 15 to 50 s to compile on a GPU.

    overrides: KEY=VALUE of config keys, values in YAML. Raises ConfigError for them.
    """
    most = max(concurrency)
    values: dict[str, Any] = {
        "model.path": checkpoint,
        "engine.max_num_seqs": most,
        "engine.max_num_batched_tokens": max(PREFILL_ROWS, most),
        "engine.prefill_buckets": [max(PREFILL_ROWS, most)],
        "engine.decode_buckets": sorted(concurrency),
        "engine.max_model_len": CONTEXT,
        "engine.context_buckets": [CONTEXT],
        "engine.num_blocks": most * CONTEXT // 128,
        "engine.prefix_caching": False,  # every run reads its prompts anew
        "engine.replay.decoder": "off",
        "engine.log_interval": 0,
    }
    for override in overrides:
        name, _, value = override.partition("=")
        values[name.strip()] = parse_yaml(value, f"--set {override}")
    values |= {"speculative.enabled": mode != NONE, "speculative.varlen": mode != FIXED}
    return load_config("speculative").with_values(values)


def engines(configs: Mapping[str, Config]) -> dict[str, Engine]:
    """An engine of each mode. Those that draft share weights, caches and programs: only one runs at a time, and the
    shapes of fixed drafts are among the others."""
    built: dict[str, EngineParts] = {NONE: build_engine_parts(configs[NONE])}
    built[VARLEN] = build_engine_parts(configs[VARLEN])
    ladder = dataclasses.replace(built[VARLEN].ladder, varlen=False)
    built[FIXED] = dataclasses.replace(built[VARLEN], ladder=ladder)
    return {mode: Engine(built[mode], configs[mode].engine) for mode in (NONE, VARLEN, FIXED)}


def serve(engine: Engine, asked: Sequence[Ask], concurrency: int) -> Run:
    """Answers the requests, `concurrency` at a time, until one ends and there is none to follow it; what still runs
    then is given up."""
    waiting = list(reversed(asked))
    open_: dict[str, Request] = {}
    everyone: list[Request] = []
    run = Run([], 0, 0, 0.0, {}, engine.parts.ladder.drafts)
    counted, began = engine.metrics.generated_tokens, time.perf_counter()
    first = counted
    while True:
        while waiting and len(open_) < concurrency:
            ask = waiting.pop()
            request = engine.add_request(ask.prompt_ids, ask.sampling)
            open_[request.request_id] = request
            everyone.append(request)
        report = engine.step()
        assert report is not None
        now = engine.metrics.generated_tokens
        run.tokens += now - counted if report.kind == DECODE else 0
        counted = now
        run.steps.append(report)
        for request in report.requests:
            if request.finished:
                open_.pop(request.request_id, None)
        if not waiting and len(open_) < concurrency:
            break
    run.wall_s, run.all_tokens = time.perf_counter() - began, counted - first
    run.counts = {name: sum(getattr(s, name) for r in everyone for s in r.sequences) for name in COUNTS}
    for request_id in open_:
        engine.abort(request_id)
    while engine.step() is not None:
        pass
    return run


def compare(
    trio: Mapping[str, Engine],
    running: int,
    rounds: int,
    *,
    seconds: float = math.inf,
    seed: int = SEED,
    answer: tuple[int, int] = ANSWER,
    turns: float = TURNS,
) -> list[dict[str, Run]]:
    """Runs of `running` requests at once, by round and mode. A short run of each mode that is not counted comes first.

    seconds: no round is begun that would end later, but the first ones.
    """
    parts, began = trio[NONE].parts, time.perf_counter()
    encoder = PromptEncoder(parts.folder, parts.tokenizer)
    for engine in trio.values():
        serve(engine, requests(encoder, running + 1, (seed, running), SHORT), running)
    found: list[dict[str, Run]] = []
    count = max(LEAST_REQUESTS, round(turns * running))
    longest = 0.0
    for number in range(rounds):
        start = time.perf_counter()
        if number >= LEAST_ROUNDS and start + longest > began + seconds:
            break
        asked = requests(encoder, count, (seed, running, number), answer)
        found.append({})
        for at in range(len(MODES)):
            mode = MODES[(number + at) % len(MODES)]
            found[-1][mode] = serve(trio[mode], asked, running)
        longest = max(longest, time.perf_counter() - start)
    return found


def table(running: int, rounds: Sequence[Mapping[str, Run]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, ratios) of the results of one concurrency: medians over the rounds, and how far these lie apart."""
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for mode in MODES:
        numbers = [each[mode].numbers() for each in rounds]
        row = {name: _rounded(np.median([n[name] for n in numbers])) for name in numbers[0]}
        speeds = [n["tokens_per_s"] for n in numbers]
        spread = {"tokens_per_s_range": [_rounded(min(speeds)), _rounded(max(speeds))]}
        rows.append({"concurrency": running, "mode": mode, **row, **spread})
    for mine, other in PAIRS:
        each = [one[mine].tokens_per_s / one[other].tokens_per_s for one in rounds]
        walls = [one[mine].wall_tokens_per_s / one[other].wall_tokens_per_s for one in rounds]
        low, high = np.quantile(each, (0.25, 0.75))
        ratios.append(
            {
                "concurrency": running,
                "of": mine,
                "over": other,
                "median": _rounded(np.median(each)),
                "quartiles": [_rounded(low), _rounded(high)],
                "range": [_rounded(min(each)), _rounded(max(each))],
                "wall": _rounded(np.median(walls)),
                "rounds": len(each),
            }
        )
    return rows, ratios


def _rounded(value: Any) -> float:
    return float(f"{float(value):.5g}")


def draw(result: Mapping[str, Any], picture: Path) -> None:
    """Tokens/s, ratios, and lengths over the concurrency."""
    figure, (speed, ratio, length) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    colours = dict(zip(MODES, ("0.4", "C0", "C1"), strict=True))
    labels = {NONE: "no drafts", FIXED: "five drafts", VARLEN: "as many as pay"}
    for mode in MODES:
        rows = [row for row in result["rows"] if row["mode"] == mode]
        at, middle = [row["concurrency"] for row in rows], np.array([row["tokens_per_s"] for row in rows])
        low, high = np.array([row["tokens_per_s_range"] for row in rows]).T
        speed.errorbar(at, middle, (middle - low, high - middle), fmt="-o", ms=3, capsize=2, color=colours[mode],
                       label=labels[mode])  # fmt: skip
        if mode != NONE:
            length.plot(at, [row["verified"] for row in rows], "--o", ms=3, color=colours[mode],
                        label=f"{labels[mode]}: verified")  # fmt: skip
            length.plot(at, [row["accepted"] for row in rows], "-o", ms=3, color=colours[mode],
                        label=f"{labels[mode]}: accepted")  # fmt: skip
    for place, (mine, other) in enumerate(PAIRS):
        found = [each for each in result["ratios"] if (each["of"], each["over"]) == (mine, other)]
        at, middle = [each["concurrency"] for each in found], np.array([each["median"] for each in found])
        low, high = np.array([each["quartiles"] for each in found]).T
        ratio.errorbar(at, middle, (middle - low, high - middle), fmt="-o", ms=3, capsize=2, color=f"C{place + 2}",
                       label=f"{mine} over {other}")  # fmt: skip
    ratio.axhline(1, color="0.7", lw=1, zorder=0)
    speed.set(yscale="log", ylabel="tokens/s of decode steps; least, median, most")
    ratio.set(ylabel="ratio of tokens/s in a round; quartiles")
    length.set(ylabel="drafts of a request in a step")
    ticks = sorted({row["concurrency"] for row in result["rows"]})
    for axis in (speed, ratio, length):
        axis.set(xlabel="requests at once", xscale="log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.legend(fontsize=8)
    figure.suptitle(f"Speculative decoding on {result['device']}, {result['settings']['dtype']}")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def profile(engine: Engine) -> dict[str, dict[str, float]] | None:
    """Milliseconds that decode steps took when the engine started: forward by rows, the rest by requests."""
    assert engine.speculation is not None
    found = engine.speculation.profile
    if found is None:
        return None
    parts = {"forward_ms": found.forward, "sampling_ms": found.sampling, "drafting_ms": found.drafting}
    return {name: {str(at): _rounded(1e3 * s) for at, s in part.items()} for name, part in parts.items()}


def kept(path: Path, concurrency: Sequence[int]) -> dict[str, Any]:
    """What a results file has of other numbers of requests."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"profile": {}, "rows": [], "ratios": []}
    for name in ("rows", "ratios"):
        old[name] = [row for row in old[name] if row["concurrency"] not in concurrency]
    return {name: old[name] for name in ("profile", "rows", "ratios")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the most of each concurrency (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="fewer rounds, to measure no longer than this")
    parser.add_argument("--answer", type=int, nargs=2, default=ANSWER, metavar="TOKENS", help="least and most of one")
    parser.add_argument("--turns", type=float, default=TURNS, help="requests of a run over those at once (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one config key")
    parser.add_argument("--output", type=Path, help="default: scripts/results/speculation-DEVICE.json")
    args = parser.parse_args(arguments)
    if min(args.concurrency) < 1 or args.rounds < 1 or not 0 < args.answer[0] <= args.answer[1]:
        parser.error("--concurrency and --rounds: at least 1; --answer: the least, then the most, from 1 on")
    concurrency, answer = sorted(args.concurrency), (args.answer[0], args.answer[1])
    configs = {mode: settings(args.checkpoint, concurrency, mode, args.set) for mode in MODES}
    # One client serves all three: with the allocator of the engines that draft.
    configure_jax(configs[VARLEN])
    device = jax.devices()[0].device_kind
    output: Path = args.output or RESULTS / f"speculation-{device_slug(device)}.json"
    before = kept(output, concurrency)
    trio = engines(configs)
    result: dict[str, Any] = {
        "kind": "speculation",
        "device": device,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "jaxlib", "numpy")}},
        "command": shlex.join(
            ["python", "-m", "scripts.speculation_benchmark", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "date": datetime.date.today().isoformat(),
        "settings": {
            "checkpoint": args.checkpoint,
            "dtype": configs[VARLEN].model.dtype,
            "cpu_cores": os.cpu_count(),
            "answer": list(answer),
            "turns": args.turns,
            "seed": SEED,
            "speculative": dataclasses.asdict(configs[VARLEN].speculative),
        },
        "profile": before["profile"] | {" ".join(map(str, concurrency)): profile(trio[VARLEN])},
        "rows": before["rows"],
        "ratios": before["ratios"],
    }
    began = time.perf_counter()
    with tqdm(concurrency, desc="measuring", unit="concurrency", disable=None, file=sys.stderr) as bar:
        for place, running in enumerate(bar):
            share = (args.seconds - (time.perf_counter() - began)) / (len(concurrency) - place)
            found = compare(trio, running, args.rounds, seconds=share, answer=answer, turns=args.turns)
            rows, ratios = table(running, found)
            for name, new in (("rows", rows), ("ratios", ratios)):
                result[name] = sorted([*result[name], *new], key=lambda row: int(row["concurrency"]))
            # What was measured is kept when a later part is cut short.
            output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            for line in (*rows, *ratios):
                print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
    draw(result, output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
