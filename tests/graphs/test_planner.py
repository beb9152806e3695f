"""The bucket planner against brute force over every subset, and beside SGLang's lists."""

import dataclasses
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cglab.errors import BucketError, InputError
from cglab.graphs import budgeted_path
from cglab.graphs.buckets import sglang_decode, sglang_prefill
from cglab.graphs.planner import BucketBudget, BucketCosts, plan_buckets, run_trace

TOP = 9
LIMITS = st.none() | st.integers(0, 14)


def costs(step=lambda size: 2 + size, eager=math.inf, memory=lambda size: 1, seconds=lambda size: 0.1):
    return BucketCosts(step, eager if callable(eager) else lambda size: eager, memory, seconds)


def rising(lowest, highest):
    """A cost of every size from 1 to ``TOP`` that never falls."""
    return st.lists(st.integers(lowest, highest), min_size=TOP, max_size=TOP).map(
        lambda values: dict(enumerate(sorted(values), start=1))
    )


def brute_force(trace, prices, budget, universe, top, ceiling):
    """Least time over every subset of ``universe`` within the budget, ``top`` in it unless None."""
    best = math.inf
    for count in range(len(universe) + 1):
        for chosen in combinations(universe, count):
            if top is not None and top not in chosen:
                continue
            spent = (
                count,
                sum(prices.memory_bytes(size) for size in chosen),
                sum(round(1e6 * prices.capture_seconds(size)) for size in chosen),
            )
            seconds = budget.capture_seconds
            limits = (budget.buckets, budget.memory_bytes, None if seconds is None else round(1e6 * seconds))
            if any(limit is not None and used > limit for used, limit in zip(spent, limits, strict=True)):
                continue
            time = 0.0
            for live, steps in trace.items():
                holding = [size for size in chosen if size >= live]
                served = holding and (ceiling is None or min(holding) <= ceiling * live)
                time += steps * (prices.step_ms(min(holding)) if served else prices.eager_ms(live))
            best = min(best, time)
    return best


@st.composite
def cases(draw):
    trace = draw(st.dictionaries(st.integers(1, TOP), st.integers(1, 9), min_size=1))
    step, memory, micros = draw(rising(1, 20)), draw(rising(0, 5)), draw(rising(0, 5))
    dearer = draw(st.sampled_from([0, 3, 40, math.inf]))
    prices = BucketCosts(
        step.__getitem__, lambda size: step[size] + dearer, memory.__getitem__, lambda size: micros[size] / 10
    )
    seconds = draw(LIMITS)
    budget = BucketBudget(
        draw(LIMITS), None if seconds is None else seconds / 10, draw(st.none() | st.integers(0, 6))
    )
    return trace, prices, budget, draw(st.booleans()), draw(st.sampled_from([None, 1.0, 1.5, 2.0]))


@settings(max_examples=150)
@given(cases(), st.sampled_from([1, 128]))
def test_plan_equals_brute_force_over_every_size(case, width):
    """Over all sizes up to the maximum, not only the planner's candidates; also where a pass must drop states."""
    trace, prices, budget, maximum_is_bucket, ceiling = case
    top = max(trace)
    best = brute_force(trace, prices, budget, range(1, top + 1), top if maximum_is_bucket else None, ceiling)
    options = {"maximum_is_bucket": maximum_is_bucket, "ceiling": ceiling}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgeted_path, "FIRST_WIDTH", width)
        if math.isinf(best):
            with pytest.raises(BucketError, match="no set of"):
                plan_buckets(trace, prices, budget, **options)
            return
        chosen = plan_buckets(trace, prices, budget, **options).chosen
    assert chosen.time_ms == pytest.approx(best)
    assert budget.buckets is None or len(chosen.buckets) <= budget.buckets
    assert budget.memory_bytes is None or chosen.memory_bytes <= budget.memory_bytes
    assert budget.capture_seconds is None or chosen.capture_seconds <= budget.capture_seconds
    assert not maximum_is_bucket or chosen.buckets[-1] == top


