"""Seed step and draft loop as one thing that is measured: where they are one graph, nothing tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cglab.engine.drafters import seeded
from cglab.engine.workload import DecodeStep
from cglab.graphs.coverage import Coverage
from cglab.runners.base import Runner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.seed_step import Drafted, SeedRunner


@dataclass(frozen=True)
class DraftRound:
    """One draft of every request, whatever the seed's toggle says.

    Attributes:
        loop: of the draft.
        seed: its own step before the loop; None where it is the loop's first iteration.
    """

    loop: DraftLoopRunner
    seed: SeedRunner | None

    def run(self, live: Any, **inputs: Tensor) -> Any:
        """One draft.

        Args:
            live: requests.
            **inputs: ``input_ids`` [requests] int64, ``hidden`` [requests, width of the target], ``request_rows`` and
                ``seq_lens`` [requests] int64.

        Returns:
            What the loop gives.
        """
        if self.seed is not None:
            inputs = seeded(self.seed.run(live, **inputs), inputs)
        return self.loop.run(live, **inputs)

    def pieces(self, step: DecodeStep) -> Iterator[tuple[Runner[Any], DecodeStep]]:
        """Its runners, each with the step that it computes."""
        if self.seed is not None:
            yield self.seed, step
            drafted = self.seed.run_live_eager(step.live, **step.inputs)
            step = replace(step, inputs=seeded(Drafted(*(each.clone() for each in drafted)), step.inputs))
        yield self.loop, step

    def coverage(self) -> Coverage:
        """Of the seed step: what is compared."""
        return (self.seed or self.loop).coverage()

    def ledger_rows(self) -> list[dict[str, Any]]:
        """What each bucket cost, seed and loop together."""
        rows = {row["bucket"]: dict(row) for row in self.loop.captured.memory()}
        for row in self.seed.captured.memory() if self.seed is not None else ():
            into = rows.setdefault(row["bucket"], {"bucket": row["bucket"]})
            for name, value in row.items():
                into[name] = into.get(name, 0) + value if name != "bucket" else value
        return list(rows.values())
