"""Side streams during a capture: seen when they are forked, joined before a segment ends.

A segment cannot end while a stream that it forked is still open (B09, P48), and work that a break leaves running on
another stream would race with the next segment (B08). So forks are noted where they happen, with the user's line.
``Stream.wait_stream`` and ``torch.cuda.stream`` are wrapped once; outside of a watch they do what they always did.
So is ``Tensor.pin_memory``: newer allocators let it pass inside a capture, with the host's values baked in (B06).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cglab.errors import Place, UnsupportedOperationError
from cglab.graphs.places import place_of_stack

_wait_stream = torch.cuda.Stream.wait_stream
_enter = torch.cuda.StreamContext.__enter__
_pin_memory = torch.Tensor.pin_memory


class _Active(threading.local):
    watch: StreamWatch | None = None


_active = _Active()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    before, _active.watch = _active.watch, None  # this look is no use of the stream
    try:
        with torch.cuda.stream(stream):
            return torch.cuda.graphs.is_current_stream_capturing()  # of the stream, whatever code is told
    finally:
        _active.watch = before


def _watched_wait(stream: Any, other: Any) -> None:
    watch = _active.watch
    if watch is None or not watch.absorbs(stream, other):
        _wait_stream(stream, other)


def _watched_enter(context: Any) -> Any:
    watch = _active.watch
    if watch is not None and context.stream is not None:
        watch.entered(context.stream)
    return _enter(context)


def _watched_pin(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    watch = _active.watch
    if watch is not None and watch.recording:
        raise UnsupportedOperationError(
            "pinning memory inside a capture would replay the values that the host had then",
            operation="Tensor.pin_memory",
            place=place_of_stack(sys._getframe()),
            advice="pin staging buffers before the capture, and copy from them into a slot",
        )
    return _pin_memory(tensor, *args, **kwargs)


def install() -> None:
    """Wraps the methods; again is harmless."""
    torch.Tensor.pin_memory = _watched_pin  # type: ignore[method-assign, assignment]
    torch.cuda.Stream.wait_stream = _watched_wait  # type: ignore[assignment, method-assign]
    torch.cuda.StreamContext.__enter__ = _watched_enter  # type: ignore[method-assign]


class StreamWatch:
    """Follows forks from one main stream.

    Attributes:
        main: the stream that records, or that replays a break.
        recording: whether a segment is being recorded (False inside a break).
        joined: places where a side stream was forked and had to be joined for the user.
        foreign: where a stream was entered while recording that was not forked from the main one.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self.main = main
        self.recording = False
        self.joined: list[Place | None] = []
        self.foreign: Place | None = None
        self._open: dict[int, tuple[torch.cuda.Stream, Place | None]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows this thread's forks; an outer watch comes back at the end."""
        before, _active.watch = _active.watch, self
        try:
            yield
        finally:
            _active.watch = before

    def absorbs(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> bool:
        """Notes one ``stream.wait_stream(other)``; True if the wait must be skipped.

        A wait for a side stream that was joined when its segment ended would tie this segment to finished work
        outside of the capture (P49).
        """
        if other == self.main and stream != self.main:
            self.note(stream)
        elif stream == self.main:
            known = self._open.pop(other.cuda_stream, None)
            return known is None and self.recording and bool(self.joined) and not _is_capturing(other)
        return False

    def entered(self, stream: torch.cuda.Stream) -> None:
        """A break queues work elsewhere; or, while recording, a stream comes in that nobody forked."""
        if not self.recording:
            self.note(stream)
        elif self.foreign is None and stream != self.main and stream.cuda_stream not in self._open:
            self.foreign = place_of_stack(sys._getframe())

    def note(self, stream: torch.cuda.Stream) -> None:
        """Remembers a side stream and the line that used it first."""
        if stream != self.main and stream.cuda_stream not in self._open:
            self._open[stream.cuda_stream] = (stream, place_of_stack(sys._getframe()))

    def join(self) -> None:
        """Makes the main stream wait for every open side stream."""
        for stream, place in list(self._open.values()):
            if not self.recording or _is_capturing(stream):
                _wait_stream(self.main, stream)
                self.joined.append(place)
        self._open.clear()
