"""The timeline: eager above replay, host above device, on a clock that starts with the step."""

import pytest

from cglab.lab.comparison import Profile
from cglab.lab.profiles import recorded_profile
from cglab.ui.style import summary
from cglab.ui.timeline import LANE, MOST_BARS, SLICES, short, sliced_bars


def row(start, duration, name="gemm"):
    return {"lane": "stream 7", "name": name, "kind": "kernel", "start_us": start, "duration_us": duration}


def test_a_kernel_says_how_long_it_ran_in_which_layer_and_of_what_step():
    profile = recorded_profile("decode")
    figure = profile.timeline((400.0, 600.0))
    kernels = next(trace for trace in figure.data if trace.name.startswith("full, device"))
    assert len(kernels.x) > 10
    assert all(" µs<br>" in told for told in kernels.hovertext) and "layer 2 of 28" in "".join(
        kernels.hovertext
    )
    assert "decode, from" in kernels.hovertemplate


def test_lanes_are_eager_above_replay_and_host_above_device(make):
    figure = make.profiled(eager=make.eager_trace(), full=make.full_trace()).timeline()
    assert [trace.name for trace in figure.data] == [
        "eager, host: launches", "eager, device: stream 7", "full, host: launches", "full, device: stream 7",
    ]  # fmt: skip
    assert [len(trace.x) for trace in figure.data] == [6, 6, 1, 6]
    lanes = figure.layout.yaxis.ticktext
    assert [lanes[int(trace.y[0])].split("<br>")[0] for trace in figure.data] == [
        "<b>eager</b>, host: launches", "<b>eager</b>, device: stream 7",
        "<b>full</b>, host: launches", "<b>full</b>, device: stream 7",
    ]  # fmt: skip
    assert figure.layout.yaxis.autorange == "reversed"


def test_the_clock_starts_with_the_step_and_bars_carry_name_and_microseconds(make):
    figure = make.profiled(eager=make.eager_trace()).timeline()
    device = figure.data[1]
    assert list(device.base)[:2] == [8.0, 18.0] and list(device.x)[:2] == [4.0, 4.0]
    assert device.hovertext[0] == "gemm: 4.0 µs"
    assert "(µs)" in figure.layout.xaxis.title.text


def test_heading_says_launches_and_busy_time(make):
    figure = make.profiled(eager=make.eager_trace(), full=make.full_trace()).timeline()
    note = figure.layout.title.subtitle.text
    assert "eager: 0.07 ms under the profiler, launches: 6, device busy 0.02 ms" in note
    assert "full: 0.04 ms under the profiler, launches: 1" in note


def test_b83_a_trace_without_device_records_says_so_first(make):
    figure = make.profiled(eager=make.cpu_trace()).timeline()
    assert figure.layout.title.text.endswith("host operations only, no device records")
    assert summary(figure).startswith("bar eager, host: operations: 5 points")


def test_names_of_lanes_hold_no_thread_number(make):
    figure = make.profiled(eager=make.eager_trace(), full=make.cpu_trace()).timeline()
    assert not any(number in figure.to_json() for number in ("4711", '"99"'))


def test_a_crowded_lane_shows_the_share_of_time_that_was_busy(make):
    kernels = 10 * MOST_BARS
    profile = make.profiled(eager=make.eager_trace(kernels), full=make.full_trace(kernels))
    figure = profile.timeline()
    _, eager, launch, full = figure.data
    assert len(eager.x) <= SLICES and len(launch.x) == 1
    assert eager.width[SLICES // 2] / LANE == pytest.approx(0.4, abs=0.02)  # 4 us of every 10
    assert full.width[10] / LANE == pytest.approx(4 / 4.5, abs=0.02)
    assert (
        max(full.base) < 4.5 * kernels + 8
        and f"{kernels} events, height: share busy" in figure.layout.yaxis.ticktext[-1]
    )
    for trace in (eager, full):
        assert trace.offset + trace.width == pytest.approx(LANE / 2)
    assert eager.customdata[SLICES // 2] == pytest.approx(0.4, abs=0.02)
    assert sum(map(int, eager.hovertext)) == kernels and "events start in these" in eager.hovertemplate
    assert (profile.bars()["arm"] == "full").sum() == kernels + 1


def test_a_window_shows_every_event_in_it_and_no_other(make):
    kernels = 10 * MOST_BARS
    figure = make.profiled(full=make.full_trace(kernels)).timeline((1000.0, 1090.0))
    assert list(figure.layout.xaxis.range) == [1000.0, 1090.0]
    assert 20 <= len(figure.data[-1].x) <= 21


def test_slices_hold_all_the_busy_time_and_every_event_once():
    rows = [row(0, 30), row(12, 3, "inside"), row(55, 10), row(99.5, 9)]
    bars = sliced_bars(rows, 0.0, 100.0, slices=10)
    assert [bar.start for bar in bars] == [0, 10, 20, 50, 60, 90]
    assert [bar.busy for bar in bars] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.05])
    assert sum(int(bar.label) for bar in bars) == len(rows)


def test_slices_of_a_window_cut_what_reaches_over_its_edges():
    (bar,) = sliced_bars([row(0, 100)], 40.0, 60.0, slices=1)
    assert (bar.start, bar.end, bar.busy) == (40.0, 60.0, 1.0)


def test_long_kernel_names_lose_their_template_arguments():
    assert short("void at::native::vectorized_elementwise_kernel<4, F>(int, F)") == (
        "at::native::vectorized_elementwise_kernel"
    )
    assert len(short("k" * 200)) == 70


def test_no_traces_is_said():
    figure = Profile("decode", "", {}, {}).timeline()
    assert figure.layout.title.text == "Timeline: none recorded yet"
