"""Device memory now, and what changed since."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from cglab.errors import InputError
from cglab.graphs.clocks import clock_for

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")


class PoolBytes(Protocol):
    """What is read of a tape pool."""

    @property
    def used_bytes(self) -> int:
        """Bytes in live blocks."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool holds."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a device, or a change of them.

    Attributes:
        device: as torch names it.
        allocated: in live tensors (CUDA), or in live blocks of the pool (tape).
        reserved: held by the caching allocator, graph pools included, or by the tape's pool.
        driver_free: free by the driver's account, which also sees contexts, kernels and graph executables;
            None on a CPU, where other processes move it.
    """

    device: str
    allocated: int
    reserved: int
    driver_free: int | None

    def __sub__(self, before: Memory) -> Memory:
        """The change since ``before``."""
        if self.device != before.device:
            raise InputError(f"memory of {self.device} and of {before.device} cannot be compared")
        free = None
        if self.driver_free is not None and before.driver_free is not None:
            free = self.driver_free - before.driver_free
        return Memory(self.device, self.allocated - before.allocated, self.reserved - before.reserved, free)

    @property
    def flat(self) -> bool:
        """For a change: no more allocated or reserved, and no less free by the driver's account."""
        return self.allocated <= 0 and self.reserved <= 0 and (self.driver_free or 0) >= 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def memory_now(device: torch.device | str, pool: PoolBytes | None = None) -> Memory:
    """Memory of a device once its work has ended.

    Args:
        device: a CUDA device, or the CPU with the tape's ``pool``.
        pool: the tape's pool; a CUDA device counts its own pools.

    Raises:
        DeviceError: if the device is not there.
        InputError: for a CPU without a pool, whose process memory says nothing about a recording; or a GPU
            with one.
    """
    clock = clock_for(device)
    if clock.device.type == "cuda":
        if pool is not None:
            raise InputError("a CUDA device counts its own pools; leave the pool out")
        clock.synchronize()
        free, _ = torch.cuda.mem_get_info(clock.device)
        allocated = torch.cuda.memory_allocated(clock.device)
        return Memory(str(clock.device), allocated, torch.cuda.memory_reserved(clock.device), free)
    if pool is None:
        raise InputError("memory on the CPU is that of a tape's pool; pass the pool")
    return Memory(str(clock.device), pool.used_bytes, pool.reserved_bytes, None)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that new tensors on a device can have.

    Args:
        device: of a GPU what the driver has free and what torch holds unused; of a CPU what the kernel can give without
            swapping, in this process's own control group if that leaves less.

    Returns:
        None on a system that does not tell.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        system = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return int(min(system, _group_room()))


def _group_room() -> float:
    """Bytes left to the control group; infinite without a limit. Its file cache gives way."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat["inactive_file"]), 0)
    except (OSError, KeyError, ValueError):  # no such group, or "max"
        return inf
