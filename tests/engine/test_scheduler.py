"""What runs next: prefill under a budget, prefix reuse, who gives way, cancelled and impossible requests."""

import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.batches import DecodeBatch, PrefillBatch, SchedulerOptions
from cglab.engine.memory import CacheLayout
from cglab.engine.requests import Request, Sampling
from cglab.engine.scheduler import Scheduler
from cglab.errors import AccountingError, InputError
from tests.engine.stand_in import Bench, alone

LONG = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]


def shape(batch):
    """A batch in short: (index, start, length) of each chunk, or the indices that decode."""
    if isinstance(batch, PrefillBatch):
        return [(chunk.request.index, chunk.start, chunk.length) for chunk in batch.chunks]
    return [request.index for request in batch.requests]


def shapes(bench):
    """The batch of each step until all have ended."""
    found = []
    while batch := bench.scheduler.plan(bench.tick()):
        found.append(shape(batch))
        bench.events += bench.scheduler.commit(batch, bench.compute(batch), bench.tick())
        bench.check()
    return found


def test_prefill_goes_first_and_then_all_decode_together():
    bench = Bench(budget=8)
    bench.add([1, 2, 3], 2)
    bench.add([4], 3)
    assert shapes(bench) == [[(0, 0, 3), (1, 0, 1)], [0, 1], [1]]


def test_a_new_prompt_is_computed_before_others_decode_on():
    bench = Bench(budget=8, pages=20)
    bench.add([1, 2, 3], 3)
    bench.step()
    bench.add([4], 2)
    assert shapes(bench) == [[(1, 0, 1)], [0, 1], [0]]


def test_the_budget_is_for_all_prompts_of_a_batch_together():
    bench = Bench(budget=4, pages=20)
    first, second = bench.add([1, 2, 3], 1), bench.add([4, 5, 6, 0, 1], 1)
    batch = bench.step()
    assert shape(batch) == [(0, 0, 3), (1, 0, 1)] and batch.tokens == 4
    assert [chunk.last for chunk in batch.chunks] == [True, False], "half a prompt yields no token"
    assert len(first.output) == 1 and not second.output and second.computed == 1
    assert shapes(bench) == [[(1, 1, 4)]]


def test_a_long_prompt_is_begun_once_and_continued_before_new_ones():
    bench = Bench(budget=4, pages=20)
    bench.add(LONG, 1)
    bench.step()
    bench.add([5], 1)
    assert shapes(bench) == [[(0, 4, 4)], [(0, 8, 2), (1, 0, 1)]]


def test_p84_a_mixed_batch_is_presented_as_extend():
    bench = Bench(budget=4, pages=20, mixed=True)
    bench.add([1, 2], 4)
    bench.add([3], 4)
    bench.step()
    bench.add([6, 5, 4, 3, 2], 1)
    batch = bench.step()
    assert isinstance(batch, PrefillBatch)
    assert shape(batch) == [(0, 2, 1), (1, 1, 1), (2, 0, 2)], "those that decode are chunks of length 1"
    assert [chunk.last for chunk in batch.chunks] == [True, True, False]
    assert shapes(bench) == [[(0, 3, 1), (1, 2, 1), (2, 2, 2)], [(0, 4, 1), (1, 3, 1), (2, 4, 1)]]
    assert bench.drain() == [alone(r.prompt, r.limit) for r in bench.requests]


def test_p84_without_a_prompt_to_compute_a_mixed_scheduler_decodes():
    bench = Bench(budget=2, pages=20, mixed=True)
    for token in (1, 2, 3):
        bench.add([token], 3)
    assert shapes(bench) == [[(0, 0, 1), (1, 0, 1)], [0, 1], [0, 1], [(2, 0, 1)], [2], [2]]


def test_a_known_prefix_is_not_computed_again():
    bench = Bench(budget=16, pages=20)
    bench.add(LONG, 1)
    bench.drain()
    again = bench.add([*LONG, 4, 5], 1)
    assert shapes(bench) == [[(1, 10, 2)]] and again.reused == 10
    assert bench.scheduler.prefix_reuse_reason is None


