"""Launch-gap prediction, its outcome, and the check that two arms did the same work."""

import pytest

from cglab.errors import InputError
from cglab.measure.prediction import outcome, predict_gain, same_work
from cglab.measure.trace import DeviceEvent, HostCall, Trace


def kernel(name, start, duration, correlation, launched):
    return DeviceEvent(name, start, start + duration, "kernel", 7, correlation, launched)


def eager_step(kernels=50, gap=8.0, busy=2.0, names=None, steps=1):
    """Steps of kernels of ``busy`` us, each launched ``gap`` us before it starts, on a dry device."""
    each = busy + gap
    events, calls = [], []
    for i in range(kernels * steps):
        calls.append(HostCall("cudaLaunchKernel", each * i, each * i + 5, "1", i))
        name = f"kernel {i % kernels}" if names is None else names[i]
        events.append(kernel(name, each * i + gap, busy, i, each * i))
    length = each * kernels
    windows = tuple((length * i, length * (i + 1) - 1e-6) for i in range(steps))
    return Trace(tuple(events), tuple(calls), windows=windows)


def captured(kernels=50):
    """A step of 167 us with one graph launch: kernels of 2 us, 1 us apart."""
    events = tuple(kernel(f"kernel {i}", 12 + 3 * i, 2, 9, 2) for i in range(kernels))
    return Trace(events, (HostCall("cudaGraphLaunch", 2, 8, "1", 9),), windows=((0, 17 + 3 * kernels),))


def broken():
    """A step whose graph launch has no kernels."""
    return Trace((), captured().calls, windows=captured().windows)


def test_prediction_is_wall_minus_busy():
    prediction = predict_gain(eager_step())
    assert (prediction.wall_us, prediction.busy_us, prediction.gain_us) == pytest.approx((500, 100, 400))
    assert prediction.speedup == pytest.approx(5.0)
    assert prediction.profiled
    assert "profiled" in str(prediction)
    unprofiled = predict_gain(eager_step(), wall_us=450.0)
    assert unprofiled.gain_us == pytest.approx(350)
    assert not unprofiled.profiled


def test_prediction_is_per_step():
    prediction = predict_gain(eager_step(steps=3))
    assert (prediction.wall_us, prediction.busy_us) == pytest.approx((500, 100))


def test_b83_no_prediction_without_device_records():
    with pytest.raises(InputError, match="no device records"):
        predict_gain(broken())


def test_a_wall_time_below_the_busy_time_is_refused():
    with pytest.raises(InputError, match="cannot hold"):
        predict_gain(eager_step(), wall_us=90.0)
    # Busy is from another run: a step that waits for nothing may come out a little shorter.
    full = predict_gain(eager_step(), wall_us=99.0)
    assert full.gain_us == pytest.approx(-1.0)
    assert outcome(full, 98.5).verdict == "as predicted"


@pytest.mark.parametrize(
    ("wall", "verdict"), [(100, "as predicted"), (119, "as predicted"), (125, "unexplained")]
)
def test_outcome_within_five_percent_of_the_prediction(wall, verdict):
    found = outcome(predict_gain(eager_step()), wall)
    assert found.gained_us == pytest.approx(500 - wall)
    assert found.verdict == verdict
    assert found.unexplained_us is None


def test_outcome_is_explained_by_what_the_captured_trace_shows():
    """The captured step still has 67 us of gaps and as much kernel time: 333 of the 400 us can be gained."""
    found = outcome(predict_gain(eager_step()), 167.0, captured())
    assert found.verdict == "explained"
    assert (found.busy_change_us, found.remaining_gap_us) == pytest.approx((0, 67))
    assert found.unexplained_us == pytest.approx(0)
    assert "remaining gap 67.0 us" in str(found)
    lost = outcome(predict_gain(eager_step()), 250.0, captured())
    assert lost.verdict == "unexplained"
    assert lost.unexplained_us == pytest.approx(-83)


def test_outcome_counts_kernels_that_got_faster():
    found = outcome(predict_gain(eager_step(busy=4.0)), 167.0, captured())
    assert found.busy_change_us == pytest.approx(100)
    assert found.verdict == "explained"


def test_an_unreliable_trace_explains_nothing():
    found = outcome(predict_gain(eager_step()), 167.0, broken())
    assert found.verdict == "unexplained"
    assert found.remaining_gap_us is None


def test_nothing_to_win_is_a_prediction_too():
    prediction = predict_gain(eager_step(gap=0.02))
    assert prediction.gain_us == pytest.approx(1.0)
    assert outcome(prediction, 101.0).verdict == "as predicted"
    assert outcome(prediction, 120.0).verdict == "unexplained"


def test_same_work():
    same = same_work(eager_step(), captured())
    assert same.ok
    assert same.busy_ratio == pytest.approx(1.0)


def test_s2_another_kernel_or_another_busy_time_is_not_the_same_work():
    names = [f"kernel {i}" for i in range(49)] + ["copy"]
    other = same_work(eager_step(), eager_step(names=names))
    assert not other.ok
    assert other.only_base == {"kernel 49": 1}
    assert other.only_other == {"copy": 1}
    assert same_work(eager_step(), eager_step(names=names), declared=frozenset({"copy", "kernel 49"})).ok
    assert same_work(eager_step(), eager_step(busy=2.02)).ok
    slower = same_work(eager_step(), eager_step(busy=2.03))
    assert not slower.ok
    assert slower.busy_ratio == pytest.approx(1.015)
    with pytest.raises(InputError, match="no device records"):
        same_work(eager_step(), broken())
