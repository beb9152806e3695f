"""How the blocks of a decoder are computed, as a choice of its own: the portable form, and what any form promises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cglab.models.stages import held_layers


class Taps:
    """Keeps the residual stream after some layers, side by side, for a draft that reads it.

    Args:
        layers: of the decoder, ascending.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self._kept: list[Tensor] = []

    def note(self, layer_index: int, *parts: Tensor) -> None:
        """Keeps the sum of ``parts`` [T, hidden_size] if the layer is one of them."""
        if layer_index in self.layers:
            self._kept.append(functools.reduce(torch.add, parts))

    def features(self) -> Tensor:
        """[T, layers * hidden_size] of the step that was run last."""
        features = torch.cat(self._kept, dim=-1)
        self._kept.clear()
        return features


class Body(Protocol):
    """A way to compute all blocks and the last norm: the same formulas, in other kernels.

    Attributes:
        name: what the choice is called.
        compile_seconds: what compiling for models of this shape has taken so far.
        compilations: how often a compiler has run for them.
        carries: names of the tensors that pass from block to block, each [T, hidden_size].
    """

    name: str
    compile_seconds: float
    compilations: int
    carries: tuple[str, ...]

    def through(
        self, model: Any, carried: tuple[Tensor, ...], turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> tuple[Tensor, ...]:
        """Runs the blocks that the model holds: what a stage of a pipeline does between its proxies.

        Args:
            model: see ``__call__``.
            carried: what the block before left, in the order of ``carries``; or embeddings alone.
            turn: see ``__call__``.
            attend: see ``__call__``.
            taps: see ``__call__``.

        Returns:
            What the last of them left, likewise.
        """
        ...

    def finish(self, model: Any, carried: tuple[Tensor, ...]) -> Tensor:
        """The last norm of what ``through`` left: [T, hidden_size]."""
        ...

    def __call__(
        self, model: Any, hidden: Tensor, turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> Tensor:
        """Runs every block.

        Args:
            model: whose weights are used: a stack of ``blocks`` and a last ``norm``.
            hidden: [T, hidden_size], embeddings.
            turn: [T, 2, head_dim], rows of ``rotary_table``.
            attend: see ``Attend``; a form may ask more of it.
            taps: told the residual stream after every block.

        Returns:
            [T, hidden_size]: the normed hidden states.
        """
        ...


class Portable:
    """Block after block in PyTorch's own operators: on any device and recorder, and what others are checked against."""

    name, compile_seconds, compilations = "portable", 0.0, 0
    carries: tuple[str, ...] = ("hidden_states",)

    def through(
        self, model: Any, carried: tuple[Tensor, ...], turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> tuple[Tensor, ...]:
        """See ``Body``."""
        (hidden,) = carried
        for layer_index, block in held_layers(model.blocks):
            hidden = block(hidden, turn, layer_index, attend)
            if taps is not None:
                taps.note(layer_index, hidden)
        return (hidden,)

    def finish(self, model: Any, carried: tuple[Tensor, ...]) -> Tensor:
        """See ``Body``."""
        out: Tensor = model.norm(carried[0])
        return out

    def __call__(
        self, model: Any, hidden: Tensor, turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> Tensor:
        """See ``Body``."""
        return self.finish(model, self.through(model, (hidden,), turn, attend, taps))
