"""Memory of a tape's pool and of a CUDA device."""

from types import SimpleNamespace

import pytest
import torch

from cglab.errors import InputError
from cglab.measure import memory
from cglab.measure.memory import Memory, free_bytes, memory_now


def test_tape_pool_before_and_after():
    pool = SimpleNamespace(used_bytes=100, reserved_bytes=1000)
    before = memory_now("cpu", pool)
    pool.used_bytes, pool.reserved_bytes = 250, 2000
    change = memory_now("cpu", pool) - before
    assert change == Memory("cpu", 150, 1000, None)
    assert not change.flat
    pool.used_bytes, pool.reserved_bytes = 100, 1000
    assert (memory_now("cpu", pool) - before).flat
    assert before.as_dict() == {"device": "cpu", "allocated": 100, "reserved": 1000, "driver_free": None}


def test_cpu_without_a_pool_is_refused():
    with pytest.raises(InputError, match="pass the pool"):
        memory_now("cpu")


def test_two_devices_are_not_compared():
    with pytest.raises(InputError, match="cuda:0 and of cuda:1"):
        _ = Memory("cuda:0", 0, 0, 0) - Memory("cuda:1", 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "flat"),
    [((0, 0, 0), True), ((-5, 0, 5), True), ((1, 0, 0), False), ((0, 1, 0), False), ((0, 0, -1), False)],
)
def test_flat(change, flat):
    assert Memory("cuda:0", *change).flat is flat


def test_cuda_memory_is_read_when_the_device_is_idle(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: log.append("read") or (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert memory_now("cuda:0") == Memory("cuda:0", 10, 20, 700)
    assert log == ["wait", "read"]
    with pytest.raises(InputError, match="own pools"):
        memory_now("cuda:0", SimpleNamespace(used_bytes=0, reserved_bytes=0))


def test_free_memory_of_a_gpu_counts_what_torch_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    assert free_bytes(torch.device("cuda:0")) == 720


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes what the kernel says: of the whole system, and of this process's control group."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    def say(**files):
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)

    return say


def test_free_memory_of_a_cpu_is_what_the_system_and_the_control_group_leave(system):
    cpu = torch.device("cpu")
    assert free_bytes(cpu) is None, "a system that does not tell"
    system(meminfo="MemTotal:  900 kB\nMemAvailable:   500 kB\n")
    assert free_bytes(cpu) == 500 * 1024
    system(memory_max="max\n", memory_current="100\n", memory_stat="anon 60\ninactive_file 40\n")
    assert free_bytes(cpu) == 500 * 1024, "no limit"
    system(memory_max="1000\n")
    assert free_bytes(cpu) == 940
    system(memory_current="2000\n")
    assert free_bytes(cpu) == 0
    system(meminfo="MemAvailable: much\n")
    assert free_bytes(cpu) is None


@pytest.mark.gpu
def test_gpu_memory_of_a_tensor():
    before = memory_now("cuda")
    kept = torch.zeros(1 << 20, device="cuda")
    assert (memory_now("cuda") - before).allocated == kept.nbytes
