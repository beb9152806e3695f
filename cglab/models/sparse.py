"""A step of latent attention over selected keys: what of it is recorded, and what is left to eager breaks (S3).

The same functions run in a break or inline; ``Breaks`` says which. Until a break ends, its inputs and its output are
memory of the recording: the output is allocated before it and written in place (P50), and what changes from step to
step (which keys there are, how many tokens are live) is read from ``LiveKeys`` inside of it (P39). A break computes the
live rows alone, so that no padded row stores anything; inline, padded tokens store to the reserved slot 0 and see
nothing (P78). Without a break everything is a static input: one recording then has one ``longest`` (P37).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer, KeyRanges, select
from cglab.models.kv import LayerCache, LayerPool, PagedKV
from cglab.models.mla import LatentAttend, LatentAttention, attend_selected
from cglab.models.spans import Span


@dataclass(frozen=True, slots=True)
class Breaks:
    """Which parts of a layer are eager breaks; the default leaves scores and top-k alone to one.

    Attributes:
        select: scores and top-k, over keys that only the step knows.
        prepare: the indexer's projections and its key store, in one break with the selection.
        attend: absorbed attention, with its turn and the latent store.
        experts: routed experts.

    Raises:
        InputError: for a combination that S3 does not have either: attention is recorded first, then the preparation,
            then the selection, and with it every break is gone.
    """

    select: bool = True
    prepare: bool = False
    attend: bool = False
    experts: bool = False

    def __post_init__(self) -> None:
        without_select = not self.select and (self.prepare or self.attend or self.experts)
        if without_select or (self.attend and not self.prepare):
            raise InputError(
                f"{self}: attention is recorded first, then the indexer's preparation, then all else; good breaks: "
                "none, select, select and prepare, or these and attend; experts with any but none"
            )


class LiveKeys:
    """The keys of the step that runs, read inside breaks; changed in place from step to step.

    Attributes:
        tokens: live tokens of the step, which are the first ones.

    Args:
        ranges: of these tokens alone.
    """

    def __init__(self, ranges: KeyRanges) -> None:
        self._ranges: KeyRanges | Callable[[], KeyRanges] = ranges
        self.tokens = len(ranges.seq_lens)

    @property
    def ranges(self) -> KeyRanges:
        """Of the live tokens alone."""
        if callable(self._ranges):
            self._ranges = self._ranges()
        return self._ranges

    @ranges.setter
    def ranges(self, ranges: KeyRanges) -> None:
        self._ranges, self.tokens = ranges, len(ranges.seq_lens)

    def follow(self, spans: Sequence[Span], pool: LayerPool) -> None:
        """Takes the keys of a step's spans, worked out by the first break that asks for them, if one does (P39)."""
        self._ranges, self.tokens = partial(KeyRanges.of, spans, pool), sum(span.length for span in spans)