def test_one_token_of_a_fully_known_prompt_is_computed_as_it_yields_the_next():
    bench = Bench(budget=16, pages=20)
    bench.add(LONG, 1)
    bench.drain()
    again = bench.add(LONG, 1)
    assert shapes(bench) == [[(1, 8, 2)]] and again.reused == 8, "whole pages, and not the last token"


def test_a_second_turn_finds_the_answer_of_the_first():
    bench = Bench(budget=16, pages=20)
    first = bench.add([1, 2, 3], 6)
    bench.drain()
    bench.add([*first.tokens, 6, 6], 1)
    assert shapes(bench) == [[(1, 8, 3)]], "all but the newest token of the first turn was computed"


def test_equal_prompts_of_one_batch_end_up_on_the_same_pages():
    bench = Bench(budget=16, pages=20)
    first, second = bench.add([1, 2, 3, 4, 5], 3), bench.add([1, 2, 3, 4, 6], 3)
    batch = bench.scheduler.plan(0.0)
    assert not {*first.pages} & {*second.pages}
    bench.scheduler.commit(batch, bench.compute(batch), 0.0)
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    assert (first.dirty, second.dirty) == (False, True), "only the second one's row changed"
    assert bench.drain() == [alone(r.prompt, r.limit) for r in bench.requests]


def test_prefix_reuse_can_be_switched_off_with_a_reason():
    bench = Bench(budget=16, pages=20, prefix_reuse=False)
    bench.add(LONG, 1)
    bench.add(LONG, 1)
    assert shapes(bench) == [[(0, 0, 10), (1, 0, 6)], [(1, 6, 4)]]
    assert bench.scheduler.prefix_reuse_reason == "switched off by prefix_reuse=False"
    assert bench.scheduler.memory.pages.free == 19, "and nothing is kept"


def crowd(**options):
    """Two requests on four pages of two tokens that both grow until one must give way."""
    bench = Bench(budget=8, pages=5, rows=4, **options)
    return bench, bench.add([1, 2], 5), bench.add([3, 4], 5)


def test_the_youngest_gives_way_and_its_tokens_are_its_prompt_when_it_comes_back():
    bench, oldest, youngest = crowd(prefix_reuse=False)
    third = bench.add([5], 1)
    assert shapes(bench) == [
        [(0, 0, 2), (1, 0, 2)],
        [0, 1],
        [0, 1],
        [0],
        [0],
        [(1, 0, 5)],
        [1],
        [(2, 0, 1)],
    ]
    assert (oldest.preemptions, youngest.preemptions) == (0, 1)
    assert bench.scheduler.idle and [len(r.output) for r in (oldest, youngest, third)] == [5, 5, 1]
    assert youngest.output == alone([3, 4], 5)


def test_who_gave_way_is_first_in_the_queue_and_keeps_its_first_admission():
    bench, _, youngest = crowd()
    third = bench.add([5], 1)
    admitted = None
    while not youngest.preemptions:
        bench.step()
        admitted = admitted or youngest.admitted_at
    assert list(bench.scheduler.waiting) == [youngest, third]
    bench.drain()
    assert youngest.admitted_at == admitted and third.admitted_at > admitted


def test_who_comes_back_finds_its_own_tokens_in_the_prefix_cache():
    bench = Bench(budget=8, pages=6)
    bench.add([1, 2], 4)
    youngest = bench.add([3, 4, 5], 6)
    bench.drain()
    assert youngest.preemptions == 1 and youngest.reused == 4 and youngest.output == alone([3, 4, 5], 6)


def test_cached_pages_go_before_anyone_gives_way():
    bench = Bench(budget=8, pages=9)
    bench.add(LONG[:8], 1)
    bench.drain()
    assert bench.scheduler.memory.pages.cached == 4
    bench.add([1, 1], 6)
    bench.add([2, 2], 6)
    bench.drain()
    assert [request.preemptions for request in bench.requests] == [0, 0, 0]


