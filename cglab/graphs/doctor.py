"""The doctor: runs a function under a watcher and says what would break its capture, at which line, and what helps.

Nothing is recorded and no GPU is needed (so what Python bakes in, a counter or ``random()``, is left to the
self-check that ends a capture on the tape): the refusals are those of ``refusals``, noted instead of raised, so that
one run finds them all. The function runs once, eagerly; its writes to outside memory are undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cglab.errors import CaptureError, Place
from cglab.graphs.breaks import Aside, capturing, staged
from cglab.graphs.places import place_of_stack
from cglab.graphs.refusals import HostReadWatch, refusal
from cglab.graphs.writes import WriteJournal


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard.

    Attributes:
        kind: the error that a capture would raise, such as ``HostReadError``.
        operation: what does it.
        place: the user's line.
        effect: what a stream capture would do.
        advice: the smallest change that helps.
    """

    kind: str
    operation: str
    place: Place | None
    effect: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}\n  {self.effect} ({self.operation})\n  next step: {self.advice}"


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found, in the order of execution."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        if self.healthy:
            return "nothing found that would break a capture; what Python bakes in is checked when it is captured"
        return "\n".join(f"{i}. {finding}" for i, finding in enumerate(self.findings, 1))


class _Watch(TorchDispatchMode):
    def __init__(self, report: Callable[[CaptureError], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        error = refusal(func, args, kwargs) if capturing() else None
        if error is not None:
            self._report(error)
        return func(*args, **kwargs)


def doctor(function: Callable[..., Any], *args: Any, **inputs: Any) -> Report:
    """Looks for what would break a capture of ``function``.

    Args:
        function: runs once, eagerly, on the given inputs; breaks marked with ``eager_break`` are left alone.
        *args: its positional inputs.
        **inputs: its keyword inputs.

    Returns:
        The findings, one for each line and kind.

    Raises:
        Exception: whatever the function itself raises on these inputs.
    """
    found: dict[tuple[str, tuple[str, int] | None], Finding] = {}

    def note(error: CaptureError) -> None:
        place = place_of_stack(sys._getframe())
        kind = type(error).__name__
        finding = Finding(kind, error.operation or "", place, error.summary, error.advice or "")
        # One line often shows twice, by its Python name and by its operator: the first says it best.
        line = (place.file, place.line) if place else None
        found.setdefault((kind, line), finding)

    with torch.no_grad(), WriteJournal().recording(), staged(Aside()), _Watch(note), HostReadWatch(note):
        function(*args, **inputs)
    return Report(tuple(found.values()))
