"""Bucket planner: which sizes to capture for a recorded trace, so that the trace takes the least time.

A plan is found by dynamic programming over candidate sizes, smallest first (``budgeted_path``). A state is the
last bucket chosen and what the buckets so far take (number, memory, capture time); it keeps the least time in
which the live sizes up to that bucket run. Resources are whole numbers, bytes and microseconds, and are summed
without rounding, so the plan is exact: no other subset of the candidates is faster within the budget.

With N candidates, time is O(N * states), memory O(N * N + states). Hundreds of sizes under any budgets or a thousand
under one take seconds; a thousand under two tight ones, with costs that follow no rule, may take minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cglab.errors import BucketError, InputError
from cglab.graphs.buckets import BucketRule, padding_waste, sglang_decode, smallest_bucket, within_ceiling
from cglab.graphs.budgeted_path import BudgetedPath, Floats

SizeCost = Callable[[int], float] | Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """What a bucket costs, each a function of its size or a mapping from it.

    Attributes:
        step_ms: a captured step of a bucket, milliseconds, finite. The keys of a mapping are the candidates.
        eager_ms: an eager step of a live size that no bucket serves, milliseconds; infinite forbids it.
        memory_bytes: whole bytes that a bucket adds to the shared pool, as measured: its growth, not its size.
        capture_seconds: warm-up and capture of one bucket, seconds; rounded up to microseconds.
    """

    step_ms: SizeCost
    eager_ms: SizeCost
    memory_bytes: SizeCost
    capture_seconds: SizeCost


@dataclass(frozen=True, slots=True)
class BucketBudget:
    """What all buckets together may cost; None leaves it open.

    Attributes:
        memory_bytes: graph memory, bytes.
        capture_seconds: warm-up and capture, seconds; rounded down to microseconds.
        buckets: number of buckets.
    """

    memory_bytes: int | None = None
    capture_seconds: float | None = None
    buckets: int | None = None


@dataclass(frozen=True, slots=True)
class BucketOutcome:
    """A trace run on a list of buckets.

    Attributes:
        buckets: sizes, ascending.
        time_ms: of all steps, milliseconds; infinite if a step that must not run eager has no bucket.
        waste: rows computed by captured steps over their live rows, less one (B67); 0.0 without any.
        captured_steps: steps that a bucket serves.
        eager_steps: steps above the largest bucket (P3), or refused by the waste ceiling (P7).
        memory_bytes: bytes of all buckets.
        capture_seconds: seconds of all buckets.
    """

    buckets: tuple[int, ...]
    time_ms: float
    waste: float
    captured_steps: int
    eager_steps: int
    memory_bytes: int
    capture_seconds: float


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The best buckets for a trace, beside SGLang's list on the same trace.

    Attributes:
        chosen: the fastest set within the budget.
        sglang: SGLang's list at the same maximum and ceiling, within the budget or not.
    """

    chosen: BucketOutcome
    sglang: BucketOutcome


def run_trace(
    trace: Mapping[int, int], costs: BucketCosts, buckets: Iterable[int], *, ceiling: float | None = None
) -> BucketOutcome:
    """What a trace takes on given buckets, each step served by the smallest that holds it, or eager.

    Args:
        trace: number of steps by live size, rows or tokens.
        costs: of the buckets and of eager steps.
        buckets: sizes to capture.
        ceiling: largest bucket over live size that is admitted (P7: 2.0 in prefill); None admits all.

    Raises:
        InputError: for a trace without steps, or a cost that is missing, negative or not a number.
    """
    sizes, counts = _steps(trace)
    ordered = tuple(sorted(buckets))
    spent, rows, live, captured = [], 0, 0, 0
    for size, count in zip(sizes, counts, strict=True):
        bucket = smallest_bucket(size, ordered)
        if bucket is None or not within_ceiling(size, bucket, ceiling):
            spent.append(count * _cost(costs.eager_ms, size, "eager_ms", infinite=True))
        else:
            spent.append(count * _cost(costs.step_ms, bucket, "step_ms"))
            rows, live, captured = rows + count * bucket, live + count * size, captured + count
    return BucketOutcome(
        ordered,
        math.fsum(spent),
        padding_waste(live, rows) if live else 0.0,
        captured,
        sum(counts) - captured,
        sum(_bytes(costs, bucket) for bucket in ordered),
        sum(_microseconds(costs, bucket) for bucket in ordered) / 1e6,
    )


