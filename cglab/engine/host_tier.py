"""Host memory behind the prefix cache: what is evicted is copied there, and a hit comes back layer by layer (S3).

Copies are made between a plan and its step, never inside a recording. What leaves is copied on the stream of the steps,
before one of them writes its pages anew. What comes back is copied layer by layer on a stream of its own, and the group
of runners expects it: its next step waits until the last layer is there, as a replay has no waits within (P80). A CPU
has no other stream, so there a layer is copied when it is waited for. The host's memory is page after page, so that one
page of all layers is one copy; it is pinned where the device is a GPU (P52).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from cglab.engine.host_pages import HostPages
from cglab.errors import InputError, PoolBusyError
from cglab.graphs.breaks import capturing
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup


class LayerLoads:
    """Layers that are on their way; what a group expects.

    Args:
        layers: copy one layer each, in order.
        stream: where they are copied from now on; None copies each when it is waited for.
    """

    def __init__(self, layers: Iterator[Callable[[], None]], stream: torch.cuda.Stream | None) -> None:
        self._left: deque[Callable[[], object]] = deque()
        if stream is None:
            self._left.extend(layers)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for copy in layers:
                copy()
                self._left.append(stream.record_event().wait)

    def wait(self) -> None:
        """Makes what is queued from now on come after every layer."""
        while self._left:
            self._left[0]()
            self._left.popleft()


class HostTier:
    """Pages of host memory for all caches on the same page tables.

    Args:
        caches: the target's and, where a draft has one of its own, the draft's.
        group: whose next step waits for what comes back.
        pages: how many.

    Attributes:
        books: which prefix lies where, kept by the scheduler.
        copied: pages that have gone to host memory and come back, so far.

    Raises:
        InputError: for no page, or a cache with sliding windows, which keeps no prefix.
    """

    def __init__(self, caches: Sequence[PagedKV], group: GraphGroup, pages: int) -> None:
        if pages < 1 or any(kv.sliding is not None for kv in caches):
            raise InputError(
                f"{pages} pages of host memory, sliding windows: {any(kv.sliding is not None for kv in caches)}; "
                "give at least 1 page, and only to a model whose prefixes are kept"
            )
        self.group, self.books, self.page_size = group, HostPages(pages), caches[0].page_size
        self.device, on_gpu = caches[0].device, caches[0].device.type == "cuda"
        self.copied = {"kept": 0, "restored": 0}
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._kept: torch.cuda.Event | None = None
        tensors = [tensor for kv in caches for tensor in (kv.full.keys, kv.full.values)]
        self._pairs = [
            (tensor, torch.empty((pages, len(tensor), self.page_size, *tensor.shape[2:]), dtype=tensor.dtype,
                                 pin_memory=on_gpu))
            for tensor in tensors
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Host memory that is taken."""
        return sum(host.nbytes for _, host in self._pairs)

    @torch.no_grad()
    def move(self) -> None:
        """Copies what the planned step needs: what leaves now, what comes back before the group's next step.

        Raises:
            PoolBusyError: inside a capture, which would repeat the copies at every replay.
        """
        transfers = self.books.take()
        if not any(transfers):
            return
        if capturing():
            raise PoolBusyError("pages would be copied inside a capture; move them before its step")
        self.group.settle()  # what came back before is read from pages that are written now
        for page, place in transfers.kept:
            for device, host in self._pairs:
                own = device[:, page * self.page_size : (page + 1) * self.page_size]
                host[place].copy_(own, non_blocking=True)
        if self._stream is not None and transfers.kept:
            self._kept = torch.cuda.current_stream(self.device).record_event()
        if transfers.restored:
            if self._kept is not None:  # the host reads what the device has written
                self._kept.synchronize()
            self.group.expect(LayerLoads(self._layers(transfers.restored), self._stream))
        self.copied["kept"] += len(transfers.kept)
        self.copied["restored"] += len(transfers.restored)

    def _layers(self, restored: Sequence[tuple[int, int]]) -> Iterator[Callable[[], None]]:
        """Copies of one layer each, of all caches that have it."""
        places, pages = (torch.tensor(column) for column in zip(*restored, strict=True))
        within = torch.arange(self.page_size)
        slots = (pages.unsqueeze(1) * self.page_size + within).flatten()
        for layer in range(max(len(device) for device, _ in self._pairs)):
            held = [pair for pair in self._pairs if layer < len(pair[0])]
            yield partial(
                self._load, [(device[layer], host[:, layer]) for device, host in held], places, slots
            )

    def _load(self, pairs: Sequence[tuple[Tensor, Tensor]], places: Tensor, slots: Tensor) -> None:
        """Copies pages at ``places`` of a layer's host memory to ``slots`` of its cache."""
        there = slots.to(self.device, non_blocking=True)
        for device, host in pairs:
            shape = (len(places), *host.shape[1:])
            staged = torch.empty(shape, dtype=host.dtype, pin_memory=host.is_pinned())
            torch.index_select(host, 0, places, out=staged)
            device.index_copy_(0, there, staged.to(self.device, non_blocking=True).flatten(0, 1))
