"""Whether a model computes with the weights of before: cached keys and values are worth something only then.

Cheap and thorough: torch counts writes in place and a new tensor has a new address, which costs nothing to ask. But
what is written through ``parameter.data`` is not counted, nor is anything in inference mode; that only the contents
tell, at the price of reading every weight.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn

WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KnownWeights:
    """The weights and buffers of a model, compared with those of the last call.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._versions: tuple[tuple[int, int], ...] = ()
        self._contents: list[int] = []

    def changed(self, *, thorough: bool) -> bool:
        """Whether they are others than at the last call; always at the first.

        Args:
            thorough: compare contents too, and not only with the last call but with the last thorough one.
        """
        tensors = list(chain(self.model.parameters(), self.model.buffers()))
        # An inference tensor counts nothing; torch tells the version nowhere else.
        versions = tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)  # noqa: SLF001
        changed = versions != self._versions
        self._versions = versions
        if thorough:
            contents = torch.stack([fingerprint(t) for t in tensors]).tolist()
            changed |= contents != self._contents
            self._contents = contents
        return changed


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """[] int64: sums of its bits, row by row and column by column, each with a factor of its own.

    Args:
        tensor: any shape; elements of 1, 2, 4 or 8 bytes.
    """
    words = (
        tensor.detach().view(WORDS[tensor.element_size()]).reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    )
    sums = torch.cat([words.sum(axis, dtype=torch.int64) for axis in (0, 1)])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