@settings(max_examples=40)
@given(st.data())
def test_measured_costs_that_rise_and_fall_are_planned_exactly_too(data):
    """A mapping's keys are the candidates, so nothing need be monotone."""
    any_cost = st.fixed_dictionaries({size: st.integers(1, 9) for size in range(1, 8)})
    step, memory = data.draw(any_cost), data.draw(any_cost)
    trace = data.draw(st.dictionaries(st.integers(1, 7), st.integers(1, 9), min_size=1))
    mapped = BucketCosts(step, dict.fromkeys(trace, 30), memory, dict.fromkeys(step, 0.0))
    called = BucketCosts(step.__getitem__, lambda size: 30, memory.__getitem__, lambda size: 0.0)
    budget = BucketBudget(memory_bytes=12)
    chosen = plan_buckets(trace, mapped, budget, maximum=7, rule=lambda top: [top]).chosen
    assert chosen.time_ms == brute_force(trace, called, budget, range(1, 8), 7, None)


@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(1, 300), st.integers(1, 50), min_size=1, max_size=40),
    st.sampled_from([sglang_decode, sglang_prefill]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 1000),
)
def test_never_worse_than_sglang_at_its_own_memory(trace, rule, ceiling, slope):
    prices = costs(lambda size: 5 + size / 8, lambda size: 30 + size / 8, lambda size: 100_000 + slope * size)
    listed = run_trace(trace, prices, rule(max(trace)), ceiling=ceiling)
    assume(listed.buckets)
    budget = BucketBudget(listed.memory_bytes, listed.capture_seconds, len(listed.buckets))
    plan = plan_buckets(
        trace, prices, budget, maximum_is_bucket=max(trace) in listed.buckets, ceiling=ceiling, rule=rule
    )
    assert plan.sglang == listed
    assert plan.chosen.time_ms <= listed.time_ms * (1 + 1e-12)
    assert plan.chosen.memory_bytes <= listed.memory_bytes


@settings(max_examples=100)
@given(
    st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1),
    st.lists(st.integers(1, 20), min_size=12, max_size=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.sampled_from([0, 3, 40]),
    st.sampled_from([(sglang_decode, None), (sglang_prefill, 2.0)]),
)
def test_at_sglangs_memory_alone_the_plan_equals_brute_force(trace, steps, memory, dearer, phase):
    """Nothing but memory is limited, and to just what SGLang's list takes; more and smaller buckets are allowed."""
    rule, ceiling = phase
    steps, top = sorted(steps), max(trace)
    prices = costs(
        lambda size: steps[size - 1], lambda size: steps[size - 1] + dearer, lambda size: sorted(memory)[size - 1]
    )  # fmt: skip
    listed = run_trace(trace, prices, rule(top), ceiling=ceiling)
    budget, held = BucketBudget(memory_bytes=listed.memory_bytes), top in listed.buckets
    best = brute_force(trace, prices, budget, range(1, top + 1), top if held else None, ceiling)
    plan = plan_buckets(trace, prices, budget, maximum_is_bucket=held, ceiling=ceiling, rule=rule)
    assert plan.chosen.time_ms == best <= listed.time_ms
    assert plan.chosen.memory_bytes <= listed.memory_bytes == plan.sglang.memory_bytes


def test_a_bucket_may_be_larger_than_all_it_serves_so_that_the_ceiling_leaves_cheap_steps_eager():
    """Of 8 to 12 rows, 11 is the first that does not take in the steps of 5, which are cheaper eager."""
    prices = costs(
        lambda size: 3 if size == 12 else 1 + (size > 7), lambda size: 3 if size == 12 else 1 + (size > 7)
    )
    trace = dict.fromkeys((1, 2, 3, 4, 5, 8, 12), 1)
    plan = plan_buckets(trace, prices, BucketBudget(buckets=2), ceiling=2.0, rule=sglang_prefill)
    assert plan.chosen.buckets == (11, 12)
    assert (
        plan.chosen.time_ms
        == brute_force(trace, prices, BucketBudget(buckets=2), range(1, 13), 12, 2.0)
        == 10
    )


