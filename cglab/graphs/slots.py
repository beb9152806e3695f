"""Slots: what a step says about each static input, and which values may be loaded into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from cglab.errors import SlotError


class Padding(Enum):
    """What the rows after the live ones hold."""

    ZERO = "zero"
    """Reset to zero on every load: indices, positions, anything that addresses memory."""
    HEAD = "head"
    """Only the head is copied; the tail may hold anything, and the function must never let it reach a live row."""
    KEEP = "keep"
    """The buffer is state of its own: not reset, and loaded only when a value is given."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Declares one static input.

    Attributes:
        shape: full shape with -1 on the size axis, such as ``(-1, 64)``; None takes it from the first call.
        dtype: element type; None takes it from the first call.
        axis: the axis that grows with the bucket; None for an input of fixed shape.
        pad: a fill value for the padded tail, or a ``Padding`` policy.
        width: rows on the size axis for each unit of bucket size (tokens of a request).
        ragged: other axes that a live value may fill only in part; the rest is reset to the pad value (B25).
        optional: the input may be None; its kind is then fixed at capture (P16).
        shared: may share memory with a slot of the same name and size; switch off where *values* depend on
            the shape (P20).

    Raises:
        SlotError: for a shape that does not grow on the axis, or a width or pad that is none.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    axis: int | None = 0
    pad: float | bool | Padding = Padding.ZERO
    width: int = 1
    ragged: tuple[int, ...] = ()
    optional: bool = False
    shared: bool = True

    def __post_init__(self) -> None:
        if self.shape is not None:
            grows = [axis for axis, n in enumerate(self.shape) if n == -1]
            axis = self.axis + len(self.shape) if self.axis is not None and self.axis < 0 else self.axis
            if grows != ([] if axis is None else [axis]):
                raise SlotError(
                    f"a slot of shape {self.shape} on axis {self.axis}: -1 belongs there and only there"
                )
        if self.width < 1 or not isinstance(self.pad, int | float | Padding):
            raise SlotError(
                f"a slot needs a width from 1 and a pad value or policy, got {self.width}, {self.pad!r}"
            )

    @property
    def fill(self) -> float | bool | None:
        """The value of padded elements, or None where the tail is not reset."""
        if isinstance(self.pad, Padding):
            return 0 if self.pad is Padding.ZERO else None
        return self.pad

    def resolve(self, name: str, example: Tensor | None) -> Slot:
        """Returns the slot with shape and dtype filled in from ``example``.

        Raises:
            SlotError: if neither says what they are, the pad value does not fit, or the example is not dense.
        """
        if self.shape is not None and self.dtype is not None:
            self.require_pad(name)
            return self
        if example is None:
            raise SlotError(
                f"slot {name!r} has no shape or dtype and no example was given; "
                "pass one, declare both, or make it Slot(optional=True)"
            )
        require_dense(name, example)
        shape = self.shape
        if shape is None:
            if self.axis is not None and not -example.dim() <= self.axis < example.dim():
                raise SlotError(
                    f"slot {name!r} grows on axis {self.axis}, but its value has shape {tuple(example.shape)}"
                )
            axis = None if self.axis is None else self.axis % example.dim()
            shape = tuple(-1 if i == axis else n for i, n in enumerate(example.shape))
        resolved = replace(self, shape=shape, dtype=self.dtype or example.dtype)
        resolved.require_pad(name)
        return resolved

    def require_pad(self, name: str) -> None:
        """Checks that the slot's dtype holds the pad value as it is.

        Raises:
            SlotError: for a value that would be rounded or wrapped.
        """
        fill, dtype = self.fill, self.dtype
        if fill is None or dtype is None or dtype.is_floating_point or dtype.is_complex:
            return
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not low <= fill <= high or int(fill) != fill:
            raise SlotError(
                f"slot {name!r} holds {dtype}, which has no {fill!r}; pad with whole numbers from {low} to {high}"
            )

    def rows_of(self, name: str, value: Tensor) -> int | None:
        """Live size that ``value`` stands for, or None for a slot of fixed shape.

        Raises:
            SlotError: if it is no dense tensor, lacks the axis, or does not divide by the width.
        """
        require_dense(name, value)
        if self.axis is None:
            return None
        if not -value.dim() <= self.axis < value.dim():
            raise SlotError(
                f"slot {name!r} grows on axis {self.axis}, but its value has shape {tuple(value.shape)}"
            )
        rows, rest = divmod(value.shape[self.axis], self.width)
        if rest:
            raise SlotError(
                f"slot {name!r} has shape {tuple(value.shape)}: "
                f"axis {self.axis} is no multiple of its width {self.width}"
            )
        return rows


def require_dense(name: str, value: object) -> None:
    """Refuses what has no fixed memory of its own to copy from.

    Raises:
        SlotError: for anything but a dense tensor (P22).
    """
    if not isinstance(value, Tensor):
        raise SlotError(f"slot {name!r} takes a tensor, got a {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
        raise SlotError(f"slot {name!r} takes a dense tensor, got a {kind} one")
