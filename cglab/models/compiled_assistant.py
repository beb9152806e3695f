"""The compiled form of an assistant's layers: the same regions as a decoder's, but for the half that only asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cglab.models.assistant import Assistant, FrozenAttention
from cglab.models.body import Taps
from cglab.models.compiled import Compiled, changing
from cglab.models.kv import LayerPool, PagedKV


class CompiledAssistant(Compiled):
    """``body.Body`` of an assistant; nothing of it reads keys or values, so they are not among its tensors."""

    def _pools(self, model: Assistant, kv: PagedKV) -> list[LayerPool]:
        return list(dict.fromkeys(kv.pool(layer) for layer in model.layers))

    def _example(self, model: Assistant, pool: LayerPool, rows: int) -> None:
        place: dict[str, Any] = {"device": pool.keys.device, "dtype": model.norm.weight.dtype}
        hidden, residual = (torch.zeros((rows, self.config.hidden_size), **place) for _ in range(2))
        attended = torch.zeros((rows, self.config.num_heads * self.config.head_dim), **place)
        turn = torch.zeros((rows, 2, self.config.head_dim), **place)
        if rows > 1:
            changing(hidden, residual, attended, turn)
        self._ask(model.blocks[0], hidden, residual, turn)
        self._second_half(model.blocks[0])(attended, residual)
        self._regions.finish(hidden, residual, model.norm.weight)

    def _ask(self, block: Any, hidden: Tensor, residual: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._regions.ask(
            hidden,
            residual,
            turn,
            block.attention_norm.weight,
            block.attention.query.weight,
            block.attention.head_norm,
        )
        return found

    def __call__(
        self,
        model: Assistant,
        hidden: Tensor,
        turn: Tensor,
        attend: FrozenAttention,
        taps: Taps | None = None,
    ) -> Tensor:
        """See ``body.Body``."""
        if not hidden.shape[0]:  # nothing to compute, and a kind of step that is not compiled
            return hidden
        residual = torch.zeros_like(hidden)
        for layer_index, block in enumerate(model.blocks):
            query, residual = self._ask(block, hidden, residual, turn)
            hidden, residual = self._second_half(block)(attend.attend(layer_index, query), residual)
        out: Tensor = self._regions.finish(hidden, residual, model.norm.weight)
        return out
