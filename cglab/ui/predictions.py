"""Predicted steps beside recorded ones, hatched, so that nobody takes one for the other; and how far they were off."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from cglab.measure.recombine import Predicted
from cglab.measure.recombine_checks import HELD_OUT, Checks
from cglab.measure.record import Record
from cglab.ui.style import GREY, INK, colour, empty, faded, figure

SYMBOLS = dict(zip(HELD_OUT, ("circle", "square", "diamond"), strict=True))
"""Marks of the ways of holding out, so that they need no colour."""


def predicted_step(
    title: str, own: Mapping[str, Record | None], predicted: Mapping[str, Predicted]
) -> go.Figure:
    """The predicted step of each arm, hatched, or the range of one that the host decides; below it the recorded one.

    Args:
        title: of the figure.
        own: the recording of each arm at this very size.
        predicted: by arm.
    """
    note = "Hatched: predicted, without the recording below it. A line: what the host took elsewhere, for the launches"
    made = figure(title, note, height=170 + 90 * len(predicted), barmode="overlay")
    for arm, each in predicted.items():
        lane = f"<b>{arm}</b><br>predicted"
        if each.step_ms is not None:
            made.add_bar(
                x=[each.step_ms], y=[lane], orientation="h", name=f"{arm}: predicted",
                marker={"color": faded(colour(arm), 0.55), "pattern": {"shape": "/", "fgcolor": INK}},
                text=[f"{each.step_ms:.3g} ms"], textposition="outside",
                hovertemplate=f"{arm}, predicted: %{{x:.4g}} ms<br>{each.reason}<extra></extra>",
            )  # fmt: skip
        elif each.low_ms is not None:
            made.add_scatter(
                x=[each.low_ms, each.high_ms], y=[lane, lane], name=f"{arm}: range", mode="lines+markers",
                line={"color": colour(arm), "width": 4}, marker={"symbol": "line-ns", "size": 14,
                                                                 "line": {"width": 2, "color": INK}},
                hovertemplate=f"{arm}: %{{x:.4g}} ms<br>{each.reason}<extra></extra>",
            )  # fmt: skip
        else:
            made.add_scatter(
                x=[0], y=[lane], name=f"{arm}: no prediction", mode="text", text=[f" no prediction: {each.reason}"],
                textposition="middle right", hoverinfo="skip",
            )  # fmt: skip
        record = own[arm]
        step = None if record is None else record.metrics.get("step_ms")
        if record is not None and isinstance(step, float):
            made.add_bar(
                x=[step], y=[f"<b>{arm}</b><br>recorded"], orientation="h", name=f"{arm}: recorded",
                marker={"color": colour(arm)}, text=[f"{step:.3g} ms"], textposition="outside",
                hovertemplate=f"{arm}, recorded: %{{x:.4g}} ms<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(title_text="step time (ms)", rangemode="tozero")
    made.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    return made.update_layout(showlegend=False, margin_b=48)


def checks_figure(checks: Checks) -> go.Figure:
    """The error of each prediction that could be checked, by recorded step time, arm and what was held out."""
    shown = [each for each in checks.made if each.error is not None]
    if not shown:
        return empty("Predictions against recordings", str(checks))
    made = figure(
        "Predictions against recordings",
        "Each made without the recording that it is compared with",
        height=380,
    )
    for arm in dict.fromkeys(each.arm for each in shown):
        for kind, symbol in SYMBOLS.items():
            rows = [each for each in shown if (each.arm, each.held_out) == (arm, kind)]
            if rows:
                made.add_scatter(
                    x=[each.recorded_ms for each in rows], y=[100 * (each.error or 0.0) for each in rows],
                    mode="markers", name=f"{arm}, {kind} held out",
                    marker={"color": colour(arm), "symbol": symbol, "size": 9},
                    customdata=[[each.batch, each.context] for each in rows],
                    hovertemplate="batch %{customdata[0]}, context %{customdata[1]}<br>recorded %{x:.4g} ms, "
                    "off by %{y:.2f} %",
                )  # fmt: skip
    made.add_hline(y=0.0, line={"color": GREY, "width": 1.5})
    made.update_xaxes(title_text="recorded step time (ms)", rangemode="tozero")
    return made.update_yaxes(title_text="predicted beyond recorded (%)")
