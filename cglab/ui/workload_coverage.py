"""Coverage of a workload: shares of steps and time that ran captured, and what each reason for running eager took."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

from cglab.lab.workload_coverage import WorkloadCoverage
from cglab.ui.style import COLOURS, GREY, INK, empty, figure

FACTS = 44
"""Letters of the facts that stand beside a reason; hovering says all."""


def workload_coverage(result: WorkloadCoverage) -> go.Figure:
    """Left what ran captured, by technique; right the milliseconds that ran eager, by reason, costliest first."""
    title = f"What ran captured of {result.model}, and what running eager took"
    if not result.techniques:
        return empty(title, "Nothing ran on this lab's engine yet")
    following = result.next_capture
    told = escape(f"Next: {following}") if following else "Nothing more to capture that would gain"
    height = 190 + 56 * max(len(result.techniques), len(result.costs))
    made = figure(title, f"{told}. {result.note}".strip(), height=height, barmode="group")
    made.set_subplots(1, 2, horizontal_spacing=0.28)
    names = [each.technique for each in result.techniques]
    for name, shares, code in (
        ("of the steps", [each.share for each in result.techniques], COLOURS["full"]),
        ("of the time", [each.time_share for each in result.techniques], COLOURS["breakable"]),
    ):
        made.add_bar(
            x=[None if share is None else 100 * share for share in shares], y=names, orientation="h", name=name,
            marker={"color": code}, row=1, col=1, cliponaxis=False, textposition="outside",
            text=["" if share is None else f"{100 * share:.3g} %" for share in shares],
            hovertemplate=f"%{{y}}: %{{x:.3g}} % {name}<extra></extra>",
        )  # fmt: skip
    timed = [each for each in result.costs if each.seconds is not None]
    made.add_bar(
        x=[1e3 * each.seconds for each in timed if each.seconds is not None],
        y=[f"{each.technique}<br>{each.reason.lower().replace('_', ' ')}" for each in timed],
        orientation="h", name="eager", showlegend=False, marker={"color": GREY}, row=1, col=2,
        text=[escape(each.facts[:FACTS]) for each in timed], textposition="auto", textfont={"color": INK},
        customdata=[escape(str(each)) for each in timed],
        hovertemplate="%{x:.4g} ms<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    made.update_xaxes(title_text="captured (%)", range=[0, 100], col=1)
    made.update_xaxes(title_text="time of eager steps (ms)", rangemode="tozero", col=2)
    return made.update_yaxes(autorange="reversed", showgrid=False, ticks="")
