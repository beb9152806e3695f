"""What the workspace knows: what is asked for, what is the case, what is under way, what came of it.

``Workspace`` knows no widget, and touches no device: its methods queue jobs, and only the worker's thread calls the
:class:`Bench` that it works on. A view observes its traits, from whichever thread they are set. Whatever a job raises
is kept as a message, by place, until that place succeeds (N05), and a toggle that failed goes back to what is the case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import traitlets

from cglab.errors import ClosedError, ToggleError, no_such
from cglab.lab.techniques import technique
from cglab.ui.sections import Results
from cglab.ui.worker import StoppedError, Watch, Worker

RUN, SOURCE = "run", "source"
"""Places of errors that are no toggle's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run.

    Attributes:
        batch: requests of a step, and in flight under load.
        prompt: tokens of each prompt: the context of a step that makes requests longer, the size of a prefill step.
        new: tokens that each request of a load asks for.
    """

    batch: int
    prompt: int
    new: int


class Bench(Protocol):
    """What toggles act on and runs are made with: a lab, or recorded results. Called by the worker's thread alone."""

    title: str
    default: Workload
    largest: Workload

    def modes(self) -> dict[str, str]:
        """The mode of each toggle as it is now."""
        ...

    def unavailable(self) -> dict[str, str]:
        """Why a toggle cannot be used here, by its name."""
        ...

    def choose(self, name: str, mode: str, workload: Workload) -> None:
        """Makes steps run in a mode, captured and ready for the workload; raises where it cannot."""
        ...

    def run(self, name: str, modes: Mapping[str, str], workload: Workload, watch: Watch) -> Results:
        """Compares what a toggle asks for with eager, everything else as it is."""
        ...


Sources = Mapping[str, Callable[[], Bench]]
"""What opens a bench, by the name that it is chosen by; called by the worker's thread."""


