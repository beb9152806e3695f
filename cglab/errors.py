"""Every exception of the lab, in one small tree.

    CglabError
    +-- InputError              what the caller gave is wrong (also a ValueError)
    |   +-- ToggleError         a toggle or setting has no such value
    |   +-- SlotError           a slot's shape, dtype, device or kind does not fit
    |   +-- BucketError         a bucket list cannot be honoured
    |   +-- ModelError          a model folder, checkpoint or name cannot be used
    |   +-- DeviceError         a device is asked for that is not there
    |   +-- NotInstalledError   a package is asked for that is not there
    |   +-- PortTakenError      a port is asked for on which something listens
    +-- CaptureError            a function could not be recorded
    |   +-- HostReadError           it reads device data on the host
    |   +-- DynamicShapeError       an output's shape depends on data
    |   +-- NewInputError           it brings in memory that a replay cannot refresh
    |   +-- UnsupportedOperationError   an operation that no recording can hold
    |   +-- BreakRefusedError       a break inside a ``full`` capture
    |   +-- EmptyCaptureError       nothing was recorded
    |   +-- UnjoinedStreamError     a side stream was left open
    |   +-- CaptureMemoryError      out of memory while recording
    |   +-- OutputStructureError    outputs differ in kind between buckets
    |   +-- SelfCheckError          the replay did not repeat what eager computes
    +-- ReplayError             a recording must not be replayed now
    |   +-- AddressError            memory that the recording reads has moved
    |   +-- StaleOutputError        an output is read after a later replay overwrote it
    |   +-- PoolBusyError           the pool is in use, or borrowed memory is still alive
    +-- ServerError             a server did not start, died or gave no answer
    +-- ResultsError            recorded results cannot be read or written
    |   +-- RecordError         a record lacks what it is read for, or has it in another kind
    +-- RankError               ranks that work together do not: one is lost, late, or was told something else
    +-- TokenRangeError         a step handed out a token id that the vocabulary does not have
    +-- RecompiledError         the compiler ran where everything was to be compiled before
    +-- ClosedError             the object was closed
    +-- AccountingError         who owns which KV page does not add up: a fault of the lab

Messages carry three things: the fact, the good values, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


def no_such(kind: str, name: object, good: Iterable[object]) -> str:
    """Says that there is no such name, which is the nearest, and which there are.

    Args:
        kind: what is named, in words.
        name: what was asked for.
        good: the names there are.
    """
    names = [str(each) for each in good]
    return f"{name!r} is no {kind}{nearest(name, names)}; good names: {', '.join(names) or 'none'}"


def nearest(name: object, good: Iterable[object]) -> str:
    """The good names that ``name`` may have been meant for, as a question in brackets; nothing if none is near."""
    by_lower = {str(each).lower(): str(each) for each in good}
    meant = [by_lower[each] for each in get_close_matches(str(name).lower(), by_lower, n=2, cutoff=0.75)]
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""


class CglabError(Exception):
    """Base of every error that the lab raises on purpose."""


class InputError(CglabError, ValueError):
    """What the caller gave is wrong; nothing was changed."""


class ToggleError(InputError):
    """A toggle or setting was given a value that it does not have."""


class SlotError(InputError):
    """A tensor does not fit the slot it is meant for."""


class BucketError(InputError):
    """A list of bucket sizes cannot be honoured."""


class ModelError(InputError):
    """A model name, folder or checkpoint cannot be used."""


class DeviceError(InputError):
    """A device was asked for that this machine does not have."""


class NotInstalledError(InputError):
    """A package was asked for that this machine does not have."""


class PortTakenError(InputError):
    """A port was asked for on which something listens already."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's own code.

    Attributes:
        file: path of the source file.
        line: line number, from 1.
        function: name of the enclosing function.
        code: the source line, stripped; empty when the source is not at hand.
    """

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}"
        return f"{where}: {self.code}" if self.code else where


class CaptureError(CglabError):
    """A function could not be recorded; the process and earlier recordings are intact.

    Attributes:
        operation: the operation that was refused, such as ``aten::_local_scalar_dense``.
        place: the user's own line, if one could be told.
        advice: the smallest change that helps.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        place: Place | None = None,
        advice: str | None = None,
    ) -> None:
        self.summary = message
        self.operation = operation
        self.place = place
        self.advice = advice
        parts = [message]
        if place is not None:
            parts.append(f"at {place}")
        if operation is not None:
            parts.append(f"operation: {operation}")
        if advice is not None:
            parts.append(f"next step: {advice}")
        super().__init__("\n  ".join(parts))

    def at(self, place: Place | None) -> CaptureError:
        """The same error, told at a line."""
        return type(self)(self.summary, operation=self.operation, place=place, advice=self.advice)

    def advised(self, first: str) -> CaptureError:
        """The same error with another next step before its own."""
        advice = first if self.advice is None else f"{first}; {self.advice}"
        return type(self)(self.summary, operation=self.operation, place=self.place, advice=advice)


class HostReadError(CaptureError):
    """The function reads device data on the host, so a replay would act on a frozen value."""


class DynamicShapeError(CaptureError):
    """An output's shape depends on data, so its memory cannot be fixed in advance."""


class NewInputError(CaptureError):
    """The function takes in memory that no replay would refresh."""


class UnsupportedOperationError(CaptureError):
    """The operation cannot be held by a recording at all."""


class BreakRefusedError(CaptureError):
    """A break was reached inside a ``full`` capture, which has nowhere to put it."""


class EmptyCaptureError(CaptureError):
    """Nothing was recorded: a replay would return the same values for ever."""


class UnjoinedStreamError(CaptureError):
    """A side stream was forked from the capture and never joined."""


class CaptureMemoryError(CaptureError):
    """Memory ran out while recording."""


class OutputStructureError(CaptureError):
    """The outputs of two buckets differ in structure, so they cannot share buffers."""


class SelfCheckError(CaptureError):
    """A replay over fresh inputs did not repeat what eager execution computes."""


class ReplayError(CglabError):
    """A recording exists but must not be replayed as things stand."""


class AddressError(ReplayError):
    """Memory that the recording reads by address has moved or was replaced."""


class StaleOutputError(ReplayError):
    """An output was read after a later replay had overwritten its memory."""


class PoolBusyError(ReplayError):
    """A replay or capture was started while its pool was in use."""


class ServerError(CglabError):
    """A server did not start, died, or gave no answer; nothing else was touched, and its log is kept.

    Attributes:
        fault: what it most likely is, in a few words, such as ``out of memory``.
        log_lines: the last lines of its log, oldest first.
    """

    def __init__(self, message: str, *, fault: str, log_lines: Sequence[str] = ()) -> None:
        self.fault = fault
        self.log_lines = tuple(log_lines)
        super().__init__("\n  | ".join([message, *self.log_lines]))


class TokenRangeError(CglabError):
    """A step handed out a token id that the vocabulary does not have."""


class ResultsError(CglabError):
    """Recorded results cannot be read or written; what was there is untouched."""


class RecordError(ResultsError):
    """A record lacks what it is read for, or has it in another kind: it is damaged, or of an earlier version."""


class RecompiledError(CglabError):
    """The compiler ran where everything was to be compiled before."""


class RankError(CglabError):
    """A rank of several that work together is lost, late, or does something else; all of them stop.

    Attributes:
        measured: what each rank had measured until then, by rank; nothing if not all of them had.
    """

    measured: tuple[Mapping[str, Any], ...] = ()


class ClosedError(CglabError):
    """The object was closed and holds no recordings any more."""


class AccountingError(CglabError):
    """Rows and pages do not add up: a fault of the lab, as no caller can bring it about."""
