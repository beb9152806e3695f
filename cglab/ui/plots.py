"""The views: each takes a result and returns a plotly figure. Every result also has the same facts as a table.

Bars start at zero, axes name their unit, and a figure that holds times of the CPU tape says in its heading that
these are no times of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from cglab.graphs.coverage import Coverage
from cglab.lab.capture_limit import CaptureLimit
from cglab.lab.comparison import Comparison
from cglab.lab.planning import PHASES, PhasePlan
from cglab.lab.sweep import Sweep
from cglab.ui.accepted import accepted
from cglab.ui.growth import recorded_capture, recorded_growth, recorded_host, recorded_scheduler
from cglab.ui.loads import occupancy, ttft
from cglab.ui.peers import recorded_token
from cglab.ui.pipeline import pipeline_sweep, recorded_pipeline
from cglab.ui.recorded import (
    recorded_decode,
    recorded_dflash,
    recorded_mtp,
    recorded_planner,
    recorded_prefill,
    recorded_ttft,
    recorded_ttft_crossover,
)
from cglab.ui.recorded_graph import recorded_graph
from cglab.ui.step_parts import step_parts
from cglab.ui.style import (
    GREY,
    INK,
    colour,
    counted,
    empty,
    faded,
    figure,
    register_template,
    size_axis,
    summary,
)
from cglab.ui.timeline import timeline
from cglab.ui.workload_coverage import workload_coverage

__all__ = [
    "accepted",
    "bucket_cost",
    "bucket_plan",
    "capture_limit",
    "comparison",
    "coverage",
    "occupancy",
    "pipeline_sweep",
    "recorded_capture",
    "recorded_decode",
    "recorded_dflash",
    "recorded_graph",
    "recorded_growth",
    "recorded_host",
    "recorded_mtp",
    "recorded_pipeline",
    "recorded_planner",
    "recorded_prefill",
    "recorded_scheduler",
    "recorded_token",
    "recorded_ttft",
    "recorded_ttft_crossover",
    "register_template",
    "size_sweep",
    "step_parts",
    "summary",
    "timeline",
    "ttft",
    "workload_coverage",
]

PATTERNS = ("", "/", "x", ".", "-", "+")
"""Fillings of the reasons for eager steps, so that they need no colour."""

FACTS = ["bucket", "parity", "captured", "reasons"]
"""What hovering over a point of a sweep says beside its time."""


def comparison(result: Comparison) -> go.Figure:
    """Median step time of each arm with its 95 % interval; parity and coverage beside the name."""
    arms = [
        (arm.name, arm, arm.median * 1e3, arm.interval.low * 1e3, arm.interval.high * 1e3)
        for arm in result.times.arms
        if arm.median is not None and arm.interval is not None
    ]
    note = result.note or "Median and 95 % interval; arms measured in turns"
    made = figure(result.title, note, height=150 + 70 * len(arms))
    for name, arm, median, low, high in arms:
        counts = result.coverage[name]
        parity = f"{result.parity[name].verdict}, " if name in result.parity else ""
        label = f"<b>{name}</b><br>{parity}{counts.captured} of {counts.steps} captured"
        made.add_bar(
            x=[median], y=[label], orientation="h", name=name, marker={"color": colour(name)},
            error_x={"array": [high - median], "arrayminus": [median - low], "color": INK, "thickness": 1.2},
            hovertemplate=f"{name}: {median:.4g} ms<br>95 % interval {low:.4g} to {high:.4g} ms<extra></extra>",
        )  # fmt: skip
        ratio = "" if arm.ratio is None else f", x{arm.ratio:.2f}: {arm.verdict}"
        text = f"{median:.3g} ms{ratio}"
        made.add_annotation(x=high, y=label, text=text, showarrow=False, xanchor="left", xshift=8)
    top = max((high for *_, high in arms), default=1.0)
    made.update_xaxes(title_text="step time (ms)", range=[0, top * 1.45])
    made.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    return made.update_layout(showlegend=False, margin_b=48)


def size_sweep(result: Sweep) -> go.Figure:
    """Step time against size, one line an arm; a hollow point is a step of a captured arm that ran eager."""
    frame = result.as_frame()
    missed = frame["captured"].str.startswith("0/") & ~frame["arm"].isin(["eager", "off"])
    hollow = "Hollow: a captured arm whose step ran eager." if missed.any() else ""
    made = figure(result.title, f"{result.note} {hollow}".strip(), height=400)
    for arm, rows in frame.groupby("arm", sort=False):
        made.add_scatter(
            x=rows[result.size].tolist(), y=rows["median_ms"].tolist(), name=str(arm), mode="lines+markers",
            line={"color": colour(str(arm)), "width": 2},
            marker={"size": 9, "color": ["#FFFFFF" if eager else colour(str(arm)) for eager in missed[rows.index]],
                    "line": {"width": 2, "color": colour(str(arm))}},
            error_y={"array": (rows["high_ms"] - rows["median_ms"]).tolist(), "thickness": 1, "width": 3,
                     "arrayminus": (rows["median_ms"] - rows["low_ms"]).tolist()},
            customdata=rows[FACTS].astype(object).fillna("none").to_numpy().tolist(),
            hovertemplate=f"%{{x}} {result.unit}, bucket %{{customdata[0]}}: %{{y:.4g}} ms<br>parity "
            "%{customdata[1]}, captured %{customdata[2]} %{customdata[3]}",
        )  # fmt: skip
    made.update_xaxes(title_text=f"size ({result.unit})", **size_axis(frame[result.size].tolist()))
    made.update_yaxes(title_text="step time (ms)", rangemode="tozero")
    return made


def capture_limit(result: CaptureLimit) -> go.Figure:
    """Time of a captured step over that of an eager one, with 95 % intervals; dotted at the limit that was found."""
    points = result.found.evidence
    made = figure(result.title, str(result).replace("\n", ". "), height=360, showlegend=False, margin_b=48)
    ratios = [point.difference.ratio for point in points]
    intervals = [point.difference.interval for point in points]
    made.add_scatter(
        x=[point.size for point in points], y=ratios, name=f"{result.arm} over eager", mode="lines+markers",
        line={"color": colour(result.arm), "width": 2}, marker={"size": 9},
        error_y={"array": [each.high - ratio for each, ratio in zip(intervals, ratios, strict=True)],
                 "arrayminus": [ratio - each.low for each, ratio in zip(intervals, ratios, strict=True)],
                 "thickness": 1, "width": 3},
        customdata=[point.difference.verdict for point in points],
        hovertemplate=f"%{{x}} {result.unit}: x%{{y:.3g}}, %{{customdata}}<extra></extra>",
    )  # fmt: skip
    made.add_hline(y=1.0, line={"color": GREY, "width": 1.5}, annotation_text="eager")
    if result.found.limit is not None:
        made.add_vline(x=result.found.limit, line={"color": INK, "width": 1, "dash": "dot"})
    made.update_xaxes(title_text=f"size ({result.unit})", **size_axis([point.size for point in points]))
    return made.update_yaxes(title_text="captured over eager time (ratio)", rangemode="tozero")


def bucket_cost(memory: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """What each bucket costs: milliseconds to warm up and capture, and memory that it adds.

    Args:
        memory: rows of the bucket ledger, by arm; arms without a row are left out.
    """
    # The ledger is in the order of capture, largest first.
    arms = {arm: list(reversed(rows)) for arm, rows in memory.items() if rows}
    if not arms:
        return empty("Cost of the buckets", "Nothing was captured, so nothing was paid")
    note = "Captured largest first, in one pool. Pale: warm-up on the left, outside the pool on the right"
    made = figure("Cost of each bucket", note, height=400, barmode="stack")
    made.set_subplots(1, 2, horizontal_spacing=0.12)
    parts = (
        (1, "ms", "warm-up", 0.45, lambda row: row["warmup_ms"]),
        (1, "ms", "capture", 1.0, lambda row: row["capture_ms"]),
        (2, "MB", "pool", 1.0, lambda row: row["pool_bytes"] / 1e6),
        (2, "MB", "outside the pool", 0.45, lambda row: row["device_bytes"] / 1e6),
    )
    for arm, rows in arms.items():
        for column, unit, part, opacity, value in parts:
            made.add_bar(
                x=[row["bucket"] for row in rows], y=[round(value(row), 3) for row in rows], row=1, col=column,
                name=arm if part == "capture" else f"{arm}: {part}", showlegend=part == "capture",
                offsetgroup=arm, marker={"color": faded(colour(arm), opacity)},
                hovertemplate=f"{arm}, bucket %{{x}}<br>{part} %{{y:.4g}} {unit}<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(title_text="bucket (requests)", type="category")
    made.update_yaxes(title_text="time (ms)", rangemode="tozero", col=1)
    made.update_yaxes(title_text="memory added (MB)", rangemode="tozero", col=2)
    return made


def bucket_plan(result: PhasePlan) -> go.Figure:
    """Share of a trace's steps up to each live size, and below it the buckets of the plan and of SGLang's list."""
    steps = result.trace.steps(result.phase)
    total, unit = sum(steps.values()), PHASES[result.phase].unit
    title = f"Buckets for the {result.phase} steps of trace {result.trace.name}"
    made = figure(title, result.note, height=440, showlegend=False)
    made.set_subplots(2, 1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.06)
    made.add_scatter(
        x=list(steps), y=[100 * share / total for share in accumulate(steps.values())], row=1, col=1,
        name="steps", mode="lines+markers", line={"shape": "hv", "color": INK, "width": 1.5}, marker={"size": 4},
        customdata=list(steps.values()),
        hovertemplate=f"%{{customdata}} steps of %{{x}} {unit}<br>%{{y:.3g}} % are no larger<extra></extra>",
    )  # fmt: skip
    for (name, each), code in zip(result.outcomes.items(), (colour("plan"), colour("sglang")), strict=True):
        facts = f"{counted(len(each.buckets), 'bucket')}, {each.memory_bytes / 1e6:.3g} MB, waste {each.waste:.1%}"
        label = f"<b>{name}: {each.time_ms:.4g} ms</b><br>{facts}"
        made.add_scatter(
            x=list(each.buckets), y=[label] * len(each.buckets), row=2, col=1, name=name, mode="markers",
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 2, "color": code}},
            hovertemplate=f"{name}: bucket %{{x}}<extra></extra>",
        )  # fmt: skip
    sizes = [*steps, *result.plan.chosen.buckets, *result.plan.sglang.buckets]
    made.update_xaxes(type=size_axis(sizes)["type"])
    made.update_xaxes(title_text=f"size ({unit})", row=2)
    made.update_yaxes(title_text="steps up to this size (%)", rangemode="tozero", row=1)
    return made.update_yaxes(autorange="reversed", showgrid=False, ticks="", row=2)


def coverage(by_arm: Mapping[str, Coverage]) -> go.Figure:
    """Steps of each arm: replayed in the arm's colour, eager in grey by reason."""
    arms = list(by_arm)
    made = figure(
        "Steps that ran captured, and why the rest did not", "Colour: replayed. Grey: eager, by reason",
        height=190 + 46 * len(arms), barmode="stack",
    )  # fmt: skip
    for arm in arms:
        made.add_bar(
            x=[by_arm[arm].captured], y=[arm], orientation="h", name=f"captured: {arm}", marker={"color": colour(arm)},
            hovertemplate="%{x} steps captured<extra></extra>", showlegend=False,
        )  # fmt: skip
    reasons = list(dict.fromkeys(reason for arm in arms for reason in by_arm[arm].reasons))
    for index, reason in enumerate(reasons):
        made.add_bar(
            x=[by_arm[arm].reasons.get(reason, 0) for arm in arms], y=arms, orientation="h",
            name="eager: " + reason.lower().replace("_", " "),
            marker={"color": GREY, "pattern": {"shape": PATTERNS[index % len(PATTERNS)], "fgcolor": "#FFFFFF"}},
            customdata=[by_arm[arm].last_facts.get(reason, "") for arm in arms],
            hovertemplate="%{x} steps eager: " + reason.lower() + "<br>%{customdata}<extra></extra>",
        )  # fmt: skip
    made.update_xaxes(title_text="steps", rangemode="tozero")
    made.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    return made
