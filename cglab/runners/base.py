"""The shared base of all runners (S1): the five verbs, a group's pool and buffers, eligibility, what is live.

A runner states three things about its phase: which slots it reads, what one step computes, and which of its own
rules send a step eager. Buckets, padding, keys, dispatch, trimming and coverage are ``graphs.Captured``'s; nothing
of them is repeated in a runner. What "live" means is the runner's: a number of requests, or the spans of a prefill.
It is set for the extent of one step and let go at its end, however it ends (P56).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cglab.graphs.address import AddressContract
from cglab.graphs.buffers import SharedBuffers
from cglab.graphs.captured import Captured
from cglab.graphs.coverage import Coverage, Miss
from cglab.graphs.options import Options
from cglab.graphs.recorder import Pool, Recorder
from cglab.graphs.recorders import recorder_for
from cglab.graphs.slots import Slot
from cglab.models.kv import LayerPool, PagedKV

Live = TypeVar("Live")


def window_inputs(kv: PagedKV) -> tuple[str, ...]:
    """Slots that sliding-window layers add to a phase: where their keys and values go."""
    return ("window_out_slots",) if kv.sliding is not None else ()


def distinct_slots(pool: LayerPool, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """[size] int64: random slots of a pool, each once while there are enough."""
    (size,), slots = shape, pool.keys.shape[1]
    if slots < size:
        return torch.randint(0, slots, (size,), generator=generator, device=generator.device)
    return torch.randperm(slots, generator=generator, device=generator.device)[:size]


class Arrival(Protocol):
    """Something that is under way: a ``torch.cuda.Event``, a handle of ``torch.distributed``."""

    def wait(self) -> Any:
        """Makes what is queued from now on come after it."""
        ...


@dataclass
class GraphGroup:
    """Runners that never hold each other's outputs across a replay: one recorder, one pool, shared inputs."""

    device: torch.device
    _expected: list[Arrival] = field(init=False, default_factory=list)
    recorder: Recorder = field(init=False)
    pool: Pool = field(init=False)
    shared: SharedBuffers = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = recorder_for(self.device)
        self.pool = self.recorder.new_pool()
        self.shared = SharedBuffers()

    def expect(self, arrival: Arrival) -> None:
        """Holds the next step back until ``arrival`` has come, such as KV that is copied in on another stream.

        An engine may wait layer by layer for such a copy; a replay has no waits within, so all of it comes first (P80).
        """
        self._expected.append(arrival)

    def settle(self) -> None:
        """Waits for what is expected; an arrival that fails is asked again by the next step."""
        while self._expected:
            self._expected[0].wait()
            del self._expected[0]

    def close(self) -> None:
        """Gives the pool and the shared buffers back; close the runners first."""
        self.shared.clear()
        self.pool.close()


def coverages(runners: Mapping[str, Runner[Any]]) -> dict[str, Coverage]:
    """What runners have counted so far, by technique; a copy."""
    found = [each.coverages() for each in runners.values()]
    return {name: counts.copy() for each in found for name, counts in each.items()}


class Runner(ABC, Generic[Live]):
    """One phase of the model, captured at several sizes.

    Args:
        group: pool and buffers shared with runners that replay in turn.
        buckets: sizes to capture, in the phase's own unit.
        contract: memory that the recordings read by address.
        options: backend, padding, waste ceiling and the rest.

    Attributes:
        technique: name in the table of techniques.
        inputs: the slots that a caller fills at every step.
        variant: part of every key; phases whose sizes mean different things have different ones (P40).
        waste_ceiling: the phase's own, where the options leave it open.
    """

    technique: ClassVar[str]
    inputs: Sequence[str]
    variant: str | None = None
    waste_ceiling: ClassVar[float | None] = None

    def __init__(
        self, group: GraphGroup, buckets: Sequence[int], contract: AddressContract, options: Options
    ) -> None:
        ceiling = self.waste_ceiling if options.waste_ceiling is None else options.waste_ceiling
        options = replace(
            options, inline_breaks=options.backend == "full", vary=self.vary, waste_ceiling=ceiling
        )
        self.group, self.backend = group, options.backend
        self.captured = Captured(
            self.technique, self.step, self.slots(), buckets, group.device, options,
            recorder=group.recorder, pool=group.pool, shared=group.shared, contract=contract, variant=self.variant,
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

    @abstractmethod
    def set_live(self, live: Live | None) -> None:
        """Tells the breaks what is live in this step; None between steps."""

    @abstractmethod
    def rows(self, live: Live) -> int:
        """How many rows of a bucket are live."""

    @abstractmethod
    def prepare(self, views: dict[str, Tensor]) -> None:
        """Before a bucket is captured: sets what is live, and writes example inputs where pad values will not do."""

    def derived(self, live: Live) -> dict[str, Tensor]:
        """Static inputs beside the caller's that follow from what is live."""
        return {}

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """The phase's own reason for running this step eager, decided before any padding."""
        return None

    def check(self, output: Any) -> None:
        """In debug mode, of every output: refuses what cannot be right."""

    def capture(self) -> None:
        """Records every bucket now, largest first; lazily, each on its first use."""
        try:
            self.captured.capture(self.prepare)
        finally:
            self.set_live(None)

    def capture_for(self, rows: int) -> None:
        """Records the bucket that serves so many live rows now, where buckets are captured on first use."""
        try:
            self.captured.capture_on_use(rows)
        finally:
            self.set_live(None)

    @contextmanager
    def during(self, live: Live) -> Iterator[None]:
        """One step's extent: within, ``live`` is what breaks see; afterwards nothing is, on any way out (P56)."""
        self.group.settle()
        self.set_live(live)
        try:
            yield
        finally:
            self.set_live(None)

    def run(self, live: Live, **values: Tensor) -> Any:
        """One step on what is live: replayed, or eager with a counted reason."""
        self.group.settle()
        try:  # as ``during``, whose context would be a good part of what a replay costs the host
            self.set_live(live)
            miss = self.ineligible(values)
            if miss is not None:
                output = self.captured.run_eager(miss, values, self.rows(live))
            else:
                if self.captured.capture_on_use(self.rows(live)):
                    self.set_live(live)  # the capture had examples of its own
                output = self.captured(**values, **self.derived(live))
            if self.captured.options.debug:
                self.check(output)
            return output
        finally:
            self.set_live(None)

    def serving(self, live: Live) -> Runner[Live]:
        """The runner whose recordings serve a step: this one, or that which it chooses for it."""
        return self

    def run_padded_eager(self, live: Live, size: int, **values: Tensor) -> Any:
        """Oracle 1: the step at the padded size, eager, over the same static buffers."""
        with self.during(live):
            return self.captured.run_padded_eager({**values, **self.derived(live)}, self.rows(live), size)

    def run_live_eager(self, live: Live, **values: Tensor) -> Any:
        """Oracle 2: the step at its live size, eager; not counted."""
        with self.during(live), torch.no_grad():
            return self.step(**values)

    def coverage(self) -> Coverage:
        """Steps captured and eager, with reasons."""
        return self.captured.counts

    def coverages(self) -> dict[str, Coverage]:
        """The same by technique, where a phase holds more than one."""
        return {self.technique: self.coverage()}

    def tries(self) -> int:
        """Captures so far, those that failed included: a step in which they grow took longer for it."""
        return len(self.captured.ledger) + len(self.captured.failures)

    def memory(self) -> list[dict[str, Any]]:
        """One row per captured bucket: milliseconds and bytes."""
        return self.captured.memory()

    def close(self) -> None:
        """Gives recordings and buffers back."""
        self.captured.close()
