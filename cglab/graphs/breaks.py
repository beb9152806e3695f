"""Breaks: functions that run eagerly between two segments, with fresh data, at every replay.

What is frozen at capture is *where* the arguments live. So a break takes static buffers or intermediates of the
recording, fetches anything that changes from live state inside its body, and best of all writes into an output
that was allocated before it (P50). A tensor that it returns is owned by the recording and copied into at every
replay, because the next segment reads that very memory (P51).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from cglab.errors import BreakRefusedError, CaptureError, OutputStructureError
from cglab.graphs.places import place_of_stack
from cglab.graphs.recorder import Segment, Take

Body = Callable[..., Any]


class Stage(Protocol):
    """What a break meets when it is called: how the surrounding capture treats it."""

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles one call of a break and returns its result."""
        ...


_stage: ContextVar[Stage | None] = ContextVar("cglab_stage", default=None)


def capturing() -> bool:
    """Whether the caller runs inside a warm-up or a capture."""
    return _stage.get() is not None


@contextmanager
def staged(stage: Stage | None) -> Iterator[None]:
    """Makes ``stage`` handle the breaks within; the stage before it is put back on any exit (P58).

    Raises:
        CaptureError: if a capture is started inside another one.
    """
    if stage is not None and _stage.get() is not None:
        raise CaptureError(
            "a capture was started inside another capture",
            place=place_of_stack(sys._getframe()),
            advice="capture the inner function before, or call it plain: it is then recorded inline",
        )
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


class EagerBreak:
    """A function marked as a break; see ``eager_break``."""

    def __init__(self, body: Body) -> None:
        self.body = body
        functools.update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the body; inside a capture, the way the capture handles breaks."""
        stage = _stage.get()
        return self.body(*args, **kwargs) if stage is None else stage.reach(self.body, args, kwargs)

    def run_eager(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the body without ending a segment: for use inside a region that is eager already."""
        return self.body(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a method, so that breaks can be declared in a class."""
        return self if instance is None else functools.partial(self, instance)


def eager_break(function: Body) -> EagerBreak:
    """Marks ``function`` as a break: in a breakable capture the segment ends, it runs, the next one starts.

    Outside of a capture it is simply called. Tensor arguments keep the address they had at capture; live values
    are read inside the body. A returned tensor is copied into the recording's own at every replay.

    Example:
        >>> @eager_break
        ... def sample(logits, out):
        ...     out.copy_(logits.argmax(-1))
    """
    return EagerBreak(function)


class Inline:
    """Breaks are recorded like any other function: the caller vouches that nothing in them must stay live."""

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the body in place."""
        return body(*args, **kwargs)


class Aside:
    """Breaks are plain calls, eager as at replay: the warm-up of a breakable capture."""

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the body outside of the capture's rules."""
        with staged_aside():
            return body(*args, **kwargs)


class Refuse:
    """Breaks are refused: a ``full`` recording has nowhere to put them."""

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises, naming the break."""
        name = getattr(body, "__qualname__", repr(body))
        raise BreakRefusedError(
            f"the break {name!r} was reached inside a full capture, where it would run once and never again",
            place=place_of_stack(sys._getframe()),
            advice="use backend='breakable', or inline_breaks=True if its work may be recorded as it stands",
        )


class Split:
    """Breaks end the running segment, run, and start the next one: the breakable capture.

    Attributes:
        steps: segments and break calls in the order of replay.
    """

    def __init__(self, take: Take) -> None:
        self.take = take
        self.steps: list[Segment | BreakCall] = []

    def reach(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts the take around one run of the body and keeps the call for replay."""
        with torch.inference_mode(mode=False):  # a later replay may write into them outside of that mode
            frozen_args, frozen_kwargs = tree_map_only(Tensor, self.take.alias, (args, kwargs))
        segment = self.take.cut()
        self.steps.append(segment)
        self.take.settle(segment)
        with staged_aside():
            output = body(*args, **kwargs)
        given = {_place(leaf): leaf for leaf in tree_iter((frozen_args, frozen_kwargs)) if _has_memory(leaf)}
        with torch.inference_mode(mode=False):
            own = tree_map_only(Tensor, lambda t: t if _place(t) in given else t.clone(), output)
        held = tree_map_only(Tensor, lambda t: given.get(_place(t), t), own)
        self.steps.append(BreakCall(body, frozen_args, frozen_kwargs, held, self.take.guard))
        self.take.resume()
        return own

    def finish(self) -> None:
        """Keeps the last segment."""
        self.steps.append(self.take.cut())


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Tells apart tensors that do not show the same elements of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def staged_aside() -> Iterator[None]:
    """Within, breaks are plain calls: a break's own body is eager already."""
    token = _stage.set(None)
    try:
        yield
    finally:
        _stage.reset(token)


class BreakCall:
    """One break of one recording: the body with its frozen arguments, and the output that it owns."""

    nodes = 0

    def __init__(
        self,
        body: Body,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._guard = guard
        self.name = getattr(body, "__qualname__", repr(body))
        self._body, self._args, self._kwargs = body, args, kwargs
        self._held, self._structure = tree_flatten(output)
        self._given = {_place(leaf) for leaf in tree_iter((args, kwargs)) if _has_memory(leaf)}

    def call(self) -> Any:
        """The body alone, on its frozen arguments: what it returns reaches no later segment."""
        return self._body(*self._args, **self._kwargs)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the body and copies what it returns into the tensors that later segments read.

        Raises:
            OutputStructureError: if the output's structure, a Python value in it, or which argument it hands on
                changed, which the recorded segments after it cannot follow (P33, P36).
        """
        with self._guard():
            fresh, structure = tree_flatten(self.call())
        if structure != self._structure:
            raise OutputStructureError(
                f"the break {self.name!r} returned {structure} at replay, {self._structure} at capture",
                advice="return the same structure every time; write what varies into a static buffer",
            )
        for held, new in zip(self._held, fresh, strict=True):
            if isinstance(held, Tensor) and isinstance(new, Tensor):
                if held.shape != new.shape or held.dtype != new.dtype:
                    raise OutputStructureError(
                        f"the break {self.name!r} returned a {tuple(new.shape)} {new.dtype} tensor at replay, "
                        f"{tuple(held.shape)} {held.dtype} at capture",
                        advice="pad the result to the captured shape inside the break",
                    )
                if _place(held) not in self._given:
                    held.copy_(new)
                elif _place(held) != _place(new):  # a copy would change memory that is not the recording's
                    raise OutputStructureError(
                        f"the break {self.name!r} returned one of its arguments at capture and another tensor now",
                        advice="return a new tensor, or write into the argument",
                    )
            elif isinstance(held, Tensor) or isinstance(new, Tensor) or held != new:
                raise OutputStructureError(
                    f"the break {self.name!r} returned {new!r} at replay, {held!r} at capture: "
                    "the segments after it were recorded with the first",
                    advice="hand such a value on in a tensor, or keep it out of the break's result",
                )

    def operations(self) -> list[str]:
        """The break, by name."""
        return [f"break {self.name}"]

    def close(self) -> None:
        """Drops arguments and outputs."""
        self._args, self._kwargs, self._held, self._given = (), {}, [], set()
