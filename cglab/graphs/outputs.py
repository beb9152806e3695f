"""Output buffers that all buckets of a runner share, and how results are trimmed to the live rows.

Holding each bucket's own output would keep its pool block and make memory grow with the sum of the sizes (B52).
So the recording ends with a copy into one buffer of the largest size. What a caller gets are views: the next
replay overwrites them (P32, B20).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from cglab.errors import OutputStructureError, StaleOutputError
from cglab.graphs.keys import ShapeKey

MOST_TRIMS = 256
"""Live sizes of one bucket whose trimmed views are kept."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What one recording leaves behind: leaves (views of shared buffers, or plain values) and their structure.

    Attributes:
        trims: leaves cut to fewer live rows, by their number: they are at the same place after every replay.
    """

    leaves: tuple[Any, ...]
    structure: TreeSpec
    trims: dict[int, Sequence[Any]] = field(default_factory=dict, compare=False)

    def tree(self) -> Any:
        """The output in the function's own structure."""
        return tree_unflatten(list(self.leaves), self.structure)


class OutputBuffers:
    """One buffer per output leaf, sized by the first (largest) recording."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = []
        self._structure: TreeSpec | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers, which lie outside of any pool."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers if buffer is not None)

    def prepare(self, example: Any) -> int:
        """Makes room for an output like ``example``, outside of any recording.

        Returns:
            Number of copies that ``store`` will add to a recording.

        Raises:
            OutputStructureError: if its structure, dtype or trailing shape differs from earlier recordings (P33).
        """
        leaves, structure = tree_flatten(example)
        if self._structure is None:
            self._structure = structure
            self._buffers = [None] * len(leaves)
        if structure != self._structure:
            raise OutputStructureError(
                f"this bucket returns {structure}, an earlier one {self._structure}",
                advice="return the same structure for every size; use a variant key for another kind of step",
            )
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                require_plain(index, leaf)
                continue
            held = self._buffers[index]
            if held is not None and (
                held.dtype != leaf.dtype or held.shape[1:] != leaf.shape[1:] or held.dim() != leaf.dim()
            ):
                raise OutputStructureError(
                    f"output {index} is {leaf.dtype} {tuple(leaf.shape)}, "
                    f"an earlier bucket's {held.dtype} {tuple(held.shape)}: "
                    "only the first axis may differ",
                    advice="return it with the rows on its first axis, in one type for every bucket",
                )
            if held is None or (leaf.dim() and held.shape[0] < leaf.shape[0]):
                with torch.inference_mode(mode=False):
                    self._buffers[index] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return sum(isinstance(leaf, Tensor) and leaf.numel() > 0 for leaf in leaves)

    def store(self, output: Any) -> Stored:
        """Copies ``output`` into the buffers (recorded when called inside a recording).

        Raises:
            OutputStructureError: if the recorded output does not look like the warm-up's.
        """
        leaves, structure = tree_flatten(output)
        if structure != self._structure:
            raise OutputStructureError(
                f"the recording returned {structure}, its warm-up {self._structure}",
                advice="make the output's structure independent of Python state",
            )
        kept = []
        for leaf, buffer in zip(leaves, self._buffers, strict=True):
            if isinstance(leaf, Tensor) and buffer is not None:
                view = buffer[: leaf.shape[0]] if leaf.dim() else buffer
                kept.append(view.copy_(leaf))
            else:
                kept.append(leaf)
        return Stored(tuple(kept), structure)


def require_plain(index: int, leaf: object) -> None:
    """Refuses an output inside of which tensors would be neither trimmed nor copied.

    Raises:
        OutputStructureError: for an object that is no plain value.
    """
    if leaf is not None and not isinstance(leaf, bool | int | float | complex | str | bytes | Enum):
        raise OutputStructureError(
            f"output {index} is a {type(leaf).__name__}, whose tensors cannot be found",
            advice="return tensors in tuples, lists, dicts or named tuples, or register the class "
            "with torch.utils._pytree.register_pytree_node",
        )


def rows_per_size(outputs: Mapping[ShapeKey, Sequence[Any]]) -> list[int | None]:
    """How many rows each output leaf has for each unit of bucket size; None for a leaf of fixed size.

    Args:
        outputs: leaves by key, for at least two different sizes, so that a coincidence cannot mislead.

    Raises:
        OutputStructureError: if a leaf's rows neither stay nor grow with the size, if it grows on another axis,
            or if a Python value depends on the size, as padding would change it.
    """
    result: list[int | None] = []
    for index, leaf in enumerate(next(iter(outputs.values()))):
        by_size = {key.size: leaves[index] for key, leaves in outputs.items()}
        if not isinstance(leaf, Tensor):
            if any(value != leaf for value in by_size.values()):
                raise OutputStructureError(
                    f"output {index} is {by_size} by bucket size: a padded step would return the bucket's",
                    advice="return no Python value that depends on the size, or switch padding off",
                )
            result.append(None)
            continue
        if len({value.shape[1:] for value in by_size.values()}) > 1:
            raise OutputStructureError(
                f"output {index} grows on another axis than its first: "
                f"{ {size: tuple(value.shape) for size, value in by_size.items()} } by bucket size",
                advice="return it with the rows on the first axis",
            )
        rows = {size: value.shape[0] for size, value in by_size.items() if value.dim()}
        if len(set(rows.values())) <= 1:
            result.append(None)
            continue
        ratios = {rows_here / size for size, rows_here in rows.items()}
        if len(ratios) != 1 or not next(iter(ratios)).is_integer():
            raise OutputStructureError(
                f"output {index} has rows {rows} by bucket size: neither fixed nor in proportion",
                advice="return rows in proportion to the size, or a tensor of fixed size",
            )
        result.append(int(next(iter(ratios))))
    return result


def trimmed(
    name: str, output: Stored, rule: Sequence[int | None] | None, live: int, size: int
) -> Sequence[Any]:
    """The leaves of an output with padded rows cut off (B32).

    Args:
        name: of the step, for the message.
        output: what ``size`` rows, padding included, left behind.
        rule: rows of each leaf for each unit of size, as ``rows_per_size`` gives them.
        live: rows in use.
        size: rows of the bucket.

    Raises:
        OutputStructureError: if there is no rule.
    """
    if rule is None:
        raise OutputStructureError(
            f"{name} ran {live} rows padded to {size}, and how its output grows is not known",
            advice="capture at least two sizes, or call it with exactly the captured size",
        )
    if live not in output.trims:
        if len(output.trims) >= MOST_TRIMS:
            output.trims.clear()
        cut = [leaf if n is None else leaf[: live * n] for leaf, n in zip(output.leaves, rule, strict=True)]
        output.trims[live] = cut
    return output.trims[live]


def handles_of(leaves: Sequence[Any]) -> list[Any]:
    """Handles of a caller's own: what is kept must not change with a ``squeeze_`` or ``requires_grad_`` of a result."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class LiveView(Tensor):
    """Debug form of an output: reading it after the next replay raises instead of returning other data (B20)."""

    _is_current: Callable[[], bool]

    @staticmethod
    def wrap(tensor: Tensor, is_current: Callable[[], bool]) -> LiveView:
        """A view of ``tensor`` that asks ``is_current`` before every use."""
        view = tensor.as_subclass(LiveView)
        view._is_current = is_current
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Checks every view among the arguments, then computes on plain tensors; a view of a view is watched too."""
        watched: dict[int, Any] = {}

        def plain(view: LiveView) -> Tensor:
            current = view.__dict__.get("_is_current")
            if current is not None and not current():
                raise StaleOutputError(
                    "this output was overwritten by a later replay; clone() it before the next call, "
                    "or capture with clone=True"
                )
            watched[view.untyped_storage()._cdata] = current
            return view.as_subclass(Tensor)

        def watch(result: Tensor) -> Tensor:
            current = watched.get(result.untyped_storage()._cdata) if result.layout == torch.strided else None
            return result if current is None else LiveView.wrap(result, current)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(LiveView, plain, (args, kwargs or {}))
            return tree_map_only(Tensor, watch, func(*args, **kwargs))
