"""What ``lab.sweep`` returns: one comparison for each batch size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.lab.comparison import Comparison
from cglab.lab.views import draw

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Sweep:
    """The same arms at several batch sizes; in each, arms were measured in turns.

    Attributes:
        comparisons: by batch size, in the order given.
    """

    comparisons: tuple[Comparison, ...]

    def as_frame(self) -> pandas.DataFrame:
        """One row a batch size and arm: batch, bucket, then the columns of ``Comparison.as_frame``."""
        import pandas

        frames = []
        for comparison in self.comparisons:
            frame = comparison.as_frame()
            frame.insert(0, "batch", comparison.workload["batch"])
            frame.insert(1, "bucket", comparison.workload["bucket"])
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True).astype({"bucket": "Int64"})

    def plot(self) -> Any:
        """Step time against batch size by arm, a plotly figure."""
        first = self.comparisons[0]
        what = f"One {first.technique} step of {Path(first.model).name}"
        title = f"{what} against batch size, context {first.workload['context']}"
        return draw("batch_sweep", self.as_frame(), title, first.note)

    def __str__(self) -> str:
        return "\n".join(str(comparison) for comparison in self.comparisons)
