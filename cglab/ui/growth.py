"""What grows with what, from records of a GPU: a step with its batch and context, a capture with its buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path

import plotly.graph_objects as go

from cglab.lab.recorded import Recorded
from cglab.measure.legible import COUNT, NUMBER, SIZE, legible, require, unreadable
from cglab.measure.record import Record
from cglab.ui.style import INK, colour, empty, figure, size_axis

DASHES = ("solid", "dot", "dash", "dashdot")
"""Lines of one arm that differ in what is not on the axis: the batch of a growing context, or the model."""
SECONDS = tuple(f"bucket_{part}_ms" for part in ("warmup", "begin", "record", "end", "instantiate"))
BYTES = tuple(f"bucket_{part}_bytes" for part in ("pool", "device", "output"))
"""Columns of a recorded ledger that add up to what a bucket costs."""
STEP = {f"workload.{size}": COUNT for size in ("batch", "context", "cache")}
"""What a step of a curve has; a fit over several has none."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """Steps of one model and arm over one size, the other held."""

    model: str
    arm: str
    axis: str
    held: int
    records: tuple[Record, ...]

    @property
    def sizes(self) -> list[int]:
        return [record.workload[self.axis] for record in self.records]


def recorded_growth(recorded: Recorded) -> go.Figure:
    """Recorded step times, one row a model: against the batch on the left, against the context on the right.

    Each line of an arm has the floor of its steps below it: bytes over the bandwidth of the run.
    """
    curves = _curves(each for each in recorded.records if isinstance(each.metrics.get("step_ms"), float))
    if not curves:
        return empty("Growth of a decode step on a GPU: not recorded yet", str(recorded))
    models = list(dict.fromkeys(curve.model for curve in curves))
    made = figure(
        f"Growth of a decode step on {recorded.device}", recorded.note, height=120 + 330 * len(models)
    )
    headings = [f"{model} by {axis}" for model in models for axis in ("batch", "context")]
    made.set_subplots(
        len(models), 2, subplot_titles=headings, horizontal_spacing=0.12, vertical_spacing=0.3 / len(models)
    )
    made.update_layout(margin_t=112).update_annotations(font_size=13)
    shown: set[str] = set()
    for curve in curves:
        row, column = models.index(curve.model) + 1, 1 if curve.axis == "batch" else 2
        held = sorted({each.held for each in curves if each.axis == curve.axis})
        dash = DASHES[held.index(curve.held) % len(DASHES)]
        other = f", batch {curve.held}" if curve.axis == "context" else ""
        lines = [(curve.arm, "step_ms", 2.0, "lines+markers", colour(curve.arm))]
        if curve.arm == "full":
            lines.append(("floor", "floor_ms", 1.2, "lines", INK))
        for name, metric, width, mode, code in lines:
            made.add_scatter(
                x=curve.sizes, y=[record.metrics.get(metric) for record in curve.records], row=row, col=column,
                name=name + other, mode=mode, legendgroup=name + other, showlegend=name + other not in shown,
                line={"color": code, "width": width, "dash": dash}, marker={"size": 7},
                hovertemplate=f"{curve.axis} %{{x}}: %{{y:.4g}} ms",
            )  # fmt: skip
            shown.add(name + other)
    for column, axis, title in ((1, "batch", "batch size (requests)"), (2, "context", "context (tokens)")):
        sizes = sorted({size for curve in curves if curve.axis == axis for size in curve.sizes})
        names = [f"{size // 1024}k" if size % 1024 == 0 else str(size) for size in sizes]
        made.update_xaxes(title_text=title, ticktext=names, **size_axis(sizes), col=column)
    made.update_yaxes(rangemode="tozero")
    return made.update_yaxes(title_text="step time (ms)", col=1)


def recorded_host(recorded: Recorded) -> go.Figure:
    """What a captured step costs the host beyond the bare graph's ``replay()``, by batch, a line a model.

    Deciding and checking addresses know no batch; copying the inputs in has more to do for a larger one.
    """
    told = (each for each in recorded.records if isinstance(each.metrics.get("host_us"), float))
    curves = [curve for curve in _curves(told) if curve.axis == "batch"]
    if not curves:
        return empty("Host cost of a step by batch: not recorded yet", str(recorded))
    made = figure(f"Host cost of a captured step beyond its bare replay, {recorded.device}", recorded.note)
    for curve, dash in zip(curves, cycle(DASHES), strict=False):
        made.add_scatter(
            x=curve.sizes, y=[record.metrics["host_us"] for record in curve.records], mode="lines+markers",
            name=f"{curve.model}, {curve.arm}", line={"color": colour(curve.arm), "width": 2, "dash": dash},
            marker={"size": 7}, hovertemplate="batch %{x}: %{y:.4g} µs",
        )  # fmt: skip
    sizes = sorted({size for curve in curves for size in curve.sizes})
    made.update_xaxes(title_text="batch size (requests)", **size_axis(sizes))
    made.update_layout(showlegend=True)
    return made.update_yaxes(title_text="host time of a step (µs)", rangemode="tozero")


def _curves(records: Iterable[Record]) -> list[_Curve]:
    """Lines through the steps that shared a cache: those of several batches by batch, others by context."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in legible(records, partial(require, needed=STEP)):
        groups.setdefault((_model(record), record.workload["cache"], record.arm), []).append(record)
    curves = []
    for (model, _, arm), made in groups.items():
        axis, other = (
            ("batch", "context") if len({r.workload["batch"] for r in made}) > 1 else ("context", "batch")
        )
        made.sort(key=lambda record, axis=axis: record.workload[axis])  # type: ignore[misc]
        curves.append(_Curve(model, arm, axis, made[0].workload[other], tuple(made)))
    return curves


