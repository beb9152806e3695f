"""Shapes of the Qwen3 and Llama family, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from cglab.errors import ModelError
from cglab.models.fields import Fields, read_json

ARCHITECTURES: Final = ("Qwen3ForCausalLM", "LlamaForCausalLM")
WINDOW, FIRST_WINDOW_LAYER = 4096, 28  # what Qwen3 takes for a file that states neither
MOST_LAYERS = 1000  # a damaged file is told before anything is made for every layer


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its rotary frequencies beyond the context that it was first trained on.

    Attributes:
        factor: by how much the lowest frequencies are divided.
        low_freq_factor: pairs that turn less often than this in the original context are stretched in full.
        high_freq_factor: pairs that turn more often than this are left alone.
        original_max_position: the original context, in tokens.
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
        sliding_window: positions that a query of a window layer sees, its own included; None without such layers.
        window_layers: which layers these are, ascending; every other one sees all positions before it.
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
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key and value heads: "
                "num_attention_heads must be a multiple of num_key_value_heads; correct config.json"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"head_dim {self.head_dim} is odd, rotary embedding needs an even one; correct config.json"
            )
        layers, window = self.window_layers, self.sliding_window
        ascending = all(earlier < later for earlier, later in pairwise((-1, *layers, self.num_layers)))
        if not ascending or bool(layers) != (window is not None) or (window is not None and window < 1):
            raise ModelError(
                f"a sliding window of {window} in layers {list(layers)} of {self.num_layers}: give a window of at "
                "least 1 position and the layers that have it in ascending order, or neither; correct config.json"
            )

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_shape(self) -> tuple[int, int]:
        """What a layer's cache holds of a token under the name of keys."""
        return self.num_kv_heads, self.head_dim

    @property
    def value_shape(self) -> tuple[int, int]:
        """What it holds under the name of values."""
        return self.num_kv_heads, self.head_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads ``config.json`` of a Hugging Face folder, and the end tokens of ``generation_config.json``.

        Args:
            folder: the model's folder.

        Returns:
            The shape.

        Raises:
            ModelError: if a file is missing or no JSON object, a field is missing or of the wrong type, or
                the model computes something that the decoder does not.
        """
        return _parse(*config_fields(folder))


def config_fields(folder: str | Path) -> tuple[Fields, Fields]:
    """The fields of ``config.json`` and of ``generation_config.json``, which may be missing.

    Raises:
        ModelError: if ``config.json`` is missing, or a file is no JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json: a Hugging Face model folder is expected; check the path"
        )
    generation = folder / "generation_config.json"
    ends = read_json(generation) if generation.is_file() else {}
    return Fields(read_json(path), path), Fields(ends, generation)


def architecture_of(fields: Fields) -> object:
    """The class name that a configuration states first; "missing" if it states none."""
    architectures = fields.content.get("architectures") or ["missing"]
    return architectures[0] if isinstance(architectures, list) else architectures


def check_kind(fields: Fields, good: Sequence[str]) -> str:
    """The architecture, one of ``good``, of weights that are not quantised.

    Raises:
        ModelError: for any other.
    """
    content = fields.content
    architecture = architecture_of(fields)
    fields.require("architectures", architecture, good)
    if "quantization_config" in content:
        section = content["quantization_config"]
        method = section.get("quant_method", "unknown") if isinstance(section, dict) else section
        raise ModelError(
            f"{fields.path}: the checkpoint is quantised ({method}); supported: float32, float16, bfloat16 "
            "weights; open the unquantised model"
        )
    fields.require("hidden_act", content.get("hidden_act", "silu"), ["silu"])
    return str(architecture)


def _parse(fields: Fields, generation: Fields) -> ModelConfig:
    architecture = check_kind(fields, ARCHITECTURES)
    rotary = fields.rotary()
    kind = rotary.content.get("rope_type") or rotary.content.get("type") or "default"
    fields.require("rope_type", kind, ["default", "llama3"])
    fields.require("partial_rotary_factor", rotary.real("partial_rotary_factor", 1.0), [1.0])
    qwen3 = architecture == "Qwen3ForCausalLM"
    window_layers = _window_layers(fields) if qwen3 else ()
    if not qwen3:
        fields.require("use_sliding_window", fields.flag("use_sliding_window"), [False])
    heads = fields.integer("num_attention_heads")
    starts = fields.tokens("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", 128 if qwen3 else fields.integer("hidden_size") // heads),
        max_position=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rotary.real("rope_theta", 10000.0),
        rope_scaling=None if kind == "default" else _llama3_scaling(rotary),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qk_norm=qwen3,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        sliding_window=fields.integer("sliding_window", WINDOW) if window_layers else None,
        window_layers=window_layers,
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=generation.tokens("eos_token_id") or fields.tokens("eos_token_id"),
    )


def _window_layers(fields: Fields) -> tuple[int, ...]:
    """The layers that see a window, by the rules of ``Qwen3Config``: listed one by one, or the last ones."""
    content, layers = fields.content, fields.integer("num_hidden_layers")
    windowed = fields.flag("use_sliding_window") and content.get("sliding_window", WINDOW) is not None
    kinds = fields.names("layer_types")
    if kinds is None:
        if windowed and layers > MOST_LAYERS:
            raise fields.malformed("num_hidden_layers", layers, f"an integer up to {MOST_LAYERS}")
        first = fields.integer("max_window_layers", FIRST_WINDOW_LAYER, least=0)
        return tuple(range(first, layers)) if windowed else ()
    for kind in kinds:
        good = ["full_attention", "sliding_attention"] if windowed else ["full_attention"]
        fields.require("layer_types" if windowed else "layer_types without use_sliding_window", kind, good)
    if len(kinds) != layers:
        raise fields.malformed("layer_types", kinds, f"a list of {layers}, one for each layer,")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _llama3_scaling(rotary: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rotary.real("factor"),
        low_freq_factor=rotary.real("low_freq_factor"),
        high_freq_factor=rotary.real("high_freq_factor"),
        original_max_position=rotary.integer("original_max_position_embeddings"),
    )
