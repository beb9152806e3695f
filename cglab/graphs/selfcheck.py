"""The check that ends every tape capture: on other inputs, does the replay compute what eager computes?

A dispatch mode cannot see a numpy alias, a Python list or another thread, and such a function replays stale values
without any error. So the slots are changed, eager and replay both run, and outputs and everything that they wrote
are compared bit by bit; then all is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from cglab.errors import SelfCheckError
from cglab.graphs.breaks import Aside, staged
from cglab.graphs.capture_state import said_to_capture
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
            view.add_(torch.randn(view.shape, generator=generator, device=generator.device).to(view))
        elif view.dim() and view.shape[0] > 1:
            view.copy_(
                view[
                    torch.randperm(view.shape[0], generator=generator, device=generator.device).to(
                        view.device
                    )
                ]
            )


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
    device = next((view.device for view in views.values()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(key.size)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            vary(views, generator)
            wrong = _differences(key.size, device, views, eager, replay)
        finally:
            for name, view in views.items():
                view.copy_(saved[name])
    if wrong:
        raise SelfCheckError(
            f"replaying {key} on changed inputs differs from eager in {', '.join(wrong)}",
            advice="look for state that an operation cannot see: numpy views, Python lists and counters, "
            "values read on the host, reseeded generators, work in other threads",
        )


def _differences(
    seed: int,
    device: torch.device,
    views: Mapping[str, Tensor],
    eager: Callable[[], Any],
    replay: Callable[[], Any],
) -> list[str]:
    before = {name: view.clone() for name, view in views.items()}

    def from_the_start() -> None:
        for name, view in views.items():
            view.copy_(before[name])
        _seed(seed, device)

    with _as_captured() as journal:
        eager()
        written = journal.storages
    # The run above only told what is written. Replay comes before the run that it is compared with: a write that
    # no operation shows, such as one through a numpy view, would otherwise be there for the replay to find.
    undo = [(whole, whole.clone()) for whole in written]
    from_the_start()
    got = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(replay())[0]]
    replayed = [whole.clone() for whole in written]
    for whole, value in undo:
        whole.copy_(value)
    from_the_start()
    with _as_captured():
        # Copied before the writes are undone: an output may be memory that the function writes.
        expected = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(eager())[0]]
        stale = sum(not torch.equal(whole, value) for whole, value in zip(written, replayed, strict=True))
    wrong = [f"output {i}" for i, (g, e) in enumerate(zip(got, expected, strict=True)) if not _equal(g, e)]
    return [*wrong, f"{stale} buffer(s) that the function writes"] if stale else wrong


@contextmanager
def _as_captured() -> Iterator[WriteJournal]:
    """An eager run of what was recorded: code that asks whether it is captured computes as it did then."""
    with torch.no_grad(), staged(Aside()), said_to_capture(), WriteJournal().recording() as journal:
        yield journal


def _seed(seed: int, device: torch.device) -> None:
    # torch.manual_seed would reach, and on a CPU queue a call for, every kind of device there could be.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return same_bits(got, expected)
    return bool(got == expected)
