"""Who computes each phase, and what comes of it: what an engine and a speculator ask of who keeps the runners."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.decode import DecodeRunner
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.prefill import PrefillRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner


class Forward(NamedTuple):
    """What a batch came to; all of it may be overwritten by the next step.

    Attributes:
        tokens: [chunks] int64, the next token of every chunk that reaches its request's end.
        logits: [chunks, vocabulary], what it was chosen from.
        hidden: [tokens, hidden_size], normed, of a prefill; None of a decode step.
    """

    tokens: Tensor
    logits: Tensor
    hidden: Tensor | None = None


class Phases(Protocol):
    """The runners of plain decoding."""

    def decode(self, *, sampling: bool) -> DecodeRunner:
        """The runner of decode steps; with ``sampling`` one that draws at each request's temperature."""
        ...

    def prefill(self) -> PrefillRunner:
        """The runner of prompt chunks."""
        ...


class VerifyPhases(Protocol):
    """The target's side of speculative decoding."""

    def verify(self) -> VerifyRunner:
        """The target over a whole draft of each request."""
        ...


class DraftPhases(VerifyPhases, Protocol):
    """The same with an assistant."""

    def draft_loop(self) -> DraftLoopRunner:
        """The assistant's steps after the seed; or all of them, where ``seed_step`` is None."""
        ...

    def seed_step(self) -> SeedRunner | None:
        """The assistant's first step; None where it is part of the loop."""
        ...


class BlockPhases(VerifyPhases, Protocol):
    """The same with a block draft; the target's runners of prefill and verify feed its cache."""

    def block_draft(self) -> BlockDraftRunner:
        """All tokens of a draft at once."""
        ...


class NextNPhases(VerifyPhases, Protocol):
    """The same with a NextN layer."""

    def draft_extend(self) -> DraftExtendRunner:
        """The layer over what the target has just computed."""
        ...


class AnyPhases(DraftPhases, BlockPhases, NextNPhases, Protocol):
    """The same with a draft of any kind; what it has not is an error to ask for."""
