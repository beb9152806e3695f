"""The paged key-value cache as plain tensors: pages, a page table, and a reserved corner for padding.

Row 0 of the page table, page 0 and so slot 0 belong to no request: padded requests point at row 0 and padded
tokens are written to slot 0, so that padding can never touch a live request. Which row and page a request
gets is the engine's business.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.models.config import ModelConfig


class PagedKV:
    """Keys and values of all layers in pages of tokens.

    The tensors are never replaced, so that recordings may hold their addresses.

    Attributes:
        keys: [layers, slots, kv_heads, head_dim]; a slot is one token, slot ``page * page_size + offset``.
        values: likewise.
        page_table: [rows, max_pages] int64, pages of each request row in the order of its positions.
        context_positions: [max_pages * page_size] int64, 0, 1, 2, ...: positions of a request, kept here
            because a step that is recorded makes no tensors of its own.
        page_size: tokens of a page.
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
    ) -> None:
        """Allocates a zeroed cache.

        Args:
            config: the decoder's shape.
            pages: pages in all, the reserved one included.
            page_size: tokens of a page.
            rows: request rows, the reserved one included.
            max_context: longest request in tokens; rounded up to whole pages.
            device: where the tensors live.
            dtype: element type of keys and values.

        Raises:
            InputError: if nothing is left beside the reserved row and page, or a size is not positive.
        """
        if pages < 2 or rows < 2:
            raise InputError(
                f"{pages} pages and {rows} rows leave none beside the reserved ones; give at least 2 of each"
            )
        if page_size < 1 or max_context < 1:
            raise InputError(
                f"page_size {page_size} and max_context {max_context} must be at least 1; give larger ones"
            )
        self.page_size, self.group = page_size, config.group
        max_pages = math.ceil(max_context / page_size)
        shape = (config.num_layers, pages * page_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.page_table = torch.zeros((rows, max_pages), device=device, dtype=torch.int64)
        self.context_positions = torch.arange(max_pages * page_size, device=device)

    def write(self, layer_index: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores keys and values of one layer.

        Args:
            layer_index: the layer.
            slots: [T] int64; slot 0 may occur more than once.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
        """
        self.keys[layer_index].index_copy_(0, slots, key)
        self.values[layer_index].index_copy_(0, slots, value)

    def read(self, layer_index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers keys and values of one layer.

        Args:
            layer_index: the layer.
            slots: [requests, context] int64.

        Returns:
            Keys and values, each [requests, kv_heads, context, head_dim].
        """
        flat, shape = slots.flatten(), slots.shape
        keys = self.keys[layer_index].index_select(0, flat).unflatten(0, shape).transpose(1, 2)
        values = self.values[layer_index].index_select(0, flat).unflatten(0, shape).transpose(1, 2)
        return keys, values

    def context_slots(self, request_rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Where each position of each request lives.

        Positions from the length on repeat the last one: whatever a free page or the rest of a page holds is
        then not even read, as a mask alone would still multiply it by zero, and zero times NaN is NaN.

        Args:
            request_rows: [requests] int64, rows of the page table.
            seq_lens: [requests] int64, tokens of each request, at least 1.

        Returns:
            [requests, max_pages * page_size] int64.
        """
        position = torch.minimum(self.context_positions, seq_lens.unsqueeze(1) - 1)
        page = self.page_table.index_select(0, request_rows).gather(1, position // self.page_size)
        return page * self.page_size + position % self.page_size
