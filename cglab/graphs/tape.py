"""The tape: records on a CPU, under the rules of a stream capture.

A dispatch mode sees every aten operation that the function runs, with the memory it touches. Results go into
blocks of a pool and the model is handed those very tensors, so what it holds is what a replay writes. Replaying
runs the operations over the same memory and none of the model's Python. It is for truth and tests, not speed.

What must stay static: addresses of everything that is not made inside. What it cannot do: see numpy views, Python
lists, ``.data =`` or other threads; the self-check at the end of a capture is there for those.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from cglab.errors import (
    CaptureError,
    CaptureMemoryError,
    InputError,
    NewInputError,
    UnsupportedOperationError,
)
from cglab.graphs import faults
from cglab.graphs.capture_state import said_to_capture
from cglab.graphs.graph_nodes import GraphNode
from cglab.graphs.out_forms import OutForm, out_form
from cglab.graphs.places import place_of_error, place_of_stack
from cglab.graphs.recorder import Pool, Result, Segment, TakeSeconds, explained
from cglab.graphs.refusals import HostReadWatch, refusal
from cglab.graphs.tape_nodes import nodes_of_tape
from cglab.graphs.tape_pool import TapePool
from cglab.graphs.writes import NESTED, POINTING, WriteJournal, tensors_of, written_tensors


@dataclass(slots=True)
class Node:
    """One recorded operation.

    Attributes:
        func: the operator overload.
        args, kwargs: its arguments; tensors are aliases that own no pool block.
        targets: aliases of the results that it makes, empty for one that works in place.
        out: its checked ``out=`` form, or None where the result is copied.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: list[Tensor]
    out: OutForm | None = None

    @property
    def name(self) -> str:
        """Of the operator; ``(copied)`` where no ``out=`` form could be used."""
        copied = self.out is None and self.targets
        return f"{self.func._schema.name} (copied)" if copied else str(self.func._schema.name)

    def run(self) -> None:
        """Runs the operation again, into the same memory."""
        if self.out is not None:
            self.out.call(self.args, self.kwargs, self.targets)
            return
        result = self.func(*self.args, **self.kwargs)
        if self.targets:
            fresh = [leaf for leaf in tensors_of(result) if leaf.numel()]
            for target, value in zip(self.targets, fresh, strict=True):
                target.copy_(value)


class TapeSegment:
    """A list of nodes, and the external tensors they read, held so that nobody frees them (P31, B22)."""

    def __init__(self, nodes: list[Node], pool: TapePool) -> None:
        self._nodes = nodes
        self._pool: TapePool | None = pool

    @property
    def nodes(self) -> int:
        """Number of operations."""
        return len(self._nodes)

    def replay(self) -> None:
        """Runs every operation in order, under the grad mode of the capture."""
        with torch.no_grad():
            for node in self._nodes:
                node.run()

    def operations(self) -> list[str]:
        """Operator names in order."""
        return [node.name for node in self._nodes]

    def graph(self) -> list[GraphNode]:
        """See ``nodes_of_tape``."""
        return nodes_of_tape(self._nodes)

    def close(self) -> None:
        """Drops nodes and pool."""
        self._nodes, self._pool = [], None


