"""``cglab.capture``: any function of tensors, captured at a few sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from cglab.errors import BucketError, SlotError, ToggleError, no_such
from cglab.graphs.address import AddressContract, Getter, InputWatch, closed_over
from cglab.graphs.backends import check_backend
from cglab.graphs.breaks import Aside, staged
from cglab.graphs.buckets import checked_sizes
from cglab.graphs.captured import Captured
from cglab.graphs.constants import ambient, snapshot
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.recorded_graph import RecordedGraph
from cglab.graphs.slots import Slot
from cglab.graphs.writes import WriteJournal


class CapturedFunction:
    """A function with its recordings; see ``capture``. Call it like the function, with keyword arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        slots: Mapping[str, Slot],
        buckets: Sequence[int],
        options: Options,
        watch: Mapping[str, nn.Module | Tensor | Getter],
    ) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._function = function
        self._slots = dict(slots)
        self._buckets = list(buckets)
        self._options = options
        self._watch = dict(watch)
        self._captured: Captured | None = None
        self._constants: dict[str, Any] = {}
        self._baked: dict[str, Any] = {}
        self._told: dict[str, str] = {}
        self._held: list[Tensor] = []
        self._misses = Coverage()

    def __call__(self, *unnamed: Any, **inputs: Any) -> Any:
        """One step. The first call captures every bucket.

        Raises:
            SlotError: for an input without a name, or one that fits no slot, by name.
        """
        if unnamed:
            raise SlotError(
                f"inputs are given by name: {self.name}({', '.join(f'{n}=...' for n in self._slots)})"
            )
        values, constants = self._sort(inputs)
        captured = self._captured or self.warm(**inputs)
        given = constants | ambient(captured.device)
        now = _snapshots(given)
        if now == self._baked:
            return captured(**values)
        miss = Miss(Reason.BACKEND_EAGER)
        if captured.options.backend != "eager":
            name = min(n for n in now.keys() | self._baked.keys() if now.get(n) != self._baked.get(n))
            told = repr(given[name]) if name in given else "not given"
            miss = Miss(
                Reason.CONSTANT, f"{name!r} was captured as {self._told.get(name, 'not given')}, now {told}"
            )
        return captured.run_eager(miss, values, captured.live_size(values), self._bound(constants))

    def warm(self, **inputs: Any) -> Captured:
        """Captures every bucket now, from example inputs.

        Raises:
            CaptureError: if ``strict`` is set and a bucket cannot be captured.
        """
        values, constants = self._sort(inputs)
        resolved = {
            name: slot
            if slot.optional and values.get(name) is None and slot.shape is None
            else slot.resolve(name, values.get(name))
            for name, slot in self._slots.items()
        }
        absent = [name for name, slot in resolved.items() if values.get(name) is None]
        # An absent optional slot of unknown shape needs no buffer: it stays None in every recording.
        nothing = Slot(shape=(1,), dtype=torch.uint8, axis=None, optional=True)
        resolved = {name: nothing if slot.shape is None else slot for name, slot in resolved.items()}
        device = next(
            (v.device for v in values.values() if v is not None and v.device.type != "cpu"),
            torch.device("cpu"),
        )
        baked = constants | ambient(device)
        self._constants, self._baked = constants, _snapshots(baked)
        self._told = {name: repr(value) for name, value in baked.items()}
        modules = {name: value for name, value in constants.items() if isinstance(value, nn.Module)}
        contract = AddressContract({**closed_over(self._function), **modules, **self._watch})
        captured = Captured(
            self.name,
            self._bound(constants),
            resolved,
            self._buckets,
            device,
            self._options,
            contract=contract,
        )
        rows = {n: v for n, v in values.items() if v is not None}

        def example(views: dict[str, Tensor]) -> None:
            for name, view in views.items():
                _tile(view, rows.get(name), resolved[name].axis)
            if not self._held:
                self._hold_inputs(views)

        self._held = []
        try:
            captured.capture(example, absent=absent)
        except BaseException:  # refused or interrupted half-way: the next call starts anew
            captured.close()
            raise
        self._captured = captured
        return captured

    def _bound(self, constants: dict[str, Any]) -> Callable[..., Any]:
        return lambda **tensors: self._function(**tensors, **constants)

    def _hold_inputs(self, views: dict[str, Tensor]) -> None:
        """Keeps every outside tensor that the function reads alive, watched by name or not (B22)."""
        watch = InputWatch()
        missing = {n: None for n in self._slots if n not in views}
        try:
            with torch.no_grad(), WriteJournal().recording(), staged(Aside()), watch:
                self._function(**views, **missing, **self._constants)
        except Exception:  # noqa: BLE001 - the capture itself will meet the error and explain it
            return
        self._held = list(watch.outside.values())

    def _sort(self, inputs: dict[str, Any]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        values: dict[str, Tensor | None] = {}
        constants: dict[str, Any] = {}
        for name, value in inputs.items():
            if name in self._slots:
                values[name] = value
            elif isinstance(value, Tensor):
                raise SlotError(
                    f"{name!r} is a tensor but no slot of {self.name}: its address would be baked in. "
                    f"Add it to slots (now {sorted(self._slots)}), or close over it if it never moves"
                )
            else:
                constants[name] = value
        return values, constants

    def coverage(self) -> Coverage:
        """Steps captured and eager, with reasons; zero before the first call."""
        return self._captured.counts if self._captured else self._misses

    def memory(self) -> list[dict[str, Any]]:
        """Milliseconds and bytes of each captured bucket."""
        return self._captured.memory() if self._captured else []

    def inspect(self, size: int) -> RecordedGraph:
        """What was recorded for a bucket: lines in order, a table, a picture; nothing before the first call.

        Raises:
            BucketError: for a size that was not recorded.
        """
        return self._captured.inspect(size) if self._captured else RecordedGraph(self.name, (), ())

    @property
    def failures(self) -> dict[str, str]:
        """Why buckets could not be captured, by bucket."""
        return {str(k): text for k, text in self._captured.failures.items()} if self._captured else {}

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes with a recording."""
        return self._captured.captured_sizes if self._captured else []

    @property
    def unused_sizes(self) -> list[int]:
        """Buckets that no call has used."""
        return self._captured.unused_sizes if self._captured else list(self._buckets)

    def close(self) -> None:
        """Gives everything back."""
        if self._captured is not None:
            self._captured.close()
        self._held = []

    def __repr__(self) -> str:
        sizes = self.captured_sizes or f"{self._buckets}, not captured yet"
        return f"CapturedFunction({self.name}, {self._options.backend}, sizes {sizes}; {self.coverage()})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _snapshots(constants: Mapping[str, Any]) -> dict[str, Any]:
    return {name: snapshot(name, value) for name, value in constants.items()}


@torch.no_grad()  # an example with a gradient would tie the buffers to its graph
def _tile(view: Tensor, example: Tensor | None, axis: int | None) -> None:
    """Fills ``view`` with the example's rows, over and over, so that a capture sees valid values."""
    if example is None or not example.numel():
        return
    if axis is not None:
        index = torch.arange(view.shape[axis], device=example.device) % example.shape[axis]
        example = example.index_select(axis, index)
    for other, n in enumerate(example.shape):  # a ragged example fills its part
        view = view.narrow(other, 0, min(n, view.shape[other]))
        example = example.narrow(other, 0, view.shape[other])
    view.copy_(example)


def capture(
    function: Callable[..., Any],
    *,
    slots: Mapping[str, Slot],
    buckets: Sequence[int],
    backend: str = "full",
    watch: Mapping[str, nn.Module | Tensor | Getter] | None = None,
    **options: Any,
) -> CapturedFunction:
    """Captures a function of tensors at a few sizes; nothing is recorded before the first call.

    A replay works on static copies of its inputs: a function that changes an input in place changes the copy, and
    the caller's tensor stays as it is.

    Args:
        function: the step. Called with keyword arguments: the slots' tensors, and plain Python values, which are
            baked in.
        slots: the inputs that change from call to call.
        buckets: sizes to capture; a smaller batch is padded up.
        backend: ``full`` (one recording), ``breakable`` (eager breaks allowed) or ``eager``.
        watch: modules, tensors or getters whose memory must not move; what the function closes over is found.
        **options: fields of ``cglab.graphs.options.Options``.

    Returns:
        A callable whose results are views that the next call overwrites.

    Raises:
        ToggleError: for an unknown backend or option.
        BucketError: for an empty or odd list of buckets.
        SlotError: for a slot that is no parameter of the function, or no Slot.

    Example:
        >>> f = capture(lambda x: x.relu(), slots={"x": Slot(pad=0.0)}, buckets=(1, 2, 4))
    """
    check_backend(backend)
    known = [field.name for field in fields(Options) if field.name != "backend"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ToggleError(no_such("option of a capture", unknown[0], known))
    if not isinstance(buckets, Iterable):
        raise BucketError(f"buckets is {buckets!r}; give the sizes to capture, such as (1, 2, 4)")
    sizes = checked_sizes(buckets)
    odd = [name for name, slot in slots.items() if not isinstance(slot, Slot)]
    if odd:
        raise SlotError(f"slots[{odd[0]!r}] is {slots[odd[0]]!r}; declare it, such as Slot(pad=0.0)")
    parameters = inspect.signature(
        function.forward if isinstance(function, nn.Module) else function
    ).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    strange = [name for name in slots if name not in parameters]
    if strange and not open_ended:
        raise SlotError(f"slot {strange[0]!r} is no parameter of the function; it takes {list(parameters)}")
    return CapturedFunction(function, slots, sizes, Options(backend=backend, **options), watch or {})
