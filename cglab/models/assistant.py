"""The frozen-KV assistant: a small draft model whose layers attend to the target's keys and values and write none (S0).

One step takes the newest token and the target's hidden state before it, or those of its own step before: the target's
embedding of the token and the hidden state, side by side, are projected to the assistant's width, go through its
layers, and are projected back. What comes out is the hidden state that the next step takes, and the scores of the
token after. Each layer asks the target's last layer of its own kind, at the position of the last token in the cache,
which does not move while a draft is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.errors import ModelError
from cglab.models.attention import DecodeStep
from cglab.models.bound import Bound
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder, FeedForward
from cglab.models.dsa_config import DsaConfig
from cglab.models.fields import draft_fields
from cglab.models.rotary import rotate

ARCHITECTURE: Final = "FrozenKVAssistant"
KINDS: Final = ("full", "sliding")


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """The shape of an assistant.

    Attributes:
        vocab_size: rows of the target's embedding, and of its own head.
        backbone_size: width of the target's hidden states.
        hidden_size: width of its own.
        intermediate_size: width of the gated feed-forward layer.
        layer_kinds: of each layer, ``full`` or ``sliding``: which of the target's layers it asks.
        num_heads: query heads; a multiple of the target's key heads.
        num_kv_heads: the target's key heads.
        head_dim: the target's width of a head.
        rms_norm_eps: added to the mean square before its root.
        own_head: scores come from a head of its own over its hidden states, and not from the target's head over
            the projected ones.
    """

    vocab_size: int
    backbone_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    own_head: bool = False

    @property
    def num_layers(self) -> int:
        """Assistant layers."""
        return len(self.layer_kinds)

    @property
    def stack(self) -> ModelConfig:
        """Its layers as those of a decoder, without what a target has beside them."""
        return ModelConfig(
            "Qwen3ForCausalLM", self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers,
            self.num_heads, self.num_kv_heads, self.head_dim, 1, rms_norm_eps=self.rms_norm_eps, qk_norm=True,
        )  # fmt: skip

    @classmethod
    def from_folder(cls, folder: str | Path) -> AssistantConfig:
        """Reads ``config.json`` of an assistant's folder.

        Raises:
            ModelError: if it is missing, malformed, or of another kind of model.
        """
        fields = draft_fields(folder, ARCHITECTURE)
        kinds = fields.names("layer_kinds") or []
        for kind in kinds:
            fields.require("layer_kinds", kind, KINDS)
        if not kinds:
            raise fields.malformed("layer_kinds", None, "a list with full or sliding for each layer")
        sizes = (
            "vocab_size", "backbone_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
        )  # fmt: skip
        return cls(
            **{name: fields.integer(name) for name in sizes}, layer_kinds=tuple(kinds),
            rms_norm_eps=fields.real("rms_norm_eps", 1e-6), own_head=fields.flag("own_head"),
        )  # fmt: skip


def bound_layers(config: AssistantConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target's layer that each assistant layer asks: the last one of its kind.

    Raises:
        ModelError: if the target has no layer of a kind, or its keys have other sizes or are latent.
    """
    if isinstance(target, DsaConfig):
        raise ModelError(
            f"an assistant asks the target's keys and values, and {target.architecture} keeps latents; take another "
            'draft, such as draft="nextn" or draft="random-block"'
        )
    for name in ("vocab_size", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ModelError(f"the assistant's {name} is {ours}, the target's {theirs}; open its own target")
    if config.backbone_size != target.hidden_size:
        raise ModelError(
            f"the assistant's backbone_size is {config.backbone_size}, the target's hidden_size "
            f"{target.hidden_size}; open its own target"
        )
    windowed = set(target.window_layers)
    last = {
        kind: max(
            (layer for layer in range(target.num_layers) if (layer in windowed) == (kind == "sliding")),
            default=-1,
        )
        for kind in KINDS
    }
    missing = sorted({kind for kind in config.layer_kinds if last[kind] < 0})
    if missing:
        raise ModelError(
            f"the assistant asks {missing[0]} layers and the target has none; open its own target"
        )
    return tuple(last[kind] for kind in config.layer_kinds)


class FrozenQuery(nn.Module):
    """Attention that only asks: keys and values are the target's."""

    def __init__(self, config: AssistantConfig, **place: Any) -> None:
        super().__init__()
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width = config.num_heads * config.head_dim
        self.query = skip_init(nn.Linear, config.hidden_size, width, bias=False, **place)
        self.output = skip_init(nn.Linear, width, config.hidden_size, bias=False, **place)
        self.head_norm = nn.Parameter(torch.empty(config.head_dim, **place))

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: FrozenAttention) -> Tensor:
        """Hidden states [T, hidden_size] from normed ones; ``turn`` holds the rows of the rotary table."""
        query = self.query(hidden).view(hidden.shape[0], -1, self.head_dim)
        query = rotate(F.rms_norm(query, (self.head_dim,), self.head_norm, self.eps), turn)
        out: Tensor = self.output(attend.attend(layer_index, query))
        return out


