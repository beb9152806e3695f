"""A captured step as a strip: recorded segments in the colour of their arm, eager breaks between them in grey."""

from __future__ import annotations

from itertools import accumulate

import plotly.graph_objects as go

from cglab.lab.parts import StepParts
from cglab.ui.style import GREY, colour, counted, figure


def step_parts(result: StepParts) -> go.Figure:
    """The parts of each arm one after another on a time axis; grey is eager, as everywhere."""
    made = figure(result.title, result.note, height=150 + 70 * len(result.arms), barmode="overlay")
    for arm, parts in result.arms.items():
        starts = list(accumulate((part.microseconds for part in parts), initial=0.0))
        breaks = result.kinds(arm).count("break")
        lane = f"<b>{arm}</b><br>{counted(len(parts) - breaks, 'segment')}, {counted(breaks, 'break')}"
        for kind, code in (("segment", colour(arm)), ("break", GREY)):
            drawn = [(start, part) for start, part in zip(starts, parts, strict=False) if part.kind == kind]
            if not drawn:
                continue
            told = [
                f"{part.operations or '?'} operations" if kind == "segment" else part.name
                for _, part in drawn
            ]
            made.add_bar(
                base=[round(start, 2) for start, _ in drawn], x=[round(part.microseconds, 2) for _, part in drawn],
                y=[lane] * len(drawn), orientation="h", name=f"{arm}: {kind}s",
                marker={"color": code, "line": {"width": 1, "color": "#FFFFFF"}},
                hovertext=told, hovertemplate=f"{kind}, %{{hovertext}}<br>%{{x:.4g}} µs<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(title_text="time of the parts, one after another (µs)", rangemode="tozero")
    made.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    return made.update_layout(showlegend=False, margin_b=48)
