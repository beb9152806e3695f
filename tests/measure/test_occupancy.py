"""Forward occupancy against cases worked out by hand, and what holds for every run."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cglab.engine.segments import Segment
from cglab.errors import InputError
from cglab.measure.occupancy import (
    OccupancyMeter,
    Scrapes,
    occupancy,
    occupancy_by_kind,
    timed_seconds,
)

LENGTHS = st.floats(0, 5, allow_subnormal=False)


@st.composite
def runs(draw, lengths=LENGTHS):
    """Segments in order that do not overlap, from 0 on."""
    segments, now = [], 0.0
    for gap, length in draw(st.lists(st.tuples(LENGTHS, lengths), max_size=12)):
        segments.append(Segment(draw(st.sampled_from(["decode", "prefill"])), now + gap, length))
        now = segments[-1].end
    return segments


def steps(count, forward, untimed=0.0, start=0.0):
    """``count`` decode steps of ``forward`` seconds, each followed by device work that nobody times."""
    return [Segment("decode", start + index * (forward + untimed), forward) for index in range(count)]


def test_one_window_by_hand():
    segments = [Segment("prefill", 1.0, 2.0), Segment("decode", 4.0, 1.0), Segment("decode", 5.5, 1.0)]
    assert occupancy(segments, 0.0, 8.0) == 50.0
    assert occupancy(segments, 2.0, 6.0) == pytest.approx(100 * 2.5 / 4)  # both outer segments count in part
    assert occupancy(segments, 1.0, 3.0) == 100.0
    assert occupancy_by_kind(segments, 0.0, 8.0) == {"decode": 25.0, "prefill": 25.0}


def test_p83_a_window_without_a_forward_is_idle_not_zero():
    segments = [Segment("decode", 1.0, 2.0)]
    assert math.isnan(occupancy(segments, 3.0, 4.0))
    assert math.isnan(occupancy([], 0.0, 1.0))
    assert occupancy(segments, 0.0, 100.0) == 2.0
    assert math.isnan(occupancy_by_kind([*segments, Segment("prefill", 9.0, 1.0)], 0.0, 4.0)["prefill"])


def test_p83_s4_an_untimed_sampler_shows_as_idle_and_a_timed_one_does_not():
    """S4's three arms: eager and untimed, eager inside a timed segment, in the graph and so a little shorter."""
    untimed = occupancy(steps(100, 0.0095, 0.0005), 0.0, 1.0)
    timed = occupancy(steps(100, 0.0100), 0.0, 1.0)
    folded = occupancy(steps(100, 0.0098), 0.0, 0.98)
    assert untimed == pytest.approx(95.0)
    assert timed == folded == pytest.approx(100.0)


def test_segments_of_two_streams_are_capped():
    assert occupancy([Segment("decode", 0.0, 1.0), Segment("prefill", 0.0, 1.0)], 0.0, 1.0) == 100.0


@pytest.mark.parametrize("window", [(1.0, 1.0), (2.0, 1.0), (0.0, math.nan)])
def test_a_window_needs_a_length(window):
    with pytest.raises(InputError, match="no length"):
        occupancy([], *window)


@given(runs(), st.floats(-1, 60), st.floats(0.01, 60))
def test_occupancy_is_a_percentage_or_nan(segments, start, length):
    value = occupancy(segments, start, start + length)
    assert math.isnan(value) or 0 < value <= 100
    assert math.isnan(value) == (timed_seconds(segments, start, start + length) == 0)


@given(runs(), st.tuples(st.floats(-1, 60), st.floats(-1, 60), st.floats(-1, 60)))
def test_windows_add_up(segments, cuts):
    start, middle, end = sorted(cuts)
    assume(start < middle < end)
    parts = [(start, middle), (middle, end)]
    assert timed_seconds(segments, start, end) == pytest.approx(
        sum(timed_seconds(segments, *part) for part in parts)
    )

    def share(low, high):
        value = occupancy(segments, low, high) * (high - low)
        return 0.0 if math.isnan(value) else value

    assert share(start, end) == pytest.approx(sum(share(*part) for part in parts))


