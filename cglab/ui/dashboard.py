"""The interactive workspace: toggles, workload, run, results; a view of ``Workspace``, which does the knowing.

Every control has a label and works from the keyboard; every figure has a table. A widget's callback swallows what it
raises, so every handler here ends in the workspace's errors (N05).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import ipywidgets
import traitlets

from cglab.errors import CglabError
from cglab.lab.facade import Lab
from cglab.lab.steps import SIZES
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.profiling import prepare
from cglab.ui.controls import WIDE, alert, close_all, heading, said, set_html
from cglab.ui.lab_bench import LabBench
from cglab.ui.recorded_bench import recorded_sources
from cglab.ui.result_panel import ResultPanel
from cglab.ui.toggle_panel import TogglePanel
from cglab.ui.workspace import RUN, SOURCE, Workspace

LABELS = {"batch": "Requests at once", "prompt": "Prompt tokens", "new": "New tokens"}


class Dashboard(ipywidgets.VBox):  # type: ignore[misc]
    """The widgets; ``workspace`` is what they show.

    Args:
        workspace: what is asked for and what is the case; closed together with the widgets.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.source = ipywidgets.Dropdown(
            options=tuple(workspace.sources),
            value=next(iter(workspace.sources)),
            description="Source",
            style=WIDE,
        )
        self.title_line, self.status, self.error = (ipywidgets.HTML() for _ in range(3))
        self.toggles = TogglePanel(workspace, self._guarded)
        self.technique = ipywidgets.Dropdown(options=("",), description="Compare", style=WIDE)
        self.sizes = {
            name: ipywidgets.BoundedIntText(
                value=1, min=1, max=1, description=label, style=WIDE, layout={"width": "210px"}
            )
            for name, label in LABELS.items()
        }  # fmt: skip
        self.start = ipywidgets.Button(
            description="Run", tooltip="Compare with eager", button_style="primary", disabled=True
        )
        self.halt = ipywidgets.Button(
            description="Stop", tooltip="End the run after its present part", disabled=True
        )
        self.progress = ipywidgets.FloatProgress(min=0.0, max=1.0, description="Progress", style=WIDE)
        self.results = ResultPanel(workspace)
        work = ipywidgets.VBox([
            ipywidgets.HTML(heading("Workload")), *self.sizes.values(), self.technique,
            ipywidgets.HBox([self.start, self.halt]), self.progress, self.status, self.error,
        ], layout={"flex": "0 1 330px"})  # fmt: skip
        controls = ipywidgets.HBox(
            [self.toggles, work],
            layout={"flex_flow": "row wrap", "grid_gap": "24px", "align_items": "flex-start"},
        )
        super().__init__([ipywidgets.HBox([self.source, self.title_line]), controls, self.results])
        self._link()
        self._show_bench()
        self._say()

    def run(self) -> None:
        """What the button does."""
        self._guarded(self.workspace.run)

    def choose(self, name: str, mode: str) -> None:
        """What a toggle does."""
        self._guarded(lambda: self.workspace.choose(name, mode))

    def wait(self, seconds: float | None = None) -> bool:
        """See ``Workspace.wait``."""
        return self.workspace.wait(seconds)

    def close(self) -> None:
        """Ends the work, lets go of the lab, and takes every widget out of the page."""
        self.workspace.close()
        if self.comm is not None:
            close_all(self.children)
            self.layout.close()
            super().close()

    def _link(self) -> None:
        space = self.workspace
        self.source.observe(lambda change: self._guarded(lambda: space.open(change.new)), "value")
        self.technique.observe(lambda change: self._asked("technique", change.new), "value")
        for name, control in self.sizes.items():
            control.observe(lambda change, name=name: self._asked(name, change.new), "value")
        self.start.on_click(lambda _: self.run())
        self.halt.on_click(lambda _: self._guarded(space.stop))
        space.observe(lambda _: self._show_bench(), ["source", "technique", "largest", *LABELS])
        space.observe(lambda _: self._say(), ["doing", "running", "actual"])
        space.observe(lambda _: set_html(self.error, alert(self._message())), "errors")
        traitlets.dlink((space, "progress"), (self.progress, "value"))

    def _asked(self, name: str, value: Any) -> None:
        if value not in ("", None):
            setattr(self.workspace, name, value)

    def _message(self) -> str:
        errors = self.workspace.errors
        return "\n".join(errors[place] for place in (SOURCE, RUN) if place in errors)

    def _show_bench(self) -> None:
        """What the source offers: its title, the techniques that it compares, the sizes that it can have."""
        space = self.workspace
        set_html(self.title_line, said(space.title))
        offered = tuple(
            (f"{TECHNIQUES[name].id} {name}", name)
            for name in space.toggles
            if name in space.actual and name not in space.unavailable and name in SIZES
        )
        if offered and offered != self.technique.options:
            chosen = space.technique
            self.technique.options = offered
            space.technique = chosen
        if offered and space.technique:
            self.technique.value = space.technique
        for name, control in self.sizes.items():
            size, largest = getattr(space, name), getattr(space.largest, name, 1)
            # A box whose maximum shrinks first would cut its old value, and ask for that.
            control.max = max(control.max, size)
            control.value = size
            control.max = max(largest, size)

    def _say(self) -> None:
        space = self.workspace
        set_html(self.status, said(space.doing or "ready"))
        self.start.disabled = space.running or not space.technique
        self.halt.disabled = not space.running
        self.source.disabled = space.running

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs a handler; what it raises is shown, since nobody else would see it."""
        try:
            work()
        except CglabError as error:
            self.workspace.failed(RUN, f"{type(error).__name__}: {error}")


_boards: weakref.WeakKeyDictionary[Lab, dict[tuple[str, ...], Dashboard]] = weakref.WeakKeyDictionary()


def lab_dashboard(lab: Lab, toggles: tuple[str, ...] = ()) -> Dashboard:
    """The workspace on a lab. A cell that is run again gets a new one; the earlier one is closed, as when the lab goes.

    Args:
        lab: an open lab.
        toggles: those that are shown; all ten where none is named, and then recorded results can be chosen too.

    Raises:
        ToggleError: for an unknown toggle.
    """
    prepare()  # the worker will profile
    bench = LabBench(lab)
    sources = {lab.name: lambda: bench} | ({} if toggles else dict(recorded_sources()))
    space = Workspace(sources, toggles=toggles or tuple(TECHNIQUES), device=lab.device)
    boards = _boards.setdefault(lab, {})
    if (earlier := boards.pop(space.toggles, None)) is not None:
        lab.closing.remove(earlier.close)
        earlier.close()
    board = boards[space.toggles] = Dashboard(space)
    lab.closing.append(board.close)
    weakref.finalize(lab, board.close).atexit = False
    return board
