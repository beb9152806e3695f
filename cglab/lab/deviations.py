"""Where and how far a captured step is off its oracles, one runner at a time, and the verdict on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor

from cglab.measure.drift import Drift
from cglab.measure.parity import Verdict

ORACLES = {1: "padded eager", 2: "live eager", 3: "poisoned padding"}
"""What a step is held against, by number."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One quantity of one step that is not what an oracle says.

    Attributes:
        oracle: 1 to 3, see ``ORACLES``.
        where: case, mode, padding, step, and the row or slot that is furthest off.
        what: in words.
        kind: what rounding of it is measured as; empty for what cannot be rounded.
        far: largest absolute difference; infinite where that has no meaning.
    """

    oracle: int
    where: Mapping[str, Any]
    what: str
    kind: str = ""
    far: float = inf

    def of(self, mode: str, *, padding: bool) -> bool:
        """Whether this runner showed it; what was found over all runners is each one's."""
        return self.where.get("mode", mode) == mode and self.where.get("padding", padding) == padding

    def corrupts(self, drift: Drift) -> bool:
        """Whether no rounding explains it: only the same padded work may come out in another order of rounding."""
        return self.oracle != 1 or not self.far <= drift.bound(self.kind)

    def __str__(self) -> str:
        places = [
            f"{name} {self.where[name]}" for name in ("case", "step", "row", "slot") if name in self.where
        ]
        return f"{', '.join(places)}: {self.what} (oracle {self.oracle}, {ORACLES[self.oracle]})"


@dataclass
class ArmCounts:
    """What one runner was put to.

    Attributes:
        cases: sequences.
        steps, captured: steps of them, and how many were replayed.
    """

    cases: int = 0
    steps: int = 0
    captured: int = 0

    def count(self, steps: int, captured: int) -> None:
        """Adds one sequence."""
        self.cases += 1
        self.steps += steps
        self.captured += captured


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    """Bitwise, drift or corrupted, for one runner.

    Attributes:
        verdict: against padded eager and poisoned padding to the bit, and against live eager by the measured bound.
        drift: largest difference from padded eager.
        bound: largest difference that rounding explains, of the same quantity; 0 where nothing differs.
        detail: the first corruption, and the first that left something in the cache, or else the largest drift: which
            row, which slot; empty when bitwise.
    """

    verdict: Verdict
    drift: float = 0.0
    bound: float = 0.0
    detail: str = ""


def arm_verdict(deviations: Sequence[Deviation], drift: Drift, mode: str, *, padding: bool) -> ArmVerdict:
    """The verdict on one runner, from what all runners of its technique showed.

    Args:
        deviations: of every runner.
        drift: what rounding alone does to the same steps.
        mode, padding: the runner's.
    """
    own = [each for each in deviations if each.of(mode, padding=padding)]
    if not own:
        return ArmVerdict(Verdict.BITWISE)
    corrupted = [each for each in own if each.corrupts(drift)]
    told = corrupted[:1] + [each for each in corrupted[1:] if "slot" in each.where][:1]
    if told:
        verdict = Verdict.CORRUPTED
    else:
        verdict, told = Verdict.DRIFT, [max(own, key=lambda each: each.far)]
    detail = "; ".join(map(str, told))
    return ArmVerdict(verdict, told[0].far, drift.bound(told[0].kind), detail)


def furthest(got: Tensor, want: Tensor, first_slot: int | None = None) -> tuple[float, dict[str, int]]:
    """How far two results lie apart, and where.

    Args:
        got: [rows, ...] of any dtype, or a cache's [layers, slots, ...].
        want: the oracle's.
        first_slot: of a cache, the number of the slot that comes first here.

    Returns:
        The largest absolute difference, infinite for NaN, with its ``row`` or ``slot``; infinite and no place for
        another shape, 0 and no place for the same values.
    """
    if got.shape != want.shape or not got.numel():
        return inf, {}
    axis = 0 if first_slot is None else 1
    differs = (got != want).movedim(axis, 0)
    apart = differs.reshape(len(differs), -1).any(1).nonzero().flatten()  # few of a cache's slots
    if not len(apart):
        return 0.0, {}
    one, other = (side.index_select(axis, apart).double() for side in (got, want))
    far = (one - other).abs().nan_to_num(nan=inf, posinf=inf)
    worst = far.movedim(axis, 0).reshape(len(apart), -1).amax(1)
    index = int(apart[worst.argmax()])
    return float(worst.max()), {"row": index} if first_slot is None else {"slot": first_slot + index}