def test_never_worse_than_sglang_where_memory_falls_with_the_size():
    """Its bucket of 8 is cheap, one at the live size 7 is not: the list's own sizes are candidates."""
    prices = costs(memory=lambda size: 1 if size in sglang_decode(9) else 50, eager=100.0)
    plan = plan_buckets({7: 5, 9: 1}, prices, BucketBudget(memory_bytes=10))
    assert plan.chosen.buckets == (8, 9)
    assert plan.chosen.time_ms == plan.sglang.time_ms


@settings(max_examples=100)
@given(st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 128]))
def test_paths_equal_brute_force_over_any_lengths_and_resources(nodes, resources, seed, width):
    generator = np.random.default_rng(seed)
    span = generator.integers(0, 30, (nodes + 1, nodes + 1)).astype(float)
    rest = generator.integers(0, 60, nodes + 1).astype(float)
    used = generator.integers(0, 6, (nodes + 1, resources))
    used[0] = 0
    limits = generator.integers(0, 12, resources)
    problem = budgeted_path.BudgetedPath(span, rest, used, limits)
    every = [list(path) for count in range(nodes + 1) for path in combinations(range(1, nodes + 1), count)]
    best = min(problem._time(path) for path in every if (used[path].sum(axis=0) <= limits).all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgeted_path, "FIRST_WIDTH", width)
        found = problem.least_time()
    assert problem._time(found) == best
    assert (used[found].sum(axis=0) <= limits).all()


