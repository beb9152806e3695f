"""Up to which size a capture pays, as measured: the crossover of two arms with its table, figure and sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.lab.views import draw
from cglab.measure.crossover import Crossover

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class CaptureLimit:
    """A crossover, and what was measured for it.

    Attributes:
        technique: the toggle.
        model: name or folder.
        arm: the captured arm.
        unit: what a size counts.
        found: the crossover; its samples are seconds.
        note: how far it may be trusted.
    """

    technique: str
    model: str
    arm: str
    unit: str
    found: Crossover
    note: str = ""

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        return f"{self.technique.capitalize()} of {Path(self.model).name}: {self.arm} over eager, by size"

    def as_frame(self) -> pandas.DataFrame:
        """One row a size: both medians in milliseconds, their ratio, and the verdict of S3's rule."""
        import pandas

        return pandas.DataFrame(
            {
                self.unit: point.size, "eager_ms": point.eager * 1e3, f"{self.arm}_ms": point.captured * 1e3,
                "ratio": point.captured / point.eager, "verdict": point.difference.verdict,
            }
            for point in self.found.evidence
        )  # fmt: skip

    def plot(self) -> Any:
        """Time of a captured step over that of an eager one by size, with the limit, a plotly figure."""
        return draw("capture_limit", self)

    def __str__(self) -> str:
        found, sizes = self.found, [point.size for point in self.found.evidence]
        if found.limit is None:
            told = [f"{self.arm} wins at none of {sizes} {self.unit}"]
        else:
            beyond = f"not at {found.next_size}" if found.next_size else "the largest measured"
            told = [f"{self.arm} wins up to {found.limit} {self.unit}, {beyond}"]
        for what, where in (("no win at", found.breaks), ("undecided at", found.undecided)):
            told += [f"{what} {', '.join(map(str, where))}"] if where else []
        if found.safe_limit != found.limit:
            told.append(f"a smaller size is slower: a limit that harms none is {found.safe_limit}")
        return "\n".join(["; ".join(told), self.note]).rstrip()
