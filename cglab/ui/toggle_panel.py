"""The panel of toggles: one group of radio buttons a technique, beside it what runs, what it captures and needs.

A toggle that cannot be used is disabled and says why; one whose capture failed goes back and shows the message.
"""

from __future__ import annotations

import html
from collections.abc import Callable

import ipywidgets

from cglab.lab.available import NEEDS
from cglab.lab.techniques import TECHNIQUES, Technique
from cglab.ui.controls import alert, heading, set_html
from cglab.ui.style import colour
from cglab.ui.workspace import Workspace

Guard = Callable[[Callable[[], None]], None]


class TogglePanel(ipywidgets.VBox):  # type: ignore[misc]
    """The toggles of a workspace.

    Args:
        workspace: what is asked for and what is the case.
        guard: runs a handler and shows what it raises.
    """

    def __init__(self, workspace: Workspace, guard: Guard) -> None:
        self.workspace, self.guard = workspace, guard
        found = [TECHNIQUES[name] for name in workspace.toggles]
        self.modes = {
            each.name: ipywidgets.RadioButtons(
                options=each.values, value=None, description=f"{each.id} {each.name}", orientation="horizontal",
                style={"description_width": "initial"}, layout={"width": "230px", "flex": "0 0 auto", "margin": "0"},
            )
            for each in found
        }  # fmt: skip
        self.notes = {each.name: ipywidgets.HTML() for each in found}
        rows = [
            ipywidgets.HBox(
                [self.modes[each.name], self.notes[each.name]], layout={"align_items": "flex-start"}
            )
            for each in found
        ]
        super().__init__([ipywidgets.HTML(heading("Captures")), *rows], layout={"flex": "1 1 640px"})
        self._show()
        for name, control in self.modes.items():
            control.observe(lambda change, name=name: self._chosen(name, change.new), "value")
        workspace.observe(lambda _: self._show(), ["requested", "actual", "unavailable", "errors", "running"])

    def _chosen(self, name: str, mode: str | None) -> None:
        if mode is not None:
            self.guard(lambda: self.workspace.choose(name, mode))

    def _show(self) -> None:
        space = self.workspace
        for name, control in self.modes.items():
            if control.value != space.requested.get(name):
                control.value = space.requested.get(name)
            control.disabled = space.running or name in space.unavailable or name not in space.actual
            set_html(self.notes[name], self._note(TECHNIQUES[name]))

    def _note(self, each: Technique) -> str:
        """What runs, what is captured, and what went wrong or is missing."""
        space, mode = self.workspace, self.workspace.actual.get(each.name)
        if why := space.unavailable.get(each.name):
            return f'<span title="{html.escape(each.text)}">unavailable: {html.escape(why)}</span>'
        if mode is None:
            return ""
        dot = f'<span aria-hidden="true" style="color:{colour(mode)}">&#9632;</span>'
        told = f"{dot} runs <b>{mode}</b>: {html.escape(each.text)}; needs {html.escape(NEEDS[each.name])}"
        return told + alert(space.errors.get(each.name, ""))
