"""The demo model from nothing, one command: called again, it goes on where the last call ended.

    python -m scripts.train_demo --out build/demo              # one GPU; about six calls of nine minutes
    python -m scripts.train_demo --out build/trial --small     # everything in small, on a CPU in a few minutes

The stages, in order: data, three trainings of the model (`end-1` to `end-3`), their average, what quantization costs,
the draft, the checkpoint, its evaluation, the draft's calibration, curves. A stage that is done is left alone. A call
ends before `--minutes` are over, with status 0, and says on its last line what is `next`; trainings and the evaluation
are cut where the time ends and go on in the next call, from an Orbax checkpoint with the optimizer. Ctrl-C or SIGTERM
cut a training after the step that runs, with status 130 or 143; what was killed goes on from two minutes before.

The folder may move to another machine between two calls, without its `state` folders and `compiled`: an unfinished
training goes on from its weights there, at most 32 MiB in files of at most 16, and its optimizer begins anew. To go on
it needs these alone, to begin those of the training before, and the draft always the average's beside its own. The
average is made where the weights of all three trainings are. `compare` needs the states that the three trainings ended
with, the average's float32 masters: it is left out where they are not.

Each stage is a command of its own with the options below: trainings of as many tokens as the bundled weights had, and
of their draft fifteen minutes.
`--options 'draft=--peak 1e-3 --total-minutes 4'` adds to them or replaces some.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax

from di_jax.errors import UserError
from scripts import fit_sts, plot_eval
from scripts.train_demo import average, compare, evaluate, export, prepare, train, train_draft, train_report
from scripts.train_demo.dataset import check_prepared
from scripts.train_demo.identity import data_digest
from scripts.train_demo.state import progress

ENDS = ("end-1", "end-2", "end-3")
# The first training learns to write, the second sums, the third recall: the latter two with attention to everything
# first, as theirs are the attention and the indexers of the average, and with a rate that decays. An H200 reads 280,000
# tokens/s in rows of 1,024 and 150,000 in rows of 4,608.
# Every second step sees the float32 masters, in all three: trained on quantized weights alone they drift from what was
# trained, and what one training leaves to the next, and all of them to the average, are the masters.
BOTH_FORMS = "--exact-every 2"
OPTIONS = {
    "end-1": f"--stages sparse:2.3 long --total-minutes 4 --decay-from 4 {BOTH_FORMS}",
    "end-2": f"--stages dense:5 sparse --total-minutes 6.1 --decay-from 6.1 {BOTH_FORMS}",
    "end-3": f"--stages dense:5 long --total-minutes 9.4 --decay-from 6.7 {BOTH_FORMS}",
    "draft": "--stride 4 --batch 16 --soft --length 2 --drawn 0.2 --peak 2e-3 --total-minutes 15 "
    "--held-out-rows 64 --held-out-every 500",
}
ROWS = "--rows 4 --row-length 256"
SMALL_OPTIONS = {
    "data": "--small",
    "end-1": f"{ROWS} --stages sparse --total-minutes 0.03 {BOTH_FORMS}",
    "end-2": f"{ROWS} --stages dense:0.01 sparse --total-minutes 0.08 {BOTH_FORMS}",
    "end-3": f"{ROWS} --stages sparse --total-minutes 0.03 {BOTH_FORMS}",
    "average": "--text-tokens 500 --row-length 128",
    "compare": "--text-tokens 1500 --row-length 256",
    "draft": "--stride 4 --batch 2 --row-length 128 --soft --length 2 --drawn 0.2 --peak 2e-3 --total-minutes 0.03 "
    "--held-out-rows 2 --held-out-every 20 --steps 8",
    "evaluate": "--sets copy recall_256 --limit 2 --text-tokens 1500",
    "calibrate": "--length 256 --rows 8",
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of the whole.

    arguments: of the command, from the minutes that it may take. least: minutes without which it is not begun, unless
    the call begins with it. finished: whether nothing is left of it, once the command has returned. impossible: why it
    cannot be done here, or None.
    """

    name: str
    command: Callable[[list[str]], int]
    arguments: Callable[[float], list[Any]]
    least: float = 1.0
    finished: Callable[[], bool] = lambda: True
    impossible: Callable[[], str | None] = lambda: None


