"""One captured step, part by part: the recorded segments and the eager breaks between them, in order of replay.

Each part is run alone and the device waited for, so that its time is its own. In a real step the host queues the
next part while the device works on the one before: the parts together take longer than the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch

from cglab.engine.workload import Step
from cglab.errors import InputError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.graphs.coverage import Miss
from cglab.lab import steps
from cglab.lab.comparison import TAPE_NOTE, title_of
from cglab.lab.facade import Lab
from cglab.lab.views import draw
from cglab.runners.base import Runner

if TYPE_CHECKING:
    import pandas

ALONE = "Each part was run alone and waited for"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a captured step.

    Attributes:
        kind: a ``segment`` is replayed, a ``break`` is called.
        name: of the function that a break calls; empty for a segment.
        operations: recorded in a segment: operations of the tape, nodes of a CUDA graph; None for a break, or where
            the driver cannot be asked.
        microseconds: median of its runs.
    """

    kind: Literal["segment", "break"]
    name: str
    operations: int | None
    microseconds: float


@dataclass(frozen=True)
class StepParts:
    """The parts of one step, by arm.

    Attributes:
        technique: the toggle.
        model: name or folder.
        workload: sizes of the step and its bucket.
        recorder: ``cuda`` or ``tape``.
        arms: parts in order of replay, by arm.
    """

    technique: str
    model: str
    workload: dict[str, Any]
    recorder: str
    arms: dict[str, tuple[Part, ...]]

    @property
    def title(self) -> str:
        """What was taken apart, in one line."""
        return f"{title_of(self.technique, self.model, self.workload)}: segments and breaks"

    @property
    def note(self) -> str:
        """What a reader must know."""
        return f"{ALONE}. {TAPE_NOTE}" if self.recorder == "tape" else ALONE

    def kinds(self, arm: str) -> list[str]:
        """``segment`` or ``break`` for each part of an arm, in order of replay."""
        return [part.kind for part in self.arms[arm]]

    def as_frame(self) -> pandas.DataFrame:
        """One row a part: arm, part from 1, kind, function of a break, operations, microseconds."""
        import pandas

        frame = pandas.DataFrame(
            {
                "arm": arm, "part": number, "kind": part.kind, "function": part.name,
                "operations": part.operations, "time_us": part.microseconds,
            }
            for arm, parts in self.arms.items()
            for number, part in enumerate(parts, 1)
        )  # fmt: skip
        return frame.astype({"operations": "Int64"})

    def plot(self) -> Any:
        """The parts of each arm one after another on a time axis, a plotly figure."""
        return draw("step_parts", self)

    def __str__(self) -> str:
        lines = [f"{self.technique}, {self.workload}"]
        for arm, parts in self.arms.items():
            for kind in dict.fromkeys(self.kinds(arm)):
                each = [part.microseconds for part in parts if part.kind == kind]
                lines.append(
                    f"{arm}: {len(each)} x {kind}, median {median(each):.4g} µs, sum {sum(each):.4g} µs"
                )
        return "\n".join([*lines, self.note])


def step_parts(
    lab: Lab,
    name: str = "prefill",
    arms: Sequence[str] = ("breakable", "full"),
    *,
    repeats: int = 5,
    **sizes: int | None,
) -> StepParts:
    """Takes one step of a technique apart, in each captured arm.

    Args:
        lab: an open lab.
        name: the toggle.
        arms: its captured values.
        repeats: timed runs of each part.
        **sizes: of the step, as in ``lab.compare``.

    Raises:
        InputError: if an arm runs the step eager, so that it has no parts.
        ToggleError: for an unknown toggle or value.
    """
    runners = {arm: lab.runner(arm, name) for arm in arms}
    with steps.fixed_step(lab.engine, name, sizes, lab.sizes) as step:
        parts = {arm: _parts(runner, step, lab.device, repeats) for arm, runner in runners.items()}
        return StepParts(name, lab.name, lab.describe(step, name), lab.group.recorder.name, parts)


def _parts(runner: Runner[Any], step: Step, device: torch.device, repeats: int) -> tuple[Part, ...]:
    before = runner.coverage().copy()
    steps.run_step(runner, step)  # fills the static buffers, and captures a bucket on its first use
    bucket = runner.captured.pad(step.rows)
    if isinstance(bucket, Miss) or not (runner.coverage() - before).captured:
        reasons = (runner.coverage() - before).reasons
        raise InputError(
            f"{runner.backend} runs this step eager ({', '.join(reasons).lower()}), so it has no parts; "
            "take a captured arm and a size that fits a bucket"
        )
    recorded = runner.captured.recordings.steps_of(bucket)
    clock, samples = clock_for(device, "wall"), [list[float]() for _ in recorded]
    with runner.during(step.live):
        for _ in range(repeats):
            for times, part in zip(samples, recorded, strict=True):
                times.extend(sample_seconds(part.replay, clock, repeats=1, warmup=0))
    return tuple(
        Part("break", part.name, None, median(times) * 1e6)
        if isinstance(part, BreakCall)
        else Part("segment", "", part.nodes, median(times) * 1e6)
        for part, times in zip(recorded, samples, strict=True)
    )
