"""Opens a model by name: shipped, from a folder, from the hub, or a published shape with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from cglab.errors import ModelError
from cglab.models.checkpoint import check_shards, read_shards, shard_files
from cglab.models.config import ARCHITECTURES, ModelConfig, architecture_of, config_fields
from cglab.models.decoder import Decoder
from cglab.models.dsa import DsaDecoder, dsa_layout
from cglab.models.dsa_config import ARCHITECTURE as DSA
from cglab.models.dsa_config import DSA_PRESETS, DsaConfig
from cglab.models.layout import Piece, checkpoint_layout
from cglab.models.presets import PRESETS
from cglab.models.sources import find_folder
from cglab.models.tokenizer import Tokenizer

INTO_STREAM: Final = (
    "attention.output.weight", "feed_forward.down.weight", "feed_forward.shared.down.weight", "feed_forward.down",
)  # fmt: skip
"""How the names end of what is added to the residual stream."""


class LoadedModel(NamedTuple):
    """A model ready to run.

    Attributes:
        model: the decoder, on its device, in evaluation mode and without gradients.
        config: its shape.
        tokenizer: its tokenizer; None if the folder has none.
        weights: where the weights come from.
    """

    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer | None
    weights: Literal["trained", "random"]


class ModelSource(NamedTuple):
    """A model that was found and of which no weight is loaded.

    Attributes:
        config: its shape.
        folder: where its weights are; None for a published shape, whose weights are random.
    """

    config: ModelConfig
    folder: Path | None


def find_model(name_or_folder: str | Path) -> ModelSource:
    """Finds a model and reads its shape.

    Args:
        name_or_folder: a preset (random weights, byte-level tokenizer), a shipped model, a Hugging Face
            folder, or a hub id.

    Raises:
        ModelError: if there is no such model, or one of an unsupported kind.
    """
    name = str(name_or_folder)
    if config := PRESETS.get(name) or DSA_PRESETS.get(name):
        return ModelSource(config, None)
    folder = find_folder(name_or_folder)
    fields, _ = config_fields(folder)
    architecture = architecture_of(fields)
    fields.require("architectures", architecture, (*ARCHITECTURES, DSA))
    kind = DsaConfig if architecture == DSA else ModelConfig
    return ModelSource(kind.from_folder(folder), folder)


def decoder_of(config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape whose parameters are uninitialised memory."""
    kind = DsaDecoder if isinstance(config, DsaConfig) else Decoder
    return kind(config, device=device, dtype=dtype)  # type: ignore[arg-type]


def layout_of(config: ModelConfig) -> dict[str, Piece]:
    """Every tensor that a checkpoint of this shape must hold, and its place in the decoder."""
    return dsa_layout(config) if isinstance(config, DsaConfig) else checkpoint_layout(config)


def load_model(
    source: str | Path | ModelSource, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> LoadedModel:
    """Opens a model.

    Args:
        source: what ``find_model`` found, or takes.
        device: where the weights go; they are created there, never moved.
        dtype: dtype of the weights and of the computation.
        seed: of random weights; the same seed gives the same weights on the same kind of device.

    Returns:
        The model with its shape, tokenizer and the origin of its weights.

    Raises:
        ModelError: if there is no such model, or it is damaged, incomplete or of an unsupported kind. No
            memory stays allocated.
    """
    config, folder = source if isinstance(source, ModelSource) else find_model(source)
    if folder is None:
        model = random_model(config, device=device, dtype=dtype, seed=seed)
        return LoadedModel(model, config, Tokenizer.byte_level(config.vocab_size), "random")
    shards, layout = shard_files(folder), partial(layout_of, config)
    check_shards(shards, config, layout)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}: "
            "they are of different models; fetch both again"
        )
    model = decoder_of(config, device=device, dtype=dtype)
    try:
        read_shards(shards, model, layout())
    except BaseException:
        model.to("meta")  # the traceback holds the model: let go of its memory
        raise
    return LoadedModel(model.eval().requires_grad_(requires_grad=False), config, tokenizer, "trained")


@torch.no_grad()
def random_model(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Decoder:
    """Makes a decoder with random weights, in place on its device.

    Every matrix has the deviation that keeps the size of what it multiplies; those that add to the residual
    stream are scaled down by its depth, so that activations stay near one at any depth.

    Args:
        config: the shape.
        device: where the weights are created.
        dtype: their dtype.
        seed: the same seed gives the same weights on the same kind of device.

    Returns:
        The decoder, in evaluation mode and without gradients.
    """
    model = decoder_of(config, device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)
    fill_randomly(model, config.num_layers, seed)
    if not config.tie_embeddings:  # it is only looked up
        generator = torch.Generator(device).manual_seed(seed)
        model.embedding.weight.normal_(0.0, 1.0, generator=generator)
    return model


@torch.no_grad()
def fill_randomly(model: nn.Module, layers: int, seed: int) -> None:
    """Random weights for a stack of layers, in place: see ``random_model``.

    Args:
        model: its norms, biases and projections into the residual stream are told by name.
        layers: of the stack.
        seed: the same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            deviation = parameter.shape[-1] ** -0.5
            if name.endswith(INTO_STREAM):
                deviation *= (2 * layers) ** -0.5
            parameter.normal_(0.0, deviation, generator=generator)
