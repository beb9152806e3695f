"""Plans for recorded traces: costs from a ledger, never slower than SGLang's list at its memory, best by brute force."""

import json
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cglab
from cglab.engine.batches import PrefillBatch, SchedulerOptions
from cglab.engine.generation import StepRecord
from cglab.engine.load import Load, drive
from cglab.engine.memory import CacheLayout
from cglab.engine.scheduler import Scheduler
from cglab.errors import BucketError, InputError
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.planner import BucketBudget, BucketCosts
from cglab.lab.bucket_costs import Measured, measured_costs
from cglab.lab.planning import PHASES, plan
from cglab.lab.size_trace import SizeTrace
from tests.graphs.test_planner import brute_force


def ledger(sizes, pool=lambda size: 0, device=lambda size: 100, seconds=lambda size: 0.1):
    """Lines in the order of capture."""
    return [
        CaptureCost(
            ShapeKey(size), 0.25 * seconds(size), 0.75 * seconds(size), pool(size), device(size), 9, 0, 1
        )
        for size in sorted(sizes, reverse=True)
    ]


class Counting:
    """The real scheduler on a model of one token, noting its steps as the engine does."""

    def __init__(self, budget, rows):
        layout = CacheLayout(pages=4096, page_size=16, rows=rows + 1, max_context=65536)
        self.scheduler = Scheduler(layout, SchedulerOptions(budget))
        self.steps = []
        self.time = 0.0

    @property
    def idle(self):
        return self.scheduler.idle

    def now(self):
        self.time += 1.0
        return self.time

    def submit(self, request):
        self.scheduler.add(request, self.now())

    def step(self):
        batch = self.scheduler.plan(self.now())
        kind = "prefill" if isinstance(batch, PrefillBatch) else "decode"
        self.steps.append(StepRecord(kind, len(batch.requests), batch.tokens, 0.0))
        return self.scheduler.commit(batch, [[0]] * sum(chunk.last for chunk in batch.chunks), self.now())

    def cancel(self, request):
        return self.scheduler.cancel(request, self.now())

    def flush_cache(self):
        self.scheduler.memory.pages.evict(self.scheduler.memory.pages.cached)


LOADS = {
    "chat": (
        {"prompt_tokens": (1, 8), "new_tokens": (4, 24)},
        {"prompt_tokens": (16, 900), "new_tokens": (8, 200)},
    ),
    "summaries": (
        {"prompt_tokens": (9, 30), "new_tokens": (1, 5)},
        {"prompt_tokens": 4000, "new_tokens": (20, 40)},
    ),
    "cached": (
        {"prompt_tokens": (2, 6), "new_tokens": (1, 9), "shared_prefix": 16},
        {"prompt_tokens": (700, 1024), "new_tokens": (8, 64), "shared_prefix": 8192},
    ),
}


@cache
def recorded(name, large):
    """A trace that the scheduler and the load generator made: small enough for brute force, or of a real size."""
    server = Counting(*((2048, 48) if large else (9, 9)))
    load = Load(120 if large else 40, 64 if large else 12, **LOADS[name][large])
    drive(server, load, 1000)
    return SizeTrace.from_steps(name, server.steps, load=load.as_dict())


def test_traces_hold_the_sizes_that_the_scheduler_made():
    for name in LOADS:
        trace = recorded(name, False)
        assert max(trace.steps("decode")) <= 9 and max(trace.steps("prefill")) <= 9
        assert len(trace.steps("decode")) > 3 and len(trace.steps("prefill")) > 3
    cached = recorded("cached", True)
    fresh = sum(len(request.prompt) - 8192 for request in Load(**cached.source["load"]).requests(1000))
    assert sum(size * count for size, count in cached.steps("prefill").items()) == fresh + 8192


