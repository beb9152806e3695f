"""What every draft has in common: it is bound to a target, and uses what is the target's instead of copies (P85)."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from cglab.errors import ModelError
from cglab.models.body import Body, Portable
from cglab.models.decoder import Decoder

C = TypeVar("C")


class Bound(nn.Module, Generic[C]):
    """A model over another one's embedding, head or cache; its ``bind`` checks the target and sets ``target``.

    The parameters are uninitialised memory until ``loading`` fills them.

    Attributes:
        called: what an error calls it.
        config: its shape.
        body: how its layers are computed; ``ops.use_draft_ops`` changes it.
        place: ``device`` and ``dtype`` of its parameters, as their constructors take them.

    Args:
        config: the shape.
        device: where the parameters are allocated.
        dtype: their dtype.
    """

    called: ClassVar[str]

    def __init__(
        self, config: C, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.body: Body = Portable()
        self.place: dict[str, Any] = {"device": device or "cpu", "dtype": dtype or torch.get_default_dtype()}
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
