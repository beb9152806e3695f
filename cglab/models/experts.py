"""Routed experts with static shapes: no count of an expert's tokens ever reaches the host.

Every token takes the same number of experts, so that the rows of the products are always tokens times experts a token.
Sorted by expert they are groups that follow each other, and one grouped product per matrix computes them all; where a
group ends is a tensor. Padded tokens are masked before the routing: they belong to no expert and lie behind the last
group, which the product does not reach.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cglab.models.decoder import FeedForward
from cglab.models.dsa_config import DsaConfig


class Routing(NamedTuple):
    """Where the tokens of a step go.

    Attributes:
        experts: [T, experts_per_token] int64; the number of experts for a padded token, which goes to none.
        weights: [T, experts_per_token] float32; zero for a padded token.
    """

    experts: Tensor
    weights: Tensor

    def group_ends(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """The rows sorted by expert.

        Args:
            num_experts: of the layer.

        Returns:
            [T * experts_per_token] int64, which row of the flattened routing comes where, those of an expert in their
            order; and [num_experts] int32, where each expert's rows end.
        """
        ordered, order = self.experts.flatten().sort(stable=True)
        expert = torch.arange(num_experts, device=order.device)
        return order, torch.searchsorted(ordered, expert, right=True, out_int32=True)


class Router(nn.Module):
    """Chooses experts by sigmoid scores in float32, whatever the dtype of the rest.

    Attributes:
        bias: [num_experts] float32, added to the scores for the choice alone: it balances the experts' load.

    Args:
        config: the shape.
        device: of the parameters.
    """

    def __init__(self, config: DsaConfig, device: torch.device | str) -> None:
        super().__init__()
        self.kept, self.scale = config.experts_per_token, config.routed_scale
        place: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, **place))
        self.bias = nn.Parameter(torch.empty(config.num_experts, **place), requires_grad=False)

    def forward(self, hidden: Tensor, live: Tensor | None = None) -> Routing:
        """Routes tokens.

        Args:
            hidden: [T, hidden_size], normed.
            live: [T] bool, which of them are no padding; None for all.
        """
        scores = F.linear(hidden.float(), self.weight).sigmoid()
        experts = (scores + self.bias).topk(self.kept, dim=-1).indices
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        if live is not None:
            padded = ~live.unsqueeze(1)
            experts = experts.masked_fill(padded, len(self.weight))
            weights = weights.masked_fill(padded, 0.0)
        return Routing(experts, weights)


class RoutedExperts(nn.Module):
    """A router, its experts and one that every token has.

    The experts' matrices lie one below the other, gate before up in each.

    Args:
        config: the shape.
        device: where the parameters are allocated.
        dtype: their dtype, but for the router's.
    """

    def __init__(self, config: DsaConfig, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.router = Router(config, device)
        self.gate_up = nn.Parameter(torch.empty(count * 2 * inner, hidden, **place))
        self.down = nn.Parameter(torch.empty(count * hidden, inner, **place))
        wide = replace(config, intermediate_size=inner * config.shared_experts)
        self.shared = FeedForward(wide, **place) if config.shared_experts else None

    def forward(self, hidden: Tensor, live: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden_size] from normed ones.

        Args:
            hidden: [T, hidden_size].
            live: [T] bool, which of them are no padding; None for all. Padded rows become what is shared.
        """
        return self.mix(hidden, self.router(hidden, live))

    def mix(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[T, hidden_size]: the weighted sum of each token's experts and what is shared."""
        gate_up = self.gate_up.view(len(self.router.weight), -1, hidden.shape[1])
        down = self.down.view(len(gate_up), hidden.shape[1], -1)
        products = grouped if takes_groups(hidden, down) else every
        routed = products(hidden, routing, gate_up, down)
        return routed if self.shared is None else routed + self.shared(hidden)


def takes_groups(hidden: Tensor, down: Tensor) -> bool:
    """Whether the grouped product takes these rows and reads no count on the host.

    It asks for rows of whole 16 bytes in the dtype of the weights, and is a kernel for bfloat16 alone: on a GPU, and so
    on the tape that stands in for one.

    Args:
        hidden: [T, hidden_size].
        down: [experts, hidden_size, expert_size].
    """
    whole = all(width * down.element_size() % 16 == 0 for width in down.shape[1:])
    return whole and hidden.dtype == down.dtype == torch.bfloat16


def grouped(hidden: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """The experts by one grouped product a matrix.

    Args:
        hidden: [T, hidden_size].
        routing: of these tokens.
        gate_up: [experts, 2 * expert_size, hidden_size].
        down: [experts, hidden_size, expert_size].

    Returns:
        [T, hidden_size]: the weighted sum of each token's experts; zero for a padded token.
    """
    tokens, kept = routing.experts.shape
    order, ends = routing.group_ends(len(gate_up))
    rows = hidden.index_select(0, order // kept)
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    computed = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    # Rows behind the last group were never written: they are dropped, not multiplied by zero.
    unrouted = (routing.experts == len(gate_up)).unsqueeze(-1)
    placed = torch.empty_like(computed).index_copy_(0, order, computed).view(tokens, kept, -1)
    return _mixed(placed.masked_fill(unrouted, 0.0), routing.weights)


def every(hidden: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """As ``grouped``, by all experts of all tokens, of which the chosen ones are kept: for any dtype and device."""
    unrouted = (routing.experts == len(gate_up)).unsqueeze(-1)
    rows = hidden.expand(len(gate_up), -1, -1)
    gate, up = torch.bmm(rows, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    computed = torch.bmm(F.silu(gate) * up, down.transpose(1, 2)).transpose(0, 1)
    chosen = routing.experts.clamp(max=len(gate_up) - 1).unsqueeze(-1).expand(-1, -1, hidden.shape[1])
    return _mixed(computed.gather(1, chosen).masked_fill(unrouted, 0.0), routing.weights)


def _mixed(computed: Tensor, weights: Tensor) -> Tensor:
    """[T, hidden_size] from [T, experts_per_token, hidden_size]; summed in float32, expert after expert."""
    return (computed.float() * weights.unsqueeze(-1)).sum(1).to(computed.dtype)
