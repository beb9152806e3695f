"""Growth of a step: planted terms come back, a hidden one shows, and points that tell nothing are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.measure.growth import GrowthPoint, GrowthTerms, fit_growth, least_terms

TOKEN_GB = 147456 / 1e9  # keys and values of a token of qwen3-8b in bfloat16
SIZES = (
    [(2**n, 512) for n in range(9)]
    + [(1, 2**n) for n in range(9, 17)]
    + [(16, 2**n) for n in (9, 11, 13, 15)]
)
LEAST = least_terms(weight_bytes=15.1e9, row_operations=15.1e9, bandwidth=4.05e12, matmul_rate=700e12)


def steps(time, sizes=SIZES):
    kv = [(batch, batch * context * TOKEN_GB) for batch, context in sizes]
    return [GrowthPoint(batch, gb, time(batch, gb)) for batch, gb in kv]


def test_the_least_terms_are_bytes_over_bandwidth_and_operations_over_their_rate():
    assert LEAST.base_ms == pytest.approx(15.1 / 4.05)
    assert LEAST.row_us == pytest.approx(15.1e9 / 700e6)
    assert LEAST.kv_ms_gb == pytest.approx(1 / 4.05)
    assert LEAST.step_ms(2, 3.0) == pytest.approx(15.1 / 4.05 + 2 * 15.1 / 700 + 3 / 4.05)


@given(st.floats(0.1, 20), st.floats(0, 60), st.floats(0.2, 3))
def test_planted_terms_are_found(base, row, kv):
    fit = fit_growth(steps(GrowthTerms(base, row, kv).step_ms), LEAST)
    for got, planted in zip(
        (fit.found.base_ms, fit.found.row_us, fit.found.kv_ms_gb), (base, row, kv), strict=True
    ):
        assert math.isclose(got, planted, rel_tol=1e-6, abs_tol=1e-6)
    assert fit.residual < 1e-9
    assert fit.ratios["kv_ms_gb"] == pytest.approx(kv * 4.05)


@given(st.lists(st.floats(-0.02, 0.02), min_size=len(SIZES), max_size=len(SIZES)))
def test_noise_of_two_percent_moves_a_term_little_and_is_the_residual(noise):
    planted = GrowthTerms(4.0, 20.0, 0.3)
    points = [
        GrowthPoint(each.batch, each.kv_gb, each.step_ms * (1 + off))
        for each, off in zip(steps(planted.step_ms), noise, strict=True)
    ]
    fit = fit_growth(points, LEAST)
    assert fit.found.base_ms == pytest.approx(4.0, rel=0.05)
    assert fit.found.kv_ms_gb == pytest.approx(0.3, rel=0.06), "at worst, by the sum of its influences, 5.1 %"
    assert fit.residual <= 0.06


def test_a_term_in_the_square_of_the_batch_shows_in_the_residual_at_the_largest_or_smallest():
    fit = fit_growth(steps(lambda batch, gb: 4.0 + 0.3 * gb + 0.001 * batch**2), LEAST)
    assert fit.residual > 0.2
    assert "off by at most" in str(fit) and f"batch {fit.worst.batch} with" in str(fit)


def test_a_step_that_reads_the_whole_cache_whatever_is_live_has_no_kv_term():
    cache = 65536 * TOKEN_GB
    points = [GrowthPoint(1, 2**n * TOKEN_GB, 4.0 + 0.3 * cache) for n in range(9, 17)]
    points += [GrowthPoint(b, b * 512 * TOKEN_GB, 4.0 + 0.3 * b * cache) for b in (2, 4)]
    fit = fit_growth(points, LEAST)
    assert fit.ratios["kv_ms_gb"] < 0.01 and fit.ratios["row_us"] > 100


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "0 points"),
        (steps(LEAST.step_ms, SIZES[:3]), "3 points"),
        (steps(LEAST.step_ms, SIZES[:9]), "do not tell 3 terms apart"),  # KV grows with the batch only
        (steps(LEAST.step_ms, SIZES[9:17]), "do not tell 3 terms apart"),  # one batch
        ([*steps(LEAST.step_ms), GrowthPoint(1, 1.0, 0.0)], "no time"),
    ],
)  # fmt: skip
def test_points_that_cannot_tell_the_terms_apart_are_refused(points, reason):
    with pytest.raises(InputError, match=reason):
        fit_growth(points, LEAST)
