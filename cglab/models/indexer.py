"""The lightning indexer: which keys each token attends to, in two halves that a recording may part (S3).

``Indexer.prepare`` is the half that is always recordable: projections, norm, rotary turn and head gates of a step's
own tokens. ``select`` scores all keys that a token sees and keeps the best: the half that depends on how long the
context is. Where no token sees more keys than are kept, it keeps them all and computes no score.

A selection is the slots of a token's keys in ascending order of their positions, then -1 (P78, P79). Of equal scores
the earlier key is kept. So a selection depends neither on how wide the scores are nor on how a device sorts, and its
attention sums in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.models.dsa_config import DsaConfig
from cglab.models.kv import LayerPool
from cglab.models.packed import packed_slots
from cglab.models.rotary import rotate_pairs
from cglab.models.spans import Span

KEY_NORM_EPS: Final = 1e-6
SCORE_BYTES: Final = 1 << 30
"""Most memory of a piece of per-head scores; fixed, as a recording cannot ask what is free."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """Which keys each token of a step sees: a range of the step's keys, packed one request after the other.

    Padding goes after the live elements: keys at slot 0, tokens that see nothing.

    Attributes:
        slots: [keys] int64, where the keys live, each request's own tokens included.
        starts: [T] int64, where in ``slots`` the keys of a token's request begin.
        seq_lens: [T] int64, how many of them it sees, itself included; 0 for padding.
        longest: no token sees more: known to the host, and in a recording fixed for good (P37).
        spans: of each request its numbers of tokens and of keys, where the host knows them; a recording does not.
    """

    slots: Tensor
    starts: Tensor
    seq_lens: Tensor
    longest: int
    spans: tuple[tuple[int, int], ...] = ()

    def by_request(self) -> Iterator[tuple[slice, KeyRanges]]:
        """The tokens of each request with the keys that are its own; all at once where they are not told apart."""
        if len(self.spans) < 2:
            yield slice(len(self.starts)), self
            return
        token = key = 0
        for tokens, keys in self.spans:
            rows, own = slice(token, token + tokens), slice(key, key + keys)
            yield rows, KeyRanges(self.slots[own], self.starts[rows] - key, self.seq_lens[rows], keys)
            token, key = rows.stop, own.stop

    @classmethod
    def of(cls, spans: Sequence[Span], pool: LayerPool) -> KeyRanges:
        """The ranges of a step's live tokens; one copy to the device.

        Args:
            spans: one span a request, in the order of the tokens.
            pool: whose page table says where the keys live.
        """
        lengths = np.array([span.length for span in spans], dtype=np.int64)
        ends = np.array([span.end for span in spans], dtype=np.int64)
        key_ends, token_ends = (np.cumsum(np.append(0, counts)) for counts in (ends, lengths))
        starts = np.repeat(key_ends[:-1], lengths)
        # The last token of a request sees all of it, each before that one key less.
        seen = np.arange(1, token_ends[-1] + 1) + np.repeat(ends - token_ends[1:], lengths)
        rows = np.array([span.row for span in spans], dtype=np.int64)
        packed = np.concatenate((starts, seen, key_ends, rows))
        on_device = torch.from_numpy(packed).to(pool.page_table.device, non_blocking=True)
        parts = on_device.split((len(starts), len(seen), len(key_ends), len(spans)))
        slots = packed_slots(pool, parts[3].int(), parts[2].int(), int(key_ends[-1]))
        longest = max((span.end for span in spans), default=0)
        return cls(slots, parts[0], parts[1], longest, tuple((span.length, span.end) for span in spans))

    @classmethod
    def recorded(
        cls,
        pool: LayerPool,
        *,
        request_rows: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        tokens: int,
        keys: int,
        longest: int,
    ) -> KeyRanges:
        """The ranges from a step's static inputs, with no host read: part of a recording.

        Args:
            pool: whose page table says where the keys live.
            request_rows: [requests] int32; absent requests are last.
            cu_seqlens_q: [requests + 1] int32, cumulative new tokens; absent requests have none.
            cu_seqlens_k: [requests + 1] int32, cumulative keys, new ones included; at least one in all.
            tokens: of the recording; those after the last request are padding.
            keys: room for keys; those after the last request's repeat it, and no token sees them.
            longest: no request may have more keys.
        """
        place = torch.arange(tokens, device=cu_seqlens_q.device)
        # A padded token belongs to the last request, and sees nothing.
        owner = torch.searchsorted(cu_seqlens_q[1:], place, right=True).clamp(max=len(request_rows) - 1)
        # A request's last token sees its last key, the token before it one less, and so on.
        seen = place + 1 + (cu_seqlens_k - cu_seqlens_q)[1:].index_select(0, owner)
        starts = cu_seqlens_k.index_select(0, owner)
        seq_lens = (seen - starts).masked_fill(place >= cu_seqlens_q[-1], 0)
        return cls(packed_slots(pool, request_rows, cu_seqlens_k, keys), starts.long(), seq_lens, longest)


class IndexRows(NamedTuple):
    """What the indexer knows of a step's tokens.

    Attributes:
        query: [T, index_heads, index_dim].
        gates: [T, index_heads] float32, the weight of each head's scores, their scale included.
        key: [T, 1, index_dim].
    """

    query: Tensor
    gates: Tensor
    key: Tensor


class Indexer(nn.Module):
    """Projections of the lightning indexer; key and gates are one matrix, as they read the same input.

    Args:
        config: the shape.
        **place: device and dtype of the parameters.
    """

    def __init__(self, config: DsaConfig, **place: Any) -> None:
        super().__init__()
        self.heads, self.dim, self.turned = config.index_heads, config.index_dim, config.head_dim
        width = self.heads * self.dim
        self.query = skip_init(nn.Linear, config.query_rank, width, bias=False, **place)
        self.key_gate = skip_init(nn.Linear, config.hidden_size, self.dim + self.heads, bias=False, **place)
        self.key_norm = skip_init(nn.LayerNorm, self.dim, eps=KEY_NORM_EPS, **place)

    def prepare(self, hidden: Tensor, query_latent: Tensor, turn: Tensor) -> IndexRows:
        """The recordable half.

        Args:
            hidden: [T, hidden_size], normed.
            query_latent: [T, query_rank], normed.
            turn: [T, 2, head_dim], rows of the paired rotary table.
        """
        key, gates = self.key_gate(hidden).split((self.dim, self.heads), dim=-1)
        query = self.query(query_latent).view(-1, self.heads, self.dim)
        scale = (self.heads * self.dim) ** -0.5
        return IndexRows(self._turn(query, turn), gates.float() * scale, self._key(key, turn))

    def key(self, hidden: Tensor, turn: Tensor) -> Tensor:
        """[T, 1, index_dim], the key alone: all there is to do where every key is kept by another way."""
        return self._key(F.linear(hidden, self.key_gate.weight[: self.dim]), turn)

    def _key(self, key: Tensor, turn: Tensor) -> Tensor:
        return self._turn(self.key_norm(key).unsqueeze(1), turn)

    def _turn(self, heads: Tensor, turn: Tensor) -> Tensor:
        first, rest = heads.split((self.turned, self.dim - self.turned), dim=-1)
        return torch.cat((rotate_pairs(first, turn), rest), dim=-1)


def index_scores(query: Tensor, gates: Tensor, keys: Tensor) -> Tensor:
    """How much each token wants each key: the gated sum of what its heads find above zero.

    Args:
        query: [T, index_heads, index_dim].
        gates: [T, index_heads] float32.
        keys: [keys, index_dim].

    Returns:
        [T, keys] float32.
    """
    found = F.relu(torch.matmul(query, keys.t())).float()
    return torch.bmm(gates.unsqueeze(1), found).squeeze(1)


def select(query: Tensor, gates: Tensor, index_keys: Tensor, ranges: KeyRanges, out: Tensor) -> None:
    """The other half: writes the slots of the keys that each token attends to.

    Args:
        query: [T, index_heads, index_dim]; not read where every key is kept.
        gates: [T, index_heads] float32; likewise.
        index_keys: [slots, 1, index_dim], the layer's cache, which holds this step's keys already.
        ranges: what each of the tokens sees.
        out: [T, index_topk] int32, written; as many columns as keys are kept.
    """
    if ranges.longest <= out.shape[1]:
        select_all(ranges, out)
        return
    for rows, own in ranges.by_request():  # no token is scored against what is another request's
        if own.longest <= out.shape[1]:
            select_all(own, out[rows])
        else:
            _select_best(query[rows], gates[rows], index_keys, own, out[rows])


def _select_best(query: Tensor, gates: Tensor, index_keys: Tensor, ranges: KeyRanges, out: Tensor) -> None:
    """As ``select``, by scores of all of the keys, in pieces of rows."""
    keys = index_keys.index_select(0, ranges.slots).squeeze(1)
    each = query.shape[1] * len(keys) * (query.element_size() + 4)
    rows = max(1, SCORE_BYTES // each)
    for first in range(0, len(out), rows):
        part = slice(first, first + rows)
        scores = index_scores(query[part], gates[part], keys)
        keep_best(scores, ranges.slots, ranges.starts[part], ranges.seq_lens[part], out[part])


def select_all(ranges: KeyRanges, out: Tensor) -> None:
    """Keeps every key that a token sees, which are no more than ``out`` [T, index_topk] int32 has columns."""
    place = torch.arange(out.shape[1], device=out.device)
    index = (ranges.starts.unsqueeze(1) + place).clamp(max=len(ranges.slots) - 1)
    slots = ranges.slots.to(out.dtype).index_select(0, index.flatten()).view_as(out)
    out.copy_(slots.masked_fill(place >= ranges.seq_lens.unsqueeze(1), -1))


def keep_best(scores: Tensor, slots: Tensor, starts: Tensor, seq_lens: Tensor, out: Tensor) -> None:
    """Keeps the best scores of each row among the keys that it sees, the earlier one of equals.

    Args:
        scores: [T, keys] float32.
        slots: [keys] int64.
        starts: [T] int64, as in ``KeyRanges``.
        seq_lens: [T] int64.
        out: [T, index_topk] int32, written; no more columns than there are keys.
    """
    kept = out.shape[1]
    place = torch.arange(len(slots), device=out.device) - starts.unsqueeze(1)
    seen = (place >= 0) & (place < seq_lens.unsqueeze(1))
    place_chosen(best(scores, seen, kept), slots, out)


def place_chosen(chosen: Tensor, slots: Tensor, out: Tensor) -> None:
    """Writes the slots of chosen keys in their order, then -1.

    Args:
        chosen: [T, keys] bool, at most ``index_topk`` in a row.
        slots: [keys] or [T, keys] int64.
        out: [T, index_topk] int32, written.
    """
    kept = out.shape[1]
    # What is not chosen goes to one more column, which is dropped.
    column = (chosen.cumsum(-1) - 1).masked_fill(~chosen, kept)
    wide = out.new_full((len(out), kept + 1), -1)
    wide.scatter_(1, column, slots.to(out.dtype).expand_as(column))
    out.copy_(wide[:, :kept])


def best(scores: Tensor, seen: Tensor, kept: int) -> Tensor:
    """Which keys have the best scores of those that a token sees, the earlier one of equals.

    Args:
        scores: [..., keys] float32.
        seen: [..., keys] bool.
        kept: how many at most; no more than there are keys.

    Returns:
        [..., keys] bool.
    """
    scores = scores.masked_fill(~seen, float("-inf"))
    least = scores.topk(kept, dim=-1).values[..., -1:]
    above, equal = scores > least, (scores == least) & seen
    room = kept - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