COST = st.lists(st.integers(1, 20), min_size=9, max_size=9).map(
    lambda values: dict(enumerate(sorted(values), start=1))
)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", LOADS)
@settings(max_examples=15)
@given(COST, COST, st.sampled_from([0, 4, 40]))
def test_at_sglangs_memory_a_plan_for_a_recorded_trace_is_the_best_there_is(
    name, phase, step, memory, dearer
):
    """Against every subset of all sizes, and never slower than the list itself."""
    trace, eager = recorded(name, False), {size: step[size] + dearer for size in step}
    costs = measured_costs(ledger(step, device=memory.__getitem__), step, eager)
    found, rule = plan(trace, phase, costs).plan, PHASES[phase]
    assert found.sglang.buckets == tuple(rule.sizes(9))
    prices = BucketCosts(step.__getitem__, eager.__getitem__, memory.__getitem__, lambda size: 0.1)
    top = 9 if 9 in found.sglang.buckets else None
    budget = BucketBudget(memory_bytes=found.sglang.memory_bytes)
    assert found.chosen.time_ms == brute_force(
        trace.steps(phase), prices, budget, range(1, 10), top, rule.ceiling
    )
    assert found.chosen.time_ms <= found.sglang.time_ms
    assert found.chosen.memory_bytes <= found.sglang.memory_bytes


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", LOADS)
def test_at_sglangs_memory_a_plan_for_a_large_trace_is_never_slower(name, phase):
    trace = recorded(name, True)
    top = 2048 if phase == "prefill" else 48
    sizes = {1, *PHASES[phase].sizes(top)}
    costs = measured_costs(
        ledger(sizes, pool=lambda size: 20_000 * size if size == top else 512, device=lambda size: 2_000_000 + size),
        {size: 5 + size / 90 for size in sizes}, {size: 30 + size / 90 for size in sizes},
    )  # fmt: skip
    result = plan(trace, phase, costs)
    chosen, listed = result.plan.chosen, result.plan.sglang
    assert result.budget == BucketBudget(memory_bytes=listed.memory_bytes)
    assert chosen.time_ms < listed.time_ms and chosen.waste < listed.waste
    assert chosen.memory_bytes <= listed.memory_bytes and top in chosen.buckets


def test_costs_come_from_the_ledger_and_run_straight_between_sizes():
    lines = ledger(
        (1, 4, 16), pool=lambda size: size * 1000, device=lambda size: size * 10, seconds=lambda size: size
    )
    costs = measured_costs(lines, {1: 5.0, 16: 8.0})
    found = costs.at([1, 4, 10, 16])
    assert found.step_ms == pytest.approx({1: 5.0, 4: 5.6, 10: 6.8, 16: 8.0})
    # The 16,000 bytes of the pool's first growth are the largest bucket's alone: half-way to it there is no half.
    assert found.memory_bytes == {1: 1010, 4: 4040, 10: 2100, 16: 16160}
    assert found.capture_seconds == pytest.approx({1: 1.0, 4: 4.0, 10: 10.0, 16: 16.0})
    assert found.eager_ms(3) == math.inf
    assert costs.maximum == 16
    assert [size for size in (1, 4, 10, 16) if costs.measured(size)] == [
        1,
        16,
    ]  # 4 was captured but not timed


@given(st.dictionaries(st.integers(1, 99), st.floats(0, 9), min_size=1), st.integers(1, 99))
def test_interpolation_stays_between_its_neighbours_and_never_leaves_the_measured_sizes(points, size):
    cost = Measured("step_ms", points)
    if not min(points) <= size <= max(points):
        assert not cost.covers(size)
        with pytest.raises(InputError, match=f"not at {size}; measure it there"):
            cost(size)
        return
    below, above = max(s for s in points if s <= size), min(s for s in points if s >= size)
    low, high = sorted((points[below], points[above]))
    assert low - 1e-9 <= cost(size) <= high + 1e-9
    assert size not in points or cost(size) == points[size]


def test_a_plan_says_what_is_interpolated_and_what_is_no_candidate():
    costs = measured_costs(ledger((4, 8, 16)), {4: 5.0, 16: 6.0}, {1: 30.0, 40: 40.0})
    result = plan(SizeTrace("t", {"prefill": {2: 9, 5: 9, 16: 9, 20: 9}}), "prefill", costs)
    assert result.plan.sglang.buckets == (4, 8, 12, 16)
    assert result.plan.chosen.buckets == (4, 5, 16)
    assert result.interpolated == (5, 8, 12) and result.unmeasured == (2,)
    assert result.eager_interpolated == (2, 5, 16, 20)
    assert result.note == (
        "Costs of 3 buckets and 4 eager live sizes are interpolated; "
        "nothing was measured at live sizes 2, which are no candidates"
    )
    assert result.plan.chosen.eager_steps == 9  # 20 is above the maximum
    measured = measured_costs(ledger((1, 2)), {1: 5.0, 2: 6.0})
    assert plan(SizeTrace("t", {"decode": {1: 1, 2: 1}}), "decode", measured).note == "All costs are measured"


