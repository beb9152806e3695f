"""Percentiles and rates of a load, against runs worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.load import Load, LoadResult
from cglab.engine.timing import RequestTiming
from cglab.errors import InputError
from cglab.measure.latency import latency


def timing(
    index,
    tokens,
    *,
    arrived=0.0,
    admitted=0.25,
    finish="length",
    finished=None,
    reused=0,
    error="",
    preemptions=0,
):
    if finished is None and finish is not None:
        finished = tokens[-1] if tokens else arrived
    return RequestTiming(
        index, 8, reused, finish, error, preemptions, arrived, admitted, finished, tuple(tokens)
    )


def run(*timings, seconds=4.0, count=None):
    outputs = tuple((1,) * len(each.token_times) for each in timings)
    return LoadResult(Load(count or len(timings), 1, 8, 8), "0" * 64, timings, outputs, seconds, 1)


def test_one_request_by_hand():
    found = latency(run(timing(0, [1.0, 1.5, 2.0, 4.0], arrived=0.5, admitted=0.75)), devices=2)
    assert (found.queueing_ms.p50, found.ttft_ms.p50, found.e2e_ms.p50) == (250.0, 500.0, 3500.0)
    assert (found.tpot_ms.p50, found.user_tok_s.p50) == (1000.0, 1.0)
    assert (found.itl_ms.p50, found.itl_ms.samples) == (500.0, 3)
    assert (found.output_tok_s, found.total_tok_s, found.total_tok_s_per_device) == (1.0, 3.0, 1.5)
    assert found.concurrency == 3.5 / 4.0
    assert (found.completed, found.prompt_tokens, found.new_tokens) == (1, 8, 4)


def test_the_ninetieth_percentile_is_what_nine_in_ten_do_as_well_or_better():
    """S2 prints a P90 rate below the P50 one."""
    requests = [timing(index, [1.0, 1.0 + 1.0 / (index + 1)]) for index in range(11)]  # rates 1 to 11
    found = latency(run(*requests))
    assert (found.user_tok_s.p50, found.user_tok_s.p90) == (pytest.approx(6.0), pytest.approx(2.0))
    assert (found.tpot_ms.p50, found.tpot_ms.p90) == (pytest.approx(1000 / 6), pytest.approx(500.0))
    reached = sum(1 / each.tpot >= found.user_tok_s.p90 - 1e-9 for each in requests)
    assert reached / 11 >= 0.9


def test_one_token_has_no_tpot_and_no_rate():
    found = latency(run(timing(0, [1.0]), timing(1, [1.0, 3.0])))
    assert (found.ttft_ms.samples, found.tpot_ms.samples, found.user_tok_s.samples) == (2, 1, 1)
    assert latency(run(timing(0, [1.0]))).tpot_ms.p50 is None


def test_a_request_without_tokens_does_not_pull_the_median_ttft_to_zero():
    """A serving benchmark that starts every TTFT at 0.0 reported medians of 0.0."""
    found = latency(run(timing(0, []), timing(1, []), timing(2, [1.0, 2.0])))
    assert (found.ttft_ms.p50, found.ttft_ms.samples, found.completed) == (1000.0, 1, 3)
    assert latency(run(timing(0, []))).ttft_ms.p50 is None


def test_tokens_of_one_step_have_a_tpot_of_zero_but_no_endless_rate():
    found = latency(run(timing(0, [2.0, 2.0, 2.0])))
    assert found.tpot_ms.p50 == 0.0 and found.user_tok_s.p50 is None


def test_only_completed_requests_are_timed_and_the_others_are_counted():
    found = latency(
        run(
            timing(0, [1.0, 2.0], reused=4),
            timing(1, [], finish="error", admitted=None, arrived=None, error="too long"),
            timing(2, [1.0, 9.0], finish="cancelled", preemptions=2),
            timing(3, [1.0, 9.0], finish=None),
            timing(4, [1.0, 2.0], finish="stop"),
            count=7,
        )
    )
    assert (found.completed, found.errors, found.cancelled, found.in_flight, found.unsent) == (2, 1, 1, 1, 2)
    assert (found.tpot_ms.p90, found.new_tokens, found.reused_tokens, found.preemptions) == (1000.0, 4, 4, 2)
    assert str(found).startswith(
        "2 completed, 1 errors, 1 cancelled, 1 in flight, 2 unsent in 4 s; P50 / P90: queueing"
    )


def test_nothing_measured_is_none_in_every_form():
    found = latency(run(timing(0, [], finish="error", arrived=None, admitted=None), seconds=0.0))
    flat = found.as_dict()
    assert all(
        flat[name] is None for name in ("ttft_ms_p50", "user_tok_s_p90", "output_tok_s", "concurrency")
    )
    json.dumps(flat, allow_nan=False)
    assert found.as_frame()["p50"].tolist() == [None] * 6
    assert str(found).endswith("nothing measured")


def test_frame_and_dict_say_the_same():
    found = latency(run(timing(0, [1.0, 1.5]), timing(1, [2.0])))
    frame = found.as_frame().set_index("measure")
    assert frame["unit"].to_dict() == {
        "queueing": "ms", "TTFT": "ms", "TPOT": "ms", "ITL": "ms", "E2E": "ms", "output rate per user": "tok/s",
    }  # fmt: skip
    flat = found.as_dict()
    assert frame.loc["TTFT", ["p50", "p90", "samples"]].tolist() == [
        flat["ttft_ms_p50"], flat["ttft_ms_p90"], flat["ttft_ms_samples"],
    ]  # fmt: skip
    assert frame.loc["output rate per user", "p90"] == flat["user_tok_s_p90"] == pytest.approx(2.0)


MICROSECONDS = st.integers(0, 10_000_000).map(lambda count: count / 1e6)


@given(st.lists(st.lists(MICROSECONDS, max_size=5).map(sorted), min_size=1, max_size=8), MICROSECONDS)
def test_no_figure_is_nan_and_percentiles_are_in_order(tokens, seconds):
    found = latency(run(*(timing(i, each, admitted=0.0) for i, each in enumerate(tokens)), seconds=seconds))
    json.dumps(found.as_dict(), allow_nan=False)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        value = getattr(found, name)
        assert (value.p50 is None) == (value.samples == 0)
        assert value.p50 is None or 0 <= value.p50 <= value.p90 < math.inf
    rates = found.user_tok_s
    assert rates.p50 is None or 0 < rates.p90 <= rates.p50


def test_no_device_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        latency(run(timing(0, [1.0])), devices=0)
