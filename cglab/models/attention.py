"""Attention of a decode step over the paged cache, as an ``attend`` callable; ``spans`` has that of a prefill.

What only depends on the step (slots and mask) is computed once, when the callable is made, and so is recorded with
the step; so is storing this step's keys and values. Attending is an eager break: a breakable capture leaves it out,
a full one may record it inline. Its output is allocated before it and written in place (P50). The form is portable:
gather by slot, then ``scaled_dot_product_attention`` with the query heads of a group folded into the query axis.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV


@dataclass(slots=True)
class LiveRows:
    """How many requests of a padded decode step are real; changed in place from step to step.

    Attributes:
        rows: live requests, always the first ones; None computes all rows, which is what a full recording
            holds.
    """

    rows: int | None = None


class _PoolStep:
    """What the layers of one pool share in a step.

    Attributes:
        slots: [requests, context] int64, where those that are read live.
        mask: [requests, 1, rows, context], 0 or minus infinity.
    """

    def __init__(
        self, pool: LayerPool, request_rows: Tensor, seq_lens: Tensor, last: Tensor, tree: Tensor | None
    ) -> None:
        """Computes them; ``last`` [requests, width, 1] is where each query stands: the last position that it sees.

        With a ``tree`` the queries lie in the order of their nodes, and stand at its depths.
        """
        width = last.shape[1]
        position = pool.context(seq_lens, width)
        # Padding repeats the last position: whatever a free page or the rest of a page holds is then not even read,
        # as a mask alone would still multiply it by zero, and zero times NaN is NaN.
        self.slots = pool.slots(request_rows, torch.minimum(position, seq_lens.unsqueeze(1) - 1))
        first = seq_lens.unsqueeze(1) - width
        seen_in_tree = None if tree is None else _seen_in_tree(tree, position, first)
        position = position.unsqueeze(-2)
        unseen = position > last if tree is None else position >= first.unsqueeze(1)
        if pool.window is not None and width > 1:  # a single query's context starts with its window
            unseen = unseen | (position <= last - pool.window)
        if seen_in_tree is not None:  # ``draft_tree.check_branches``: no deeper than a window
            unseen = unseen & ~seen_in_tree
        # Added to the scores: a boolean mask would be turned into this form again in every layer.
        mask = torch.zeros(unseen.shape, device=unseen.device, dtype=pool.keys.dtype)
        mask = mask.masked_fill_(unseen, float("-inf")).unsqueeze(1)
        # One row serves all queries of a group where there is but one token.
        self.mask = mask if width == 1 else mask.unsqueeze(2).expand(-1, -1, pool.group, -1, -1).flatten(2, 3)


def _seen_in_tree(tree: Tensor, position: Tensor, first: Tensor) -> Tensor:
    """[requests, width, context] bool: what each node sees of the others; they lie from ``first`` on, in order.

    Args:
        tree: [requests, width, width] bool.
        position: [context] or [requests, context].
        first: [requests, 1].
    """
    width = tree.shape[1]
    node = position - first
    inside = (node >= 0) & (node < width)
    columns = node.clamp(0, width - 1).unsqueeze(1).expand(-1, width, -1)
    return tree.gather(2, columns) & inside.unsqueeze(1)


class DecodeStep(CacheAttention):
    """A step with equally many new tokens of each request: decode, verify of drafted tokens, or a draft's.

    Query i of a request sees its first ``seq_len - width + i + 1`` tokens, itself included; in a layer with a
    window the last ``window`` of these, and no more than they are read. Of drafted tokens that are a tree, a query
    sees those on its way to the root. A step without slots is frozen: it reads the cache and stores nothing (S0).
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        request_rows: Tensor,
        seq_lens: Tensor,
        out_slots: Tensor | None = None,
        width: int = 1,
        live: LiveRows | None = None,
        window_out_slots: Tensor | None = None,
        tree: Tensor | None = None,
    ) -> None:
        """Takes a step's tensors.

        Args:
            kv: the cache.
            out_slots: [requests * width] int64, where this step's keys and values go; 0 for padding; None stores
                none, and ``seq_lens`` are then the tokens in the cache.
            request_rows: [requests] int64, rows of the page tables; 0 for padding.
            seq_lens: [requests] int64, tokens of each request including this step's; at least ``width``, for
                padding too.
            width: new tokens of each request.
            live: which requests are real, read at every call of the break; None computes all of them.
            window_out_slots: [requests * width] int64, as ``out_slots`` in the window pool, if there is one.
            tree: [requests, width, width] bool, the nodes that each node sees: itself and those before it up to the
                root, which is node 0; None where every token follows the one before.

        Raises:
            InputError: if the sizes do not fit each other, or slots are missing for a pool or given for none.
        """
        self.kv, self.width, self.live, self.tree = kv, width, live or LiveRows(), tree
        self.request_rows, self.seq_lens = request_rows, seq_lens
        self.out_slots = {} if out_slots is None else kv.by_pool(out_slots, window_out_slots)
        requests = request_rows.shape[0]
        if tree is not None and tuple(tree.shape) != (requests, width, width):
            raise InputError(
                f"a tree of shape {tuple(tree.shape)} is none of {requests} requests of width {width}; "
                f"give {(requests, width, width)}"
            )
        for slots in self.out_slots.values():
            if seq_lens.shape[0] != requests or slots.shape[0] != requests * width:
                raise InputError(
                    f"{requests} request rows, {seq_lens.shape[0]} lengths and {slots.shape[0]} slots do not "
                    f"make a step of width {width}: give one length and {width} slots for each row"
                )

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        pool = self.kv.pool(layer_index)
        if pool not in self.out_slots:
            raise InputError("a frozen step stores no keys and values; give out_slots to a step that does")
        return pool.cache(layer_index, self.out_slots[pool])

    @abstractmethod
    def attend(
        self, layer_index: int, query: Tensor, key: Tensor | None = None, value: Tensor | None = None
    ) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""


