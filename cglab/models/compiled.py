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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import RecompiledError
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder, rotate
from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV
from cglab.models.paged import prepare_attention

FEW_ROWS = 16
"""Up to how many rows a product has a kernel of its own."""
MOST_ROWS = 2048
"""Rows of which the second half of a block is computed at a time: enough for full speed, and its intermediates, which
are what the memory of a long prefill's graphs goes into, stay as small."""
EXAMPLE_ROWS = (37, 1, 5)
"""Rows of the examples, one of each kind: numbers that no other size of a model has, lest they be taken for that size.
"""

Between = tuple[Tensor, Tensor, Tensor, Tensor]


class Kernels(NamedTuple):
    """What is not left to the compiler; see ``models.kernels``."""

    thin_linear: Callable[..., Tensor]
    turn_and_store: Callable[..., tuple[Tensor, Tensor]]


def torch_kernels() -> Kernels:
    """The same in PyTorch's operators: the library's products, and the compiler's own pass over a projection."""

    def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
        out = F.linear(x, weight, bias)
        if not gated:
            return out
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up

    def turn_and_store(
        qkv: Tensor,
        turn: Tensor,
        norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kv = keys.shape[1]
        turned = qkv.shape[1] - kv
        heads = qkv[:, :turned]
        if norm is not None:
            heads = F.rms_norm(heads, (qkv.shape[2],), eps=eps) * norm
        query, key = rotate(heads, turn).split((turned - kv, kv), dim=1)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, qkv[:, turned:])
        return query.contiguous(), key

    return Kernels(thin_linear, turn_and_store)


def written_kernels() -> Kernels:
    """The hand-written ones; they need Triton."""
    from cglab.models.kernels.thin import thin_linear
    from cglab.models.kernels.turn import turn_and_store

    return Kernels(thin_linear, turn_and_store)


