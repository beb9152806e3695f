"""Opens a draft model by name: shipped, from a folder, or a published shape with random weights.

There are three kinds, told apart by the architecture in ``config.json``: assistants, block drafts and NextN layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from cglab.errors import ModelError, nearest
from cglab.models.assistant import ARCHITECTURE as ASSISTANT
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.block_draft import ARCHITECTURE as BLOCK_DRAFT
from cglab.models.block_draft import BlockDraft, BlockDraftConfig, spread
from cglab.models.checkpoint import check_draft_shards, read_shards, shard_files
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import DSA_PRESETS, DsaConfig
from cglab.models.fields import Fields, read_json
from cglab.models.layout import draft_layout
from cglab.models.loading import fill_randomly
from cglab.models.nextn import ARCHITECTURE as NEXTN
from cglab.models.nextn import NextN, nextn_config, nextn_config_from
from cglab.models.sources import shipped_drafts
from cglab.settings import user_path

DraftModel: TypeAlias = Assistant | BlockDraft | NextN
DraftConfig: TypeAlias = AssistantConfig | BlockDraftConfig | DsaConfig

DRAFT_PRESETS: Final[Mapping[str, DraftConfig]] = MappingProxyType(
    {
        "gemma-31b-like-assistant": AssistantConfig(
            vocab_size=262144, backbone_size=5376, hidden_size=1024, intermediate_size=4096,
            layer_kinds=("sliding", "sliding", "sliding", "full"), num_heads=32, num_kv_heads=16, head_dim=256,
            own_head=True,
        ),
        "qwen3-8b-dflash": BlockDraftConfig(
            vocab_size=151936, backbone_size=4096, intermediate_size=12288, num_layers=5, num_heads=32, num_kv_heads=8,
            head_dim=128, block_size=8, mask_token_id=151669,  # the first row that is no token of the tokenizer
            context_layers=spread(36, 5),
        ),
        "dsa-24-nextn": nextn_config(DSA_PRESETS["dsa-24"]),
    }
)  # fmt: skip
"""Shapes with random weights, by the name that opens them."""


class LoadedDraft(NamedTuple):
    """A draft model, bound to its target.

    Attributes:
        model: on the target's device and in its dtype, in evaluation mode and without gradients.
        config: its shape.
        weights: where the weights come from.
    """

    model: DraftModel
    config: DraftConfig
    weights: Literal["trained", "random"]

    @property
    def assistant(self) -> Assistant:
        """The model, where only an assistant will do.

        Raises:
            ModelError: if it is a draft of the other kind.
        """
        if not isinstance(self.model, Assistant):
            raise _not_an_assistant(self.config)
        return self.model


class DraftSource(NamedTuple):
    """A draft that was found and of which no weight is loaded.

    Attributes:
        config: its shape.
        folder: where its weights are; None for a shape with random weights.
    """

    config: DraftConfig
    folder: Path | None

    @property
    def assistant(self) -> AssistantConfig:
        """The shape, where only an assistant's will do.

        Raises:
            ModelError: if it is that of a draft of the other kind.
        """
        if not isinstance(self.config, AssistantConfig):
            raise _not_an_assistant(self.config)
        return self.config


def _not_an_assistant(config: DraftConfig) -> ModelError:
    return ModelError(
        f"a {ASSISTANT} is needed and this draft is a {architecture_of(config)}; open an assistant"
    )


def find_draft(name_or_folder: str | Path, made: Iterable[str] = ()) -> DraftSource:
    """Finds a draft and reads its shape.

    Args:
        name_or_folder: a shape with random weights, a shipped draft, or a folder.
        made: names of drafts that the caller makes himself, for the message.

    Raises:
        ModelError: if there is no such draft, or it is none.
    """
    if not isinstance(name_or_folder, str | Path):
        raise ModelError(f"a draft is named by a string or a path, not by {name_or_folder!r}")
    text = str(name_or_folder)
    if text in DRAFT_PRESETS:
        return DraftSource(DRAFT_PRESETS[text], None)
    shipped = shipped_drafts()
    folder = shipped.get(text, user_path(name_or_folder))
    if not text or not folder.is_dir():
        random = (*made, *DRAFT_PRESETS)
        raise ModelError(
            f"no draft {text!r}{nearest(text, (*shipped, *random))}: it is no shipped draft "
            f"({', '.join(shipped) or 'none here'}), no shape with random weights ({', '.join(random)}) and no local "
            "folder; give one of these"
        )
    return DraftSource(_config_of(folder), folder)


def _config_of(folder: Path) -> DraftConfig:
    """The shape in a folder, of the kind that its configuration names."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: the folder of a draft is expected; check the path")
    fields = Fields(read_json(path), path)
    (found, *_) = fields.names("architectures") or ["missing"]
    fields.require("architectures", found, [ASSISTANT, BLOCK_DRAFT, NEXTN])
    if found == NEXTN:
        return nextn_config_from(folder)
    kind = AssistantConfig if found == ASSISTANT else BlockDraftConfig
    return kind.from_folder(folder)


def architecture_of(config: DraftConfig) -> str:
    """What the configuration of such a draft states."""
    if isinstance(config, DsaConfig):
        return NEXTN
    return ASSISTANT if isinstance(config, AssistantConfig) else BLOCK_DRAFT


def _unfilled(config: DraftConfig, device: torch.device | str, dtype: torch.dtype) -> DraftModel:
    """A model of this shape whose weights are uninitialised."""
    if isinstance(config, AssistantConfig):
        return Assistant(config, device=device, dtype=dtype)
    if isinstance(config, DsaConfig):
        return NextN(config, device=device, dtype=dtype)
    return BlockDraft(config, device=device, dtype=dtype)


def load_draft(source: str | Path | DraftSource, target: Decoder, *, seed: int = 0) -> LoadedDraft:
    """Opens a draft for a target.

    Args:
        source: what ``find_draft`` found, or takes.
        target: the model that it drafts for: its device, dtype, embedding and head are used.
        seed: of random weights.

    Raises:
        ModelError: if there is no such draft, it is damaged, or it is another target's; no memory stays allocated.
    """
    config, folder = source if isinstance(source, DraftSource) else find_draft(source)
    with torch.device("meta"):
        empty = _unfilled(config, "meta", target.rotary.dtype)
    empty.bind(target)  # before a weight is allocated
    shards = [] if folder is None else shard_files(folder)
    if folder is not None:
        check_draft_shards(shards, draft_layout(empty), architecture_of(config))
    model = _unfilled(config, target.rotary.device, target.rotary.dtype)
    model.eval().requires_grad_(requires_grad=False).bind(target)
    try:
        if folder is None:
            fill_randomly(model, config.num_layers, seed)
        else:
            read_shards(shards, model, draft_layout(model))
    except BaseException:
        model.to("meta")  # the traceback holds the model: let go of its memory
        raise
    return LoadedDraft(model, config, "random" if folder is None else "trained")