def recorded_capture(recorded: Recorded) -> go.Figure:
    """What capturing costs against the number of buckets: seconds of warm-ups and captures, and memory.

    A line is one capture on first use of its kernels, bucket by bucket; each bucket adds its line of the ledger.
    """
    first = (each for each in recorded.records if each.workload.get("kernels") == "first use")
    lines = legible(first, _check_ledger)
    if not lines:
        return empty("Cost of captures on a GPU: not recorded yet", str(recorded))
    note = f"All buckets of a phase in one pool, largest first. {recorded.note.partition(';')[0]}"
    made = figure(f"Cost of captures on {recorded.device}", note, height=400)
    made.set_subplots(1, 2, horizontal_spacing=0.14)
    models = list(dict.fromkeys(map(_model, lines)))
    for record in lines:
        name = f"{_model(record)}, {record.workload['phase']} {record.arm}"
        dash = DASHES[models.index(_model(record)) % len(DASHES)]
        costs = (_summed(record, SECONDS, 1e3), _summed(record, BYTES, 1e9))
        for column, (values, unit) in enumerate(zip(costs, ("s", "GB"), strict=True), 1):
            made.add_scatter(
                x=list(range(1, len(values) + 1)), y=values, row=1, col=column, name=name, legendgroup=name,
                showlegend=column == 1, mode="lines+markers", marker={"size": 5},
                line={"color": colour(record.arm), "width": 2, "dash": dash},
                hovertemplate=f"%{{x}} buckets: %{{y:.4g}} {unit}",
            )  # fmt: skip
    made.update_xaxes(title_text="buckets (count)", rangemode="tozero")
    made.update_yaxes(rangemode="tozero")
    made.update_yaxes(title_text="warm-ups and captures (s)", col=1)
    return made.update_yaxes(title_text="memory added (GB)", col=2)


PARTS = {"plan_us": "#0072B2", "inputs_us": "#E69F00", "commit_us": "#009E73", "step_us": INK}
"""Parts of a step's host time, and the whole."""
AXES = ("running", "waiting")


def recorded_scheduler(recorded: Recorded) -> go.Figure:
    """The host's part of a step: by requests that run on the left, by those that wait on the right."""
    records = legible(recorded.records, _check_host)
    if not any(each.arm in AXES for each in records):
        return empty("Host time of a step by requests: not recorded yet", str(recorded))
    fits = [each for each in records if each.arm == "fit"]
    told = "".join(
        f"; {each.metrics['fixed_us']:.3g} µs and {each.metrics['each_us']:.3g} µs a request that runs"
        for each in fits[-1:]
    )
    note = f"Scheduler, books, inputs and their copy; no model{told}"
    made = figure(f"Host time of a step by requests, {recorded.where}", note, height=400)
    made.set_subplots(1, 2, subplot_titles=["none wait", "64 run"], horizontal_spacing=0.14)
    made.update_layout(margin_t=112).update_annotations(font_size=13)
    for column, arm in enumerate(AXES, 1):
        drawn = sorted((r for r in records if r.arm == arm), key=lambda r: int(r.workload[arm]))
        for part, code in PARTS.items():
            made.add_scatter(
                x=[record.workload[arm] for record in drawn], y=[record.metrics[part] for record in drawn],
                row=1, col=column, name=part.removesuffix("_us"), legendgroup=part, showlegend=column == 1,
                mode="lines+markers", line={"color": code, "width": 2}, marker={"size": 7},
                hovertemplate=f"%{{x}} {arm}: %{{y:.4g}} µs",
            )  # fmt: skip
        made.update_xaxes(title_text=f"{arm} (requests)", row=1, col=column)
    made.update_yaxes(rangemode="tozero")
    return made.update_yaxes(title_text="host time of a step (µs)", col=1)


def _check_host(record: Record) -> None:
    """Stops at a record that lacks its point, or a part of its time; of the fit, what it is of.

    Raises:
        RecordError: naming the field.
    """
    if record.arm in AXES:
        require(record, {f"workload.{record.arm}": SIZE, **{f"metrics.{part}": NUMBER for part in PARTS}})
    elif record.arm == "fit":
        require(record, {"metrics.fixed_us": NUMBER, "metrics.each_us": NUMBER})


def _check_ledger(record: Record) -> None:
    """Stops at a ledger of which a column is absent or of another length.

    Raises:
        RecordError: naming the column.
    """
    columns = {name: record.samples.get(name, ()) for name in (*SECONDS, *BYTES)}
    buckets = max(map(len, columns.values()))
    for name, column in columns.items():
        if len(column) != buckets or not buckets:
            raise unreadable(
                record, f"samples.{name}", len(column) or None, f"one of each of {buckets} buckets"
            )


def _summed(record: Record, names: Sequence[str], unit: float) -> list[float]:
    """What the first so many buckets of a ledger cost, for every number of them."""
    return [
        total / unit for total in accumulate(map(sum, zip(*(record.samples[n] for n in names), strict=True)))
    ]


def _model(record: Record) -> str:
    return Path(record.model or "").name
