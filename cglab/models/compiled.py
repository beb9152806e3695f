"""The compiled form of the decoder's body: what lies between two attentions, as regions of ``torch.compile``.

Every block is the same two functions of tensors, so each is compiled once for all of them and for each kind of step:
one row, and at most 16, where a matrix product is bound by reading the weights and gets a kernel of its own; and more.
All are compiled before the first step, on rows that are no other size of the model: nothing is compiled in a capture's
warm-up or in a timed step, and nothing again later (B57, B58). Attention stays outside, so that it can be a break.

The residual stream is carried beside the block's output, and added where the next norm reads it anyway. It cannot run
on a CPU, where the tape records uncompiled operations.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from cglab.errors import RecompiledError
from cglab.models.body import Taps
from cglab.models.config import ModelConfig
from cglab.models.kv import LayerCache, LayerPool, PagedKV
from cglab.models.paged import AttentionKind, prepare_attention
from cglab.models.regions import Between, Kernels, Regions, regions, written_kernels
from cglab.models.stages import Elsewhere, held_layers

MOST_ROWS = 2048
"""Rows of which the second half of a block is computed at a time: enough for full speed, and its intermediates, which
are what the memory of a long prefill's graphs goes into, stay as small."""
EXAMPLE_ROWS = (37, 1, 5)
"""Rows of the examples, one of each kind: numbers that no other size of a model has, lest they be taken for that size.
"""


def in_parts(
    leave: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], attended: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The second half of a block, on ``MOST_ROWS`` rows at a time."""
    rows = residual.shape[0]
    if rows <= MOST_ROWS:
        return leave(attended, residual)
    whole = torch.empty_like(residual), torch.empty_like(residual)
    for first in range(0, rows, MOST_ROWS):
        part = slice(first, first + MOST_ROWS)
        for into, made in zip(whole, leave(attended[part], residual[part]), strict=True):
            into[part].copy_(made)
    return whole


def of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a copy of its code: the compiler counts and keeps what it compiles by code object."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def changing(*tensors: Tensor) -> None:
    """Tells the compiler that the first axis of these has another size in other steps."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


