"""Peers on one step, from records: host to host and replay alone, beside the floor; who could not run says why."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from cglab.lab.recorded import Recorded
from cglab.measure.record import Record
from cglab.ui.style import GREY, INK, colour, empty, figure

OURS = "full"
UNNAMED = "floor"


def recorded_token(recorded: Recorded) -> go.Figure:
    """One decode token by peer, a row for each model and batch: bars host to host, dots for the replay alone."""
    panels = _panels(recorded)
    if not panels:
        return empty("One decode token by peer on a GPU: not recorded yet", str(recorded))
    tallest = max(len(records) for records in panels.values())
    made = figure(
        f"One decode token, host to host, on {recorded.device}", recorded.note,
        height=140 + (60 + 26 * tallest) * len(panels),
    )  # fmt: skip
    made.set_subplots(len(panels), 1, subplot_titles=list(panels), vertical_spacing=0.28 / len(panels))
    made.update_layout(margin_t=112, margin_l=190).update_annotations(font_size=13)
    for row, records in enumerate(panels.values(), 1):
        drawn = sorted((each for each in records if each.arm != UNNAMED), key=_time, reverse=True)
        names = [each.arm if _time(each) < float("inf") else f"{each.arm} (not run)" for each in drawn]
        made.add_bar(
            x=[each.metrics.get("token_ms") for each in drawn], y=names, orientation="h", row=row, col=1,
            marker={"color": [colour(OURS) if each.arm == OURS else GREY for each in drawn]},
            text=[_said(each) for each in drawn], textposition="outside", cliponaxis=False, name="host to host",
            showlegend=row == 1, legendgroup="token", customdata=[each.metrics.get("error") or "" for each in drawn],
            hovertemplate="%{y}: %{x:.4g} ms %{customdata}<extra></extra>",
        )  # fmt: skip
        made.add_scatter(
            x=[each.metrics.get("replay_ms") for each in drawn], y=names, mode="markers", row=row, col=1,
            marker={"color": INK, "size": 8, "symbol": "diamond"}, name="replay alone", showlegend=row == 1,
            legendgroup="replay", hovertemplate="%{y}, replay alone: %{x:.4g} ms<extra></extra>",
        )  # fmt: skip
        floors = [floor for each in records if isinstance(floor := each.metrics.get("floor_ms"), float)]
        if floors:
            made.add_vline(
                x=min(floors), row=row, col=1, line={"color": INK, "width": 1.5, "dash": "dot"},
                annotation_text="floor", annotation_position="top",
            )  # fmt: skip
    made.update_xaxes(rangemode="tozero")
    made.update_xaxes(title_text="one token of each request (ms)", row=len(panels))
    return made.update_yaxes(type="category")


def _panels(recorded: Recorded) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    order = sorted(
        recorded.records,
        key=lambda each: (each.model or "", each.workload["batch"], each.workload.get("context") or 0),
    )
    for each in order:
        place = f"{Path(each.model or '').name}, batch {each.workload['batch']}, context {each.workload.get('context')}"
        found.setdefault(place, []).append(each)
    return found


def _time(record: Record) -> float:
    time = record.metrics.get("token_ms")
    return time if isinstance(time, float) else float("inf")


def _said(record: Record) -> str:
    time, ratio = record.metrics.get("token_ms"), record.metrics.get("ratio_to_ours")
    if not isinstance(time, float):
        return ""
    return f"{time:.3g}" + (f" (x{ratio:.2f})" if isinstance(ratio, float) else "")
