"""Raises on purpose at the n-th recorded operation: how the recovery of a failed capture is tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class PlannedFault(RuntimeError):  # noqa: N818 - a fault is what it is, not what went wrong
    """The exception that was asked for."""


@dataclass
class Plan:
    """Where to raise, and how far a recording came.

    Attributes:
        at: index of the operation, from 0; None only counts.
        kind: of the exception.
        seen: operations reached so far.
    """

    at: int | None
    kind: type[Exception] = PlannedFault
    seen: int = 0


_plan: ContextVar[Plan | None] = ContextVar("cglab_fault", default=None)


@contextmanager
def planned(at: int | None, kind: type[Exception] = PlannedFault) -> Iterator[Plan]:
    """Raises an exception of ``kind`` when operation ``at`` of a recording is reached; counts the operations."""
    plan = Plan(at, kind)
    token = _plan.set(plan)
    try:
        yield plan
    finally:
        _plan.reset(token)


def is_planned() -> bool:
    """Whether a plan is active (the cuda recorder then watches its operations)."""
    return _plan.get() is not None


def reach(operation: str) -> None:
    """Called by recorders for every operation."""
    plan = _plan.get()
    if plan is None:
        return
    index, plan.seen = plan.seen, plan.seen + 1
    if index == plan.at:
        raise plan.kind(f"planned fault at operation {index}, {operation}")