class Compiled:
    """``body.Body`` in compiled regions.

    Args:
        config: the decoder's shape.
        backend: of ``torch.compile``.
        kernels: of what is not left to the compiler; None for the hand-written ones.

    Attributes:
        compilations: how often the compiler has run; constant after ``prepare``.
        compile_seconds: spent in ``prepare``.
    """

    name = "compiled"
    carries: tuple[str, ...] = ("hidden_states", "residual")

    def __init__(
        self, config: ModelConfig, *, backend: str = "inductor", kernels: Kernels | None = None
    ) -> None:
        self.config, self.compilations, self.compile_seconds = config, 0, 0.0
        self._compile = torch._dynamo.lookup_backend(backend)  # type: ignore[attr-defined,unused-ignore]
        self._regions = Regions(
            *(
                torch.compile(of_its_own(region), backend=self._counted, fullgraph=True)
                for region in regions(config, kernels or written_kernels())
            )
        )

    def _counted(self, module: Any, inputs: Any) -> Any:
        self.compilations += 1
        return self._compile(module, inputs)

    @torch.no_grad()
    def prepare(self, model: Any, kv: PagedKV, kinds: Sequence[AttentionKind] = ()) -> None:
        """Compiles for a model and its cache, whose reserved slot is written; nothing where that was done before.

        Args:
            model: of this shape.
            kv: its cache; of a draft its target's.
            kinds: of steps that attend to the cache, beside those with one token a request.
        """
        started = time.perf_counter()
        # What changes is said below. Left to itself the compiler takes every size for one that changes in which two
        # models of a process differ, heads and widths too, as the regions of both have the same lines.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False), warnings.catch_warnings():
            # Float32 is exact here on purpose: it is what the oracles are judged in.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            for pool, rows in product(self._pools(model, kv), EXAMPLE_ROWS):
                self._example(model, pool, rows)
        for pool, kind in product(self._pools(model, kv), (AttentionKind(self.config.num_heads), *kinds)):
            prepare_attention(pool, kind, next(model.parameters()).dtype)
        self.compile_seconds += time.perf_counter() - started

    def _pools(self, model: Any, kv: PagedKV) -> list[LayerPool]:
        """The pools that the model's layers read."""
        return [pool for pool in kv.pools if pool.layers]

    def _example(self, model: Any, pool: LayerPool, rows: int) -> None:
        """One call of every region on so many rows, each tensor with the size that changes marked."""
        place: dict[str, Any] = {"device": pool.keys.device, "dtype": model.rotary.dtype}
        slots = torch.zeros(rows, device=pool.keys.device, dtype=torch.int64)
        cache = pool.cache(pool.layers[0], slots)
        # Each a tensor of its own, and none a view: it would be compiled for as such.
        hidden, residual = (torch.zeros((rows, self.config.hidden_size), **place) for _ in range(2))
        attended = torch.zeros((rows, self.config.num_heads * self.config.head_dim), **place)
        turn = model.rotary.index_select(0, slots)
        by_row = [hidden, residual, attended, turn, slots]
        changing(cache.keys, cache.values, *(by_row if rows > 1 else []))
        enter, leave = self._halves(held_layers(model.blocks)[0][1])
        enter(hidden, residual, turn, cache)
        leave(attended, residual)
        self.finish(model, (hidden, residual))

    def _halves(self, block: Any) -> tuple[Callable[..., Between], Callable[..., tuple[Tensor, Tensor]]]:
        attention = block.attention

        def enter(hidden: Tensor, residual: Tensor, turn: Tensor, cache: LayerCache) -> Between:
            found: Between = self._regions.enter(
                hidden, residual, turn, block.attention_norm.weight, attention.qkv.weight, attention.qkv.bias,
                attention.head_norm, *cache,
            )  # fmt: skip
            return found

        return enter, self._second_half(block)

    def _second_half(self, block: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        attention, forward = block.attention, block.feed_forward

        def leave(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = self._regions.leave(
                attended, residual, attention.output.weight, attention.output.bias,
                block.feed_forward_norm.weight, forward.gate_up.weight, forward.gate_up.bias, forward.down.weight,
                forward.down.bias,
            )  # fmt: skip
            return found

        return leave

    def through(
        self, model: Any, carried: tuple[Tensor, ...], turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> tuple[Tensor, ...]:
        """See ``body.Body``; ``attend`` tells where its keys and values go."""
        hidden, residual = carried if len(carried) > 1 else (*carried, torch.zeros_like(carried[0]))
        del carried  # a recording's pool is as large as what is alive at a time
        if not hidden.shape[0]:  # nothing to compute, and a kind of step that is not compiled
            return hidden, residual
        for layer_index, block in held_layers(model.blocks):
            enter, leave = self._halves(block)
            query, key, value, residual = enter(hidden, residual, turn, attend.cache(layer_index))
            attended = attend.attend(layer_index, query, key, value)
            del query, key, value, hidden
            hidden, residual = in_parts(leave, attended, residual)
            if taps is not None:
                taps.note(layer_index, residual, hidden)
        return hidden, residual

    def finish(self, model: Any, carried: tuple[Tensor, ...]) -> Tensor:
        """See ``body.Body``; a stage that is not the last has no norm, and hands on what it was given."""
        hidden, residual = carried
        if isinstance(model.norm, Elsewhere) or not hidden.shape[0]:
            return hidden
        out: Tensor = self._regions.finish(hidden, residual, model.norm.weight)
        return out

    def __call__(
        self, model: Any, hidden: Tensor, turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> Tensor:
        """See ``body.Body``."""
        return self.finish(model, self.through(model, (hidden,), turn, attend, taps))


@contextmanager
def nothing_compiled(*models: Any) -> Iterator[None]:
    """Within, no compiler must run for these: around everything that is timed.

    Raises:
        RecompiledError: at the end, if one did.
    """
    before = sum(model.body.compilations for model in models)
    yield
    count = sum(model.body.compilations for model in models) - before
    if count:
        raise RecompiledError(
            f"the compiler ran {count} times after everything was compiled: a step has tensors of another kind "
            "(dtype, device, layout) than the model's; TORCH_LOGS=recompiles tells which"
        )
