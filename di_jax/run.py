"""The command line: `python -m di_jax.run [COMMAND] --config FILE_OR_NAME [--set key=value ...] [options]`.

Nothing but parsing and dispatch: a command is the function `run(config, args) -> exit code` of
`di_jax.commands.<command>`, imported when asked for, so that a wrong key is reported before jax is imported.
Logs and the resolved config go to stderr, results to stdout. Exit codes: 0 all good; 1 some requests failed;
2 bad config, arguments or checkpoint; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from di_jax.config import COMMANDS, load_config
from di_jax.errors import UserError
from di_jax.parallel.processes import ending_together

# Commands that exist, and the options each takes beside --config, --set and --json.
OPTIONS: dict[str, tuple[str, ...]] = {
    "generate": ("input", "prompt", "output"),
    "score": ("input", "output"),
    "bench": ("output",),
    "plan": ("output",),
    "eval": ("dump", "judge_only"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Exits with 2, through argparse, on unusable arguments."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except UserError as error:
        try:
            sys.stdout.flush()
        except OSError:  # it may be stdout that this error is about
            _discard_stdout()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): nothing more to say.
        _discard_stdout()
        return 1


def _discard_stdout() -> None:
    """Drops what stdout could not take: Python flushes it once more at exit, and would report that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace: command (None: the config's), config, set, json, input, prompt, output, dump,
    judge_only."""
    parser = _Parser(
        prog="python -m di_jax.run",
        description="DeepSeek-V4.1-Flash inference in JAX. Logs go to stderr, results to stdout.",
        epilog="exit codes: 0 all good; 1 some requests failed; 2 bad config, arguments or checkpoint; 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=f"{', '.join(COMMANDS)}; default: the config's")
    parser.add_argument(
        "--config", required=True, metavar="FILE_OR_NAME", help="a path or the name of a packaged config"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one dotted key; the value is YAML"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    parser.add_argument("--input", type=Path, metavar="FILE.jsonl", help="generate, score: request records")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="generate: a prompt; repeatable")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="generate: .jsonl (else stdout); score: .safetensors; bench: .json"
    )
    parser.add_argument("--dump", type=Path, metavar="FILE.jsonl", help="eval: where each answer goes at once")
    parser.add_argument(
        "--judge-only", type=Path, metavar="FILE.jsonl", help="eval: a dump to score; no model is loaded"
    )
    args = parser.parse_intermixed_args(argv)
    if args.command is not None and args.command not in COMMANDS:
        near = difflib.get_close_matches(args.command, COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command {args.command!r}; {advice}")
    if args.input and args.prompt:
        parser.error("--input and --prompt are both given; keep one")
    if args.dump and args.judge_only:
        parser.error("--dump and --judge-only are both given; keep one")
    return args


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def _run(argv: Sequence[str] | None) -> int:
    args = parse_arguments(argv)
    overrides = list(args.set) + ([f"command={args.command}"] if args.command else [])
    config = load_config(args.config, overrides)
    options = OPTIONS.get(config.command)
    if options is None:
        raise UserError(f"{config.command} is not available yet; this version has {', '.join(OPTIONS)}")
    for option in dict.fromkeys(name for names in OPTIONS.values() for name in names):
        if getattr(args, option) and option not in options:
            raise UserError(f"--{option.replace('_', '-')} is not an option of {config.command}")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for package in ("di_jax", "kernels_pallas"):
        logging.getLogger(package).setLevel(logging.INFO)
    print(f"# resolved config {config.digest()[:12]}\n{config.to_yaml()}", file=sys.stderr, flush=True)
    command = importlib.import_module(f"di_jax.commands.{config.command}")
    with ending_together():
        code: int = command.run(config, args)
    return code


if __name__ == "__main__":
    sys.exit(main())
