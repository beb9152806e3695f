"""Pages with holders and the prefix cache: free + held + cached is always all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.allocator import FreeList
from cglab.engine.pages import ROOT, PageStore
from cglab.errors import AccountingError, InputError


def chain(store, tokens):
    """Takes, fills and publishes the pages of some tokens; returns those to hold."""
    pages, size = [], store.page_size
    for start in range(0, len(tokens), size):
        (page,) = store.take(1)
        pages.append(store.publish(page, pages[-1] if pages else ROOT, tokens[start : start + size]))
    return pages


def counts(store):
    return store.free, store.held, store.cached


def test_a_prefix_is_found_page_by_page():
    store = PageStore(9, 2)
    pages = chain(store, [1, 2, 3, 4, 5, 6])
    assert store.match([1, 2, 3, 4, 5, 6, 7]) == pages
    assert store.match([1, 2, 3, 4, 5]) == pages[:2], "part of a page is not shared"
    assert store.match([1, 2, 9, 9, 5, 6]) == pages[:1]
    assert store.match([3, 4]) == [], "tokens are known after what came before them only"
    assert store.match([1]) == [] == store.match([])


def test_released_pages_are_cached_and_found_again():
    store = PageStore(9, 2)
    pages = chain(store, [1, 2, 3, 4])
    (private,) = store.take(1)
    assert counts(store) == (5, 3, 0)
    store.release([*pages, private])
    assert counts(store) == (6, 0, 2), "a page that was never published has nothing to keep"
    store.hold(store.match([1, 2, 3, 4]))
    assert counts(store) == (6, 2, 0)


def test_a_page_is_free_for_others_when_its_last_holder_left():
    store = PageStore(3, 2)
    pages = chain(store, [1, 2])
    store.hold(pages)
    store.release(pages)
    store.take(1)
    with pytest.raises(InputError, match="1 KV pages wanted, 0 of 2 available"):
        store.take(1)
    store.release(pages)
    assert store.take(1) == pages and store.match([1, 2]) == []


def test_the_same_tokens_computed_twice_become_one_page():
    store = PageStore(9, 2)
    (first,) = chain(store, [1, 2])
    (second,) = store.take(1)
    assert store.publish(second, ROOT, [1, 2]) == first
    assert counts(store) == (7, 1, 0)
    store.release([first])
    assert counts(store) == (7, 1, 0), "it has two holders"
    store.release([first])
    assert counts(store) == (7, 0, 1)


def test_least_recently_used_pages_go_first_and_tails_before_what_they_follow():
    store = PageStore(6, 1)
    old, new = chain(store, [1, 2]), chain(store, [7, 8])
    store.release(old)
    store.release(new)
    store.hold(store.match([1, 2]))
    store.release(old)  # used again: the other chain is now the older one
    store.take(2)
    assert store.match([7, 8]) == new[:1] and store.match([1, 2]) == old
    store.take(1)
    assert store.match([7, 8]) == [] and store.match([1, 2]) == old
    store.take(1)
    assert store.match([1, 2]) == old[:1]


def test_the_shared_part_of_a_chain_outlives_the_branches():
    store = PageStore(7, 1)
    left = chain(store, [1, 2, 3])
    store.hold(left[:1])
    right = left[:1]
    for token in (4, 5):
        right.append(store.publish(*store.take(1), right[-1], [token]))
    store.release(right)
    store.release(left)
    assert counts(store) == (1, 0, 5)
    store.evict(4)
    assert store.match([1]) == left[:1] and counts(store) == (5, 0, 1)


def test_held_pages_are_never_evicted():
    store = PageStore(4, 1)
    pages = chain(store, [1, 2, 3])
    store.release(pages[2:])
    store.evict(99)
    assert store.match([1, 2, 3]) == pages[:2] and counts(store) == (1, 2, 0)


def test_a_page_given_back_twice_is_refused():
    store = PageStore(4, 1)
    pages = store.take(1)
    store.release(pages)
    with pytest.raises(InputError, match=f"KV page {pages[0]} is not in use"):
        store.release(pages)


class Model:
    """What ``PageStore`` promises, the slow way: chains as lists of tokens, ages as numbers."""

    def __init__(self, count):
        self.total, self.age = count - 1, 0
        self.known = {}  # published prefix: when it was released last
        self.holders = []

    def held(self):
        return {tuple(tokens[: end + 1]) for tokens in self.holders for end in range(len(tokens))}

    def cached(self):
        return [prefix for prefix in self.known if prefix not in self.held()]

    def match(self, tokens):
        return max((n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in self.known), default=0)

    def make_room(self, count):
        while self.total - len(self.held()) - len(self.cached()) < count:
            del self.known[min(self.cached(), key=self.known.get)]

    def release(self, index):
        tokens = self.holders.pop(index)
        for end in range(len(tokens), 0, -1):
            if tuple(tokens[:end]) not in self.held():
                self.age += 1
                self.known[tuple(tokens[:end])] = self.age


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 9)),
        max_size=40,
    )
)
def test_the_cache_keeps_and_forgets_what_a_plain_model_does(actions):
    store, model, held = PageStore(9, 1), Model(9), []
    for come, tokens, choice in actions:
        if come:
            known = store.match(tokens)
            assert len(known) == model.match(tokens)
            store.hold(known)
            model.holders.append(tokens[: len(known)])
            if store.available < len(tokens) - len(known):
                store.release(known)
                model.release(-1)
                continue
            model.make_room(len(tokens) - len(known))
            pages = known
            for token in tokens[len(known) :]:
                pages = [*pages, store.publish(*store.take(1), pages[-1] if pages else ROOT, [token])]
            held.append(pages)
            model.holders[-1] = tokens
            model.known |= {tuple(tokens[:n]): 0 for n in range(len(known) + 1, len(tokens) + 1)}
        elif held:
            store.release(held.pop(choice % len(held)))
            model.release(choice % len(model.holders))
        store.check({page: sum(pages.count(page) for pages in held) for pages in held for page in pages})
        assert (store.held, store.cached) == (len(model.held()), len(model.cached()))
        assert store.free + store.held + store.cached == store.total == 8


def lose_a_page(store, pages):
    store._free.take(1)


def share_a_private_page(store, pages):
    store._holders[pages[-1]] = 2


def keep_a_held_page_in_the_cache(store, pages):
    store._cached[pages[0]] = None


def lose_the_page_before(store, pages):
    del store._published[store._keys.pop(pages[0])]


def know_a_page_by_two_names(store, pages):
    store._published[ROOT, (9,)] = pages[0]


@pytest.mark.parametrize(
    ("fault", "holders", "message"),
    [
        (lose_a_page, {1: 1, 2: 1, 3: 1}, "neither held nor cached"),
        (share_a_private_page, {1: 1, 2: 1, 3: 2}, "two owners and are still written"),
        (keep_a_held_page_in_the_cache, {1: 1, 2: 1, 3: 1}, "1 free, 3 held, 1 cached of 4"),
        (lose_the_page_before, {1: 1, 2: 1, 3: 1}, "lost the page before them"),
        (know_a_page_by_two_names, {1: 1, 2: 1, 3: 1}, "by two names"),
        (lambda *_: None, {1: 1, 2: 2, 3: 1}, "pages are held as"),
    ],
)
def test_the_check_finds_planted_faults(fault, holders, message):
    store = PageStore(5, 1)
    pages = chain(store, [1, 2]) + store.take(1)
    store.check({1: 1, 2: 1, 3: 1})
    fault(store, pages)
    with pytest.raises(AccountingError, match=message):
        store.check(holders)


def test_an_index_that_was_given_back_cannot_be_given_back_again():
    free = FreeList(4, "request rows")
    taken = free.take(2)
    free.give(taken[:1])
    with pytest.raises(InputError, match=f"request rows {taken[0]} is not in use"):
        free.give(taken)
    assert (free.free, free.used) == (2, {taken[1]})