@given(st.integers(0, 40), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_only_states_that_nothing_matches_are_kept(count, resources, seed):
    generator = np.random.default_rng(seed)
    times = generator.integers(0, 5, count).astype(float)
    used = generator.integers(0, 5, (count, resources))
    rows = np.column_stack([times, used])
    kept = budgeted_path._undominated(times, used)
    for row in rows:
        assert (rows[kept] <= row).all(axis=1).any()  # every state is kept, or matched by one that is
    for state in kept:
        assert (rows[kept] <= rows[state]).all(axis=1).sum() == 1  # and no kept one by another


def test_a_plan_for_two_lengths_beats_sglang_with_fewer_buckets():
    plan = plan_buckets({33: 100, 250: 10}, costs(), BucketBudget(buckets=2))
    assert plan.chosen.buckets == (33, 250)
    assert plan.chosen.time_ms == 100 * 35 + 10 * 252
    assert plan.chosen.waste == 0.0
    assert (plan.chosen.memory_bytes, plan.chosen.capture_seconds) == (2, pytest.approx(0.2))
    assert plan.sglang.buckets == tuple(sglang_decode(250))
    assert plan.sglang.time_ms == 100 * 42 + 10 * 252
    assert plan.sglang.waste == pytest.approx((100 * 40 + 2500) / (3300 + 2500) - 1)
    assert plan.sglang.memory_bytes == len(plan.sglang.buckets)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.chosen.time_ms = 0.0


def test_b67_the_ceiling_sends_sparse_buckets_to_eager():
    prices, buckets = costs(eager=5.0), (2816, 3072, 8192)
    held = run_trace({2700: 1, 3208: 1}, prices, buckets, ceiling=2.0)
    assert (held.captured_steps, held.eager_steps) == (1, 1)
    assert held.time_ms == 2818 + 5.0
    assert held.waste == pytest.approx(2816 / 2700 - 1)
    free = run_trace({2700: 1, 3208: 1}, prices, buckets)
    assert (free.captured_steps, free.eager_steps) == (2, 0)


def test_p07_a_plan_honours_the_ceiling():
    """One bucket for both sizes would be refused at 4, so the second is put where it serves."""
    trace, prices = {4: 10, 16: 10}, costs(eager=100.0)
    assert plan_buckets(trace, prices, BucketBudget(buckets=1), ceiling=2.0).chosen.eager_steps == 10
    assert plan_buckets(trace, prices, BucketBudget(buckets=1)).chosen.eager_steps == 0


def test_p06_b61_the_maximum_is_captured_even_where_it_does_not_pay():
    trace, prices = {4: 10, 37: 1}, costs(eager=3.0)
    assert plan_buckets(trace, prices).chosen.buckets[-1] == 37
    assert plan_buckets(trace, prices, maximum_is_bucket=False).chosen.buckets == ()
    assert plan_buckets({4: 10}, costs(), maximum=37, rule=sglang_prefill).chosen.buckets == (4, 37)


def test_p03_b62_sizes_above_the_maximum_run_eager():
    plan = plan_buckets({4: 3, 50: 2}, costs(eager=20.0), maximum=8)
    assert max(plan.chosen.buckets) == 8
    assert (plan.chosen.captured_steps, plan.chosen.eager_steps) == (3, 2)
    assert plan.chosen.time_ms == 3 * 6 + 2 * 20


def test_seconds_are_cut_into_microseconds_to_the_safe_side():
    def planned(seconds, budget):
        prices = costs(seconds=lambda size: seconds)
        return plan_buckets({1: 1, 2: 1, 3: 1}, prices, BucketBudget(capture_seconds=budget)).chosen.buckets

    assert planned(0.07, 0.21) == (1, 2, 3)  # 0.07 * 3 is above 0.21 in floating point
    assert planned(0.062504, 0.187512) == (1, 2, 3)  # so is 0.062504 * 1e6 above the whole number
    assert len(planned(0.0700001, 0.21)) == 2  # rounds up to 70,001 microseconds


def test_hundreds_of_sizes_under_three_budgets_are_planned():
    """Costs without a pattern; the plan keeps to the budget and beats the list's best affordable part."""
    trace = {size: 1 + size * 7919 % 97 for size in range(1, 257)}
    prices = costs(
        lambda size: 5 + size / 50, lambda size: 40.0,
        lambda size: 8_000_000 + size * 30_011 % 1_000_003, lambda size: 0.05 + size * 0.001,
    )  # fmt: skip
    budget = BucketBudget(memory_bytes=100_000_000, capture_seconds=2.0, buckets=11)
    chosen = plan_buckets(trace, prices, budget).chosen
    assert chosen.memory_bytes <= 100_000_000 and chosen.capture_seconds <= 2.0 and len(chosen.buckets) <= 11
    thinned = run_trace(trace, prices, [24, 48, 72, 96, 120, 144, 168, 192, 216, 256])
    assert thinned.memory_bytes <= 100_000_000 and thinned.capture_seconds <= 2.0
    assert chosen.time_ms < thinned.time_ms


@pytest.mark.parametrize(
    ("trace", "changed", "message"),
    [
        ({}, {}, "has no steps"),
        ({4: 0}, {}, "has no steps"),
        ({0: 3}, {}, "has size 0 3 times"),
        ({4: -1}, {}, "has size 4 -1 times"),
        ({4: 1}, {"step_ms": {8: 1.0}}, "no cost of the maximum, 4"),
        ({4: 1}, {"eager_ms": {8: 1.0}}, "eager_ms has no cost of size 4"),
        ({4: 1}, {"step_ms": lambda size: math.nan}, "step_ms of size . is nan"),
        ({4: 1}, {"step_ms": lambda size: math.inf}, "from 0 and finite"),
        ({4: 1}, {"eager_ms": lambda size: -1.0}, "eager_ms of size 4 is -1.0"),
        ({4: 1}, {"memory_bytes": lambda size: 0.5}, "give whole bytes"),
    ],
)
def test_wrong_traces_and_costs_are_refused(trace, changed, message):
    with pytest.raises(InputError, match=message):
        plan_buckets(trace, dataclasses.replace(costs(), **changed))


@pytest.mark.parametrize("options", [{"maximum": 0}, {"ceiling": 0.5}, {"ceiling": math.nan}])
def test_wrong_options_are_refused(options):
    with pytest.raises(BucketError, match="at least 1"):
        plan_buckets({4: 1}, costs(), **options)
