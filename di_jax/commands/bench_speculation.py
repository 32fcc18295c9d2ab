"""`bench`, kind host, with `bench.recording`: what confidence-scheduled verification gains over verifying every draft.

The policy is the engine's own object (`engine.speculation.Speculation`, with `engine.allocation`) over the four row
counts of an engine whose decode bucket is the number of requests; a step is in flight when the next is planned. Blocks
are those that a draft model recorded: its calibrated confidence and the chance that its drafts are in truth accepted,
both raised to one power, so that five drafts yield 3.29 tokens as published of the released model; the order of all
drafts is the recorded one. A step of so many rows takes 9.3 ms + 21 us a row, which agrees with the published decode
chart (dspark 5). scripts/speculation_simulator.py has other policies and blocks beside these.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from di_jax.config import Config
from di_jax.engine.allocation import allocate_reference
from di_jax.engine.batch import DecodeBatch, DecodePart
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.speculation import Outlook, Rounds, Speculation
from di_jax.engine.step_output import DraftOutput, StepOutput
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_profile import StepProfile
from di_jax.engine.verification import fill
from di_jax.errors import ConfigError, UserError

SEED = 20261130
DRAFTS = 5
ACCEPTED_LENGTH = 3.29  # tokens of a step that verifies all drafts, the one that is always drawn included
STEP_S, ROW_S = 9.3e-3, 21e-6  # seconds of a step, and of each of its rows, drafting included
REQUEST_STEPS = 32_768  # steps times requests of each simulation, but no fewer steps than
LEAST_STEPS = 400
WARM_UP = 64  # steps before those: at first every draft is verified, as nothing is known
WINDOW = 128  # positions of context that the draft reads
ARRAYS = ("score", "overlap", "text")  # of a recording

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RecordingError(UserError):
    """A file holds no recording that could be simulated; says why, and leaves to the caller which file."""


@dataclass(frozen=True)
class Blocks:
    """Drafted blocks, in the order of their texts.

    confidence: stated chance of each draft given those before it, [N, k]. chance: the true one, [N, k]. text: [N],
    rising, which text the block is of. weight: [N], how likely a block is drawn, where they do not follow each other.
    """

    confidence: Floats
    chance: Floats
    text: NDArray[np.int64]
    weight: Floats | None = None

    @property
    def accepted(self) -> Floats:
        """Chance that all drafts up to each are accepted, [N, k]."""
        return np.cumprod(self.chance, axis=1)

    def accepted_length(self) -> float:
        """Mean tokens of a step that verifies all drafts."""
        return 1 + float(np.average(self.accepted.sum(axis=1), weights=self.weight))

    def accepted_of(self, verified: float) -> float:
        """Mean tokens of a step that verifies so many drafts of a request on average, those of highest confidence."""
        weight = np.full(len(self.text), 1 / len(self.text)) if self.weight is None else self.weight
        order = np.argsort(-np.cumprod(self.confidence, axis=1).reshape(-1), kind="stable")
        spent = np.cumsum(np.repeat(weight, self.chance.shape[1])[order])
        gained = np.cumsum((weight[:, None] * self.accepted).reshape(-1)[order])
        return 1 + float(np.interp(verified, spent, gained))

    def following(self, rng: np.random.Generator, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(the block after each of `at`, whether it is the first of another request's text)."""
        if self.weight is not None:
            return rng.choice(len(self.text), len(at), p=self.weight), np.zeros(len(at), bool)
        after = (at + 1) % len(self.text)
        return after, self.text[after] != self.text[at]


def load_blocks(recording: Path, temperatures: Sequence[float]) -> Blocks:
    """The blocks of a recording, with the confidence calibrated.

    recording: .npz of score, logits of the confidence [N, 5]; overlap, chance that each draft is accepted [N, 5];
    text, rising [N]. temperatures: of the five places. Raises RecordingError.
    """
    arrays = _arrays(recording)
    score, overlap, text = (arrays[name] for name in ARRAYS)
    count = len(text) if text.ndim == 1 else 0
    for name in ("score", "overlap"):
        if not count or arrays[name].shape != (count, DRAFTS):
            raise RecordingError(
                f"has {name} {list(arrays[name].shape)} and text {list(text.shape)}; expected [N, {DRAFTS}] and [N] of "
                f"N blocks of {DRAFTS} drafts"
            )
    if not np.isfinite(score).all() or not ((overlap >= 0) & (overlap <= 1)).all() or (text[1:] < text[:-1]).any():
        raise RecordingError("has other values than finite score, overlap from 0 to 1 and rising text")
    confidence = 1 / (1 + np.exp(-score.astype(np.float64) / temperatures))
    return Blocks(confidence, overlap.astype(np.float64), text.astype(np.int64))


