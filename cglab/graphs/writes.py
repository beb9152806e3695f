"""Remembers and undoes writes to memory that a recording does not own.

A tape executes while it records; a stream capture does not. So the first write to every outside storage is
preceded by a snapshot, and the end of the recording puts it back (P28, P43).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

UNDECLARED: Final = {
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
}  # fmt: skip
"""They move their running statistics, unless told that they do not train; their schema says nothing of it."""

POINTING: Final = "aten::set_"
"""Its result has memory that is there already, though no tensor among its arguments may show it."""


NESTED: Final = (list, tuple)
"""All that an operator's schema can nest tensors in, unlike a user's function."""


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, in order; ten times as fast as any tree's leaves."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, NESTED):
            found += tensors_of(*value)
    return found


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to: by its schema, or although its schema says nothing of it."""
    schema = func._schema
    undeclared = schema.name in UNDECLARED
    if not schema.is_mutable and not undeclared:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    moved = ("running_mean", "running_var") if undeclared and given.get("training", True) else ()
    written: list[Tensor] = []
    for argument in schema.arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and argument.name not in moved:
            continue
        value = given.get(argument.name)
        written += tensors_of(value)
    return written


class WriteJournal:
    """Snapshots of storages before their first write.

    Args:
        skip: storages that need no snapshot (the recording's own).
    """

    def __init__(self, skip: Callable[[Tensor], bool] = lambda _: False) -> None:
        self._skip = skip
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside: set[int] = set()

    def made(self, inputs: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Notes storages that came into being meanwhile: they are temporaries, not state to put back."""
        fresh = set(map(_address, results)) - set(map(_address, inputs))
        self._inside |= fresh - self._before.keys()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operation with its writes noted."""
        self.before(written_tensors(func, args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.name != POINTING:
            self.made(tensors_of(*args, *kwargs.values()), tensors_of(result))
        return result

    def before(self, tensors: Iterable[Tensor]) -> None:
        """Call with the tensors that are about to be written."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            new = storage.data_ptr() not in self._before and storage.data_ptr() not in self._inside
            if storage.nbytes() and new and not self._skip(tensor):
                # Outside inference mode, whose tensors could not be written back after it.
                with _disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                    self._before[storage.data_ptr()] = (whole, whole.clone())

    @property
    def storages(self) -> list[Tensor]:
        """Every written storage as bytes, as it stands now."""
        return [whole for whole, _ in self._before.values()]

    def restore(self) -> None:
        """Puts every storage back and forgets it."""
        with _disable_current_modes(), torch.no_grad():
            for whole, saved in self._before.values():
                whole.copy_(saved)
        self._before.clear()

    @contextmanager
    def recording(self) -> Iterator[WriteJournal]:
        """Journals every write inside, and undoes them at the end."""
        try:
            with _JournalMode(self):
                yield self
        finally:
            self.restore()


class _JournalMode(TorchDispatchMode):
    def __init__(self, journal: WriteJournal) -> None:
        super().__init__()
        self._journal = journal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._journal.run(func, args, kwargs or {})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
