"""The NextN layer: a draft of one decoder layer over its target's normed hidden states, with a cache of its own (S3).

At position t it takes the hidden state that the target has there and the token that follows, and what comes out
predicts the token after that one. Both inputs are normed and joined by one projection; then come a layer like the
target's last ones and a norm. Embedding, head and rotary table are the target's. Its keys lie at the slots of the
target's position t, so that pages shared between requests hold both (``draft_cache``). The layer is the only one of
``blocks``, so that whatever runs a stack runs it too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.errors import ModelError
from cglab.models.bound import Bound
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.dsa import DsaBlock
from cglab.models.dsa_config import DsaConfig, read_dsa_config

ARCHITECTURE: Final = "GlmMoeDsaForCausalLMNextN"


def nextn_config(target: DsaConfig) -> DsaConfig:
    """The shape of a target's NextN layer: one of its layers, routed and with an indexer."""
    return replace(
        target,
        architecture=ARCHITECTURE,
        num_layers=1,
        dense_layers=0,
        shared_layers=(),
        tie_embeddings=False,
    )


def nextn_config_from(folder: str | Path) -> DsaConfig:
    """Reads ``config.json`` of a NextN layer's folder: its target's, with one layer.

    Raises:
        ModelError: as ``DsaConfig.from_folder``, and for more than one layer.
    """
    config = read_dsa_config(folder, ARCHITECTURE)
    if config.num_layers != 1 or config.dense_layers:
        raise ModelError(
            f"{folder}: a NextN layer is one routed layer, num_hidden_layers is {config.num_layers} and "
            f"{config.dense_layers} of them dense; give num_hidden_layers 1 and first_k_dense_replace 0"
        )
    return config


def require_own(layer: DsaConfig, target: ModelConfig) -> None:
    """Checks that a NextN layer is one of a target's.

    Raises:
        ModelError: saying in what they differ.
    """
    if not isinstance(target, DsaConfig):
        raise ModelError(
            f"a NextN layer drafts for a model with latent attention, not for {target.architecture}; "
            "open its own target"
        )
    for name in ("vocab_size", "hidden_size", "head_dim"):
        mine, other = getattr(layer, name), getattr(target, name)
        if mine != other:
            raise ModelError(f"the NextN layer's {name} is {mine}, the target's {other}; open its own target")


class NextN(Bound[DsaConfig]):
    """A NextN layer; ``bind`` makes it a target's."""

    called = "the NextN layer"

    def __init__(
        self, config: DsaConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        place = self.place
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = skip_init(nn.RMSNorm, width, eps=eps, **place)
        self.hidden_norm = skip_init(nn.RMSNorm, width, eps=eps, **place)
        self.join = skip_init(nn.Linear, 2 * width, width, bias=False, **place)
        self.blocks = nn.ModuleList([DsaBlock(config, routed=True, **place)])
        self.norm = skip_init(nn.RMSNorm, width, eps=eps, **place)

    def bind(self, target: Decoder) -> None:
        """Shares a target's embedding, head and rotary table, before any capture (P85).

        Raises:
            ModelError: if it is not a layer of this target.
        """
        require_own(self.config, target.config)
        self._targets = (target,)

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """One step over any tokens of any requests: a draft, or the extend after a prefill chunk.

        Args:
            input_ids: [T] int64, for each token of the target the one that follows it.
            hidden: [T, hidden_size], the target's normed hidden state of each token, or what this returned before.
            positions: [T] int64, of the target's tokens.
            attend: the step over the layer's own cache; see ``LatentAttend``.

        Returns:
            [T, hidden_size], normed; by the target's head it predicts the token after ``input_ids``.
        """
        embedded = self.embedding_norm(self.target.embedding(input_ids))
        joined = self.join(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))
        return self.body(self, joined, self.rotary.index_select(0, positions), attend)
