"""The decoder of the GLM-MoE-DSA kind: the stack of ``decoder`` with latent attention and routed experts in its layers.

Embedding, norms, dense feed-forward, body and head are those of every decoder. What its layers ask of a step is a
``LatentAttend`` (``sparse``, ``dense``), over a cache whose keys are latents and whose values are index keys. Where a
stage of a pipeline begins with a layer that shares the selection of the one before, that is handed over too (S2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.models.decoder import Block, Decoder
from cglab.models.dsa_config import DsaConfig
from cglab.models.experts import RoutedExperts
from cglab.models.layout import Piece
from cglab.models.mla import LatentAttend, LatentAttention
from cglab.models.rotary import paired
from cglab.models.stages import Proxy, Stage, bind

SELECTION: Final = "topk_indices"
"""The proxy of a selection: [tokens, index_topk] int32."""


class DsaBlock(Block):
    """One layer: latent attention, then a dense feed-forward or routed experts.

    Args:
        config: the shape.
        routed: whether its feed-forward is routed.
        shared: whether it attends to what the layer before attends to.
        **place: device and dtype of the parameters.
    """

    def __init__(self, config: DsaConfig, *, routed: bool, shared: bool = False, **place: Any) -> None:
        experts = RoutedExperts(config, **place) if routed else None
        super().__init__(config, LatentAttention(config, shared=shared, **place), experts, **place)

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: LatentAttend) -> Tensor:  # type: ignore[override]
        """The residual stream [T, hidden_size] after this layer."""
        if not isinstance(self.feed_forward, RoutedExperts):
            return super().forward(hidden, turn, layer_index, attend)  # type: ignore[arg-type]
        hidden = hidden + self.attention(self.attention_norm(hidden), turn, layer_index, attend)
        return hidden + attend.route(self.feed_forward, self.feed_forward_norm(hidden))


class DsaDecoder(Decoder):
    """A decoder with latent attention; see ``Decoder``.

    Args:
        config: the shape.
        stage: the part; None for the whole.
        device: where the parameters are allocated.
        dtype: their dtype, but for the routers', which is float32.
    """

    config: DsaConfig

    def __init__(
        self,
        config: DsaConfig,
        *,
        stage: Stage | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, stage=stage, device=device, dtype=dtype)
        self.rotary = paired(self.rotary)

    def block(self, layer_index: int, **place: Any) -> Block:
        """A layer of the stack, unfilled."""
        routed = layer_index >= self.config.dense_layers
        return DsaBlock(self.config, routed=routed, shared=layer_index in self.config.shared_layers, **place)

    def carried_into(self, layer_index: int) -> tuple[Proxy, ...]:
        """See ``Decoder``; and, if the layer shares one, the selection: slots, alike in all stages' caches."""
        carried = super().carried_into(layer_index)
        if layer_index not in self.config.shared_layers:
            return carried
        return (*carried, Proxy(SELECTION, (self.config.index_topk,), torch.int32, padding=-1))

    def part(
        self,
        *,
        positions: Tensor,
        attend: LatentAttend,
        input_ids: Tensor | None = None,
        proxies: Mapping[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """See ``Decoder``; the step attends to a selection that is among the proxies.

        Raises:
            InputError: as there, or if the next stage needs a selection and the step is dense, which makes none.
        """
        if proxies is not None:
            attend.selected = bind(self.taken, proxies).get(SELECTION)
        out = super().part(positions=positions, attend=attend, input_ids=input_ids, proxies=proxies)
        if SELECTION not in (proxy.name for proxy in self.handed):
            return out
        if attend.selected is None:
            raise InputError(
                f"{self.stage} hands on what it selected, and a dense step selects nothing; run a sparse one"
            )
        return (*out, attend.selected)


def dsa_layout(config: DsaConfig) -> dict[str, Piece]:
    """As ``checkpoint_layout``, of the ``GlmMoeDsaForCausalLM`` format."""
    hidden = config.hidden_size
    layout = {
        "model.embed_tokens.weight": Piece(
            "embedding.weight", 0, config.vocab_size, (config.vocab_size, hidden)
        )
    }
    for index in range(config.num_layers):
        layout |= block_layout(
            config, f"blocks.{index}", f"model.layers.{index}",
            routed=index >= config.dense_layers, shared=index in config.shared_layers,
        )  # fmt: skip
    layout["model.norm.weight"] = Piece("norm.weight", 0, hidden, (hidden,))
    if not config.tie_embeddings:
        layout["lm_head.weight"] = Piece("head.weight", 0, config.vocab_size, (config.vocab_size, hidden))
    return layout


def block_layout(
    config: DsaConfig, ours: str, theirs: str, *, routed: bool, shared: bool = False
) -> dict[str, Piece]:
    """The tensors of one layer.

    Args:
        config: the shape.
        ours: what the layer's parameters begin with.
        theirs: what its tensors begin with in a checkpoint.
        routed: whether its feed-forward is routed.
        shared: whether it has no indexer.
    """
    layout: dict[str, Piece] = {}

    def place(parameter: str, *tensors: tuple[str, tuple[int, ...]]) -> None:
        start = 0
        for name, shape in tensors:
            layout[f"{theirs}.{name}"] = Piece(f"{ours}.{parameter}", start, shape[0], shape)
            start += shape[0]

    def feed_forward(parameter: str, names: list[str], inner: int, dots: str = ".weight") -> None:
        both = [(f"{name}.{half}_proj.weight", (inner, hidden)) for name in names for half in ("gate", "up")]
        place(f"{parameter}.gate_up{dots}", *both)
        place(f"{parameter}.down{dots}", *((f"{name}.down_proj.weight", (hidden, inner)) for name in names))

    hidden, heads, rank = config.hidden_size, config.num_heads, config.latent_rank
    attention, asked = "self_attn", config.query_rank
    place("attention_norm.weight", ("input_layernorm.weight", (hidden,)))
    place("feed_forward_norm.weight", ("post_attention_layernorm.weight", (hidden,)))
    place(
        "attention.latent_down.weight",
        (f"{attention}.q_a_proj.weight", (asked, hidden)),
        (f"{attention}.kv_a_proj_with_mqa.weight", (rank + config.head_dim, hidden)),
    )
    place("attention.query_norm.weight", (f"{attention}.q_a_layernorm.weight", (asked,)))
    place("attention.latent_norm.weight", (f"{attention}.kv_a_layernorm.weight", (rank,)))
    place("attention.query_up.weight", (f"{attention}.q_b_proj.weight", (heads * config.query_dim, asked)))
    width = heads * (config.nope_dim + config.value_dim)
    place("attention.latent_up.weight", (f"{attention}.kv_b_proj.weight", (width, rank)))
    place("attention.output.weight", (f"{attention}.o_proj.weight", (hidden, heads * config.value_dim)))
    if not shared:
        indexer, dim, count = f"{attention}.indexer", config.index_dim, config.index_heads
        place("attention.indexer.query.weight", (f"{indexer}.wq_b.weight", (count * dim, asked)))
        place(
            "attention.indexer.key_gate.weight",
            (f"{indexer}.wk.weight", (dim, hidden)),
            (f"{indexer}.weights_proj.weight", (count, hidden)),
        )
        for part in ("weight", "bias"):
            place(f"attention.indexer.key_norm.{part}", (f"{indexer}.k_norm.{part}", (dim,)))
    if not routed:
        feed_forward("feed_forward", ["mlp"], config.intermediate_size)
        return layout
    place("feed_forward.router.weight", ("mlp.gate.weight", (config.num_experts, hidden)))
    place("feed_forward.router.bias", ("mlp.gate.e_score_correction_bias", (config.num_experts,)))
    experts = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
    feed_forward("feed_forward", experts, config.expert_size, dots="")
    if config.shared_experts:
        shared_width = config.expert_size * config.shared_experts
        feed_forward("feed_forward.shared", ["mlp.shared_experts"], shared_width)
    return layout