def test_the_youngest_waits_rather_than_be_computed_again_for_its_own_page():
    bench = Bench(budget=8, pages=4, prefix_reuse=False)
    bench.add([1], 4)
    youngest = bench.add([2, 3], 2)
    assert shapes(bench) == [[(0, 0, 1), (1, 0, 2)], [0, 1], [0], [0]]
    assert youngest.preemptions == 0 and youngest.output == alone([2, 3], 2)


def test_a_prompt_is_let_in_only_if_it_leaves_a_page_for_each_that_runs():
    bench = Bench(budget=8, pages=4)
    bench.add([1], 5)
    bench.step()
    late = bench.add([2, 3, 4], 1)  # two pages, as many as are free
    bench.step()
    assert list(bench.scheduler.waiting) == [late]
    bench.drain()
    assert late.preemptions == 0


def test_no_more_run_than_allowed_and_than_there_are_rows():
    for options, most in (({"rows": 3}, 2), ({"max_running": 1}, 1), ({"rows": 3, "max_running": 9}, 2)):
        bench = Bench(budget=8, pages=20, **options)
        for token in range(5):
            bench.add([token], 4)
        bench.drain()
        assert max(len(batch.requests) for batch in bench.batches) == most == bench.scheduler.max_running


def test_an_endless_row_of_one_token_requests_does_not_stop_decoding():
    bench = Bench(budget=4, pages=20, rows=3)
    patient = bench.add([1], 5)
    for _ in range(20):
        bench.add([2, 3, 4], 1)
        bench.add([4, 5, 6], 1)
        bench.step()
    assert patient.finish == "length" and bench.scheduler.waiting
    kinds = "".join("D" if isinstance(batch, DecodeBatch) else "P" for batch in bench.batches)
    assert kinds == "PDPPDPPDPPD" + "P" * 9, "at most two pass by before it decodes on"


def test_in_mixed_batches_nobody_is_passed_by_and_new_prompts_keep_coming():
    bench = Bench(budget=4, pages=20, rows=3, mixed=True)
    patient = bench.add([1], 6)
    for _ in range(6):
        bench.add([2, 3, 4], 1)
        bench.step()
    assert patient.finish == "length" and all(len(batch.requests) == 2 for batch in bench.batches)


def test_cancelled_while_waiting():
    bench = Bench(rows=2)
    bench.add([1], 3)
    waiting = bench.add([2], 3)
    bench.step()
    event = bench.cancel(waiting)
    assert (event.request, event.token, event.finish) == (waiting, None, "cancelled")
    assert waiting.finished_at == event.at and waiting.admitted_at is None
    assert bench.drain()[1] == []


def test_cancelled_in_the_middle_of_a_chunked_prefill():
    bench = Bench(budget=4, pages=20, prefix_reuse=False)
    request = bench.add(LONG, 3)
    bench.step()
    assert request.computed == 4
    bench.cancel(request)
    assert bench.scheduler.idle and bench.scheduler.memory.pages.free == 19 and request.row == 0


def test_cancelled_while_it_decodes_keeps_what_it_has():
    bench = Bench(budget=4, pages=20)
    request, other = bench.add([1, 2], 6), bench.add([3], 6)
    bench.step()
    bench.step()
    bench.cancel(request)
    assert bench.drain() == [alone([1, 2], 2), alone([3], 6)] and other.finish == "length"


def test_cancelled_in_mid_flight_keeps_its_memory_until_the_batch_has_landed():
    bench = Bench(budget=4, pages=20)
    request = bench.add([1, 2], 6)

    def during():
        bench.cancel(request)
        assert request.finish == "cancelled" and request.row and request.pages

    bench.step(during=during)
    assert request.output == [] and request.row == 0 and bench.scheduler.idle
    assert len(bench.events) == 1 and bench.scheduler.memory.pages.cached == 0, "nothing of it was taken"


def test_cancelling_twice_is_told_once_and_a_stranger_is_refused():
    bench = Bench()
    request = bench.add([1], 3)
    assert bench.cancel(request) and bench.cancel(request) is None
    with pytest.raises(InputError, match="request 7 is not known here"):
        bench.scheduler.cancel(Request(7, [1], 1), 0.0)


