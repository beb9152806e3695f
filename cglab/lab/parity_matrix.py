"""Parity at scale: every technique, backend, recorder, padding and form of ops of this machine, a verdict each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from cglab.errors import ToggleError
from cglab.lab.checking import model_of, opened_oracles
from cglab.lab.deviations import arm_verdict
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.parity import Verdict
from cglab.models.loading import find_model
from cglab.models.ops import OPS, good_ops

if TYPE_CHECKING:
    import pandas

RECORDERS = ("tape", "cuda")


@dataclass(frozen=True, slots=True)
class Planned:
    """What is checked in one go: all runners of a technique on one recorder, in one form of ops."""

    technique: str
    recorder: str
    device: torch.device
    ops: str


@dataclass(frozen=True, slots=True)
class NotRun:
    """A part of the matrix that was left out.

    Attributes:
        technique, recorder, ops: of that part.
        why: what would have to be otherwise.
    """

    technique: str
    recorder: str
    ops: str
    why: str


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One runner's verdict.

    Attributes:
        technique, recorder, ops: what was captured, where, and in which form it computes.
        backend: ``full`` or ``breakable``; ``form`` tells apart those of one backend, such as ``topk 3``.
        padding: padded to buckets, or captured at exact sizes.
        cases, steps, captured: sequences, their steps, and those replayed.
        verdict: see ``ArmVerdict``, as are ``drift``, ``bound`` and ``detail``.
    """

    technique: str
    backend: str
    form: str
    recorder: str
    padding: bool
    ops: str
    cases: int
    steps: int
    captured: int
    verdict: Verdict
    drift: float
    bound: float
    detail: str

    def __str__(self) -> str:
        parts = (f"{self.technique} {self.backend}", self.form, "padded" if self.padding else "exact sizes")
        return (
            f"{', '.join(filter(None, parts))} ({self.recorder}, {self.ops}): {self.detail or self.verdict}"
        )


@dataclass(frozen=True)
class ParityMatrix:
    """What was checked, and what was not.

    Attributes:
        rows: one a runner.
        not_run: the rest of the matrix, with the reason.
        planned: what was to be shown.
    """

    rows: tuple[ArmRow, ...]
    not_run: tuple[NotRun, ...]
    planned: tuple[Planned, ...]

    @property
    def ok(self) -> bool:
        """Whether every planned part showed something and nothing is corrupted; drift is bounded, and holds."""
        shown = {(row.technique, row.recorder, row.ops) for row in self.rows}
        return {(part.technique, part.recorder, part.ops) for part in self.planned} <= shown and all(
            row.verdict is not Verdict.CORRUPTED for row in self.rows
        )

    @property
    def worst(self) -> Verdict | None:
        """The worst verdict; None without a row."""
        return max((row.verdict for row in self.rows), key=list(Verdict).index, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: ``cglab parity --all --json``."""
        rows = [asdict(row) | {"verdict": row.verdict.value} for row in self.rows]
        return {"ok": self.ok, "rows": rows, "not_run": [asdict(each) for each in self.not_run]}

    def as_frame(self) -> pandas.DataFrame:
        """One row a runner."""
        import pandas

        return pandas.DataFrame(self.as_dict()["rows"])


def plan_matrix(
    device: torch.device, techniques: Sequence[str] | None = None
) -> tuple[list[Planned], list[NotRun]]:
    """Every part of the matrix: those that this machine can run, and why not the others.

    Args:
        device: that is asked for; the tape runs beside a GPU too.
        techniques: which; None for all.
    """
    devices = {"tape": torch.device("cpu")} | ({"cuda": device} if device.type == "cuda" else {})
    present = torch.cuda.is_available()
    no_cuda = "the cpu was asked for (CGLAB_DEVICE)" if present else "this machine has no CUDA device"
    planned, left = [], []
    for name in techniques or TECHNIQUES:
        config = find_model(model_of(name)).config
        for recorder in RECORDERS:
            if recorder not in devices:
                left.append(NotRun(name, recorder, "any", no_cuda))
                continue
            why = good_ops(devices[recorder], config)
            planned += [Planned(name, recorder, devices[recorder], form) for form in OPS if why[form] is None]
            left += [NotRun(name, recorder, form, each) for form in OPS if (each := why[form])]
    return planned, left


def run_matrix(
    planned: Sequence[Planned],
    not_run: Sequence[NotRun] = (),
    *,
    cases: int,
    seed: int = 0,
    plant: str | None = None,
    progress: Callable[[Planned], None] = lambda _: None,
) -> ParityMatrix:
    """Random sequences on every planned runner, in float32, against the three oracles.

    Args:
        planned, not_run: of ``plan_matrix``.
        cases: sequences of each part, dealt to its runners in turn; a runner that they do not reach, or that replays
            no step of them, is among what was not run.
        seed: of the sequences.
        plant: a guard to take away, see ``plants.PLANTS``.
        progress: called after every sequence.

    Raises:
        ToggleError: for fewer than one case, or an unknown plant.
    """
    if cases < 1:
        raise ToggleError(f"cases must be at least 1, got {cases}")
    rows: list[ArmRow] = []
    left = list(not_run)
    for part in planned:
        shown, unshown = _check(part, cases, seed, plant, progress)
        rows += shown
        left += unshown
    return ParityMatrix(tuple(rows), tuple(left), tuple(planned))


def _check(
    part: Planned, cases: int, seed: int, plant: str | None, progress: Callable[[Planned], None]
) -> tuple[list[ArmRow], list[NotRun]]:
    rows, unshown = [], []
    with opened_oracles(part.technique, device=part.device, seed=seed, plant=plant, ops=part.ops) as oracles:
        for number in range(cases):
            oracles.case(number)
            progress(part)
        oracles.judge()
        for (mode, padding), counts in oracles.counts.items():
            if not counts.captured:
                unshown.append(f"{mode} {'padded' if padding else 'exact'}")
                continue
            found = arm_verdict(oracles.deviations, oracles.drift, mode, padding=padding)
            backend, _, form = mode.partition(", ")
            rows.append(
                ArmRow(
                    part.technique, backend, form, part.recorder, padding, part.ops,
                    counts.cases, counts.steps, counts.captured,
                    found.verdict, found.drift, found.bound, found.detail,
                )
            )  # fmt: skip
        arms = len(oracles.counts)
    if not unshown:
        return rows, []
    why = f"{cases} cases replayed no step of {len(unshown)} of {arms} arms; give more cases: {'; '.join(unshown)}"
    return rows, [NotRun(part.technique, part.recorder, part.ops, why)]
