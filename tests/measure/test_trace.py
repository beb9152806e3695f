"""Reading traces: hand-made ones, and one of torch.profiler on the CPU."""

import gzip
import json

import pytest
import torch

from cglab.errors import InputError, ResultsError
from cglab.measure.trace_file import load_trace, parse_trace


def host(name, start, duration, correlation=None, thread=1, category="cuda_runtime"):
    arguments = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": thread,
        "args": arguments,
    }


def device(start, duration, correlation=None, stream=7, name="gemm", category="kernel", index=0):
    arguments = {"device": index, "stream": stream}
    if correlation is not None:
        arguments["correlation"] = correlation
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": stream,
        "args": arguments,
    }


def span(name, start, duration, category="user_annotation"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": {}}


def graph_step(start, correlation, kernels=50, name="cglab.step"):
    """A step of one graph launch: kernels of 2 us, 1 us apart, from 10 us after the launch."""
    last = start + 12 + 3 * kernels
    return [
        span(name, start, last + 5 - start),
        host("cudaGraphLaunch", start + 2, 6, correlation),
        *(device(start + 12 + 3 * i, 2, correlation, name=f"kernel {i}") for i in range(kernels)),
    ]


def test_b83_a_graph_launch_with_fifty_kernels_under_its_correlation_id():
    trace = parse_trace(graph_step(0, 9)).window("cglab.step")
    assert trace.reliable
    assert (trace.launches, trace.graph_launches, len(trace.device_events)) == (1, 1, 50)
    assert trace.busy_us() == pytest.approx(100)
    # Launched at 2 us, first kernel at 12: until then, and after the last one, the device waits.
    idle = trace.idle()
    assert idle.host_wait == pytest.approx(12 + 6)
    assert idle.other == pytest.approx(49)
    assert idle.kernel_wait == 0
    assert idle.total == pytest.approx(trace.wall_us - trace.busy_us())
    assert trace.mean_gap_us() == pytest.approx(1.0)


def test_b83_missing_kernels_give_no_idle_figure():
    events = [span("cglab.step", 0, 200), host("cudaGraphLaunch", 2, 6, 9)]
    for found in (events, [*events, host("cudaLaunchKernel", 20, 4, 10), device(30, 5, 10)]):
        trace = parse_trace(found).window("cglab.step")
        assert not trace.reliable
        assert trace.busy_us() is None
        assert trace.idle() is None
        assert trace.gaps() is None
        assert trace.mean_gap_us() is None
        told = trace.as_dict()
        assert told["busy_us"] is told["idle_us"] is told["host_wait_us"] is told["kernels"] is None
        assert told["launches"] >= 1
    assert "1 of 2 launches have no device records: 1 cudaGraphLaunch" in trace.unreliable


def test_b83_a_missing_step_does_not_spoil_the_others():
    events = [*graph_step(0, 1, name="whole"), span("broken", 300, 50), host("cudaGraphLaunch", 310, 5, 2)]
    trace = parse_trace(events)
    assert not trace.reliable
    assert trace.window("whole").reliable
    assert not trace.window("broken").reliable


def test_an_empty_trace_and_one_of_a_cpu_are_unreliable():
    for events in ([], [span("cglab.step", 0, 5), span("aten::mm", 1, 3, "cpu_op")]):
        trace = parse_trace(events)
        assert "no device records" in trace.unreliable
        assert trace.busy_us() is None
    assert parse_trace([]).wall_us == 0
    assert parse_trace([]).rows() == []


def test_eager_launches_and_host_wait():
    events = []
    for i in range(4):
        events += [host("cudaLaunchKernel", 10 * i, 5, i + 1), device(10 * i + 6, 3, i + 1)]
    trace = parse_trace(events)
    assert (trace.launches, trace.graph_launches) == (4, 0)
    assert trace.busy_us() == 12
    assert trace.idle().host_wait == pytest.approx(trace.wall_us - 12)


def test_idle_by_cause_has_htas_definitions():
    events = [
        host("cudaLaunchKernel", 0, 1, 1),
        host("cudaLaunchKernel", 1, 1, 2),
        host("cudaLaunchKernel", 2, 1, 3),
        host("cudaLaunchKernel", 40, 1, 4),
        device(5, 10, 1),
        device(15.02, 5, 2),  # launched in time, 20 ns later
        device(22, 8, 3),  # launched in time, 1.98 us later
        device(45, 5, 4),  # launched after the device had run dry at 30
    ]
    idle = parse_trace(events).idle()
    assert idle.kernel_wait == pytest.approx(0.02)
    assert idle.other == pytest.approx(1.98)
    assert idle.host_wait == pytest.approx(5 + 15)


def test_a_gap_with_an_unknown_launch_is_other():
    trace = parse_trace([device(0, 5), device(9, 5)])
    assert trace.reliable
    assert trace.idle().other == 4
    assert trace.idle().host_wait == 0


def test_overlapping_streams_count_once():
    events = [
        host("cudaLaunchKernel", 0, 1, 1),
        host("cuLaunchKernelEx", 1, 1, 2, category="cuda_driver"),
        host("cudaMemcpyAsync", 2, 1, 3),
        device(10, 20, 1, stream=7),
        device(15, 20, 2, stream=13),
        device(34, 6, 3, stream=20, name="Memcpy DtoH", category="gpu_memcpy"),
    ]
    trace = parse_trace(events)
    assert trace.launches == 3
    assert trace.streams() == [7, 13, 20]
    assert trace.busy_us() == 30
    assert trace.busy_us(stream=7) == 20
    assert trace.busy_us(stream=13) == 20
    for stream in (None, 7, 13, 20):
        assert trace.idle(stream).total == pytest.approx(trace.wall_us - trace.busy_us(stream))
    assert trace.kernels == {"gemm": 2, "Memcpy DtoH": 1}


def test_calls_that_launch_nothing_are_none():
    names = [
        "cudaStreamSynchronize",
        "cudaGraphAddMemcpyNode",
        "cudaEventRecord",
        "cudaMalloc",
        "cudaLaunchHostFunc",
    ]
    events = [host(name, i, 1, i) for i, name in enumerate(names)]
    events += [host("cudaMemsetAsync", 10, 1, 50), device(15, 1, 50, category="gpu_memset")]
    trace = parse_trace(events)
    assert [call.name for call in trace.calls] == ["cudaMemsetAsync"]
    assert trace.reliable


def test_a_new_launch_call_is_known_by_its_device_work():
    trace = parse_trace([host("cudaFancyNewLaunch", 0, 1, 4), device(3, 1, 4)])
    assert trace.launches == 1


def test_a_runtime_call_and_its_driver_call_are_one_launch():
    events = [
        host("cudaLaunchKernel", 0, 5, 4),
        host("cuLaunchKernel", 1, 3, 4, category="cuda_driver"),
        device(6, 1, 4),
    ]
    assert [call.name for call in parse_trace(events).calls] == ["cudaLaunchKernel"]


def test_launches_inside_a_stream_capture_run_nothing():
    events = [
        host("cudaStreamBeginCapture", 0, 1, 1),
        host("cudaLaunchKernel", 5, 1, 2),
        host("cudaLaunchKernel", 6, 1, 3, thread=2),
        host("cudaStreamEndCapture", 9, 1, 4),
        host("cudaGraphLaunch", 20, 1, 5),
        device(25, 5, 5),
        device(8, 1, 3),
    ]
    trace = parse_trace(events)
    assert trace.reliable
    assert [call.correlation for call in trace.calls] == [3, 5]


def test_a_launch_without_a_correlation_id_is_a_launch_without_records():
    trace = parse_trace([host("cudaGraphLaunch", 0, 1), device(5, 1)])
    assert trace.launches == 1
    assert not trace.reliable


def test_windows_take_the_work_that_they_launched_however_late_it_ran():
    events = [
        span("step", 0, 10),
        host("cudaLaunchKernel", 1, 1, 1),
        device(20, 30, 1),  # runs after the window closed
        span("step", 12, 10),
        host("cudaLaunchKernel", 13, 1, 2),
        device(50, 10, 2),
        span("other", 70, 10),
        host("cudaLaunchKernel", 71, 1, 3),
        device(75, 2, 3),
    ]
    trace = parse_trace(events).window("step")
    assert (trace.steps, trace.launches, len(trace.device_events)) == (2, 2, 2)
    assert trace.busy_us() == 40
    assert trace.wall_us == 60  # the two overlap on the device: time is not counted twice
    assert parse_trace(events).window("other").wall_us == 10
    with pytest.raises(InputError, match="good names: other, step"):
        trace.window("stop")


def test_figures_are_per_step():
    trace = parse_trace(graph_step(0, 1) + graph_step(1000, 2)).window("cglab.step")
    told = trace.as_dict()
    assert told["steps"] == 2
    assert (told["launches"], told["graph_launches"], told["kernels"]) == (1, 1, 50)
    assert told["busy_us"] == pytest.approx(100)
    assert told["wall_us"] == pytest.approx(167)
    assert told["idle_us"] == pytest.approx(67)
    assert told["mean_gap_us"] == pytest.approx(1.0)


def test_times_keep_their_nanoseconds_far_from_zero():
    trace = parse_trace(graph_step(5_133_236_224_190.5, 1)).window("cglab.step")
    assert trace.busy_us() == pytest.approx(100, abs=0.1)
    assert trace.mean_gap_us() == pytest.approx(1.0, abs=0.002)


def test_timeline_rows():
    trace = parse_trace(graph_step(100, 1, kernels=2) + graph_step(900, 2, kernels=3)).window("cglab.step")
    rows = trace.rows(step=1)
    assert [row["lane"] for row in rows] == ["launches 1", "stream 7", "stream 7", "stream 7"]
    assert rows[0] == {
        "lane": "launches 1",
        "name": "cudaGraphLaunch",
        "kind": "launch",
        "start_us": 2.0,
        "duration_us": 6.0,
    }
    assert rows[1]["start_us"] == 12.0
    assert len(trace.rows()) == 2 + 5
    with pytest.raises(InputError, match="2 windows"):
        trace.rows(step=2)


def test_one_device_at_a_time():
    events = [
        host("cudaLaunchKernel", 0, 1, 1),
        host("cudaLaunchKernel", 1, 1, 2),
        device(5, 10, 1, index=0),
        device(5, 20, 2, index=1),
    ]
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        parse_trace(events)
    assert parse_trace(events, device=0).busy_us() == 10
    assert parse_trace(events, device=1).busy_us() == 20
    assert parse_trace(events, device=1).launches == 1
    with pytest.raises(InputError, match="no work of device 2"):
        parse_trace(events, device=2)


def test_files_plain_and_gzipped(tmp_path):
    content = json.dumps({"schemaVersion": 1, "traceEvents": graph_step(0, 1)}).encode()
    plain, packed, bare = tmp_path / "a.json", tmp_path / "b.json.gz", tmp_path / "c.json"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    bare.write_text(json.dumps(graph_step(0, 1)))
    for path in (plain, packed, bare, str(plain)):
        assert load_trace(path).window("cglab.step").busy_us() == pytest.approx(100)


@pytest.mark.parametrize(
    "content", [b"", b'{"traceEvents": [', b'{"other": 1}', b"[1, 2]", b"\x1f\x8bbroken", b'[{"ph": "X"}]']
)
def test_files_that_are_no_trace(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"broken\.json"):
        load_trace(path)
    with pytest.raises(ResultsError, match="missing"):
        load_trace(tmp_path / "missing.json")


def test_a_profiler_object_on_the_cpu():
    on_cpu = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with on_cpu as profiler, torch.profiler.record_function("mine"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    trace = load_trace(profiler).window("mine")
    assert not trace.reliable
    names = [row["name"] for row in trace.rows()]
    # Outermost operations only: aten::mm runs inside aten::matmul.
    assert "aten::matmul" in names
    assert "aten::mm" not in names
