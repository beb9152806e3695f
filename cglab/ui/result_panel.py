"""The panel of results: parity, then the sections of a run, each a heading, a sentence, a figure and its table."""

from __future__ import annotations

import base64
import html
from typing import Any

import ipywidgets

from cglab.measure.parity import Verdict
from cglab.ui.controls import WIDE, heading, picture, set_html, table
from cglab.ui.sections import HEADINGS, Results, Section, SectionName
from cglab.ui.workspace import Workspace

BADGES: dict[str, str] = {Verdict.BITWISE: "#00664B", Verdict.DRIFT: "#8A5A00"}
"""Colours of parity verdicts, dark enough for white text; any other verdict is red."""


class ResultPanel(ipywidgets.VBox):  # type: ignore[misc]
    """What the last run came to; earlier results stay until the next.

    Args:
        workspace: whose results are shown.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.headline = ipywidgets.HTML()
        self.texts = {name: ipywidgets.HTML() for name in HEADINGS}
        self.plots = {name: ipywidgets.Output() for name in HEADINGS}
        self.tables = {name: ipywidgets.HTML() for name in HEADINGS}
        self.window = ipywidgets.FloatRangeSlider(
            min=0.0, max=1.0, value=(0.0, 1.0), step=0.001, description="Window (share of the step)", style=WIDE,
            continuous_update=False, readout_format=".3f", layout={"width": "520px", "display": "none"},
        )  # fmt: skip
        self.export = ipywidgets.HTML()
        parts: list[Any] = [self.headline]
        for name in HEADINGS:
            extra = [self.window, self.export] if name == "timeline" else []
            parts += [self.texts[name], *extra, self.plots[name], self.tables[name]]
        super().__init__(parts)
        workspace.observe(lambda change: self.show(change.new), "results")
        self.window.observe(self._draw_window, "value")

    def show(self, results: Results | None) -> None:
        """Draws results; None takes everything away."""
        set_html(self.headline, "" if results is None else heading(results.title) + badges(results))
        self.window.unobserve(self._draw_window, "value")
        self.window.value = (0.0, 1.0)
        self.window.observe(self._draw_window, "value")
        shown = results is not None and results.profile is not None and bool(results.profile.traces)
        self.window.layout.display = "" if shown else "none"
        set_html(self.export, export_link(results) if shown and results is not None else "")
        for name in HEADINGS:
            self._draw(name, None if results is None else results.sections.get(name))

    def _draw(self, name: SectionName, section: Section | None) -> None:
        text = "" if section is None else heading(HEADINGS[name], 4) + html.escape(section.text)
        set_html(self.texts[name], text)
        figure = None if section is None else section.figure
        self.plots[name].outputs = () if figure is None else picture(figure)
        frame = None if section is None else section.table
        set_html(self.tables[name], "" if frame is None else table(frame, opened=figure is None))

    def _draw_window(self, _: object) -> None:
        """A part of the step, where every kernel is a bar again; drawn from the trace, no device is asked."""
        results = self.workspace.results
        if results is None or results.profile is None:
            return
        low, high = (share * results.profile.length_us for share in self.window.value)
        if high > low:
            self.plots["timeline"].outputs = picture(results.profile.timeline((low, high)))


def badges(results: Results) -> str:
    """The verdicts of parity as coloured words."""
    style = "color:#fff;border-radius:4px;padding:1px 8px;margin-right:8px"
    return "".join(
        f'<span style="{style};background:{BADGES.get(verdict, "#B00020")}">{html.escape(arm)}: '
        f"parity {html.escape(verdict)}</span>"
        for arm, verdict in results.parity.items()
    )


def export_link(results: Results) -> str:
    """A link that saves the timeline for Perfetto; it holds the file itself, so nothing is asked for elsewhere."""
    if results.profile is None:
        return ""
    content = base64.b64encode(results.profile.perfetto()).decode()
    name = f"{results.profile.technique}.json.gz"
    return (
        f'<a download="{name}" href="data:application/gzip;base64,{content}">Save for Perfetto ({name})</a>'
    )
