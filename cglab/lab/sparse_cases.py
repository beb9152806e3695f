"""Random sequences of prefill batches of a model with latent attention, in every arm of what is recorded."""

from __future__ import annotations

from typing import ClassVar

from cglab.graphs.options import Options
from cglab.lab.prefill_cases import BUCKETS, PrefillOracles
from cglab.lab.sparse_prefill import SparseArm
from cglab.runners.dsa_policy import SelectionRule
from cglab.runners.prefill import PrefillRunner

FLOOR = 8
"""Between the buckets, so that steps on both sides of it are among the cases."""


CHOICE = SelectionRule(((0, BUCKETS[-1]), (BUCKETS[-1], BUCKETS[-2])))
"""So that among the cases are steps of both kinds, and of both rooms."""


class SparseOracles(PrefillOracles):
    """The arms of one technique, padded and exact."""

    arms: ClassVar[tuple[SparseArm, ...]]

    def make_runners(self) -> dict[tuple[str, bool], PrefillRunner]:
        """By arm and padding."""
        return {
            (arm.name, padding): arm.make(
                self.loaded.model, self.kv, self.group, BUCKETS, Options(padding=padding, strict=True, lazy=True),
                floor=FLOOR,
            )
            for arm in self.arms
            for padding in (True, False)
        }  # fmt: skip


class SparseAttentionOracles(SparseOracles):
    """T8: attention recorded, and left to breaks."""

    technique = "dsa_attention"
    arms = (
        SparseArm("breakable", preparation="eager"),
        SparseArm("breakable", attention="eager", preparation="eager"),
    )


class IndexerOracles(SparseOracles):
    """T9 and T9b: preparation recorded, all of it, and one or the other by the step."""

    technique = "dsa_indexer_prep"
    arms = (
        SparseArm("breakable"),
        SparseArm("full"),
        SparseArm("breakable", preparation="auto", selection=lambda: CHOICE),
    )
