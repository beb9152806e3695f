"""An experiment: one graph executable for all buckets of equal topology, as SGLang's executable dedup has it.

A recorded graph is a list of nodes on the host; what takes device memory is its executable. Buckets whose graphs
have the same nodes and edges need only one, which is updated to another bucket's parameters when the bucket
changes (``cudaGraphExecUpdate``). Which graphs are equal is asked of the driver: it refuses an update that it cannot
make. Every bucket must stay recorded (``keep_graph``), and only one bucket of a group can be ready at a time.

It cannot: serve a step that draws from a default generator, whose state only ``CUDAGraph.replay`` moves on; or
several segments, as a breakable recording has them. It is no default path: a switch costs the host an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from cglab.errors import BucketError, CaptureError


class GraphDriver(Protocol):
    """The driver's calls on graphs; ``graph`` is the address of a kept ``cudaGraph_t``."""

    def instantiate(self, graph: int) -> Any:
        """An executable of the graph, with its device memory taken."""
        ...

    def update(self, executable: Any, graph: int) -> str | None:
        """Gives an executable the parameters of another graph; the driver's reason if it refuses."""
        ...

    def launch(self, executable: Any) -> None:
        """Launches on the current stream."""
        ...

    def destroy(self, executable: Any) -> None:
        """Gives an executable back; nothing of it may still run."""
        ...


class CudaGraphDriver:
    """The CUDA runtime, through its Python bindings.

    Raises:
        ImportError: without ``cuda.bindings``.
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime

    def instantiate(self, graph: int) -> Any:
        """An executable, uploaded: only then it has all its device memory.

        Raises:
            CaptureError: if the driver refuses.
        """
        executable = self._checked(
            "cudaGraphInstantiate", self._runtime.cudaGraphInstantiate(self._graph(graph), 0)
        )
        self._checked("cudaGraphUpload", self._runtime.cudaGraphUpload(executable, _stream()))
        return executable

    def update(self, executable: Any, graph: int) -> str | None:
        """None if it was updated, otherwise the name of the driver's reason.

        Raises:
            CaptureError: if the call failed for anything but the update itself.
        """
        error, info = self._runtime.cudaGraphExecUpdate(executable, self._graph(graph))
        if error == self._runtime.cudaError_t.cudaSuccess:
            return None
        if error != self._runtime.cudaError_t.cudaErrorGraphExecUpdateFailure:
            self._checked("cudaGraphExecUpdate", (error,))
        self._runtime.cudaGetLastError()  # a refusal must not be taken for a failure of the next launch
        told = error if info is None else info.result  # some versions hand the reason out on success only
        return str(told.name).removeprefix("cudaGraphExecUpdateError")

    def launch(self, executable: Any) -> None:
        """Launches on the current stream.

        Raises:
            CaptureError: if the driver refuses.
        """
        self._checked("cudaGraphLaunch", self._runtime.cudaGraphLaunch(executable, _stream()))

    def destroy(self, executable: Any) -> None:
        """Gives the executable back.

        Raises:
            CaptureError: if the driver refuses.
        """
        self._checked("cudaGraphExecDestroy", self._runtime.cudaGraphExecDestroy(executable))

    def _graph(self, address: int) -> Any:
        return self._runtime.cudaGraph_t(address)

    def _checked(self, call: str, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise CaptureError(f"{call} failed: {error.name}", advice="use an executable for each bucket")
        return values[0] if values else None


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@dataclass
class Group:
    """Buckets that share one executable.

    Attributes:
        executable: of the driver.
        buckets: in the order in which they joined.
        holds: whose parameters the executable has; None after a refused update, which may have left it half done.
    """

    executable: Any
    buckets: list[int]
    holds: int | None


@dataclass
class SharedExecutables:
    """One executable for each topology among recorded buckets.

    A bucket joins the first group whose executable can be updated to it and back.

    Args:
        graphs: address of each bucket's recorded graph; who made them keeps them alive.
        driver: whose calls are made.

    Attributes:
        groups: in the order of their first bucket.
        refused: why a bucket did not join a group: the driver's reason by bucket and the group's first bucket.
    """

    graphs: Mapping[int, int]
    driver: GraphDriver
    groups: list[Group] = field(init=False, default_factory=list)
    refused: dict[tuple[int, int], str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._of: dict[int, Group] = {}
        try:
            for bucket, graph in self.graphs.items():
                group = next((each for each in self.groups if self._joins(bucket, each)), None)
                if group is None:
                    group = Group(self.driver.instantiate(graph), [], bucket)
                    self.groups.append(group)
                group.buckets.append(bucket)
                self._of[bucket] = group
        except BaseException:
            self.close()
            raise

    def _joins(self, bucket: int, group: Group) -> bool:
        first = group.buckets[0]
        if (reason := self._update(group, bucket)) is None and (reason := self._update(group, first)) is None:
            return True
        self.refused[bucket, first] = reason
        if self._update(group, first):  # nothing leads back, so the group starts anew
            self.driver.destroy(group.executable)
            group.executable, group.holds = self.driver.instantiate(self.graphs[first]), first
        return False

    def _update(self, group: Group, bucket: int) -> str | None:
        reason = self.driver.update(group.executable, self.graphs[bucket])
        group.holds = None if reason else bucket
        return reason

    def group_of(self, bucket: int) -> Group:
        """The group that serves a bucket.

        Raises:
            BucketError: for one that was not recorded.
        """
        if bucket not in self._of:
            raise BucketError(f"bucket {bucket} has no executable; there are {sorted(self._of)}")
        return self._of[bucket]

    def switch(self, bucket: int) -> bool:
        """Makes the bucket's executable hold its parameters; True if it had to be updated.

        Raises:
            BucketError: for a bucket that was not recorded.
            CaptureError: if the driver refuses now what it did when the groups were made.
        """
        group = self.group_of(bucket)
        if group.holds == bucket:
            return False
        if reason := self._update(group, bucket):
            raise CaptureError(
                f"the executable of {group.buckets} cannot be updated to bucket {bucket} any more: {reason}",
                advice="use an executable for each bucket",
            )
        return True

    def launch(self, bucket: int) -> None:
        """Runs a bucket's recording on the current stream, after a switch where one is due; raises as ``switch``."""
        self.switch(bucket)
        self.driver.launch(self.group_of(bucket).executable)

    def __str__(self) -> str:
        told = [f"{len(self.groups)} executables for {len(self.graphs)} buckets"]
        told += [", ".join(map(str, group.buckets)) for group in self.groups]
        reasons = sorted(set(self.refused.values()))
        return "; ".join(told + [f"refused: {', '.join(reasons)}"] * bool(reasons))

    def close(self) -> None:
        """Gives every executable back; the recorded graphs are their maker's."""
        for group in self.groups:
            self.driver.destroy(group.executable)
        self.groups, self._of = [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