class AssistantBlock(nn.Module):
    """One assistant layer: attention to the target's cache and feed-forward, each behind a norm."""

    def __init__(self, config: AssistantConfig, **place: Any) -> None:
        super().__init__()
        self.attention_norm = skip_init(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps, **place)
        self.attention = FrozenQuery(config, **place)
        self.feed_forward_norm = skip_init(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps, **place)
        self.feed_forward = FeedForward(config.stack, **place)

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: FrozenAttention) -> Tensor:
        """The residual stream [T, hidden_size] after this layer."""
        hidden = hidden + self.attention(self.attention_norm(hidden), turn, layer_index, attend)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class FrozenAttention:
    """A frozen step over the target's cache, asked by the assistant's layers.

    Args:
        step: without slots.
        layers: the target's layer for each of the assistant's.
    """

    def __init__(self, step: DecodeStep, layers: tuple[int, ...]) -> None:
        self.step, self.layers = step, layers

    def attend(self, layer_index: int, query: Tensor) -> Tensor:
        """[T, heads * head_dim] from queries [T, heads, head_dim] of an assistant layer."""
        return self.step.attend(self.layers[layer_index], query)


class Assistant(Bound[AssistantConfig]):
    """A draft model over a target's cache; ``bind`` makes it that target's.

    Attributes:
        layers: the target's layer for each of its own, once bound.
    """

    called = "the assistant"

    def __init__(
        self,
        config: AssistantConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        place = self.place
        self.layers: tuple[int, ...] = ()
        self.scale = math.sqrt(config.backbone_size)
        self.pre = skip_init(nn.Linear, 2 * config.backbone_size, config.hidden_size, bias=False, **place)
        self.blocks = nn.ModuleList(AssistantBlock(config, **place) for _ in range(config.num_layers))
        self.norm = skip_init(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps, **place)
        self.post = skip_init(nn.Linear, config.hidden_size, config.backbone_size, bias=False, **place)
        size = (config.hidden_size, config.vocab_size)
        self.head = skip_init(nn.Linear, *size, bias=False, **place) if config.own_head else None

    def bind(self, target: Decoder) -> None:
        """Shares a target's embedding, head and rotary table: before any capture, which bakes in where they lie (P85).

        Raises:
            ModelError: if it is not a draft of this target.
        """
        self.layers = bound_layers(self.config, target.config)
        self._targets = (target,)

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: FrozenAttention,
        *,
        embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            input_ids: [T] int64, the newest token of each.
            hidden: [T, backbone_size], the target's normed hidden state before that token, or what this returned.
            positions: [T] int64, of the last token in the cache: ``max(tokens - 1, 0)``, the same for all steps of a
                draft; or [axes, T] for rotary positions on several axes, which share a head's pairs evenly.
            attend: the frozen step.
            embeddings: [T, backbone_size], instead of the target's for ``input_ids``.

        Returns:
            Scores of the token after, [T, vocab_size], and the hidden state for the next step, [T, backbone_size].
        """
        if embeddings is None:
            embeddings = self.target.embedding(input_ids)
        state = self.pre(torch.cat((embeddings * self.scale, hidden), dim=-1))
        state = self.body(self, state, turns(self.rotary, positions), attend)
        after = self.post(state)
        return self.target.logits(after) if self.head is None else self.head(state), after


def turns(table: Tensor, positions: Tensor) -> Tensor:
    """[T, 2, head_dim] rows of the rotary table; of several axes each turns a share of the pairs.

    Args:
        table: [max_position, 2, head_dim].
        positions: [T] or [axes, T] int64.
    """
    if positions.dim() == 1:
        return table.index_select(0, positions)
    axes, tokens = positions.shape
    # The two halves of a head are the ends of its pairs; pair n belongs to axis n modulo their number.
    rows = table.index_select(0, positions.flatten()).unflatten(0, (axes, tokens)).unflatten(-1, (2, -1))
    merged = rows[0].clone()
    for axis in range(1, axes):
        merged[..., axis::axes] = rows[axis, ..., axis::axes]
    return merged.flatten(-2)
