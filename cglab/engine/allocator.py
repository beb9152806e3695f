"""Who owns which request row and which KV pages. Host bookkeeping only; row 0 and page 0 are never given out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from cglab.errors import InputError


class FreeList:
    """Indices 1 to ``count - 1``, or as many further on; index 0 is reserved for padding.

    Args:
        count: how many there are, the reserved one included.
        what: for messages.
        lane: how many lists of this size come before, each with indices of its own.
    """

    def __init__(self, count: int, what: str, lane: int = 0) -> None:
        self.what = what
        before = lane * (count - 1)
        self._free = list(range(before + 1, before + count))  # a heap
        self._total = count - 1
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    @property
    def total(self) -> int:
        """How many there are beside the reserved one."""
        return self._total

    @property
    def used(self) -> frozenset[int]:
        """Those that were taken and not given back."""
        return frozenset(self._used)

    def take(self, count: int = 1) -> list[int]:
        """Takes ``count`` indices, smallest first.

        Raises:
            InputError: if fewer are free; ask ``free`` before.
        """
        if count > len(self._free):
            raise InputError(f"{count} {self.what} wanted, {len(self._free)} of {self._total} free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(taken)
        return taken

    def give(self, indices: Iterable[int]) -> None:
        """Returns indices that were taken.

        Raises:
            InputError: if one was not: giving twice would hand the same memory to two requests.
        """
        for index in indices:
            if index not in self._used:
                raise InputError(f"{self.what} {index} is not in use")
            self._used.remove(index)
            heapq.heappush(self._free, index)
