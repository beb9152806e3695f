"""The cuda recorder: ``torch.cuda.CUDAGraph`` behind the recorder interface.

Captures run on one side stream of the recorder, in thread-local error mode, so that another thread's queries do not
invalidate them (B11). A capture that fails is undone to the last piece: stream, allocator, generator and pool.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cglab.errors import CaptureError, ClosedError, InputError
from cglab.graphs import faults
from cglab.graphs.cuda_errors import explain
from cglab.graphs.cuda_nodes import count_nodes, nodes_of_graph
from cglab.graphs.cuda_pool import CudaPool
from cglab.graphs.graph_nodes import GraphNode
from cglab.graphs.recorder import Pool, Result, Segment, TakeSeconds, explained, seen_alike
from cglab.graphs.streams import StreamWatch, install

ERROR_MODE = "thread_local"


class CudaSegment:
    """One graph, with its executable or without: the first replay makes what is missing."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int | None) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.nodes = nodes

    @property
    def address(self) -> int:
        """Of the recorded ``cudaGraph_t``, which is kept beside its executable."""
        if self._graph is None:
            raise ClosedError("the segment was closed, and its graph destroyed; capture it again")
        return self._graph.raw_cuda_graph()

    def replay(self) -> None:
        """Launches the graph on the current stream; an empty segment between two breaks launches nothing."""
        if self._graph is not None and self.nodes != 0:
            self._graph.replay()

    def operations(self) -> list[str]:
        """The number of nodes; kernel names are in a trace."""
        return [f"graph of {self.nodes if self.nodes is not None else '?'} nodes"]

    def graph(self) -> list[GraphNode]:
        """The driver's nodes; the segment as one where the driver's Python bindings are not installed."""
        told = nodes_of_graph(self.address)
        return [GraphNode(0, "graph", self.operations()[0])] if told is None else told

    def close(self) -> None:
        """Destroys the graph."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = None


class CudaTake:
    """A recording under way on the recorder's stream; see ``recorder.Take``."""

    def __init__(self, pool: CudaPool, watch: StreamWatch, *, instantiate: bool = True) -> None:
        self.pool = pool
        self.seconds = TakeSeconds()
        self._watch, self._instantiate = watch, instantiate
        self._graph: torch.cuda.CUDAGraph | None = None
        self.invalidated = False

    def resume(self) -> None:
        """Starts the next segment, after side streams that a break left open have been joined (B08)."""
        self._watch.join()
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self.pool.handle, capture_error_mode=ERROR_MODE)
        self.seconds.begin += time.perf_counter() - started
        self._graph = graph
        self._watch.recording = True

    def cut(self) -> CudaSegment:
        """Ends the running segment."""
        graph = self._graph
        if graph is None:
            raise CaptureError("no segment is being recorded")
        self._watch.join()
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            graph.capture_end()
        self._graph = None
        self._watch.recording = False
        nodes = count_nodes(graph)
        ended = time.perf_counter()
        if nodes != 0 and self._instantiate:
            graph.instantiate()
        self.seconds.end += ended - started
        self.seconds.instantiate += time.perf_counter() - ended
        return CudaSegment(graph, nodes)

    def settle(self, segment: Segment) -> None:
        """Runs the segment: until now its results are whatever the pool held, and a break may index with them."""
        segment.replay()

    def alias(self, tensor: Tensor) -> Tensor:
        """Pool memory without its block; anything else as it is, empty and host tensors too (P52)."""
        if not tensor.is_cuda or not tensor.numel() or not self.pool.holds(tensor):
            return tensor.detach()
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
        )
        bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return seen_alike(bare.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()), tensor)

    @staticmethod
    @contextmanager
    def guard() -> Iterator[None]:
        """Around a break at replay: side streams that it leaves open are joined to the current one (B08)."""
        watch = StreamWatch(torch.cuda.current_stream())
        with watch.watching():
            yield
        watch.join()

    def abandon(self) -> None:
        """Ends a failed segment, whatever state it is in."""
        graph, self._graph = self._graph, None
        self._watch.recording = False
        if graph is None:
            return
        index = self.pool.device.index or 0
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:  # the capture was invalidated: the allocators were left redirecting to the pool
            self.invalidated = True
            _invalidated.append(graph)
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with contextlib.suppress(RuntimeError):
                    undo(index, self.pool.handle)


_invalidated: list[torch.cuda.CUDAGraph] = []
"""The allocator of pinned memory goes on asking a graph that could not be ended whether it records."""

_capture_streams: dict[torch.device, torch.cuda.Stream] = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one capture stream of a device: libraries keep a workspace for each stream, 32 MB of it for cuBLAS."""
    if device not in _capture_streams:
        _capture_streams[device] = torch.cuda.Stream(device)
    return _capture_streams[device]


class CudaRecorder:
    """Records on one GPU, all captures on that GPU's capture stream.

    Args:
        device: the GPU.
        instantiate: make each graph's executable at once; otherwise its first replay does.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, instantiate: bool = True) -> None:
        self._instantiate = instantiate
        self.device = torch.device(
            "cuda", device.index if device.index is not None else torch.cuda.current_device()
        )
        self.stream = capture_stream(self.device)
        install()

    def new_pool(self) -> CudaPool:
        """A private pool."""
        return CudaPool(self.device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch.no_grad():
                yield
            torch.cuda.current_stream().wait_stream(self.stream)

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Runs the function on the capture stream (B02).

        Nothing of it is left running, not even where it fails: what it launched reads buffers that the next capture
        resets on another stream.
        """
        with explained(explain), self._on_stream():
            try:
                result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.synchronize()
                raise
            self.synchronize()
        return result

    def shape_of(self, function: Callable[[], Result]) -> Result:
        """One run on another stream, so that it warms nothing up for the capture."""
        with explained(explain), torch.no_grad():
            return function()

    @contextmanager
    def take(self, pool: Pool) -> Iterator[CudaTake]:
        """Records what runs inside."""
        if not isinstance(pool, CudaPool):
            raise InputError(f"the cuda recorder needs a pool of its own kind, not a {type(pool).__name__}")
        watch = StreamWatch(self.stream)
        take = CudaTake(pool, watch, instantiate=self._instantiate)
        self.synchronize()
        try:
            with (
                explained(lambda error: explain(error, watch.foreign)),
                self._on_stream(),
                watch.watching(),
                _fault_mode(),
            ):
                try:
                    take.resume()
                    yield take
                except BaseException:
                    take.abandon()
                    raise
        except BaseException:
            heal(self.stream)
            if take.invalidated:
                pool.renew()
            raise

    def footprint(self) -> int:
        """Driver memory in use that the caching allocator does not account for."""
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch._C._cuda_memoryStats(self.device.index)
        return int(total - free - stats["reserved_bytes"]["all"]["current"])

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.device)


def heal(stream: torch.cuda.Stream) -> None:
    """Brings the default generator out of capture mode after a capture that could not be ended.

    The generator leaves that mode only at the end of a capture that succeeds, so an empty one is made.
    """
    with contextlib.suppress(RuntimeError), warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.simplefilter("ignore")
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode=ERROR_MODE)
        graph.capture_end()
        graph.reset()
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(stream.device)


class _FaultMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.cuda.is_current_stream_capturing() and any(
            isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_iter((args, kwargs))
        ):
            faults.reach(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _fault_mode() -> Iterator[None]:
    if not faults.is_planned():
        yield
        return
    with _FaultMode():
        yield
