"""Which recorder serves a device."""

from __future__ import annotations

import torch

from cglab.errors import DeviceError
from cglab.graphs.cuda import CudaRecorder
from cglab.graphs.recorder import Recorder
from cglab.graphs.tape import TapeRecorder


def recorder_for(device: torch.device | str, name: str = "auto") -> Recorder:
    """The recorder of a device: ``tape`` on a CPU, ``cuda`` on a GPU.

    Raises:
        DeviceError: if the named recorder cannot serve the device.
    """
    device = torch.device(device)
    chosen = ("cuda" if device.type == "cuda" else "tape") if name == "auto" else name
    if chosen == "tape" and device.type == "cpu":
        return TapeRecorder()
    if chosen == "cuda" and device.type == "cuda":
        return CudaRecorder(device)
    raise DeviceError(
        f"recorder {name!r} cannot record on {device}: use 'tape' on a cpu, 'cuda' on a cuda device, or 'auto'"
    )