def stages(out: Path, data: Path | None, packages: Path | None) -> list[Stage]:
    """All stages in the folder `out`. data: a prepared folder; None makes one there, from archives in `packages`."""
    source = ["--data", out / "data" if data is None else data]
    ends, averaged, draft = [out / name for name in ENDS], out / "averaged", out / "draft"
    exported, evaluation = out / "checkpoint", out / "eval.json"

    def weights(folder: Path, prefix: str = "weights") -> list[Path]:
        found = sorted(folder.glob(f"{prefix}-[0-9]*.npz"))
        if not found:
            raise FileNotFoundError(f"{folder} has no {prefix}-*.npz: an earlier stage is to leave them there")
        return found

    def trained(folder: Path, prefix: str) -> bool:
        clock = progress(folder, prefix)
        return clock is not None and clock.done

    def training(number: int) -> Stage:
        folder = ends[number]

        def arguments(minutes: float) -> list[Any]:
            begun = not number or progress(folder, "weights")
            before = [] if begun else ["--weights", *weights(ends[number - 1])]
            stretch = ["--state", folder / "state", "--out", folder, "--minutes", minutes, "--seed", number]
            return [*source, *before, *stretch]

        return Stage(folder.name, train.main, arguments, 2.0, lambda: trained(folder, "weights"))

    def drafting(minutes: float) -> list[Any]:
        stretch = ["--state", draft / "state", "--out", draft, "--minutes", minutes]
        return [*source, "--target", *weights(averaged), *stretch]

    def evaluating(minutes: float) -> list[Any]:
        until = ["--minutes", max(minutes - 1.0, 0.5), "--compile-dir", out / "compiled"]
        return [*source, "--checkpoint", exported, "--out", evaluation, *until]

    def exporting(_: float) -> list[Any]:
        return [*source, "--weights", *weights(averaged), *weights(draft, "draft"), "--out", exported]

    def preparing(_: float) -> list[Any]:
        return ["--folder", source[1], *(["--packages", packages] if packages else [])]

    def without_masters() -> str | None:
        gone = [end / "state" for end in ends if not (end / "state").is_dir()]
        return f"no {gone[0]}: float32 masters are on the machine that trained, only" if gone else None

    def comparing(_: float) -> list[Any]:
        cooled = json.loads((averaged / average.CHOSEN).read_text(encoding="utf-8"))["temperature"]
        states = [end / "state" for end in ends]
        return [*source, "--state", *states, "--temperature", cooled, "--out", out / "masters.json"]

    logs, log = [end / "log.jsonl" for end in ends], out / "training-log.jsonl"
    drawn = [draft / "draft_log.jsonl", "--out", out / "draft-log.jsonl"]
    plan = [
        Stage("data", prepare.main, preparing),
        *(training(number) for number in range(len(ends))),
        Stage("average", average.main, lambda _: [*source, "--ends", *ends, "--out", averaged]),
        Stage("compare", compare.main, comparing, impossible=without_masters),
        Stage("draft", train_draft.main, drafting, 2.0, lambda: trained(draft, "draft")),
        Stage("export", export.main, exporting),
        Stage("evaluate", evaluate.main, evaluating, 2.0, evaluation.is_file),
        Stage("calibrate", fit_sts.main, lambda _: [*source, "--checkpoint", exported, "--out", out / "sts.json"]),
        Stage("curves", train_report.main, lambda _: [*logs, "--out", log], 0.2),
        Stage("draft-curves", train_report.main, lambda _: drawn, 0.2),
        Stage("bars", plot_eval.main, lambda _: [evaluation], 0.2),
    ]
    return plan if data is None else plan[1:]


