"""Fits the temperatures of a draft's confidence and shows how well calibrated it is (dspark 1.5).

python -m scripts.fit_sts --checkpoint demo --data build/train_demo --out scripts/results/demo-sts.json
python -m scripts.fit_sts --checkpoint FOLDER --input texts.jsonl --out sts.json

Target and draft run teacher-forced over rows of --length tokens: a held-out mix of the demo's training data, or the
prompts of a file of requests. The temperatures are fitted on every other row and judged on the rest; they go into
`speculative.confidence_temperatures`. A position keeps 1 where no temperature clearly lowers the error on rows that it
was not fitted on. A reliability diagram is drawn beside the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

from di_jax.checkpoint.hub import resolve_checkpoint
from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.commands.records import read_records
from di_jax.engine.confidence import calibration_error, fit_temperatures, reliability, roc_auc, survival
from di_jax.errors import UserError
from di_jax.model.config import ModelConfig
from di_jax.model.dspark import DraftModel, assemble_draft
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.transformer import Transformer, assemble
from di_jax.prompts import PromptEncoder
from di_jax.tokenizer import Tokenizer
from scripts import command_line
from scripts.train_demo.dataset import Batches, Data
from scripts.train_demo.forward import training_layout, training_rows
from scripts.train_demo.identity import tokenizer_mismatch
from scripts.train_demo.tasks import IGNORE, PROMPT, TEXT
from scripts.train_demo.train_draft import anchors, blocks

BATCH = 4  # rows of a pass
SEED = 11


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is run: tokens int32 [N, T + 1], and classes uint8 [N, T] of the predicted ones, TEXT for plain text."""

    tokens: np.ndarray
    classes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Teacher-forced blocks of k drafts at A anchors.

    score: raw confidence fp32 [A, k]. overlap: 1 - TV of draft and target, fp32 [A, k]: the chance that a sampled draft
    is accepted if all before it are. agree: bool [A, k], both have the same likeliest token. live: bool [A, k], no end
    token comes before this draft. kind: class of the first drafted token. row: the row that the block is in.
    """

    score: np.ndarray
    overlap: np.ndarray
    agree: np.ndarray
    live: np.ndarray
    kind: np.ndarray
    row: np.ndarray

    def select(self, which: np.ndarray) -> Blocks:
        return Blocks(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))

    @property
    def accepted(self) -> np.ndarray:
        """Chance fp32 [A, k] that all drafts up to each are accepted, when they are sampled."""
        return np.cumprod(self.overlap, axis=1)

    def lengths(self) -> dict[str, float]:
        """Mean accepted drafts of a block, sampled and greedy; an answer's end ends its block."""
        greedy = np.cumprod(self.agree, axis=1)
        return {
            "blocks": len(self.score),
            "sampled": round(float(np.mean(np.sum(self.accepted * self.live, axis=1))), 4),
            "greedy": round(float(np.mean(np.sum(greedy * self.live, axis=1))), 4),
        }


def load_models(folder: Path) -> tuple[Tokenizer, Transformer, DraftModel]:
    """Target and draft of a checkpoint, in float32. Raises ModelConfigError or CheckpointError."""
    config = ModelConfig.from_file(folder)
    tokenizer = Tokenizer.from_folder(folder, config)
    tables = EngramTables.build(config, tokenizer.raw) if config.engram_layer_ids else None
    numerics = Numerics.create("float32")
    with open_checkpoint(folder, config) as reader:
        leaves = load_leaves(reader, config, None, draft=True)
    draft = assemble_draft(config, numerics, leaves)
    own = {path: leaf for path, leaf in leaves.items() if not path.startswith("draft.")}
    return tokenizer, assemble(config, numerics, own, tables), draft


