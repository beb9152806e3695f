"""A step with its recordings: the five verbs, and the loop that captures every bucket.

``can_run`` decides, ``pad`` picks the bucket, ``load`` fills the static buffers, ``replay`` runs, ``trim`` cuts the
result to the live rows. Everything that knows about buckets, padding and keys is here, once; runners add what a
phase of the model needs.
"""

from __future__ import annotations

import atexit
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from cglab.errors import (
    CaptureError,
    CaptureMemoryError,
    ClosedError,
    PoolBusyError,
)  # fmt: skip
from cglab.graphs.address import AddressContract
from cglab.graphs.backends import BACKENDS, Backend, CaptureCost, check_backend
from cglab.graphs.breaks import BreakCall, capturing
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.dispatch import choose_bucket, live_size
from cglab.graphs.keys import ShapeKey
from cglab.graphs.options import MANY_SHAPES, CaptureFailedWarning, ManyShapesWarning, Options
from cglab.graphs.outputs import LiveView, Stored, rows_per_size
from cglab.graphs.recorder import Pool, Recorder, Segment, recorder_for
from cglab.graphs.selfcheck import self_check
from cglab.graphs.slots import Padding, SharedBuffers, Slot, StaticBuffers

log = logging.getLogger("cglab.graphs")
_alive: weakref.WeakSet[Captured] = weakref.WeakSet()


