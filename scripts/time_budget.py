"""What a very long prompt does to the chats beside it, with and without the time budget (engine.itl_target_ms).

python -m scripts.time_budget      writes scripts/results/time-budget-cpu.json and .png in about eight minutes

CHATS short chats are always open: when one ends, the next one comes. After a while one prompt of PROMPT tokens joins
them. Reported: the time between two tokens of a chat while that prompt is read, and how long reading it takes. A
prompt longer than the checkpoint's positions (65,536 in the bundled one) raises their number, which changes no time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import jax
import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from di_jax.checkpoint.hub import resolve_checkpoint
from di_jax.config import Config, load_config
from di_jax.config_schema import parse_yaml
from di_jax.engine.engine import Engine
from di_jax.engine.sequence import Request
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "time-budget-cpu.json"
SEED = 20260910
PROMPT, TARGET_MS = 48_000, 500.0
CHATS, CHAT_PROMPT, CHAT_ANSWER = 8, 48, 64
ALONE_S = 10.0  # of chats only, before the long prompt and after it
BLOCK = 128


@dataclasses.dataclass
class Timeline:
    """What happened, in seconds from the start. tokens: (when, seconds since the chat's token before) of every chat
    token but first ones, which are in firsts: (when, seconds since the chat came). arrived, answered: of the long
    prompt, and of its first token; chunks: of it."""

    tokens: list[tuple[float, float]]
    firsts: list[tuple[float, float]]
    arrived: float
    answered: float
    chunks: int

    def gaps(self, *, meanwhile: bool, firsts: bool = False) -> np.ndarray:
        """Times between tokens, or to first ones, in which the long prompt was read at least for a part, or not."""
        when, gaps = np.array(self.firsts if firsts else self.tokens).T
        return gaps[((when > self.arrived) & (when - gaps < self.answered)) == meanwhile]


def stretched(checkpoint: Path, positions: int, folder: Path) -> Path:
    """The checkpoint in `folder`, with at least so many positions in its config."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = max(positions, part["max_position_embeddings"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def settings(checkpoint: Path, prompt: int, compile_dir: str | None, overrides: Sequence[str] = ()) -> Config:
    """The engine of both runs. Several shapes of prefill steps: a small chunk takes less time in a small one.

    overrides: KEY=VALUE of config keys, values in YAML. Raises ConfigError for them."""
    length = -(-(prompt + 1) // BLOCK) * BLOCK
    values: dict[str, Any] = {
        "model.path": str(checkpoint),
        "engine.max_num_seqs": CHATS + 1,
        "engine.max_num_batched_tokens": 2048,
        "engine.prefill_buckets": [256, 512, 2048],
        "engine.decode_buckets": [CHATS + 1],
        "engine.max_model_len": length,
        "engine.context_buckets": [1024, *(length >> halvings for halvings in (2, 1, 0) if length >> halvings > 1024)],
        "engine.num_blocks": 2 * length // BLOCK,
        "engine.prefix_caching": False,
        "engine.warmup": False,  # `measure` compiles those that are needed: the long prompt never decodes
        "engine.log_interval": 0,
        "cache.compile_dir": compile_dir,
    }
    for override in overrides:
        name, _, value = override.partition("=")
        values[name.strip()] = parse_yaml(value, f"--set {override}")
    return load_config("quickstart").with_values(values)


def watch(engine: Engine, prompt: int, alone_s: float) -> Timeline:
    """Chats for `alone_s` seconds, then a long prompt among them, and chats for as long after its first token."""
    random = np.random.default_rng(SEED)
    vocabulary, began = engine.parts.model_config.vocab_size, time.perf_counter()
    chats: dict[str, tuple[Request, int, float]] = {}  # tokens so far, and when the last one came
    tokens: list[tuple[float, float]] = []
    firsts: list[tuple[float, float]] = []
    long: Request | None = None
    arrived = answered = float("inf")
    chunks = 0

    def ask(tokens: int, answer: int) -> Request:
        ids = random.integers(0, vocabulary, tokens).tolist()
        return engine.add_request(
            ids, SamplingParams(temperature=1.0, seq_seed=1, max_tokens=answer, ignore_eos=True, detokenize=False)
        )

    with tqdm(total=prompt, desc="reading", unit="token", disable=None, file=sys.stderr) as bar:
        while (now := time.perf_counter() - began) < answered + alone_s:
            if long is None and now >= alone_s:
                long, arrived = ask(prompt, 1), now
            while len(chats) < CHATS:
                # Lengths of their own, so that they do not all end together.
                request = ask(CHAT_PROMPT, int(random.integers(CHAT_ANSWER // 2, CHAT_ANSWER * 3 // 2)))
                chats[request.request_id] = request, 0, now
            report = engine.step()
            assert report is not None
            now = time.perf_counter() - began
            if long is not None and answered == float("inf"):
                launched = long.sequences[0].num_computed - bar.n
                chunks += launched > 0
                bar.update(launched)
                if long.first_token is not None:
                    answered = now
            for request in report.requests:
                if request.request_id not in chats:
                    continue
                _, count, last = chats[request.request_id]
                if request.num_output_tokens > count:
                    (tokens if count else firsts).append((now, now - last))
                chats[request.request_id] = request, request.num_output_tokens, now
                if request.finished:
                    del chats[request.request_id]
    for request_id in chats:
        engine.abort(request_id)
    while engine.step() is not None:
        pass
    return Timeline(tokens, firsts, arrived, answered, chunks)


def summary(timeline: Timeline, target_ms: float | None) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {"itl_target_ms": target_ms}
    for name, meanwhile in (("beside_prompt", True), ("alone", False)):
        gaps = 1e3 * timeline.gaps(meanwhile=meanwhile)
        p50, p90, p99 = np.quantile(gaps, (0.5, 0.9, 0.99)).tolist()
        row[name] = {"tokens": len(gaps), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "max_ms": float(gaps.max())}
        firsts = 1e3 * timeline.gaps(meanwhile=meanwhile, firsts=True)
        row[name] |= {
            "first_tokens": len(firsts),
            "first_token_p50_ms": float(np.median(firsts)) if len(firsts) else None,
        }
    reading = timeline.answered - timeline.arrived
    row |= {"ttft_s": reading, "chunks": timeline.chunks}
    row["chat_tokens_per_s_beside_prompt"] = row["beside_prompt"]["tokens"] / reading
    return row


def draw(timelines: dict[str, Timeline], target_ms: float, prompt: int, picture: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), width_ratios=(2, 1), layout="constrained")
    colours = dict(zip(timelines, ("tab:red", "tab:blue"), strict=True))
    for left, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        when, gaps = np.array(timeline.tokens).T
        left.semilogy(when, 1e3 * gaps, ".", ms=2, color=colours[name])
        left.axvspan(timeline.arrived, timeline.answered, color="gray", alpha=0.15, label=f"{prompt:,} tokens are read")
        left.axhline(target_ms, ls="--", lw=0.8, color="black", label=f"{target_ms:g} ms")
        left.set(title=name, xlabel="seconds", ylabel="ms between two tokens of a chat")
        left.legend(fontsize=7, loc="upper right")
    low = min(axis.get_ylim()[0] for axis in axes[:, 0])
    high = max(axis.get_ylim()[1] for axis in axes[:, 0])
    for axis in axes[:, 0]:
        axis.set_ylim(low, high)
    for axis, meanwhile, title in ((axes[0, 1], True, "while it is read"), (axes[1, 1], False, "at other times")):
        for name, timeline in timelines.items():
            gaps = np.sort(1e3 * timeline.gaps(meanwhile=meanwhile))
            axis.loglog(gaps, np.maximum(1 - np.arange(len(gaps)) / len(gaps), 1e-6), color=colours[name], label=name)
        axis.axhline(0.01, ls=":", lw=0.8, color="gray", label="p99")
        axis.axvline(target_ms, ls="--", lw=0.8, color="black")
        axis.set(title=title, xlabel="ms", ylabel="share of tokens that took longer", ylim=(1e-3, 1.2))
        axis.legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def measure(parts: EngineParts, config: Config, target_ms: float, prompt: int, alone_s: float) -> dict[str, Timeline]:
    """Both runs over the same weights and programs, without the budget first."""
    short = parts.ladder.context_blocks[0]
    parts.runner.warm_up([b for b in parts.ladder.buckets() if not b.decode or b.context_blocks == short])
    timelines = {}
    for name, target in (("without a time budget", None), (f"itl_target_ms {target_ms:g}", target_ms)):
        engine = Engine(parts, dataclasses.replace(config.engine, itl_target_ms=target))
        timelines[name] = watch(engine, prompt, alone_s)
    return timelines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a long prompt amid short chats, with and without the time budget")
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the long prompt")
    parser.add_argument("--target-ms", type=float, default=TARGET_MS, help="engine.itl_target_ms of the second run")
    parser.add_argument("--alone-s", type=float, default=ALONE_S, help="seconds of chats alone, before and after")
    parser.add_argument("--compile-dir", default=None, help="folder of compiled steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one config key")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = stretched(resolve_checkpoint(args.checkpoint), args.prompt + 2 * BLOCK, Path(folder))
        config = settings(checkpoint, args.prompt, args.compile_dir, args.set)
        timelines = measure(build_engine_parts(config), config, args.target_ms, args.prompt, args.alone_s)
    rows = [summary(t, target) for t, target in zip(timelines.values(), (None, args.target_ms), strict=True)]
    result = {
        "kind": "time-budget",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "command": shlex.join(
            ["python", "-m", "scripts.time_budget", f"--prompt={args.prompt}", f"--target-ms={args.target_ms:g}"]
            + [f"--set={override}" for override in args.set]
        ),
        "date": datetime.date.today().isoformat(),
        "settings": {
            "checkpoint": args.checkpoint,
            "prompt": args.prompt,
            "chats": CHATS,
            "chat_prompt": CHAT_PROMPT,
            "cpu_cores": os.cpu_count(),
            "max_num_batched_tokens": config.engine.max_num_batched_tokens,
            "dtype": config.model.dtype,
            "replay_decoder": config.engine.replay.decoder,
            "prefill_buckets": config.engine.prefill_buckets,
            "context_buckets": config.engine.context_buckets,
        },
        "rows": rows,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(timelines, args.target_ms, args.prompt, args.output.with_suffix(".png"))
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
