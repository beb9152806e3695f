"""The cuda recorder's memory: a private pool of the caching allocator."""

from __future__ import annotations

import ctypes
import gc
import warnings
from typing import Any

import torch
from torch import Tensor

from cglab.graphs.recorder import Pool


class CudaPool(Pool):
    """A private memory pool of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._handles: list[Any] = []
        self._anchor: torch.cuda.CUDAGraph | None = None
        self.renew()
        self._ranges: list[tuple[int, int]] = []
        self._ranges_at = -1

    @property
    def handle(self) -> Any:
        """The allocator's name of the pool, for the next capture."""
        return self._handles[-1]

    def renew(self) -> None:
        """Goes on under another handle; what was recorded under earlier ones stays.

        A capture that could not be ended leaves the allocator of pinned memory recording to its handle for good.
        """
        if self._anchor is not None:
            self._anchor.reset()
        self._handles.append(torch.cuda.graph_pool_handle())
        self._anchor = self._captured_nothing()

    def _captured_nothing(self) -> torch.cuda.CUDAGraph:
        """An empty graph of the pool, kept for as long as the pool lives.

        The allocators of device memory and of pinned memory refuse to capture into a pool whose last graph is gone.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with (
            warnings.catch_warnings(),
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.Stream()),
        ):
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            graph.capture_end()
        return graph

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pool's segments, from the allocator's own snapshot."""
        return sum(end - start for start, end in self._segments())

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is the pool's."""
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < end for start, end in self._segments())

    def _segments(self) -> list[tuple[int, int]]:
        """Address ranges of the pool; a snapshot is slow, so it is the pool's only, and of changed memory only."""
        stats = torch._C._cuda_memoryStats(self.device.index or 0)
        changes = stats["segment"]["all"]["allocated"] + stats["segment"]["all"]["freed"]
        if changes != self._ranges_at:
            self._ranges = [
                (segment["address"], segment["address"] + segment["total_size"])
                for handle in self._handles
                for segment in snapshot(handle)
            ]
            self._ranges_at = changes
        return self._ranges

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates in the pool."""
        index = self.device.index or 0
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        finally:
            torch._C._cuda_endAllocateToPool(index, self.handle)
            torch._C._cuda_releasePool(index, self.handle)

    def close(self) -> None:
        """Returns the pool's segments to the driver once no recording holds them."""
        if self._anchor is not None:
            self._anchor.reset()
            self._anchor = None
        gc.collect()
        torch.cuda.empty_cache()


def snapshot(handle: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of one pool, as ``torch.cuda.memory_snapshot`` tells them.

    torch (2.11 at least, pytorch#196366) gives back a reference to each number of the handle that it never took. From
    pool 257 on the number is freed under its owners, and a later capture reads whatever object came to lie there: a
    reference for torch to give back is taken here. Where torch is mended, the two numbers of a pool outlive it.
    """
    for number in handle:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(handle)
    return segments
