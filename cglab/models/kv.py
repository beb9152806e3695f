"""The paged key-value cache as plain tensors: pages, page tables, and a reserved corner for padding.

Layers that remember equally far share a pool. Every model has a pool for full attention; one with sliding-window
layers has a second pool for them, with pages of its own, so that it holds little more than the window.

Row 0 of a page table, page 0 and so slot 0 belong to no request: padded requests point at row 0 and padded tokens
are written to slot 0, so that padding can never touch a live request. Which row and page a request gets is the
engine's business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.models.config import ModelConfig


class LayerCache(NamedTuple):
    """Where one layer's keys and values of a step go.

    Attributes:
        keys: [slots, kv_heads, head_dim], the layer's cache.
        values: likewise.
        slots: [T] int64, one for each new token.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor

    def store(self, key: Tensor, value: Tensor) -> None:
        """Stores keys and values [T, kv_heads, head_dim]; slot 0 may occur more than once."""
        self.keys.index_copy_(0, self.slots, key.to(self.keys.dtype))
        self.values.index_copy_(0, self.slots, value.to(self.values.dtype))


class CacheAttention(ABC):
    """Attention over a paged cache: an ``attend`` callable in two halves, so that a form may store in its own way."""

    @abstractmethod
    def cache(self, layer_index: int) -> LayerCache:
        """Where the layer's keys and values of this step go."""

    @abstractmethod
    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer, whose keys and values are stored; see ``decoder.Attend``."""

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores and attends in one layer; see ``decoder.Attend``."""
        self.cache(layer_index).store(key, value)
        return self.attend(layer_index, query, key, value)


