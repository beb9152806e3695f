"""From batches to tensors: what a step reads, made on the host and copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.requests import Request
from cglab.models.kv import LayerPool, PagedKV
from cglab.models.sampling import sample
from cglab.models.spans import Span

Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
NO_COLUMNS: Final[Mapping[str, Column]] = MappingProxyType({})


def spans_of(chunks: Sequence[Chunk]) -> list[Span]:
    """What a prefill runner calls live: a span for each chunk."""
    return [Span(chunk.request.row, chunk.start, chunk.length) for chunk in chunks]


def step_inputs(
    chunks: Sequence[Chunk], names: Iterable[str], kv: PagedKV, others: Mapping[str, Column] = NO_COLUMNS
) -> dict[str, Tensor]:
    """The inputs of one step.

    Args:
        chunks: what is computed, in order.
        names: slots of the runner that computes it; those that count requests have one element a chunk, the others
            one a token.
        kv: the cache, for its page size and its device.
        others: columns that travel with them.

    Returns:
        Tensors by name, int64 but for ``temperatures`` (float32).
    """
    device, names = kv.device, list(names)
    columns = {name: _column(name, chunks, kv.page_size) for name in names if name != "temperatures"}
    inputs = on_device({**columns, **others}, device)
    if "temperatures" in names:
        heat = [chunk.request.sampling.temperature for chunk in chunks]
        inputs["temperatures"] = torch.tensor(heat, dtype=torch.float32).to(device)
    return inputs


def next_tokens(chunks: Sequence[Chunk], logits: Tensor, kv: PagedKV) -> Tensor:
    """The next token of every chunk that reaches its request's end, as its request wants it chosen.

    Args:
        chunks: those that do, in order.
        logits: [chunks, vocabulary] after their last tokens.
        kv: the cache, for its page size and its device.

    Returns:
        [chunks] int64.
    """
    if not any(chunk.request.sampling.temperature for chunk in chunks):
        return logits.argmax(-1)
    # Drawn as a decode step draws: by seed and by the position of the token before.
    draws = step_inputs(chunks, ("temperatures", "seeds", "seq_lens"), kv)
    return sample(logits, draws["temperatures"], draws["seeds"], draws["seq_lens"] - 1)


def on_device(columns: Mapping[str, Column], device: torch.device) -> dict[str, Tensor]:
    """Columns of int64 as tensors, with one copy to the device for all of them."""
    packed = torch.from_numpy(np.concatenate(list(columns.values()))).to(device)
    return dict(zip(columns, packed.split([len(column) for column in columns.values()]), strict=True))


def _column(name: str, chunks: Sequence[Chunk], size: int) -> Column:
    if name == "request_rows":
        return np.array([chunk.request.row for chunk in chunks], np.int64)
    if name == "seq_lens":
        return np.array([chunk.start + chunk.length for chunk in chunks], np.int64)
    if name == "seeds":
        return np.array([chunk.request.sampling.seed for chunk in chunks], np.int64)
    if all(chunk.length == 1 for chunk in chunks):
        # A decode step: an array for each request would cost more than all of its other host work.
        return np.array([_one_token(name, chunk, size) for chunk in chunks], np.int64)
    return np.concatenate([_tokens_column(name, chunk, size) for chunk in chunks])


def _one_token(name: str, chunk: Chunk, size: int) -> int:
    """What :func:`_tokens_column` has for a chunk of one token."""
    request, position = chunk.request, chunk.start
    if name == "positions":
        return position
    if name == "input_ids":
        new = position - len(request.prompt)
        return request.output[new] if new >= 0 else request.prompt[position]
    pages = request.pages if name == "out_slots" else request.window_pages
    return pages[position // size] * size + position % size


def _tokens_column(name: str, chunk: Chunk, size: int) -> Column:
    request, stop = chunk.request, chunk.start + chunk.length
    if name == "input_ids":
        if chunk.start >= len(request.prompt):
            return np.array(
                request.output[chunk.start - len(request.prompt) : stop - len(request.prompt)], np.int64
            )
        return np.array(request.tokens[chunk.start : stop], np.int64)
    positions = np.arange(chunk.start, stop, dtype=np.int64)
    if name == "positions":
        return positions
    pages = np.array(request.pages if name == "out_slots" else request.window_pages, np.int64)
    return pages[positions // size] * size + positions % size


def write_page_tables(kv: PagedKV, requests: Iterable[Request]) -> None:
    """Brings the rows of requests whose pages changed to the device; the rest of a row is page 0."""
    changed = [request for request in requests if request.dirty]
    if not changed:
        return
    rows = torch.tensor([request.row for request in changed])
    _write_rows(kv.full, rows, [request.pages for request in changed])
    if kv.sliding is not None:
        _write_rows(kv.sliding, rows, [request.window_pages for request in changed])
    for request in changed:
        request.dirty = False


def _write_rows(pool: LayerPool, rows: Tensor, pages: Sequence[Sequence[int]]) -> None:
    table = np.zeros((len(pages), pool.page_table.shape[1]), np.int64)
    for line, held in zip(table, pages, strict=True):
        line[: len(held)] = held
    device = pool.page_table.device
    pool.page_table.index_copy_(0, rows.to(device), torch.from_numpy(table).to(device))
