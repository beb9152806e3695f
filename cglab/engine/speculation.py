"""How much is drafted and verified in a step of speculative decoding: the numbers, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from cglab.errors import InputError


@dataclass(frozen=True, slots=True)
class Speculation:
    """Sizes of a draft.

    A draft makes ``topk`` candidates in its first step, and ``topk`` for each of the best ``topk`` in each later one.
    The most probable are verified, together with the token that the target chose last.

    Attributes:
        steps: assistant steps of a draft, and so the most drafted tokens that can be accepted; for a block draft one
            less than a block has tokens.
        topk: candidates of each; with 1 a draft is a chain, otherwise a tree.
        tokens: tokens of a request that are verified at once, that of the target included; None for one of each
            step and branch, ``1 + steps * topk``.
        pinned: mean number of tokens that a verify pass is made to commit, the target's own included: the method
            of S3, for weights that draft nothing worth accepting. None for what the target accepts.

    Raises:
        InputError: for a size out of range, or an acceptance pinned for a tree.
    """

    steps: int = 3
    topk: int = 1
    tokens: int | None = None
    pinned: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "topk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        lowest = self.steps + 1 if self.topk == 1 else 2
        highest = 1 + self.topk + (self.steps - 1) * self.topk**2
        tokens = self.width
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not lowest <= tokens <= highest:
            raise InputError(
                f"{tokens!r} tokens cannot be verified after {self.steps} steps with topk {self.topk}; "
                f"give {lowest} to {highest}, or None"
            )
        if self.pinned is None:
            return
        if self.topk > 1:
            raise InputError("a tree need not be as deep as pinned wants; pin acceptance with topk=1")
        real = isinstance(self.pinned, Real) and not isinstance(self.pinned, bool)
        if not (real and 1 <= self.pinned <= self.steps + 1):
            raise InputError(
                f"a verify pass of {self.steps} steps commits 1 to {self.steps + 1} tokens, "
                f"pinned={self.pinned!r}; give a mean within"
            )

    @property
    def width(self) -> int:
        """Tokens of a request that are verified at once: the root and what was drafted."""
        return 1 + self.steps * self.topk if self.tokens is None else self.tokens

    @property
    def lookahead(self) -> int:
        """Positions after a request's newest token that a step writes."""
        return self.width - 1
