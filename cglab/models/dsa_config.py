"""Shapes of the GLM-MoE-DSA kind (latent attention, lightning indexer, routed experts), read from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cglab.errors import ModelError
from cglab.models.config import ModelConfig, check_kind, config_fields
from cglab.models.fields import Fields

ARCHITECTURE: Final = "GlmMoeDsaForCausalLM"
INDEXER_TYPES: Final = ("full", "shared")
FEED_FORWARDS: Final = ("dense", "sparse")
_COMPUTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "norm_topk_prob": True, "attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True, "indexer_rope_interleave": True,
    }
)  # fmt: skip
"""What is computed, by the fields that could say otherwise; left out they mean this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaConfig(ModelConfig):
    """The shape of a decoder with latent attention over the keys that an indexer selects.

    Absorbed into its latent form, attention has a single key head, so that ``num_kv_heads`` is 1. ``head_dim`` is
    the part of a head that is turned to its position, of which the rotary table is made.

    Attributes:
        query_rank: width of the query latent, which the indexer reads too.
        latent_rank: width of the key and value latent.
        nope_dim: part of a query or key head that is not turned.
        value_dim: width of a value head.
        index_heads: query heads of the indexer; they share one key.
        index_dim: width of these, their turned part included.
        index_topk: keys that a token attends to.
        shared_layers: layers without an indexer, ascending: they attend to what the layer before attends to.
        dense_layers: leading layers whose feed-forward is not routed.
        num_experts: routed experts of every other layer.
        experts_per_token: experts that a token is routed to.
        expert_size: inner width of an expert.
        shared_experts: experts that every token has, as one of that many times the width; 0 for none.
        routed_scale: multiplies the weights of a token's experts, which sum to one before it.
    """

    query_rank: int
    latent_rank: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    shared_layers: tuple[int, ...] = ()
    dense_layers: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_experts: int = 1
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)  # slots make a new class, of which super() knows nothing
        if self.index_dim < self.head_dim:
            raise ModelError(
                f"index_head_dim {self.index_dim} has no room for the {self.head_dim} dimensions that are turned; "
                "it is at least qk_rope_head_dim: correct config.json"
            )
        if 0 in self.shared_layers:
            raise ModelError(
                "layer 0 has no layer before it to share a selection with; give it a full indexer"
            )
        if self.experts_per_token > self.num_experts:
            raise ModelError(
                f"{self.experts_per_token} experts a token of {self.num_experts}; num_experts_per_tok is at most "
                "n_routed_experts: correct config.json"
            )

    @property
    def query_dim(self) -> int:
        """Width of a query head as the scores are scaled by: both of its parts."""
        return self.nope_dim + self.head_dim

    @property
    def key_shape(self) -> tuple[int, int]:
        """A token's latent and its turned key, side by side: one head for all."""
        return 1, self.latent_rank + self.head_dim

    @property
    def value_shape(self) -> tuple[int, int]:
        """A token's index key: values are read from the latent. Layers without an indexer have the room unused."""
        return 1, self.index_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> DsaConfig:
        """Reads ``config.json`` of a Hugging Face folder, and the end tokens of ``generation_config.json``.

        Raises:
            ModelError: if a file is missing or no JSON object, a field is missing or of the wrong type, or
                the model computes something that the decoder does not.
        """
        return read_dsa_config(folder, ARCHITECTURE)


def read_dsa_config(folder: str | Path, architecture: str) -> DsaConfig:
    """As ``DsaConfig.from_folder``, of a folder that states this architecture."""
    fields, generation = config_fields(folder)
    check_kind(fields, (architecture,))
    rotary = fields.rotary()
    kind = rotary.content.get("rope_type") or rotary.content.get("type") or "default"
    fields.require("rope_type", kind, ["default"])
    for name in ("n_group", "topk_group"):
        fields.require(name, fields.integer(name, 1), [1])
    for name, good in _COMPUTED.items():
        fields.require(name, fields.content.get(name, good), [good])
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", fields.integer("num_key_value_heads", heads), [heads])
    starts = fields.tokens("bos_token_id")
    return DsaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=fields.integer("qk_rope_head_dim"),
        max_position=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-5),
        rope_theta=rotary.real("rope_theta", 10000.0),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=generation.tokens("eos_token_id") or fields.tokens("eos_token_id"),
        query_rank=fields.integer("q_lora_rank"),
        latent_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        index_heads=fields.integer("index_n_heads"),
        index_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        shared_layers=_shared_layers(fields, layers),
        dense_layers=_dense_layers(fields, layers),
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        expert_size=fields.integer("moe_intermediate_size"),
        shared_experts=fields.integer("n_shared_experts", 0, least=0),
        routed_scale=fields.real("routed_scaling_factor", 1.0),
    )


def _shared_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    kinds = _each_layer(fields, "indexer_types", layers, INDEXER_TYPES)
    if kinds is None:  # the schedule that transformers writes out
        for name in ("index_topk_pattern", "index_topk_freq"):
            fields.require(f"{name} without indexer_types", fields.content.get(name) or 1, [1])
        return ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def _dense_layers(fields: Fields, layers: int) -> int:
    kinds = _each_layer(fields, "mlp_layer_types", layers, FEED_FORWARDS)
    if kinds is None:
        return min(fields.integer("first_k_dense_replace", 3, least=0), layers)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise fields.malformed("mlp_layer_types", kinds, "a list of dense layers before all sparse ones")
    return dense


def _each_layer(fields: Fields, name: str, layers: int, good: tuple[str, ...]) -> list[str] | None:
    kinds = fields.names(name)
    for kind in kinds or ():
        fields.require(name, kind, good)
    if kinds is not None and len(kinds) != layers:
        raise fields.malformed(name, kinds, f"a list of {layers}, one for each layer,")
    return kinds


DSA_PRESETS: Final[Mapping[str, DsaConfig]] = MappingProxyType(
    {
        "dsa-tiny": DsaConfig(  # of a size for tests and the tape: keys are left out from 16 tokens on
            architecture=ARCHITECTURE,
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_layers=4,
            num_heads=4,
            num_kv_heads=1,
            head_dim=16,
            max_position=1024,
            query_rank=48,
            latent_rank=32,
            nope_dim=16,
            value_dim=16,
            index_heads=4,
            index_dim=32,
            index_topk=16,
            shared_layers=(2,),
            dense_layers=1,
            num_experts=8,
            experts_per_token=2,
            expert_size=48,
            routed_scale=2.5,
            bos_token_id=0,
            eos_token_ids=(1,),
        ),
        "dsa-24": DsaConfig(  # a stack like GLM-5's of a depth that fits one GPU
            architecture=ARCHITECTURE,
            vocab_size=154880,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=24,
            num_heads=64,
            num_kv_heads=1,
            head_dim=64,
            max_position=163840,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            bos_token_id=0,
            eos_token_ids=(1,),
            query_rank=1536,
            latent_rank=512,
            nope_dim=128,
            value_dim=128,
            index_heads=32,
            index_dim=128,
            index_topk=2048,
            dense_layers=3,
            num_experts=64,
            experts_per_token=8,
            expert_size=1536,
            routed_scale=2.5,
        ),
    }
)
"""Shapes with random weights, by the name that opens them."""
