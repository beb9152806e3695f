"""PyTorch's own variable-length attention: who fits it, and how its versions are asked for the same thing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def fits_varlen(query: Tensor, window: int | None = None) -> bool:
    """Whether the kernel takes such queries: half precision, heads of 8 to 256, on a GPU from Ampere on.

    Args:
        query: [tokens, heads, head_dim].
        window: positions that a query sees, its own included; asks for an installed kernel that has windows.
    """
    head_dim = query.shape[-1]
    if not query.is_cuda or query.dtype not in HALF or head_dim % 8 or head_dim > 256:
        return False
    return _is_ampere(query.get_device()) and (window is None or "window_size" in _parameters())


def varlen_options(parameters: Collection[str], window: int | None = None) -> dict[str, Any]:
    """Arguments that ask ``varlen_attn`` for causal attention with grouped heads, aligned to the last key.

    Its signature has changed between versions. Where it has no ``enable_gqa``, it takes grouped heads as they are.

    Args:
        parameters: names that the installed function takes; for a window ``window_size`` is among them.
        window: positions that a query sees, its own included; None for all before it.
    """
    causal: dict[str, Any] = {"is_causal": True}
    if "window_size" in parameters:  # positions to the left of a query, and to its right
        causal = {"window_size": (-1 if window is None else window - 1, 0)}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


@functools.cache
def varlen_kernel(window: int | None = None) -> Callable[..., Any]:
    """The installed ``varlen_attn``, set to causal attention with grouped heads, within a window if one is given."""
    from torch.nn.attention.varlen import varlen_attn  # it loads the compiler, so only where it is used

    return functools.partial(varlen_attn, **varlen_options(_parameters(), window))


@functools.cache
def _is_ampere(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