class SparseAttention(LatentAttend):
    """The step: a prefill, a verify or a decode, as every token has a range of its own.

    Args:
        kv: the cache, of latents and index keys.
        out_slots: [T] int64, where the tokens go; 0 for padding.
        keys: live ones for a step with breaks; static ones, padded as ``KeyRanges`` says, for one without.
        breaks: which parts are breaks.
        index_topk: keys that a token attends to at most, and so columns of a selection: fewer only where the cache or
            a recording's ``longest`` has room for fewer.
        columns: of a selection, where forms of one step must sum alike; None for as few as it can do with.

    Raises:
        InputError: if a part needs live keys and gets static ones, or the other way round.
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        out_slots: Tensor,
        keys: KeyRanges | LiveKeys,
        breaks: Breaks,
        index_topk: int,
        columns: int | None = None,
    ) -> None:
        if breaks.select != isinstance(keys, LiveKeys):
            given, wanted = type(keys).__name__, "LiveKeys" if breaks.select else "KeyRanges"
            raise InputError(
                f"{breaks} cannot read {given}: a break reads what is live, a recording what is static; "
                f"give {wanted}"
            )
        if isinstance(keys, LiveKeys) and keys.tokens > len(out_slots):
            raise InputError(f"{keys.tokens} tokens are live, {len(out_slots)} have a slot; give each one")
        self.kv, self.out_slots, self.keys, self.breaks = kv, out_slots, keys, breaks
        room = len(kv.context_positions) if isinstance(keys, LiveKeys) else keys.longest
        self.columns = columns or min(index_topk, room)
        self.live = out_slots > 0

    def cache(self, layer_index: int) -> LayerCache:
        """The layer's latents (``keys``) and index keys (``values``) with the slots of this step."""
        return self.kv.pool(layer_index).cache(layer_index, self.out_slots)

    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """See ``LatentAttend``."""
        cache, keys = self.cache(layer_index), self.keys
        out = self.selected = torch.empty(
            (len(hidden), self.columns), device=hidden.device, dtype=torch.int32
        )
        if self.breaks.prepare:
            _prepare_and_select(indexer, hidden, query_latent, turn, out, cache=cache, live=keys)
            return
        rows = indexer.prepare(hidden, query_latent, turn)
        store_index_keys(cache, rows.key)
        if isinstance(keys, LiveKeys):
            _select(rows.query, rows.gates, out, index_keys=cache.values, live=keys)
        else:
            select(rows.query, rows.gates, cache.values, keys, out)

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        cache = self.cache(layer_index)
        if self.selected is None:
            raise InputError("nothing was selected before a layer that shares; start with a full indexer")
        if not self.breaks.attend:
            return attend_stored(attention, query, latent, turn, self.selected, cache)
        out = query.new_empty(len(query), attention.heads * attention.value_dim)
        _attend(attention, query, latent, turn, self.selected, out, cache=cache, live=self.keys)
        return out

    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """See ``LatentAttend``."""
        if not self.breaks.experts:
            return experts(hidden, self.live)
        out = torch.empty_like(hidden)
        _route(experts, hidden, out, live=self.keys)
        return out


def store_index_keys(cache: LayerCache, key: Tensor) -> None:
    """Stores index keys [T, 1, index_dim]; slot 0 may occur more than once."""
    cache.values.index_copy_(0, cache.slots, key.to(cache.values.dtype))


def attend_stored(
    attention: LatentAttention,
    query: Tensor,
    latent: Tensor,
    turn: Tensor,
    selected: Tensor,
    cache: LayerCache,
) -> Tensor:
    """Stores a step's latents, then attends to the selected ones: [T, heads * value_dim]; see ``LatentAttend``."""
    attention.store(latent, turn, cache)
    asked = attention.absorbed(query, turn)
    return attention.values(attend_selected(asked, cache.keys, selected, attention.scale, attention.rank))


@eager_break
def _prepare_and_select(
    indexer: Indexer,
    hidden: Tensor,
    query_latent: Tensor,
    turn: Tensor,
    out: Tensor,
    *,
    cache: LayerCache,
    live: LiveKeys,
) -> None:
    """The whole indexer; padded rows select nothing and store nothing (P78)."""
    n = live.tokens
    out[n:].fill_(-1)
    if n == 0:
        return
    rows = indexer.prepare(hidden[:n], query_latent[:n], turn[:n])
    store_index_keys(cache._replace(slots=cache.slots[:n]), rows.key)
    select(rows.query, rows.gates, cache.values, live.ranges, out[:n])


@eager_break
def _select(query: Tensor, gates: Tensor, out: Tensor, *, index_keys: Tensor, live: LiveKeys) -> None:
    """Scores and top-k; padded rows select nothing."""
    n = live.tokens
    out[n:].fill_(-1)
    if n == 0:
        return
    select(query[:n], gates[:n], index_keys, live.ranges, out[:n])


@eager_break
def _attend(
    attention: LatentAttention,
    query: Tensor,
    latent: Tensor,
    turn: Tensor,
    selected: Tensor,
    out: Tensor,
    *,
    cache: LayerCache,
    live: LiveKeys,
) -> None:
    """Absorbed attention; padded rows of ``out`` become zero (P53, P54)."""
    n = live.tokens
    out[n:].zero_()
    if n == 0:
        return
    cache = cache._replace(slots=cache.slots[:n])
    out[:n] = attend_stored(attention, query[:n], latent[:n], turn[:n], selected[:n], cache)


@eager_break
def _route(experts: RoutedExperts, hidden: Tensor, out: Tensor, *, live: LiveKeys) -> None:
    """Routed experts; padded rows of ``out`` become zero."""
    n = live.tokens
    out[n:].zero_()
    if n == 0:
        return
    out[:n] = experts(hidden[:n])
