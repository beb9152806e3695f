"""The tape's memory: pool blocks that Python's own references keep and free.

A block is a piece of a chunk; the storage of the tensor that is handed to the model keeps it, and when the last
reference goes the block returns to the free list, as a caching allocator would have it. Recordings hold *aliases*
over the whole chunk, which keep no block: intermediates of different buckets therefore share memory for real.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right, insort

import torch
from torch import Tensor

from cglab.graphs.recorder import Pool, seen_alike

ALIGNMENT = 64
CHUNK_BYTES = 1 << 20


class Chunk:
    """One fixed stretch of host memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._raw = (ctypes.c_char * (size + ALIGNMENT))()
        self._shift = -ctypes.addressof(self._raw) % ALIGNMENT
        self.address = ctypes.addressof(self._raw) + self._shift
        self.storage = torch.frombuffer(
            self._raw, dtype=torch.uint8, count=size, offset=self._shift
        ).untyped_storage()
        self._base = self.storage.data_ptr()

    def block(self, offset: int, size: int) -> ctypes.Array[ctypes.c_char]:
        """A buffer object over part of the chunk; its lifetime is the block's."""
        return (ctypes.c_char * size).from_buffer(self._raw, self._shift + offset)

    def alias(self, tensor: Tensor) -> Tensor:
        """The same elements as ``tensor`` without owning its block."""
        offset = tensor.data_ptr() - self._base
        place = self.storage, offset // tensor.element_size(), tensor.shape, tensor.stride()
        with torch.inference_mode(mode=False):  # replays write into it outside of that mode too
            return seen_alike(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place), tensor)


class TapePool(Pool):
    """A growing set of chunks with a best-fit free list.

    Args:
        poison: fill freed blocks with 0xFF (NaN, -1), so that a read of freed memory shows.
        limit: most bytes that the chunks may take, as a device has only so many; None for no limit.

    Attributes:
        used_bytes: bytes in blocks that are alive.
        peak_bytes: most bytes ever alive at once.
    """

    def __init__(self, *, poison: bool = False, limit: int | None = None) -> None:
        super().__init__()
        self.poison, self.limit = poison, limit
        self.used_bytes = 0
        self.peak_bytes = 0
        self._chunks: list[Chunk] = []  # by address
        self._free: list[tuple[int, int]] = []  # (address, size), by address, neighbours merged

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.size for chunk in self._chunks)

    def chunk_of(self, tensor: Tensor) -> Chunk | None:
        """The chunk that holds ``tensor``, or None for memory of somebody else."""
        address = tensor.untyped_storage().data_ptr()
        index = bisect_right(self._chunks, address, key=lambda chunk: chunk.address) - 1
        if index < 0 or address >= self._chunks[index].address + self._chunks[index].size:
            return None
        return self._chunks[index]

    def empty_strided(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in a block of its own, contents as they are. Shapes without elements take no block."""
        if 0 in shape:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        size = -(-span * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        chunk, address = self._take(size)
        block = chunk.block(address - chunk.address, size)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        weakref.finalize(block, self._give, address, size).atexit = False
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        with torch.inference_mode(mode=False):
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in a block of its own."""
        stride, step = [], 1
        for n in reversed(shape):
            stride.append(step)
            step *= max(n, 1)
        return self.empty_strided(shape, tuple(reversed(stride)), dtype)

    def _take(self, size: int) -> tuple[Chunk, int]:
        fits = [(free, address) for address, free in self._free if free >= size]
        if not fits:
            wanted = max(size, CHUNK_BYTES)
            if self.limit is not None and self.reserved_bytes + wanted > self.limit:
                raise MemoryError(
                    f"{wanted} bytes more than {self.reserved_bytes} are above the pool's limit of {self.limit} bytes"
                )
            chunk = Chunk(wanted)
            insort(self._chunks, chunk, key=lambda c: c.address)
            insort(self._free, (chunk.address, chunk.size))
            fits = [(chunk.size, chunk.address)]
        free, address = min(fits)
        self._free.remove((address, free))
        if free > size:
            insort(self._free, (address + size, free - size))
        index = bisect_right(self._chunks, address, key=lambda chunk: chunk.address) - 1
        return self._chunks[index], address

    def _give(self, address: int, size: int) -> None:
        if self.poison:
            ctypes.memset(address, 0xFF, size)
        self.used_bytes -= size
        index = bisect_right(self._free, (address, 0))
        starts = {chunk.address for chunk in self._chunks}
        if (
            index < len(self._free)
            and self._free[index][0] == address + size
            and address + size not in starts
        ):
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == address and address not in starts:
            address, before = self._free.pop(index - 1)
            size += before
        insort(self._free, (address, size))

    def close(self) -> None:
        """Drops every chunk that no live block needs."""
        free = dict(self._free)
        for chunk in [c for c in self._chunks if free.get(c.address) == c.size]:
            self._chunks.remove(chunk)
            self._free.remove((chunk.address, chunk.size))
