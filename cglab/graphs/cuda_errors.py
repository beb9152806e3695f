"""What a failed stream capture means, told by the user's own line and not by an error code."""

from __future__ import annotations

import traceback

import torch

from cglab.errors import (
    CaptureError,
    CaptureMemoryError,
    HostReadError,
    NewInputError,
    Place,
    UnjoinedStreamError,
    UnsupportedOperationError,
)
from cglab.graphs import faults
from cglab.graphs.places import place_of_error
from cglab.graphs.refusals import HOST_READ_ADVICE, NEW_INPUT_ADVICE


def explain(error: BaseException, foreign: Place | None = None) -> BaseException:
    """The ``CaptureError`` for a failed stream capture, told by the user's own line and not by a code.

    Args:
        error: what ended the capture.
        foreign: where a stream was entered that was not forked from the capture.
    """
    if isinstance(error, CaptureError) or not isinstance(error, Exception):
        return error
    place = place_of_error(error)
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    lowered = str(error).lower()
    traceback.clear_frames(error.__traceback__)
    code = place.code if place else ""
    if isinstance(error, torch.OutOfMemoryError):
        return CaptureMemoryError(
            f"memory ran out during the capture: {text}",
            place=place,
            advice="capture fewer or smaller buckets, or free memory first",
        )
    if foreign is not None or "unjoined" in lowered or "dependency created on uncaptured" in lowered:
        return UnjoinedStreamError(
            f"a side stream is used that is not forked from the capture and joined to it: {text}",
            place=foreign or place,
            advice="fork with side.wait_stream(current), join with current.wait_stream(side), "
            "or use an @cglab.eager_break",
        )
    if "captur" not in lowered or isinstance(error, faults.PlannedFault):
        return CaptureError(f"the function raised while it was captured: {text}", place=place)
    if "generator not in capture mode" in lowered or "outside graph capture" in lowered:
        return UnsupportedOperationError(
            f"a random generator takes part that the capture does not know, so every replay would draw alike: {text}",
            place=place,
            advice="use the device's default generator, or draw in an @cglab.eager_break",
        )
    if "pin" in code and "memory" in code:
        return UnsupportedOperationError(
            f"pinning memory queries the device: {text}",
            place=place,
            advice="pin staging buffers before the capture",
        )
    if any(call in code for call in (".to(", ".cuda(", "tensor(", "from_numpy", ".copy_(")) and not any(
        read in code for read in (".cpu(", "grouped_mm(")
    ):
        return NewInputError(
            f"host memory is copied to the device from inside the capture: {text}",
            place=place,
            advice=NEW_INPUT_ADVICE,
        )
    return HostReadError(
        f"the host waits for the device inside the capture: {text}", place=place, advice=HOST_READ_ADVICE
    )
