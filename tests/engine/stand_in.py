"""A model without a device that the scheduler can drive, and that notices every slot with the wrong content.

The next token is a function of all tokens before it, read from the cache: each slot holds the token and position
written there, slots of pages that were given back are wiped, and a read that does not find what the request itself
wrote (or what a request with the same prefix wrote) fails at once. Speculating, a decode step writes a draft, chain or
tree, of which some is right and some is not.
"""

from random import Random
from zlib import crc32

from cglab.engine.acceptance import committed, greedy_path
from cglab.engine.batches import DecodeBatch, PrefillBatch, SchedulerOptions
from cglab.engine.host_pages import HostPages
from cglab.engine.memory import CacheLayout
from cglab.engine.requests import Request
from cglab.engine.scheduler import Scheduler

VOCABULARY = 7


def next_token(tokens):
    return crc32(bytes(tokens)) % VOCABULARY


def alone(prompt, limit, stops=()):
    """What a request generates with no cache and no other request."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Bench:
    """A scheduler and the stand-in model, checked after every call."""

    def __init__(
        self,
        *,
        pages=9,
        page_size=2,
        rows=4,
        max_context=64,
        window=None,
        window_pages=0,
        budget=4,
        lookahead=0,
        host_pages=0,
        **options,
    ):
        self.layout = CacheLayout(pages, page_size, rows, max_context, window, window_pages, lookahead)
        self.options = SchedulerOptions(budget, **options)
        self.host = HostPages(host_pages) if host_pages else None
        self.scheduler = Scheduler(self.layout, self.options, self.host)
        self.kv, self.window_kv, self.host_kv, self.restored = {}, {}, {}, 0
        self.page_table, self.window_table = {}, {}  # by row, as the device has them: written when dirty
        self.now = 0.0
        self.requests, self.events, self.batches = [], [], []
        self.passed_over = 0  # batches in a row without the oldest request

    def add(self, prompt, limit=3, stops=()):
        request = Request(len(self.requests), list(prompt), limit, stops=frozenset(stops))
        event = self.scheduler.add(request, self.tick())
        self.requests.append(request)
        self.events += [event] if event else []
        self.check()
        return request

    def cancel(self, request):
        event = self.scheduler.cancel(request, self.tick())
        self.events += [event] if event else []
        self.check()
        return event

    def step(self, during=lambda: None, fail=False):
        """One batch from plan to commit; ``during`` is called while it is in flight."""
        batch = self.scheduler.plan(self.tick())
        self.move()
        self.check()
        assert (batch is None) == self.scheduler.idle, "whoever is not idle advances"
        if batch is None:
            return None
        self.check_fairness(batch)
        tokens = self.compute(batch)
        during()
        scheduler = self.scheduler
        self.events += (
            scheduler.fail(batch, self.tick()) if fail else scheduler.commit(batch, tokens, self.tick())
        )
        self.batches.append(batch)
        self.check()
        assert all(request.decoding for request in scheduler.running[:-1]), (
            "only the youngest is in mid-prompt"
        )
        return batch

    def move(self):
        """Copies pages to host memory and back, as a step's plan wants it; what is kept is whole."""
        size, kept, restored = self.layout.page_size, *(self.host.take() if self.host else ((), ()))
        for page, place in kept:
            self.host_kv[place] = [self.kv[page * size + offset] for offset in range(size)]
        for place, page in restored:
            self.kv |= {page * size + offset: content for offset, content in enumerate(self.host_kv[place])}
        self.restored += len(restored)

    def drain(self):
        """Steps until all have ended."""
        while self.step() is not None:
            pass
        return [request.output for request in self.requests]

    def check_fairness(self, batch):
        """The oldest request always runs, and is in every batch but for prompts that were let in while it decodes.

        It then ends after a bounded number of steps, and so does everyone, in order of arrival.
        """
        oldest = self.scheduler.running[0]
        assert oldest is next(request for request in self.requests if request.finish is None)
        if oldest in batch.requests:
            self.passed_over = 0
            return
        self.passed_over += 1
        assert oldest.decoding and isinstance(batch, PrefillBatch) and not self.options.mixed
        prompts = 2 * self.scheduler.max_running  # those that ran already, and as many that came after
        assert self.passed_over <= prompts * -(-self.layout.room // self.options.token_budget)

    def tick(self):
        self.now += 1.0
        return self.now

    def compute(self, batch):
        """Writes and reads the cache as a model would; tokens of the chunks that yield one."""
        if isinstance(batch, PrefillBatch):
            assert 0 < batch.tokens <= self.options.token_budget
        else:
            assert isinstance(batch, DecodeBatch) and all(r.decoding for r in batch.requests)
        assert len(set(batch.requests)) == len(batch.requests)
        for request in batch.requests:
            if request.dirty:
                before = self.page_table.get(request.row), self.window_table.get(request.row)
                new = request.computed == request.reused
                assert new or before != (request.pages, request.window_pages), "written for nothing"
                self.page_table[request.row] = list(request.pages)
                self.window_table[request.row] = list(request.window_pages)
                request.dirty = False
            assert self.page_table[request.row] == request.pages, "the row changed and nobody was told"
            assert self.window_table[request.row] == request.window_pages
        if self.layout.lookahead and isinstance(batch, DecodeBatch):
            return self.speculate(batch)
        written = [slot for chunk in batch.chunks for slot in self.write(chunk)]
        assert len(set(written)) == len(written), "two requests write one slot"
        assert all(chunk.request.row for chunk in batch.chunks)
        seen = [self.read(chunk) for chunk in batch.chunks]
        return [[next_token(tokens)] for chunk, tokens in zip(batch.chunks, seen, strict=True) if chunk.last]

    def write(self, chunk):
        request = chunk.request
        assert chunk.start == request.computed and chunk.length > 0
        for position in range(chunk.start, chunk.start + chunk.length):
            yield self.store(request, position, (request.tokens[position], position))

    def store(self, request, position, content):
        size = self.layout.page_size
        slot = request.slot(position, size)
        self.kv[slot] = content
        if self.layout.window:
            assert request.window_slot(position, size) >= size
            self.window_kv[request.window_slot(position, size)] = content
        return slot

    def speculate(self, batch):
        """Drafts from what is in the cache, writes the drafts after it, and keeps what is right."""
        drafts = {request: self.draft(request) for request in batch.requests}
        written, new = [], []
        for request, (tokens, parents) in drafts.items():
            first, depth = request.computed, [0]
            for parent in parents[1:]:
                depth.append(depth[parent] + 1)
            stored = [(token, first + deep) for token, deep in zip(tokens, depth, strict=True)]
            written += [self.store(request, first + node, content) for node, content in enumerate(stored)]
            ways = [[tokens[0]]]
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                ways.append([*ways[parent], token])
            chosen = [next_token(request.tokens[:-1] + way) for way in ways]
            path = greedy_path(chosen, tokens, parents, self.layout.lookahead)
            for place, node in enumerate(path):
                self.store(request, first + place, stored[node])
            new.append(committed(path, chosen, tokens))
        assert len(set(written)) == len(written), "two requests write one slot"
        return new

    def draft(self, request):
        """Tokens and parents of a chain or a tree, from the cache up to the last token in it; often right."""
        size, end, window = self.layout.page_size, request.computed, self.layout.window
        seen = [self.kv[request.slot(position, size)] for position in range(end)]
        assert seen == [(token, position) for position, token in enumerate(request.tokens[:end])]
        if window:  # asked from the position of the last token, so one more than the newest token sees
            oldest = max(end - window, 0)
            inside = [self.window_kv[request.window_slot(position, size)] for position in range(oldest, end)]
            assert inside == seen[oldest:]
        source = Random(crc32(bytes(request.tokens)))
        tokens, parents, chain = [request.tokens[-1]], [-1], source.random() < 0.5
        while len(tokens) <= self.layout.lookahead:
            parents.append(len(tokens) - 1 if chain else source.randrange(len(tokens)))
            way, node = [], parents[-1]
            while node >= 0:
                way.insert(0, tokens[node])
                node = parents[node]
            siblings = {tokens[node] for node, parent in enumerate(parents[:-1]) if parent == parents[-1]}
            true = next_token(request.tokens[:-1] + way)
            right = true not in siblings and source.random() < 0.7
            tokens.append(true if right else min(set(range(VOCABULARY)) - siblings))
        return tokens, parents

    def read(self, chunk):
        """All tokens up to the chunk's end, from the cache."""
        request, size, end = chunk.request, self.layout.page_size, chunk.start + chunk.length
        seen = [self.kv[request.slot(position, size)] for position in range(end)]
        assert seen == [(token, position) for position, token in enumerate(request.tokens[:end])]
        if self.layout.window:
            oldest = max(chunk.start + 1 - self.layout.window, 0)
            inside = [self.window_kv[request.window_slot(position, size)] for position in range(oldest, end)]
            assert inside == seen[oldest:end]
        return [token for token, _ in seen]

    def check(self):
        """The books balance; what nobody holds and no prefix can find is wiped."""
        memory, size = self.scheduler.memory, self.layout.page_size
        self.scheduler.check_invariants()
        pages = memory.pages
        assert pages.free + pages.held + pages.cached == pages.total == self.layout.pages - 1
        for request in self.scheduler.running:
            assert request.row and 0 not in request.pages
        order = [request.index for request in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order), "first come, first served"
        self.kv = {slot: kept for slot, kept in self.kv.items() if slot // size in pages._free.used}
        self.window_kv = {
            s: kept for s, kept in self.window_kv.items() if s // size in memory.window_pages.used
        }
