"""Traces as one file for Perfetto (or chrome://tracing): a process for each arm, a thread for each lane of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

from cglab.measure.trace import Trace


def perfetto(traces: Mapping[str, Trace]) -> bytes:
    """The last step of each arm in the Chrome trace format, gzipped; equal traces give equal bytes.

    Args:
        traces: by arm.

    Returns:
        The content of a ``.json.gz`` file. Times are microseconds from the start of each step.
    """
    events: list[dict[str, Any]] = []
    for process, (arm, trace) in enumerate(traces.items(), 1):
        rows = trace.rows(trace.steps - 1)
        lanes = {lane: thread for thread, lane in enumerate(sorted({row["lane"] for row in rows}), 1)}
        named = [("process_name", 0, arm), *(("thread_name", thread, lane) for lane, thread in lanes.items())]
        events += [
            {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
            for what, thread, name in named
        ]
        events += [
            {"ph": "X", "name": row["name"], "cat": row["kind"], "pid": process, "tid": lanes[row["lane"]],
             "ts": row["start_us"], "dur": row["duration_us"]}
            for row in rows
        ]  # fmt: skip
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))
    return gzip.compress(content.encode(), mtime=0)
