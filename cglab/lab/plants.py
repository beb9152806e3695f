"""Faults planted on purpose: each takes one guard away, and the oracles must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cglab.errors import ToggleError, no_such
from cglab.graphs.buffers import LoadPlan, StaticBuffers
from cglab.graphs.captured import Captured
from cglab.graphs.keys import ShapeKey
from cglab.graphs.outputs import Stored
from cglab.graphs.slots import Slot
from cglab.runners.decode import DecodeRunner

PLANTS: Mapping[str, str] = {
    "stale-tail": "padded tails keep what an earlier, larger batch left there",
    "live-slot-in-padding": "padded rows write their KV to a slot that belongs to a request",
    "missed-copy-in": "one static input is not refreshed before a replay",
    "untrimmed-output": "padded rows are handed out with the live ones",
    "rounding": "replayed numbers come out one unit in the last place off, as of another order of rounding",
}
"""The last one corrupts nothing: it must be told as drift."""


def _keep_tail(original: Callable[..., LoadPlan]) -> Callable[..., LoadPlan]:
    def plan(self: StaticBuffers, values: Any, live: int, size: int) -> LoadPlan:
        del size
        return original(self, values, live, live)

    return plan


def _skip_one(original: Callable[..., LoadPlan]) -> Callable[..., LoadPlan]:
    def plan(self: StaticBuffers, values: Mapping[str, Any], live: int, size: int) -> LoadPlan:
        rest = {name: value for name, value in values.items() if name != "positions"}
        return original(self, rest, live, size)

    return plan


def _live_slot(original: Callable[..., dict[str, Slot]]) -> Callable[..., dict[str, Slot]]:
    def slots(self: DecodeRunner) -> dict[str, Slot]:
        first_live = self.kv.page_size  # position 0 of page 1, the first page that is given out
        found = original(self)
        return {**found, "out_slots": replace(found["out_slots"], pad=first_live)}

    return slots


def _no_trim(original: Callable[..., Any]) -> Callable[..., Any]:
    def trim(self: Captured, output: Any, live: int, size: int) -> Any:
        del live
        return original(self, output, size, size)

    return trim


def _round_otherwise(original: Callable[..., Stored]) -> Callable[..., Stored]:
    def replay(self: Captured, key: ShapeKey) -> Stored:
        output = original(self, key)
        for leaf in output.leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.copy_(torch.where(leaf.isfinite(), leaf.nextafter(leaf.new_tensor(torch.inf)), leaf))
        return output

    return replay


_PATCHES: Mapping[str, tuple[type, str, Callable[[Any], Any]]] = {
    "stale-tail": (StaticBuffers, "plan", _keep_tail),
    "live-slot-in-padding": (DecodeRunner, "slots", _live_slot),
    "missed-copy-in": (StaticBuffers, "plan", _skip_one),
    "untrimmed-output": (Captured, "trim", _no_trim),
    "rounding": (Captured, "replay", _round_otherwise),
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Takes one guard away for the extent of the context; None takes none.

    Raises:
        ToggleError: for an unknown fault.
    """
    if name is None:
        yield
        return
    if name not in PLANTS:
        raise ToggleError(no_such("planted fault", name, PLANTS))
    owner, method, patch = _PATCHES[name]
    original = getattr(owner, method)
    setattr(owner, method, patch(original))
    try:
        yield
    finally:
        setattr(owner, method, original)
