"""What every draft has in common: it is bound to a target, and uses what is the target's instead of copies (P85)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from cglab.errors import ModelError
from cglab.models.decoder import Decoder


class Bound(nn.Module):
    """A model over another one's embedding, head or cache; its ``bind`` checks the target and sets ``target``.

    Attributes:
        called: what an error calls it.
    """

    called: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._targets: tuple[Decoder, ...] = ()  # in a tuple, or its parameters would be this model's too

    @property
    def target(self) -> Decoder:
        """Whose embedding, head and rotary table it uses.

        Raises:
            ModelError: before ``bind``.
        """
        if not self._targets:
            raise ModelError(f"{self.called} is bound to no target; call bind(target) before its first step")
        return self._targets[0]

    @property
    def rotary(self) -> Tensor:
        """[max_position, 2, head_dim], the target's rotary table."""
        return self.target.rotary