def regions(config: ModelConfig, kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    """The two halves of a block around its attention, and what follows the last, as functions of tensors alone.

    Args:
        config: the decoder's shape.
        kernels: of what is not left to the compiler.

    Returns:
        ``enter``: from a block's input to queries, keys and values, stored in the cache; ``leave``: from what was
        attended to the block's output; and ``finish``: the last norm. All take the residual stream beside their input.
    """
    eps, head_dim, kv_heads = config.rms_norm_eps, config.head_dim, config.num_kv_heads
    width, turned = config.hidden_size, config.num_heads + kv_heads
    thin_linear, turn_and_store = kernels

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return thin_linear(x, weight, bias) if x.shape[0] <= FEW_ROWS else F.linear(x, weight, bias)

    def enter(
        hidden: Tensor, residual: Tensor, turn: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None,
        head_norm: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor,
    ) -> Between:  # fmt: skip
        residual = residual + hidden
        normed = F.rms_norm(residual, (width,), norm, eps)
        qkv = linear(normed, weight, bias).view(-1, turned + kv_heads, head_dim)
        query, key = turn_and_store(qkv, turn, head_norm, eps, keys, values, slots)
        return query, key, qkv[:, turned:], residual

    def leave(
        attended: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor,
        gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        residual = residual + linear(attended, weight, bias)
        normed = F.rms_norm(residual, (width,), norm, eps)
        if normed.shape[0] <= FEW_ROWS:
            return thin_linear(
                thin_linear(normed, gate_up, gate_up_bias, gated=True), down, down_bias
            ), residual
        gate, up = F.linear(normed, gate_up, gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down, down_bias), residual

    def finish(hidden: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(residual + hidden, (width,), norm, eps)

    return enter, leave, finish


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


class Compiled:
    """``decoder.Body`` in compiled regions.

    Args:
        config: the decoder's shape.
        backend: of ``torch.compile``.
        kernels: of what is not left to the compiler; None for the hand-written ones.

    Attributes:
        compilations: how often the compiler has run; constant after ``prepare``.
        compile_seconds: spent in ``prepare``.
    """

    name = "compiled"

    def __init__(
        self, config: ModelConfig, *, backend: str = "inductor", kernels: Kernels | None = None
    ) -> None:
        self.config, self.compilations, self.compile_seconds = config, 0, 0.0
        self._compile = torch._dynamo.lookup_backend(backend)  # type: ignore[attr-defined,unused-ignore]
        self._enter, self._leave, self._finish = (
            torch.compile(of_its_own(region), backend=self._counted, fullgraph=True)
            for region in regions(config, kernels or written_kernels())
        )

    def _counted(self, module: Any, inputs: Any) -> Any:
        self.compilations += 1
        return self._compile(module, inputs)

    @torch.no_grad()
    def prepare(self, model: Decoder, kv: PagedKV) -> None:
        """Compiles for a model and its cache, whose reserved slot is written; nothing where that was done before."""
        started = time.perf_counter()
        # What changes is said below. Left to itself the compiler takes every size for one that changes in which two
        # models of a process differ, heads and widths too, as the regions of both have the same lines.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False), warnings.catch_warnings():
            # Float32 is exact here on purpose: it is what the oracles are judged in.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            for pool, rows in product((pool for pool in kv.pools if pool.layers), EXAMPLE_ROWS):
                self._example(model, pool, rows)
        for pool in (pool for pool in kv.pools if pool.layers):
            prepare_attention(pool, self.config.num_heads, model.rotary.dtype)
        self.compile_seconds += time.perf_counter() - started

    def _example(self, model: Decoder, pool: LayerPool, rows: int) -> None:
        """One call of every region on so many rows, each tensor with the size that changes marked."""
        place: dict[str, Any] = {"device": pool.keys.device, "dtype": model.rotary.dtype}
        slots = torch.zeros(rows, device=pool.keys.device, dtype=torch.int64)
        cache = pool.cache(pool.layers[0], slots)
        # Each a tensor of its own, and none a view: it would be compiled for as such.
        hidden, residual = (torch.zeros((rows, self.config.hidden_size), **place) for _ in range(2))
        attended = torch.zeros((rows, self.config.num_heads * self.config.head_dim), **place)
        turn = model.rotary.index_select(0, slots)
        by_row = [hidden, residual, attended, turn, slots]
        for tensor in (cache.keys, cache.values, *(by_row if rows > 1 else [])):
            torch._dynamo.mark_dynamic(tensor, 0)
        enter, leave = self._halves(model.blocks[0])
        enter(hidden, residual, turn, cache)
        leave(attended, residual)
        self._finish(hidden, residual, model.norm.weight)

    def _halves(self, block: Any) -> tuple[Callable[..., Between], Callable[..., tuple[Tensor, Tensor]]]:
        attention, forward = block.attention, block.feed_forward

        def enter(hidden: Tensor, residual: Tensor, turn: Tensor, cache: LayerCache) -> Between:
            found: Between = self._enter(
                hidden, residual, turn, block.attention_norm.weight, attention.qkv.weight, attention.qkv.bias,
                attention.head_norm, *cache,
            )  # fmt: skip
            return found

        def leave(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = self._leave(
                attended, residual, attention.output.weight, attention.output.bias,
                block.feed_forward_norm.weight, forward.gate_up.weight, forward.gate_up.bias, forward.down.weight,
                forward.down.bias,
            )  # fmt: skip
            return found

        return enter, leave

    def __call__(self, model: Decoder, hidden: Tensor, turn: Tensor, attend: CacheAttention) -> Tensor:
        """See ``decoder.Body``; ``attend`` tells where its keys and values go."""
        if not hidden.shape[0]:  # nothing to compute, and a kind of step that is not compiled
            return hidden
        residual = torch.zeros_like(hidden)
        for layer_index, block in enumerate(model.blocks):
            enter, leave = self._halves(block)
            query, key, value, residual = enter(hidden, residual, turn, attend.cache(layer_index))
            attended = attend.attend(layer_index, query, key, value)
            del query, key, value, hidden  # a recording's pool is as large as what is alive at a time
            hidden, residual = in_parts(leave, attended, residual)
        out: Tensor = self._finish(hidden, residual, model.norm.weight)
        return out


@contextmanager
def nothing_compiled(model: Decoder) -> Iterator[None]:
    """Within, no compiler must run for the model: around everything that is timed.

    Raises:
        RecompiledError: at the end, if one did.
    """
    before = model.body.compilations
    yield
    count = model.body.compilations - before
    if count:
        raise RecompiledError(
            f"the compiler ran {count} times after everything was compiled: a step has tensors of another kind "
            "(dtype, device, layout) than the model's; TORCH_LOGS=recompiles tells which"
        )
