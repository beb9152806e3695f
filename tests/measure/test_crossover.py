"""The crossover finder on data whose answer is known."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.measure.crossover import find_crossover

SIZES = (512, 1024, 2048, 4096, 8192)


def instances(value, count=3, spread=0.002):
    """Instances of three samples around ``value``, their medians within ``spread`` of it."""
    return [
        [value * (1 + spread * (turn - count // 2) / count + step) for step in (-1e-3, 0, 1e-3)]
        for turn in range(count)
    ]


def arms(ratios, *, count=3, spread=0.002):
    """Eager at 10 ms and captured at 10 ms times the ratio, by size."""
    eager = {size: instances(10.0, count, spread) for size in ratios}
    return eager, {size: instances(10.0 * ratio, count, spread) for size, ratio in ratios.items()}


def found(*ratios, **options):
    return find_crossover(*arms(dict(zip(SIZES, ratios, strict=False)), **options))


def test_s2_the_limit_of_its_published_ratios_is_8k():
    speedups = {2048: 2.48, 4096: 1.93, 8192: 1.12, 16384: 0.98, 32768: 0.97}
    crossover = find_crossover(*arms({size: 1 / gain for size, gain in speedups.items()}))
    assert crossover.limit == crossover.safe_limit == 8192
    assert crossover.next_size == 16384
    assert crossover.outcome == "crossover"
    assert crossover.breaks == crossover.undecided == ()
    verdicts = [point.difference.verdict for point in crossover.evidence]
    assert verdicts == ["faster", "faster", "faster", "no difference", "slower"]  # 2 % is none by S3's rule


def test_evidence_holds_medians_and_intervals_of_both_arms():
    crossover = found(0.5, 1.2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        crossover.limit = 4
    first, second = crossover.evidence
    assert (first.size, second.size) == SIZES[:2]
    assert first.eager == pytest.approx(10.0, rel=1e-3) and first.captured == pytest.approx(5.0, rel=1e-3)
    assert first.eager_interval.low <= first.eager <= first.eager_interval.high
    assert second.captured_interval.low <= second.captured <= second.captured_interval.high
    assert second.captured_interval.low > second.eager_interval.high
    assert first.wins and not second.wins


def test_no_win_has_no_limit():
    crossover = found(1.0, 0.99, 1.2)
    assert crossover.outcome == "no win"
    assert crossover.limit is crossover.safe_limit is crossover.next_size is None
    assert crossover.breaks == ()


def test_a_win_everywhere_leaves_the_crossover_open():
    crossover = found(0.5, 0.6, 0.9)
    assert crossover.outcome == "win everywhere"
    assert crossover.limit == crossover.safe_limit == 2048
    assert crossover.next_size is None


def test_sizes_that_break_monotony_are_reported_and_a_slower_one_bounds_the_safe_limit():
    crossover = found(0.5, 1.0, 0.7, 1.1, 0.9)
    assert crossover.limit == 8192
    assert crossover.breaks == (1024, 4096)
    assert crossover.safe_limit == 2048  # the tie at 1024 harms nobody, the loss at 4096 does
    assert crossover.outcome == "crossover"
    assert crossover.next_size is None


def test_a_loss_at_the_smallest_size_leaves_no_safe_limit():
    crossover = found(1.2, 0.5)
    assert (crossover.limit, crossover.safe_limit, crossover.breaks) == (1024, None, (512,))


def test_s3_a_gap_that_overlaps_is_no_win():
    assert found(0.95, spread=0.3).limit is None
    assert found(0.95, spread=0.002).limit == 512


def test_s3_the_threshold_decides():
    eager, captured = arms({512: 0.98})
    assert find_crossover(eager, captured).limit is None
    assert find_crossover(eager, captured, threshold=0.01).limit == 512


def test_fewer_than_three_instances_are_undecided():
    crossover = found(0.5, 0.5, count=2)
    assert crossover.limit is None
    assert crossover.undecided == (512, 1024)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.3]), min_size=1, max_size=5))
def test_the_order_of_the_sizes_does_not_matter_and_the_limit_is_the_last_win(ratios):
    eager, captured = arms(dict(zip(SIZES, ratios, strict=False)))
    crossover = find_crossover(eager, dict(reversed(captured.items())))
    assert crossover == find_crossover(dict(reversed(eager.items())), captured)
    won = [size for size, ratio in zip(SIZES, ratios, strict=False) if ratio < 0.97]
    assert crossover.limit == (won[-1] if won else None)
    assert set(crossover.breaks) == {size for size in eager if won and size < won[-1]} - set(won)


@pytest.mark.parametrize(
    ("eager", "captured", "message"),
    [
        ({}, {}, "at least one"),
        ({4: [[1.0]]}, {8: [[1.0]]}, r"only eager has \[4\], only captured has \[8\]"),
        ({0: [[1.0]]}, {0: [[1.0]]}, "from 1; 0 is not"),
        ({4: [[-1.0]]}, {4: [[1.0]]}, "base arm needs positive"),
        ({4: [[1.0]]}, {4: [[]]}, "finite samples"),
    ],
)
def test_wrong_arms_are_refused(eager, captured, message):
    with pytest.raises(InputError, match=message):
        find_crossover(eager, captured)
