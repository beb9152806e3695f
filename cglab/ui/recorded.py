"""What was recorded on a GPU, drawn from the records alone; where nothing is recorded, the figure says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import plotly.graph_objects as go

from cglab.lab.recorded import Recorded
from cglab.measure.record import Record
from cglab.ui.bars import Bar, grouped_bars, prompt_panel
from cglab.ui.style import GREY, INK, colour, empty, figure, size_axis

Label = Callable[[Record], str]


def recorded_decode(recorded: Recorded) -> go.Figure:
    """Recorded decode steps, one panel a model: step time by batch size and arm, with the floor as a line."""
    steps = sorted(recorded.records, key=lambda record: int(record.workload["batch"]))
    bars = _bars(recorded, steps, "step_ms", _model, lambda each: str(each.workload["batch"]))
    if not bars:
        return empty("Decode step on a GPU: not recorded yet", str(recorded))
    made = grouped_bars(
        f"Decode step on {recorded.device}", recorded.note, bars,
        groups="batch size (requests)", heights="step time (ms)",
    )  # fmt: skip
    shown = False
    for column, model in enumerate(dict.fromkeys(bar.panel for bar in bars), 1):
        floors: dict[str, float] = {}
        for each in steps:
            floor, batch = each.metrics.get("floor_ms"), str(each.workload["batch"])
            if _model(each) == model and isinstance(floor, float):
                floors[batch] = min(floor, floors.get(batch, floor))
        if floors:
            made.add_scatter(
                x=list(floors), y=list(floors.values()), row=1, col=column, mode="markers",
                name="floor", legendgroup="floor", showlegend=not shown,
                marker={"symbol": "line-ew", "size": 60, "line": {"width": 2, "color": INK}},
                hovertemplate="floor %{y:.4g} ms<extra></extra>",
            )  # fmt: skip
            shown = True
    return made


def recorded_prefill(recorded: Recorded) -> go.Figure:
    """Recorded prefill steps, one panel a model: step time by new and cached tokens and arm."""
    steps = [each for each in recorded.records if each.workload.get("tokens") is not None]
    steps.sort(key=lambda record: (_cached(record), record.workload["tokens"]))
    bars = _bars(recorded, steps, "step_ms", _model, _tokens)
    return _drawn(
        recorded, bars, "Prefill step", f"Prefill step on {recorded.device}",
        groups="size (tokens)", heights="step time (ms)",
    )  # fmt: skip


def recorded_ttft(recorded: Recorded) -> go.Figure:
    """Recorded time to first token, one panel a size of the prompts: by concurrency and prefill arm."""
    points = sorted(
        recorded.records,
        key=lambda each: (
            _cached(each), each.workload["tokens"], each.workload["concurrency"], each.model or "",
        ),
    )  # fmt: skip
    bars = _bars(recorded, points, "ttft_ms", _prompt, lambda each: str(each.workload["concurrency"]))
    models = ", ".join(dict.fromkeys(_model(each) for each in points))
    return _drawn(
        recorded, bars, "Time to first token", f"Median time to first token of {models} on {recorded.device}",
        groups="in flight (requests)", heights="time to first token (ms)",
    )  # fmt: skip


def recorded_mtp(recorded: Recorded) -> go.Figure:
    """Recorded loads with an assistant, one panel a model: time per output token by load and seed step."""
    bars = _bars(
        recorded, recorded.records, "tpot_ms", _model,
        lambda each: f"{each.workload.get('dataset', 'load')}, {each.workload['concurrency']} in flight",
    )  # fmt: skip
    return _drawn(
        recorded, bars, "Loads with a draft", f"Time per output token by seed step on {recorded.device}",
        groups="load", heights="time per output token (ms)",
    )  # fmt: skip


def recorded_dflash(recorded: Recorded) -> go.Figure:
    """Recorded loads with a block draft, one panel a model: forward occupancy by concurrency and sampler."""
    bars = _bars(
        recorded, recorded.records, "occupancy_percent", _model, lambda each: str(each.workload["concurrency"])
    )  # fmt: skip
    return _drawn(
        recorded, bars, "Forward occupancy with a block draft", f"Forward occupancy by sampler on {recorded.device}",
        groups="in flight (requests)", heights="forward occupancy (%)", unit="%",
    )  # fmt: skip


def recorded_planner(recorded: Recorded) -> go.Figure:
    """Time of each recorded load's steps on the planned buckets and on SGLang's list, one panel a phase."""
    bars = _bars(
        recorded, recorded.records, "time_ms",
        lambda each: str(each.workload["phase"]), lambda each: str(each.workload["load"]),
    )  # fmt: skip
    return _drawn(
        recorded, bars, "Planned buckets", f"Planned buckets beside SGLang's list, costs of {recorded.device}",
        groups="load", heights="time of all steps (ms)",
    )  # fmt: skip


def recorded_ttft_crossover(recorded: Recorded) -> go.Figure:
    """TTFT of each captured arm over eager's by prompt size, one request at a time; dotted at the limit found."""
    if not recorded:
        return empty("Where a prefill graph stops paying: not recorded yet", str(recorded))
    made = figure(f"Time to first token over that of eager on {recorded.device}", recorded.note, height=400)
    sizes: set[int] = set()
    for each in recorded.records:
        ratios = {
            size: ratio
            for size in each.workload["sizes"]
            if isinstance(ratio := each.metrics.get(f"ratio_at_{size}"), float)
        }
        sizes |= set(ratios)
        limit = each.metrics.get("limit")
        told = f"wins up to {limit:.0f}" if isinstance(limit, float) else "wins nowhere"
        made.add_scatter(
            x=list(ratios), y=list(ratios.values()), name=f"{_model(each)}, {each.arm}: {told}", mode="lines+markers",
            line={"color": colour(each.arm), "width": 2}, marker={"size": 9},
            customdata=[each.metrics.get(f"verdict_at_{size}") for size in ratios],
            hovertemplate="%{x} tokens: x%{y:.3g}, %{customdata}",
        )  # fmt: skip
        if isinstance(limit, float):
            made.add_vline(x=limit, line={"color": colour(each.arm), "width": 1, "dash": "dot"})
    made.add_hline(y=1.0, line={"color": GREY, "width": 1.5}, annotation_text="eager")
    made.update_xaxes(title_text="prompt (tokens)", **size_axis(sorted(sizes)))
    return made.update_yaxes(title_text="captured over eager time (ratio)", rangemode="tozero")


