"""What a result was measured on: the device and the versions."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
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
    """

    name: str
    kind: str
    driver: str | None = None
    sms: int | None = None


def describe_device(device: torch.device | str) -> Device:
    """Describes a device that is there.

    Raises:
        DeviceError: if it is not.
    """
    present = clock_for(device).device
    if present.type == "cpu":
        return Device(_processor(), "cpu")
    facts = torch.cuda.get_device_properties(present)
    return Device(facts.name, "cuda", _driver(), facts.multi_processor_count)


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


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split("\n", 1)[0].strip() or None