class TapeTake(TorchDispatchMode):
    """A recording under way; see ``recorder.Take``."""

    def __init__(self, pool: TapePool) -> None:
        super().__init__()
        self.pool = pool
        self.seconds = TakeSeconds()
        self.journal = WriteJournal(skip=lambda tensor: pool.chunk_of(tensor) is not None)
        self.notes: Counter[str] = Counter()
        self._nodes: list[Node] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation, records it, and returns tensors that live in the pool."""
        kwargs = kwargs or {}
        if self._nodes is None:  # inside a break: it runs, and is undone like all the rest
            return self.journal.run(func, args, kwargs)
        faults.reach(func._schema.name)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        error = refusal(func, args, kwargs) or _odd_tensor(func, *args, *kwargs.values())
        if error is not None:
            raise error.at(place_of_stack(sys._getframe()))
        with _disable_current_modes(), torch.no_grad():
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "aten::lift_fresh":
            self.notes["a Python number was baked in as a tensor"] += 1
        written = written_tensors(func, args, kwargs)
        self.journal.before(written)
        owned = {leaf.untyped_storage()._cdata for leaf in tensors_of(*args, *kwargs.values())}
        result = func(*args, **kwargs)
        error = _odd_tensor(func, result)
        if error is not None:
            raise error.at(place_of_stack(sys._getframe()))
        leaves, structure = tree_flatten(result)
        fresh = [] if func._schema.name == POINTING else [
            i for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.numel() and leaf.untyped_storage()._cdata not in owned
        ]  # fmt: skip
        blocks = []
        for i in fresh:
            block = self.pool.empty_strided(leaves[i].shape, leaves[i].stride(), leaves[i].dtype)
            blocks.append(block.copy_(leaves[i]))
        mutates = func._schema.is_mutable or bool(written)
        if (fresh or mutates) and not _leaves_memory_unset(func):
            frozen = {name: self._frozen(value) for name, value in kwargs.items()}
            node = Node(func, self._frozen(args), frozen, [self.alias(block) for block in blocks])
            if fresh and not mutates and len(fresh) == len(leaves):
                node.out = out_form(func, node.args, node.kwargs, node.targets, blocks)
            self._recorded().append(node)
        for i, block in zip(fresh, blocks, strict=True):
            leaves[i] = block
        return tree_unflatten(leaves, structure)

    def alias(self, tensor: Tensor) -> Tensor:
        """Pool memory without its block; a plain handle on anything else, unmoved by a later ``.data =``."""
        if not tensor.numel():
            return tensor
        with _disable_current_modes(), torch.no_grad():
            chunk = self.pool.chunk_of(tensor)
            return tensor.detach() if chunk is None else chunk.alias(tensor)

    def _frozen(self, value: Any) -> Any:
        """An argument with aliases for its tensors."""
        if isinstance(value, NESTED):
            return type(value)(map(self._frozen, value))
        return self.alias(value) if isinstance(value, Tensor) else value

    def _recorded(self) -> list[Node]:
        if self._nodes is None:
            raise CaptureError("no segment is being recorded")
        return self._nodes

    def cut(self) -> TapeSegment:
        """Ends the running segment."""
        nodes, self._nodes = self._recorded(), None
        return TapeSegment(nodes, self.pool)

    def settle(self, segment: Segment) -> None:
        """Nothing to do: the tape executes while it records."""

    def resume(self) -> None:
        """Starts the next segment."""
        self._nodes = []

    @staticmethod
    def guard() -> AbstractContextManager[None]:
        """Breaks on a CPU leave nothing running."""
        return nullcontext()


class TapeRecorder:
    """Records on the CPU."""

    name = "tape"
    device = torch.device("cpu")

    def new_pool(self) -> TapePool:
        """An empty pool."""
        return TapePool()

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Runs the function eagerly, refuses host reads that the recording itself cannot see, undoes its writes."""

        def refuse(error: CaptureError) -> None:
            raise error.at(place_of_stack(sys._getframe()))

        with (
            explained(explain),
            torch.no_grad(),
            WriteJournal().recording(),
            HostReadWatch(refuse),
            said_to_capture(),
        ):
            return function()

    @contextmanager
    def take(self, pool: Pool) -> Iterator[TapeTake]:
        """Records what runs inside, and undoes its outside writes at the end: a capture does not execute."""
        if not isinstance(pool, TapePool):
            raise InputError(f"the tape needs a pool of its own kind, not a {type(pool).__name__}")
        take = TapeTake(pool)
        try:
            with explained(explain), torch.no_grad(), said_to_capture(), take:
                yield take
        except BaseException:
            take._nodes = []
            raise
        finally:
            take.journal.restore()

    def shape_of(self, function: Callable[[], Result]) -> Result:
        """One run, its writes undone."""
        with explained(explain), torch.no_grad(), WriteJournal().recording():
            return function()

    def footprint(self) -> int:
        """Nothing outside the pool is counted on a CPU."""
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for."""


def explain(error: BaseException) -> BaseException:
    """The ``CaptureError`` for whatever stopped a recording; frames let go of what they held (N01)."""
    if isinstance(error, CaptureError) or not isinstance(error, Exception):
        return error
    place = place_of_error(error)
    traceback.clear_frames(error.__traceback__)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return CaptureMemoryError(
            f"memory ran out during the capture: {text}",
            place=place,
            advice="capture fewer or smaller buckets",
        )
    return CaptureError(f"the function raised while it was captured: {text}", place=place)


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)) and func._can_decompose()


def _leaves_memory_unset(func: Any) -> bool:
    return func._schema.name in ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                                 "aten::new_empty_strided", "aten::empty_permuted")  # fmt: skip


def _odd_tensor(func: Any, *values: Any) -> CaptureError | None:
    for leaf in tensors_of(*values):
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout)
            return UnsupportedOperationError(
                f"a {kind} tensor has no fixed memory to record",
                operation=func._schema.name,
                advice="convert it to a dense tensor before the capture, or switch off what makes it, such as "
                "enable_nested_tensor of a TransformerEncoder",
            )
        if leaf.device.type not in ("cpu", "meta"):
            return NewInputError(
                f"a tensor on {leaf.device} reached a recording on the cpu",
                operation=func._schema.name,
                advice="move it before the capture",
            )
    return None
