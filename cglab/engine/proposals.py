"""What a drafter proposes, and what it is told of its target's passes: the same for every kind of draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.requests import Request
from cglab.engine.segments import ForwardSegments
from cglab.models.decoder import Decoder
from cglab.runners.base import Runner
from cglab.runners.verify import Verified


class Proposal(NamedTuple):
    """What is to be verified beside each request's newest token.

    Attributes:
        tokens: [requests, lookahead] int64; may be overwritten by the next replay.
        tree: ``parent_list`` and ``top_scores_index`` as ``draft_tree.Draft`` has them; empty for a chain.
    """

    tokens: Tensor
    tree: Mapping[str, Tensor]


class Pass(NamedTuple):
    """A verify pass of which something was accepted.

    Attributes:
        requests: of the step; what they have accepted is no part of them yet.
        paths: accepted nodes of each, the root first.
        tokens: what each commits: all but the last are in the cache.
        verified: what the target said, which the next replay may overwrite.
    """

    requests: Sequence[Request]
    paths: Sequence[list[int]]
    tokens: Sequence[list[int]]
    verified: Verified


class Drafter(Protocol):
    """Proposes tokens for a target.

    Attributes:
        target: whose tokens are drafted.
        overlap: tokens of the next page that what it keeps in a page depends on.
    """

    target: Decoder
    overlap: int

    @property
    def runners(self) -> dict[str, Runner[Any]]:
        """The runners in use, by technique and in order."""
        ...

    def prefilled(
        self,
        chunks: Sequence[Chunk],
        hidden: Tensor,
        tokens: Sequence[Sequence[int]],
        segments: ForwardSegments,
    ) -> None:
        """Takes note of a prefill.

        Args:
            chunks: what was computed, requests that ride along included.
            hidden: [tokens, hidden_size], the target's normed hidden states; may be overwritten by the next replay.
            tokens: the next token of every chunk that reaches its request's end.
            segments: where the device time of each forward is noted.
        """
        ...

    @property
    def before_verify(self) -> Mapping[str, Runner[int]]:
        """Those of the runners that a step begins with, in order."""
        ...

    def start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the first of these is given; ``inputs`` as ``draft`` takes them."""
        ...

    def proposal(self, output: Any) -> Proposal:
        """What the last of these has drafted; without any, what ``start`` gave."""
        ...

    def draft(self, inputs: Mapping[str, Tensor], segments: ForwardSegments) -> Proposal:
        """Drafts for every request.

        Args:
            inputs: int64: ``newest`` [requests], the tokens that are not in the cache yet; ``cached`` [requests], how
                many are; and what the verify step is given.
            segments: where the device time of each forward is noted.
        """
        ...

    def passed(self, passed: Pass, segments: ForwardSegments) -> None:
        """Takes note of a verify pass, once accepted tokens lie at their positions.

        Args:
            passed: what it came to.
            segments: where the device time of each forward is noted.
        """
        ...
