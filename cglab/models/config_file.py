"""A shape written as a Hugging Face ``config.json``: the way back from :mod:`cglab.models.config`."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from cglab.models.config import ModelConfig

_KINDS: Final = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
_SAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias",
    "sliding_window", "bos_token_id",
)  # fmt: skip
"""Fields that the file calls as the shape does."""


def as_config_json(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of ``config.json`` for a shape; ``ModelConfig.from_folder`` reads the same shape from it.

    Args:
        config: the shape.
        dtype: of the weights that go with it.
    """
    rotary: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        rotary = {"rope_type": "llama3", **scaling}
        rotary["original_max_position_embeddings"] = rotary.pop("original_max_position")
    windows = set(config.window_layers)
    kinds = [
        "sliding_attention" if layer in windows else "full_attention" for layer in range(config.num_layers)
    ]
    return {
        "architectures": [config.architecture],
        "model_type": _KINDS[config.architecture],
        **{name: getattr(config, name) for name in _SAME},
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position,
        # Both spellings, as readers before and after transformers 5 look for one of them.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rotary,
        "rope_parameters": {**rotary, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": bool(windows),
        **({"layer_types": kinds} if windows else {}),
        "max_window_layers": config.num_layers,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_token_ids),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
