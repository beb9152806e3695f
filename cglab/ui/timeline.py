"""The timeline: one step of each arm on one time axis, host launches above the device's streams.

A step of a large model has thousands of events, and a browser draws some hundreds of bars well. Joining close events
into one bar would hide the very gaps that a graph closes. So a crowded lane is cut into slices of time, and the
height of a slice is the share of it that was busy. A window draws part of the step, and there every event again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from cglab.lab.comparison import Profile
from cglab.measure.intervals import union
from cglab.measure.layers import find_layers
from cglab.measure.trace import Trace
from cglab.ui.style import colour, empty, faded, figure

MOST_BARS = 400
"""Events of a lane that are drawn one by one."""

SLICES = 240
"""Slices of a lane that has more."""

LANE = 0.7
"""Height of a bar, of the distance between two lanes."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """One event, or one slice of time; microseconds from the start of the step.

    Attributes:
        start, end: place in time.
        busy: share of that time, 0 to 1.
        label: what hovering says: of one event its name and time, of a slice how many events start in it.
    """

    start: float
    end: float
    busy: float
    label: str


def end_of(row: Row) -> float:
    """When an event ended, in microseconds from the start of the step."""
    return float(row["start_us"] + row["duration_us"])


def single_bars(rows: Sequence[Row]) -> list[Bar]:
    """One bar an event."""
    return [
        Bar(
            row["start_us"],
            end_of(row),
            1.0,
            f"{short(row['name'])}: {row['duration_us']:.1f} µs{row.get('layer', '')}",
        )
        for row in rows
    ]


def sliced_bars(rows: Sequence[Row], low: float, high: float, slices: int = SLICES) -> list[Bar]:
    """One bar a slice of time in which anything ran.

    Args:
        rows: events of one lane.
        low, high: what is cut, in microseconds.
        slices: into how many.
    """
    width = (high - low) / slices
    busy, started = [0.0] * slices, [0] * slices

    def slice_of(time: float) -> int:
        return min(max(int((time - low) / width), 0), slices - 1)

    for row in rows:
        started[slice_of(row["start_us"])] += 1
    for start, end in union((max(row["start_us"], low), min(end_of(row), high)) for row in rows):
        for index in range(slice_of(start), slice_of(end) + 1):
            left = low + index * width
            busy[index] += max(min(end, left + width) - max(start, left), 0.0)
    return [
        Bar(
            low + index * width, low + (index + 1) * width, min(time / width, 1.0), str(started[index]),
        )
        for index, time in enumerate(busy)
        if time > 0
    ]  # fmt: skip


def short(name: str, most: int = 70) -> str:
    """A kernel's name without its template arguments, cut to ``most`` characters."""
    plain = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0] or name
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def lanes(trace: Trace, step: int) -> dict[str, list[Row]]:
    """The events of one step by lane, top to bottom, under names that do not change from run to run.

    A trace without device records has host operations only.
    """
    what = "launches" if trace.reliable else "operations"
    rows = [row for row in trace.rows(step) if trace.reliable != (row["kind"] == "operation")]
    host = sorted({row["lane"] for row in rows if not row["lane"].startswith("stream")})
    streams = sorted({row["lane"] for row in rows} - set(host))
    names = {lane: f"host {number}: {what}" for number, lane in enumerate(host, 1)}
    if len(host) == 1:
        names = {host[0]: f"host: {what}"}
    names |= {lane: f"device: {lane}" for lane in streams}
    return {name: [row for row in rows if row["lane"] == lane] for lane, name in names.items()}


def with_layers(rows: list[Row]) -> list[Row]:
    """The kernels of a stream, each saying which layer it is in, where layers can be told apart."""
    rows = sorted(rows, key=lambda row: float(row["start_us"]))
    found = find_layers([row["name"] for row in rows])
    if found is None:
        return rows
    numbers = [found.of(index) for index in range(len(rows))]
    return [
        row | {"layer": f"<br>layer {number} of {found.count}" if number else "<br>outside the layers"}
        for row, number in zip(rows, numbers, strict=True)
    ]


def timeline(profile: Profile, *, window_us: tuple[float, float] | None = None) -> go.Figure:
    """One step of each arm, the arms above each other.

    Args:
        profile: traces by arm.
        window_us: the part of the step to show, in microseconds from its start; all of it by default.
    """
    if not profile.traces:
        return empty(
            "Timeline: none recorded yet", "lab.profile(save=folder) on a machine with a GPU records one"
        )
    steps = {arm: lanes(trace, trace.steps - 1) for arm, trace in profile.traces.items()}
    ends = [end_of(row) for step in steps.values() for rows in step.values() for row in rows]
    low, high = window_us or (0.0, max(ends, default=1.0))
    title, note = heading(profile)
    made = figure(title, note, height=150 + 62 * sum(map(len, steps.values())))
    names: list[str] = []
    for arm, step in steps.items():
        for lane, rows in step.items():
            rows = with_layers(rows) if lane.startswith("device") else rows  # noqa: PLW2901 - the same, told more
            visible = [row for row in rows if row["start_us"] < high and end_of(row) > low]
            crowded = len(visible) > MOST_BARS
            bars = sliced_bars(visible, low, high) if crowded else single_bars(visible)
            told = f"%{{hovertext}} events start in these {(high - low) / SLICES:.1f} µs"
            count = f"{len(visible)} event{'s' * (len(visible) != 1)}" + ", height: share busy" * crowded
            names.append(f"<b>{arm}</b>, {lane}<br>{count}")
            pale = lane.startswith("host") and profile.traces[arm].reliable
            # Arrays, and not lists: plotly writes them in a fiftieth of the lines, and a stored notebook holds many.
            start, end, busy = np.array([(bar.start, bar.end, bar.busy) for bar in bars]).reshape(-1, 3).T
            made.add_bar(
                base=start.astype("f4"), x=(end - start).astype("f4"), y=np.full(len(bars), len(names) - 1, "u1"),
                orientation="h", name=f"{arm}, {lane}",
                # From the lower edge of the lane upwards; the axis runs downwards.
                width=(LANE * busy).astype("f4"), offset=(LANE / 2 - LANE * busy).astype("f4"),
                marker={"color": faded(colour(arm), 0.6) if pale else colour(arm), "line": {"width": 0}},
                hovertext=[bar.label for bar in bars], customdata=busy.astype("f4") if crowded else None,
                hovertemplate=(told + "<br>busy %{customdata:.0%}" if crowded else "%{hovertext}")
                + f"<br>{profile.technique}, from %{{base:.1f}} µs<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(
        title_text="time from the start of the step (µs)", range=[low, high],
        separatethousands=True, exponentformat="none",
    )  # fmt: skip
    made.update_yaxes(
        tickvals=[*range(len(names))],
        ticktext=names,
        autorange="reversed",
        showgrid=False,
        ticks="",
        zeroline=False,
    )
    return made.update_layout(showlegend=False, barmode="overlay", margin_b=48)


def heading(profile: Profile) -> tuple[str, str]:
    """Title and note; that there are no device records is said in the title."""
    parts = []
    for arm, trace in profile.traces.items():
        figures = trace.as_dict()
        text = f"{arm}: {figures['wall_us'] / 1e3:.2f} ms under the profiler"
        if trace.reliable:
            text += f", launches: {figures['launches']:.0f}, device busy {figures['busy_us'] / 1e3:.2f} ms"
        parts.append(text)
    if all(trace.reliable for trace in profile.traces.values()):
        return profile.title, "; ".join(parts)
    return f"{profile.title}: host operations only, no device records", "CPU trace. " + "; ".join(parts)
