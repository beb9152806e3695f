"""The closed-loop load on a stand-in server with a clock of its own."""

import dataclasses
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.load import Load, drive, payload_hash
from cglab.engine.requests import Event, Sampling
from cglab.errors import InputError
from tests.engine.stand_in import VOCABULARY as FEW
from tests.engine.stand_in import Bench, alone

VOCABULARY = 50


class StandIn:
    """Takes ``rows`` requests at a time: a step admits and prefills (1 s a fresh token) or decodes (1 s).

    What it has computed it knows the next time, as a prefix cache does; ``room`` is its longest request.
    """

    def __init__(self, rows=2, room=1000, speed=1.0):
        self.rows, self.room, self.speed = rows, room, speed
        self.time = 1000.0
        self.waiting, self.running = deque(), []
        self.known = set()
        self.log, self.most = [], 0

    @property
    def idle(self):
        return not self.waiting and not self.running

    def now(self):
        return self.time

    def submit(self, request):
        if len(request.prompt) + request.limit > self.room:
            raise InputError(f"request {request.index} does not fit into {self.room}")
        request.arrived_at = self.time
        self.log.append(request.index)
        if request.limit:
            self.waiting.append(request)
        else:
            request.end("length", self.time)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def cancel(self, request):
        if request.finish is None:
            (self.waiting if request in self.waiting else self.running).remove(request)
            request.end("cancelled", self.time)

    def flush_cache(self):
        self.known.clear()

    def step(self):
        batch = self.running
        if self.waiting and len(self.running) < self.rows:
            batch = [self.waiting.popleft()]
            self.running += batch
            self._prefill(*batch)
        else:
            self.time += self.speed
        events = []
        for request in batch:
            request.accept([request.sampling.seed % VOCABULARY], self.time)
            events.append(Event(request, request.output[-1], self.time, request.finish))
        self.running = [request for request in self.running if request.finish is None]
        return events

    def _prefill(self, request):
        request.admitted_at = self.time
        prompt = tuple(request.prompt)
        known = (count for count in range(len(prompt) - 1, 0, -1) if prompt[:count] in self.known)
        request.reused = next(known, 0)
        self.known |= {prompt[:count] for count in range(1, len(prompt) + 1)}
        self.time += self.speed * (len(prompt) - request.reused)


class Scheduled:
    """The real scheduler with a model that reads its cache, behind the same interface."""

    def __init__(self, **options):
        self.bench = Bench(**options)
        self.scheduler = self.bench.scheduler

    @property
    def idle(self):
        return self.scheduler.idle

    def now(self):
        return self.bench.tick()

    def submit(self, request):
        self.scheduler.add(request, self.now())
        self.bench.requests.append(request)

    def step(self):
        before = len(self.bench.events)
        self.bench.step()
        return self.bench.events[before:]

    def cancel(self, request):
        return self.bench.cancel(request)

    def flush_cache(self):
        self.scheduler.memory.pages.evict(self.scheduler.memory.pages.cached)


LOADS = st.builds(
    Load,
    count=st.integers(1, 6),
    concurrency=st.integers(1, 4),
    prompt_tokens=st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(4, 9)),
    new_tokens=st.integers(0, 5) | st.tuples(st.integers(0, 2), st.integers(2, 5)),
    shared_prefix=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.7]),
)


@given(LOADS)
def test_requests_keep_to_the_load_and_come_out_the_same_every_time(load):
    requests = load.requests(VOCABULARY)
    prefix = load.prefix(VOCABULARY)
    ranges = [
        length if isinstance(length, tuple) else (length, length)
        for length in (load.prompt_tokens, load.new_tokens)
    ]
    for index, request in enumerate(requests):
        assert request.index == index and not request.stops
        assert request.prompt[: load.shared_prefix] == prefix
        assert ranges[0][0] <= len(request.prompt) - load.shared_prefix <= ranges[0][1]
        assert ranges[1][0] <= request.limit <= ranges[1][1]
        assert all(type(token) is int and 0 <= token < VOCABULARY for token in request.prompt)
        assert request.sampling.temperature == load.temperature
    assert payload_hash(requests) == payload_hash(load.requests(VOCABULARY))


