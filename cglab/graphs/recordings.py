"""The recordings of one step: the loop over its buckets, what each cost, which failed, how results are trimmed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from cglab.errors import BucketError, CaptureError, CaptureMemoryError
from cglab.graphs.backends import BACKENDS
from cglab.graphs.breaks import BreakCall
from cglab.graphs.buffers import StaticBuffers
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.options import CaptureFailedWarning, Options, outside_level
from cglab.graphs.outputs import Stored, rows_per_size
from cglab.graphs.recorder import Pool, Recorder, Segment
from cglab.graphs.selfcheck import self_check
from cglab.graphs.slots import Padding

Prepare = Callable[[dict[str, Tensor]], None]


class Recordings:
    """Everything recorded for one step.

    Args:
        name: of the step, for reports.
        function: the step; called with the slots' tensors by name.
        buffers: its static inputs.
        options: how it is captured; the backend is full or breakable.
        recorder: where it is recorded.
        pool: memory of the step's group.
        variant: part of every key (P2).

    Attributes:
        ledger: what each captured bucket cost.
        failures: why a bucket has no recording, by key.
        present: slots that held a tensor at capture; None before one.
        rows: for each output leaf, rows per unit of bucket size, or None for a leaf of fixed size.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        buffers: StaticBuffers,
        options: Options,
        *,
        recorder: Recorder,
        pool: Pool,
        variant: str | None = None,
    ) -> None:
        self.name, self.variant = name, variant
        self._function, self._buffers, self._options = function, buffers, options
        self._recorder = recorder
        self._backend = BACKENDS[options.backend](
            recorder, pool, inline_breaks=options.inline_breaks, warmups=options.warmups
        )
        self.ledger: list[CaptureCost] = []
        self.failures: dict[ShapeKey, str] = {}
        self.present: frozenset[str] | None = None
        self.rows: list[int | None] | None = None

    def key(self, size: int) -> ShapeKey:
        """The key of a bucket; the only place where one is made."""
        return ShapeKey(size, self.variant)

    def capture(self, buckets: Sequence[int], prepare: Prepare | None, absent: Sequence[str]) -> None:
        """Records every bucket, largest first (P29); see ``Captured.capture``.

        Raises:
            CaptureError: with ``strict``, for the first bucket that fails.
        """
        present = frozenset(self._buffers.slots) - frozenset(absent)
        if (
            present != self.present
        ):  # what has other inputs must not be there to be replayed where this fails (P16)
            self._forget()
        self.present = present
        self._buffers.reset()
        with self._backend.capture_session():
            for size in sorted(buckets, reverse=True):
                error = self._capture_bucket(size, prepare)
                if error is None:
                    continue
                self.failures |= self._failed([size], error)
                if self._options.strict:
                    raise error
                failed = CaptureFailedWarning(f"{self.name}, bucket {size}: {error}")
                warnings.warn(failed, stacklevel=outside_level())
                if not isinstance(error, CaptureMemoryError):  # the same function fails at every size
                    self.failures = self._failed(buckets, error) | self.failures
                    break
            self.rows = self._trim_rule(prepare)

    def _failed(self, sizes: Sequence[int], error: CaptureError) -> dict[ShapeKey, str]:
        """Why these buckets have no recording; one of an earlier capture is still there (B39)."""
        return {key: str(error) for key in map(self.key, sizes) if not self.can_run(key)}

    def _forget(self) -> None:
        for key in self._backend.keys:
            self._backend.drop(key)
        self.ledger, self.failures = [], {}

    def _capture_bucket(self, size: int, prepare: Prepare | None) -> CaptureError | None:
        key, views = self.key(size), self._buffers.view(size, self.present)
        if prepare is not None:
            prepare(views)
        step = self.step_over(views)
        checked = self._options.self_check
        try:
            cost = self._backend.capture_one(
                key, step, keep_alive=tuple(views.values()), after_warmup=self._options.after_warmup
            )
            if self._recorder.name == "tape" if checked is None else checked:
                try:
                    self_check(key, views, step, lambda: self._bare_replay(key), self._options.vary)
                except CaptureError:
                    self._backend.drop(key)
                    raise
        except CaptureError as error:
            return error
        self.failures.pop(key, None)
        self.ledger = [line for line in self.ledger if line.key != key] + [cost]
        return None

    def step_over(self, views: Mapping[str, Tensor]) -> Callable[[], Any]:
        """The step over a bucket's static inputs; slots without a tensor are None."""
        missing = dict.fromkeys(self._buffers.slots.keys() - views.keys())
        return lambda: self._function(**views, **missing)

    def _bare_replay(self, key: ShapeKey) -> Any:
        for step in self._backend.artifact(key).steps:
            step.replay()
        return self._backend.artifact(key).output.tree()

    def _trim_rule(self, prepare: Prepare | None) -> list[int | None] | None:
        keys = self._backend.keys
        if not keys or not self._options.padding:
            return None  # exact sizes are never trimmed
        outputs = {key: self._backend.artifact(key).output.leaves for key in keys}
        if len(keys) > 1:
            return rows_per_size(outputs)
        (only,) = keys
        if only.size == 1:
            return [None] * len(outputs[only])  # a single bucket of one row is never padded
        # One size cannot tell rows from coincidence: ask another.
        views = self._buffers.view(only.size - 1, self.present)
        if prepare is not None:
            prepare(views)
        step = self.step_over(views)
        try:
            smaller = tuple(tree_flatten(self._recorder.shape_of(step))[0])
            if self._options.after_warmup is not None:  # this run counts as one
                self._options.after_warmup()
            return rows_per_size({**outputs, self.key(only.size - 1): smaller})
        except CaptureError:
            return None  # the function runs, or can be trimmed, at this one size only: see Captured.trim

    def tried(self, size: int) -> bool:
        """Whether a bucket was recorded, or could not be."""
        key = self.key(size)
        return self._backend.can_run(key) or key in self.failures

    def serves(self, size: int, values: Mapping[str, Tensor | None]) -> ShapeKey | Miss:
        """The key of a bucket if its recording can take these inputs, or the reason why not.

        Raises:
            SlotError: for an input of the wrong dtype or number of axes.
        """
        slots, key = self._buffers.slots, self.key(size)
        if self.present is not None:
            present = frozenset(name for name, value in values.items() if value is not None)
            odd = {n for n in present ^ self.present if slots[n].pad is not Padding.KEEP}
            if odd:
                name = min(odd)
                now, then = ("a tensor", "None") if name in present else ("None", "a tensor")
                return Miss(Reason.INPUT_KIND, f"slot {name!r} is {now}, at capture it was {then}")
        for name, value in values.items():
            misfit = None if value is None else self._buffers.misfit(name, value, size)
            if misfit is not None:
                return Miss(Reason.SHAPE, misfit)
        if not self.can_run(key):
            why = self.failures.get(key, f"bucket {size} was not captured")
            return Miss(Reason.CAPTURE_FAILED, why.splitlines()[0])
        return key

    def can_run(self, key: ShapeKey) -> bool:
        """Whether ``key`` has a recording."""
        return self._backend.can_run(key)

    def replay(self, key: ShapeKey) -> Stored:
        """Runs a recording over what the static buffers hold."""
        return self._backend.replay(key)

    def steps_of(self, size: int) -> tuple[Segment | BreakCall, ...]:
        """The recorded segments and breaks of a bucket, in order of replay.

        Raises:
            BucketError: for a size that was not recorded.
        """
        if not self.can_run(self.key(size)):
            raise BucketError(
                f"{self.name} has no recording of size {size}; it has {self.sizes or 'none yet'}"
            )
        return self._backend.artifact(self.key(size)).steps

    @property
    def version(self) -> int:
        """Another number after every drop: what was decided over the recordings holds no longer.

        A recording that is made again under its key serves what the one before it served.
        """
        return self._backend.drops

    @property
    def sizes(self) -> list[int]:
        """Sizes with a recording, ascending."""
        return sorted({key.size for key in self._backend.keys})

    def close(self) -> None:
        """Forgets every recording."""
        self._backend.close()