@given(runs(), st.floats(0.01, 60), st.floats(-50, 50))
def test_only_distances_in_time_matter(segments, end, shift):
    moved = [Segment(each.kind, each.start + shift, each.seconds) for each in segments]
    assert timed_seconds(moved, shift, end + shift) == pytest.approx(
        timed_seconds(segments, 0, end), abs=1e-9
    )


def test_meter_follows_sglang_across_a_window_boundary():
    """Two batches a window: the batch that opens one keeps the last value, idle forgets it."""
    meter = OccupancyMeter(batches=2)
    meter.batch_done([], 10.0)
    assert math.isnan(meter.value)
    meter.batch_done([Segment("decode", 10.2, 0.5)], 11.0)
    assert meter.value == 50.0
    meter.batch_done([Segment("decode", 11.0, 1.0)], 12.0)
    assert meter.value == 50.0
    meter.batch_done([Segment("decode", 12.0, 0.75)], 13.0)
    assert meter.value == 75.0
    meter.idle(13.5)
    assert math.isnan(meter.value)
    meter.batch_done([Segment("decode", 20.0, 0.5)], 20.5)
    assert math.isnan(meter.value)
    meter.batch_done([Segment("decode", 20.5, 0.25)], 21.5)
    assert meter.value == 25.0


def test_meter_caps_what_an_earlier_window_left_behind():
    """A segment that ended late is counted where it was collected."""
    meter = OccupancyMeter()
    meter.batch_done([], 10.0)
    meter.batch_done([Segment("decode", 9.0, 1.5), Segment("decode", 10.5, 0.5)], 11.0)
    assert meter.value == 100.0


@given(runs(st.floats(1e-6, 5)), st.integers(2, 6))
def test_meter_agrees_with_the_exact_window_where_segments_are_collected_as_they_end(segments, batches):
    meter = OccupancyMeter(batches=batches)
    for index, segment in enumerate(segments):
        meter.batch_done([segment], segment.end)
        opened = segments[index - index % batches].end
        if index % batches:
            assert meter.value == pytest.approx(occupancy(segments, opened, segment.end))


def test_scrapes_hold_the_gauge_every_half_second_and_leave_idle_out():
    meter = OccupancyMeter(batches=3, every=0.5)
    meter.batch_done([], 0.0)
    meter.batch_done([Segment("decode", 0.2, 0.4)], 0.8)  # the reading at 0.5 was NaN
    meter.batch_done([Segment("decode", 0.8, 0.5)], 1.8)  # readings at 1.0 and 1.5: 50
    meter.idle(2.1)  # at 2.0: 50 (0.9 of 1.8 s)
    meter.batch_done([], 7.0)  # ten readings of NaN
    assert meter.scrapes().values == pytest.approx((50.0, 50.0, 50.0))
    assert meter.scrapes().every == 0.5


def test_a_median_needs_five_scrapes():
    assert Scrapes(0.5, (96.0, 90.0, 97.0, 98.0)).median is None
    assert Scrapes(0.5, (96.0, 90.0, 97.0, 98.0, 99.0)).median == 97.0


def test_s4_reference_run_2048_tokens_are_scraped_to_their_share():
    """One request, 2,048 steps of 5 ms of which 4.8 ms are timed, read every half second."""
    meter = OccupancyMeter()
    for step in steps(2048, 0.0048, 0.0002):
        meter.batch_done([step], step.start + 0.005)
    scrapes = meter.scrapes()
    assert len(scrapes.values) == 20
    assert scrapes.median == pytest.approx(96.0)


@pytest.mark.parametrize("options", [{"batches": 1}, {"every": 0.0}, {"every": math.nan}])
def test_wrong_windows_are_refused(options):
    with pytest.raises(InputError, match="at least 2 batches"):
        OccupancyMeter(**options)
