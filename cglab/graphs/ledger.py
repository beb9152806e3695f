"""The bucket ledger: what each capture cost, line by line, and why the memory grew where it did.

Largest first in one pool: the first bucket takes the memory, and what it gave back during its own recording holds
the intermediates of every smaller one (P29). What still grows with the number of buckets are the executables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from cglab.graphs.keys import ShapeKey
from cglab.graphs.recorder import TakeSeconds


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """The ledger's line for one bucket.

    Attributes:
        key: the bucket.
        warmup_seconds, capture_seconds: wall time.
        pool_bytes: growth of the pool; 0 where it fitted into what larger buckets had left.
        device_bytes: growth of device memory outside the allocator (graph executables, modules).
        nodes: operations recorded; None where they cannot be counted.
        breaks: eager calls between segments.
        warmups: how many were run.
        loaded_bytes: the part of ``device_bytes`` that came with the warm-ups: modules, workspaces.
        output_bytes: growth of the output buffers, which all buckets share; 0 for all but the largest.
        seconds: the driver's part of the capture, by phase.
    """

    key: ShapeKey
    warmup_seconds: float
    capture_seconds: float
    pool_bytes: int
    device_bytes: int
    nodes: int | None
    breaks: int
    warmups: int
    loaded_bytes: int = 0
    output_bytes: int = 0
    seconds: TakeSeconds = field(default_factory=TakeSeconds)

    @property
    def record_seconds(self) -> float:
        """Recording itself: the function's Python, and the work of breaks."""
        return self.capture_seconds - self.seconds.begin - self.seconds.end - self.seconds.instantiate

    def as_row(self) -> dict[str, Any]:
        """Plain values for a table, times in milliseconds."""
        return {
            "bucket": str(self.key), "warmup_ms": self.warmup_seconds * 1e3, "capture_ms": self.capture_seconds * 1e3,
            "pool_bytes": self.pool_bytes, "device_bytes": self.device_bytes, "nodes": self.nodes,
            "breaks": self.breaks, "warmups": self.warmups, "loaded_bytes": self.loaded_bytes,
            "output_bytes": self.output_bytes, "begin_ms": self.seconds.begin * 1e3,
            "record_ms": self.record_seconds * 1e3, "end_ms": self.seconds.end * 1e3,
            "instantiate_ms": self.seconds.instantiate * 1e3,
        }  # fmt: skip


def explain_growth(ledger: Sequence[CaptureCost]) -> list[str]:
    """Where the memory of the buckets went, in words: neighbours that are alike share a line.

    Args:
        ledger: in the order of capture.
    """
    told: list[str] = []
    for (grew, loaded), group in groupby(ledger, lambda line: (line.pool_bytes > 0, line.loaded_bytes > 0)):
        lines = list(group)
        if not grew:
            pool = "no pool growth: it fits into what the pool has free"
        elif not told:
            pool = "of pool, which all later ones share"
        else:
            pool = "of pool, as blocks fitted no gap that was free"
        parts = [f"{_megabytes(line.pool_bytes for line in lines)} {pool}" if grew else pool]
        parts.append(f"{_megabytes(line.device_bytes - line.loaded_bytes for line in lines)} of executables")
        if any(line.output_bytes for line in lines):
            parts.append(f"{_megabytes(line.output_bytes for line in lines)} of outputs outside the pool")
        if loaded:
            loads = _megabytes(line.loaded_bytes for line in lines)
            parts.append(
                f"{loads} of kernels and workspaces loaded by {sum(line.warmups for line in lines)} warm-ups"
            )
        told.append(f"{_sizes(lines)}: {', '.join(parts)}")
    return told


def _sizes(lines: Sequence[CaptureCost]) -> str:
    first, last = lines[0].key.size, lines[-1].key.size
    return f"{first}" if len(lines) == 1 else f"{first} to {last} ({len(lines)} buckets)"


def _megabytes(counts: Iterable[int]) -> str:
    return f"{sum(counts) / 1e6:.1f} MB"
