"""What is measured as one thing: a seed step with its draft loop, and a block draft with its sampler.

Fused, nothing tells a seed step from the loop; captured together, nothing tells a sampler from the draft. Apart, each
arm does the same work, in more than one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cglab.engine.drafters import seeded
from cglab.engine.workload import DecodeStep
from cglab.graphs.coverage import Coverage
from cglab.runners.base import Runner
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.seed_step import Drafted, SeedRunner


class Round(ABC):
    """One draft of every request."""

    @property
    @abstractmethod
    def last(self) -> Runner[Any]:
        """The runner that the draft comes from."""

    @abstractmethod
    def run(self, live: Any, **inputs: Tensor) -> Any:
        """One draft.

        Args:
            live: requests.
            **inputs: of its first runner.
        """

    @abstractmethod
    def pieces(self, step: DecodeStep) -> Iterator[tuple[Runner[Any], DecodeStep]]:
        """Its runners, each with the step that it computes."""

    @abstractmethod
    def coverage(self) -> Coverage:
        """Of the technique that is compared."""

    def ledger_rows(self) -> list[dict[str, Any]]:
        """What each bucket cost, all of its runners together."""
        return self.last.captured.memory()


@dataclass(frozen=True)
class SeedRound(Round):
    """A draft by an assistant, whatever the seed's toggle says.

    Attributes:
        loop: of the draft.
        seed: its own step before the loop; None where it is the loop's first iteration.
    """

    loop: DraftLoopRunner
    seed: SeedRunner | None

    @property
    def last(self) -> DraftLoopRunner:
        """See ``Round``."""
        return self.loop

    def run(self, live: Any, **inputs: Tensor) -> Any:
        """See ``Round``; gives what the loop gives."""
        if self.seed is not None:
            inputs = seeded(self.seed.run(live, **inputs), inputs)
        return self.loop.run(live, **inputs)

    def pieces(self, step: DecodeStep) -> Iterator[tuple[Runner[Any], DecodeStep]]:
        """See ``Round``."""
        if self.seed is not None:
            yield self.seed, step
            drafted = self.seed.run_live_eager(step.live, **step.inputs)
            step = replace(step, inputs=seeded(Drafted(*(each.clone() for each in drafted)), step.inputs))
        yield self.loop, step

    def coverage(self) -> Coverage:
        """Of the seed step."""
        return (self.seed or self.loop).coverage()

    def ledger_rows(self) -> list[dict[str, Any]]:
        """See ``Round``."""
        rows = {row["bucket"]: dict(row) for row in super().ledger_rows()}
        for row in self.seed.captured.memory() if self.seed is not None else ():
            into = rows.setdefault(row["bucket"], {"bucket": row["bucket"]})
            for name, value in row.items():
                into[name] = into.get(name, 0) + value if name != "bucket" else value
        return list(rows.values())


@dataclass(frozen=True)
class BlockRound(Round):
    """A draft by blocks, up to its tokens, wherever they are chosen.

    Attributes:
        draft: its step.
    """

    draft: BlockDraftRunner

    @property
    def last(self) -> BlockDraftRunner:
        """See ``Round``."""
        return self.draft

    def run(self, live: Any, **inputs: Tensor) -> Tensor:
        """See ``Round``; gives the tokens [requests, block_size - 1] int64."""
        return self.draft.tokens(self.draft.run(live, **inputs))

    def pieces(self, step: DecodeStep) -> Iterator[tuple[Runner[Any], DecodeStep]]:
        """See ``Round``."""
        yield self.draft, step

    def coverage(self) -> Coverage:
        """Of the sampler."""
        return self.draft.sampling()
