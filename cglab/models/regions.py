"""What lies between two attentions, as functions of tensors alone: the parts of a block that ``compiled`` compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cglab.models.config import ModelConfig
from cglab.models.rotary import rotate

FEW_ROWS = 16
"""Up to how many rows a product has a kernel of its own."""

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


class Regions(NamedTuple):
    """The parts of a block that are compiled, as functions of tensors alone; all take the residual stream too.

    Attributes:
        enter: from a block's input to queries, keys and values, stored in the cache.
        ask: the same of a layer that has queries alone.
        leave: from what was attended to the block's output.
        finish: the last norm.
    """

    enter: Callable[..., Any]
    ask: Callable[..., Any]
    leave: Callable[..., Any]
    finish: Callable[..., Any]


def regions(config: ModelConfig, kernels: Kernels) -> Regions:
    """The two halves of a block around its attention, and what follows the last.

    Args:
        config: the decoder's shape.
        kernels: of what is not left to the compiler.
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

    def ask(
        hidden: Tensor, residual: Tensor, turn: Tensor, norm: Tensor, weight: Tensor, head_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = residual + hidden
        query = linear(F.rms_norm(residual, (width,), norm, eps), weight, None).view(
            -1, config.num_heads, head_dim
        )
        return rotate(F.rms_norm(query, (head_dim,), head_norm, eps), turn).contiguous(), residual

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

    return Regions(enter, ask, leave, finish)