def _arrays(recording: Path) -> dict[str, NDArray[Any]]:
    """The ARRAYS of the file. Raises RecordingError."""
    arrays = None
    try:
        with recording.open("rb") as file:
            stored = np.load(file)
            if isinstance(stored, NpzFile):
                arrays = {name: stored[name] for name in ARRAYS if name in stored}
    except OSError as error:
        raise RecordingError(f"cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RecordingError("is not a whole .npz file of numbers") from error
    if arrays is None:
        raise RecordingError("is one array; expected an .npz file")
    if missing := [name for name in ARRAYS if name not in arrays]:
        raise RecordingError(f"has no {' and no '.join(missing)}; expected the arrays {', '.join(ARRAYS)}")
    if odd := [f"{name} of {array.dtype}" for name, array in arrays.items() if array.dtype.kind not in "fiu"]:
        raise RecordingError(f"has {' and '.join(odd)}; expected numbers")
    return arrays


def bisect(rises: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a rising function reaches the goal."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < goal else (low, middle)
    return (low + high) / 2


def rescaled(blocks: Blocks, accepted_length: float) -> tuple[Blocks, float]:
    """(blocks whose mean accepted length is as given, the power that all chances were raised to). Raises RecordingError
    when no power from 0 to 4 gives it."""

    def raised(power: float) -> Blocks:
        return dataclasses.replace(blocks, confidence=blocks.confidence**power, chance=blocks.chance**power)

    power = -bisect(lambda minus: raised(-minus).accepted_length(), accepted_length, -4.0, 0.0)
    found = raised(power)
    if abs(found.accepted_length() - accepted_length) > 1e-6:
        raise RecordingError(
            f"has blocks that yield {blocks.accepted_length():.2f} tokens a step, which no power from 0 to 4 of all "
            f"chances makes {accepted_length}"
        )
    return found, power


def step_seconds(rows: float) -> float:
    """Seconds of a step of so many rows, drafting included."""
    return STEP_S + ROW_S * rows


def published_profile(ladder: BucketLadder) -> StepProfile:
    """What steps of the released model take where it was published, by which drafting pays."""
    rows = sorted({rows for requests in ladder.decode_rows for rows in ladder.verify_rows(requests)})
    none, plain = dict.fromkeys(ladder.decode_rows, 0.0), {n: step_seconds(n) for n in ladder.decode_rows}
    return StepProfile({n: step_seconds(n) for n in rows}, none, none, plain, plain)


class Policy(Protocol):
    """What plans the steps of a simulation, all of whose requests decode at once, one in each slot.

    all_rows: rows of a step that verifies every draft.
    """

    all_rows: int

    def launch(self) -> tuple[int, Ints]:
        """(rows of the next step, drafts of each request that it may verify [R])."""

    def land(self, verified: Ints, accepted: Ints, confidence: NDArray[np.float32]) -> None:
        """The results of the oldest step launched and not landed: drafts verified and accepted [R], and the block that
        each request drafted then, [R, k]."""

    def replace(self, slots: Ints, confidence: NDArray[np.float32]) -> None:
        """Other requests have these slots now; their prefill drafted these blocks [n, k]."""


class EnginePolicy:
    """`Speculation` as the engine calls it, of an engine whose decode bucket is the number of requests. Step times are
    known exactly, and those without a draft are no less. The slot table stands still: no answer is near its last token,
    and all have the context that the draft reads. varlen: as of `speculative`; False verifies every draft.
    """

    def __init__(self, requests: int, varlen: bool = True) -> None:
        self.slots = np.arange(requests)
        self.ladder = BucketLadder((requests,), (requests,), (1,), drafts=DRAFTS, varlen=varlen)
        self.all_rows = self.ladder.verify_rows(requests)[-1]
        self.table = SlotTable(requests, 1, DRAFTS)
        self.table.left[:] = 1 + DRAFTS
        profile = published_profile(self.ladder) if varlen else None
        self.books = Speculation(self.ladder, {0: self.table}, profile, WINDOW)
        self.in_flight: list[tuple[Rounds, bool]] = []

    def launch(self) -> tuple[int, Ints]:
        table, slots = self.table, self.slots
        part = DecodePart(0, table, slots, table.position[slots], [], table.caps(slots), table.drafted[slots])
        batch = self.books.plan(DecodeBatch([part], num_drafts=DRAFTS))
        (part,) = batch.parts
        rows, verifying = (len(slots), 0) if part.is_plain else (part.rows, len(slots))
        bucket = self.ladder.bucket(True, rows, 1, requests=verifying, bare=batch.bare)
        outlook = Outlook.of_all(np.array([self.books.outlook(batch).numbers()]))
        table.drafted[:] = False
        drafts = self.books.drafts(outlook, bucket)
        rounds = self.books.begin(batch, drafts)
        if drafts:
            self.books.rows(rounds, [0], outlook)
        self.in_flight.append((rounds, drafts))
        return bucket.rows, part.caps

    def land(self, verified: Ints, accepted: Ints, confidence: NDArray[np.float32]) -> None:
        rounds, drafts = self.in_flight.pop(0)
        numbers: Any = np.concatenate([np.zeros(confidence.shape, np.int32), confidence.view(np.int32)], axis=1)
        output: dict[str, Any] = {
            "logprob": None,
            "token": np.where(np.arange(1 + DRAFTS) <= accepted[:, None], 0, -1),
            "verified": verified,
            "draft": DraftOutput(numbers) if drafts else None,
        }
        self.books.completed(rounds, {0: StepOutput(logits=None, trace=None, load=None, **output)})

    def replace(self, slots: Ints, confidence: NDArray[np.float32]) -> None:
        ledger = self.books.ledgers[0]
        ledger.reset(slots)
        ledger.process(slots, ledger.schedule(slots).owners, confidence)
        self.table.drafted[slots] = True


@dataclass(frozen=True)
class Simulation:
    """What a step of so many requests comes to, on average over `steps`.

    verified_length: drafts verified of each request; accepted_length: tokens of each, the one that is always drawn
    included; fixed_accepted_length and fixed_step_ms: of the same blocks with every draft verified; gain: tokens a
    second over those, less 1.
    """

    requests: int
    steps: int
    verified_length: float
    accepted_length: float
    fixed_accepted_length: float
    step_ms: float
    fixed_step_ms: float
    gain: float


def simulate(
    rng: np.random.Generator, blocks: Blocks, requests: int, steps: int, policy: Policy, warm_up: int = WARM_UP
) -> Simulation:
    """Means of a step of so many requests under the policy, beside the same blocks verified in full.

    Tokens are counted by their chance, not drawn; what the policy is told of acceptance is drawn. A request ends with
    its text, and another takes its slot. warm_up: steps before those that count.
    """
    confidence, accepted = blocks.confidence.astype(np.float32), blocks.accepted
    kept = np.pad(np.cumsum(accepted, axis=1), ((0, 0), (1, 0)))  # accepted drafts by how many are verified
    at = rng.choice(len(blocks.text), requests, p=blocks.weight)
    policy.replace(np.arange(requests), confidence[at])
    fixed_step = step_seconds(policy.all_rows)
    landing = None
    verified = tokens = seconds = fixed_tokens = fixed_seconds = 0.0
    for step in range(-warm_up, steps):
        rows, caps = policy.launch()
        if landing is not None:
            policy.land(*landing)
        lengths = allocate_reference(confidence[at], caps, fill(rows, caps)).astype(np.int64)
        right = np.cumprod(rng.random((requests, DRAFTS)) < blocks.chance[at], axis=1).sum(axis=1)
        if step >= 0:
            verified += lengths.sum()
            tokens += requests + kept[at, lengths].sum()
            fixed_tokens += requests + kept[at, DRAFTS].sum()
            seconds += step_seconds(rows)
            fixed_seconds += fixed_step
        at, ended = blocks.following(rng, at)
        landing = lengths, np.minimum(right, lengths), confidence[at]
        if ended.any():
            policy.replace(np.flatnonzero(ended), confidence[at[ended]])
    return Simulation(
        requests=requests,
        steps=steps,
        verified_length=float(verified / (steps * requests)),
        accepted_length=float(tokens / (steps * requests)),
        fixed_accepted_length=float(fixed_tokens / (steps * requests)),
        step_ms=1e3 * seconds / steps,
        fixed_step_ms=1e3 * fixed_step,
        gain=float(tokens / seconds / (fixed_tokens / fixed_seconds) - 1),
    )


def steps_of(requests: int, request_steps: int = REQUEST_STEPS) -> int:
    """Steps of a simulation of so many requests. request_steps: steps times requests."""
    return max(LEAST_STEPS, request_steps // requests)


def recorded_gains(config: Config) -> Callable[[int], Simulation] | None:
    """The simulation of a rank with so many requests, by `bench.recording` and `speculative`; None without a recording.

    Raises ConfigError when the file cannot be simulated, or where other than five drafts are asked for.
    """
    recording, speculative = config.bench.recording, config.speculative
    if recording is None:
        return None
    if speculative.num_draft_tokens != DRAFTS:
        raise ConfigError(
            f"bench.recording: {recording} is simulated with {DRAFTS} drafts, and speculative.num_draft_tokens is "
            f"{speculative.num_draft_tokens}; set it to {DRAFTS}"
        )
    temperatures = speculative.confidence_temperatures or (1.0,) * DRAFTS
    try:
        blocks, _ = rescaled(load_blocks(Path(recording).expanduser(), temperatures), ACCEPTED_LENGTH)
    except RecordingError as error:
        raise ConfigError(f"bench.recording: {recording} {error}") from error

    def simulated(requests: int) -> Simulation:
        policy = EnginePolicy(requests, speculative.varlen)
        return simulate(np.random.default_rng(SEED), blocks, requests, steps_of(requests), policy)

    return simulated
