"""Which pages of prefixes lie in host memory, and what must be copied: books without a device (S3).

A page that leaves the prefix cache on the device is kept here, known by a digest of all tokens up to its end, so that
it is found whether the pages before it are here or on the device. A hit takes a page of the device, to which the host's
is copied back; the host's stays until room is wanted, so that it need not be written again. Least recently used pages
go first: tails are evicted before what they follow, and so are dropped before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from cglab.errors import AccountingError

START = b""
"""The digest of no tokens."""


def digest_after(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page.

    Args:
        before: that of the page before it, or ``START``.
        tokens: by which the page is known.
    """
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Transfers(NamedTuple):
    """What is to be copied before the next step: first all that is kept, then all that comes back.

    Attributes:
        kept: pages of the device and of the host that they go to, in order.
        restored: pages of the host and of the device that they go to; none of the host's is written by ``kept`` after
            it was read.
    """

    kept: list[tuple[int, int]]
    restored: list[tuple[int, int]]


class HostPages:
    """Pages 0 to ``count - 1`` of host memory.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pages: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(count))
        self._transfers = Transfers([], [])
        self._awaited: set[bytes] = set()  # restored by transfers that were not taken yet

    @property
    def used(self) -> int:
        """Pages with a prefix in them."""
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def keep(self, digest: bytes, page: int) -> None:
        """Takes a page that leaves the device; not where all of this memory is to be restored in the same step.

        Args:
            digest: of its prefix.
            page: of the device, read before the next step.
        """
        if digest in self._pages:
            self._touch(digest)
            return
        if not self._free:
            oldest = next((known for known in self._pages if known not in self._awaited), None)
            if oldest is None:
                return
            self._free.append(self._pages.pop(oldest))
        self._pages[digest] = self._free.pop()
        self._transfers.kept.append((page, self._pages[digest]))

    def reserve(self, digests: Sequence[bytes]) -> None:
        """Makes sure that pages are still here when they are restored."""
        self._awaited.update(digests)

    def restore(self, digest: bytes, page: int) -> None:
        """Has a reserved page copied to one of the device before the next step."""
        self._touch(digest)
        self._transfers.restored.append((self._pages[digest], page))

    def take(self) -> Transfers:
        """What is to be copied now; it is nobody else's business any more."""
        transfers, self._transfers = self._transfers, Transfers([], [])
        self._awaited.clear()
        return transfers

    def clear(self) -> None:
        """Forgets every prefix, and copies that were not made yet."""
        self._free += self._pages.values()
        self._pages.clear()
        self.take()

    def check(self) -> None:
        """Compares the books with each other.

        Raises:
            AccountingError: if a page is lost, or holds two prefixes.
        """
        pages = sorted([*self._free, *self._pages.values()])
        if pages != list(range(self.count)):
            raise AccountingError(f"host pages are {pages}, there are 0 to {self.count - 1}, each once")

    def _touch(self, digest: bytes) -> None:
        self._pages[digest] = self._pages.pop(digest)
