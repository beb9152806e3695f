"""The shape of the artifact: ``full``, ``breakable`` or ``eager``; each works with either recorder.

One recording per key, segments with breaks between, or nothing.

Largest shape first, one pool, warm-ups where the capture runs: two for the first shape and wherever a warm-up
loaded something new, one otherwise (P28, P29).
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.random import fork_rng

from cglab.errors import CaptureError, EmptyCaptureError, ToggleError
from cglab.graphs.breaks import Aside, BreakCall, Inline, Refuse, Split, Stage, staged
from cglab.graphs.keys import ShapeKey, require_key
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.outputs import OutputBuffers, Stored
from cglab.graphs.recorder import Pool, Recorder, Segment, TakeSeconds

log = logging.getLogger("cglab.graphs")

Recorded = tuple[list[Segment | BreakCall], Stored, TakeSeconds]
"""What a recording left behind, its output, and what it took."""

NO_WARM_UP = (
    "warm-ups are off (warmups=0): if this line makes a handle or loads a kernel on first use, leave them on"
)
"""What a capture that nothing warmed up is told first when it fails (B01)."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Everything recorded for one key."""

    steps: tuple[Segment | BreakCall, ...]
    output: Stored
    keep_alive: tuple[Any, ...]


class Backend(ABC):
    """Captures and replays by key.

    Args:
        recorder: where work is recorded.
        pool: memory of the runner's group.
        inline_breaks: record breaks as they stand inside a full capture.
        warmups: None for the policy above, or a fixed number for every shape.
    """

    name: str
    may_break: bool

    def __init__(
        self, recorder: Recorder, pool: Pool, *, inline_breaks: bool = False, warmups: int | None = None
    ) -> None:
        self.recorder = recorder
        self.pool = pool
        self.outputs = OutputBuffers()
        self._inline_breaks = inline_breaks
        self._warmups = warmups
        self._artifacts: dict[ShapeKey, Artifact] = {}
        self.drops = 0

    @property
    def keys(self) -> list[ShapeKey]:
        """Recorded keys, largest first."""
        return sorted(self._artifacts, key=lambda key: (-key.size, key.variant or ""))

    def can_run(self, key: ShapeKey) -> bool:
        """Whether ``key`` was recorded. Raises BucketError for a raw size (P1)."""
        return require_key(key) in self._artifacts

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Around the loop over shapes: the pool is taken and the garbage collector waits.

        Only what died of late is collected before: to look through all that torch has imported takes longer than to
        capture a bucket, and where buckets are captured on first use each of them would wait for it.

        Default random generators keep their state, so that a first call that captures draws what eager would; a
        generator of the user's own is advanced by warm-ups and checks.
        """
        gc.collect(1)
        collecting = gc.isenabled()
        gc.disable()
        try:
            device = self.recorder.device
            with (
                self.pool.in_use(f"a {self.name} capture"),
                fork_rng([device] if device.type == "cuda" else []),
            ):
                yield
        finally:
            if collecting:
                gc.enable()

    def capture_one(
        self,
        key: ShapeKey,
        function: Callable[[], Any],
        keep_alive: tuple[Any, ...] = (),
        after_warmup: Callable[[], None] | None = None,
    ) -> CaptureCost:
        """Records ``function`` as ``key``; call inside ``capture_session``.

        Args:
            key: where it is stored; an earlier recording of the key is replaced.
            function: the step, reading static buffers.
            keep_alive: objects whose memory the recording reads by address (P31).
            after_warmup: undoes what a warm-up changed (P28, P43).

        Raises:
            CaptureError: if it cannot be recorded; earlier recordings are intact.
        """
        require_key(key)
        pool_before, outputs_before = self.pool.reserved_bytes, self.outputs.reserved_bytes
        footprint = self.recorder.footprint()
        started = time.perf_counter()
        copies, warmups, loaded = self._warm_up(function, footprint, after_warmup)
        warmed = time.perf_counter()
        try:
            steps, output, seconds = self._record(function)
        except CaptureError as error:
            if warmups:
                raise
            raise error.advised(NO_WARM_UP) from error.__cause__
        if len(steps) > 1 and after_warmup is not None:  # breaks, and what they read, ran for real
            after_warmup()
        segments = [step for step in steps if not isinstance(step, BreakCall)]
        breaks = len(steps) - len(segments)
        counts = [segment.nodes for segment in segments]
        nodes = None if None in counts else sum(n or 0 for n in counts)
        if nodes is not None and nodes <= copies and not breaks:
            for step in steps:
                step.close()
            raise EmptyCaptureError(
                "the function did no device work here, so a replay would return the same values for ever",
                advice=f"compute on {self.recorder.device}, or do not capture it",
            )
        replaced = self._artifacts.pop(key, None)
        if replaced is not None:
            _close(replaced)
        self._artifacts[key] = Artifact(tuple(steps), output, keep_alive)
        return CaptureCost(
            key, warmed - started, time.perf_counter() - warmed, self.pool.reserved_bytes - pool_before,
            self.recorder.footprint() - footprint, nodes, breaks, warmups, loaded_bytes=loaded - footprint,
            output_bytes=self.outputs.reserved_bytes - outputs_before, seconds=seconds,
        )  # fmt: skip

    def _warm_up(
        self, function: Callable[[], Any], footprint: int, after_warmup: Callable[[], None] | None
    ) -> tuple[int, int, int]:
        """Copies that ``store`` will record, warm-ups run, and the footprint after them."""
        wanted = self._warmups if self._warmups is not None else (1 if self._artifacts else 2)
        done = copies = 0
        while done < wanted:
            before = footprint
            with staged(self._warmup_stage()):
                output = self.recorder.warm_up(function)
            footprint = self.recorder.footprint()
            copies = self.outputs.prepare(output)
            done += 1
            if after_warmup is not None:
                after_warmup()
            if self._warmups is None and wanted == 1 and footprint > before:
                log.info("a warm-up loaded something new; warming up once more")
                wanted = 2
        if not done:  # the caller switched warm-ups off: the buffers still need to know the output
            with staged(self._warmup_stage()):
                copies = self.outputs.prepare(self.recorder.shape_of(function))
            if after_warmup is not None:
                after_warmup()
        return copies, done, footprint

    @abstractmethod
    def _warmup_stage(self) -> Stage: ...

    @abstractmethod
    def _record(self, function: Callable[[], Any]) -> Recorded: ...

    def replay(self, key: ShapeKey) -> Stored:
        """Runs the recording of ``key``; the result is overwritten by the next replay.

        Raises:
            BucketError: if it was not recorded, or for a raw size.
            PoolBusyError: if the pool is in use.
        """
        artifact = self._artifacts[require_key(key)]
        self.pool.claim(f"a replay of {key}")
        try:
            for step in artifact.steps:
                step.replay()
        finally:
            self.pool.release()
        return artifact.output

    def artifact(self, key: ShapeKey) -> Artifact:
        """The recording of ``key``."""
        return self._artifacts[require_key(key)]

    def drop(self, key: ShapeKey) -> None:
        """Forgets one recording; others are unaffected (B39)."""
        artifact = self._artifacts.pop(key, None)
        if artifact is not None:
            self.drops += 1
            self.recorder.synchronize()
            _close(artifact)

    def close(self) -> None:
        """Forgets every recording and output buffer."""
        for key in list(self._artifacts):
            self.drop(key)
        self.outputs = OutputBuffers()


def _close(artifact: Artifact) -> None:
    for step in artifact.steps:
        step.close()


class Full(Backend):
    """One recording per key; breaks are refused unless the caller has them recorded inline."""

    name = "full"
    may_break = False

    def _warmup_stage(self) -> Stage:
        return Inline() if self._inline_breaks else Refuse()

    def _record(self, function: Callable[[], Any]) -> Recorded:
        with self.recorder.take(self.pool) as take:
            with staged(self._warmup_stage()):
                output = self.outputs.store(function())
            return [take.cut()], output, take.seconds


class Breakable(Backend):
    """Segments with eager breaks between: whatever is marked as a break runs live."""

    name = "breakable"
    may_break = True

    def _warmup_stage(self) -> Stage:
        return Aside()

    def _record(self, function: Callable[[], Any]) -> Recorded:
        split: Split | None = None
        try:
            with self.recorder.take(self.pool) as take:
                split = Split(take)
                with staged(split):
                    output = self.outputs.store(function())
                split.finish()
                return split.steps, output, take.seconds
        except BaseException:
            for step in split.steps if split is not None else []:
                step.close()
            raise


BACKENDS: dict[str, type[Backend]] = {"full": Full, "breakable": Breakable}
MODES = ("full", "breakable", "eager")


def check_backend(name: str) -> str:
    """``name`` if it is a backend.

    Raises:
        ToggleError: otherwise, listing the good ones.
    """
    if name not in MODES:
        raise ToggleError(f"backend {name!r} is unknown; good values: {', '.join(MODES)}")
    return name
