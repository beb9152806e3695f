"""Drift between correct computations of the same rows, judged by what rounding alone does to those very rows.

Rounding is no constant: a row near a cancellation drifts ten times further than the next one, so a bound from a
few rows is passed by the worst of many. Here every judged row is also computed a second correct way (another batch
height), and the verdict is given at the end, on the worst of all rows against the worst of the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cglab.errors import InputError

HEADROOM = 4.0
"""How far beyond the worst drift between two correct ways a third may lie."""


@dataclass(frozen=True, slots=True)
class Drifted:
    """One drift beyond its bound.

    Attributes:
        where: as it was judged.
        name: the quantity.
        drift: largest absolute difference.
        bound: of the quantity, when the verdict was given.
    """

    where: dict[str, Any]
    name: str
    drift: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name} drift by {self.drift:.3g}, bound {self.bound:.3g}"


@dataclass
class Drift:
    """Collects drift by quantity (``logits``, ``kv``), and bounds for it.

    Attributes:
        worst: largest judged difference by quantity.
    """

    worst: dict[str, float] = field(default_factory=dict)
    _reference: dict[str, float] = field(default_factory=dict)
    _judged: list[tuple[dict[str, Any], str, float]] = field(default_factory=list)

    def allow(self, name: str, one: Tensor, other: Tensor) -> None:
        """Two correct results of the same rows: what lies between them is rounding.

        Args:
            name: the quantity.
            one: any shape and floating dtype.
            other: same shape and dtype.

        Raises:
            InputError: if one holds a value that is not finite, or nothing: that is no rounding.
        """
        largest = float(other.abs().max()) if other.numel() else math.nan
        far = difference(one, other)
        if not (math.isfinite(largest) and math.isfinite(far)):
            raise InputError(f"rounding of {name} is measured on finite results; leave out what is not")
        least = largest * torch.finfo(other.dtype).eps
        self._reference[name] = max(self._reference.get(name, 0.0), least, far)

    def judge(self, name: str, got: Tensor, want: Tensor, where: dict[str, Any]) -> None:
        """Notes how far a result lies from its oracle; NaN counts as infinitely far."""
        far = difference(got, want)
        self.worst[name] = max(self.worst.get(name, 0.0), far)
        if far:
            self._judged.append((where, name, far))

    def bound(self, name: str) -> float:
        """Largest drift that is rounding, as far as is known now; 0.0 before anything was allowed."""
        return HEADROOM * self._reference.get(name, 0.0)

    def beyond(self) -> list[Drifted]:
        """Everything judged that lies beyond the bound of its quantity."""
        return [
            Drifted(where, name, far, self.bound(name))
            for where, name, far in self._judged
            if not far <= self.bound(name)
        ]


def difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference, infinite where one is NaN."""
    if torch.equal(one, other):
        return 0.0
    wide = torch.promote_types(one.dtype, torch.float32)
    far = float((one.to(wide) - other.to(wide)).abs_().max())
    if math.isfinite(far):
        return far
    apart = one != other  # infinities that are equal are not apart
    far = float((one[apart].double() - other[apart].double()).abs().max())
    return math.inf if math.isnan(far) else far
