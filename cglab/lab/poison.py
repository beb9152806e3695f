"""Hostile memory around one step: what oracle 3 fills reserved rows and static buffers with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from cglab.models.kv import PagedKV
from cglab.runners.base import Runner


@contextmanager
def poison(
    runner: Runner[Any], kv: PagedKV, live: Any, inputs: Mapping[str, Tensor], draft_kv: PagedKV | None = None
) -> Iterator[None]:
    """Hostile memory around one step: NaN in the reserved page, its row and every static input at live memory.

    Values stay in range, since a padded row may be computed: they point at the first live request's.

    Args:
        runner: whose static inputs are filled.
        kv: the cache.
        live: what the runner calls live.
        inputs: of the step.
        draft_kv: the cache of a block draft, on the same page tables, whose reserved page is filled likewise.
    """
    rows = inputs.get("request_rows")
    row = live[0].row if rows is None else int(rows[0])
    for poisoned in (kv, draft_kv) if draft_kv else (kv,):
        for cache in poisoned.caches().values():
            cache[:, : kv.page_size] = float("nan")
    kept = [pool.page_table[0].clone() for pool in kv.pools]
    context = len(kv.context_positions)
    hostile = {"positions": context - 1, "seq_lens": context, "request_rows": row}
    hostile |= {
        name: int(value[0]) // kv.page_size * kv.page_size
        for name, value in inputs.items()
        if name.endswith("out_slots")
    }
    for pool in kv.pools:
        pool.page_table[0] = pool.page_table[row]
    buffers, size = runner.captured.buffers, runner.captured.pad(runner.rows(live))
    for name, view in buffers.view(buffers.maximum).items():
        view.fill_(hostile.get(name, 1))
    if isinstance(size, int):
        buffers.poison(runner.rows(live), size)
    try:
        yield
    finally:
        for pool, table in zip(kv.pools, kept, strict=True):
            pool.page_table[0] = table
