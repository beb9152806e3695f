"""The fit of the host's part of a step: what counts as worse than it must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.measure.host_growth import HostPoint, fit_host_growth

SIZES = (1, 8, 64, 512, 2000)
QUIET = {0: HostPoint(50.0, 90), 2000: HostPoint(50.0, 90)}


def points(us, calls=lambda n: 45 + 23 * n):
    return {size: HostPoint(us(size), calls(size)) for size in SIZES}


@given(st.floats(1.0, 100.0), st.floats(0.1, 50.0))
def test_a_line_is_found_and_nothing_is_held_against_it(fixed, each):
    found = fit_host_growth(points(lambda n: fixed + each * n), QUIET)
    assert (found.fixed_us, found.each_us) == (pytest.approx(fixed, rel=1e-6), pytest.approx(each, rel=1e-6))
    assert found.residual < 1e-6 and found.exponent <= 1.0 + 1e-9
    assert found.least_calls and found.least_times and found.calls_each == 23


def test_a_scan_within_a_scan_shows_in_the_times_though_no_call_is_made():
    found = fit_host_growth(points(lambda n: 10.0 + n + 0.01 * n * n), QUIET)
    assert found.exponent > 1.25 and not found.least_times and found.least_calls


def test_a_call_too_many_for_each_pair_shows_in_the_calls():
    found = fit_host_growth(points(lambda n: 10.0 + n, lambda n: 45 + 23 * n + n * (n - 1) // 2), QUIET)
    assert not found.calls_linear and not found.least_calls


def test_looking_at_those_that_wait_shows_in_calls_and_in_times():
    touched = {0: HostPoint(50.0, 90), 2000: HostPoint(150.0, 2090)}
    found = fit_host_growth(points(lambda n: 10.0 + n), touched)
    assert found.calls_waiting == 2000 and not found.least_calls
    assert found.waiting_ratio == 3.0 and not found.least_times


@pytest.mark.parametrize(
    ("running", "waiting"),
    [
        ({1: HostPoint(1.0, 1), 2: HostPoint(2.0, 2)}, QUIET),
        (points(lambda n: n), {0: HostPoint(1.0, 1)}),
        (points(lambda n: n), {1: HostPoint(1.0, 1), 2: HostPoint(1.0, 1)}),
        (points(lambda n: 0.0), QUIET),
    ],
)
def test_too_few_sizes_tell_nothing(running, waiting):
    with pytest.raises(InputError, match="tell no growth"):
        fit_host_growth(running, waiting)
