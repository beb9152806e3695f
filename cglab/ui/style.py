"""How every figure looks: one template, one colour for each arm, a title and units always.

Colours are Okabe and Ito's, told apart with any colour vision; but their pink, which is the grey of the baseline to an
eye without green, gave way to a wine red. The baseline is grey everywhere, so that colour always means captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import plotly.graph_objects as go
import plotly.io as pio

GREY, INK, PALE = "#A6A6A6", "#2A2A2A", "#D9D9D9"
COLOURS = {
    "eager": GREY,
    "off": GREY,
    "full": "#0072B2",
    "breakable": "#E69F00",
    "graph": "#009E73",
    "fused": "#882255",
    "auto": "#56B4E9",
    "breaks": "#D55E00",
    "eager-untimed": GREY,
    "eager-timed": "#D55E00",
    "floor": INK,
    "plan": "#0072B2",
    "sglang": GREY,
    "transformers": "#56B4E9",
    "decode": "#0072B2",
    "prefill": "#E69F00",
}
"""One colour for each arm, in every figure."""

_OTHERS = ("#56B4E9", "#D55E00", "#CC79A7", "#009E73")
TEMPLATE = "cglab"


def colour(arm: str) -> str:
    """The colour of an arm; one that is not in the table has the same colour in every figure too."""
    return COLOURS.get(arm) or _OTHERS[crc32(arm.encode()) % len(_OTHERS)]


def faded(colour_code: str, opacity: float) -> str:
    """``#RRGGBB`` as an ``rgba`` colour, ``opacity`` from 0 to 1."""
    red, green, blue = (int(colour_code[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


@cache
def template() -> go.layout.Template:
    """The ``cglab`` template: on white, with the lab's colours, fonts and margins.

    It stands alone and holds what the lab draws, bars and lines: every stored figure carries a copy, and on plotly's
    own, with its globes and surfaces, that copy would be larger than most figures.
    """
    axis = {
        "title": {"standoff": 10, "font": {"size": 13}}, "automargin": True, "linecolor": PALE, "showline": True,
        "ticks": "outside", "tickcolor": PALE, "gridcolor": "#EEEEEE", "zerolinecolor": PALE, "zerolinewidth": 2,
    }  # fmt: skip
    pattern = {"fillmode": "overlay", "size": 10, "solidity": 0.2}
    edge = {"line": {"color": "white", "width": 0.5}}
    errors = {"error_x": {"color": INK}, "error_y": {"color": INK}}
    return go.layout.Template(
        data={
            "bar": [{"marker": {**edge, "pattern": pattern}, **errors}],
            "scatter": [{"fillpattern": pattern, **errors}],
        },
        layout={
            "colorway": [*dict.fromkeys(code for code in COLOURS.values() if code != INK), "#56B4E9"],
            "font": {"family": "Open Sans, DejaVu Sans, Arial, sans-serif", "size": 13, "color": INK},
            "paper_bgcolor": "white", "plot_bgcolor": "white", "autotypenumbers": "strict",
            "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
                      "pad": {"l": 12, "t": 14}, "font": {"size": 16}},
            "margin": {"l": 20, "r": 24, "t": 72, "b": 88},
            # At the bottom edge of the picture, where no title and no axis can meet it.
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom",
                       "title": {"text": ""}, "traceorder": "normal"},
            "hovermode": "closest",
            "hoverlabel": {"align": "left"},
            "bargap": 0.35,
            "annotationdefaults": {"arrowcolor": INK, "arrowhead": 0, "arrowwidth": 1},
            "xaxis": axis,
            "yaxis": axis,
        },
    )  # fmt: skip


def register_template() -> None:
    """Makes ``cglab`` plotly's default template; notebooks do so in ``cglab.notebook.setup``, nothing else does."""
    pio.templates[TEMPLATE] = template()
    pio.templates.default = TEMPLATE


def figure(title: str, note: str = "", *, height: int = 360, **layout: Any) -> go.Figure:
    """An empty figure with a title, and below it what a reader must know first.

    Args:
        title: what is shown.
        note: how far it may be trusted.
        height: pixels.
        **layout: more of plotly's layout.
    """
    heading = {"text": title, "subtitle": {"text": note, "font": {"size": 12, "color": "#6A6A6A"}}}
    return go.Figure(layout={"template": template(), "title": heading, "height": height, **layout})


def empty(title: str, note: str) -> go.Figure:
    """A figure that says that there is nothing to show, and why."""
    made = figure(title, note, height=160)
    made.update_xaxes(visible=False)
    made.update_yaxes(visible=False)
    return made


def counted(count: int, noun: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size_axis(sizes: Sequence[int]) -> dict[str, Any]:
    """An axis with a tick at each size, logarithmic where the sizes span a factor of 16."""
    ticks = sorted(set(sizes))
    wide = bool(ticks) and ticks[-1] >= 16 * ticks[0]
    return {"tickvals": ticks, "type": "log" if wide else "linear"}


def summary(figure: go.Figure) -> str:
    """What a figure holds, in words that do not change from run to run: for checked cells and tests.

    Returns:
        One line a trace (type, name, number of points), and the titles of the axes.
    """
    lines = []
    for trace in figure.data:
        points = max((len(trace[axis]) for axis in ("x", "y") if trace[axis] is not None), default=0)
        lines.append(f"{trace.type} {trace.name}: {points} point{'s' * (points != 1)}")
    axes = [figure.layout[name] for name in sorted(figure.layout) if name.startswith(("xaxis", "yaxis"))]
    titles = dict.fromkeys(axis.title.text for axis in axes if axis.title.text)
    return "\n".join([*lines, "axes: " + "; ".join(titles)])
