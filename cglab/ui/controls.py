"""Small widgets and pieces of HTML that the workspace's panels are built of."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from cglab.ui.plots import summary

PLOTLY = "application/vnd.plotly.v1+json"
WIDE = {"description_width": "initial"}


def alert(message: str) -> str:
    """A message that a screen reader reads out at once; nothing for none."""
    if not message:
        return ""
    return (
        f'<pre role="alert" style="color:#B00020;white-space:pre-wrap;margin:0">{html.escape(message)}</pre>'
    )


def said(message: str) -> str:
    """A line that a screen reader reads out when it is idle."""
    return f'<div role="status" aria-live="polite">{html.escape(message)}</div>'


def heading(text: str, level: int = 3) -> str:
    """A heading that a screen reader can jump to."""
    return f'<h{level} style="margin:8px 0 2px">{html.escape(text)}</h{level}>'


def table(frame: Any, *, opened: bool = False) -> str:
    """A frame as a table that opens on demand, where a figure shows the same; no ids that change (N08)."""
    shown = frame.to_html(
        index=False, na_rep="", float_format="{:.3g}".format, border=0, justify="left", col_space=60
    )
    box = "overflow:auto;max-height:320px"
    return (
        f'<details{" open" * opened}><summary>Table ({len(frame)} rows)</summary><div style="{box}">'
        f"{shown}</div></details>"
    )


def picture(figure: go.Figure) -> tuple[dict[str, Any], ...]:
    """A figure as an output: that needs no second kind of figure, and a test can read it."""
    data = {PLOTLY: json.loads(figure.to_json()), "text/plain": summary(figure)}
    return ({"output_type": "display_data", "data": data, "metadata": {}},)


def set_html(widget: ipywidgets.HTML, value: str) -> None:
    """Sets it; a value that it has sends nothing."""
    if widget.value != value:
        widget.value = value


def close_all(widgets: Iterable[ipywidgets.Widget]) -> None:
    """Takes widgets and everything in them out of the page and out of the kernel's table, styles and layouts too."""
    for widget in widgets:
        close_all(getattr(widget, "children", ()))
        for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
            if part is not None:
                part.close()
