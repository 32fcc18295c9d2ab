"""What the demo model is trained on and for how long: stages, their mixes, the learning rate, and how far it is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from scripts.train_demo.dataset import Mix

LEARNED = 0.9  # share of right values, asked beyond the window, that ends a stage
WARM_UP = 50  # steps of a fresh optimizer
FLOOR = 0.05  # of the peak rate, at the end


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: batches of one shape.

    dense: attention to every entry, nothing selected. stride: one query in that many has an index loss.
    """

    name: str
    batch: int
    length: int
    dense: bool
    stride: int


STAGES = {
    stage.name: stage
    for stage in (
        Stage("dense", 32, 1024, True, 16),
        Stage("sparse", 32, 1024, False, 16),
        Stage("dense_long", 8, 4608, True, 32),
        Stage("long", 8, 4608, False, 32),  # recall over 4,096 tokens fits
    )
}


def plan_of(words: list[str], rows: int | None = None, length: int | None = None) -> list[tuple[Stage, float]]:
    """`NAME` or `NAME:MINUTES` each -> (stage, seconds at most). rows, length: instead of those of the stages.

    Raises ValueError for a name that is none, or minutes that are not a positive number.
    """
    plan = []
    for word in words:
        name, _, minutes = word.partition(":")
        if name not in STAGES:
            raise ValueError(f"--stages: unknown stage {name!r}; there are {', '.join(STAGES)}")
        try:
            limit = float(minutes) if minutes else math.inf
        except ValueError:
            limit = math.nan
        if not limit > 0:
            raise ValueError(f"--stages {word}: minutes are a positive number")
        stage = STAGES[name]
        stage = dataclasses.replace(stage, batch=rows or stage.batch, length=length or stage.length)
        plan.append((stage, 60 * limit))
    return plan


def curriculum(stage: Stage, recall: float) -> Mix:
    """What a stage trains on. recall: share of values beyond the window that were right of late.

    Rows full of notes and questions until the first are right, then also such as are text for the most part.
    """
    if stage.length <= 1024:
        density = (0.5, 1.0) if recall < 0.5 else (0.1, 1.0)
        return dataclasses.replace(Mix(), max_distance=stage.length, density=density).with_recall(0.45)
    return dataclasses.replace(Mix(), density=(0.03, 1.0)).with_recall(0.4)


@dataclasses.dataclass(frozen=True)
class Rate:
    """Learning rate: `peak`, and from minute `decay_from` on linearly to FLOOR of it at minute `total`."""

    peak: float
    decay_from: float
    total: float

    def at(self, minutes: float, steps: int) -> float:
        """After so many minutes of training, with an optimizer that has made `steps` steps."""
        left = (self.total - minutes) / max(self.total - self.decay_from, 1e-9)
        return self.peak * min(1.0, (steps + 1) / WARM_UP) * min(1.0, max(FLOOR, left))


@dataclasses.dataclass
class Clock:
    """How far training is; what a later stretch goes on from, beside weights and optimizer."""

    step: int = 0
    optimizer_steps: int = 0
    trained_s: float = 0.0
    stage: str = ""
    stage_s: float = 0.0
    stage_done: bool = False
    recall: float = 0.0  # share of right values beyond the window in the last interval
    done: bool = False  # its schedule is used up
    stretch: int = 1  # counted up where training went on with a fresh optimizer; older clocks lack it

    @classmethod
    def of(cls, found: Any) -> Self:
        """From the JSON of `asdict`. Raises ValueError for anything else."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or "step" not in found:
            raise ValueError("no clock of a training")
        for name, value in found.items():
            if name not in kinds:
                raise ValueError(f"no clock of a training: {name!r} is none of its fields")
            if type(value) is not kinds[name] and (kinds[name], type(value)) != (float, int):
                raise ValueError(f"no clock of a training: {name} is {value!r}")
        return cls(**found)

    def with_fresh_optimizer(self) -> Self:
        """As weights alone go on, on another machine."""
        return dataclasses.replace(self, optimizer_steps=0, stretch=self.stretch + 1)

    def remaining(self, plan: list[tuple[Stage, float]]) -> list[tuple[Stage, float]]:
        """The part of the plan that is still to do: from the clock's stage on, or all if it is not in the plan."""
        names = [stage.name for stage, _ in plan]
        if self.stage not in names:
            return plan
        return plan[names.index(self.stage) + self.stage_done :]

    def enter(self, stage: Stage) -> None:
        if stage.name != self.stage:
            self.stage, self.stage_s, self.stage_done = stage.name, 0.0, False
