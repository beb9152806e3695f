"""The watch: one run of a function under the doctor, with every operation, its line, and what it reads and makes.

What a capture refuses is noted and not raised, so that one run finds it all. On a CPU a function that is written for a
GPU runs all the same: the device ``cuda`` is the CPU then, and streams are stand-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter

from cglab.errors import CaptureError, DynamicShapeError, HostReadError, Place
from cglab.graphs.breaks import Aside, Body, Inline, capturing, staged
from cglab.graphs.capture_state import said_to_capture
from cglab.graphs.doctor_findings import Finding
from cglab.graphs.doctor_parts import PLAIN
from cglab.graphs.doctor_refusals import host_copy, is_default, is_pinning, pinning, unpinned, unregistered
from cglab.graphs.doctor_stand_ins import Streams, names_cuda, on_cpu, unjoined
from cglab.graphs.doctor_state import tensors_within
from cglab.graphs.places import place_of_stack
from cglab.graphs.refusals import HostReadWatch, refusal
from cglab.graphs.streams import StreamWatch, install
from cglab.graphs.writes import POINTING

_SHOWN = (*PLAIN, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a run.

    Attributes:
        operation: the overload, such as ``aten.add.Tensor``.
        place: the user's line.
        values: its arguments in order: of tensors dtype and shape, of anything else its content.
        outside: addresses of the memory that it reads, that is no input and that no operation of this run made.
    """

    operation: str
    place: Place | None
    values: tuple[str, ...]
    outside: tuple[int, ...]


@dataclass(slots=True)
class Made:
    """Memory that an operation of the run made.

    Attributes:
        storage: tells whether it is still alive.
        at: index of the operation; -1 if none made it.
    """

    storage: StorageWeakRef
    at: int


@dataclass
class Run:
    """What one run did.

    Attributes:
        inputs: addresses of the memory that the function is given.
        steps: its operations in order, those of breaks left out.
        findings: what a capture would refuse, in order, once for each kind and line.
        until: how many operations came before the host first learned something of the device: what comes later may
            follow from that.
        held: outside memory that was read, by address; kept, so that no other memory gets the address meanwhile.
        made: memory that came into being, by address.
        stood_in: whether it asked for CUDA on a machine without.
        drawn: the state that generators of the user's had before they were drawn from.
    """

    inputs: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    until: int | None = None
    held: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    stood_in: bool = False
    drawn: dict[torch.Generator, Tensor] = field(default_factory=dict)

    def tell(self, error: CaptureError, place: Place | None) -> None:
        """Notes what a capture refuses; one line often shows twice, by its Python name and its operator."""
        finding = Finding.of_error(error, place, len(self.steps))
        if isinstance(error, HostReadError | DynamicShapeError) and self.until is None:
            self.until = len(self.steps)
        if all((finding.kind, finding.line) != (each.kind, each.line) for each in self.findings):
            self.findings.append(finding)

    def own(self, results: Any, at: int = -1) -> None:
        """Memory that these tensors show is made within the run, by operation ``at`` or none, unless it is known."""
        for leaf in tree_iter(results):
            if _has_memory(leaf):
                storage = leaf.untyped_storage()
                address = storage.data_ptr()
                known = self.made.get(address)
                if address not in self.inputs | self.held.keys() and (
                    known is None or known.storage.expired()
                ):
                    self.made[address] = Made(StorageWeakRef(storage), at)

    def outside(self, arguments: Any) -> tuple[int, ...]:
        """Addresses of outside memory among the arguments, held from now on."""
        found = []
        for leaf in filter(_has_memory, tree_iter(arguments)):
            address = leaf.untyped_storage().data_ptr()
            made = self.made.get(address)
            if address not in self.inputs and (made is None or made.storage.expired()):
                self.held.setdefault(address, leaf.detach())
                found.append(address)
        return tuple(found)

    def survivors(self, output: Any) -> list[int]:
        """Indices of operations whose results are alive though the run is over and they are not in its output."""
        returned = {leaf.untyped_storage().data_ptr() for leaf in filter(_has_memory, tensors_within(output))}
        alive = {
            made.at
            for address, made in self.made.items()
            if address not in returned and made.at >= 0 and not made.storage.expired()
        }
        return sorted(alive)