def test_table_words_and_record_say_the_same():
    costs = measured_costs(ledger((1, 2, 4, 8, 12)), {1: 5.0, 12: 16.0}, {1: 30.0, 12: 30.0})
    result = plan(SizeTrace("t", {"decode": {3: 10, 12: 1}}), "decode", costs, BucketBudget(buckets=2))
    frame = result.as_frame().set_index("set")
    assert frame.loc["plan"].to_dict() == {
        "buckets": 2, "time_ms": 86.0, "waste": 0.0, "captured": 11, "eager": 0, "memory_mb": 0.0002,
        "capture_s": pytest.approx(0.2), "sizes": "3, 12",
    }  # fmt: skip
    assert frame.loc["SGLang's list", "waste"] == pytest.approx(52 / 42 - 1)
    assert (
        str(result).splitlines()[1] == "plan: 2 buckets, 86 ms, waste 0.0%, 0 steps eager, 0.0002 MB, 0.2 s"
    )
    told = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert told["outcomes"]["plan"]["buckets"] == [3, 12] and told["budget"]["buckets"] == 2


def test_a_list_that_cannot_run_the_trace_has_no_time_in_a_record():
    """Without eager times no step may run eager, and SGLang's list has no bucket for one token."""
    costs = measured_costs(ledger((1, 4)), {1: 5.0, 4: 5.0})
    result = plan(SizeTrace("t", {"prefill": {1: 2, 4: 1}}), "prefill", costs, BucketBudget())
    assert result.plan.chosen.buckets == (1, 4) and math.isinf(result.plan.sglang.time_ms)
    assert result.as_dict()["outcomes"]["SGLang's list"]["time_ms"] is None


def test_a_load_on_the_engine_is_recorded_and_planned_for_with_the_runners_own_ledger():
    with cglab.open("pico-gqa", device="cpu", max_batch=6, max_context=64, buckets=[1, 2, 3, 4, 6]) as lab:
        lab.captures.decode, lab.captures.prefill = "full", "eager"
        runner = lab.runner("full")
        before = runner.coverage().copy()
        with lab.engine.watched() as steps:
            drive(lab.engine, Load(9, 5, (3, 9), (1, 8)), lab.config.vocab_size)
        trace = SizeTrace.from_steps("tape", steps, model="pico-gqa")
        counted = SizeTrace.from_coverage("tape", {"decode": runner.coverage() - before})
        costs = measured_costs(runner.captured.ledger, {1: 5.0, 6: 6.0}, {1: 9.0, 6: 9.0})
    assert counted.steps("decode") == trace.steps("decode") and max(trace.steps("decode")) == 5
    result = plan(trace, "decode", costs)
    assert costs.maximum == 6 and costs.pool_bytes > 0
    assert result.plan.sglang.buckets == (1, 2, 4, 6)
    assert result.plan.chosen.time_ms <= result.plan.sglang.time_ms
    assert result.plan.chosen.memory_bytes <= result.plan.sglang.memory_bytes


@pytest.mark.parametrize(
    ("lines", "step", "eager", "message"),
    [
        ([], {1: 1.0}, None, "one line a size"),
        ([*ledger((2,)), *ledger((2,))], {2: 1.0}, None, r"this one has \[2, 2\]"),
        (ledger((1, 2)), {1: 1.0}, None, "time the largest bucket, 2"),
        (ledger((1, 2)), {2: 1.0}, {}, "give None where no step may run eager"),
    ],
)
def test_incomplete_costs_are_refused(lines, step, eager, message):
    with pytest.raises(InputError, match=message):
        measured_costs(lines, step, eager)


def test_plans_that_cannot_be_made_are_refused():
    trace = SizeTrace("t", {"decode": {1: 1, 9: 1}, "draft": {1: 1}})
    costs = measured_costs(ledger((1, 9)), {1: 1.0, 9: 2.0}, {1: 9.0, 9: 9.0})
    with pytest.raises(InputError, match="'draft' is no phase with a rule; good names: "):
        plan(trace, "draft", costs)
    with pytest.raises(InputError, match="has no phase 'prefill'"):
        plan(trace, "prefill", costs)
    with pytest.raises(InputError, match="measured at sizes 4 to 9, not at 1"):
        plan(trace, "decode", measured_costs(ledger((4, 9)), {4: 1.0, 9: 2.0}))
    with pytest.raises(BucketError, match="raise the budget"):
        plan(trace, "decode", costs, BucketBudget(memory_bytes=10))


def test_a_bucket_during_whose_capture_the_driver_gave_memory_back_is_free_and_no_budget_for_others():
    costs = measured_costs(ledger([4, 8], device=lambda size: 50 if size == 8 else -50), {4: 1.0, 8: 2.0})
    known = costs.at([4, 8]).memory_bytes
    assert (known[4], known[8]) == (0, 50)