def test_a_request_for_no_token_ends_at_once():
    bench = Bench()
    request = bench.add([1, 2], 0)
    (event,) = bench.events
    assert (event.request, event.token, event.finish) == (request, None, "length")
    assert (
        bench.scheduler.idle and request.finished_at == request.arrived_at and request.first_token_at is None
    )


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 3, "prompt 0 is empty; give at least one token"),
        ([1], -1, "may add -1 tokens; give 0 or more"),
        ([1] * 15, 2, "15 tokens and may add 2: 17 do not fit into a context of 16; shorten it"),
        ([1] * 17, 0, "17 do not fit"),
    ],
)
def test_what_can_never_run_is_refused_when_it_is_added(prompt, limit, message):
    bench = Bench(pages=9)
    with pytest.raises(InputError, match=message):
        bench.scheduler.add(Request(0, prompt, limit), 0.0)
    assert bench.scheduler.idle


def test_the_longest_request_that_is_taken_runs_on_all_pages():
    bench = Bench(pages=9)
    request = bench.add([1] * 9, 7)
    bench.drain()
    assert len(request.output) == 7


def test_the_context_may_be_shorter_than_the_pages():
    with pytest.raises(InputError, match="6 do not fit into a context of 5"):
        Bench(pages=9, max_context=5).add([1, 2, 3], 3)


def test_a_request_is_added_once():
    bench = Bench()
    request = bench.add([1], 1)
    for _ in range(2):  # while it waits, and after its end
        with pytest.raises(InputError, match="request 0 was added before"):
            bench.scheduler.add(request, 0.0)
        bench.drain()


def test_a_stop_token_ends_a_request_and_is_kept():
    whole = alone([1, 2], 8)
    bench = Bench(pages=20)
    request = bench.add([1, 2], 8, stops=[whole[3]])
    bench.drain()
    assert request.output == whole[: whole.index(whole[3]) + 1] and request.finish == "stop"


def test_tokens_are_streamed_as_they_come():
    bench = Bench(pages=20)
    request = bench.add([1, 2], 3)
    bench.drain()
    assert [event.token for event in bench.events] == request.output == alone([1, 2], 3)
    assert [event.finish for event in bench.events] == [None, None, "length"]
    assert [event.at for event in bench.events] == request.token_times
    times = [request.arrived_at, request.admitted_at, request.first_token_at, request.finished_at]
    assert times == sorted(times) and times[2:] == [request.token_times[0], request.token_times[-1]]


def test_a_batch_that_failed_ends_its_requests_and_no_others():
    bench = Bench(budget=4, pages=20, rows=2)
    failing, waiting = bench.add([1, 2, 3, 4], 3), bench.add([2], 2)
    bench.step(fail=True)
    assert failing.finish == "error" and [(e.token, e.finish) for e in bench.events] == [(None, "error")]
    assert bench.scheduler.memory.pages.cached == 0, "nothing that it computed is trusted"
    bench.drain()
    assert waiting.output == alone([2], 2)


def test_who_was_cancelled_before_its_batch_failed_stays_cancelled():
    bench = Bench(budget=4)
    request = bench.add([1, 2], 3)
    bench.step(during=lambda: bench.cancel(request), fail=True)
    assert request.finish == "cancelled" and len(bench.events) == 1 and bench.scheduler.idle


def test_a_batch_is_planned_computed_and_committed_in_turns():
    bench = Bench()
    bench.add([1], 3)
    scheduler = bench.scheduler
    batch = scheduler.plan(0.0)
    with pytest.raises(InputError, match="is in flight"):
        scheduler.plan(0.0)
    with pytest.raises(InputError, match="tokens of 2 chunks for a batch that yields 1"):
        scheduler.commit(batch, [[1], [2]], 0.0)
    with pytest.raises(InputError, match="not in flight"):
        scheduler.commit(DecodeBatch(()), [], 0.0)
    scheduler.commit(batch, [[1]], 0.0)
    for settle in (lambda: scheduler.commit(batch, [[1]], 0.0), lambda: scheduler.fail(batch, 0.0)):
        with pytest.raises(InputError, match="not in flight"):
            settle()


