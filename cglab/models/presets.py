"""Published shapes that the lab builds with random weights: speed does not need trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from cglab.models.config import Llama3Scaling, ModelConfig


def _qwen3(**shape: Any) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        num_kv_heads=8,
        head_dim=128,
        max_position=65536,  # published for 40960; random weights are as good further on, and growth is measured there
        rope_theta=1e6,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
        **shape,
    )


PRESETS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "qwen3-0.6b": _qwen3(
            hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
        ),
        "qwen3-8b": _qwen3(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
        "llama-3.1-8b": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
            bos_token_id=128000,
            eos_token_ids=(128001,),
        ),
        "deep-narrow": ModelConfig(  # launch-bound, as S2's stages are: many layers with little work in each
            architecture="Qwen3ForCausalLM",
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_layers=96,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            max_position=65536,
            rope_theta=1e6,
            qk_norm=True,
            bos_token_id=151643,
            eos_token_ids=(151645, 151643),
        ),
        "gemma-31b-like": ModelConfig(  # Gemma's sizes and mix of layers, computed as Qwen3 computes
            architecture="Qwen3ForCausalLM",
            vocab_size=262144,
            hidden_size=5376,
            intermediate_size=21504,
            num_layers=60,
            num_heads=32,
            num_kv_heads=16,
            head_dim=256,
            max_position=131072,
            rope_theta=1e6,
            tie_embeddings=True,
            qk_norm=True,
            sliding_window=1024,
            window_layers=tuple(layer for layer in range(60) if layer % 6 != 5),
            bos_token_id=2,
            eos_token_ids=(1,),
        ),
    }
)
"""By the name that opens them."""
