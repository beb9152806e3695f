"""Modules that nobody here wrote, each in a tiny shape with random weights: what the bench ``zoo`` tries to capture.

A specimen is captured as it stands: its own ``forward``, its own names, no line of it changed. Where that is refused
and one submodule is the reason, that submodule runs as a break.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]

VOCABULARY: Final = 64
LENGTH: Final = 8
"""Tokens, or steps of a sequence."""
WIDTH: Final = 32
_DECODER: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_NO_CACHE: Final[Mapping[str, Any]] = {"use_cache": False}


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One module, and how it is called.

    Attributes:
        build: makes it, its weights drawn from torch's default generator.
        inputs: its inputs by name for a number of rows, the rows on the first axis.
        constants: plain arguments beside them.
        buckets: sizes that are captured.
        padding: whether fewer rows than a bucket's are padded up to it.
        breaks: paths of submodules that run as breaks where a whole capture is refused.
        package: that it comes from.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    constants: Mapping[str, Any] = field(default_factory=dict)
    buckets: Sequence[int] = (2, 4)
    padding: bool = True
    breaks: Sequence[str] = ()
    package: str = "torch"


class UNetBlock(nn.Module):
    """One level of a diffusion UNet: residual with time embedding, down, self-attention, up, and the skip."""

    def __init__(self, channels: int = 16, frequencies: int = 8) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.time = nn.Sequential(nn.Linear(2 * frequencies, WIDTH), nn.SiLU(), nn.Linear(WIDTH, channels))
        self.enter = nn.Conv2d(4, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """The noise in ``sample`` [rows, 4, height, width] at ``timestep`` [rows], in the shape of ``sample``."""
        angles = timestep[:, None] * torch.exp(-torch.arange(self.frequencies, device=timestep.device) / 2)
        moment = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = nn.functional.silu(self.norm(self.enter(sample))) + moment[:, :, None, None]
        low = self.down(skip)
        pixels = low.flatten(2).transpose(1, 2)
        low = low + self.attention(pixels, pixels, pixels)[0].transpose(1, 2).unflatten(2, low.shape[2:])
        return torch.as_tensor(self.leave(torch.cat([self.up(low), skip], 1)))


class StaticDecode(nn.Module):
    """A decode step of Qwen3 on a static cache that it keeps from step to step, as a serving loop does."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, **_DECODER))
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=LENGTH)
        known = inspect.signature(type(self.model).forward).parameters  # renamed after 5.17
        self.kept = {"cache" if "cache" in known else "past_key_values": self.cache, "use_cache": True}

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [rows, 1, vocabulary] of tokens [rows, 1] at positions [rows, 1]."""
        step: Any = self.model(input_ids=input_ids, position_ids=position_ids, **self.kept)
        return torch.as_tensor(step.logits)


def _ids(rows: int) -> Inputs:
    return {"input_ids": torch.randint(1, VOCABULARY, (rows, LENGTH))}


def _masked_ids(rows: int) -> Inputs:
    """The first row is whole, and each after it has a padded token more."""
    ends = LENGTH - torch.arange(rows)[:, None] % (LENGTH - 1)
    return _ids(rows) | {"attention_mask": (torch.arange(LENGTH) < ends).long()}


def _next_ids(rows: int) -> Inputs:
    return {"input_ids": torch.randint(1, VOCABULARY, (rows, 1)), "position_ids": torch.full((rows, 1), 3)}


def _sequence(name: str, width: int = WIDTH) -> Callable[[int], Inputs]:
    return lambda rows: {name: torch.randn(rows, LENGTH, width)}


def _hidden_ends(rows: int) -> Inputs:
    hidden = torch.arange(LENGTH).expand(rows, LENGTH) >= LENGTH - 3
    return {"src": torch.randn(rows, LENGTH, WIDTH), "src_key_padding_mask": hidden}


def _pair(rows: int) -> Inputs:
    return {"src": torch.randn(rows, LENGTH, WIDTH), "tgt": torch.randn(rows, LENGTH // 2, WIDTH)}


def _noise(rows: int) -> Inputs:
    return {"sample": torch.randn(rows, 4, 8, 8), "timestep": torch.rand(rows) * 100}


def _of(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    """A model of ``transformers`` by the names of its class and of its configuration's."""

    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
        return built

    return build


def _encoder(*, nested: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def _transformers(
    build: Callable[[], nn.Module], inputs: Callable[[int], Inputs] = _ids, **more: Any
) -> Specimen:
    return Specimen(build=build, inputs=inputs, package="transformers", **{"constants": _NO_CACHE, **more})


_BERT = _of(
    "BertModel", "BertConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=64,
)  # fmt: skip
_GPT2 = _of(
    "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
_MIXTRAL: Final[Mapping[str, Any]] = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}

SPECIMENS: Final[Mapping[str, Specimen]] = {
    "bert": _transformers(_BERT, constants={}),
    "bert-masked": _transformers(_BERT, _masked_ids, constants={}),
    "gpt2": _transformers(_GPT2),
    "gpt2-masked": _transformers(_GPT2, _masked_ids),
    "gpt2-cache": _transformers(_GPT2, constants={"use_cache": True}),
    "t5-encoder": _transformers(
        _of("T5EncoderModel", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2,
            num_heads=2), constants={},
    ),
    "qwen3": _transformers(_of("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, **_DECODER)),
    "qwen3-masked": _transformers(_of("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, **_DECODER), _masked_ids),
    "qwen3-static-cache": _transformers(StaticDecode, _next_ids, constants={}, buckets=(4,), padding=False),
    "mamba2": _transformers(
        _of("Mamba2ForCausalLM", "Mamba2Config", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2,
            num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)
    ),
    "qwen3-moe": _transformers(
        _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=16, moe_intermediate_size=32, num_experts=4,
            num_experts_per_tok=2, **_DECODER)
    ),
    "mixtral": _transformers(_of("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL)),
    "mixtral-loop": _transformers(
        _of("MixtralForCausalLM", "MixtralConfig", experts_implementation="eager", **_MIXTRAL),
        breaks=("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
    ),
    "encoder": Specimen(build=_encoder, inputs=_sequence("src")),
    "encoder-masked": Specimen(build=_encoder, inputs=_hidden_ends),
    "encoder-masked-dense": Specimen(build=lambda: _encoder(nested=False), inputs=_hidden_ends),
    "transformer": Specimen(build=lambda: nn.Transformer(WIDTH, 2, 1, 1, 64, batch_first=True), inputs=_pair),
    "lstm": Specimen(
        build=lambda: nn.LSTM(WIDTH, 16, 2, batch_first=True), inputs=_sequence("input"), buckets=(4,), padding=False
    ),
    "gru": Specimen(
        build=lambda: nn.GRU(WIDTH, 16, bidirectional=True, batch_first=True), inputs=_sequence("input")
    ),
    "unet-block": Specimen(build=UNetBlock, inputs=_noise),
}  # fmt: skip
"""By name. ``-masked``: rows of several lengths; ``-cache``: returns its key-value cache; ``-static-cache``: keeps it;
``-loop``: one expert after another, those that were chosen; ``-dense``: without torch's nested tensors."""