class DecodeAttention(DecodeStep):
    """The portable form: what the layers of a pool share is computed when it is made."""

    def __init__(self, kv: PagedKV, **step: Any) -> None:
        """Computes what all layers of a pool share; the arguments are those of ``DecodeStep``."""
        super().__init__(kv, **step)
        # Where the queries stand: a tree's at the depth of their node, which is how many others they see.
        depth = kv.context_positions[: self.width] if self.tree is None else self.tree.sum(-1) - 1
        last = (self.seq_lens.unsqueeze(1) + (depth - self.width)).unsqueeze(-1)
        self._steps = {
            pool: _PoolStep(pool, self.request_rows, self.seq_lens, last, self.tree)
            for pool in kv.pools
            if pool.layers
        }

    def attend(
        self, layer_index: int, query: Tensor, key: Tensor | None = None, value: Tensor | None = None
    ) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        pool = self.kv.pool(layer_index)
        step = self._steps[pool]
        _decode(
            pool,
            layer_index,
            query=query,
            out=out,
            slots=step.slots,
            mask=step.mask,
            width=self.width,
            live=self.live,
        )
        return out


@eager_break
def _decode(
    pool: LayerPool,
    layer_index: int,
    *,
    query: Tensor,
    out: Tensor,
    slots: Tensor,
    mask: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Attends; padded rows of ``out`` become zero (P53, P54)."""
    if live.rows is not None and live.rows < len(slots):
        tokens = live.rows * width
        out[tokens:].zero_()
        if live.rows == 0:
            return
        query, out, slots, mask = query[:tokens], out[:tokens], slots[: live.rows], mask[: live.rows]
    keys, values = pool.read(layer_index, slots)
    group = query.shape[1] // keys.shape[1]  # a draft's need not be the model's own
    split = (len(slots), width, keys.shape[1], group, keys.shape[3])
    # [requests, kv_heads, group * width, head_dim]: all queries that read the same key head side by side.
    folded = query.view(split).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    out.view(split).copy_(attended.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4))
