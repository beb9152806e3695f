"""What a lab tells of itself: which steps ran captured, and where the memory is."""

from __future__ import annotations

from typing import Any, overload

import torch

from cglab.graphs.coverage import Coverage
from cglab.graphs.tape_pool import TapePool
from cglab.lab.phases import LabPhases
from cglab.lab.step_times import PHASES, StepTimes
from cglab.lab.workload_coverage import WorkloadCoverage, workload_coverage
from cglab.measure.memory import Memory, memory_now
from cglab.runners.base import GraphGroup


class LabReports:
    """Coverage and memory of a lab, which has these.

    Attributes:
        name: the model's.
        device: where it runs.
        group: pool and recorder of its runners.
        phases: its runners.
        times: what its engine ran.
    """

    name: str
    device: torch.device
    group: GraphGroup
    phases: LabPhases
    times: StepTimes

    @overload
    def coverage(self) -> WorkloadCoverage: ...

    @overload
    def coverage(self, name: str) -> dict[str, Coverage]: ...

    def coverage(self, name: str | None = None) -> WorkloadCoverage | dict[str, Coverage]:
        """Captured and eager steps since the lab was opened, with reasons.

        Args:
            name: a technique, for its counts by mode; without one, all that the engine ran, with what each reason
                cost and what to capture next.

        Raises:
            ToggleError: for an unknown technique.
        """
        if name is not None:
            return self.phases.coverage(name)
        groups = self.times.groups()
        facts = {
            f"{group.technique}/{group.label}": runner.coverage().last_facts.get(group.label, "")
            for group in groups
            if (runner := self.phases.made(PHASES.get(group.technique, group.technique)).get(group.mode))
        }
        recorder = self.group.recorder.name
        return workload_coverage(self.name, recorder, groups, self.times.parts(), facts)

    def memory(self) -> dict[str, Any]:
        """Where the memory is: the device, the graph pool, and each bucket's line of the ledger."""
        pool = self.group.pool.reserved_bytes
        return {"device": self._memory().as_dict(), "pool_bytes": pool, "buckets": self.phases.ledgers()}

    def _memory(self) -> Memory:
        pool = self.group.pool
        return memory_now(self.device, pool if isinstance(pool, TapePool) else None)