def _drawn(recorded: Recorded, bars: Sequence[Bar], what: str, title: str, **axes: str) -> go.Figure:
    """Bars in groups; or, without any, that this is not recorded. ``axes`` are those of ``grouped_bars``."""
    if not bars:
        return empty(f"{what} on a GPU: not recorded yet", str(recorded))
    return grouped_bars(title, recorded.note, bars, **axes)


def _bars(
    recorded: Recorded, records: Sequence[Record], metric: str, panel: Label, group: Label
) -> list[Bar]:
    """A bar for each record that has the metric, by arm in the order of all records: so the legend is."""
    bars = []
    for each in records:
        height, low, high = (each.metrics.get(name) for name in (metric, *_ends(metric)))
        if isinstance(height, float):
            ends = (low, high) if isinstance(low, float) and isinstance(high, float) else None
            parity = (each.parity or {}).get("verdict") or "reference"
            bars.append(Bar(panel(each), group(each), each.arm, height, ends, parity))
    arms = list(dict.fromkeys(record.arm for record in recorded.records))
    return sorted(bars, key=lambda bar: arms.index(bar.arm))


def _ends(metric: str) -> tuple[str, str]:
    """``step_ms`` has its interval in ``step_low_ms`` and ``step_high_ms``."""
    name, _, unit = metric.rpartition("_")
    return f"{name}_low_{unit}", f"{name}_high_{unit}"


def _model(record: Record) -> str:
    return Path(record.model or "").name


def _cached(record: Record) -> int:
    """Tokens that were there already; a record may leave them out or have null."""
    return record.workload.get("cached") or 0


def _tokens(record: Record) -> str:
    cached = _cached(record)
    return f"{record.workload['tokens']}" + (f" after {cached} cached" if cached else "")


def _prompt(record: Record) -> str:
    return prompt_panel(record.workload["tokens"], _cached(record))
