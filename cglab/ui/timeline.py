"""The timeline: one step of each arm on one time axis, host launches above the device's streams.

A step of a large model has thousands of events, and a browser draws some hundreds of bars well. So a crowded lane
is drawn at the resolution of the picture: events whose distance nobody could see become one bar, whose label says
how many they are. A window draws part of the step, and there every event again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from cglab.lab.comparison import Profile
from cglab.measure.trace import Trace
from cglab.ui.style import colour, empty, faded, figure

MOST_BARS = 400
"""Bars of a lane that are drawn one by one."""

PIXELS = 1000
"""Width of the picture: what is closer than a pixel is drawn as one bar."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """One event, or several that lie within a pixel of each other; microseconds from the start of the step."""

    start: float
    end: float
    label: str


def merged(rows: Sequence[Row], resolution: float) -> list[Bar]:
    """Joins neighbours of one lane that are less than ``resolution`` microseconds apart.

    Args:
        rows: of one lane, as ``Trace.rows`` gives them.
        resolution: in microseconds; 0 joins nothing.
    """
    groups: list[list[Row]] = []
    end = 0.0
    for row in sorted(rows, key=lambda each: each["start_us"]):
        stop = row["start_us"] + row["duration_us"]
        if groups and row["start_us"] - end < resolution:
            groups[-1].append(row)
            end = max(end, stop)
        else:
            groups.append([row])
            end = stop
    return [_bar(group) for group in groups]


def _bar(group: list[Row]) -> Bar:
    start, end = group[0]["start_us"], max(row["start_us"] + row["duration_us"] for row in group)
    inside = sum(row["duration_us"] for row in group)
    if len(group) == 1:
        return Bar(start, end, f"{short(group[0]['name'])}: {inside:.1f} µs")
    name, times = Counter(row["name"] for row in group).most_common(1)[0]
    return Bar(
        start, end, f"{len(group)} events, {inside:.1f} µs in all<br>most often {short(name)} ({times} times)"
    )


def short(name: str, most: int = 70) -> str:
    """A kernel's name without its template arguments, cut to ``most`` characters."""
    plain = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0] or name
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def lanes(trace: Trace, step: int) -> dict[str, list[Row]]:
    """The events of one step by lane, top to bottom, under names that do not change from run to run.

    A trace without device records has host operations only.
    """
    rows = trace.rows(step)
    kinds = {"operation"} if not trace.reliable else {row["kind"] for row in rows} - {"operation"}
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda each: (not each["lane"].startswith("launches"), each["lane"])):
        if row["kind"] in kinds:
            found.setdefault(row["lane"], []).append(row)
    host = [lane for lane in found if not lane.startswith("stream")]
    what = "launches" if trace.reliable else "operations"

    def renamed(lane: str) -> str:
        if lane not in host:
            return f"device: {lane}"
        return f"host: {what}" if len(host) == 1 else f"host {host.index(lane) + 1}: {what}"

    return {renamed(lane): events for lane, events in found.items()}


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
    ends = [
        row["start_us"] + row["duration_us"]
        for step in steps.values()
        for rows in step.values()
        for row in rows
    ]
    low, high = window_us or (0.0, max(ends, default=1.0))
    made = figure(*_heading(profile), height=150 + 62 * sum(map(len, steps.values())))
    names: list[str] = []
    for arm, step in steps.items():
        for lane, rows in step.items():
            visible = [r for r in rows if r["start_us"] < high and r["start_us"] + r["duration_us"] > low]
            bars = merged(visible, (high - low) / PIXELS if len(visible) > MOST_BARS else 0.0)
            names.append(f"<b>{arm}</b>, {lane}<br>{len(visible)} events")
            host = lane.startswith("host") and profile.traces[arm].reliable
            made.add_bar(
                base=[round(bar.start, 2) for bar in bars], x=[round(bar.end - bar.start, 2) for bar in bars],
                y=[names[-1]] * len(bars), orientation="h", name=f"{arm}, {lane}", width=0.7,
                marker={"color": faded(colour(arm), 0.55) if host else colour(arm), "line": {"width": 0}},
                hovertext=[bar.label for bar in bars],
                hovertemplate="%{hovertext}<br>from %{base:.1f} µs<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(
        title_text="time from the start of the step (µs)",
        range=[low, high],
        separatethousands=True,
        exponentformat="none",
    )
    made.update_yaxes(
        categoryorder="array", categoryarray=names, autorange="reversed", showgrid=False, ticks=""
    )
    return made.update_layout(showlegend=False, barmode="overlay", margin_b=48)


def _heading(profile: Profile) -> tuple[str, str]:
    """Title and note: without device records, that comes first."""
    reliable = all(trace.reliable for trace in profile.traces.values())
    parts = []
    for arm, trace in profile.traces.items():
        figures = trace.as_dict()
        text = f"{arm}: {figures['wall_us'] / 1e3:.2f} ms under the profiler"
        if trace.reliable:
            text += f", {figures['launches']:.0f} launches, device busy {figures['busy_us'] / 1e3:.2f} ms"
        parts.append(text)
    if reliable:
        return profile.title, "; ".join(parts)
    return f"{profile.title}: host operations only, no device records", "CPU trace. " + "; ".join(parts)
