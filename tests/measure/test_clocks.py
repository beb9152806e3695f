"""Clocks and timing helpers; the CUDA side is checked with fake events here and for real on a GPU."""

import time

import pytest
import torch

from cglab.errors import DeviceError, InputError
from cglab.graphs import clocks


class HostClock:
    """The host's clock, which goes on only where a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(clocks, "perf_counter", lambda: self.now)

    def work(self, seconds):
        self.now += seconds


@pytest.fixture
def host(monkeypatch):
    return HostClock(monkeypatch)


def test_cpu_clock_times_the_region_and_nothing_after_it(host):
    host.work(1.0)
    with clocks.clock_for("cpu").region() as region:
        host.work(0.25)
    host.work(2.0)
    assert region.seconds == 0.25


def test_the_cpu_clock_is_the_real_one():
    before = time.perf_counter()
    with clocks.clock_for("cpu").region() as region:
        time.sleep(0.01)
    assert 0.01 <= region.seconds <= time.perf_counter() - before


def test_open_region_has_no_seconds():
    with clocks.clock_for("cpu").region() as region, pytest.raises(InputError, match="still open"):
        _ = region.seconds


def test_median_of_repeats_drops_warm_up_and_divides_by_calls(host):
    calls = []

    def slow_at_first():
        calls.append(1)
        host.work(64.0 if len(calls) <= 2 else 0.25 * (1 + len(calls) // 7))

    seconds = clocks.median_seconds(slow_at_first, clocks.clock_for("cpu"), repeats=3, warmup=2, calls=4)
    assert len(calls) == 2 + 3 * 4
    assert seconds == 0.5, (
        "calls 3 to 6 take a quarter of a second each, 7 to 13 twice, the last thrice as long"
    )


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"repeats": 1, "calls": 0}, {"repeats": 1, "warmup": -1}])
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(InputError, match="at least"):
        clocks.sample_seconds(lambda: None, clocks.clock_for("cpu"), **wrong)


def test_absent_devices_and_kinds_are_refused():
    with pytest.raises(InputError, match="'device' and 'wall'"):
        clocks.clock_for("cpu", "gpu")
    with pytest.raises(DeviceError, match="'cpu' and 'cuda'"):
        clocks.clock_for("meta")
    with pytest.raises(DeviceError):
        clocks.CudaEventClock("cpu")
    with pytest.raises(DeviceError):
        clocks.clock_for(f"cuda:{torch.cuda.device_count()}")


class FakeCuda:
    """Events on a stream whose work takes 3 ms a call and runs after the host has gone on."""

    def __init__(self, monkeypatch):
        self.device_now = 0.0
        self.log = []
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == "stream 7"
                self.at = fake.device_now
                fake.log.append("record")

            def synchronize(self):
                fake.log.append("event wait")

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream 7")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append("device wait"))
        monkeypatch.setattr(torch.cuda, "Event", Event)

    def work(self):
        self.device_now += 3.0
        self.log.append("work")


def test_event_clock_waits_only_when_read(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    clock = clocks.clock_for("cuda")
    with clock.region() as region:
        cuda.work()
    assert cuda.log == ["record", "work", "record"]
    assert region.seconds == pytest.approx(0.003)
    assert cuda.log[-1] == "event wait"


def test_event_clock_open_region_has_no_seconds(monkeypatch):
    FakeCuda(monkeypatch)
    with clocks.clock_for("cuda").region() as region, pytest.raises(InputError, match="still open"):
        _ = region.seconds


def test_wall_clock_on_a_gpu_waits_at_both_ends(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with clocks.clock_for("cuda", "wall").region():
        cuda.work()
    assert cuda.log == ["device wait", "work", "device wait"]


def test_sampling_synchronises_after_warm_up(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    samples = clocks.sample_seconds(cuda.work, clocks.clock_for("cuda"), repeats=2, warmup=1, calls=2)
    assert samples == pytest.approx([0.003, 0.003])
    assert cuda.log[:3] == ["work", "device wait", "record"]


@pytest.mark.gpu
def test_gpu_event_clock_sees_device_work_and_wall_clock_more():
    x = torch.randn(4096, 4096, device="cuda")
    events = clocks.median_seconds(lambda: x @ x, clocks.clock_for("cuda"), repeats=10)
    wall = clocks.median_seconds(lambda: x @ x, clocks.clock_for("cuda", "wall"), repeats=10)
    assert 0 < events <= wall * 1.05