class LayerPool:
    """Keys and values of layers that remember equally far, in pages of tokens.

    The tensors are never replaced, so that recordings may hold their addresses.

    Attributes:
        layers: which layers of the model these are.
        window: positions that a query sees, its own included; None for all before it.
        keys: [layers, slots, *config.key_shape]; a slot is one token, slot ``page * page_size + offset``.
        values: likewise, of ``config.value_shape``.
        page_table: [rows, max_pages] int64, pages of each request row in the order of its positions; where a page
            has left the window and was given back, 0.
        context_positions: [max_pages * page_size] int64, 0, 1, 2, ...: kept here because a step that is recorded
            makes no tensors of its own.
        page_size: tokens of a page.
        group: query heads that read the same key and value head.
    """

    def __init__(
        self,
        config: ModelConfig,
        context_positions: Tensor,
        *,
        layers: Sequence[int],
        pages: int,
        page_size: int,
        rows: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        """Allocates zeroed tensors on the device of ``context_positions``; see ``PagedKV``."""
        self.layers, self.window = layers, window
        self.context_positions, self.page_size, self.group = context_positions, page_size, config.group
        place, max_pages = context_positions.device, len(context_positions) // page_size
        size = (len(layers), pages * page_size)
        self.keys = torch.zeros((*size, *config.key_shape), device=place, dtype=dtype)
        self.values = torch.zeros((*size, *config.value_shape), device=place, dtype=dtype)
        self.page_table = torch.zeros((rows, max_pages), device=place, dtype=torch.int64)
        self._index = {layer: index for index, layer in enumerate(layers)}
        # As tensors of their own: a compiled function that is given a view is bound to its base as well.
        self._layers = [(keys.data, values.data) for keys, values in zip(self.keys, self.values, strict=True)]

    def tensors(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, each [slots, kv_heads, head_dim]."""
        return self._layers[self._index[layer_index]]

    def cache(self, layer_index: int, slots: Tensor) -> LayerCache:
        """One layer's tensors with the slots that a step writes."""
        return LayerCache(*self.tensors(layer_index), slots)

    def read(self, layer_index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers keys and values of one layer.

        Args:
            layer_index: the layer of the model.
            slots: [requests, context] int64.

        Returns:
            Keys and values, each [requests, kv_heads, context, head_dim].
        """
        keys, values = self.gather(layer_index, slots.flatten())
        shape = slots.shape
        return keys.unflatten(0, shape).transpose(1, 2), values.unflatten(0, shape).transpose(1, 2)

    def gather(self, layer_index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, packed.

        Args:
            layer_index: the layer of the model.
            slots: [T] int64.

        Returns:
            Keys and values, each [T, kv_heads, head_dim].
        """
        index = self._index[layer_index]
        return self.keys[index].index_select(0, slots), self.values[index].index_select(0, slots)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies tokens to other slots, in every layer.

        Args:
            sources: [T] int64, read before anything is written.
            targets: [T] int64, each once.
        """
        for cache in (self.keys, self.values):
            cache.index_copy_(1, targets, cache.index_select(1, sources))

    def context(self, seq_lens: Tensor, width: int = 1) -> Tensor:
        """The positions that a step of ``width`` new tokens of each request reads.

        Args:
            seq_lens: [requests] int64, tokens of each request, at least ``width``.
            width: new tokens of each.

        Returns:
            int64, ascending by one: [context] from position 0 on, the same for all requests; with a window
            [requests, context], whole pages of positions from the first that is seen on. Positions from a
            request's length on are padding.
        """
        if self.window is None:
            return self.context_positions
        reach = self.window + width - 1
        whole = math.ceil(reach / self.page_size) * self.page_size
        return (seq_lens - reach).clamp_min(0).unsqueeze(1) + self.context_positions[:whole]

    def slots(self, request_rows: Tensor, positions: Tensor) -> Tensor:
        """Where positions of requests live.

        Args:
            request_rows: [requests] int64, rows of the page table.
            positions: [requests, context] int64, below max_pages * page_size.

        Returns:
            [requests, context] int64.
        """
        page = self.page_table.index_select(0, request_rows).gather(1, positions // self.page_size)
        return page * self.page_size + positions % self.page_size


class PagedKV:
    """The cache of a model: a pool for its full-attention layers and, if it has window layers, one for these.

    Attributes:
        full: the pool of the layers that see everything before them; a model may have none of these.
        sliding: the pool of the sliding-window layers; None for a model without any.
        context_positions: [max_pages * page_size] int64, 0, 1, 2, ..., of both pools.
        device: where all of it lives.
        page_size: tokens of a page, of both pools.
        group: query heads that read the same key and value head.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page_size: int = 16,
        rows: int,
        max_context: int,
        device: torch.device | str,
        dtype: torch.dtype,
        window_pages: int | None = None,
    ) -> None:
        """Allocates a zeroed cache.

        Args:
            config: the decoder's shape.
            pages: pages of the full pool in all, the reserved one included.
            page_size: tokens of a page.
            rows: request rows, the reserved one included.
            max_context: longest request in tokens; rounded up to whole pages.
            device: where the tensors live.
            dtype: element type of keys and values.
            window_pages: pages of the window pool in all; for models with window layers, and only for these.

        Raises:
            InputError: if nothing is left beside a reserved row or page, a size is not positive, or
                ``window_pages`` does not fit the model.
        """
        sizes = {"pages": pages, "window pages": window_pages, "rows": rows}
        short = [f"{size} {what}" for what, size in sizes.items() if size is not None and size < 2]
        if short:
            raise InputError(
                f"{' and '.join(short)} leave none beside the reserved one; give at least 2 of each"
            )
        if page_size < 1 or max_context < 1:
            raise InputError(
                f"page_size {page_size} and max_context {max_context} must be at least 1; give larger ones"
            )
        if (window_pages is None) != (config.sliding_window is None):
            raise InputError(
                f"window_pages is {window_pages} and the model's sliding window {config.sliding_window}: "
                "give window_pages for a model with window layers, and for no other"
            )
        self.page_size, self.group = page_size, config.group
        self.context_positions = torch.arange(math.ceil(max_context / page_size) * page_size, device=device)
        self.device = self.context_positions.device
        full = [layer for layer in range(config.num_layers) if layer not in config.window_layers]
        make = partial(LayerPool, config, self.context_positions, page_size=page_size, rows=rows, dtype=dtype)
        self.full: LayerPool = make(layers=full, pages=pages)
        self.sliding: LayerPool | None = None
        if window_pages is not None:
            self.sliding = make(layers=config.window_layers, pages=window_pages, window=config.sliding_window)
        self._pools = {layer: pool for pool in self.pools for layer in pool.layers}

    @property
    def pools(self) -> tuple[LayerPool, ...]:
        """The full pool, then the window pool if there is one."""
        return (self.full,) if self.sliding is None else (self.full, self.sliding)

    def pool(self, layer_index: int) -> LayerPool:
        """Where a layer of the model keeps its keys and values."""
        return self._pools[layer_index]

    def by_pool(self, out_slots: Tensor, window_out_slots: Tensor | None) -> dict[LayerPool, Tensor]:
        """Where a step's keys and values go, for each pool.

        Args:
            out_slots: [tokens] int64, slots of the full pool.
            window_out_slots: [tokens] int64, slots of the window pool, if there is one.

        Raises:
            InputError: if slots are missing for a pool, or given for none.
        """
        given = [out_slots] if window_out_slots is None else [out_slots, window_out_slots]
        if len(given) != len(self.pools):
            raise InputError(
                f"the cache has {len(self.pools)} pools and slots are given for {len(given)}: "
                "give window_out_slots where the model has window layers, and only there"
            )
        return dict(zip(self.pools, given, strict=True))

    def caches(self) -> dict[str, Tensor]:
        """Keys and values of every pool: all that a step leaves behind."""
        return {name: tensor() for name, tensor in self._named("keys", "values").items()}

    def watched(self) -> dict[str, Callable[[], Tensor]]:
        """Everything that recordings read by address, for an ``AddressContract``."""
        return self._named("keys", "values", "page_table")

    def _named(self, *tensors: str) -> dict[str, Callable[[], Tensor]]:
        names = {"full": "kv", "sliding": "kv.sliding"} if self.sliding is not None else {"full": "kv"}
        return {
            f"{name}.{tensor}": partial(attrgetter(f"{pool}.{tensor}"), self)
            for pool, name in names.items()
            for tensor in tensors
        }
