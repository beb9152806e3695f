"""Whether a model and its cache fit in memory, and if not, which sizes would: asked before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from cglab.engine.cache import paged_kv
from cglab.engine.memory import CacheLayout
from cglab.errors import InputError
from cglab.models.config import ModelConfig
from cglab.models.loading import layout_of


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes that a user gives a cache.

    Attributes:
        max_batch: requests at once.
        max_context: tokens of the longest.
        cache_tokens: room for so many of all requests together; None for ``max_batch`` of the longest.
    """

    max_batch: int
    max_context: int
    cache_tokens: int | None = None


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint of this shape in this dtype."""
    return sum(prod(piece.shape) for piece in layout_of(config).values()) * dtype.itemsize


def cache_bytes(layout: CacheLayout, config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a cache of these sizes: keys, values and page tables of every pool. Nothing is allocated."""
    kv = paged_kv(layout, config, device=torch.device("meta"), dtype=dtype)
    return sum(tensor().nbytes for tensor in kv.watched().values())


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, 0 if none does; what is below one that fits must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def require_room(
    asked: CacheSizes,
    layout: Callable[[CacheSizes], CacheLayout],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    free: int | None,
) -> None:
    """Refuses a cache that the memory beside the weights cannot hold. What a draft model needs is not counted.

    Args:
        asked: the sizes.
        layout: the cache of such sizes.
        config: the model's shape.
        dtype: of weights and cache.
        free: bytes that can be had; None where the system does not tell, and nothing is refused.

    Raises:
        InputError: with the bytes asked and free, and the largest sizes that fit.
    """
    weights = weight_bytes(config, dtype)

    def needed(**sizes: int) -> int:
        return weights + cache_bytes(layout(replace(asked, **sizes)), config, dtype)

    def fits(name: str, size: int) -> bool:
        return needed(**{name: size}) <= (free or 0)

    wanted = needed()
    if free is None or wanted <= free:
        return
    fact = (
        f"{wanted:,} bytes are asked for, {weights:,} of weights and {wanted - weights:,} of a cache for "
        f"max_batch={asked.max_batch}, max_context={asked.max_context}"
        + ("" if asked.cache_tokens is None else f", cache_tokens={asked.cache_tokens}")
        + f", and {free:,} bytes are free"
    )
    names = ("max_context", "max_batch") if asked.cache_tokens is None else ("cache_tokens",)
    fitting = {name: largest(partial(fits, name), getattr(asked, name)) for name in names}
    good = [f"{name}={size}" for name, size in fitting.items() if size]
    raise InputError(
        f"{fact}; " + (f"the largest that fits: {' or '.join(good)}" if good else
                       "no cache fits beside these weights: open a smaller model, or another dtype or device")
    )  # fmt: skip
