"""Decode steps that write ahead and yield several tokens: who has pages for them, and what is kept."""

import pytest

from cglab.engine.batches import DecodeBatch
from cglab.engine.memory import CacheLayout
from cglab.errors import InputError
from tests.engine.stand_in import Bench, alone


def planned(bench):
    """The next batch, in flight."""
    return bench.scheduler.plan(bench.tick())


def decode(bench, *new):
    """Commits these tokens for the requests of the next batch, which decodes."""
    batch = planned(bench)
    assert isinstance(batch, DecodeBatch)
    return bench.scheduler.commit(batch, new, bench.tick())


@pytest.mark.parametrize("window", [None, 4])
def test_positions_ahead_have_pages_in_every_pool_before_a_step(window):
    bench = Bench(budget=8, pages=20, page_size=2, lookahead=4, window=window, window_pages=12)
    request = bench.add([1, 2, 3], 9)
    bench.step()
    assert len(request.pages) == 2, "a prompt has pages for its own tokens"
    planned(bench)
    assert len(request.pages) == 4, "positions 3 to 7 are written"
    if window:
        assert len(request.window_pages) == 4 and all(request.window_pages)


def test_the_page_that_a_draft_asks_for_last_has_not_left_the_window():
    """A draft stands at the last token in the cache: its window begins one before that of the newest token."""
    kept = {}
    for lookahead in (0, 1):
        bench = Bench(budget=8, pages=20, page_size=1, lookahead=lookahead, window=3, window_pages=14)
        request = bench.add([1, 2, 3, 4, 5], 3)
        bench.step()
        kept[lookahead] = [place for place, page in enumerate(request.window_pages) if page]
    assert kept == {0: [3, 4], 1: [2, 3, 4]}


def test_room_ends_before_the_positions_that_only_drafts_reach():
    bench = Bench(budget=8, pages=20, max_context=16, lookahead=5)
    assert bench.layout.room == 11
    with pytest.raises(
        InputError, match=r"12 do not fit into a context of 11 \(5 more are kept for drafts\)"
    ):
        bench.add([1, 2, 3], 9)
    bench.requests.clear()
    request = bench.add([1, 2, 3], 8)
    reached = 0
    while bench.step():
        reached = max(reached, len(request.pages) * bench.layout.page_size)
    assert request.output == alone([1, 2, 3], 8) and reached <= 16


def test_a_cache_that_only_drafts_would_fill_is_refused():
    with pytest.raises(InputError, match="drafts reach 8 positions ahead, which leaves no room for a token"):
        CacheLayout(5, 2, 2, 64, lookahead=8)


def test_a_window_pool_too_small_for_what_is_verified_is_refused():
    with pytest.raises(
        InputError, match="a window of 3 tokens and a chunk of 6; give 5 beside the reserved one"
    ):
        Bench(budget=1, pages=20, page_size=2, window=3, window_pages=5, lookahead=5)


def test_tokens_of_a_step_come_at_once_and_the_end_with_the_last():
    bench = Bench(budget=8, pages=20, lookahead=3)
    first, second = bench.add([1], 5), bench.add([2], 9)
    bench.step()
    events = decode(bench, [3, 4, 5, 6], [1])
    assert [(event.request.index, event.token, event.finish) for event in events] == [
        (0, 3, None), (0, 4, None), (0, 5, None), (0, 6, "length"), (1, 1, None),
    ]  # fmt: skip
    assert len(set(first.token_times[1:])) == 1 and first.finish == "length"
    assert second.decoding and second.computed == 2


@pytest.mark.parametrize(("limit", "stops", "kept", "finish"), [(3, (), 2, "length"), (9, (5,), 3, "stop")])
def test_what_comes_after_a_limit_or_a_stop_token_is_dropped(limit, stops, kept, finish):
    bench = Bench(budget=8, pages=20, page_size=2, lookahead=3)
    request = bench.add([1], limit, stops)
    bench.step()
    first = request.output[0]
    events = decode(bench, [3, 4, 5, 6])
    assert request.output == [first, *[3, 4, 5, 6][:kept]] and request.finish == finish
    assert [event.finish for event in events] == [None] * (kept - 1) + [finish]
    pages = bench.scheduler.memory.pages
    whole = [1, first, 3, 4, 5, 6]
    assert len(pages.match(whole)) == (len(request.output)) // 2, (
        "tokens that were dropped are nobody's prefix"
    )


def test_accepted_drafts_are_a_prefix_for_others():
    bench = Bench(budget=8, pages=20, page_size=2, lookahead=3)
    request = bench.add([1], 9)
    bench.step()
    decode(bench, [3, 4, 5])
    assert request.computed == 4 and request.decoding
    tokens = request.tokens
    assert bench.scheduler.memory.pages.match(tokens) == request.pages[:2], "and not the newest token"


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ([[]], "0 tokens of one request in a batch that yields 1 to 3"),
        ([[1, 2, 3, 4]], "4 tokens of one request in a batch that yields 1 to 3"),
        ([[1], [2]], "tokens of 2 chunks for a batch that yields 1"),
    ],
)
def test_more_tokens_than_a_step_has_positions_for_are_refused(new, told):
    bench = Bench(budget=8, pages=20, lookahead=2)
    request = bench.add([1], 9)
    bench.step()
    batch = planned(bench)
    with pytest.raises(InputError, match=told):
        bench.scheduler.commit(batch, new, 0.0)
    assert len(request.output) == 1
    bench.scheduler.commit(batch, [[1, 2, 3]], 0.0)


def test_a_prefill_step_yields_one_token_though_drafts_may_follow():
    bench = Bench(budget=8, pages=20, lookahead=2)
    bench.add([1], 9)
    batch = planned(bench)
    with pytest.raises(InputError, match="2 tokens of one request in a batch that yields 1 to 1"):
        bench.scheduler.commit(batch, [[1, 2]], 0.0)
