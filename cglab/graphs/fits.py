"""What was decided for a step, kept for the next step whose inputs are of the same kinds.

Which bucket serves a step, whether its inputs fit, and which views they are copied through follows from the names,
shapes and types of the inputs alone. So it is worked out once, and a step like an earlier one looks it up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from cglab.graphs.buffers import LoadPlan
from cglab.graphs.keys import ShapeKey

MOST_FITS = 256
"""Kinds of inputs that one step remembers; beyond, it starts anew."""

_kind = attrgetter("shape", "dtype", "layout", "device")


@dataclass(frozen=True, slots=True)
class Fit:
    """A captured step's decision.

    Attributes:
        key: the recording that serves it.
        label: the key as coverage counts it.
        live: rows in use.
        plan: how its inputs are loaded.
        version: of the recordings when its inputs were first seen; it holds for no other.
    """

    key: ShapeKey
    label: str
    live: int
    plan: LoadPlan
    version: int


class Fits:
    """Decisions by the kinds of inputs, at most ``MOST_FITS``."""

    def __init__(self) -> None:
        self._fits: dict[Hashable, Fit] = {}

    def __len__(self) -> int:
        return len(self._fits)

    def find(self, kinds: Hashable, version: int) -> Fit | None:
        """What was decided for inputs of these kinds over the recordings of this version."""
        fit = self._fits.get(kinds)
        return fit if fit is not None and fit.version == version else None

    def keep(self, kinds: Hashable, fit: Fit) -> None:
        """Remembers a decision for inputs that have a kind."""
        if kinds is None:
            return
        if len(self._fits) >= MOST_FITS:
            self._fits.clear()
        self._fits[kinds] = fit

    def clear(self) -> None:
        """Forgets everything, views included."""
        self._fits.clear()


def kinds_of(values: Mapping[str, Tensor | None]) -> Hashable:
    """All that a decision depends on: name, shape, dtype, layout and device of every input.

    None for what has no such kind, such as a list or a nested tensor: it is looked at each time, and refused there.
    """
    try:
        kinds = tuple([(name, None if value is None else _kind(value)) for name, value in values.items()])
        hash(kinds)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return kinds
