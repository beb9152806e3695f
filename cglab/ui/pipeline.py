"""The view of a pipeline's sweep: throughput by aggregate cap, eager and captured, recorded or published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from cglab.lab.recorded import Recorded
from cglab.ui.style import colour, empty, figure, size_axis

Sweep = Sequence[tuple[str, int, float]]
"""Arm, cap and tokens a second of each point; several of one cap differ in concurrency, and the best counts."""


def pipeline_sweep(points: Sweep, title: str, note: str = "") -> go.Figure:
    """The best throughput of each arm by cap.

    Args:
        points: arm, cap in tokens, tokens a second.
        title: what was measured, and where.
        note: below the title.
    """
    best: dict[str, dict[int, float]] = {}
    for arm, cap, rate in points:
        caps = best.setdefault(arm, {})
        caps[cap] = max(rate, caps.get(cap, 0.0))
    made = figure(title, note, height=400)
    for arm, caps in best.items():
        sizes = sorted(caps)
        made.add_scatter(
            x=sizes, y=[caps[size] for size in sizes], name=arm, mode="lines+markers",
            line={"color": colour(arm), "width": 2}, marker={"size": 9},
            hovertemplate="cap %{x}: %{y:.4g} tok/s",
        )  # fmt: skip
    every = sorted({cap for caps in best.values() for cap in caps})
    made.update_xaxes(title_text="most tokens of one forward (cap)", **size_axis(every))
    return made.update_yaxes(title_text="input and output (tok/s)", rangemode="tozero")


def recorded_pipeline(recorded: Recorded) -> go.Figure:
    """The recorded sweep of the model that was measured last; it says so where there is none."""
    if not recorded.records:
        return empty("Prefill throughput of a pipeline by cap", recorded.note)
    newest = recorded.records[-1]
    same = [each for each in recorded.records if each.model == newest.model]
    points: list[tuple[str, int, Any]] = [
        (each.arm, each.workload["cap"], each.metrics["tok_s"]) for each in same
    ]
    stages = newest.workload["stages"]
    return pipeline_sweep(points, f"{newest.model} in {stages} stages on {recorded.device}", recorded.note)
