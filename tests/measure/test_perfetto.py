"""The file for Perfetto: every event of the last step of each arm, in lanes of its own."""

import gzip
import json

from cglab.measure.perfetto import perfetto
from cglab.measure.trace import DeviceEvent, HostCall, Trace


def trace(kernels, stream=7):
    """Two steps of kernels of 4 us every 10 us, each launched 8 us before."""
    calls, events = [], []
    for step in range(2):
        for index in range(kernels):
            at, key = step * 1e5 + 10.0 * index, step * kernels + index + 1
            calls.append(HostCall("cudaLaunchKernel", at, at + 5, "4711", key))
            events.append(DeviceEvent(f"gemm{index}", at + 8, at + 12, "kernel", stream, key, at))
    windows = tuple((step * 1e5, step * 1e5 + 10.0 * kernels + 5) for step in range(2))
    return Trace(tuple(events), tuple(calls), windows=windows)


def test_each_arm_is_a_process_and_each_lane_a_thread():
    events = json.loads(gzip.decompress(perfetto({"eager": trace(3), "full": trace(2, stream=9)})))[
        "traceEvents"
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (1, 0): "eager", (1, 1): "launches 4711", (1, 2): "stream 7",
        (2, 0): "full", (2, 1): "launches 4711", (2, 2): "stream 9",
    }  # fmt: skip
    done = [e for e in events if e["ph"] == "X"]
    assert len(done) == 2 * 3 + 2 * 2
    kernels = [(e["ts"], e["dur"], e["name"]) for e in done if (e["pid"], e["cat"]) == (1, "kernel")]
    assert kernels == [(8.0, 4.0, "gemm0"), (18.0, 4.0, "gemm1"), (28.0, 4.0, "gemm2")]


def test_equal_traces_are_equal_bytes_and_thousands_of_kernels_are_small():
    content = perfetto({"eager": trace(5000)})
    assert content == perfetto({"eager": trace(5000)})
    assert len(content) < 300_000
