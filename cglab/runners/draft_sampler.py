"""T5, greedy sampling of a block draft over the head that it borrows, inside the draft's recording (S4).

Captured, as the tail of the draft's step: the hidden states of the tokens that are not known yet, cast to the head's
type, times the head, and of each row the first of the best. Static: the head's weight, and which tokens its rows stand
for. Rows of padding and of added vocabulary are computed and never win (P64); of several ranks each finds its own
best, and one collective finds the best of these, the first one of the whole vocabulary (P65). What was chosen is part
of the step's result and of no buffer beside it, so that nothing is left to be read after another step (P62).

It cannot: borrow a head that is quantised or packed, or a part of one that does not say which tokens it holds: the
target's own method scores these, eagerly. It cannot record a collective of a backend that works on the host.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cglab.errors import InputError
from cglab.graphs.coverage import Miss, Reason
from cglab.models.decoder import Decoder
from cglab.runners.ranks import Ranks

DENSE: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types that a matrix product takes as they are; torch counts those of 8 bits as floating point too."""


class Shard(NamedTuple):
    """Which tokens the rows of a head stand for; further rows are padding or added vocabulary.

    Attributes:
        first: the token of row 0.
        tokens: rows that are tokens, one after the other.
    """

    first: int
    tokens: int


def why_eager(
    block_size: int,
    head: nn.Module | None,
    *,
    hidden_size: int,
    shard: Shard | None,
    ranks: Ranks | None = None,
) -> Miss | None:
    """Why a draft's recording cannot hold its sampler; None if it can. S4's conditions, but for those that it need not.

    Args:
        block_size: tokens of a block.
        head: what the target scores with.
        hidden_size: of the draft's hidden states.
        shard: what the head's rows stand for; None where nobody has said.
        ranks: who holds the other parts of the head.
    """
    if block_size < 2:
        return Miss(Reason.BLOCK_OF_ONE, f"block size {block_size}")
    if head is None:
        return Miss(Reason.NO_HEAD)
    weight: Any = getattr(head, "weight", None)
    if (
        type(weight) not in (Tensor, nn.Parameter)
        or weight.dtype not in DENSE
        or weight.layout != torch.strided
    ):
        found = getattr(weight, "dtype", "no weight")
        return Miss(Reason.HEAD_NOT_DENSE, f"{type(head).__name__} with {found} in a {type(weight).__name__}")
    if shard is None:
        return Miss(Reason.SHARD_UNKNOWN, f"{len(weight)} rows" + (f", {ranks.count} ranks" if ranks else ""))
    if weight.dim() != 2 or weight.shape[1] != hidden_size or len(weight) < shard.tokens:
        wanted = f"at least {shard.tokens} rows of {hidden_size}"
        return Miss(Reason.HEAD_NOT_DENSE, f"{type(head).__name__} of shape {list(weight.shape)}, {wanted}")
    unrecorded = ranks.unrecorded(weight.device) if ranks else None
    return Miss(Reason.COLLECTIVE, unrecorded) if unrecorded else None


class DraftSampler:
    """Chooses the tokens of blocks; the same formulas in a recording and eager.

    Args:
        target: whose head is borrowed.
        block_size: tokens of a block, the known one included.
        in_graph: whether it is to be part of the draft's recording.
        shard: what the head's rows stand for; None for the target's whole vocabulary, where there are no ranks.
        ranks: who holds the other parts of the head.

    Attributes:
        why_eager: why it is no part of the recording; None if it is.
    """

    def __init__(
        self,
        target: Decoder,
        block_size: int,
        *,
        in_graph: bool = True,
        shard: Shard | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.target, self.block_size, self.ranks = target, block_size, ranks
        self.vocabulary, self.hidden_size = target.config.vocab_size, target.config.hidden_size
        if shard is None and ranks is None:
            shard = Shard(0, self.vocabulary)
        miss = why_eager(block_size, self.head, hidden_size=self.hidden_size, shard=shard, ranks=ranks)
        # A head that cannot be borrowed is asked by the target's own method, which scores every token.
        self._borrowed = miss is None or miss.reason is Reason.COLLECTIVE
        self.shard = shard if shard and self._borrowed else Shard(0, self.vocabulary)
        self.why_eager = miss if in_graph else Miss(Reason.BACKEND_EAGER)

    @property
    def head(self) -> nn.Module | None:
        """What the target scores with: its embedding where both are one matrix."""
        return self.target.embedding if self.target.head is None else self.target.head

    def __call__(self, hidden: Tensor) -> Tensor:
        """Chooses for every row that predicts something.

        Args:
            hidden: [requests * block_size, hidden_size], as the draft returns them.

        Returns:
            [requests, block_size - 1] int64: row 0 of a block is a token that is known (P67).

        Raises:
            InputError: if these are no hidden states of blocks: recorded, nothing would ever be chosen anew (P61).
        """
        width = self.block_size
        shape = list(getattr(hidden, "shape", ()))
        if len(shape) != 2 or shape[0] % width or shape[1] != self.hidden_size:
            raise InputError(
                f"the draft returned {shape or type(hidden).__name__}, and the sampler takes hidden states of "
                f"{self.hidden_size} for whole blocks of {width}: what BlockDraft.forward returns"
            )
        requests = shape[0] // width
        rows = hidden.view(requests, width, self.hidden_size)[:, 1:].reshape(-1, self.hidden_size)
        return self._best(self._scores(rows)).view(requests, width - 1)

    def _scores(self, rows: Tensor) -> Tensor:
        """[rows, tokens of the shard]: cut afterwards, as a product with an odd number of columns is slower."""
        if not self._borrowed:
            return self.target.logits(rows)[:, : self.vocabulary]
        weight: Any = getattr(self.head, "weight", None)
        return F.linear(rows.to(weight.dtype), weight)[:, : self.shard.tokens]

    def _best(self, scores: Tensor) -> Tensor:
        """[rows] int64, the first of the best tokens."""
        if self.ranks is None or not self._borrowed:
            tokens = scores.argmax(-1)
            return tokens + self.shard.first if self.shard.first else tokens
        best, index = scores.max(-1)
        # Side by side in a type that holds both exactly: one collective and not two.
        mine = torch.stack((best.double(), (index + self.shard.first).double()))
        values, tokens = self.ranks.gather(mine).unbind(1)
        winner = values.argmax(0, keepdim=True)  # the first of equal ranks, whose tokens come first
        return tokens.gather(0, winner).squeeze(0).long()
