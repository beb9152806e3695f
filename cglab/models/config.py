"""Shapes of the Qwen3 and Llama family: read from a Hugging Face ``config.json``, or taken from a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cglab.errors import ModelError

ARCHITECTURES: Final = ("Qwen3ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its rotary frequencies beyond the context that it was first trained on.

    Attributes:
        factor: by how much the lowest frequencies are divided.
        low_freq_factor: wavelengths above ``original_max_position / low_freq_factor`` are stretched in full.
        high_freq_factor: wavelengths below ``original_max_position / high_freq_factor`` are left alone.
        original_max_position: context length before the stretch, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder.

    Attributes:
        architecture: the checkpoint's class name, one of ``ARCHITECTURES``.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward layer.
        num_layers: decoder blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; a divisor of ``num_heads``.
        head_dim: width of a head; even, as rotary embedding turns pairs.
        max_position: positions that the rotary tables cover.
        rms_norm_eps: added to the mean square before its root.
        rope_theta: base of the rotary frequencies.
        rope_scaling: the Llama 3.1 stretch, if any.
        tie_embeddings: the head is the embedding matrix.
        qk_norm: queries and keys are normalised per head (Qwen3).
        attention_bias: bias on the query, key, value and output projections.
        mlp_bias: bias on the feed-forward projections.
        bos_token_id: token that opens a sequence, if the model has one.
        eos_token_ids: tokens that end a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}: "
                "every key and value head serves the same number of query heads; correct config.json"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary embedding needs an even one; correct config.json")

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads
