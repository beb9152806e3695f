"""An engine's runners, each with its steps computed in another way: padded eager, or over hostile memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cglab.lab.phases import LabPhases
from cglab.runners.base import Runner

How = Callable[[Runner[Any], Any, Mapping[str, Tensor]], Any]
"""Computes a step of a runner on what is live, from its inputs."""


class Through:
    """A runner whose steps are computed in another way, everything else its own."""

    def __init__(self, runner: Runner[Any], how: How) -> None:
        self._runner, self._how = runner, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, live: Any, **inputs: Tensor) -> Any:
        """One step, that way."""
        return self._how(self._runner, live, inputs)


class PhasesThrough:
    """Phases whose runners compute their steps in another way."""

    def __init__(self, phases: LabPhases, how: How) -> None:
        self._phases, self._how = phases, how

    def decode(self, *, sampling: bool) -> Any:
        """See ``LabPhases``, as for all of them."""
        return Through(self._phases.decode(sampling=sampling), self._how)

    def prefill(self) -> Any:
        """Prompt chunks."""
        return Through(self._phases.prefill(), self._how)

    def verify(self) -> Any:
        """Verify passes."""
        return Through(self._phases.verify(), self._how)

    def draft_loop(self) -> Any:
        """Draft loops."""
        return Through(self._phases.draft_loop(), self._how)

    def block_draft(self) -> Any:
        """Block drafts."""
        return Through(self._phases.block_draft(), self._how)

    def draft_extend(self) -> Any:
        """Extends of a NextN layer."""
        return Through(self._phases.draft_extend(), self._how)

    def seed_step(self) -> Any:
        """Seed steps; None where the loop begins with them."""
        seed = self._phases.seed_step()
        return None if seed is None else Through(seed, self._how)
