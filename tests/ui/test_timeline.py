"""The timeline: eager above replay, host above device, on a clock that starts with the step."""

import pytest

from cglab.lab.comparison import Profile
from cglab.ui.style import summary
from cglab.ui.timeline import MOST_BARS, PIXELS, merged, short


def row(start, duration, name="gemm"):
    return {"lane": "stream 7", "name": name, "kind": "kernel", "start_us": start, "duration_us": duration}


def test_lanes_are_eager_above_replay_and_host_above_device(make):
    figure = make.profiled(eager=make.eager_trace(), full=make.full_trace()).timeline()
    assert [trace.name for trace in figure.data] == [
        "eager, host: launches", "eager, device: stream 7", "full, host: launches", "full, device: stream 7",
    ]  # fmt: skip
    assert [len(trace.x) for trace in figure.data] == [6, 6, 1, 6]
    assert list(figure.layout.yaxis.categoryarray) == [trace.y[0] for trace in figure.data]
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
    assert "eager: 0.07 ms under the profiler, 6 launches, device busy 0.02 ms" in note
    assert "full: 0.04 ms under the profiler, 1 launches" in note


def test_b83_a_trace_without_device_records_says_so_first(make):
    figure = make.profiled(eager=make.cpu_trace()).timeline()
    assert figure.layout.title.text.endswith("host operations only, no device records")
    assert summary(figure).startswith("bar eager, host: operations: 5 points")


def test_names_of_lanes_hold_no_thread_number(make):
    figure = make.profiled(eager=make.eager_trace(), full=make.cpu_trace()).timeline()
    assert not any(number in figure.to_json() for number in ("4711", '"99"'))


def test_a_crowded_lane_is_drawn_at_the_picture_s_resolution(make):
    kernels = 10 * MOST_BARS
    profile = make.profiled(eager=make.eager_trace(kernels), full=make.full_trace(kernels))
    _, eager, _, full = profile.timeline().data
    assert len(full.x) == 1 and len(eager.x) <= PIXELS + 1
    assert full.hovertext[0].startswith(f"{kernels} events, {4.0 * kernels:.1f} µs in all")
    assert f"{kernels} events" in full.y[0]
    assert full.x[0] == pytest.approx(4.5 * kernels - 0.5)
    rows = profile.bars()
    assert (rows["arm"] == "full").sum() == kernels + 1


def test_a_window_shows_every_event_in_it_and_no_other(make):
    kernels = 10 * MOST_BARS
    figure = make.profiled(full=make.full_trace(kernels)).timeline((1000.0, 1090.0))
    assert list(figure.layout.xaxis.range) == [1000.0, 1090.0]
    assert 20 <= len(figure.data[-1].x) <= 21


def test_merging_keeps_extent_and_count():
    bars = merged([row(10, 2), row(0, 5, "copy"), row(12.5, 1), row(30, 1)], 1.0)
    assert [(bar.start, bar.end) for bar in bars] == [(0, 5), (10, 13.5), (30, 31)]
    assert bars[1].label.startswith("2 events, 3.0 µs in all<br>most often gemm (2 times)")
    assert len(merged([row(0, 1), row(1, 1)], 0.0)) == 2


def test_merging_looks_past_a_short_event_inside_a_long_one():
    assert [(b.start, b.end) for b in merged([row(0, 100), row(1, 1), row(100.2, 1)], 0.5)] == [(0, 101.2)]


def test_long_kernel_names_lose_their_template_arguments():
    assert short("void at::native::vectorized_elementwise_kernel<4, F>(int, F)") == (
        "at::native::vectorized_elementwise_kernel"
    )
    assert len(short("k" * 200)) == 70


def test_no_traces_is_said():
    figure = Profile("decode", "", {}, {}).timeline()
    assert figure.layout.title.text == "Timeline: none recorded yet"
