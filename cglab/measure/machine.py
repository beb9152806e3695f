"""What a result was measured on: the device and the versions."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cglab import __version__
from cglab.graphs.clocks import clock_for

PACKAGES = ("numpy", "transformers", "triton", "sglang")
"""Packages whose versions a record carries, where they are installed."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a record.

    Attributes:
        name: as its maker calls it.
        kind: ``cuda`` or ``cpu``. Only ``cuda`` times are times of CUDA graphs.
        driver: version of the GPU driver; None on a CPU, or where it does not tell.
        sms: streaming multiprocessors; None on a CPU.
        gpus: that the host has; None where it was not asked.
        cores: of the host; None where it was not asked.
        load: processes that wanted a core, the mean of the minute before the record: well above what the run itself
            needs, others ran beside it. None where it was not asked.
    """

    name: str
    kind: str
    driver: str | None = None
    sms: int | None = None
    gpus: int | None = None
    cores: int | None = None
    load: float | None = field(default=None, compare=False)


def describe_device(device: torch.device | str) -> Device:
    """Describes a device that is there.

    Raises:
        DeviceError: if it is not.
    """
    present = clock_for(device).device
    cores, load = os.cpu_count(), round(os.getloadavg()[0], 2)
    if present.type == "cpu":
        return Device(_processor(), "cpu", gpus=0, cores=cores, load=load)
    facts, (driver, gpus) = torch.cuda.get_device_properties(present), _host()
    return Device(facts.name, "cuda", driver, facts.multi_processor_count, gpus, cores, load)


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, CUDA, cglab and of :data:`PACKAGES`, which are not imported for it."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cglab": __version__,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _host() -> tuple[str | None, int | None]:
    """Version of the driver and number of GPUs of the host, hidden ones too."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    found = answer.split()
    return (found[0], len(found)) if found else (None, None)