class Workspace(traitlets.HasTraits):
    """The state of the workspace.

    Attributes:
        source: the bench in use, by its name.
        title: what it is.
        requested, actual: the mode of each toggle, as chosen and as it is.
        unavailable: why a toggle cannot be used, by its name.
        technique: the toggle that a run compares.
        batch, prompt, new: see ``Workload``.
        largest: the most that these can be.
        doing: what is under way; empty when nothing is.
        progress: share of it that is done, 0 to 1.
        running: a run is queued or under way.
        errors: messages by place: a toggle, ``run`` or ``source``.
        results: of the last run.
    """

    source = traitlets.Unicode()
    title = traitlets.Unicode()
    requested = traitlets.Dict()
    actual = traitlets.Dict()
    unavailable = traitlets.Dict()
    technique = traitlets.Unicode()
    batch = traitlets.Int(1, min=1)
    prompt = traitlets.Int(2, min=2)
    new = traitlets.Int(1, min=1)
    largest = traitlets.Instance(Workload, allow_none=True)
    doing = traitlets.Unicode()
    progress = traitlets.Float(0.0)
    running = traitlets.Bool(default_value=False)
    errors = traitlets.Dict()
    results = traitlets.Instance(Results, allow_none=True)

    def __init__(
        self, sources: Sources, *, toggles: tuple[str, ...], device: torch.device | str = "cpu"
    ) -> None:
        """Opens the first source.

        Args:
            sources: at least one.
            toggles: that are shown, each of them a technique.
            device: that the worker works on.
        """
        super().__init__()
        self.sources, self.toggles = sources, tuple(technique(name).name for name in toggles)
        self.worker, self.lock = Worker(device), threading.RLock()
        self._bench: Bench | None = None
        self._watch: Watch | None = None
        self.open(next(iter(sources)))

    @property
    def workload(self) -> Workload:
        """What is asked for."""
        return Workload(self.batch, self.prompt, self.new)

    def open(self, source: str) -> None:
        """Asks for another bench.

        Raises:
            ToggleError: for one that there is not.
        """
        if source not in self.sources:
            raise ToggleError(no_such("source", source, self.sources))
        self._submit(SOURCE, f"opening {source}", lambda _: self._opened(source))

    def choose(self, name: str, mode: str) -> None:
        """Asks for a mode of a toggle; the latest one that is asked for counts.

        Raises:
            ToggleError: for a toggle that is not shown, or a value that it does not have.
        """
        if name not in self.toggles:
            raise ToggleError(no_such("toggle here", name, self.toggles))
        if mode == self.requested.get(name):  # a view that follows what is the case
            return
        technique(name).check(mode)
        with self.lock:
            self.requested = {**self.requested, name: mode}
            if why := self.unavailable.get(name):
                self.failed(name, why)
                self._put_back(name, mode)
                return
        self._submit(name, f"{name}: {mode}", lambda _: self._chosen(name))

    def run(self) -> None:
        """Asks for a run; one that is asked for while another is under way is none."""
        with self.lock:
            if self.running:
                return
            self.running = True
        try:
            self._watch = self._submit(RUN, "waiting", self._ran)
        except ClosedError:
            self.running = False
            raise

    def stop(self) -> None:
        """Ends a run between two of its parts."""
        if self.running and self._watch is not None:
            self.doing = "stopping ..."
            self._watch.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until nothing is under way, for cells that read what came of it; whether that came in time."""
        return self.worker.wait(seconds)

    def close(self) -> None:
        """Stops what is under way and lets go of everything."""
        self.unobserve_all()
        self.worker.close()
        self._bench = None

    def _submit(self, place: str, doing: str, job: Callable[[Watch], None]) -> Watch:
        def guarded(watch: Watch) -> None:
            with self._reported(place):
                watch(doing, 0.0)
                job(watch)

        return self.worker.submit(guarded, self._tell)

    def _tell(self, what: str, share: float) -> None:
        with self.lock:
            self.doing, self.progress = what, share

    @contextmanager
    def _reported(self, place: str) -> Any:
        """What a job raises becomes a message of its place; its success takes the message away."""
        try:
            yield
        except StoppedError:
            self.failed(place, "stopped")
        except Exception as error:  # noqa: BLE001 - any error is the user's to read
            self.failed(place, f"{type(error).__name__}: {error}")
        else:
            with self.lock:
                self.errors = {name: each for name, each in self.errors.items() if name != place}
        finally:
            with self.lock:
                self.running = self.running and place != RUN
                self.doing, self.progress = "", 0.0

    def failed(self, place: str, message: str) -> None:
        """Keeps a message, until its place succeeds."""
        with self.lock:
            self.errors = {**self.errors, place: message}

    def _opened(self, source: str) -> None:
        self._bench = bench = self.sources[source]()
        modes, reasons = bench.modes(), bench.unavailable()
        with self.lock, self.hold_trait_notifications():
            self.source, self.title, self.largest = source, bench.title, bench.largest
            self.unavailable = {name: reasons[name] for name in self.toggles if name in reasons}
            self.actual = self.requested = {name: modes[name] for name in self.toggles if name in modes}
            usable = [name for name in self.toggles if name not in self.unavailable]
            if self.technique not in usable:
                self.technique = next(iter(usable), "")
            self.batch, self.prompt, self.new = bench.default.batch, bench.default.prompt, bench.default.new
            self.results, self.errors = None, {}

    def _chosen(self, name: str) -> None:
        with self.lock:
            mode = self.requested.get(name)
        if self._bench is None or mode is None or mode == self.actual.get(name):
            return  # a later job of the same toggle did it
        try:
            self._bench.choose(name, mode, self.workload)
        except BaseException:
            self._put_back(name, mode)
            raise
        with self.lock:
            self.actual = {**self.actual, name: mode}

    def _put_back(self, name: str, mode: str) -> None:
        """A toggle shows what is the case again, unless something else was asked for meanwhile."""
        with self.lock:
            if self.requested.get(name) == mode:
                self.requested = {n: m for n, m in self.requested.items() if n != name} | {
                    n: m for n, m in self.actual.items() if n == name
                }

    def _ran(self, watch: Watch) -> None:
        if self._bench is None:
            raise ToggleError("there is nothing to run; choose a source first")
        self.results = self._bench.run(self.technique, dict(self.actual), self.workload, watch)