def collect(target: Transformer, draft: DraftModel, rows: Rows, end: int) -> Blocks:
    """Blocks at anchors that predict text or answers. `end`: id of the end token. T divides by 128, N by BATCH."""
    graphs, states = zip(*(nnx.split(model) for model in (target, draft)), strict=True)
    length, block = rows.classes.shape[1], draft.config.draft_block

    @jax.jit
    def run(states: Any, tokens: Array, offset: Array) -> dict[str, Array]:
        target, draft = (nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True))
        layout = training_layout(target.config, target.numerics, len(tokens), length)
        out = target(training_rows(tokens[:, :-1]), layout.allocate(), layout, taps=True)
        found = blocks(draft, target, tokens, out.hidden, out.taps, offset)
        p, q = jnp.exp(found["log_p"]), jnp.exp(found["log_q"])
        return {
            "score": found["score"],
            "overlap": jnp.sum(jnp.minimum(p, q), axis=-1),
            "agree": jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1),
        }

    rng = np.random.default_rng(SEED)
    made: list[Blocks] = []
    for first in tqdm(range(0, len(rows.tokens), BATCH), desc="blocks", unit="pass", disable=None, file=sys.stderr):
        offset = rng.integers(0, 8)
        tokens, classes = rows.tokens[first : first + BATCH], rows.classes[first : first + BATCH]
        found = jax.device_get(run(states, jnp.asarray(tokens), jnp.int32(offset)))
        at = np.asarray(anchors(length, block, jnp.int32(offset)))
        drafted = tokens[:, at[:, None] + 1 + np.arange(block)].reshape(-1, block)
        live = np.cumprod(np.pad(drafted[:, :-1] != end, ((0, 0), (1, 0)), constant_values=True), axis=1) > 0
        row = np.repeat(np.arange(first, first + len(tokens)), len(at))
        made.append(Blocks(found["score"], found["overlap"], found["agree"], live, classes[:, at].reshape(-1), row))
    whole = Blocks(*(np.concatenate([getattr(b, f.name) for b in made]) for f in dataclasses.fields(Blocks)))
    return whole.select(~np.isin(whole.kind, (PROMPT, IGNORE)))


