"""One node of a recorded graph, whoever recorded it, and the edges that memory draws between operations of a tape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Span = tuple[int, int]
"""First byte, and the one after the last."""

Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One piece of recorded device work, or one eager break between two segments.

    Attributes:
        index: place among the nodes; that of a lone segment until the segments of a step are put together.
        kind: ``operation`` (tape) or ``kernel`` (cuda); ``copy``, ``fill``, ``allocation``, ``free``, ``event``,
            ``host``, ``empty``; ``graph`` for what is told as a whole; ``break``.
        name: of the operation, kernel or break; ``(copied)`` where the tape found no ``out=`` form.
        after: indices of the nodes that it waits for.
        grid, block: of a kernel: blocks, and threads of each.
        shape, dtype: of an operation's first result.
        bytes: that an operation writes, or a copy or fill moves; None where nobody says, as of kernels.
        segment: number of the segment that it is part of; None for a break.
    """

    index: int
    kind: str
    name: str
    after: tuple[int, ...] = ()
    grid: Extent | None = None
    block: Extent | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    bytes: int | None = None
    segment: int | None = None

    def as_row(self) -> dict[str, Any]:
        """Plain values for a table."""
        return {
            "index": self.index, "kind": self.kind, "name": self.name, "grid": self.grid, "block": self.block,
            "shape": self.shape, "dtype": self.dtype, "bytes": self.bytes, "segment": self.segment,
            "break": self.name if self.kind == "break" else None, "after": self.after,
        }  # fmt: skip

    def differences(self, other: GraphNode) -> str:
        """What is unlike in two nodes of one kind and name, such as ``grid (1, 1, 1) -> (2, 1, 1)``; else empty."""
        told = []
        for fact in ("grid", "block", "shape", "dtype", "bytes"):
            now, then = getattr(self, fact), getattr(other, fact)
            if now != then:
                told.append(f"{fact} {now} -> {then}")
        return ", ".join(told)


class LastWriters:
    """Which nodes wrote the memory that a later one reads.

    A tensor counts from its first byte to its last, so that two that interleave are taken to overlap.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[Span, int]] = []

    def of(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Nodes whose results these tensors hold, ascending."""
        spans = [span for tensor in tensors if (span := span_of(tensor)) is not None]
        return tuple(
            sorted(
                {
                    index
                    for (low, high), index in self._spans
                    if any(start < high and low < end for start, end in spans)
                }
            )
        )

    def note(self, tensors: Iterable[Tensor], index: int) -> None:
        """From now on node ``index`` is the one that wrote these; what it wrote over is forgotten."""
        for tensor in tensors:
            span = span_of(tensor)
            if span is None:
                continue
            start, end = span
            self._spans = [
                (each, writer) for each, writer in self._spans if not (start <= each[0] and each[1] <= end)
            ]
            self._spans.append((span, index))


def span_of(tensor: Tensor) -> Span | None:
    """The bytes from a tensor's first element to its last; None without elements."""
    if not tensor.numel():
        return None
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
