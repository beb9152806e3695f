"""The cache of an engine between its two descriptions: sizes for the scheduler, tensors for the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cglab.engine.memory import CacheLayout
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV


def paged_kv(
    layout: CacheLayout,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[int] | None = None,
) -> PagedKV:
    """A zeroed cache of these sizes.

    Args:
        layout: its sizes; the window is the model's.
        config: the decoder's shape.
        device: where the tensors live.
        dtype: element type of keys and values.
        layers: those of a stage; None for all.

    Raises:
        InputError: if the layout has a window pool and the model no window layers, or the other way round.
    """
    return PagedKV(
        config, pages=layout.pages, page_size=layout.page_size, rows=layout.rows, max_context=layout.max_context,
        window_pages=None if layout.window is None else layout.window_pages, device=device, dtype=dtype,
        layers=layers,
    )  # fmt: skip


def layout_of(kv: PagedKV, max_context: int, lookahead: int = 0, overlap: int = 0) -> CacheLayout:
    """The sizes of a cache.

    Args:
        kv: the cache.
        max_context: longest request in tokens, at most what a row of the page table holds.
        lookahead: positions after its newest token that a decode step of a request writes.
        overlap: tokens of the next page that what a draft keeps in a page depends on.
    """
    size, sliding = kv.page_size, kv.sliding
    return CacheLayout(
        kv.full.keys.shape[1] // size, size, len(kv.full.page_table), max_context,
        window=None if sliding is None else sliding.window,
        window_pages=0 if sliding is None else sliding.keys.shape[1] // size, lookahead=lookahead, overlap=overlap,
    )  # fmt: skip
