"""The check that ends every tape capture: on other inputs, does the replay compute what eager computes?

A dispatch mode cannot see a numpy alias, a Python list or another thread, and such a function replays stale values
without any error. So the slots are changed, eager and replay both run, and outputs and everything that they wrote
are compared bit by bit; then all is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from cglab.errors import SelfCheckError
from cglab.graphs.keys import ShapeKey
from cglab.graphs.out_forms import same_bits
from cglab.graphs.writes import WriteJournal

Vary = Callable[[Mapping[str, Tensor], torch.Generator], None]


def vary_rows(views: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """The default change of inputs: noise on floats, rows in another order for everything else.

    Indices are only permuted, because no other value is known to be valid.
    """
    for view in views.values():
        if view.dtype.is_floating_point:
            view.add_(torch.randn(view.shape, generator=generator, dtype=torch.float32).to(view.dtype))
        elif view.dim() and view.shape[0] > 1:
            view.copy_(view[torch.randperm(view.shape[0], generator=generator)])


def self_check(
    key: ShapeKey,
    views: Mapping[str, Tensor],
    eager: Callable[[], Any],
    replay: Callable[[], Any],
    vary: Vary = vary_rows,
) -> None:
    """Runs eager and replay from the same changed state and compares bits.

    Args:
        key: names the recording in the error.
        views: the recording's static inputs.
        eager: the function over those inputs.
        replay: its recording.
        vary: changes the inputs to other valid values.

    Raises:
        SelfCheckError: naming the output or the number of outside buffers that differ.
    """
    saved = {name: view.clone() for name, view in views.items()}
    state = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(key.size)
    try:
        vary(views, generator)
        before = {name: view.clone() for name, view in views.items()}
        journal = WriteJournal()
        with torch.no_grad(), journal.recording():
            torch.manual_seed(key.size)
            expected = [
                leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(eager())[0]
            ]
            written = [(whole, whole.clone()) for whole in journal.storages]
        for name, view in views.items():
            view.copy_(before[name])
        undo = [(whole, whole.clone()) for whole, _ in written]
        torch.manual_seed(key.size)
        got = tree_flatten(replay())[0]
        wrong = [
            f"output {i}" for i, (g, e) in enumerate(zip(got, expected, strict=True)) if not _equal(g, e)
        ]
        stale = sum(not torch.equal(whole, value) for whole, value in written)
        for whole, value in undo:
            whole.copy_(value)
        if stale:
            wrong.append(f"{stale} buffer(s) that the function writes")
        if wrong:
            raise SelfCheckError(
                f"replaying {key} on changed inputs differs from eager in {', '.join(wrong)}",
                advice="look for state that an operation cannot see: numpy views, Python lists and counters, "
                "values read on the host, work in other threads",
            )
    finally:
        for name, view in views.items():
            view.copy_(saved[name])
        torch.random.set_rng_state(state)


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return same_bits(got, expected)
    return bool(got == expected)