@given(LOADS, st.integers(1, 9))
def test_a_longer_load_begins_with_the_shorter_one(load, more):
    longer = dataclasses.replace(load, count=load.count + more, concurrency=1)
    assert payload_hash(longer.requests(VOCABULARY)[: load.count]) == payload_hash(load.requests(VOCABULARY))


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.prompt.__setitem__(0, request.prompt[0] + 1),
        lambda request: setattr(request, "limit", request.limit + 1),
        lambda request: setattr(request, "sampling", Sampling(0.5, seed=request.sampling.seed + 1)),
        lambda request: setattr(request, "sampling", Sampling(0.6, seed=request.sampling.seed)),
        lambda request: setattr(request, "stops", frozenset({3})),
    ],
)
def test_the_payload_hash_sees_every_part_of_a_request(change):
    load = Load(3, 1, (2, 5), 4, temperature=0.5)
    requests = load.requests(VOCABULARY)
    change(requests[1])
    assert payload_hash(requests) != payload_hash(load.requests(VOCABULARY))


def test_the_payload_hash_sees_where_a_prompt_ends():
    """The same token ids in a row, cut elsewhere, are other requests."""
    one, other = Load(2, 1, 4, 1).requests(VOCABULARY), Load(2, 1, 4, 1).requests(VOCABULARY)
    other[0].prompt, other[1].prompt = one[0].prompt + one[1].prompt[:1], one[1].prompt[1:]
    assert payload_hash(one) != payload_hash(other)


def test_no_two_requests_and_no_prefix_share_their_tokens():
    """Fresh tokens that repeat the prefix, or each other, would be taken from the cache."""
    load = Load(9, 1, 40, 1, shared_prefix=40)
    fresh = [tuple(request.prompt[40:]) for request in load.requests(VOCABULARY)]
    assert len({tuple(load.prefix(VOCABULARY)), *fresh}) == 10


def test_sampling_is_seeded_per_request():
    seeds = [request.sampling.seed for request in Load(20, 1, 3, 3, temperature=1.0).requests(VOCABULARY)]
    assert len(set(seeds)) == 20


def test_timings_by_hand():
    """Two rows: the third request waits until the first has ended."""
    result = drive(StandIn(), Load(3, 3, 4, 3), VOCABULARY)
    first, second, third = result.requests
    # Prefill of 0 until 1004, of 1 until 1008, two decode steps until 1010, prefill of 2 until 1014, two steps.
    assert first.token_times == (1004.0, 1009.0, 1010.0)
    assert second.token_times == (1008.0, 1009.0, 1010.0)
    assert third.token_times == (1014.0, 1015.0, 1016.0)
    assert [each.queueing for each in result.requests] == [0.0, 4.0, 10.0]
    assert [each.ttft for each in result.requests] == [4.0, 8.0, 14.0]
    assert [each.tpot for each in result.requests] == [3.0, 1.0, 1.0]
    assert [each.e2e for each in result.requests] == [10.0, 10.0, 16.0]
    assert first.gaps == [5.0, 1.0]
    assert (result.seconds, result.steps, result.unsent) == (16.0, 7, 0)
    assert [len(output) for output in result.outputs] == [3, 3, 3]


@given(LOADS, st.integers(1, 4))
def test_concurrency_is_held_and_everybody_ends(load, rows):
    server = StandIn(rows)
    result = drive(server, load, VOCABULARY)
    assert server.idle and server.most <= load.concurrency
    assert [each.index for each in result.requests] == list(range(load.count))
    assert all(each.completed for each in result.requests)
    assert [len(output) for output in result.outputs] == [each.limit for each in load.requests(VOCABULARY)]
    assert server.most == min(load.concurrency, load.count) or any(each.e2e == 0 for each in result.requests)


@given(LOADS, st.sampled_from([0.001, 0.5, 40.0]))
def test_what_is_sent_when_depends_on_completions_and_not_on_clocks(load, speed):
    def sends(server):
        order = []
        drive(server, load, VOCABULARY, after_step=lambda events: order.append(list(server.log)))
        return order

    assert sends(StandIn()) == sends(StandIn(speed=speed))


def test_a_shared_prefix_is_cached_before_the_load_and_earlier_runs_are_not():
    server, load = StandIn(), Load(4, 2, 5, 2, shared_prefix=8)
    for _ in range(2):  # the second run would find all of its prompts
        result = drive(server, load, VOCABULARY)
        assert [(each.prompt_tokens, each.reused_tokens) for each in result.requests] == [(13, 8)] * 4
        assert len(result.requests) == 4 and result.requests[0].ttft == 5.0


