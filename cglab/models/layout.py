"""Where each tensor of a Hugging Face checkpoint lives in the decoder's fused parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cglab.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor as rows of a parameter.

    Attributes:
        parameter: name in ``Decoder.named_parameters()``.
        start: first row of the parameter that it fills.
        rows: how many rows it fills.
        shape: shape in the checkpoint; without the first axis where every row is a copy of the tensor.
    """

    parameter: str
    start: int
    rows: int
    shape: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """The rows that the tensor fills, as a view.

        Args:
            parameter: the whole parameter.

        Returns:
            [rows, ...]; the checkpoint's tensor broadcasts to it.
        """
        return parameter.narrow(0, self.start, self.rows)


def checkpoint_layout(config: ModelConfig) -> dict[str, Piece]:
    """Every tensor that a checkpoint of this shape must hold, and its place.

    Args:
        config: the shape.

    Returns:
        Tensor names of the ``Qwen3ForCausalLM`` / ``LlamaForCausalLM`` format, each with its piece. The
        pieces cover all parameters exactly.
    """
    layout: dict[str, Piece] = {}

    def place(parameter: str, *tensors: tuple[str, tuple[int, ...]]) -> None:
        start = 0
        for name, shape in tensors:
            layout[name] = Piece(parameter, start, shape[0], shape)
            start += shape[0]

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    place("embedding.weight", ("model.embed_tokens.weight", (config.vocab_size, hidden)))
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"model.layers.{index}"
        place(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight", (hidden,)))
        place(f"{ours}.feed_forward_norm.weight", (f"{theirs}.post_attention_layernorm.weight", (hidden,)))
        projections = {"q_proj": query, "k_proj": key, "v_proj": key}
        fused = {f"{theirs}.self_attn.{name}": rows for name, rows in projections.items()}
        place(
            f"{ours}.attention.qkv.weight",
            *((f"{name}.weight", (rows, hidden)) for name, rows in fused.items()),
        )
        place(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight", (hidden, query)))
        if config.attention_bias:
            place(f"{ours}.attention.qkv.bias", *((f"{name}.bias", (rows,)) for name, rows in fused.items()))
            place(f"{ours}.attention.output.bias", (f"{theirs}.self_attn.o_proj.bias", (hidden,)))
        if config.qk_norm:
            norm = f"{ours}.attention.head_norm"
            layout[f"{theirs}.self_attn.q_norm.weight"] = Piece(norm, 0, config.num_heads, (head_dim,))
            layout[f"{theirs}.self_attn.k_norm.weight"] = Piece(
                norm, config.num_heads, config.num_kv_heads, (head_dim,)
            )
        gate, up = f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"
        place(
            f"{ours}.feed_forward.gate_up.weight",
            *((f"{name}.weight", (inner, hidden)) for name in (gate, up)),
        )
        place(f"{ours}.feed_forward.down.weight", (f"{theirs}.mlp.down_proj.weight", (hidden, inner)))
        if config.mlp_bias:
            place(f"{ours}.feed_forward.gate_up.bias", *((f"{name}.bias", (inner,)) for name in (gate, up)))
            place(f"{ours}.feed_forward.down.bias", (f"{theirs}.mlp.down_proj.bias", (hidden,)))
    place("norm.weight", ("model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        place("head.weight", ("lm_head.weight", (config.vocab_size, hidden)))
    return layout


def draft_layout(model: nn.Module) -> dict[str, Piece]:
    """The layout of a checkpoint whose tensors are the model's parameters, under their own names."""
    return {
        name: Piece(name, 0, parameter.shape[0], tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    }
