"""Clocks that time a region of work on a device: CUDA events on a GPU, ``perf_counter`` on a CPU.

The two answer different questions on a GPU. The event clock times what the *stream* saw, from the first to
the last piece of work of the region, host gaps in between included. The wall clock times what the *caller*
saw: it waits for the device before and after, so the launch latency of the first kernel counts too. Neither
may run in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from time import perf_counter
from typing import Literal, Protocol, Self

import torch

from cglab.errors import DeviceError, InputError


class Region(Protocol):
    """One timed stretch of work."""

    @property
    def seconds(self) -> float:
        """Seconds of the region; waits for its end where the device is still busy."""
        ...

    @property
    def done(self) -> bool:
        """Whether the region has ended on the device; asking waits for nothing."""
        ...

    def since(self, earlier: Self) -> float:
        """Seconds from the start of ``earlier``, a region of the same clock that is done, to the start of this."""
        ...


class DeviceClock(Protocol):
    """Times regions of work on one device."""

    name: str
    device: torch.device

    def region(self) -> AbstractContextManager[Region]:
        """Times the body of a ``with`` block; read ``seconds`` after it."""
        ...

    def synchronize(self) -> None:
        """Waits for the device."""
        ...


class _WallRegion:
    def __init__(self) -> None:
        self.start = perf_counter()
        self.end: float | None = None

    @property
    def seconds(self) -> float:
        if self.end is None:
            raise InputError("the region is still open; read its seconds after the with block")
        return self.end - self.start

    @property
    def done(self) -> bool:
        return self.end is not None

    def since(self, earlier: _WallRegion) -> float:
        return self.start - earlier.start


class WallClock:
    """``perf_counter`` around a region, with the device idle at both ends."""

    name = "wall"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = _present(device)

    @contextmanager
    def region(self) -> Iterator[_WallRegion]:
        """Times the body; waits for the device before and after it."""
        self.synchronize()
        region = _WallRegion()
        yield region
        self.synchronize()
        region.end = perf_counter()

    def synchronize(self) -> None:
        """Waits for the device; a CPU has done its work already."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _EventRegion:
    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.closed = False

    @property
    def seconds(self) -> float:
        if not self.closed:
            raise InputError("the region is still open; read its seconds after the with block")
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3

    @property
    def done(self) -> bool:
        return self.closed and bool(self.end.query())

    def since(self, earlier: _EventRegion) -> float:
        return float(earlier.start.elapsed_time(self.start)) / 1e3


class CudaEventClock:
    """A pair of CUDA events on the stream that is current when the region opens.

    Closing a region does not wait, so regions can be timed without disturbing a running pipeline.
    """

    name = "cuda-events"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = _present(device)
        if self.device.type != "cuda":
            raise DeviceError(f"CUDA events cannot time {self.device}; use WallClock, or clock_for(device)")

    @contextmanager
    def region(self) -> Iterator[_EventRegion]:
        """Times the body on the current stream; waits for nothing."""
        stream = torch.cuda.current_stream(self.device)
        region = _EventRegion()
        region.start.record(stream)
        yield region
        region.end.record(stream)
        region.closed = True

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.device)


def clock_for(device: torch.device | str, kind: Literal["device", "wall"] = "device") -> DeviceClock:
    """The clock of a device.

    Args:
        device: what the work runs on.
        kind: ``device`` for CUDA events on a GPU and ``perf_counter`` on a CPU; ``wall`` for ``perf_counter``
            on either, with the device idle at both ends.

    Raises:
        DeviceError: if the device is not there, or has no clock.
        InputError: for another ``kind``.
    """
    if kind not in ("device", "wall"):
        raise InputError(f"no clock of kind {kind!r}; there are 'device' and 'wall'")
    present = _present(device)
    return CudaEventClock(present) if kind == "device" and present.type == "cuda" else WallClock(present)


def sample_seconds(
    function: Callable[[], object], clock: DeviceClock, *, repeats: int, warmup: int = 2, calls: int = 1
) -> list[float]:
    """Seconds per call of ``function``, one sample a repeat.

    Args:
        function: the work; what it returns is dropped.
        clock: from :func:`clock_for`.
        repeats: timed regions.
        warmup: calls before the first region, untimed.
        calls: calls in one region, whose mean is the sample. More than one hides the host's latency behind
            the device, as a loop of steps without a host read does.

    Raises:
        InputError: if ``repeats`` or ``calls`` is below 1, or ``warmup`` below 0.
    """
    if repeats < 1 or calls < 1 or warmup < 0:
        raise InputError(f"repeats={repeats}, calls={calls}, warmup={warmup}: need at least 1, 1 and 0")
    for _ in range(warmup):
        function()
    clock.synchronize()
    samples = []
    for _ in range(repeats):
        with clock.region() as region:
            for _ in range(calls):
                function()
        samples.append(region.seconds / calls)
    return samples


def median_seconds(
    function: Callable[[], object], clock: DeviceClock, *, repeats: int, warmup: int = 2, calls: int = 1
) -> float:
    """Median of :func:`sample_seconds`."""
    return median(sample_seconds(function, clock, repeats=repeats, warmup=warmup, calls=calls))


def _present(device: torch.device | str) -> torch.device:
    """``device``, checked to be there; a bare ``cuda`` becomes the current one."""
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise DeviceError(f"no clock for {found}; the lab times 'cpu' and 'cuda' devices")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError(f"{found} was asked for, but this machine has no CUDA device; use 'cpu'")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise DeviceError(f"{found} was asked for, but this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)