def plan_buckets(
    trace: Mapping[int, int],
    costs: BucketCosts,
    budget: BucketBudget | None = None,
    *,
    maximum: int | None = None,
    maximum_is_bucket: bool = True,
    ceiling: float | None = None,
    rule: BucketRule = sglang_decode,
) -> BucketPlan:
    """The set of buckets on which a trace takes the least time within a budget.

    Candidates are the keys of ``costs.step_ms`` if that is a mapping, else the live sizes, SGLang's list and the
    maximum; with a ceiling also the first size that is too large for each live one, as a step may be cheaper eager.
    Where no cost falls with the size, no other size can do better: a bucket may come down until it holds the largest
    live size that it serves, and no smaller step than before is admitted. SGLang's list is one of the sets compared,
    so the plan is never slower than it where the list keeps to the budget and, if that is asked, holds the maximum.

    Args:
        trace: number of steps by live size, rows or tokens.
        costs: of buckets and of eager steps.
        budget: what the buckets may cost together; None for no limit.
        maximum: largest bucket that the buffers hold; the largest live size if None. Larger steps run eager.
        maximum_is_bucket: the maximum is captured whether or not it pays (P6, B61).
        ceiling: as in :func:`run_trace`.
        rule: SGLang's list for the phase, such as ``sglang_prefill``.

    Raises:
        InputError: for a trace without steps, or a cost that is missing, negative or not a number.
        BucketError: if no set of candidates within the budget runs the whole trace.
    """
    sizes = _steps(trace)[0]
    top = sizes[-1] if maximum is None else maximum
    if top < 1 or (ceiling is not None and not ceiling >= 1):
        raise BucketError(f"maximum={top} and ceiling={ceiling} must be at least 1")
    budget = budget or BucketBudget()
    listed = rule(top)
    barred = {math.floor(ceiling * size) + 1 for size in sizes} if ceiling is not None else set()
    known = costs.step_ms if isinstance(costs.step_ms, Mapping) else {*sizes, *listed, *barred, top}
    candidates = sorted(size for size in known if 1 <= size <= top)
    if maximum_is_bucket and top not in candidates:
        raise InputError(f"step_ms has no cost of the maximum, {top}; add it, or set maximum_is_bucket=False")
    problem = _problem(trace, costs, budget, candidates, ceiling)
    if maximum_is_bucket:
        problem.rest[:-1] = np.inf
    path = problem.least_time()
    if path is None:
        raise BucketError(
            f"no set of {len(candidates)} candidate buckets within {budget} runs every size from {sizes[0]} to "
            f"{sizes[-1]}; raise the budget, the maximum or the ceiling, or give eager steps a finite cost"
        )
    chosen = run_trace(trace, costs, [candidates[node - 1] for node in path], ceiling=ceiling)
    return BucketPlan(chosen, run_trace(trace, costs, listed, ceiling=ceiling))


def _problem(
    trace: Mapping[int, int],
    costs: BucketCosts,
    budget: BucketBudget,
    candidates: list[int],
    ceiling: float | None,
) -> BudgetedPath:
    live, counts = (np.array(column) for column in _steps(trace))
    eager = counts * [_cost(costs.eager_ms, size, "eager_ms", infinite=True) for size in live.tolist()]
    below = np.searchsorted(live, [0, *candidates], side="right")
    span = np.full((below.size, below.size), np.inf)
    used = np.zeros((below.size, 3), np.int64)
    for node, bucket in enumerate(candidates, start=1):
        held = slice(0, below[node])
        captured = counts[held] * _cost(costs.step_ms, bucket, "step_ms")
        admitted = np.ones(below[node], bool) if ceiling is None else bucket <= ceiling * live[held]
        span[:node, node] = _tails(np.where(admitted, captured, eager[held]))[below[:node]]
        used[node] = 1, _bytes(costs, bucket), _microseconds(costs, bucket)
    seconds = budget.capture_seconds
    micros = None if seconds is None else _whole(seconds * 1e6, math.floor)
    limits = enumerate((budget.buckets, budget.memory_bytes, micros))
    closed = {column: limit for column, limit in limits if limit is not None}
    return BudgetedPath(
        span, _tails(eager)[below], used[:, [*closed]], np.array([*closed.values()], np.int64)
    )


def _tails(values: Floats) -> Floats:
    """[n + 1] sums of ``values`` [n] from every index to the end."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def _steps(trace: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Live sizes, ascending, and their counts, without those that never came."""
    wrong = [item for item in trace.items() if item[0] < 1 or item[1] < 0]
    sizes = sorted(size for size, count in trace.items() if count)
    if wrong or not sizes:
        what = f"size {wrong[0][0]} {wrong[0][1]} times" if wrong else "no steps"
        raise InputError(
            f"a trace counts steps by live size, from 1, but has {what}; record some steps first"
        )
    return sizes, [trace[size] for size in sizes]


def _cost(cost: SizeCost, size: int, name: str, *, infinite: bool = False) -> float:
    if isinstance(cost, Mapping) and size not in cost:
        raise InputError(
            f"{name} has no cost of size {size}, it has {sorted(cost)}; add it, or give a function"
        )
    value = cost[size] if isinstance(cost, Mapping) else cost(size)
    if not value >= 0 or (math.isinf(value) and not infinite):
        raise InputError(
            f"{name} of size {size} is {value}; costs are from 0{'' if infinite else ' and finite'}"
        )
    return value


def _bytes(costs: BucketCosts, bucket: int) -> int:
    value = _cost(costs.memory_bytes, bucket, "memory_bytes")
    if value != int(value):
        raise InputError(f"memory_bytes of size {bucket} is {value}; give whole bytes")
    return int(value)


def _microseconds(costs: BucketCosts, bucket: int) -> int:
    return _whole(_cost(costs.capture_seconds, bucket, "capture_seconds") * 1e6, math.ceil)


def _whole(microseconds: float, rounding: Callable[[float], int]) -> int:
    # A nanosecond is forgiven: products such as seconds * 1e6 may miss a whole number by a rounding.
    return rounding(round(microseconds, 3))
