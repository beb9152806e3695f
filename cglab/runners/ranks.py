"""Ranks that each hold a part of the vocabulary, and the one collective that choosing a token takes.

On CUDA NCCL's kernels are recorded as any other. On a CPU the tape records one operator that starts Gloo's collective
and waits for it: the collective's own operator returns before its result is there, and a replay would not wait.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

RECORDED: Final = {"cuda": "nccl", "cpu": "gloo"}
"""Which backend's collectives a recording holds, by the device of the tensors."""

_groups: dict[str, dist.ProcessGroup] = {}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name changed


class Ranks(Protocol):
    """Processes with contiguous parts of one vocabulary, ascending by rank.

    Attributes:
        count: how many.
    """

    count: int

    def unrecorded(self, device: torch.device) -> str | None:
        """Why a recording cannot hold ``gather`` of tensors on a device; None if it can."""
        ...

    def gather(self, mine: Tensor) -> Tensor:
        """[count, *mine.shape]: what each rank gave, in order; ``mine`` has at least one axis."""
        ...


class ProcessRanks:
    """The ranks of a ``torch.distributed`` group, which all record and replay the same steps.

    Args:
        group: initialised; None for the whole world.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()  # noqa: SLF001 (told nowhere else)
        self.count = dist.get_world_size(self.group)
        _groups[self.group.group_name] = self.group

    def unrecorded(self, device: torch.device) -> str | None:
        """See ``Ranks``."""
        backend, good = dist.get_backend(self.group), RECORDED.get(device.type)
        return None if backend == good else f"{backend} on {device.type}, recorded there: {good or 'none'}"

    def gather(self, mine: Tensor) -> Tensor:
        """See ``Ranks``."""
        gathered = mine.new_empty((self.count * len(mine), *mine.shape[1:]))  # Gloo takes no other form
        _gather(gathered, mine.contiguous(), self.group.group_name)
        return gathered.view(self.count, *mine.shape)


@torch.library.custom_op("cglab::gather_ranks", mutates_args=("gathered",))
def _gather(gathered: Tensor, mine: Tensor, group: str) -> None:
    _all_gather(gathered, mine, group=_groups[group])
