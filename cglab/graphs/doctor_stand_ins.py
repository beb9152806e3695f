"""CUDA on a machine without: the device ``cuda`` is the CPU there, and streams are stand-ins.

A stream takes part in a capture from the moment that it waits for one that does, and must be waited for before the
capture ends (B09). Stand-ins follow these rules; on a GPU the streams are real, and the recording itself tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cglab.errors import CaptureError, HostReadError, Place, UnjoinedStreamError
from cglab.graphs.breaks import capturing
from cglab.graphs.doctor_refusals import is_pinning
from cglab.graphs.places import place_of_stack
from cglab.graphs.refusals import HOST_READ_ADVICE

FORK_ADVICE = "fork with side.wait_stream(current), and join with current.wait_stream(side)"
ASKS = "asks the device how far it is, and a capture runs nothing"

Tell = Callable[[CaptureError, Place | None], None]


def unjoined(what: str = "a side stream is forked here and never joined") -> UnjoinedStreamError:
    """The error for a stream that a capture cannot end with."""
    return UnjoinedStreamError(what, operation="torch.cuda.Stream", advice=FORK_ADVICE)


class Streams:
    """The streams of one run, and which of them take part in the capture.

    Args:
        tell: called with each fault and its line; nobody if left out.

    Attributes:
        used: whether a stand-in was needed.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self._faults = tell
        self.used = False
        self.main = Stream(self)
        self._current: list[tuple[Stream, Place | None]] = [(self.main, None)]
        self._inside = {self.main}
        self._open: dict[Stream, Place | None] = {}

    def _tell(self, error: CaptureError, place: Place | None) -> None:
        if self._faults is not None:
            self._faults(error, place)

    @property
    def current(self) -> Stream:
        """Where work is queued now."""
        return self._current[-1][0]

    def order(self, stream: Stream, other: Stream | None) -> None:
        """``stream`` waits for what ``other`` has queued; an event that nobody recorded, None, orders nothing."""
        if other is None or not capturing():
            return
        place = place_of_stack(sys._getframe())
        if stream in self._inside and other in self._inside:
            self._open.pop(other, None)
        elif other in self._inside:
            self._inside.add(stream)
            self._open[stream] = place
        elif stream in self._inside:
            self._tell(unjoined("the capture waits for a stream that takes no part in it"), place)

    def wait_on_host(self, operation: str, does: str = "makes the host wait for the device") -> None:
        """The host waits for the device, or asks how far it is."""
        self.used = True
        if capturing():
            what = f"{operation}() {does}"
            place = place_of_stack(sys._getframe())
            self._tell(HostReadError(what, operation=operation, advice=HOST_READ_ADVICE), place)

    def work(self) -> None:
        """An operation is queued on the current stream."""
        stream, place = self._current[-1]
        if stream not in self._inside:
            self._tell(unjoined("work is queued on a stream that was not forked from the capture"), place)

    def end(self) -> None:
        """The capture ends: every fork must be joined."""
        for place in self._open.values():
            self._tell(unjoined(), place)

    def new_stream(self, *options: Any, **named: Any) -> Stream:
        """Stands in for ``torch.cuda.Stream``."""
        self.used = True
        return Stream(self)

    def new_event(self, *options: Any, **named: Any) -> Event:
        """Stands in for ``torch.cuda.Event``."""
        self.used = True
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        """Stands in for ``torch.cuda.current_stream``."""
        self.used = True
        return self.current

    def default_stream(self, device: Any = None) -> Stream:
        """Stands in for ``torch.cuda.default_stream``."""
        self.used = True
        return self.main

    def synchronize(self, device: Any = None) -> None:
        """Stands in for ``torch.cuda.synchronize``."""
        self.wait_on_host("torch.cuda.synchronize")

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """Stands in for ``torch.cuda.stream``."""
        self._current.append((stream or self.current, place_of_stack(sys._getframe())))
        try:
            yield
        finally:
            self._current.pop()


@contextmanager
def on_cpu(streams: Streams) -> Iterator[None]:
    """Within, ``torch.cuda`` has streams and events, and whatever names the device ``cuda`` gets the CPU."""
    stand_ins = {
        "Stream": streams.new_stream,
        "Event": streams.new_event,
        "stream": streams.entered,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "synchronize": streams.synchronize,
    }
    real = {name: getattr(torch.cuda, name) for name in stand_ins}
    vars(torch.cuda).update(stand_ins)
    try:
        with _CpuForCuda(streams):
            yield
    finally:
        vars(torch.cuda).update(real)


class _CpuForCuda(torch.overrides.TorchFunctionMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_pinning(func):
            return args[0].clone()
        if func is nn.functional.one_hot and (hot := _one_hot(args, kwargs)) is not None:
            self._streams.used = True
            return hot
        if not names_cuda(func, args, kwargs):
            return func(*args, **kwargs)
        here, self._streams.used = torch.device("cpu"), True
        if func is torch.device:  # called with an index too, which no other device has
            return here
        if func is torch.Tensor.cuda:
            return args[0].to(here)
        given = [here if _is_cuda(each) else each for each in args]
        return func(*given, **{name: here if _is_cuda(each) else each for name, each in kwargs.items()})


def _one_hot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """As a GPU computes it, where a CPU would first read whether the classes are in range; None to count them."""
    given = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
    classes, number = given["input"], given.get("num_classes", -1)
    if number < 1 or not classes.numel():
        return None
    spread: Tensor = classes.new_zeros((*classes.shape, number)).scatter_(-1, classes.unsqueeze(-1), 1)
    return spread


def names_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of torch asks for the device ``cuda``."""
    return func is torch.Tensor.cuda or any(map(_is_cuda, [*args, *kwargs.values()]))


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def wait_stream(self, other: Stream) -> None:
        """Later work here comes after what ``other`` has queued."""
        self._streams.order(self, other)

    def wait_event(self, event: Event) -> None:
        """Later work here comes after ``event``."""
        self._streams.order(self, event.recorded_on)

    def record_event(self, event: Event | None = None) -> Event:
        """An event after what is queued here."""
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        self._streams.wait_on_host("Stream.synchronize")

    def query(self) -> bool:
        """Whether what is queued here is done: it is, on a CPU."""
        self._streams.wait_on_host("Stream.query", ASKS)
        return True


class Event:
    """Stands in for ``torch.cuda.Event``.

    Attributes:
        recorded_on: the stream that it marks; None before that.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.recorded_on: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Marks what is queued on ``stream``, or on the current one."""
        self.recorded_on = stream or self._streams.current

    def wait(self, stream: Stream | None = None) -> None:
        """Later work on ``stream``, or on the current one, comes after it."""
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        self._streams.wait_on_host("Event.synchronize")

    def query(self) -> bool:
        """Whether what it marks is done: it is, on a CPU."""
        self._streams.wait_on_host("Event.query", ASKS)
        return True
