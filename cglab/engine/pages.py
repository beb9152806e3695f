"""KV pages with reference counts, and the prefix cache that is made of them.

A page is free, held by one or more requests, or cached: full of computed tokens and held by nobody. A full page
is published under the page before it and its own tokens, so that the published pages form a radix tree whose
edges are pages of tokens (as in SGLang's RadixAttention with pages); a request with the same first tokens holds
the same pages. Where a draft keeps something of a token that depends on the token after it, a page is known by the
first token of the next one too, as SGLang's tree then is one of pairs of tokens. Pages leave the cache least recently
used first, for host memory if there is some. Requests hold whole chains from the root and release them tail first, so
the page that was released first is always a leaf and eviction needs no search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from cglab.engine.allocator import FreeList
from cglab.engine.host_pages import START, HostPages, digest_after
from cglab.errors import AccountingError, InputError

ROOT: Final = 0  # what the first page of a chain comes after; page 0 is reserved, so it is never a page


class PageStore:
    """Pages 1 to ``count - 1``, or as many further on; page 0 is reserved for padding.

    Args:
        count: pages in all, the reserved one included.
        page_size: tokens of a page.
        lane: see ``FreeList``.
        overlap: tokens of the next page that the contents of a page depend on.
        host: where evicted pages go; None forgets them.
    """

    def __init__(
        self, count: int, page_size: int, lane: int = 0, overlap: int = 0, host: HostPages | None = None
    ) -> None:
        self.page_size, self.overlap, self.host = page_size, overlap, host
        self._free = FreeList(count, "KV pages", lane)
        self._holders: dict[int, int] = {}  # held page: by how many
        self._published: dict[tuple[int, tuple[int, ...]], int] = {}  # page before and tokens: page
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # the other way round
        self._digests: dict[int, bytes] = {ROOT: START}  # of published pages, where evicted ones are kept
        self._cached: dict[int, None] = {}  # published and held by nobody, least recently used first

    @property
    def total(self) -> int:
        """Pages beside the reserved one; always ``free + held + cached``."""
        return self._free.total

    @property
    def free(self) -> int:
        """Pages with nothing worth keeping."""
        return self._free.free

    @property
    def held(self) -> int:
        """Pages of at least one request."""
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Pages that nobody holds but whose tokens may be asked for again."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and cached ones after eviction."""
        return self.free + self.cached

    def take(self, count: int) -> list[int]:
        """Takes pages for one holder; evicts cached ones if too few are free.

        Raises:
            InputError: if fewer are available; ask ``available`` before.
        """
        if count > self.available:
            raise InputError(
                f"{count} KV pages wanted, {self.available} of {self.total} available; release some before"
            )
        self.evict(count - self.free)
        pages = self._free.take(count)
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def take_back(self, digests: Sequence[bytes], tokens: Sequence[int], known: Sequence[int]) -> list[int]:
        """Takes and publishes pages to which the host's are copied back.

        Args:
            digests: what ``match_host`` found.
            tokens: as ``match`` takes them.
            known: what it found, held.
        """
        if self.host is None or not digests:
            return []
        self.host.reserve(digests)  # what is evicted for them must not take their place
        pages = self.take(len(digests))
        before = known[-1] if known else ROOT
        for index, (digest, page) in enumerate(zip(digests, pages, strict=True), len(known)):
            before = self.publish(page, before, self.known_by(tokens, index * self.page_size))
            self.host.restore(digest, page)
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Published pages of the longest known prefix, in order; they are not held by that.

        Args:
            tokens: those of a page and of its overlap are compared.
        """
        pages: list[int] = []
        for start in range(0, len(tokens), self.page_size):
            key = (pages[-1] if pages else ROOT, self.known_by(tokens, start))
            if key not in self._published:
                break
            pages.append(self._published[key])
        return pages

    def match_host(self, tokens: Sequence[int], known: Sequence[int]) -> list[bytes]:
        """Digests of the pages in host memory that continue a prefix, in order.

        Args:
            tokens: as ``match`` takes them.
            known: what it found.
        """
        found: list[bytes] = []
        if self.host is None:
            return found
        digest = self._digests[known[-1] if known else ROOT]
        for start in range(len(known) * self.page_size, len(tokens), self.page_size):
            digest = digest_after(digest, self.known_by(tokens, start))
            if digest not in self.host:
                break
            found.append(digest)
        return found

    def known_by(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        """The tokens by which the page that begins at ``start`` is known."""
        return tuple(tokens[start : start + self.page_size + self.overlap])

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page of a chain that ``match`` found."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def publish(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Offers a held, full and computed page to the prefix cache.

        Args:
            page: the page, never to be written again.
            before: the published page of the tokens before it, or ``ROOT``.
            tokens: the ``page_size`` token ids in it, and those of its overlap.

        Returns:
            The page to hold from now on: another one if these tokens were published in the meantime, and then
            ``page`` is released.
        """
        key = (before, tuple(tokens))
        known = self._published.setdefault(key, page)
        if known == page:
            self._keys[page] = key
            if self.host is not None:
                self._digests[page] = digest_after(self._digests[before], tokens)
        else:
            self.hold([known])
            self.release([page])
        return known

    def release(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page of a chain, tail first.

        Raises:
            InputError: if a page is not held.
        """
        for page in reversed(pages):
            if page not in self._holders:
                raise InputError(f"KV page {page} is not in use")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.give([page])

    def evict(self, count: int) -> None:
        """Takes up to ``count`` cached pages out of the cache, least recently used first."""
        for page in list(islice(self._cached, max(count, 0))):
            del self._cached[page], self._published[self._keys.pop(page)]
            self._free.give([page])
            if self.host is not None:
                self.host.keep(self._digests.pop(page), page)

    def forget(self) -> None:
        """Forgets every page that nobody holds, in host memory too."""
        self.evict(self.cached)
        if self.host is not None:
            self.host.clear()

    def check(self, holders: Mapping[int, int]) -> None:
        """Compares the books with what requests say.

        Args:
            holders: by how many requests each page is held.

        Raises:
            AccountingError: if a page leaked, is shared without being published, or is in two places.
        """
        if dict(holders) != self._holders:
            raise AccountingError(f"pages are held as {self._holders}, requests say {dict(holders)}")
        if self._free.used != self._holders.keys() | self._cached.keys():
            raise AccountingError(f"pages {self._free.used} are in use, but neither held nor cached")
        if self.host is not None:
            self.host.check()
            if self._digests.keys() != self._keys.keys() | {ROOT}:
                raise AccountingError("published pages and pages with a digest are not the same")
        if self.free + self.held + self.cached != self.total:
            raise AccountingError(f"{self.free} free, {self.held} held, {self.cached} cached of {self.total}")
        private = self._holders.keys() - self._keys.keys()
        if shared := [page for page in private if self._holders[page] > 1]:
            raise AccountingError(f"pages {shared} have two owners and are still written")
        if {key: page for page, key in self._keys.items()} != self._published:
            raise AccountingError("the prefix cache knows pages by two names")
        if lost := [page for page, (before, _) in self._keys.items() if before and before not in self._keys]:
            raise AccountingError(f"cached pages {lost} lost the page before them and can never be found")