def read_ledger(file: Path, names: list[str]) -> dict[str, Any]:
    """What stages.json says: `done`, of the stages `names`, and `seconds` of each. Raises ValueError."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(kept, dict):
        raise ValueError(f"a {type(kept).__name__} in place of an object")
    for key, empty in (("done", []), ("seconds", {})):
        if type(kept.setdefault(key, empty)) is not type(empty):
            raise ValueError(f"{key}: {kept[key]!r}")
    if unknown := [name for name in (*kept["done"], *kept["seconds"]) if name not in names]:
        raise ValueError(f"{unknown[0]!r} is no stage")
    return kept


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo", description="train the demo model, in calls of a few minutes"
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of everything; build/demo")
    parser.add_argument("--data", type=Path, help="what scripts.train_demo.prepare made; default: made in --out")
    parser.add_argument("--packages", type=Path, help="where the archives of the texts are, or are fetched to")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, at least 1; 9")
    parser.add_argument("--small", action="store_true", help="a small model, few texts and steps: a trial on a CPU")
    parser.add_argument("--options", action="append", default=[], metavar="STAGE=WORDS", help="more for a stage")
    parser.add_argument("--skip", action="append", default=[], metavar="STAGE", help="takes it for done")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    if not 1 <= args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g}: a number from 1 on, which compiling and saving alone take")
    if args.packages and (args.small or args.data):
        parser.error(f"--packages: not read with --{'small' if args.small else 'data'}, whose texts are at hand")
    out = args.out.absolute()
    if out.exists() and not out.is_dir():
        parser.error(f"--out {out}: a file; name a folder")
    plan = stages(out, args.data and args.data.absolute(), args.packages and args.packages.absolute())
    names = [stage.name for stage in plan]
    if unknown := [name for name in args.skip if name not in names]:
        parser.error(f"--skip {unknown[0]}: not one of {', '.join(names)}")
    options = {name: words.split() for name, words in (SMALL_OPTIONS if args.small else OPTIONS).items()}
    for given in args.options:
        name, equals, words = given.partition("=")
        if not equals or name not in names:
            parser.error(f"--options {given}: not STAGE=WORDS with a STAGE of {', '.join(names)}")
        try:
            options[name] = [*options.get(name, []), *shlex.split(words)]
        except ValueError as error:
            parser.error(f"--options {given}: {error}")
    out.mkdir(parents=True, exist_ok=True)
    ledger = out / "stages.json"
    try:
        kept = read_ledger(ledger, ["data", *names])
    except ValueError as error:
        parser.error(
            f"{ledger} is damaged ({error}): delete it, and stages that left their files are gone through again"
        )
    if kept.setdefault("small", args.small) != args.small:
        parser.error(f"--out {out}: begun {'with' if kept['small'] else 'without'} --small; name another folder")
    done, seconds = kept["done"], kept["seconds"]
    done += [name for name in args.skip if name not in done]
    data = args.data or out / "data"

    def same_data() -> None:
        """Weights of other tokens would be trained on in silence. Raises ValueError and OSError."""
        check_prepared(data)
        if kept.setdefault("data_sha256", digest := data_digest(data)) != digest:
            raise ValueError(f"{data} holds other data than {out} was begun with: name that, or another --out")

    if args.data or "data" in done:
        try:
            same_data()
        except (OSError, ValueError) as error:
            parser.error(f"{'--data' if args.data else '--out'}: {error}")
    jax.config.update("jax_compilation_cache_dir", str(out / "compiled"))
    todo = [stage for stage in plan if stage.name not in done]
    for stage in todo:
        start = time.monotonic()
        if why := stage.impossible():
            print(f"[{plan.index(stage) + 1}/{len(plan)}] {stage.name}: left out: {why}", file=sys.stderr, flush=True)
            kept["left_out"] = {**kept.get("left_out", {}), stage.name: why}
            done.append(stage.name)
            ledger.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            continue
        left = args.minutes - (start - began) / 60
        if left < stage.least and stage is not todo[0]:
            break
        print(
            f"[{plan.index(stage) + 1}/{len(plan)}] {stage.name}: {left:.1f} minutes left", file=sys.stderr, flush=True
        )
        try:
            words = [str(word) for word in stage.arguments(round(left, 3))] + options.get(stage.name, [])
            if code := stage.command(words):
                return code
            if stage.name == "data":
                same_data()
        except (UserError, OSError, ValueError, KeyError, BadZipFile) as error:
            print(
                f"error: stage {stage.name}: {type(error).__name__}: {error}\n"
                "If a file that it reads is damaged or gone, restore it. Of a damaged `state` folder only that may be "
                "deleted: a training goes on from the weights beside it. Else delete the folder of the stage that made "
                f"the file, and that stage's name in {ledger}.",
                file=sys.stderr,
            )
            return 2
        seconds[stage.name] = round(seconds.get(stage.name, 0.0) + time.monotonic() - start, 1)
        if stage.finished():
            done.append(stage.name)
        ledger.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        if stage.name not in done:
            break
    following = next((name for name in names if name not in done), None)
    print(json.dumps({"done": len(done), "of": len(plan), "next": following}))
    if following is not None:
        print(f"call again: {following} is next", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
