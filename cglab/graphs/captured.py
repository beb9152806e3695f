"""A step with its recordings, as five verbs.

``can_run`` decides, ``pad`` picks the bucket, ``load`` fills the static buffers, ``replay`` runs, ``trim`` cuts the
result to the live rows. Buckets, padding and keys are known here, once; runners add what a phase of the model needs.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from cglab.errors import ClosedError, PoolBusyError
from cglab.graphs.address import AddressContract
from cglab.graphs.backends import BACKENDS, check_backend
from cglab.graphs.breaks import capturing
from cglab.graphs.buffers import SharedBuffers, StaticBuffers
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.dispatch import choose_bucket, live_size
from cglab.graphs.fits import Fit, Fits, kinds_of
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.options import Options, note_eager_size
from cglab.graphs.outputs import LiveView, Stored, handles_of, trimmed
from cglab.graphs.recorded_graph import RecordedGraph, recorded_graph
from cglab.graphs.recorder import Pool, Recorder
from cglab.graphs.recorders import recorder_for
from cglab.graphs.recordings import Prepare, Recordings
from cglab.graphs.slots import Slot

_alive: weakref.WeakSet[Captured] = weakref.WeakSet()


@dataclass(eq=False)
class Captured:
    """One step, captured at several sizes.

    Args:
        name: for reports.
        function: the step; called with the slots' tensors by name.
        slots: resolved slots.
        buckets: sizes to capture.
        device: where the step runs.
        options: how it is captured.
        recorder, pool, shared: of a group of runners; otherwise its own.
        contract: addresses that must not move.
        variant: part of every key (P2).
    """

    name: str
    function: Callable[..., Any]
    slots: Mapping[str, Slot]
    buckets: Sequence[int]
    device: torch.device
    options: Options = field(default_factory=Options)
    recorder: Recorder | None = None
    pool: Pool | None = None
    shared: SharedBuffers | None = None
    contract: AddressContract = field(default_factory=AddressContract)
    variant: str | None = None

    def __post_init__(self) -> None:
        check_backend(self.options.backend)
        self.buckets = sorted(self.buckets)
        self._recorder = self.recorder or recorder_for(self.device)
        self._own_pool = self.pool is None
        self._pool = self.pool or self._recorder.new_pool()
        self.buffers = StaticBuffers(self.slots, self.buckets[-1], self.device, self.shared)
        self._recordings: Recordings | None = None
        if self.options.backend in BACKENDS:
            self._recordings = Recordings(
                self.name, self.function, self.buffers, self.options, recorder=self._recorder, pool=self._pool,
                variant=self.variant,
            )  # fmt: skip
        self.counts = Coverage()
        self._prepare: Prepare | None = None
        self._absent: Sequence[str] = ()
        self._fits = Fits()
        self._tried = self._closed = False
        self._generation = 0
        self._eager_sizes: set[int] = set()
        _alive.add(self)

    @property
    def recordings(self) -> Recordings:
        """What is recorded; a step on the eager backend has none, and asking for it is a ClosedError."""
        if self._recordings is None:
            raise ClosedError(f"{self.name} runs eager: nothing is recorded; choose another backend")
        return self._recordings

    @property
    def ledger(self) -> list[CaptureCost]:
        """What each captured bucket cost; empty on the eager backend."""
        return self._recordings.ledger if self._recordings else []

    @property
    def failures(self) -> dict[ShapeKey, str]:
        """Why a bucket has no recording, by key."""
        return self._recordings.failures if self._recordings else {}

    def capture(self, prepare: Prepare | None = None, *, absent: Sequence[str] = ()) -> None:
        """Records every bucket, largest first. Smaller buckets survive when a larger one fails.

        With ``Options.lazy`` nothing is recorded yet, and what is there stays: see ``capture_on_use``.

        Args:
            prepare: writes valid example inputs into a bucket's views; by default they hold the pad values.
            absent: optional slots that are None.

        Raises:
            CaptureError: if nothing could be recorded for a reason other than memory, or ``strict`` is set.
        """
        self._require_open()
        if self.options.lazy:
            self._prepare, self._absent = prepare, absent
        elif self._recordings is not None:
            with self._pool.turn:
                self._recordings.capture(self.buckets, prepare, absent)
        self._tried = True

    def capture_on_use(self, live: int) -> bool:
        """Records the bucket that serves ``live`` rows, if buckets are captured lazily and it was never tried.

        True if it was tried now, over example inputs: what the step reads beside them must be set again.
        """
        bucket = self.pad(live) if self.options.lazy and self._recordings is not None else None
        if not isinstance(bucket, int):
            return False
        self._require_no_capture("captured")
        with self._pool.turn:  # of two threads that need it, one records
            if self.recordings.tried(bucket):
                return False
            self.recordings.capture([bucket], self._prepare, self._absent)
        return True

    def live_size(self, values: Mapping[str, Tensor | None]) -> int:
        """The live size that all values agree on; see ``dispatch.live_size``."""
        return live_size(self.name, self.slots, values, default=self.buckets[-1])

    def pad(self, live: int) -> int | Miss:
        """The bucket for ``live`` rows, or why there is none; see ``dispatch.choose_bucket``."""
        return choose_bucket(
            live, self.buckets, padding=self.options.padding, ceiling=self.options.waste_ceiling
        )

    def can_run(self, values: Mapping[str, Tensor | None], live: int) -> ShapeKey | Miss:
        """The key that serves these inputs, or the reason for running eager.

        Raises:
            SlotError: for an input of the wrong dtype or number of axes.
        """
        recordings = self._recordings
        if recordings is None:
            return self.options.why_eager
        bucket = self.pad(live)
        return bucket if isinstance(bucket, Miss) else recordings.serves(bucket, values)

    def load(self, values: Mapping[str, Tensor | None], live: int, size: int) -> None:
        """Copies the live rows in and resets the padded tail of every slot; see ``StaticBuffers.load``."""
        self._pool.require_free(f"a step of {self.name}")
        self.buffers.load(values, live, size)

    def replay(self, key: ShapeKey) -> Stored:
        """Runs the recording over what the static buffers hold.

        Raises:
            AddressError: if memory that it reads has moved.
            PoolBusyError: inside another capture or replay of the same pool.
        """
        self._require_open()
        self._require_no_capture("replayed")
        self.contract.check()
        self._generation += 1
        return self.recordings.replay(key)

    def trim(self, output: Stored, live: int, size: int) -> Any:
        """The output with padded rows cut off (B32).

        Raises:
            OutputStructureError: if there are padded rows and nothing tells which rows of the output they are.
        """
        leaves: Sequence[Any] = output.leaves
        if live != size:
            leaves = trimmed(self.name, output, self.recordings.rows, live, size)
        tree = tree_unflatten(handles_of(leaves), output.structure)
        if self.options.clone:
            return tree_map_only(Tensor, Tensor.clone, tree)
        if self.options.debug:
            made = self._generation
            return tree_map_only(Tensor, lambda t: LiveView.wrap(t, lambda: made == self._generation), tree)
        return tree

    def __call__(self, **values: Tensor | None) -> Any:
        """One step: replayed where a recording fits, eager with a counted reason where none does."""
        self._require_open()
        kinds, version = kinds_of(values), self._recordings.version if self._recordings else 0
        fit = self._fits.find(kinds, version)
        if fit is None:
            live = self.live_size(values)
            if not self._tried:
                self.capture(
                    absent=[n for n, s in self.slots.items() if s.optional and values.get(n) is None]
                )
            self.capture_on_use(live)
            decision = self.can_run(values, live)
            if isinstance(decision, Miss):
                return self.run_eager(decision, values, live)
            fit = Fit(decision, str(decision), live, self.buffers.plan(values, live, decision.size), version)
            self._fits.keep(kinds, fit)
        with self._pool.turn:
            self._pool.require_free(f"a step of {self.name}")
            fit.plan.load(values)
            output = self.replay(fit.key)
            self.counts.hit(fit.label, fit.key.size, fit.live)
            return self.trim(output, fit.live, fit.key.size)

    def run_eager(
        self, miss: Miss, values: Mapping[str, Tensor | None], live: int,
        function: Callable[..., Any] | None = None,
    ) -> Any:  # fmt: skip
        """The plain function, or the one that this call asks for, on the live inputs; the reason is counted."""
        self._require_open()
        kept = self.buffers.state(values, live)
        self.counts.miss(miss, live)
        if miss.reason in (Reason.ABOVE_LARGEST, Reason.WASTE_CEILING, Reason.SIZE_NOT_CAPTURED):
            note_eager_size(self.name, live, self._eager_sizes, self.buckets)
        with torch.no_grad():
            return (function or self.function)(**{**dict.fromkeys(self.slots), **values, **kept})

    def run_padded_eager(self, values: Mapping[str, Tensor | None], live: int, size: int) -> Any:
        """Oracle 1: the same function, eager, over the same padded static buffers; untrimmed views trimmed alike."""
        self.load(values, live, size)
        step = self.recordings.step_over(self.buffers.view(size, self.recordings.present))
        with torch.no_grad():
            leaves, structure = tree_flatten(step())
        return self.trim(Stored(tuple(leaves), structure), live, size)

    def coverage(self) -> Coverage:
        """Steps captured and eager, with reasons."""
        return self.counts

    def memory(self) -> list[dict[str, Any]]:
        """One row per captured bucket: milliseconds and bytes."""
        return [cost.as_row() for cost in self.ledger]

    def inspect(self, size: int) -> RecordedGraph:
        """What was recorded for a bucket: lines in order, a table, a picture; see ``Recordings.steps_of``."""
        return recorded_graph(
            f"{self.name} {self.options.backend}, bucket {size}", self.recordings.steps_of(size)
        )

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes with a recording, ascending."""
        return self._recordings.sizes if self._recordings else []

    @property
    def unused_sizes(self) -> list[int]:
        """Buckets that no step has used, captured or not (B55)."""
        return self.counts.unused(self.buckets)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed; capture it again")

    def _require_no_capture(self, what: str) -> None:
        if capturing():
            raise PoolBusyError(f"{self.name} would be {what} inside a capture; call the function there")

    def close(self) -> None:
        """Gives back recordings, buffers and, if it is its own, the pool."""
        if self._closed:
            return
        self._closed = True
        _alive.discard(self)
        self._fits.clear()
        if self._recordings is not None:
            self._recordings.close()
        self.buffers.clear()
        self.contract.clear()
        if self._own_pool:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    for captured in list(_alive):  # graphs go before the device and before process groups (N12)
        captured.close()
