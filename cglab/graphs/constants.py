"""Plain Python values that a recording bakes in, and whether a later call gives the same ones.

A reference is no snapshot: a list or a dataclass that was changed in place equals itself. And ``2 == 2.0``, although
the two give results of different types. So values are compared by type and content, as they were at capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.errors import SlotError


def ambient(device: torch.device) -> dict[str, str | bool]:
    """Modes of torch that choose what an eager step computes, and that a recording bakes in all the same."""
    autocast = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return {
        "torch autocast": str(torch.get_autocast_dtype(device.type)) if autocast else "off",
        "torch default dtype": str(torch.get_default_dtype()),
        "torch float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def snapshot(name: str, value: object) -> Any:
    """What ``value`` holds now, in a form that equals only the same types with the same content.

    Numbers, text, containers and dataclasses count by content, other objects by their own ``==``: for most of them
    that is identity, so a change inside them goes unseen.

    Args:
        name: of the argument, for messages.
        value: of a plain Python argument.

    Raises:
        SlotError: for a tensor or array inside, whose address or content would be baked in.
    """
    if isinstance(value, Tensor | np.ndarray):
        raise SlotError(
            f"{name!r} holds a {type(value).__name__}, which would be baked in; "
            "make it a slot, or close over it if it never moves"
        )
    content: Any = value
    if isinstance(value, float):
        content = value.hex()  # NaN equals NaN, 0.0 does not equal -0.0
    elif isinstance(value, list | tuple):
        content = [snapshot(name, item) for item in value]
    elif isinstance(value, Mapping):
        content = [(key, snapshot(name, item)) for key, item in value.items()]
    elif isinstance(value, set):
        content = frozenset(value)
    elif is_dataclass(value) and not isinstance(value, type):
        content = [snapshot(name, getattr(value, field.name)) for field in fields(value)]
    return type(value), content
