"""The doctor: runs a function under a watch and says what would break its capture, at which line, and what helps.

No GPU is needed. The function runs eagerly three times: twice on its inputs, so that a first call and state that
changes show, and once on other values, so that what is baked in shows. If something changes Python state, it runs once
more for the line. If nothing so far would refuse a capture it is recorded, by the recorder of its device, and what that
refuses is told as well. Its writes to outside memory are undone; Python state that it changes stays changed.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_with_path

from cglab.errors import CaptureError, Place
from cglab.graphs.backends import BACKENDS
from cglab.graphs.doctor_compare import baked
from cglab.graphs.doctor_findings import Finding, Report
from cglab.graphs.doctor_stand_ins import Streams, on_cpu
from cglab.graphs.doctor_state import State, lines_that_change, reached, tensors_within
from cglab.graphs.doctor_watch import Run, uncompiled, watched
from cglab.graphs.keys import ShapeKey
from cglab.graphs.places import place_of_line
from cglab.graphs.recorders import recorder_for
from cglab.graphs.selfcheck import Vary, vary_rows
from cglab.graphs.writes import WriteJournal

SEED = 11_235_813
"""Of torch's generators in each run, so that runs differ in nothing but what the doctor changes."""


def doctor(function: Callable[..., Any], /, *args: Any, **inputs: Any) -> Report:
    """Looks for what would break a capture of ``function``, and for what a capture would freeze.

    Args:
        function: runs eagerly, a few times; breaks marked with ``eager_break`` are left alone.
        *args: its positional inputs.
        **inputs: its keyword inputs. Tensors are taken for static slots: their addresses may be relied on.

    Returns:
        The findings, one for each line and kind.

    Raises:
        Exception: whatever the function itself raises on these inputs.

    Example:
        >>> print(doctor(lambda x: x * x.sum().item(), torch.ones(2)).findings[0].kind)
        HostReadError
    """
    return examined(function, args, inputs)


def examined(
    function: Callable[..., Any],
    args: Sequence[Any],
    inputs: Mapping[str, Any],
    *,
    vary: Vary = vary_rows,
    inline_breaks: bool = False,
) -> Report:
    """``doctor`` with what a caller knows about the function.

    Args:
        function: see ``doctor``.
        args: its positional inputs.
        inputs: its keyword inputs.
        vary: writes other valid values into copies of the inputs; they are named as in ``inputs``.
        inline_breaks: look into breaks too, for a capture that records them.
    """
    patient = _Patient(
        function, tuple(args), dict(inputs), _device_of(function, (args, inputs)), inline_breaks
    )
    with torch.random.fork_rng([patient.device] if patient.device.type == "cuda" else []):
        return patient.examine(vary)