@dataclass
class Captured:
    """One step, captured at several sizes.

    Args:
        name: for reports.
        function: the step; called with the slots' tensors by name.
        slots: resolved slots.
        buckets: sizes to capture.
        device: where the step runs.
        options: how it is captured.
        recorder, pool, shared: given by a runner that shares them with others; otherwise its own.
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
        self._present: frozenset[str] | None = None
        self._backend: Backend | None = None
        if self.options.backend in BACKENDS:
            self._backend = BACKENDS[self.options.backend](
                self._recorder,
                self._pool,
                inline_breaks=self.options.inline_breaks,
                warmups=self.options.warmups,
            )
        self.counts = Coverage()
        self.ledger: list[CaptureCost] = []
        self.failures: dict[ShapeKey, str] = {}
        self._tried = False
        self._rows: list[int | None] | None = None
        self._generation = 0
        self._eager_sizes: set[int] = set()
        self._closed = False
        _alive.add(self)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @property
    def _recordings(self) -> Backend:
        if self._backend is None:
            raise ClosedError(f"{self.name} runs eager: nothing is recorded; capture it with another backend")
        return self._backend

    def key(self, size: int) -> ShapeKey:
        """The key of a bucket; the only place where one is made."""
        return ShapeKey(size, self.variant)

    def capture(
        self, prepare: Callable[[dict[str, Tensor]], None] | None = None, *, absent: Sequence[str] = ()
    ) -> None:
        """Records every bucket, largest first. Smaller buckets survive when a larger one fails.

        Args:
            prepare: writes valid example inputs into a bucket's views; by default they hold the pad values.
            absent: optional slots that are None.

        Raises:
            CaptureError: if nothing could be recorded for a reason other than memory, or ``strict`` is set.
        """
        self._require_open()
        self._tried = True
        if self._backend is None:
            return
        self._present = frozenset(self.slots) - frozenset(absent)
        self.buffers.reset()
        with self._backend.capture_session():
            for size in reversed(self.buckets):
                error = self._capture_bucket(size, prepare)
                if error is None:
                    continue
                self.failures[self.key(size)] = str(error)
                if self.options.strict:
                    raise error
                warnings.warn(CaptureFailedWarning(f"{self.name}, bucket {size}: {error}"), stacklevel=3)
                if not isinstance(error, CaptureMemoryError):
                    for rest in self.buckets:  # the same function fails at every size
                        self.failures.setdefault(self.key(rest), str(error))
                    break
        self._rows = self._trim_rule()

    def _capture_bucket(
        self, size: int, prepare: Callable[[dict[str, Tensor]], None] | None
    ) -> CaptureError | None:
        backend, key = self._recordings, self.key(size)
        views = self.buffers.view(size, self._present)
        if prepare is not None:
            prepare(views)
        step = self._step(views)
        try:
            cost = backend.capture_one(
                key, step, keep_alive=tuple(views.values()), after_warmup=self.options.after_warmup
            )
            check = self.options.self_check
            if check or (check is None and self._recorder.name == "tape"):
                try:
                    self_check(key, views, step, lambda: self._raw_replay(key), self.options.vary)
                except CaptureError:
                    backend.drop(key)
                    raise
        except CaptureError as error:
            return error
        self.failures.pop(key, None)
        self.ledger = [c for c in self.ledger if c.key != key] + [cost]
        return None

    def _step(self, views: dict[str, Tensor]) -> Callable[[], Any]:
        missing = dict.fromkeys(self.slots.keys() - (self._present or frozenset()))
        return lambda: self.function(**views, **missing)

    def _raw_replay(self, key: ShapeKey) -> Any:
        for step in self._recordings.artifact(key).steps:
            step.replay()
        return self._recordings.artifact(key).output.tree()

    def _trim_rule(self) -> list[int | None] | None:
        keys = self._recordings.keys
        if not keys:
            return None
        shapes = {key: _shapes(self._recordings.artifact(key).output) for key in keys}
        if (
            len(keys) == 1 and keys[0].size > 1
        ):  # one size cannot tell rows from a coincidence: look at another
            size = keys[0].size - 1
            views = self.buffers.view(size, self._present)
            output = self._recorder.shape_of(self._step(views))
            leaves = tree_flatten(output)[0]
            shapes[self.key(size)] = [
                tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves
            ]
        if len(shapes) == 1:
            return [None] * len(next(iter(shapes.values())))  # a single bucket of one row is never padded
        return rows_per_size(shapes)

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
        if self._backend is None:
            return Miss(Reason.BACKEND_EAGER)
        bucket = self.pad(live)
        if isinstance(bucket, Miss):
            return bucket
        if self._present is not None:
            present = frozenset(name for name, value in values.items() if value is not None)
            odd = {name for name in present ^ self._present if self.slots[name].pad is not Padding.KEEP}
            if odd:
                name = min(odd)
                now, then = ("a tensor", "None") if name in present else ("None", "a tensor")
                return Miss(Reason.INPUT_KIND, f"slot {name!r} is {now}, at capture it was {then}")
        for name, value in values.items():
            misfit = None if value is None else self.buffers.misfit(name, value, bucket)
            if misfit is not None:
                return Miss(Reason.SHAPE, misfit)
        key = self.key(bucket)
        if not self._backend.can_run(key):
            return Miss(
                Reason.CAPTURE_FAILED,
                self.failures.get(key, f"bucket {bucket} was not captured").splitlines()[0],
            )
        return key

    def load(self, values: Mapping[str, Tensor | None], live: int, size: int) -> None:
        """Copies the live rows in and resets the padded tail of every slot."""
        self.buffers.load({name: value for name, value in values.items() if value is not None}, live, size)

    def replay(self, key: ShapeKey) -> Stored:
        """Runs the recording over what the static buffers hold.

        Raises:
            AddressError: if memory that it reads has moved.
            PoolBusyError: inside another capture or replay of the same pool.
        """
        self._require_open()
        if capturing():
            raise PoolBusyError(
                f"{self.name} would be replayed inside a capture; call the plain function there"
            )
        self.contract.check()
        self._generation += 1
        output: Stored = self._recordings.replay(key)
        return output

    def trim(self, output: Stored, live: int, size: int) -> Any:
        """The output with padded rows cut off (B32)."""
        if live == size or self._rows is None:
            leaves = list(output.leaves)
        else:
            leaves = [
                leaf if rows is None else leaf[: live * rows]
                for leaf, rows in zip(output.leaves, self._rows, strict=True)
            ]
        tree = tree_unflatten(leaves, output.structure)
        if self.options.clone:
            return tree_map_only(Tensor, Tensor.clone, tree)
        if self.options.debug:
            generation = self._generation
            return tree_map_only(
                Tensor, lambda t: LiveView.wrap(t, lambda: generation == self._generation), tree
            )
        return tree

    def __call__(self, **values: Tensor | None) -> Any:
        """One step: replayed where a recording fits, eager with a counted reason where none does."""
        self._require_open()
        live = self.live_size(values)
        if not self._tried:
            self.capture(
                absent=[name for name in self.slots if values.get(name) is None and self.slots[name].optional]
            )
        decision = self.can_run(values, live)
        if isinstance(decision, Miss):
            return self.run_eager(decision, values, live)
        self.load(values, live, decision.size)
        output = self.replay(decision)
        self.counts.hit(str(decision), decision.size, live)
        return self.trim(output, live, decision.size)

    def run_eager(self, miss: Miss, values: Mapping[str, Tensor | None], live: int) -> Any:
        """The plain function on the live inputs; the reason is counted."""
        self.counts.miss(miss)
        if miss.reason in (Reason.ABOVE_LARGEST, Reason.WASTE_CEILING, Reason.SIZE_NOT_CAPTURED):
            self._eager_sizes.add(live)
            if len(self._eager_sizes) == MANY_SHAPES:
                warnings.warn(
                    ManyShapesWarning(
                        f"{self.name}: {MANY_SHAPES} different sizes ran eager ({sorted(self._eager_sizes)}); "
                        f"the buckets are {list(self.buckets)}: add sizes that fit, or switch padding on"
                    ),
                    stacklevel=3,
                )
        missing = {name: None for name in self.slots if name not in values}
        kept = {n: self.buffers.view(live, [n])[n] for n in missing if self.slots[n].pad is Padding.KEEP}
        with torch.no_grad():
            return self.function(**values, **{**missing, **kept})

    def run_padded_eager(self, values: Mapping[str, Tensor | None], live: int, size: int) -> Any:
        """Oracle 1: the same function, eager, over the same padded static buffers; untrimmed views trimmed alike."""
        self.load(values, live, size)
        with torch.no_grad():
            leaves, structure = tree_flatten(self._step(self.buffers.view(size, self._present))())
        return self.trim(Stored(tuple(leaves), structure), live, size)

    def coverage(self) -> Coverage:
        """Steps captured and eager, with reasons."""
        return self.counts

    def memory(self) -> list[dict[str, Any]]:
        """One row per captured bucket: milliseconds and bytes."""
        return [
            {
                "bucket": str(c.key), "warmup_ms": c.warmup_seconds * 1e3, "capture_ms": c.capture_seconds * 1e3,
                "pool_bytes": c.pool_bytes, "device_bytes": c.device_bytes, "nodes": c.nodes, "breaks": c.breaks,
                "warmups": c.warmups,
            }
            for c in self.ledger
        ]  # fmt: skip

    def inspect(self, size: int) -> list[str]:
        """What was recorded for a bucket, in order."""
        return [line for step in self.steps_of(size) for line in step.operations()]

    def steps_of(self, size: int) -> tuple[Segment | BreakCall, ...]:
        """The recorded segments and breaks of a bucket, in order of replay."""
        return self._recordings.artifact(self.key(size)).steps

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes with a recording, ascending."""
        return sorted({key.size for key in self._backend.keys}) if self._backend else []

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed; capture it again")

    def close(self) -> None:
        """Gives back recordings, buffers and, if it is its own, the pool."""
        if self._closed:
            return
        self._closed = True
        _alive.discard(self)
        if self._backend is not None:
            self._backend.close()
        self.buffers = StaticBuffers({}, 1, self.device)
        self.contract.clear()
        if self._own_pool:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shapes(output: Stored) -> list[tuple[int, ...] | None]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in output.leaves]


@atexit.register
def _close_all() -> None:
    for captured in list(_alive):  # graphs go before the device and before process groups (N12)
        captured.close()
