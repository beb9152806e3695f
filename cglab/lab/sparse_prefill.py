"""How a lab prefills a model with latent attention: the arm that three toggles make, and from which bucket on (S3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from cglab.errors import ToggleError
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import DsaConfig
from cglab.models.kv import PagedKV
from cglab.models.nextn import NextN
from cglab.runners.base import GraphGroup
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.dsa_choice import DsaChoiceRunner
from cglab.runners.dsa_policy import Parts, SelectionRule, floor_by_rule, gates
from cglab.runners.dsa_prefill import DsaPrefillRunner
from cglab.runners.pipeline_stage import DsaStageRunner, PipelineStageRunner
from cglab.settings import NEXTN_SWITCH, read_settings

CPU_ROWS: Final = 4
"""Rows up to which the CPU's matrix library has kernels of its own, as ``cglab bench dsa`` measures it."""


def kernel_rows(device: torch.device) -> int:
    """Rows up to which a device's libraries may choose another kernel: on a GPU half its multiprocessors (S3)."""
    if device.type != "cuda":
        return CPU_ROWS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


def require_latent(config: ModelConfig, what: str) -> DsaConfig:
    """The shape of a model with latent attention.

    Raises:
        ToggleError: for any other, which has nothing of what is asked for.
    """
    if not isinstance(config, DsaConfig):
        raise ToggleError(
            f"{what} needs latent attention, and {config.architecture} has none; open another model, such as "
            'cglab.open("dsa-tiny")'
        )
    return config


@dataclass(frozen=True, slots=True)
class SparseArm:
    """What the toggles say of a sparse prefill.

    Attributes:
        prefill: ``full`` leaves no break (T9b), where attention and preparation are recorded too.
        attention: ``graph`` or ``eager`` (T8).
        preparation: ``graph`` or ``eager`` (T9), or ``auto``: with the selection too where costs say so (T9b).
        max_cached: cached tokens that a full recording has room for; None for as many as the largest bucket has.
        selection: of ``auto``, reads the rule of recorded costs; by default there are none.
    """

    prefill: str
    attention: str = "graph"
    preparation: str = "graph"
    max_cached: int | None = None
    selection: Callable[[], SelectionRule] = field(default=SelectionRule, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What coverage and memory call it: the mode, and what is not as it is by default."""
        toggles = {"dsa_attention": self.attention, "dsa_indexer_prep": self.preparation}
        told = [f"{name} {value}" for name, value in toggles.items() if value != "graph"]
        if self.prefill == "full" and self.max_cached is not None:
            told.append(f"room for {self.max_cached} cached")
        return ", ".join((self.prefill, *told))

    @property
    def parts(self) -> Parts:
        """Why each part of a layer is a break, kill switches included; of ``auto`` where the break stays."""
        return self._gates(selection=self.prefill == "full")

    def _gates(self, *, selection: bool) -> Parts:
        return gates(
            attention=self.attention == "graph",
            preparation=self.preparation != "eager",
            selection=selection,
            switches=read_settings().switches,
        )

    def make(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        floor: int | None = None,
        **sizes: Any,
    ) -> DsaPrefillRunner:
        """The runner of this arm.

        Args:
            model: the decoder.
            kv: its cache.
            group: pool and shared buffers.
            buckets: token counts to capture.
            options: padding and the rest; the backend is the arm's.
            floor: the smallest bucket with recorded parts; None for S3's rule.
            **sizes: as ``PrefillRunner`` takes them.
        """
        options = replace(options, backend="eager" if self.prefill == "eager" else "breakable")
        if floor is None:
            floor = floor_by_rule(buckets, kernel_rows(group.device))
        made: Callable[..., DsaPrefillRunner] = DsaPrefillRunner
        if self.preparation == "auto" and self.prefill == "breakable":
            made = partial(DsaChoiceRunner, whole=self._gates(selection=True), rule=self.selection())
        return made(
            model,
            kv,
            group,
            buckets,
            options,
            parts=self.parts,
            floor=floor,
            max_cached=self.max_cached,
            **sizes,
        )

    def extend(
        self,
        layer: NextN,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        floor: int | None = None,
    ) -> DraftExtendRunner:
        """The extend of a NextN layer beside it, eager where ``CGLAB_DISABLE_NEXTN_GRAPH=1``; arguments as ``make``.

        Its selection is a break in every arm, as the seed is published after it.
        """
        if options.backend != "eager" and NEXTN_SWITCH in read_settings().switches:
            options = replace(options, kill_switch=f"{NEXTN_SWITCH}=1")
        parts = replace(self.parts, select=self.parts.select or Miss(Reason.LIVE_EXTENT))
        if floor is None:
            floor = floor_by_rule(buckets, kernel_rows(group.device))
        return DraftExtendRunner(layer, kv, group, buckets, options, parts=parts, floor=floor)


def stage_runner(
    model: Decoder, kv: PagedKV, group: GraphGroup, buckets: Sequence[int], options: Options
) -> PipelineStageRunner:
    """The prefill of a pipeline's stage; of a model with latent attention with all recorded but scores and top-k.

    Args:
        model: the stage.
        kv: the cache of its layers.
        group: pool and shared buffers.
        buckets: token counts to capture.
        options: backend (breakable or eager), padding and the rest.
    """
    if not isinstance(model.config, DsaConfig):
        return PipelineStageRunner(model, kv, group, buckets, options)
    floor = floor_by_rule(buckets, kernel_rows(group.device))
    return DsaStageRunner(
        model, kv, group, buckets, options, parts=SparseArm(options.backend).parts, floor=floor
    )


def extend_sizes(buckets: Sequence[int], prefill_buckets: Sequence[int]) -> list[int]:
    """Token counts of draft extends to capture: those of prefill chunks, and one or two tokens of each request.

    Args:
        buckets: batch sizes of verify passes.
        prefill_buckets: token counts of prefill steps.
    """
    return sorted({*buckets, *(2 * size for size in buckets), *prefill_buckets})
