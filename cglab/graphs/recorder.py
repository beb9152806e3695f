"""The small interface behind which device work is recorded: ``cuda`` on a GPU, ``tape`` on a CPU.

A recorder starts a ``Take``; a take is cut into ``Segment``s; a segment is replayed. Backends are written
against this and know no device.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cglab.errors import PoolBusyError
from cglab.graphs.graph_nodes import GraphNode

Result = TypeVar("Result")


class Segment(Protocol):
    """One recorded stretch of device work."""

    @property
    def nodes(self) -> int | None:
        """Operations (tape) or graph nodes (cuda); None where the driver cannot be asked."""
        ...

    def replay(self) -> None:
        """Runs the recorded work over the same memory."""
        ...

    def operations(self) -> list[str]:
        """What was recorded, in order; empty where the recorder cannot list it."""
        ...

    def graph(self) -> list[GraphNode]:
        """The same as nodes with edges, numbered from 0."""
        ...

    def close(self) -> None:
        """Gives back what the segment holds."""
        ...


@dataclass(slots=True)
class TakeSeconds:
    """Where a recording's time went, of all its segments together; what is left of it is the recording itself.

    Attributes:
        begin, end: of the capture, by the driver.
        instantiate: from the recorded graph to one that can be launched.
    """

    begin: float = 0.0
    end: float = 0.0
    instantiate: float = 0.0


class Take(Protocol):
    """A recording that is under way."""

    @property
    def seconds(self) -> TakeSeconds:
        """What the segments so far took of the driver; nothing where recording has no driver."""
        ...

    def cut(self) -> Segment:
        """Ends the running segment and returns it; work is no longer recorded."""
        ...

    def settle(self, segment: Segment) -> None:
        """Makes the results of a segment real before a break reads them: a stream capture only records."""
        ...

    def resume(self) -> None:
        """Starts the next segment in the same pool."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """Entered around every replay of a break of this take."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it, for a pool intermediate; ``tensor`` itself for anything else."""
        ...


class Pool(ABC):
    """Memory that the recordings of one group share: runners that never hold each other's outputs across a replay.

    One user at a time: a replay inside a replay, or with borrowed memory still alive, would overwrite what its
    caller reads (P59, P60).

    Attributes:
        turn: held by a thread from the load of a step to its trimmed result; other threads wait.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._user: str | None = None
        self._borrowed: list[weakref.ref[Tensor]] = []

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes that the pool holds."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates in the pool; the block returns to the pool with the tensor."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back once no recording holds it."""

    def require_free(self, user: str) -> None:
        """Refuses ``user`` inside a capture or replay, before it touches inputs that are shared.

        Raises:
            PoolBusyError: if the pool is in use.
        """
        if self._user is not None:
            raise PoolBusyError(
                f"{user} would run inside {self._user}, which uses the same graph pool; "
                "give runners that call each other a pool each (another group)"
            )

    @contextmanager
    def in_use(self, user: str) -> Iterator[None]:
        """Marks the pool as used by one capture or replay.

        Raises:
            PoolBusyError: if it is in use already, or borrowed memory is alive.
        """
        self.claim(user)
        try:
            yield
        finally:
            self.release()

    def claim(self, user: str) -> None:
        """What ``in_use`` begins with, for a caller that cannot afford a context: ``release`` must follow.

        Raises:
            PoolBusyError: if it is in use already, or borrowed memory is alive.
        """
        self.require_free(user)
        self._borrowed = [key for key in self._borrowed if key() is not None]
        if self._borrowed:
            raise PoolBusyError(
                f"{user}: {len(self._borrowed)} tensor(s) borrowed from the graph pool are still alive "
                "and would be overwritten; drop or clone them first"
            )
        self._user = user

    def release(self) -> None:
        """The pool is free again."""
        self._user = None

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the pool for eager work between replays; it must be dropped before the next one (P60).

        Raises:
            PoolBusyError: while a capture or replay runs.
        """
        with self.in_use("a borrow"):
            tensor = self.empty(shape, dtype)
        self._borrowed.append(weakref.ref(tensor))
        return tensor


class Recorder(Protocol):
    """Records on one device."""

    name: str
    device: torch.device

    def new_pool(self) -> Pool:
        """A pool for one group of runners."""
        ...

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Runs ``function`` once where the capture will run, so that handles and workspaces exist (B01, B02)."""
        ...

    def take(self, pool: Pool) -> AbstractContextManager[Take]:
        """Starts recording; on an error everything is undone and a ``CaptureError`` tells where."""
        ...

    def shape_of(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returns, for a caller that switched warm-ups off: runs apart from the capture."""
        ...

    def footprint(self) -> int:
        """Bytes of the device that are in use outside of the allocator: handles, modules, workspaces."""
        ...

    def synchronize(self) -> None:
        """Waits for the device."""
        ...


def seen_alike(alias: Tensor, tensor: Tensor) -> Tensor:
    """``alias`` of the memory of ``tensor``, lazily conjugated or negated where ``tensor`` is."""
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


@contextmanager
def explained(explain: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Replaces an error of a warm-up or recording by what ``explain`` makes of it."""
    try:
        yield
    except BaseException as error:
        told = explain(error)
        if told is error:
            raise
        raise told from error