@pytest.mark.parametrize("mixed", [False, True])
def test_the_schedule_does_not_depend_on_the_clock(mixed):
    def run(clock):
        bench = Bench(budget=5, pages=7, mixed=mixed)
        bench.tick = clock
        for index in range(8):
            bench.add(LONG[: 1 + index % 5], 1 + index % 4)
        return shapes(bench)

    backwards = iter(range(1000, 0, -1))
    assert run(lambda: float(next(backwards))) == run(lambda: 0.0)


def test_window_pages_wholly_before_the_window_are_given_back():
    bench = Bench(budget=4, pages=20, window=3, window_pages=6)
    request = bench.add(LONG, 8)
    bench.step()
    assert request.computed == 4 and request.window_pages[0] == 0 != request.window_pages[1], (
        "position 4 sees 2, 3 and itself"
    )
    while bench.step():
        kept = [page for page in request.window_pages if page]
        assert len(kept) <= 4, "a window of 3 and a chunk of 4 lie on at most four pages of two"
        if request.decoding:
            assert len(kept) == 1 + request.computed % 2
    assert request.output == alone(LONG, 8)


def test_no_prefix_reuse_with_a_window_and_the_reason_is_given():
    bench = Bench(budget=16, pages=20, window=3, window_pages=12)
    for _ in range(2):
        bench.add(LONG, 1)
        bench.drain()
    assert bench.requests[1].reused == 0
    assert bench.scheduler.prefix_reuse_reason.startswith("sliding-window layers keep only the last 3 tokens")


@pytest.mark.parametrize(("free", "comes"), [(1, False), (2, True)])
def test_a_prompt_also_leaves_a_window_page_for_each_that_runs(free, comes):
    bench = Bench(budget=2, pages=30, window=2, window_pages=2 + free)
    bench.add([1], 7)
    bench.step()
    assert bench.scheduler.memory.window_pages.free == free
    late = bench.add([2], 3)
    bench.step()
    assert bool(late.row) == comes


def test_a_prompt_that_waits_for_window_pages_is_not_passed_by_a_new_one():
    bench = Bench(budget=8, pages=70, page_size=1, window=6, window_pages=17, mixed=True)
    bench.add([1], 9)
    bench.step()
    long, late = bench.add([2] * 28, 1), bench.add([3], 1)
    for _ in range(4):
        batch = bench.step()
    assert shape(batch) == [0], "five pages for the one that decodes, five and seven more are not left"
    assert long.computed == 21 and bench.scheduler.memory.window_pages.free == 6 and not late.row
    bench.drain()
    assert long.preemptions == 0 and long.output == alone(long.prompt, 1)


def test_the_youngest_gives_way_for_window_pages_too():
    bench = Bench(budget=3, pages=30, window=6, window_pages=6, page_size=2)
    for prompt in ([1, 2], [3], [4]):
        bench.add(prompt, 8)
    bench.drain()
    assert sum(request.preemptions for request in bench.requests) > 0 == bench.requests[0].preemptions


@given(
    count=st.integers(1, 6), context=st.integers(2, 60), page_size=st.integers(1, 5), budget=st.integers(1, 30),
    window=st.none() | st.integers(1, 40), mixed=st.booleans(),
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=10),
    drafts=st.tuples(st.sampled_from([0, 0, 1, 3, 9]), st.integers(0, 99)),
)  # fmt: skip
def test_sizes_for_so_many_requests_let_them_run_as_with_pages_without_end(
    count, context, page_size, budget, window, mixed, requests, drafts
):
    """Nobody gives way, and nobody waits for a page of either pool: the schedule is that of a cache without limit."""
    lookahead, seed = drafts
    layout = CacheLayout.for_requests(
        count, context, page_size, budget=budget, window=window, lookahead=lookahead
    )
    assert layout.room == context
    endless = replace(layout, pages=9999, window_pages=9999 if window else 0)

    def batches(layout):
        scheduler, source = Scheduler(layout, SchedulerOptions(budget, mixed=mixed)), Random(seed)
        for index, (length, limit) in enumerate(requests):
            prompt = [1] * min(length, context)
            scheduler.add(Request(index, prompt, min(limit, context - len(prompt))), 0.0)
        found = []
        while batch := scheduler.plan(0.0):
            found.append(shape(batch))
            most = 1 + lookahead * isinstance(batch, DecodeBatch)
            ends = sum(chunk.last for chunk in batch.chunks)
            scheduler.commit(batch, [[1] * source.randint(1, most) for _ in range(ends)], 0.0)
            assert not any(request.preemptions for request in batch.requests)
        return found

    assert batches(layout) == batches(endless)