@dataclass
class _Patient:
    """A function under examination; ``watch`` is its latest run."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: dict[str, Any]
    device: torch.device
    inline_breaks: bool
    watch: Run = field(default_factory=Run)

    def examine(self, vary: Vary) -> Report:
        notes: list[str] = []
        first, _, _ = self.run()
        state = self.state()
        if not state.whole:
            notes.append("it reaches so many Python objects that not all were looked at for changes")
        _seed(self.device)
        before = state.look()
        second, escaped, written = self.run()
        changed = state.only(state.changed(before))
        third, varied = self.varied(vary, notes)
        found = [*first.findings, *second.findings, *third.findings, *escaped]
        found += baked(first, second, third, varied=varied)
        if changed.entries:
            found += self.mutations(changed)
        if not any(finding.refused for finding in found):
            found += self.recorded(written, len(second.steps))
        return Report(_in_order(found), tuple(notes), len(second.steps))

    def run(
        self, given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> tuple[Run, list[Finding], list[Tensor]]:
        """One run: what was seen, what outlives it, and the memory that it wrote, as bytes."""
        args, inputs = given or (self.args, self.inputs)
        _seed(self.device)
        with torch.no_grad(), WriteJournal().recording() as journal:
            with watched((args, inputs), self.device, inline_breaks=self.inline_breaks) as run:
                self.watch = run
                output = self.function(*args, **inputs)
            written = journal.storages
        if run.survivors(output):
            gc.collect()
        return run, [_escape(run, at) for at in run.survivors(output)], written

    def varied(self, vary: Vary, notes: list[str]) -> tuple[Run, bool]:
        """A run on other values; on the same ones, with a note, where it fails on the others."""
        views: dict[str, Tensor] = {}
        copies: dict[int, Tensor] = {}  # by identity: what is given twice is one tensor in the copies too

        def copied(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = _like(leaf)
            named = len(path) == 2 and path[0].idx == 1
            return views.setdefault(path[1].key if named else str(path), copies[id(leaf)])

        try:
            given = tree_map_with_path(copied, (self.args, self.inputs))
            with torch.no_grad():
                vary(views, torch.Generator().manual_seed(SEED))
            return self.run(given)[0], bool(views)
        except Exception as error:  # noqa: BLE001 - whatever a function raises on values that it does not expect
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            notes.append(f"it fails on other values ({told}), so what depends on values was not compared")
            return self.run()[0], False

    def state(self) -> State:
        """The Python state that it reaches."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return reached([(name, self.function), ("args", self.args), *self.inputs.items()])

    def mutations(self, changed: State) -> list[Finding]:
        """Where Python state changes, and how many operations come before."""
        _seed(self.device)
        fact = "Python state differs after the call"
        return [
            Finding.unseen("MutatedState", name, place, fact, at)
            for name, place, at in lines_that_change(self.run, changed, lambda: len(self.watch.steps))
        ]

    def recorded(self, written: list[Tensor], at: int) -> list[Finding]:
        """What the recorder of the device refuses, if anything: told after the fact, by the user's line."""
        saved = [(whole, whole.clone()) for whole in written]

        def undo() -> None:
            for whole, value in saved:
                whole.copy_(value)

        kind = BACKENDS["full" if self.inline_breaks else "breakable"]
        recorder = recorder_for(self.device)
        pool = recorder.new_pool()
        backend = kind(recorder, pool, inline_breaks=self.inline_breaks)
        # Where it is not needed it is left out: a mode of torch's functions has some modules take another path.
        machine = on_cpu(Streams()) if self.watch.stood_in else nullcontext()
        form = uncompiled() if recorder.name == "tape" else nullcontext()
        try:
            with machine, form, backend.capture_session():
                call = partial(self.function, *self.args, **self.inputs)
                backend.capture_one(ShapeKey(1), call, after_warmup=undo)
        except CaptureError as error:
            return [Finding.of_error(error, error.place or self.beginning(), at)]
        finally:
            undo()
            backend.close()
            pool.close()
        return []

    def beginning(self) -> Place | None:
        """The first line of the function, for what no line of it is to blame for alone."""
        function = getattr(self.function, "forward", self.function)
        code = getattr(inspect.unwrap(function), "__code__", None)
        return place_of_line(code, code.co_firstlineno) if code else None


def _like(tensor: Tensor) -> Tensor:
    """A copy that answers as the tensor does when it is asked what it is."""
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_() if tensor.requires_grad else copy


def _escape(run: Run, at: int) -> Finding:
    step = run.steps[at]
    fact = "a tensor that is made here is alive after the call, and is not returned"
    return Finding.unseen("EscapedTensor", step.operation, step.place, fact, at)


def _in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One for each line and kind; what follows from state that changes in the same line is left out."""
    mutated = {finding.line for finding in findings if finding.kind == "MutatedState"}
    first: dict[Any, Finding] = {}
    for finding in findings:
        if finding.kind != "BakedValue" or finding.line not in mutated:
            first.setdefault((finding.kind, finding.line), finding)
    return tuple(sorted(first.values(), key=lambda finding: finding.at))


def _device_of(function: Callable[..., Any], inputs: Any) -> torch.device:
    """The first GPU among the tensors that it is given or leads to, or the default device."""
    devices = [tensor.device for tensor in tensors_within((inputs, function))] + [torch.get_default_device()]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _seed(device: torch.device) -> None:
    torch.default_generator.manual_seed(SEED)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(SEED)