@contextmanager
def watched(inputs: Any, device: torch.device, *, inline_breaks: bool = False) -> Iterator[Run]:
    """Watches what runs inside.

    Args:
        inputs: what the function is given; their memory is static.
        device: what the function computes on; host tensors of one that computes on a GPU are its own affair.
        inline_breaks: look into breaks too, as a ``full`` capture that has them recorded.
    """
    run = Run({leaf.untyped_storage().data_ptr() for leaf in filter(_has_memory, tree_iter(inputs))})
    stage = Inline() if inline_breaks else _Break(run)
    real = device.type == "cuda"
    with (
        _real_streams(run, device) if real else _modelled_streams(run) as streams,
        staged(stage),
        said_to_capture(),
        uncompiled(),
        _Operations(run, device, streams),
        _Calls(run, pretend=not real),
    ):
        try:
            yield run
        finally:
            for generator, state in run.drawn.items():
                generator.set_state(state)


def uncompiled() -> AbstractContextManager[Any]:
    """Within, compiled functions run as they are written: the compiler knows nothing of modes that watch."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load the compiler takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _modelled_streams(run: Run) -> Iterator[Streams]:
    streams = Streams(run.tell)
    with on_cpu(streams):
        yield streams
    run.stood_in = streams.used
    streams.end()


class _Forks(StreamWatch):
    """Streams that are forked and never joined; one that is not forked is for the recording to find."""

    def entered(self, stream: torch.cuda.Stream) -> None:
        """Nothing: it may be forked by an event, which nobody sees."""


@contextmanager
def _real_streams(run: Run, device: torch.device) -> Iterator[None]:
    install()
    watch = _Forks(torch.cuda.current_stream(device))
    with watch.watching():
        yield
    for _, place in watch._open.values():
        run.tell(unjoined(), place)


class _Break(Aside):
    """What a break returns belongs to the recording, wherever the break has it from."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().reach(body, args, kwargs)
        self._run.own(output)
        return output


class _Operations(TorchDispatchMode):
    def __init__(self, run: Run, device: torch.device, streams: Streams | None) -> None:
        super().__init__()
        self._run, self._device, self._streams = run, device, streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not capturing():
            return func(*args, **kwargs)
        place = place_of_stack(sys._getframe())
        if self._streams is not None:
            self._streams.work()
        for error in self._refusals(func, args, kwargs):
            self._run.tell(error, place)
        if func._schema.name == "aten::lift_fresh":
            self._run.own(args)
        leaves, _ = tree_flatten((args, kwargs))
        values = tuple(map(_told, leaves))
        self._run.steps.append(Step(str(func), place, values, self._run.outside(leaves)))
        result = func(*args, **kwargs)
        if func._schema.name == POINTING:
            self._run.outside((result,))
        else:
            self._run.own(result, len(self._run.steps) - 1)
        return result

    def _refusals(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[CaptureError]:
        leaves = list(tree_iter((args, kwargs)))
        if self._device.type == "cpu" or any(map(_of_gpu, leaves)):
            error = refusal(func, args, kwargs) or host_copy(func, args, kwargs)
            if error is not None:
                yield error
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and not is_default(leaf):
                self._run.drawn.setdefault(leaf, leaf.get_state())
                yield unregistered(func._schema.name)


class _Calls(HostReadWatch):
    """Sees calls by their Python name: reads of an address, and what names the device."""

    def __init__(self, run: Run, *, pretend: bool) -> None:
        super().__init__(lambda error: run.tell(error, place_of_stack(sys._getframe())))
        self._run, self._pretend = run, pretend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if capturing() and is_pinning(func):
            self._run.tell(pinning(), place_of_stack(sys._getframe()))
        if not self._pretend and not (tensor is not None and tensor.is_cuda):
            return func(*args, **kwargs)  # on the host alone
        if capturing() and func is Tensor.data_ptr:
            self._address_read(sys._getframe(1).f_code.co_filename)
        moved = self._pretend and tensor is not None and names_cuda(func, args, kwargs)
        if capturing() and moved and self._run.outside((tensor,)):
            self._run.tell(unpinned(), place_of_stack(sys._getframe()))
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.from_numpy, torch.frombuffer):
            self._run.own(result)
        return result

    def _address_read(self, caller: str) -> None:
        # Whoever launches a kernel of its own reads addresses for that, and that launch is recorded.
        if "site-packages" not in caller:
            place = place_of_stack(sys._getframe())
            fact = "the address of a tensor is read"
            finding = Finding.unseen("BakedAddress", "Tensor.data_ptr", place, fact, len(self._run.steps))
            if finding.line not in {each.line for each in self._run.findings if each.kind == finding.kind}:
                self._run.findings.append(finding)


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def _of_gpu(value: object) -> bool:
    """Whether it is a tensor on a GPU, or names one."""
    device = value.device if isinstance(value, Tensor) else value
    return isinstance(device, torch.device) and device.type == "cuda"


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    # A handle, such as a profiler's, is another object at every call, and shows nothing but its address.
    return repr(value) if isinstance(value, _SHOWN) else f"a {type(value).__name__}"
