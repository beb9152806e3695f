"""What a stream capture refuses and the tape does not meet: copies between host and device, generators of one's own."""

from __future__ import annotations

from typing import Any

import torch

from cglab.errors import CaptureError, HostReadError, NewInputError, UnsupportedOperationError
from cglab.graphs.refusals import HOST_READ_ADVICE

PINNED_ADVICE = (
    "make it a slot, or pin it before the capture (Tensor.pin_memory) and copy with non_blocking=True"
)
GENERATOR_ADVICE = (
    "use the device's default generator, register this one (CUDAGraph.register_generator_state), "
    "or draw in a function marked @cglab.eager_break"
)


def host_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
    """The error for a copy between host and device that waits for the host; None for any other operation."""
    name = func._schema.name
    if name == "aten::_to_copy":
        source, target, pinned = args[0], torch.device(kwargs.get("device") or args[0].device), False
    elif name == "aten::copy_":
        source, target = args[1], args[0].device
        pinned = args[0].device.type == "cpu" and args[0].is_pinned() and bool(kwargs.get("non_blocking"))
    else:
        return None
    if source.device.type == "cpu" and target.type == "cuda" and not source.is_pinned():
        return unpinned()
    if source.is_cuda and target.type == "cpu" and not pinned:
        return HostReadError("device data is copied to the host", operation=name, advice=HOST_READ_ADVICE)
    return None


def unpinned() -> CaptureError:
    """The error for pageable host memory that is copied to the device."""
    what = "host memory that is not pinned is copied to the device"
    return NewInputError(what, operation="Tensor.to", advice=PINNED_ADVICE)


def pinning() -> CaptureError:
    """The error for memory that is pinned inside the function (B06)."""
    what = "pinning memory queries the device"
    advice = "pin staging buffers before the capture, and copy from them into a slot"
    return UnsupportedOperationError(what, operation="Tensor.pin_memory", advice=advice)


def is_pinning(func: Any) -> bool:
    """Whether a call pins memory; by its name, as the recorder of a GPU wraps the method."""
    return getattr(func, "__name__", "") == "pin_memory"


def unregistered(operation: str) -> CaptureError:
    """The error for numbers that are drawn from a generator that nobody registered with the capture."""
    what = "numbers are drawn from a generator that the capture does not know"
    return UnsupportedOperationError(what, operation=operation, advice=GENERATOR_ADVICE)


def is_default(generator: torch.Generator) -> bool:
    """Whether a capture registers it by itself."""
    known = [torch.default_generator, *torch.cuda.default_generators]
    return any(generator is each or generator == each for each in known)
