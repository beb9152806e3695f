"""Forward segments on a device that runs behind its host, on the CPU, and on a GPU."""

import time

import numpy as np
import pytest
import torch

from cglab.engine.segments import ForwardSegments, Segment
from cglab.errors import InputError
from cglab.graphs import clocks
from cglab.graphs.clocks import WallClock, clock_for


class LateDevice:
    """A clock of a device that works off a queue; what it tells is as coarse as CUDA's events."""

    name = "late"
    device = torch.device("cuda", 0)

    def __init__(self):
        self.host = self.free = 100.0  # seconds: the host's clock, and when the device is through its queue
        self.waits = 0

    def now(self):
        return self.host

    def launch(self, seconds):
        self.free = max(self.free, self.host) + seconds

    def synchronize(self):
        self.waits += 1
        self.host = max(self.host, self.free)

    def region(self):
        return LateRegion(self)


class LateRegion:
    def __init__(self, clock):
        self.clock, self.closed = clock, False

    def __enter__(self):
        self.start = max(self.clock.free, self.clock.host)
        return self

    def __exit__(self, *error):
        self.end = max(self.clock.free, self.clock.host)
        self.closed = error == (None, None, None)

    @property
    def done(self):
        return self.closed and self.clock.host >= self.end

    @property
    def seconds(self):
        assert self.done, "reading it would wait for the device"
        return milliseconds(self.end - self.start)

    def since(self, earlier):
        assert self.done
        return milliseconds(self.start - earlier.start)


def milliseconds(seconds):
    """As an event tells it: milliseconds in single precision."""
    return float(np.float32(seconds * 1e3)) / 1e3


@pytest.fixture
def device():
    return LateDevice()


@pytest.fixture
def segments(device):
    return ForwardSegments(device, now=device.now)


def forward(device, segments, kind, seconds):
    with segments.timed(kind):
        device.launch(seconds)


def test_a_drain_gives_what_has_ended_and_never_waits(device, segments):
    waits = device.waits
    forward(device, segments, "prefill", 0.5)
    forward(device, segments, "decode", 0.25)
    assert segments.drain() == []
    device.host += 0.6
    assert segments.drain() == [Segment("prefill", 100.0, 0.5)]
    device.host += 1.0
    assert segments.drain() == [Segment("decode", 100.5, 0.25)]
    assert segments.drain() == []
    assert device.waits == waits


def test_work_between_segments_belongs_to_none(device, segments):
    forward(device, segments, "decode", 0.25)
    device.launch(0.5)  # a sampler that nobody times
    forward(device, segments, "decode", 0.25)
    device.host += 2.0
    first, second = segments.drain()
    assert (first.end, second.start, second.seconds) == (100.25, 100.75, 0.25)


def test_starts_stay_exact_for_hours(device, segments):
    """In single precision a millisecond count two hours from its origin is half a millisecond coarse."""
    starts = []
    for _ in range(200):
        device.host += 36.1234567
        starts.append(device.host)
        forward(device, segments, "decode", 0.0123)
    device.host += 1.0
    assert [each.start for each in segments.drain()] == pytest.approx(starts, abs=2e-4)


def test_nobody_drains_and_memory_stays_bounded(device):
    segments = ForwardSegments(device, now=device.now, capacity=3)
    for index in range(5):  # the device is far behind, so none has ended
        forward(device, segments, f"step {index}", 1.0)
    assert segments.dropped == 2
    device.host += 10.0
    assert [each.kind for each in segments.drain()] == ["step 2", "step 3", "step 4"]
    for index in range(5):  # each has ended when the next begins
        forward(device, segments, f"step {index}", 1.0)
        device.host += 1.0
    assert [each.kind for each in segments.drain()] == ["step 2", "step 3", "step 4"]
    assert segments.dropped == 4


def test_p83_a_segment_within_a_segment_is_refused(device, segments):
    with segments.timed("decode"), pytest.raises(InputError, match="inside another"), segments.timed("draft"):
        pass
    assert [each.kind for each in segments.drain()] == ["decode"]


def test_a_forward_that_raises_is_no_segment(device, segments):
    with pytest.raises(ZeroDivisionError), segments.timed("decode"):
        device.launch(1.0)
        raise ZeroDivisionError
    forward(device, segments, "prefill", 0.5)
    device.host += 2.0
    assert segments.drain() == [Segment("prefill", 101.0, 0.5)]


def test_wrong_clocks_and_capacities_are_refused(device):
    device.name = "wall"
    with pytest.raises(InputError, match="waits for cuda:0"):
        ForwardSegments(device)
    with pytest.raises(InputError, match="at least 1"):
        ForwardSegments(WallClock(), capacity=0)


def test_on_a_cpu_segments_are_wall_time(device, monkeypatch):
    monkeypatch.setattr(clocks, "perf_counter", device.now)
    segments = ForwardSegments(clock_for("cpu"), now=device.now)
    device.host += 3.0
    with segments.timed("prefill"):
        device.host += 0.25
    device.host += 1.0
    assert segments.drain() == [Segment("prefill", 103.0, 0.25)]


def test_the_hosts_clock_is_the_engines():
    segments = ForwardSegments(clock_for("cpu"))
    before = time.perf_counter()
    with segments.timed("prefill"):
        time.sleep(0.01)
    (segment,) = segments.drain()
    assert segment.seconds >= 0.01 and segment.end <= time.perf_counter()
    assert before - segment.start < 60, "another clock would count from elsewhere"


@pytest.mark.gpu
def test_gpu_segments_are_device_time_and_the_host_never_waits():
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    segments = ForwardSegments(clock_for("cuda"))
    started = time.perf_counter()
    for kind in ("prefill", "decode"):
        with segments.timed(kind):
            for _ in range(20):
                x @ x
    queued = time.perf_counter() - started
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    prefill, decode = segments.drain()
    assert (prefill.kind, decode.kind) == ("prefill", "decode")
    assert 0 < prefill.seconds + decode.seconds <= elapsed * 1.01
    assert prefill.end <= decode.start + 1e-5
    assert started - 1e-3 <= prefill.start and decode.end <= started + elapsed + 1e-3
    assert queued < elapsed / 2
