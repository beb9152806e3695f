"""What ``lab.sweep`` returns: one comparison for each size of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.lab.capture_limit import CaptureLimit
from cglab.lab.comparison import Comparison
from cglab.lab.planning import PHASES
from cglab.lab.steps import SIZES, size_name
from cglab.lab.views import draw
from cglab.measure.crossover import find_crossover

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Sweep:
    """The same arms at several sizes; in each, arms were measured in turns.

    Attributes:
        comparisons: by size, in the order given.
    """

    comparisons: tuple[Comparison, ...]

    @property
    def size(self) -> str:
        """What was swept: ``batch`` of decode, ``tokens`` of prefill."""
        return size_name(self.comparisons[0].technique)

    @property
    def unit(self) -> str:
        """What a size counts."""
        return PHASES[self.comparisons[0].technique].unit

    @property
    def title(self) -> str:
        """What was swept, and what was held."""
        first = self.comparisons[0]
        held = ", ".join(
            f"{name} {first.workload[name]}" for name in SIZES[first.technique] if name != self.size
        )
        return f"One {first.technique} step of {Path(first.model).name} against {self.size}, {held}"

    @property
    def note(self) -> str:
        """What a reader must know before comparing times; empty on a GPU."""
        return self.comparisons[0].note

    def as_frame(self) -> pandas.DataFrame:
        """One row a size and arm: batch or tokens, bucket, then the columns of ``Comparison.as_frame``."""
        import pandas

        frames = []
        for comparison in self.comparisons:
            frame = comparison.as_frame()
            frame.insert(0, self.size, comparison.workload[self.size])
            frame.insert(1, "bucket", comparison.workload["bucket"])
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True).astype({"bucket": "Int64"})

    def plot(self) -> Any:
        """Step time against size by arm, a plotly figure."""
        return draw("size_sweep", self)

    def limit(self, arm: str) -> CaptureLimit:
        """Up to which size an arm is worth its capture, against the first arm; sizes that it ran eager tell nothing.

        Args:
            arm: one of the captured arms.

        Raises:
            InputError: for an arm that was not measured, or ran eager at every size.
        """
        first = self.comparisons[0]
        base = first.times.arms[0].name
        captured = [each for each in self.comparisons if each.coverage[arm].captured]
        samples = {
            name: {each.workload[self.size]: each.times[name].instances for each in captured}
            for name in (base, arm)
        }
        found = find_crossover(samples[base], samples[arm])
        return CaptureLimit(first.technique, first.model, arm, self.unit, found, self.note)

    def __str__(self) -> str:
        return "\n".join(str(comparison) for comparison in self.comparisons)
