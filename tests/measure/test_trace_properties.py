"""Interval arithmetic and idle time against what counting gives, on random cases."""

from itertools import pairwise

import pytest

from cglab.measure.intervals import length, union, within
from cglab.measure.trace import DeviceEvent, HostCall, Trace

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def naive_union_length(intervals):
    """Counts the unit cells that any interval covers."""
    return sum(any(start <= cell < end for start, end in intervals) for cell in range(60))


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=12
    )
)
def test_union_against_counting(intervals):
    merged = union(intervals)
    assert length(merged) == naive_union_length(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    for point in range(60):
        assert within(point, merged) == any(a <= point <= b for a, b in intervals if b > a)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 20), st.integers(1, 3)), max_size=10
    ),
)
def test_idle_is_always_wall_minus_busy(launches):
    calls, events = [], []
    for number, (at, wait, duration, stream) in enumerate(sorted(launches)):
        calls.append(HostCall("cudaLaunchKernel", at, at + 1, "1", number))
        start = at + wait
        events.append(DeviceEvent("gemm", start, start + duration, "kernel", stream, number, at))
    events.sort(key=lambda event: event.start)
    trace = Trace(tuple(events), tuple(calls), windows=((0, 35),))
    if not launches:
        assert trace.idle() is None
        return
    for stream in (None, *trace.streams()):
        assert trace.idle(stream).total == pytest.approx(trace.wall_us - trace.busy_us(stream))