def test_the_real_scheduler_serves_a_load_with_a_cached_prefix_and_preemption():
    server, load = Scheduled(pages=16, rows=5, budget=6), Load(12, 4, (1, 6), (0, 9), shared_prefix=8)
    result = drive(server, load, FEW)
    requests = load.requests(FEW)
    assert [list(output) for output in result.outputs] == [
        alone(each.prompt, each.limit) for each in requests
    ]
    assert sum(each.preemptions for each in result.requests) > 0
    for each, request in zip(result.requests, requests, strict=True):
        assert each.reused_tokens >= 8 * bool(request.limit)
        times = [
            each.arrived_at,
            *([each.admitted_at] if request.limit else []),
            *each.token_times,
            each.finished_at,
        ]
        assert times == sorted(times)


def test_requests_that_end_at_once_are_followed_by_the_next():
    result = drive(StandIn(), Load(5, 2, 3, 0), VOCABULARY)
    assert [each.finish for each in result.requests] == ["length"] * 5
    assert {(each.ttft, each.tpot, each.e2e) for each in result.requests} == {(None, None, 0.0)}
    assert result.steps == 0


def test_what_the_server_refuses_is_an_error_with_its_words():
    result = drive(StandIn(room=12), Load(12, 2, (4, 12), 4), VOCABULARY)
    refused = result.ended("error")
    assert refused and len(refused) < 12
    assert all("does not fit into 12" in each.error and each.prompt_tokens > 8 for each in refused)
    assert all(each.ttft is None and each.e2e is None and not each.completed for each in refused)
    assert {each.finish for each in result.requests} == {"error", "length"}


def test_cancelled_requests_make_room_and_are_told_apart():
    server = StandIn()
    seen = []

    def cancel_odd(events):
        for event in events:
            seen.append(event.token)
            if event.request.index % 2:
                server.cancel(event.request)

    result = drive(server, Load(6, 2, 2, 3), VOCABULARY, after_step=cancel_odd)
    assert [each.finish for each in result.requests] == ["length", "cancelled"] * 3
    assert all(len(each.token_times) == 1 for each in result.ended("cancelled"))
    assert len(seen) == 3 * 3 + 3


def test_time_that_is_up_leaves_requests_in_flight_and_the_server_idle():
    server = StandIn()
    result = drive(server, Load(5, 3, 4, 100), VOCABULARY, seconds=12.0)
    assert [each.finish for each in result.requests] == [None, None, None]
    assert [len(each.token_times) for each in result.requests] == [5, 5, 0]
    assert result.requests[2].ttft is None and result.requests[0].ttft == 4.0
    assert (result.unsent, result.seconds, server.idle) == (2, 12.0, True)


def test_requests_that_the_server_lost_are_in_flight_and_not_waited_for():
    server = StandIn()
    result = drive(server, Load(3, 3, 4, 9), VOCABULARY, after_step=lambda events: server.running.clear())
    assert [each.finish for each in result.requests] == [None] * 3


def test_a_server_that_breaks_is_left_without_our_requests():
    server = StandIn()

    def broken(events):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        drive(server, Load(5, 3, 4, 9), VOCABULARY, after_step=broken)
    assert server.idle


def test_a_busy_server_and_no_time_are_refused():
    server = StandIn()
    server.submit(Load(1, 1, 2, 2).requests(VOCABULARY)[0])
    with pytest.raises(InputError, match="requests of others"):
        drive(server, Load(1, 1, 2, 2), VOCABULARY)
    with pytest.raises(InputError, match="above 0"):
        drive(StandIn(), Load(1, 1, 2, 2), VOCABULARY, seconds=0.0)
    with pytest.raises(InputError, match="vocabulary=0"):
        drive(StandIn(), Load(1, 1, 2, 2), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"concurrency": 0},
        {"count": True},
        {"prompt_tokens": 0},
        {"prompt_tokens": (5, 4)},
        {"prompt_tokens": (1, 2, 3)},
        {"prompt_tokens": 2.0},
        {"new_tokens": -1},
        {"new_tokens": (0, "4")},
        {"shared_prefix": -1},
        {"seed": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
    ],
)
def test_wrong_loads_are_refused(wrong):
    with pytest.raises(InputError):
        Load(**{"count": 4, "concurrency": 2, "prompt_tokens": 8, "new_tokens": 8} | wrong)


def test_a_load_and_its_result_are_plain_values():
    load = Load(2, 1, (2, 4), 2)
    assert load.as_dict()["prompt_tokens"] == (2, 4)
    told = drive(StandIn(), load, VOCABULARY).as_dict()
    assert told["load"] == load.as_dict() and len(told["payload"]) == 64
    assert len(told["requests"][0]["token_times"]) == 2
