"""Grouped bars: one panel a model or workload, a group a size, a bar an arm, whiskers where an interval is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from cglab.ui.style import INK, colour, figure

WIDEST = 3
"""Panels in a row: with more, numbers and headings overlap."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        panel: heading of the panel that it stands in.
        group: its place on the axis.
        arm: gives its colour.
        height: in the unit of the axis.
        interval: low and high end of what is known of the height; None for no whiskers.
        parity: verdict that is said beside it.
    """

    panel: str
    group: str
    arm: str
    height: float
    interval: tuple[float, float] | None = None
    parity: str = "reference"


def grouped_bars(
    title: str, note: str, bars: Sequence[Bar], *, groups: str, heights: str, unit: str = "ms"
) -> go.Figure:
    """The bars in order of their appearance, panels side by side, in rows of equally many where one is not enough.

    Args:
        title, note: of the figure.
        bars: at least one.
        groups: title of the axis along the groups, unit included.
        heights: title of the axis of heights, unit included.
        unit: of the heights, for labels.
    """
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    rows = -(-len(panels) // WIDEST)
    columns = -(-len(panels) // rows)
    made = figure(title, note, height=150 + 270 * rows, barmode="group")
    made.set_subplots(
        rows, columns, subplot_titles=panels, horizontal_spacing=0.2 / (columns + 1),
        vertical_spacing=0.36 / rows if rows > 1 else None,
    )  # fmt: skip
    made.update_layout(margin_t=112)
    made.update_annotations(font_size=13)
    shown: set[str] = set()
    for index, panel in enumerate(panels):
        row, column = index // columns + 1, index % columns + 1
        for arm in dict.fromkeys(bar.arm for bar in bars):
            drawn = [bar for bar in bars if (bar.panel, bar.arm) == (panel, arm)]
            if not drawn:
                continue
            whiskers = _whiskers(drawn)
            made.add_bar(
                x=[bar.group for bar in drawn], y=[bar.height for bar in drawn], row=row, col=column, name=arm,
                legendgroup=arm, showlegend=arm not in shown, marker={"color": colour(arm)},
                # Whiskers would cross the number.
                text=None if whiskers else [f"{bar.height:.3g}" for bar in drawn], textposition="outside",
                cliponaxis=False, error_y=whiskers, customdata=[bar.parity for bar in drawn],
                hovertemplate=f"{panel}, {arm}, %{{x}}: %{{y:.4g}} {unit}<br>parity %{{customdata}}<extra></extra>",
            )  # fmt: skip
            shown.add(arm)
    made.update_xaxes(title_text=groups, type="category")
    made.update_yaxes(rangemode="tozero")
    return made.update_yaxes(title_text=heights, col=1)


def prompt_panel(tokens: int | str, cached: int) -> str:
    """Heading of a panel for prompts of a size, on two lines where a prefix is cached."""
    return f"{tokens} tokens" + (f"<br>after {cached} cached" if cached else "")


def _whiskers(bars: Sequence[Bar]) -> dict[str, object] | None:
    if any(bar.interval is None for bar in bars):
        return None
    ends = [(bar.height, *bar.interval) for bar in bars if bar.interval is not None]
    return {
        "array": [high - height for height, _, high in ends],
        "arrayminus": [height - low for height, low, _ in ends],
        "color": INK, "thickness": 1.2,
    }  # fmt: skip
