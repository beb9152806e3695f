"""What a run shows, in sections: a heading, a sentence, a figure and the same facts as a table.

Sections are made where the work is done, so that drawing them costs the page nothing but the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import plotly.graph_objects as go

from cglab.graphs.coverage import Coverage
from cglab.lab.arm_turns import figures, verdicts
from cglab.lab.comparison import Comparison, Profile
from cglab.lab.load_run import LoadRun
from cglab.ui.bars import Bar, grouped_bars
from cglab.ui.style import empty

if TYPE_CHECKING:
    import pandas

SectionName = Literal["step", "users", "timeline", "coverage", "buckets", "occupancy", "checks"]
HEADINGS: Final[Mapping[SectionName, str]] = MappingProxyType({
    "step": "Step time",
    "users": "What users feel",
    "timeline": "Timeline of one step",
    "coverage": "Coverage",
    "buckets": "Bucket ledger",
    "occupancy": "Forward occupancy",
    "checks": "Predictions against recordings",
})  # fmt: skip
"""The sections, in the order of the page."""

LATENCIES: Final = tuple(f"{name}{end}_ms" for name in ("ttft", "tpot") for end in ("", "_low", "_high"))


@dataclass(frozen=True)
class Section:
    """One section of a result.

    Attributes:
        text: what a reader must know, or why there is nothing to show.
        figure: the picture; None for none.
        table: the same facts; None for none.
    """

    text: str = ""
    figure: go.Figure | None = None
    table: pandas.DataFrame | None = None


@dataclass(frozen=True)
class Results:
    """What a run came to.

    Attributes:
        title: what was run.
        parity: verdicts by arm.
        sections: by name; what is missing has not been run.
        profile: traces behind the timeline, for windows of it and for Perfetto.
        comparison: the measured step; None where nothing was measured.
    """

    title: str
    parity: Mapping[str, str]
    sections: Mapping[SectionName, Section]
    profile: Profile | None = field(default=None, repr=False)
    comparison: Comparison | None = field(default=None, repr=False)


def compared_step(result: Comparison) -> dict[SectionName, Section]:
    """Step time, coverage and bucket ledger of a comparison."""
    frame = result.as_frame().drop(columns=["error", "samples", "capture_ms", "pool_mb"])
    return {
        "step": Section(result.note, result.plot(), frame),
        "coverage": Section(reasons(result.coverage), result.plot_coverage(), result.coverage_frame()),
        "buckets": Section("", result.plot_buckets(), result.bucket_frame()),
    }


def reasons(by_arm: Mapping[str, Coverage]) -> str:
    """Why steps ran eager, with the facts of the last one of each reason."""
    told = [
        f"{arm}: {count} x {reason.lower().replace('_', ' ')}"
        + (f" ({each.last_facts[reason]})" if each.last_facts.get(reason) else "")
        for arm, each in by_arm.items()
        for reason, count in each.reasons.items()
    ]
    return "; ".join(told) or "Every step was captured"


def profiled(profile: Profile) -> Section:
    """The timeline, and what each arm's trace comes to."""
    return Section("", profile.timeline(), profile.as_frame())


def loaded(runs: Mapping[str, Sequence[LoadRun]]) -> dict[SectionName, Section]:
    """Rates and latencies of each arm, and the forward occupancy and coverage of its last run."""
    import pandas

    rows = []
    for arm, each in runs.items():
        found, against = figures(each), verdicts(runs, arm)
        rows.append({
            "arm": arm, "tok_s": found["tokens_s"],
            **{name: found.get(name) for name in LATENCIES},
            "tpot_verdict": against.get("tpot_verdict", "reference"),
            "tokens": {True: "equal", False: "differ", None: "reference"}[against.get("tokens_equal")],
            "occupancy_%": each[-1].occupancy,
        })  # fmt: skip
    arm = list(runs)[-1]
    last = runs[arm][-1]
    frame = pandas.DataFrame(rows)
    rates = ", ".join(f"{row['arm']} {row['tok_s']:.4g} tokens a second" for row in rows)
    return {
        "users": Section(f"{rates}. {last.note}".strip(), users_figure(last.title, frame), frame),
        "occupancy": Section(f"The last run of {arm}", last.plot_occupancy(), last.occupancy_frame()),
    }  # fmt: skip


def users_figure(title: str, frame: pandas.DataFrame) -> go.Figure:
    """Time to first token and time per output token of each arm, medians with 95 % intervals.

    Args:
        title: of the load.
        frame: with the columns of ``LATENCIES``, one row an arm.
    """
    names = {"ttft": "time to first token", "tpot": "time per output token"}
    bars = [
        Bar(panel, "", row["arm"], row[f"{name}_ms"], (row[f"{name}_low_ms"], row[f"{name}_high_ms"]), row["tokens"])
        for name, panel in names.items()
        for row in frame.astype(object).to_dict("records")
        if isinstance(row[f"{name}_ms"], float)
    ]  # fmt: skip
    note = "Medians over the requests of all turns, 95 % intervals"
    return (
        grouped_bars(title, note, bars, groups="arm", heights="time (ms)")
        if bars
        else empty(title, "no token")
    )
