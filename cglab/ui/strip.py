"""The widget strip: choose how the steps of a phase run, choose a size, run, read the table, see the plot.

Three parts that know little of each other. ``StripState`` says what is asked for and what is the case; it knows no
widget and no device. ``LabWorker`` does the work, in the caller's thread: only one thread may use CUDA during a
capture. ``Strip`` builds the widgets and links them to the state.

A widget's callback swallows exceptions, so every handler here ends in the state: an error is shown until the next
success, and a mode that cannot be captured flips back and says why (N05).
"""

from __future__ import annotations

import html
import json
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets
import traitlets

from cglab.errors import CaptureError, ClosedError, ToggleError
from cglab.graphs.options import CaptureFailedWarning
from cglab.lab.comparison import Comparison
from cglab.lab.facade import Lab
from cglab.lab.steps import size_name
from cglab.lab.techniques import technique
from cglab.ui.plots import summary

MODES = technique("decode").values  # and of prefill
LABELS = {"decode": "Batch size", "prefill": "New tokens"}
"""What people call the size of a step, by technique."""

PLOTLY = "application/vnd.plotly.v1+json"


class StripState(traitlets.HasTraits):
    """What is asked for and what is the case.

    Attributes:
        requested: the mode that was chosen.
        actual: the mode that the lab's steps run in.
        size: live rows of the measured step: requests of a decode step, tokens of a prefill step.
        running: work is under way.
        error: what went wrong last; empty after a success.
        result: the last comparison.
    """

    requested = traitlets.Enum(MODES, "eager")
    actual = traitlets.Enum(MODES, "eager")
    size = traitlets.Int(1, min=1)
    running = traitlets.Bool(default_value=False)
    error = traitlets.Unicode()
    result = traitlets.Instance(Comparison, allow_none=True)


class Worker(Protocol):
    """Does what the strip asks for; raises where it cannot."""

    technique: str
    mode: str
    size: int
    largest: int

    def choose(self, mode: str, size: int) -> None:
        """Makes steps run in ``mode``, captured and ready for ``size`` live rows."""
        ...

    def run(self, mode: str, size: int) -> Comparison:
        """Compares ``mode`` with eager; eager itself with every other mode."""
        ...


