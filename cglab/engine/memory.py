"""What each running request holds: a row of the page table, KV pages, and pages of the sliding-window pool.

All pages of the tokens that a request has are taken when it is admitted, so that a prompt never stops half-way for
want of KV; a page more is taken whenever its tokens outgrow them. Sliding-window layers have a pool of their own:
its pages are taken chunk by chunk, and given back once they lie wholly before the window. A cached prefix would
lack their keys, so there is no prefix reuse with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cglab.engine.allocator import FreeList
from cglab.engine.host_pages import HostPages
from cglab.engine.pages import ROOT, PageStore
from cglab.engine.requests import Request
from cglab.errors import AccountingError, InputError


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of the KV cache, in the terms of ``PagedKV``.

    Attributes:
        pages: KV pages, the reserved one included.
        page_size: tokens of a page.
        rows: request rows, the reserved one included.
        max_context: longest request in tokens.
        window: tokens that a sliding-window layer sees, the query's own included; None without such layers.
        window_pages: pages of their pool, the reserved one included.
        lookahead: positions after its newest token that a decode step of a request writes: drafted tokens.
        lane: which of several equal parts of a cache this is; see ``lanes``.
        overlap: tokens of the next page that what a draft keeps in a page depends on; at most one.

    Raises:
        InputError: if nothing is left beside what is reserved, or a size is not positive.
    """

    pages: int
    page_size: int
    rows: int
    max_context: int
    window: int | None = None
    window_pages: int = 0
    lookahead: int = 0
    lane: int = 0
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.pages < 2 or self.rows < 2:
            raise InputError(
                f"{self.pages} pages and {self.rows} rows leave none beside the reserved ones; "
                "give at least 2 of each"
            )
        if self.page_size < 1 or self.max_context < 1 or (self.window is not None and self.window < 1):
            raise InputError(
                f"page_size {self.page_size}, max_context {self.max_context} and window {self.window} "
                "must be at least 1; give larger ones"
            )
        if self.room < 1:
            raise InputError(
                f"drafts reach {self.lookahead} positions ahead, which leaves no room for a token in a context of "
                f"{self.max_context} on {self.pages - 1} pages; give larger ones, or draft less"
            )

    @classmethod
    def for_requests(
        cls,
        count: int,
        context: int,
        page_size: int,
        *,
        budget: int,
        window: int | None = None,
        tokens: int | None = None,
        lookahead: int = 0,
    ) -> CacheLayout:
        """Sizes with which ``count`` requests of ``context`` tokens run at a time and none gives way.

        Args:
            count: requests.
            context: longest request in tokens.
            page_size: tokens of a page.
            budget: most tokens of one step, all requests together.
            window: tokens that a sliding-window layer sees; None without such layers.
            tokens: room for so many of all requests together instead, so that some may give way.
            lookahead: positions after its newest token that a decode step of a request writes.

        Raises:
            InputError: if there is no request, no context or no window.
        """
        # A step's pages more each, since a request is let in only if all that run can grow.
        reach, grown = -(-(context + lookahead) // page_size), -(-(1 + lookahead) // page_size)
        pages = count * (reach + grown) if tokens is None else -(-tokens // page_size)
        full = cls(pages + 1, page_size, count + 1, context + lookahead, window, lookahead=lookahead)
        if window is None:
            return full
        return replace(full, window_pages=min(full._window_pool(count, budget), full.pages))

    def lanes(self, count: int) -> tuple[CacheLayout, ...]:
        """The same cache in equal parts, of which none hands out what another does: one for each micro-batch.

        Raises:
            InputError: if there are fewer rows or pages than parts.
        """
        rows, pages, windows = ((each - 1) // count for each in (self.rows, self.pages, self.window_pages))
        if min(rows, pages) < 1:
            raise InputError(
                f"{self.rows - 1} requests on {self.pages - 1} pages do not make {count} micro-batches; "
                "give the cache more of both, or let fewer be in flight"
            )
        part = replace(self, rows=rows + 1, pages=pages + 1, window_pages=max(windows, -1) + 1)
        return tuple(replace(part, lane=lane) for lane in range(count))

    @property
    def room(self) -> int:
        """Tokens of the longest request that can ever run: its last drafts lie beyond."""
        return min(self.max_context, (self.pages - 1) * self.page_size) - self.lookahead

    @property
    def step_pages(self) -> int:
        """Pages that a decode step may add to a request, but for one that it began."""
        return self.pages_of(1 + self.lookahead)

    @property
    def behind(self) -> int:
        """Tokens before the newest that window layers may still be asked for.

        A draft asks from the position of the last token in the cache, and so sees one more than the newest token does.
        """
        return 0 if self.window is None else self.window - 1 + bool(self.lookahead)

    def pages_of(self, tokens: int) -> int:
        """Pages of the first ``tokens`` positions."""
        return -(-tokens // self.page_size)

    def most_window_pages(self, tokens: int, chunk: int) -> int:
        """Most pages of the window pool that a request of ``tokens`` holds, computed ``chunk`` at a time.

        Before a chunk everything older than ``behind`` tokens is gone; what remains may start at the last token of a
        page.
        """
        if self.window is None:
            return 0
        return min(self.pages_of(tokens), self.pages_of(self.behind + chunk - 1) + 1)

    def _window_pool(self, count: int, budget: int) -> int:
        """Pages of the window pool, the reserved one included, with which ``count`` requests never wait for one.

        The newest may compute a chunk of the whole budget, and is let in only if it leaves a page for each other.
        The others share the budget of that step: beside its window each then holds a page that a chunk of a few
        tokens began, and all together the pages that the budget fills.
        """
        step, reach = 1 + self.lookahead, self.room + self.lookahead
        newest, settled = (self.most_window_pages(reach, chunk) for chunk in (max(budget, step), step))
        others = count - 1
        held = min(others * newest, others * (settled + 1) + self.pages_of(budget))
        return newest + held + others * self.step_pages + 1


class RequestMemory:
    """Rows and pages of the running requests.

    Args:
        layout: sizes of the cache.
        chunk: most tokens of a request that are computed in one step.
        prefix_reuse: full pages are published for later requests.
        host: where these go when they are evicted; None forgets them.

    Raises:
        InputError: if the window pool cannot hold a window and a chunk of one request.
    """

    def __init__(
        self, layout: CacheLayout, chunk: int, *, prefix_reuse: bool, host: HostPages | None = None
    ) -> None:
        self.layout, self.prefix_reuse = layout, prefix_reuse
        self.chunk = max(chunk, 1 + layout.lookahead)
        self.rows = FreeList(layout.rows, "request rows", layout.lane)
        self.pages = PageStore(layout.pages, layout.page_size, layout.lane, layout.overlap, host)
        self.window_pages = FreeList(max(layout.window_pages, 1), "window pages", layout.lane)
        needed = layout.most_window_pages(layout.room + layout.lookahead, self.chunk)
        if needed > self.window_pages.total:
            raise InputError(
                f"{self.window_pages.total} window pages cannot hold a window of {layout.window} tokens and a "
                f"chunk of {self.chunk}; give {needed} beside the reserved one, or a smaller token budget"
            )

    def admit(self, request: Request, *, spare: int) -> bool:
        """Gives a waiting request a row, which must be free, and all pages of its tokens, known prefixes first.

        At least one token is left to compute, as it is the one that yields the next.

        Args:
            request: holds nothing so far.
            spare: pages, of either pool, that must remain for others.

        Returns:
            False, with nothing taken, if there is not enough.
        """
        before = request.tokens[: request.length - 1 + self.layout.overlap]
        known = self.pages.match(before) if self.prefix_reuse else []
        self.pages.hold(known)  # before looking, so that they do not count as available
        needed = self.layout.pages_of(request.length) - len(known)
        windowed = self.layout.most_window_pages(request.length, self.chunk)
        if self.pages.available < needed + spare or (windowed and self.window_pages.free < windowed + spare):
            self.pages.release(known)
            return False
        (request.row,) = self.rows.take()
        beyond = self.pages.match_host(before, known) if self.prefix_reuse else []
        request.pages = (
            known + self.pages.take_back(beyond, before, known) + self.pages.take(needed - len(beyond))
        )
        request.computed = request.reused = (len(known) + len(beyond)) * self.layout.page_size
        request.restored = len(beyond) * self.layout.page_size
        request.dirty = True
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Makes sure that the first ``tokens`` positions have pages, in both pools.

        Returns:
            False, with nothing taken, if there is not enough.
        """
        pages = self.layout.pages_of(tokens)
        missing = max(pages - len(request.pages), 0)  # a prompt has all of its pages before its chunks
        windowed = pages - len(request.window_pages) if self.layout.window else 0
        if missing > self.pages.available or windowed > self.window_pages.free:
            return False
        if missing or windowed:
            request.pages += self.pages.take(missing)
            request.window_pages += self.window_pages.take(windowed)
            request.dirty = True
        return True

    def advance(self, request: Request, count: int) -> None:
        """Notes that ``count`` more of its tokens are computed.

        Pages that they filled are published, and those that left the window given back.
        """
        size = self.layout.page_size
        first, request.computed = request.computed // size, request.computed + count
        full = range(first, request.computed // size)
        if self.prefix_reuse and full:
            tokens = request.tokens
            for index in full:
                own, before = request.pages[index], request.pages[index - 1] if index else ROOT
                request.pages[index] = self.pages.publish(
                    own, before, self.pages.known_by(tokens, index * size)
                )
                request.dirty |= request.pages[index] != own
        if self.layout.window:
            passed = (request.computed - self.layout.behind) // size
            for index in range(passed - 1, -1, -1):
                if not request.window_pages[index]:
                    break
                self.window_pages.give([request.window_pages[index]])
                request.window_pages[index] = 0
                request.dirty = True

    def release(self, request: Request) -> None:
        """Takes everything back; published pages stay in the prefix cache."""
        self.rows.give([request.row])
        self.pages.release(request.pages)
        self.window_pages.give(page for page in request.window_pages if page)
        request.row, request.pages, request.window_pages = 0, [], []
        request.computed, request.dirty = 0, False

    def check(self, running: Sequence[Request]) -> None:
        """Compares the books with what the running requests hold.

        Raises:
            AccountingError: if a row or page leaked or has two owners, or a request lacks one.
        """
        self.pages.check(Counter(page for request in running for page in request.pages))
        rows = [request.row for request in running]
        windows = [page for request in running for page in request.window_pages if page]
        for free_list, taken in ((self.rows, rows), (self.window_pages, windows)):
            if sorted(taken) != sorted(free_list.used):
                raise AccountingError(f"{free_list.what} {free_list.used} in use, requests hold {taken}")
        for request in running:
            if request.computed > len(request.pages) * self.layout.page_size:
                raise AccountingError(f"request {request.index} has computed tokens without a page")