def test_a_window_pool_is_sized_for_windows_and_one_budget_and_not_for_contexts():
    layout = CacheLayout.for_requests(64, 32768, 16, budget=8192, window=1024)
    newest, others = (1024 + 8192) // 16 + 1, 63 * (1024 // 16 + 2) + 8192 // 16
    assert layout.window_pages == newest + others + 63 + 1 < layout.pages // 20
    short = CacheLayout.for_requests(2, 64, 16, budget=256, window=1024)
    assert short.window_pages == short.pages - 1, "a context within the window needs all of its pages"


def test_a_window_pool_too_small_for_one_chunk_is_refused():
    Bench(budget=4, pages=20, window=3, window_pages=5)
    with pytest.raises(
        InputError, match="3 window pages cannot hold a window of 3 tokens and a chunk of 4; give 4"
    ):
        Bench(budget=4, pages=20, window=3, window_pages=4)


def leak_a_row(scheduler):
    scheduler.memory.rows.take(1)


def leak_a_window_page(scheduler):
    scheduler.memory.window_pages.take(1)


def share_a_page(scheduler):
    scheduler.running[1].pages[0] = scheduler.running[0].pages[0]


def lose_pages(scheduler):
    scheduler.memory.pages.release(scheduler.running[0].pages[1:])
    scheduler.running[0].pages[1:] = []


def keep_memory_while_waiting(scheduler):
    scheduler.waiting[0].row = 1


def run_too_many(scheduler):
    scheduler.max_running = 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (leak_a_row, "request rows .* in use, requests hold"),
        (leak_a_window_page, "window pages .* in use, requests hold"),
        (share_a_page, "pages are held as"),
        (lose_pages, "request 0 has computed tokens without a page"),
        (keep_memory_while_waiting, "request 2 waits and holds memory"),
        (run_too_many, "2 requests run, 1 may"),
    ],
)
def test_the_invariants_catch_planted_faults(fault, message):
    bench = Bench(budget=8, pages=20, rows=4, max_running=2, window=9, window_pages=12)
    for prompt in ([1, 2, 3], [4, 5, 6], [1]):
        bench.add(prompt, 3)
    bench.step()
    fault(bench.scheduler)
    with pytest.raises(AccountingError, match=message):
        bench.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerOptions(0), "token_budget 0"),
        (lambda: SchedulerOptions(1, max_running=0), "max_running 0"),
        (lambda: CacheLayout(1, 1, 2, 1), "1 pages and 2 rows leave none"),
        (lambda: CacheLayout(2, 1, 1, 1), "2 pages and 1 rows leave none"),
        (lambda: CacheLayout(2, 0, 2, 1), "page_size 0"),
        (lambda: CacheLayout(2, 1, 2, 1, window=0), "window 0"),
        (lambda: CacheLayout.for_requests(0, 16, 16, budget=8), "1 pages and 1 rows leave none"),
        (lambda: CacheLayout.for_requests(1, -16, 16, budget=8), "1 pages and 2 rows leave none"),
        (lambda: CacheLayout.for_requests(1, 16, 16, budget=8, window=0), "window 0"),
        (lambda: Sampling(-0.1), "temperature must be a finite number from 0 to"),
        (lambda: Sampling(float("nan")), "got nan"),
        (lambda: Sampling(1.0, seed=-1), "seed must be a whole number from 0"),
        (lambda: Sampling(1.0, seed=1 << 63), "got 9223372036854775808"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_the_scheduler_needs_no_torch(environment):
    code = "import sys, cglab.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0
    assert Scheduler.__module__ in sys.modules
