"""Static buffers: the memory that a recording reads its inputs from, and how their padded tails are reset.

A recording reads addresses, so a live batch is copied into buffers that never move. A batch smaller than its
bucket leaves a tail; what the tail holds is decided per slot and applied again on every load, because the batch
before may have been larger (P11 to P15, B25, B28).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    axis: int | None = 0
    pad: float | bool | Padding = Padding.ZERO
    width: int = 1
    ragged: tuple[int, ...] = ()
    optional: bool = False
    shared: bool = True

    @property
    def fill(self) -> float | bool | None:
        """The value of padded elements, or None where the tail is not reset."""
        if isinstance(self.pad, Padding):
            return 0 if self.pad is Padding.ZERO else None
        return self.pad

    def resolve(self, name: str, example: Tensor | None) -> Slot:
        """Returns the slot with shape and dtype filled in from ``example``.

        Raises:
            SlotError: if neither the slot nor the example says what they are, or the example is no dense tensor.
        """
        if self.shape is not None and self.dtype is not None:
            return self
        if example is None:
            raise SlotError(
                f"slot {name!r} has no shape or dtype and no example was given; pass one or declare both"
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
        return replace(self, shape=shape, dtype=self.dtype or example.dtype)

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


class SharedBuffers:
    """One buffer for every (name, numel, dtype, device): runners that replay in turn may share their inputs.

    Safe because every runner fills its inputs right before its own replay, and resets them before a capture
    (P18). Buffers of other sizes get storage of their own; an entry is never pointed elsewhere.
    """

    def __init__(self) -> None:
        self._table: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed, or already shared, buffer of this shape."""
        numel = 1
        for n in shape:
            numel *= n
        key = (name, numel, dtype, device)
        if key not in self._table:
            self._table[key] = _zeros(shape, dtype, device)
        return self._table[key].view(shape)

    def clear(self) -> None:
        """Forgets every buffer; memory goes when the last runner drops its view."""
        self._table.clear()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # an inference tensor could not be written in place later
        return torch.zeros(shape, dtype=dtype, device=device)


class StaticBuffers:
    """The buffers of one runner: allocate, view, load.

    Args:
        slots: resolved slots by name.
        maximum: largest bucket size.
        device: where the buffers live.
        shared: table to share storage with other runners; None for storage of its own.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        maximum: int,
        device: torch.device,
        shared: SharedBuffers | None = None,
    ) -> None:
        self.slots = dict(slots)
        self.maximum = maximum
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        for name, slot in self.slots.items():
            if slot.shape is None or slot.dtype is None:
                raise SlotError(f"slot {name!r} is not resolved: it has no shape or no dtype")
            shape = tuple(maximum * slot.width if n == -1 else n for n in slot.shape)
            if shared is not None and slot.shared and slot.pad is not Padding.KEEP:
                self._buffers[name] = shared.get(name, shape, slot.dtype, device)
            else:
                self._buffers[name] = _zeros(shape, slot.dtype, device)
        self.reset()

    def view(self, size: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Views of ``size`` rows of the buffers, by name."""
        return {name: self._rows(name, 0, size) for name in (self.slots if names is None else names)}

    def reset(self) -> None:
        """Puts the pad value everywhere: before a capture, nothing of an earlier batch is left (P18, P19, P21)."""
        for name, slot in self.slots.items():
            if slot.fill is not None:
                self._buffers[name].fill_(slot.fill)

    def clear(self) -> None:
        """Lets go of every buffer."""
        self._buffers.clear()

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        slot, buffer = self.slots[name], self._buffers[name]
        if slot.axis is None:
            return buffer
        return buffer.narrow(slot.axis, start * slot.width, (stop - start) * slot.width)

    def misfit(self, name: str, value: Tensor, size: int) -> str | None:
        """Why ``value`` cannot be loaded into the bucket of ``size`` rows, or None if it can.

        A shape that does not fit is a reason to run eager; a wrong kind of tensor is the caller's mistake.

        Raises:
            SlotError: for a wrong dtype or number of axes (P22).
        """
        slot, target = self.slots[name], self._rows(name, 0, size)
        if value.dtype != target.dtype:
            raise SlotError(
                f"slot {name!r} holds {target.dtype}, got {value.dtype}; convert it before the call, "
                "so that captured and eager steps compute in the same type"
            )
        if value.dim() != target.dim():
            raise SlotError(
                f"slot {name!r} has {target.dim()} axes {tuple(target.shape)}, got shape {tuple(value.shape)}"
            )
        grows = None if slot.axis is None else slot.axis % target.dim()
        ragged = {axis % target.dim() for axis in slot.ragged}
        for axis, (got, room) in enumerate(zip(value.shape, target.shape, strict=True)):
            fits = got <= room if axis == grows or axis in ragged else got == room
            if not fits:
                return f"slot {name!r}: axis {axis} is {got}, the static buffer has {room}"
        return None

    def state(self, values: Mapping[str, Tensor | None], live: int) -> dict[str, Tensor]:
        """The rows of every slot that keeps state, for an eager step: given values are loaded, as before a replay.

        Raises:
            SlotError: if a buffer cannot hold this many rows, or a value does not fit it.
        """
        names = [name for name, slot in self.slots.items() if slot.pad is Padding.KEEP]
        given = {name: value for name in names if (value := values.get(name)) is not None}
        if live > self.maximum and any(self.slots[name].axis is not None for name in names):
            raise SlotError(
                f"slots {names} keep state for {self.maximum} rows, this step has {live}; split it"
            )
        for name, value in given.items():
            if (misfit := self.misfit(name, value, live)) is not None:
                raise SlotError(f"{misfit}, and what it keeps must fit there")
        self.load(given, live, live)
        return self.view(live, names)

    def load(self, values: Mapping[str, Tensor], live: int, size: int) -> None:
        """Copies a live batch in and resets every padded tail of the bucket.

        Args:
            values: live tensors by slot name, already checked with ``misfit``.
            live: rows in use.
            size: rows of the bucket.
        """
        copies: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, slot in self.slots.items():
            if slot.axis is not None and slot.fill is not None and live < size:
                self._rows(name, live, size).fill_(slot.fill)
            value = values.get(name)
            if value is None:
                continue
            head = self._rows(name, 0, live)
            if value.shape != head.shape:  # a ragged value: clear what it leaves of the head
                head.fill_(slot.fill or 0)
                for axis, n in enumerate(value.shape):
                    head = head.narrow(axis, 0, n)
            targets, sources = copies[value.dtype, value.device]
            targets.append(head)
            sources.append(value)
        for targets, sources in copies.values():  # one grouped copy for each kind of source (P23)
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def close(self) -> None:
        """Lets go of the buffers; shared ones stay with whoever else uses them."""
        self._buffers.clear()

    def poison(self, live: int, size: int) -> list[str]:
        """Fills every tail that a policy leaves open with NaN or an extreme value; for tests.

        Returns:
            Names of the slots that were poisoned.
        """
        poisoned = []
        for name, slot in self.slots.items():
            if slot.axis is not None and slot.pad is Padding.HEAD and live < size:
                tail = self._rows(name, live, size)
                tail.fill_(_extreme(tail.dtype))
                poisoned.append(name)
        return poisoned


def _extreme(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
