"""A decode or verify step of latent attention: each request has equally many new tokens and scores its own keys alone.

The keys of a step with a few tokens of each request are not packed: a request's context is a row of fixed width, so
that no token is scored against another request's keys and nothing is read on the host. Storing is recorded with the
step; selecting and attending are eager breaks, which a full recording may hold inline. Padded requests see nothing, so
that whatever the reserved page holds is not read (P12, P78).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.attention import LiveRows
from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer, best, place_chosen
from cglab.models.kv import LayerCache, PagedKV
from cglab.models.mla import LatentAttend, LatentAttention, attend_selected
from cglab.models.sparse import store_index_keys


class LatentDecode(LatentAttend):
    """The step; token i of a request sees its first ``seq_len - width + i + 1`` keys, itself included.

    Args:
        kv: the cache, of latents and index keys.
        request_rows: [requests] int64, rows of the page table; 0 for padding.
        seq_lens: [requests] int64, tokens of each request with this step's; at least ``width``, for padding too.
        out_slots: [requests * width] int64, where the tokens go; 0 for padding.
        index_topk: keys that a token attends to at most.
        width: new tokens of each request.
        live: which requests are real, read at every call of a break; None computes all of them.
        tree: None: tokens of several branches would be selected for by one another.

    Raises:
        InputError: for a tree, or sizes that do not fit each other.
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        request_rows: Tensor,
        seq_lens: Tensor,
        out_slots: Tensor,
        index_topk: int,
        width: int = 1,
        live: LiveRows | None = None,
        tree: Tensor | None = None,
    ) -> None:
        if tree is not None:
            raise InputError("latent attention takes no draft of several branches; draft with topk 1")
        requests = len(request_rows)
        if len(seq_lens) != requests or len(out_slots) != requests * width:
            raise InputError(
                f"{requests} request rows, {len(seq_lens)} lengths and {len(out_slots)} slots do not make a step of "
                f"width {width}: give one length and {width} slots for each row"
            )
        self.kv, self.out_slots, self.width, self.live = kv, out_slots, width, live or LiveRows()
        position = kv.context_positions
        self.columns = min(index_topk, len(position))
        # Beyond its last token a request repeats it: a free page is then not even read.
        slots = kv.full.slots(request_rows, torch.minimum(position, seq_lens.unsqueeze(1) - 1))
        self.slots = slots.unsqueeze(1).expand(-1, width, -1).flatten(0, 1)
        last = (seq_lens.unsqueeze(1) - width + position[:width]).flatten()
        self.real = out_slots > 0
        self.seen = (position <= last.unsqueeze(1)) & self.real.unsqueeze(1)

    def cache(self, layer_index: int) -> LayerCache:
        """The layer's latents (``keys``) and index keys (``values``) with the slots of this step."""
        return self.kv.pool(layer_index).cache(layer_index, self.out_slots)

    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """See ``LatentAttend``."""
        cache, rows = self.cache(layer_index), indexer.prepare(hidden, query_latent, turn)
        store_index_keys(cache, rows.key)
        out = self.selected = torch.empty(
            (len(hidden), self.columns), device=hidden.device, dtype=torch.int32
        )
        _select(rows.query, rows.gates, out, index_keys=cache.values, slots=self.slots, seen=self.seen,
                width=self.width, live=self.live)  # fmt: skip

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        if self.selected is None:
            raise InputError("nothing was selected before a layer that shares; start with a full indexer")
        cache = self.cache(layer_index)
        attention.store(latent, turn, cache)
        asked = attention.absorbed(query, turn)
        mixed = query.new_empty(len(query), attention.heads, attention.rank)
        _attend(attention, asked, self.selected, mixed, latents=cache.keys, width=self.width, live=self.live)
        return attention.values(mixed)

    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """See ``LatentAttend``."""
        return experts(hidden, self.real)


def live_tokens(live: LiveRows, width: int, tokens: int) -> int:
    """How many of a step's tokens are computed: those of live requests, or all."""
    return tokens if live.rows is None else min(live.rows * width, tokens)


@eager_break
def _select(
    query: Tensor,
    gates: Tensor,
    out: Tensor,
    *,
    index_keys: Tensor,
    slots: Tensor,
    seen: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Scores each request's keys and keeps the best; padded rows select nothing."""
    n = live_tokens(live, width, len(query))
    out[n:].fill_(-1)
    if n == 0:
        return
    slots, seen, kept = slots[:n], seen[:n], out.shape[1]
    if slots.shape[1] <= kept:
        out[:n] = slots.to(out.dtype).masked_fill(~seen, -1)
        return
    own = slots[::width]  # tokens of a request have the same keys
    keys = index_keys.index_select(0, own.flatten()).view(*own.shape, -1)
    asked = query[:n].reshape(len(own), -1, keys.shape[-1])
    found = F.relu(torch.bmm(asked, keys.transpose(1, 2))).float().view(n, -1, own.shape[1])
    scores = torch.bmm(gates[:n].unsqueeze(1), found).squeeze(1)
    place_chosen(best(scores, seen, kept), slots, out[:n])


@eager_break
def _attend(
    attention: LatentAttention,
    query: Tensor,
    selected: Tensor,
    out: Tensor,
    *,
    latents: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Absorbed attention over what was selected; padded rows of ``out`` become zero (P53, P54)."""
    n = live_tokens(live, width, len(query))
    out[n:].zero_()
    if n:
        out[:n] = attend_selected(query[:n], latents, selected[:n], attention.scale, attention.rank)
