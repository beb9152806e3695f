"""The shared base of all runners (S1): the five verbs, a group's pool and buffers, eligibility, live rows.

A runner states three things about its phase: which slots it reads, what one step computes, and which of its own
rules send a step eager. Buckets, padding, keys, dispatch, trimming and coverage are ``graphs.Captured``'s; nothing
of them is repeated in a runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from cglab.graphs.address import AddressContract
from cglab.graphs.captured import Captured
from cglab.graphs.coverage import Coverage, Miss
from cglab.graphs.options import Options
from cglab.graphs.recorder import Pool, Recorder
from cglab.graphs.recorders import recorder_for
from cglab.graphs.slots import SharedBuffers, Slot
from cglab.models.attention import LiveRows


@dataclass
class GraphGroup:
    """Runners that never hold each other's outputs across a replay: one recorder, one pool, shared inputs."""

    device: torch.device
    recorder: Recorder = field(init=False)
    pool: Pool = field(init=False)
    shared: SharedBuffers = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = recorder_for(self.device)
        self.pool = self.recorder.new_pool()
        self.shared = SharedBuffers()

    def close(self) -> None:
        """Gives the pool and the shared buffers back; close the runners first."""
        self.shared.clear()
        self.pool.close()


class Runner(ABC):
    """One phase of the model, captured at several sizes.

    Args:
        group: pool and buffers shared with runners that replay in turn.
        buckets: sizes to capture, in the phase's own unit.
        contract: memory that the recordings read by address.
        options: backend, padding, waste ceiling and the rest.
    """

    technique: ClassVar[str]

    def __init__(
        self, group: GraphGroup, buckets: Sequence[int], contract: AddressContract, options: Options
    ) -> None:
        self.live = LiveRows()
        self._live_breaks = options.backend == "breakable"
        options.inline_breaks = options.backend == "full"
        options.vary = self.vary
        self.captured = Captured(
            self.technique, self.step, self.slots(), buckets, group.device, options,
            recorder=group.recorder, pool=group.pool, shared=group.shared, contract=contract,
        )  # fmt: skip

    @abstractmethod
    def slots(self) -> dict[str, Slot]:
        """The static inputs of the phase."""

    @abstractmethod
    def step(self, **inputs: Tensor) -> Any:
        """What is recorded: the phase on one (padded) batch."""

    @abstractmethod
    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Writes other valid inputs into a bucket's views, for the self-check."""

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """The phase's own reason for running this step eager, decided before any padding."""
        return None

    @property
    def backend(self) -> str:
        """full, breakable or eager."""
        return self.captured.options.backend

    def capture(self) -> None:
        """Records every bucket now, largest first."""
        self.captured.capture(self._at_bucket)

    def _at_bucket(self, views: dict[str, Tensor]) -> None:
        first, slot = next((n, s) for n, s in self.captured.slots.items() if s.axis is not None)
        self._set_live(views[first].shape[slot.axis or 0] // slot.width)

    def _set_live(self, rows: int) -> None:
        """Breaks read the live row count at every replay; inside a full recording every row is computed (P37)."""
        self.live.rows = rows if self._live_breaks else None

    def run(self, live: int, **values: Tensor) -> Any:
        """One step on ``live`` rows: replayed, or eager with a counted reason."""
        self._set_live(live)
        miss = self.ineligible(values)
        return self.captured(**values) if miss is None else self.captured.run_eager(miss, values, live)

    def run_padded_eager(self, live: int, size: int, **values: Tensor) -> Any:
        """Oracle 1: the step at the padded size, eager, over the same static buffers."""
        self._set_live(live)
        return self.captured.run_padded_eager(values, live, size)

    def run_live_eager(self, live: int, **values: Tensor) -> Any:
        """Oracle 2: the step at its live size, eager; not counted."""
        self._set_live(live)
        with torch.no_grad():
            return self.step(**values)

    def coverage(self) -> Coverage:
        """Steps captured and eager, with reasons."""
        return self.captured.counts

    def close(self) -> None:
        """Gives recordings and buffers back."""
        self.captured.close()
