"""Static buffers: the memory that a recording reads its inputs from, and how their padded tails are reset.

A recording reads addresses, so a live batch is copied into buffers that never move. A batch smaller than its
bucket leaves a tail; what the tail holds is decided per slot and applied again on every load, because the batch
before may have been larger (P11 to P15, B25, B28).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cglab.errors import SlotError
from cglab.graphs.slots import Padding, Slot

PAD_BYTES = 1 << 18
"""Largest buffer, in bytes, of whose pad value a copy is kept."""


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


@dataclass(slots=True)
class Copies:
    """Copies that one grouped call can make: sources of one dtype and device (P23).

    Attributes:
        names, heads: inputs, and where their live rows go.
        pads, tails: pad values, and the padded rows that they go to.
    """

    names: list[str] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    pads: list[Tensor] = field(default_factory=list)
    tails: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How inputs of one kind are loaded: every view is made, so that a load allocates nothing.

    Attributes:
        fills: places that are reset before anything is copied, each with its value.
        copies: for each grouped call the names of its inputs, the pads after them, and where they all go.
    """

    fills: Sequence[tuple[Tensor, float]]
    copies: Sequence[tuple[Sequence[str], list[Tensor], list[Tensor]]]

    def load(self, values: Mapping[str, Tensor | None]) -> None:
        """Loads the live rows and resets the padded ones."""
        with torch.no_grad():  # an input with a gradient would tie the buffers to its graph
            for place, value in self.fills:
                place.fill_(value)
            for names, pads, targets in self.copies:
                sources: list[Any] = [*[values[name] for name in names], *pads]
                torch._foreach_copy_(targets, sources, non_blocking=True)


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
        self._pads: dict[tuple[torch.Size, torch.dtype, float], Tensor] = {}
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
        """Lets go of the buffers; shared ones stay with whoever else uses them."""
        self._buffers.clear()
        self._pads.clear()

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

    def load(self, values: Mapping[str, Tensor | None], live: int, size: int) -> None:
        """Copies a live batch in and resets every padded tail of the bucket.

        Args:
            values: live tensors by slot name, already checked with ``misfit``.
            live: rows in use.
            size: rows of the bucket.
        """
        self.plan(values, live, size).load(values)

    def plan(self, values: Mapping[str, Tensor | None], live: int, size: int) -> LoadPlan:
        """What ``load`` does with these values and with any others of their names, shapes and kinds."""
        copies: dict[tuple[torch.dtype, torch.device], Copies] = defaultdict(Copies)
        fills: list[tuple[Tensor, float]] = []
        with torch.inference_mode(mode=False):  # views that are kept are written in any mode
            for name, slot in self.slots.items():
                if slot.axis is not None and slot.fill is not None and live < size:
                    tail = self._rows(name, live, size)
                    if (pad := self._pad(name, slot.fill)) is None:
                        fills.append((tail, slot.fill))
                    else:
                        own = copies[tail.dtype, tail.device]
                        own.pads.append(pad.narrow(slot.axis, 0, tail.shape[slot.axis]))
                        own.tails.append(tail)
                value = values.get(name)
                if value is None:
                    continue
                head = self._rows(name, 0, live)
                if value.shape != head.shape:  # a ragged value: clear what it leaves of the head
                    fills.append((head, slot.fill or 0))
                    for axis, n in enumerate(value.shape):
                        head = head.narrow(axis, 0, n)
                own = copies[value.dtype, value.device]
                own.names.append(name)
                own.heads.append(head)
        return LoadPlan(fills, [(c.names, c.pads, c.heads + c.tails) for c in copies.values()])

    def _pad(self, name: str, fill: float) -> Tensor | None:
        """A buffer's worth of its pad value, to copy tails from; None for a large buffer, whose tail is filled.

        A copy from it shares the one call, and on a GPU the one kernel, of all that is copied.
        """
        buffer = self._buffers[name]
        if buffer.nbytes > PAD_BYTES:
            return None
        key = (buffer.shape, buffer.dtype, fill)
        if key not in self._pads:
            self._pads[key] = torch.full_like(buffer, fill)
        return self._pads[key]

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