def demo_rows(folder: Path, length: int, count: int) -> Rows:
    """Held-out rows in the mix that the draft was trained on."""
    made = Batches(Data(folder, "eval"), SEED, BATCH, length)
    batches = [made.at(step) for step in range(count // BATCH)]
    return Rows(*(np.concatenate([batch[name] for batch in batches]) for name in ("tokens", "classes")))


def text_rows(path: Path, encoder: PromptEncoder, length: int, count: int) -> Rows:
    """The prompts of a .jsonl file of requests one after the other, cut into rows. Raises ValueError when they are too
    short, UserError for a line that is no request."""
    ids: list[int] = []
    for record in read_records(path):
        if record.error is not None:
            raise UserError(f"{path}: {record.error}")
        ids += encoder.encode(record.prompt)[1]
    count = min(count, len(ids) // (length + 1)) // BATCH * BATCH
    if not count:
        raise ValueError(f"{path}: {len(ids)} tokens; {BATCH} rows of {length + 1} are needed")
    tokens = np.array(ids[: count * (length + 1)], np.int32).reshape(count, length + 1)
    return Rows(tokens, np.full((count, length), TEXT, np.uint8))


def calibrate(found: Blocks) -> tuple[np.ndarray, dict[str, dict[str, Any]], Blocks]:
    """(temperatures [k] fitted on the even rows, measures of the survival on the odd rows before and after, those rows'
    blocks). Measures: the calibration error, and the area under the ROC curve, which temperatures are not to change.

    Only blocks that no end token cuts are counted.
    """
    whole = found.select(found.live.all(axis=1))
    fitted, judged = whole.select(whole.row % 2 == 0), whole.select(whole.row % 2 == 1)
    temperatures = fit_temperatures(fitted.score, fitted.accepted, fitted.row)
    measures = {}
    for name, measure in (("calibration_error", calibration_error), ("roc_auc", roc_auc)):
        measures[name] = {
            "before": by_position(measure, survival(judged.score), judged.accepted),
            "after": by_position(measure, survival(judged.score, temperatures), judged.accepted),
        }
    return temperatures, measures, judged


def by_position(
    measure: Callable[[np.ndarray, np.ndarray], float], chance: np.ndarray, accepted: np.ndarray
) -> dict[str, Any]:
    """A measure of all survivals, and of those up to each draft."""
    each = [measure(chance[:, k], accepted[:, k]) for k in range(chance.shape[1])]
    return {
        "all": round(measure(chance.reshape(-1), accepted.reshape(-1)), 5),
        "by_position": [round(value, 5) for value in each],
    }


def chart(judged: Blocks, temperatures: np.ndarray, picture: Path) -> None:
    """Reliability of the survival up to each draft: stated against accepted, before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.5), sharey=True, layout="constrained")
    for axes, title, divisor in zip(panels, ("before", "after temperatures"), (None, temperatures), strict=True):
        chance = survival(judged.score, divisor)
        for k in range(chance.shape[1]):
            table = reliability(chance[:, k], judged.accepted[:, k])
            filled = table[table[:, 0] >= 10]
            axes.plot(filled[:, 1], filled[:, 2], "o-", ms=3, lw=1, label=f"up to draft {k + 1}")
        error = calibration_error(chance.reshape(-1), judged.accepted.reshape(-1))
        axes.plot([0, 1], [0, 1], color="0.7", lw=1, zorder=0)
        axes.set(title=f"{title}: error {error:.1%}", xlabel="stated chance of survival", xlim=(0, 1), ylim=(0, 1))
    panels[0].set_ylabel("accepted share")
    panels[0].legend(fontsize=8)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fit the temperatures of a draft's confidence")
    parser.add_argument("--checkpoint", default="demo", help="as model.path: a folder, a hub id or demo")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="what scripts.train_demo.prepare made")
    source.add_argument("--input", type=Path, help="texts, as .jsonl records")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, a multiple of 128")
    parser.add_argument("--rows", type=int, default=64, help="rows, at most")
    parser.add_argument("--note", default="", help="kept with the results")
    parser.add_argument("--out", type=Path, required=True, help="JSON; the diagram goes beside it")
    args = parser.parse_args(arguments)
    if args.length < 128 or args.length % 128:
        parser.error(f"--length {args.length}: not a multiple of 128")
    if args.rows < BATCH:
        parser.error(f"--rows {args.rows}: at least {BATCH} are needed")
    folder = resolve_checkpoint(args.checkpoint)
    if args.data and (why := tokenizer_mismatch(args.data, folder)):
        parser.error(f"--checkpoint {args.checkpoint}: {why}")
    tokenizer, target, draft = load_models(folder)
    if args.data:
        rows = demo_rows(args.data, args.length, args.rows)
    else:
        rows = text_rows(args.input, PromptEncoder(folder, tokenizer), args.length, args.rows)
    found = collect(target, draft, rows, tokenizer.eos_id)
    temperatures, measures, judged = calibrate(found)
    text, answers = found.select(found.kind == TEXT), found.select(found.kind != TEXT)
    source_words = ["--data", str(args.data)] if args.data else ["--input", str(args.input)]
    sizes = ["--length", str(args.length), "--rows", str(args.rows)]
    words = ["--checkpoint", args.checkpoint, *source_words, *sizes, "--out", str(args.out)]
    result = {
        "kind": "sts",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "numpy")}},
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "scripts.fit_sts", *words]),
        "note": args.note,
        "rows": len(rows.tokens),
        "accepted_drafts": {
            name: part.lengths()
            for name, part in (("all", found), ("text", text), ("answers", answers))
            if len(part.score)
        },
        "confidence_temperatures": [round(float(t), 4) for t in temperatures],
        **measures,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    chart(judged, temperatures, args.out.with_suffix(".png"))
    print(json.dumps({k: result[k] for k in ("accepted_drafts", "confidence_temperatures", *measures)}))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
