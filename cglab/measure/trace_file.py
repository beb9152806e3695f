"""From a Chrome trace (file, gzip or profiler object) to a :class:`~cglab.measure.trace.Trace`."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from cglab.errors import InputError, ResultsError
from cglab.measure.intervals import Interval, within
from cglab.measure.trace import DeviceEvent, HostCall, Span, Trace

# Calls that give work to a device, by CUDA's two interfaces and HIP's. What only builds a graph is none.
_LAUNCH = re.compile(r"^(cuda|cu|hip)(GraphLaunch|(Ext|Module)?Launch(?!HostFunc)|Memcpy|Memset)")
_DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_HOST_CALLS = ("cuda_runtime", "cuda_driver")

Times = Callable[[dict[str, Any]], Interval]


class Profiler(Protocol):
    """What is needed of ``torch.profiler.profile``."""

    def export_chrome_trace(self, path: str) -> object:
        """Writes a Chrome trace."""
        ...


def load_trace(source: str | Path | Profiler, *, device: int | None = None) -> Trace:
    """Reads a Chrome trace of torch.profiler.

    Args:
        source: path of a ``.json`` or gzipped trace, or a profiler that has ended.
        device: whose work to read, by index; needed only where the trace holds several devices.

    Raises:
        ResultsError: if the file is missing or no trace.
        InputError: if the trace holds several devices and none is named, or not the named one.
    """
    if not isinstance(source, (str, Path)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            source.export_chrome_trace(str(path))
            return load_trace(path, device=device)
    events = _read(Path(source))
    try:
        return parse_trace(events, device=device)
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{source} is no Chrome trace: an event lacks a field ({error!r})") from error


def parse_trace(events: Iterable[dict[str, Any]], *, device: int | None = None) -> Trace:
    """Builds a trace from Chrome trace events, times in microseconds.

    Raises:
        InputError: as :func:`load_trace`.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    # Host clocks count from long ago; small numbers keep the nanoseconds.
    origin = min((float(event["ts"]) for event in complete), default=0.0)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in complete:
        by_kind[str(event.get("cat", "")).lower()].append(event)

    def times(event: dict[str, Any]) -> Interval:
        start = float(event["ts"]) - origin
        return start, start + float(event.get("dur", 0.0))

    on_device = [
        (kind, event, int(event["args"].get("device", 0)))
        for name, kind in _DEVICE_KINDS.items()
        for event in by_kind[name]
    ]
    devices = sorted({index for _, _, index in on_device})
    if device is None and len(devices) > 1:
        raise InputError(f"the trace holds work of devices {devices}; name one, such as device={devices[0]}")
    if device is not None and devices and device not in devices:
        raise InputError(f"the trace holds no work of device {device}; it has {devices}")
    elsewhere = {_correlation(event) for _, event, index in on_device if device not in (None, index)} - {None}

    host = sorted((event for name in _HOST_CALLS for event in by_kind[name]), key=times)
    called: dict[int | None, dict[str, Any]] = {}
    for event in host:
        # A runtime call may show again as the driver call that it makes; the outer one is the launch.
        called.setdefault(_correlation(event), event)
    loose = [event for event in host if _correlation(event) is None]
    called.pop(None, None)
    work = [
        DeviceEvent(
            str(event["name"]),
            *times(event),
            kind=kind,
            stream=int(event["args"].get("stream", 0)),
            correlation=(key := _correlation(event)),
            launched=times(called[key])[0] if key in called else None,
        )
        for kind, event, index in on_device
        if device in (None, index)
    ]
    joined = {event.correlation for event in work} - {None}
    captures = _captures(host, times)
    calls = [
        HostCall(str(event["name"]), *times(event), thread=_thread(event), correlation=_correlation(event))
        for event in (*called.values(), *loose)
        if (key := _correlation(event)) in joined
        or (
            _LAUNCH.match(str(event["name"]))
            and key not in elsewhere
            and not within(times(event)[0], captures[_thread(event)])
        )
    ]

    def spans(category: str) -> list[Span]:
        return sorted(
            (Span(str(event["name"]), *times(event), thread=_thread(event)) for event in by_kind[category]),
            key=lambda span: (span.start, -span.end),
        )

    return Trace(
        tuple(sorted(work, key=lambda event: event.start)),
        tuple(sorted(calls, key=lambda call: call.start)),
        tuple(spans("user_annotation")),
        tuple(_outermost(spans("cpu_op"))),
    )


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        # Names of operations may hold raw control characters.
        content = json.loads(data, strict=False)
    except OSError as error:
        raise ResultsError(f"cannot read the trace {path}: {error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise ResultsError(f"{path} is no complete Chrome trace ({error}); export it again") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ResultsError(f"{path} is JSON but no Chrome trace: it has no list of traceEvents")
    return events


def _correlation(event: dict[str, Any]) -> int | None:
    value = event.get("args", {}).get("correlation")
    return None if value is None else int(value)


def _thread(event: dict[str, Any]) -> str:
    return str(event.get("tid", ""))


def _captures(host: list[dict[str, Any]], times: Times) -> dict[str, list[Interval]]:
    """Stretches of stream capture by thread: what is launched there is recorded, not run."""
    found: dict[str, list[Interval]] = defaultdict(list)
    opened: dict[str, float] = {}
    for event in host:
        name, thread = str(event["name"]), _thread(event)
        if "StreamBeginCapture" in name:
            opened[thread] = times(event)[0]
        elif "StreamEndCapture" in name and thread in opened:
            found[thread].append((opened.pop(thread), times(event)[1]))
    return found


def _outermost(spans: list[Span]) -> Iterator[Span]:
    """Spans that no other of their thread holds, given by start, longer first."""
    ends: dict[str, float] = {}
    for span in spans:
        if span.end > ends.get(span.thread, float("-inf")):
            ends[span.thread] = span.end
            yield span
