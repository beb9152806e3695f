"""Random lives of the scheduler with a stand-in model: nothing leaks, nobody starves, outputs are as if alone."""

import random
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cglab.engine.batches import PrefillBatch
from tests.engine.stand_in import VOCABULARY, Bench, alone

TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12)
LIMITS = st.integers(0, 20)


def check_outcome(bench):
    """All have ended with the tokens they generate alone, and every page is free or cached."""
    assert bench.drain() == [request.output for request in bench.requests]
    for request in bench.requests:
        whole = alone(request.prompt, request.limit, request.stops)
        if request.finish in ("cancelled", "error"):
            assert request.output == whole[: len(request.output)] and len(request.output) < max(len(whole), 1)
        else:
            stopped = whole and whole[-1] in request.stops
            assert request.output == whole and request.finish == ("stop" if stopped else "length")
        assert not (request.row or request.pages or request.window_pages or request.computed or request.dirty)
        own = [event for event in bench.events if event.request is request]
        assert [event.token for event in own if event.token is not None] == request.output, "all is streamed"
        assert [event.finish for event in own if event.finish] == [request.finish], "and the end once"
        assert own[-1].finish and len(request.token_times) == len(request.output)
    memory = bench.scheduler.memory
    assert memory.pages.held == 0 and memory.rows.free == memory.rows.total
    assert memory.window_pages.free == memory.window_pages.total


def layouts(draw_int, draw_bool):
    """Options of a tiny bench, from a source of random integers and booleans."""
    page_size, budget = draw_int(1, 4), draw_int(1, 9)
    options = {
        "pages": draw_int(3, 12), "page_size": page_size, "rows": draw_int(2, 6), "budget": budget,
        "max_context": 40, "prefix_reuse": draw_bool(), "mixed": draw_bool(),
    }  # fmt: skip
    options["lookahead"] = ahead = draw_int(1, 5) if draw_bool() else 0
    options["pages"] += -(-ahead // page_size)
    options["host_pages"] = draw_int(0, 5) * 4
    if draw_bool():
        options["max_running"] = draw_int(1, 4)
    if draw_int(0, 2) == 0:
        window = draw_int(1, 6)
        options |= {
            "window": window,
            "window_pages": 4 + (window + budget + ahead) // page_size + draw_int(0, 5),
        }
    return options


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, cancels and steps in any order; ``Bench`` checks the books after each."""

    requests = Bundle("requests")

    @initialize(data=st.data())
    def open(self, data):
        self.bench = Bench(
            **layouts(lambda low, high: data.draw(st.integers(low, high)), lambda: data.draw(st.booleans()))
        )

    def busy(self):
        return not self.bench.scheduler.idle

    def _add(self, prompt, limit, stops=()):
        room = self.bench.layout.room
        prompt = prompt[:room]
        return self.bench.add(prompt, min(limit, room - len(prompt)), stops)

    @rule(target=requests, prompts=st.lists(PROMPTS, min_size=1, max_size=4), limit=LIMITS)
    def add(self, prompts, limit):
        return multiple(*(self._add(prompt, limit) for prompt in prompts))

    @rule(target=requests, prompt=PROMPTS, limit=LIMITS, stops=st.sets(TOKENS, max_size=2))
    def add_with_stops(self, prompt, limit, stops):
        return self._add(prompt, limit, stops)

    @rule(
        target=requests,
        earlier=requests,
        kept=st.integers(1, 40),
        more=st.lists(TOKENS, max_size=6),
        limit=LIMITS,
    )
    def add_with_a_known_prefix(self, earlier, kept, more, limit):
        return self._add(earlier.tokens[:kept] + more, limit)

    @rule(request=consumes(requests))
    def cancel(self, request):
        ended = request.finish is not None
        assert (self.bench.cancel(request) is None) == ended

    @precondition(busy)
    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.bench.step()

    @precondition(busy)
    @rule(request=consumes(requests))
    def cancel_in_mid_flight(self, request):
        self.bench.step(during=partial(self.bench.cancel, request))

    @precondition(busy)
    @rule()
    def fail(self):
        self.bench.step(fail=True)

    def teardown(self):
        if hasattr(self, "bench"):
            check_outcome(self.bench)


def test_any_life_of_the_scheduler():
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=100, stateful_step_count=30))


def one_life(seed):
    """A random sequence of adds, cancels, failures and steps; how much of each interesting thing happened."""
    source = random.Random(seed)
    bench = Bench(**layouts(source.randint, lambda: source.random() < 0.5))
    room = bench.layout.room
    common = source.choices(range(VOCABULARY), k=room)
    for _ in range(source.randint(5, 25)):
        kind = source.random()
        if kind < 0.35:
            size = source.randint(1, room)
            shared = source.randint(0, size)
            prompt = common[:shared] + source.choices(range(VOCABULARY), k=size - shared)
            stops = {0} if source.random() < 0.2 else ()
            bench.add(prompt, source.randint(0, room - size), stops)
        elif kind < 0.4 and bench.requests:
            bench.cancel(source.choice(bench.requests))
        elif kind < 0.43 and bench.requests:
            bench.step(during=partial(bench.cancel, source.choice(bench.requests)))
        else:
            bench.step(fail=kind > 0.99)
    check_outcome(bench)
    chunks = [chunk for batch in bench.batches if isinstance(batch, PrefillBatch) for chunk in batch.chunks]
    return {
        "preempted": any(request.preemptions for request in bench.requests),
        "reused": any(request.reused for request in bench.requests),
        "restored from the host": bench.restored > 0,
        "cancelled": any(request.finish == "cancelled" for request in bench.requests),
        "failed": any(request.finish == "error" for request in bench.requests),
        "stopped": any(request.finish == "stop" for request in bench.requests),
        "in chunks": any(not chunk.last for chunk in chunks),
        "mixed": bench.options.mixed and any(chunk.start >= len(chunk.request.prompt) for chunk in chunks),
        "windowed": bench.layout.window is not None,
        "several tokens a step": any(
            one == other for request in bench.requests for one, other in pairwise(request.token_times)
        ),
    }


def many_lives(seeds):
    """How many of the lives had each interesting thing in them."""
    seen = Counter()
    for seed in seeds:
        try:
            seen.update(name for name, happened in one_life(seed).items() if happened)
        except BaseException as error:
            error.add_note(f"one_life({seed}) repeats it")
            raise
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 2_500))
def test_ten_thousand_random_lives(first):
    """Of Python's own generator, so that they are the same everywhere and nothing in them becomes rare unseen."""
    seen = many_lives(range(first, first + 2_500))
    assert len(seen) == 10 and min(seen.values()) >= 125, seen


@pytest.mark.soak
def test_a_quarter_of_a_million_random_lives():
    many_lives(range(10_000, 260_000))


@pytest.mark.soak
def test_any_life_of_the_scheduler_at_length():
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=5_000, stateful_step_count=60))
