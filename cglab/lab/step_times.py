"""What every forward of an engine came to: which technique and mode, replayed or eager and why, and how long it took.

Time is the device's, as forward occupancy takes it. The first step of a runner, and one in which a bucket was captured,
is counted and not timed: it waits for what later ones find there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cglab.graphs.clocks import Region
from cglab.graphs.coverage import Coverage, Miss
from cglab.runners.base import Runner
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.dsa_policy import coverage_of_part
from cglab.runners.dsa_prefill import PARTS, DsaPrefillRunner

PHASES = {"block_draft": "draft_sampler"}
"""Under which name a lab keeps the runners of a timed forward, where it is another."""


class Group(NamedTuple):
    """Steps that are alike.

    Attributes:
        technique: of the runner.
        mode: of its toggle.
        label: the key that was replayed, or the name of the reason for running eager.
        size: rows of the bucket; 0 for eager steps.
        live: live rows.
    """

    technique: str
    mode: str
    label: str
    size: int
    live: int


@dataclass(slots=True)
class Spent:
    """What a group took.

    Attributes:
        steps: all of them.
        timed: those whose time is known.
        seconds: of these, on the device.
    """

    steps: int = 0
    timed: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        """Seconds of a step; None where none was timed."""
        return self.seconds / self.timed if self.timed else None


class StepTimes:
    """Watches the forwards of one engine.

    Args:
        made: the runners of a phase, by mode.
    """

    def __init__(self, made: Callable[[str], Mapping[str, Runner[Any]]]) -> None:
        self._made = made
        self._spent: dict[Group, Spent] = {}
        self._running: deque[tuple[Spent, Region]] = deque()
        self._tried: dict[tuple[str, str], int] = {}

    def note(self, kind: str, region: Region) -> None:
        """One forward; called right after it was launched. See ``ForwardSegments.watch``."""
        ran = [
            (latest, mode, runner)
            for mode, runner in self._made(PHASES.get(kind, kind)).items()
            if (latest := runner.coverage().latest) is not None
        ]
        if not ran:  # a stage of a pipeline, say, whose runners are elsewhere
            return
        (_, label, size, live), mode, runner = max(ran, key=lambda each: each[0])
        group = Group(runner.technique, mode, label, size, live)
        spent = self._spent.setdefault(group, Spent())
        spent.steps += 1
        tried = runner.tries()
        if self._tried.get((kind, mode)) == tried:
            self._running.append((spent, region))
        self._tried[kind, mode] = tried
        while self._running and self._running[0][1].done:
            self._collect()

    def _collect(self) -> None:
        spent, region = self._running.popleft()
        spent.timed += 1
        spent.seconds += region.seconds

    def groups(self) -> dict[Group, Spent]:
        """Everything so far; waits for what still runs."""
        while self._running:
            self._collect()
        return self._spent

    def parts(self) -> dict[str, Coverage]:
        """Captured and eager steps of techniques that are part of another's step, whose time is not apart."""
        counts: dict[tuple[str, str], Coverage] = {}
        for group, spent in self._spent.items():
            counted = counts.setdefault((group.technique, group.mode), Coverage())
            if group.size:
                counted.hits[group.label] += spent.steps
                counted.sizes[group.label] = group.size
            else:
                counted.misses[group.label] += spent.steps
        found: dict[str, Coverage] = {}
        for (technique, mode), counted in counts.items():
            runner = self._made(PHASES.get(technique, technique)).get(mode)
            for name, part in _parts(runner, counted).items():
                whole = found.setdefault(name, Coverage())
                for mine, more in ((whole.hits, part.hits), (whole.misses, part.misses)):
                    mine.update(more)
                whole.last_facts |= part.last_facts
        return found


def _parts(runner: Runner[Any] | None, counted: Coverage) -> dict[str, Coverage]:
    """What a runner's steps say of the techniques within them; the parts of a draft's extend are none of these."""
    if isinstance(runner, BlockDraftRunner):
        why = runner.sampler.why_eager
        return {"draft_sampler": coverage_of_part(counted, lambda _: why)}
    if not isinstance(runner, DsaPrefillRunner) or isinstance(runner, DraftExtendRunner):
        return {}

    def why_eager(part: str) -> Callable[[int], Miss | None]:
        return lambda size: getattr(runner.parts_at(size), part)

    return {name: coverage_of_part(counted, why_eager(part)) for name, part in PARTS.items()}
