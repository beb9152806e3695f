"""The block draft of DFLASH: all tokens of a block in one forward of a small model over the target's features (S4).

A block is the newest token and mask tokens after it. Its tokens see each other in both directions, and before them a
context that the draft never computed: keys and values of its layers are projected from the target's residual stream
after some of its layers, token by token, whenever the target has computed new ones (``materialise``). Embedding, head
and rotary table are the target's. Row 0 of a block stands for the token that is known and predicts nothing (P67).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.errors import ModelError
from cglab.models.bound import Bound
from cglab.models.config import ModelConfig
from cglab.models.decoder import Block, Decoder
from cglab.models.fields import draft_fields
from cglab.models.kv import CacheAttention

ARCHITECTURE: Final = "BlockDraft"
SIZES: Final = (
    "vocab_size", "backbone_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "block_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockDraftConfig:
    """The shape of a block draft.

    Attributes:
        vocab_size: rows of the target's embedding.
        backbone_size: width of the target's hidden states, and of its own.
        intermediate_size: width of the gated feed-forward layers.
        num_layers: draft layers.
        num_heads: query heads.
        num_kv_heads: key and value heads, of its own cache.
        head_dim: the target's width of a head, as the rotary table is shared.
        block_size: tokens of a block, the known one included; at least 2.
        mask_token_id: what stands for a token that is not known yet.
        context_layers: the target's layers after which its residual stream is read, ascending.
        rms_norm_eps: added to the mean square before its root.
    """

    vocab_size: int
    backbone_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    context_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ModelError(f"a block of {self.block_size} drafts nothing; a draft has blocks of at least 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelError(
                f"mask_token_id {self.mask_token_id} is no token of a vocabulary of {self.vocab_size}; fetch it again"
            )
        layers = self.context_layers
        if not layers or list(layers) != sorted(set(layers)):
            raise ModelError(f"context_layers must be ascending layers of the target, got {list(layers)}")

    @property
    def stack(self) -> ModelConfig:
        """Its layers as those of a decoder, for a cache and a compiled form of their own."""
        return ModelConfig(
            "Qwen3ForCausalLM", self.vocab_size, self.backbone_size, self.intermediate_size, self.num_layers,
            self.num_heads, self.num_kv_heads, self.head_dim, 1, rms_norm_eps=self.rms_norm_eps, qk_norm=True,
        )  # fmt: skip

    @classmethod
    def from_folder(cls, folder: str | Path) -> BlockDraftConfig:
        """Reads ``config.json`` of a block draft's folder.

        Raises:
            ModelError: if it is missing, malformed, or of another kind of model.
        """
        fields = draft_fields(folder, ARCHITECTURE)
        return cls(
            **{name: fields.integer(name) for name in SIZES},
            mask_token_id=fields.integer("mask_token_id", least=0), context_layers=fields.tokens("context_layers"),
            rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        )  # fmt: skip


def require_fit(ours: BlockDraftConfig, theirs: ModelConfig) -> None:
    """Refuses a draft of another target.

    Raises:
        ModelError: saying what does not fit.
    """
    for name, mine, other in (
        ("vocab_size", ours.vocab_size, theirs.vocab_size),
        ("backbone_size", ours.backbone_size, theirs.hidden_size),
        ("head_dim", ours.head_dim, theirs.head_dim),
    ):
        if mine != other:
            raise ModelError(f"the draft's {name} is {mine}, the target's {other}; open its own target")
    if ours.context_layers[-1] >= theirs.num_layers:
        raise ModelError(
            f"the draft reads layer {ours.context_layers[-1]}, the target has {theirs.num_layers}; "
            "open its own target"
        )


def spread(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The context layers of a draft that names none: as many as it has layers, evenly from 1 to the third from the end.

    It is how SGLang chooses them; a single one is the middle.

    Args:
        target_layers: of the target.
        draft_layers: of the draft.

    Raises:
        ModelError: if the target has too few.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    reach = target_layers - 4
    if draft_layers > reach + 1:
        raise ModelError(
            f"a target of {target_layers} layers has no {draft_layers} different ones from 1 to {target_layers - 3}; "
            "name the context layers"
        )
    return tuple(round(1 + index * reach / (draft_layers - 1)) for index in range(draft_layers))


class BlockDraft(Bound[BlockDraftConfig]):
    """A block draft; ``bind`` makes it a target's."""

    called = "the draft"

    def __init__(
        self,
        config: BlockDraftConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        place = self.place
        width, stack = config.backbone_size, config.stack
        self.fuse = skip_init(nn.Linear, len(config.context_layers) * width, width, bias=False, **place)
        self.context_norm = skip_init(nn.RMSNorm, width, eps=config.rms_norm_eps, **place)
        self.blocks = nn.ModuleList(Block(stack, **place) for _ in range(config.num_layers))
        self.norm = skip_init(nn.RMSNorm, width, eps=config.rms_norm_eps, **place)

    def bind(self, target: Decoder) -> None:
        """Shares a target's embedding, head and rotary table, before any capture (P85).

        Raises:
            ModelError: if it is not a draft of this target.
        """
        require_fit(self.config, target.config)
        self._targets = (target,)

    def materialise(self, features: Tensor, positions: Tensor, attend: CacheAttention) -> None:
        """Stores the keys and values that blocks will see of tokens that the target has computed.

        Args:
            features: [T, context layers * backbone_size], the target's residual stream; see ``decoder.Taps``.
            positions: [T] int64, of these tokens.
            attend: tells where each draft layer's keys and values go.
        """
        context = self.context_norm(self.fuse(features))
        turn = self.rotary.index_select(0, positions)
        for layer_index, block in enumerate(self.blocks):
            attend.cache(layer_index).store(*block.attention.context(context, turn))  # type: ignore[union-attr,operator]

    def forward(self, input_ids: Tensor, positions: Tensor, attend: CacheAttention) -> Tensor:
        """One forward over blocks.

        Args:
            input_ids: [requests * block_size] int64: the newest token of each request, then masks.
            positions: likewise, of these tokens.
            attend: of blocks whose tokens see each other and the context; a tree in which every node sees all.

        Returns:
            [requests * block_size, backbone_size], normed; rows 1 and on of a block predict its tokens by the target's
            head.
        """
        hidden = self.target.embedding(input_ids)
        return self.body(self, hidden, self.rotary.index_select(0, positions), attend)
