"""Bootstrap intervals and S3's rule."""

import math

import numpy as np
import pytest

from cglab.errors import InputError
from cglab.measure import statistics as stats


def test_median_refuses_what_has_none():
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    for wrong in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(InputError, match="finite"):
            stats.median(wrong)


def test_bootstrap_is_seeded_and_holds_the_median():
    samples = np.random.default_rng(1).normal(10, 1, 40).tolist()
    interval = stats.bootstrap_interval([samples], seed=3)
    assert interval == stats.bootstrap_interval([samples], seed=3)
    assert stats.bootstrap_interval([samples], resamples=9) != stats.bootstrap_interval(
        [samples], resamples=9, seed=4
    )
    assert interval.low < np.median(samples) < interval.high
    narrow = stats.bootstrap_interval([samples], seed=3, level=0.5)
    assert interval.low < narrow.low < narrow.high < interval.high


def test_bootstrap_agrees_with_the_exact_distribution():
    """Of a resample of three values the median is low, middle or high in 7, 13 and 7 of 27 cases."""
    for level, wanted in ((0.4, (2.0, 2.0)), (0.6, (1.0, 3.0))):
        interval = stats.bootstrap_interval([[1.0, 2.0, 3.0]], level=level, resamples=20_000)
        assert (interval.low, interval.high) == wanted


def test_bootstrap_agrees_with_scipy():
    scipy_stats = pytest.importorskip("scipy.stats")
    samples = np.random.default_rng(2).exponential(5, 60)
    ours = stats.bootstrap_interval([samples.tolist()], resamples=9999)
    theirs = scipy_stats.bootstrap(
        (samples,), np.median, method="percentile", n_resamples=9999, rng=np.random.default_rng(0)
    ).confidence_interval
    spread = samples.std()
    assert abs(ours.low - theirs.low) < 0.1 * spread
    assert abs(ours.high - theirs.high) < 0.1 * spread


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(5)
    held = 0
    for trial in range(200):
        interval = stats.bootstrap_interval([generator.normal(0, 1, 30).tolist()], resamples=400, seed=trial)
        held += interval.low <= 0 <= interval.high
    assert 0.88 <= held / 200 <= 0.99


def test_instances_that_disagree_widen_the_interval():
    """Pooling alone would call three servers at 1, 2 and 3 ms a tight sample."""
    instances = [[1.0 + i * 1e-3 for i in range(30)], [2.0] * 30, [3.0] * 30]
    interval = stats.bootstrap_interval(instances)
    assert interval.low < 1.1
    assert interval.high > 2.9


def test_instances_of_unequal_length():
    interval = stats.bootstrap_interval([[1.0], [1.0] * 7, [1.0] * 3])
    assert (interval.low, interval.high) == (1.0, 1.0)
    for wrong in ([], [[]], [[1.0], []], [[1.0, math.nan]]):
        with pytest.raises(InputError):
            stats.bootstrap_interval(wrong)


BASE = [[1.00, 1.01], [1.01, 1.02], [0.99, 1.00]]


@pytest.mark.parametrize(
    ("scale", "verdict"), [(0.9, "faster"), (1.1, "slower"), (0.98, "no difference"), (1.02, "no difference")]
)
def test_rule_needs_three_percent(scale, verdict):
    other = [[sample * scale for sample in instance] for instance in BASE]
    found = stats.difference(BASE, other)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(scale)
    assert found.interval.low <= found.ratio <= found.interval.high


def test_rule_needs_separate_instances():
    other = [[0.80, 0.80], [0.80, 0.80], [1.00, 1.01]]
    found = stats.difference(BASE, other)
    assert not found.separated
    assert found.ratio < 0.9
    assert found.verdict == "no difference"


def test_rule_says_nothing_with_two_instances():
    assert stats.difference(BASE[:2], [[0.5], [0.5], [0.5]]).verdict == "undecided"


def test_rule_refuses_times_that_are_none():
    for wrong in ([], [[0.0]], [[1.0], []]):
        with pytest.raises(InputError, match="base"):
            stats.difference(wrong, BASE)


def test_false_positive_rate_is_the_stated_one():
    three, five = stats.false_positive_rate(3), stats.false_positive_rate(5)
    assert 0.085 <= three <= 0.095
    assert five < 0.01
    assert three == stats.false_positive_rate(3, trials=100_000, seed=0)
    # Without the threshold the rate is known: complete separation of two sets of n ranks.
    for n in (3, 4, 5):
        known = 2 / math.comb(2 * n, n)
        assert stats.false_positive_rate(n, threshold=0.0) == pytest.approx(known, abs=0.003)
    assert stats.false_positive_rate(3, spread=0.01) < 0.01
    with pytest.raises(InputError):
        stats.false_positive_rate(0)


def test_false_positive_rate_is_that_of_the_rule_itself():
    generator = np.random.default_rng(9)
    flagged = 0
    for _ in range(400):
        base, other = generator.normal(1.0, 0.05, (2, 3, 1)).tolist()
        flagged += stats.difference(base, other).verdict != "no difference"
    assert flagged / 400 == pytest.approx(stats.false_positive_rate(3), abs=0.04)