class LabWorker:
    """Works on a lab, which it does not keep alive: a strip that is left over holds no model (N02).

    Args:
        lab: an open lab.
        technique: whose steps are switched: ``decode`` or ``prefill``.

    Raises:
        ToggleError: for another technique.
    """

    def __init__(self, lab: Lab, technique: str = "decode") -> None:
        if technique not in LABELS:
            raise ToggleError(f"there is no strip for {technique!r}; good names: {', '.join(LABELS)}")
        self._lab, self.technique = weakref.ref(lab), technique
        self.mode = getattr(lab.captures, technique) or "eager"
        self.size, self.largest = lab.sizes.default(size_name(technique)), lab.sizes.largest(technique)

    @property
    def lab(self) -> Lab:
        """The lab, if it is still there."""
        lab = self._lab()
        if lab is None:
            raise ClosedError("the lab of this strip is gone; open one and call lab_strip again")
        return lab

    def choose(self, mode: str, size: int) -> None:
        """Captures what ``mode`` needs for ``size`` if it is not there yet, then sets the lab's toggle.

        Raises:
            CaptureError: if nothing could be captured; the toggle is then as it was.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureFailedWarning)  # told by the error below
            runner = self.lab.runner(mode, self.technique)
            runner.capture_for(size)
        captured = runner.captured
        if captured.failures and not captured.captured_sizes:
            raise CaptureError(f"{mode} cannot be captured: {next(iter(captured.failures.values()))}")
        setattr(self.lab.captures, self.technique, mode)

    def run(self, mode: str, size: int) -> Comparison:
        """Measures in turns, few steps: a strip is for looking, ``cglab bench`` for results."""
        others = [other for other in MODES if other != "eager"] if mode == "eager" else [mode]
        sizes = {size_name(self.technique): size}
        return self.lab.compare(self.technique, ("eager", *others), repeats=5, **sizes)


class Strip(ipywidgets.VBox):  # type: ignore[misc]
    """The widgets; ``state`` is what they show.

    Args:
        worker: does the work.
        state: a new one by default.
    """

    def __init__(self, worker: Worker, state: StripState | None = None) -> None:
        self.worker = worker
        self.state = state or StripState(requested=worker.mode, actual=worker.mode, size=worker.size)
        self.mode = ipywidgets.ToggleButtons(
            options=MODES, value=self.state.actual, description=f"{worker.technique.capitalize()} mode",
            style={"description_width": "initial", "button_width": "90px"},
        )  # fmt: skip
        self.size = ipywidgets.BoundedIntText(
            value=self.state.size, min=1, max=worker.largest, description=LABELS[worker.technique],
            style={"description_width": "initial"}, layout={"width": "150px"},
        )  # fmt: skip
        self.start = ipywidgets.Button(
            description="Run", tooltip="Compare the mode with eager", button_style="primary"
        )
        self.status = ipywidgets.HTML(description="Status")
        self.error = ipywidgets.HTML()
        self.table = ipywidgets.HTML()
        self.plot = ipywidgets.Output()
        controls = ipywidgets.HBox(
            [self.mode, self.size, self.start],
            layout={"flex_flow": "row wrap", "align_items": "flex-end", "grid_gap": "12px"},
        )
        super().__init__([controls, self.status, self.error, self.table, self.plot])
        # Two ways, each on its own: a traitlets.link is deaf while it passes a value on, and so to the flip back.
        traitlets.dlink((self.state, "requested"), (self.mode, "value"))
        traitlets.dlink((self.mode, "value"), (self.state, "requested"))
        traitlets.link((self.state, "size"), (self.size, "value"))
        for control in (self.mode, self.size, self.start):
            traitlets.dlink((self.state, "running"), (control, "disabled"))
        traitlets.dlink((self.state, "error"), (self.error, "value"), _alert)
        self.state.observe(lambda _: self._say(), ["actual", "running"])
        self.state.observe(lambda _: self._draw(), "result")
        self.state.observe(lambda _: self._guarded(self._choose), "requested")
        self.start.on_click(lambda _: self.run())
        self._say()

    def run(self) -> None:
        """What the button does."""
        self._guarded(self._run)

    def _choose(self) -> None:
        try:
            self.worker.choose(self.state.requested, self.state.size)
        except BaseException:  # an interrupt too
            self.state.requested = self.state.actual
            raise
        self.state.actual = self.state.requested

    def _run(self) -> None:
        self.state.result = self.worker.run(self.state.actual, self.state.size)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs a handler; what it raises is shown, since nobody else would see it."""
        if self.state.running:  # flipping back comes here again
            return
        self.state.running = True
        try:
            work()
        except Exception as error:  # noqa: BLE001 - any error is the user's to read
            self.state.error = f"{type(error).__name__}: {error}"
        else:
            self.state.error = ""
        finally:
            self.state.running = False

    def _say(self) -> None:
        self.status.value = (
            "working ..." if self.state.running else f"{self.worker.technique} runs {self.state.actual}"
        )

    def _draw(self) -> None:
        result = self.state.result
        if result is None:
            return
        frame, figure = result.as_frame(), result.plot()
        shown = frame.drop(columns=["error", "samples", "capture_ms", "pool_mb"])
        self.table.value = shown.to_html(
            index=False, na_rep="", float_format="{:.3g}".format, border=0, justify="left", col_space=76
        )
        # As an output and no widget: that needs no second kind of figure, and a test can read it.
        data = {PLOTLY: json.loads(figure.to_json()), "text/plain": summary(figure)}
        self.plot.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def close(self) -> None:
        """Takes every widget out of the page and out of the kernel's table, their styles and layouts too."""
        self.state.unobserve_all()
        for widget in (*self.children[0].children, *self.children):
            _close(widget)
        self.layout.close()
        super().close()


def _close(widget: ipywidgets.Widget) -> None:
    for part in (widget.layout, getattr(widget, "style", None), widget):
        if part is not None:
            part.close()


def _alert(message: str) -> str:
    if not message:
        return ""
    return f'<pre role="alert" style="color:#B00020;white-space:pre-wrap">{html.escape(message)}</pre>'


_strips: weakref.WeakKeyDictionary[Lab, dict[str, Strip]] = weakref.WeakKeyDictionary()


def lab_strip(lab: Lab, technique: str = "decode", **options: Any) -> Strip:
    """A strip on a lab. A cell that is run again gets a new one; the earlier one is closed, as when the lab goes.

    Args:
        lab: an open lab.
        technique: whose steps are switched: ``decode`` or ``prefill``.
        **options: for ``Strip``.

    Raises:
        ToggleError: for another technique.
    """
    worker, strips = LabWorker(lab, technique), _strips.setdefault(lab, {})
    earlier = strips.pop(technique, None)
    if earlier is not None:
        earlier.close()
    strip = strips[technique] = Strip(worker, **options)
    weakref.finalize(lab, strip.close).atexit = False
    return strip
