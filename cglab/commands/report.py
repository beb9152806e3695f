"""The report of the tour: one HTML file that needs no network, each plot with its facts as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment
from plotly.offline import get_plotlyjs

from cglab.commands.tour import CAPTURED, Tour
from cglab.lab.sweep import Sweep
from cglab.ui import plots
from cglab.ui.style import GREY, colour, figure

VERDICTS = {"bitwise": "#009E73", "drift": "#E69F00", "corrupted": "#D55E00"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One heading of the report.

    Attributes:
        title, text: what is shown, and how to read it.
        rows: the table, one object a row.
        plot: its figure; None for a table alone.
    """

    title: str
    text: str
    rows: Sequence[Row]
    plot: go.Figure | None = None

    @property
    def html(self) -> str:
        """The figure for the page. Plotly's own encoder escapes what could end a script."""
        if self.plot is None:
            return ""
        config = {"displaylogo": False, "responsive": True}
        return str(self.plot.to_html(full_html=False, include_plotlyjs=False, config=config))


def report_page(tour: Tour) -> str:
    """The whole page.

    Args:
        tour: what was found.

    Returns:
        HTML with plotly.js inside; everything that comes from the outside is escaped.
    """
    template = files("cglab.commands").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(tour=tour, record=tour.records[0], sections=_sections(tour), plotlyjs=get_plotlyjs())


def _sections(tour: Tour) -> list[Section]:
    generated = {arm: found.coverage for arm, found in tour.generations.items()}
    return [
        Section(
            "Buckets",
            "A batch is padded up to the next captured size.",
            [{"live": live, "bucket": size, "padded": size - live} for live, size in _live_to_bucket(tour)],
            _buckets(tour),
        ),
        Section(
            "Parity",
            "Captured steps against the same steps run eager at the padded size, logits and tokens, bit by bit.",
            _checks(tour),
            _parity(tour),
        ),
        Section(
            "Coverage",
            "Steps of one generation whose requests end one by one: replayed, or eager with the reason.",
            tour.generation_rows(),
            plots.coverage(generated),
        ),
        Section(
            "Times",
            "Each arm in turns on the same batch; median and 95 % interval.",
            tour.rows(),
            Sweep(tour.comparisons).plot(),
        ),
        Section(
            "What a bucket costs",
            "Warm-up, capture and memory of each bucket, captured largest first into one pool.",
            [{"arm": arm, **row} for arm, rows in tour.memory.items() for row in rows],
            plots.bucket_cost(tour.memory),
        ),
        Section(
            "Timeline",
            "One step of each arm under the profiler: a run of its own, from which no time above comes.",
            tour.profile.as_frame().to_dict("records"),
            plots.timeline(tour.profile),
        ),
        Section("Machine and versions", "What this was measured on.", _machine(tour)),
    ]


def _live_to_bucket(tour: Tour) -> list[tuple[int, int]]:
    buckets = sorted({check.bucket for check in tour.checks})
    return [(live, next(size for size in buckets if size >= live)) for live in range(1, buckets[-1] + 1)]


def _buckets(tour: Tour) -> go.Figure:
    pairs = _live_to_bucket(tour)
    made = figure("Which bucket serves a batch", "Padded rows are computed and thrown away", barmode="stack")
    live = [size for size, _ in pairs]
    made.add_bar(x=live, y=live, name="live requests", marker={"color": colour("full")})
    padding = [bucket - size for size, bucket in pairs]
    made.add_bar(x=live, y=padding, name="padding", marker={"color": GREY})
    made.update_xaxes(title_text="batch size (requests)")
    return made.update_yaxes(title_text="rows computed (requests)", rangemode="tozero")


def _checks(tour: Tour) -> list[Row]:
    return [
        {
            "arm": each.arm,
            "bucket": each.bucket,
            "live": each.live,
            "padded": each.bucket - each.live,
            "verdict": str(each.parity.verdict),
            "values compared": each.parity.compared,
            "detail": each.parity.detail or None,
        }
        for each in tour.checks
    ]


def _parity(tour: Tour) -> go.Figure:
    made = figure(
        "Captured against padded eager", "Fewest and most live requests of every bucket", height=260
    )
    for verdict, paint in VERDICTS.items():
        found = [check for check in tour.checks if str(check.parity.verdict) == verdict]
        made.add_scatter(
            x=[f"{check.live} in {check.bucket}" for check in found],
            y=[check.arm for check in found],
            name=verdict,
            mode="markers",
            marker={"size": 14, "symbol": "square", "color": paint},
            showlegend=True,
            hovertemplate=f"%{{y}}, %{{x}}: {verdict}<extra></extra>",
        )
    order = list(dict.fromkeys(f"{check.live} in {check.bucket}" for check in tour.checks))
    made.update_xaxes(title_text="live requests in bucket", type="category", categoryarray=order)
    return made.update_yaxes(title_text="arm", type="category", categoryarray=list(CAPTURED))


def _machine(tour: Tour) -> list[Row]:
    record = tour.records[0]
    facts = {
        "device": record.device.name,
        "kind": record.device.kind,
        "driver": record.device.driver,
        "streaming multiprocessors": record.device.sms,
        "GPUs of the host": record.device.gpus,
        "cores of the host": record.device.cores,
        "load of the host": record.device.load,
        **record.versions,
        "state of cglab/": record.tree + (" (changed since the commit)" if record.dirty else ""),
        "run": record.run,
    }
    return [{"what": name, "value": value} for name, value in facts.items()]
