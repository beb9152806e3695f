"""Random sequences of draft extends of a NextN layer: the chunks of a prefill, over hidden states that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import step_inputs
from cglab.engine.speculation import Speculation
from cglab.graphs.options import Options
from cglab.lab.drafting import Drafting
from cglab.lab.prefill_cases import BUCKETS, PrefillOracles
from cglab.lab.sparse_cases import FLOOR
from cglab.lab.sparse_prefill import SparseArm, require_latent
from cglab.models.drafts import DraftSource, load_draft
from cglab.models.loading import LoadedModel
from cglab.models.nextn import nextn_config
from cglab.runners.prefill import PrefillRunner


class ExtendOracles(PrefillOracles):
    """T10: the extend with attention and preparation recorded and left to breaks, padded and exact."""

    technique = "draft_extend"

    def __init__(self, loaded: LoadedModel, *args: Any) -> None:
        shape = nextn_config(require_latent(loaded.config, self.technique))
        self.layer = load_draft(DraftSource(shape, None), loaded.model).model
        super().__init__(loaded, *args)

    def use_ops(self, ops: str) -> None:
        """Sets the form of the target; the layer has its own, and its cache is made beside the target's."""
        super().use_ops(ops)
        self.drafting = Drafting.over(self.kv, self.layer, Speculation(steps=1))
        self.draft_kv = self.drafting.kv

    def make_runners(self) -> dict[tuple[str, bool], PrefillRunner]:
        """By arm and padding."""
        arms = SparseArm("breakable"), SparseArm("breakable", attention="eager", preparation="eager")
        return {
            (arm.name, padding): arm.extend(
                *self.drafting.nextn, self.group, BUCKETS,
                Options("breakable", padding=padding, strict=True, lazy=True), floor=FLOOR,
            )
            for arm, padding in product(arms, (True, False))
        }  # fmt: skip

    def inputs(self, runner: PrefillRunner, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """See ``PrefillOracles``; any token may follow a token, and any hidden state belong to it."""
        names = [name for name in runner.inputs if name != "hidden"]
        shape = sum(chunk.length for chunk in chunks), self.loaded.config.hidden_size
        drawn = torch.from_numpy(self.random.standard_normal(shape))
        hidden = drawn.to(self.device, self.loaded.model.embedding.weight.dtype)
        return {**step_inputs(chunks, names, self.kv), "hidden": hidden}
