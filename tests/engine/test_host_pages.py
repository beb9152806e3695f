"""Books of host memory: what is known there, what must be copied, and what may not be dropped in between."""

import pytest

from cglab.engine.host_pages import START, HostPages, Transfers, digest_after
from cglab.engine.pages import ROOT, PageStore
from cglab.errors import AccountingError


def chain(store, tokens):
    """Takes, fills and publishes the pages of some tokens; returns those to hold."""
    pages, size = [], store.page_size
    for start in range(0, len(tokens), size):
        (page,) = store.take(1)
        pages.append(store.publish(page, pages[-1] if pages else ROOT, store.known_by(tokens, start)))
    return pages


def test_a_digest_is_of_all_tokens_up_to_a_pages_end():
    one = digest_after(START, [1, 2])
    assert digest_after(one, [3, 4]) == digest_after(digest_after(START, [1, 2]), [3, 4])
    assert (
        len({one, digest_after(one, [1, 2]), digest_after(START, [2, 1]), digest_after(START, [1, 2, 3])})
        == 4
    )


def test_what_is_evicted_is_found_again_and_copied_back():
    store = PageStore(4, 2, host=HostPages(4))
    pages = chain(store, [1, 2, 3, 4, 5, 6])
    store.release(pages)
    store.take(2)  # the tail goes first, and the first page stays
    assert store.match([1, 2, 3, 4, 5, 6]) == pages[:1]
    found = store.match_host([1, 2, 3, 4, 5, 6, 7], pages[:1])
    assert len(found) == 2 and store.match_host([1, 2, 3, 4, 9, 9], pages[:1]) == found[:1]
    kept, restored = store.host.take()
    assert [page for page, _ in kept] == [pages[2], pages[1]] and restored == []
    assert store.host.take() == Transfers([], []), "each copy is told once"


def test_a_page_that_comes_back_is_published_and_its_copy_stays():
    store = PageStore(4, 2, host=HostPages(2))
    pages = chain(store, [1, 2, 3, 4])
    store.release(pages)
    held = store.take(3)
    places = dict(store.host.take().kept)
    store.release(held[:2])
    found = store.match_host([1, 2, 3, 4], [])
    again = store.take_back(found, [1, 2, 3, 4], [])
    assert store.host.take().restored == [(places[old], new) for old, new in zip(pages, again, strict=True)]
    assert store.match([1, 2, 3, 4]) == again
    store.check(dict.fromkeys([*again, held[2]], 1))
    store.release(again)
    store.take(2)
    assert store.host.take().kept == [], "what is there need not be written again"


def test_what_is_to_come_back_is_not_dropped_for_what_leaves_in_the_same_step():
    store = PageStore(4, 1, host=HostPages(2))
    old = chain(store, [1, 2])
    store.release(old)
    store.release(store.take(3))
    store.release(chain(store, [7, 8, 9]))
    places = dict(store.host.take().kept)
    back = store.take_back(store.match_host([1, 2], []), [1, 2], [])
    kept, restored = store.host.take()
    assert restored == [(places[old[0]], back[0]), (places[old[1]], back[1])] and kept == []
    assert store.host.used == 2, "9 and 8 had to leave the device, and had no place"
    store.check(dict.fromkeys(back, 1))


def test_what_has_come_back_makes_room_again():
    host = HostPages(1)
    host.keep(b"old", 1)
    host.reserve([b"old"])
    host.restore(b"old", 2)
    host.take()
    host.keep(b"new", 3)
    assert b"new" in host and b"old" not in host
    assert host.take().kept == [(3, 0)]


def test_the_least_recently_used_page_makes_room():
    host = HostPages(2)
    for digest, page in ((b"a", 1), (b"b", 2)):
        host.keep(digest, page)
    host.keep(b"a", 5)
    host.keep(b"c", 3)
    assert b"a" in host and b"c" in host and b"b" not in host
    assert [page for page, _ in host.take().kept] == [1, 2, 3]
    host.check()


def test_forgotten_prefixes_are_forgotten_there_too():
    store = PageStore(3, 1, host=HostPages(2))
    store.release(chain(store, [1, 2]))
    store.take(1)
    store.forget()
    assert (store.cached, store.host.used) == (0, 0) and store.host.take() == Transfers([], [])
    assert store.match_host([1, 2], []) == []


def test_a_lost_page_is_told():
    host = HostPages(3)
    host.keep(b"a", 1)
    host._free.pop()
    with pytest.raises(AccountingError, match="host pages are"):
        host.check()
