"""T8, T9 and T9b, the prefill body of a model with sparse (DSA) attention: what is left of its breaks (S3).

Captured, as in T6: embedding, all layers and the last norm, for a fixed number of tokens; routed experts too, padded
tokens masked before the routing. What is recorded of a layer beside these is the arm's: nothing, and the whole indexer
and attention are two breaks; attention with its latent store (T8); the indexer's preparation and its key store as well
(T9), which leaves scores and top-k as the only break; or these too (T9b), which leaves none. Static: the weights, the
paged cache and its page tables, three input slots, and for T9b the request axis of a full prefill over a fixed extent
of keys. A break computes live rows alone; what is recorded computes padded ones too, which see nothing and store to the
reserved slot 0 (P78). A selection has the same columns in every arm, so that attention sums alike.

It cannot: record where a library chooses its kernels by the number of rows and padded rows would differ from live ones
(P81): in a bucket below ``floor`` every part stays a break, with its reason. Nor can a recording choose the dense form
by length (P37): with ``dense_short`` a short step is eager in every arm, decided once and before all else (B81). A step
that T9b has no room for runs eager, as one of T6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.options import Options
from cglab.models.decoder import Decoder
from cglab.models.dense import DenseAttention
from cglab.models.dsa_config import DsaConfig
from cglab.models.indexer import KeyRanges
from cglab.models.kv import PagedKV
from cglab.models.mla import LatentAttend, dense_when_short
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from cglab.runners.base import GraphGroup
from cglab.runners.dsa_policy import Parts, coverage_of_part
from cglab.runners.prefill import REQUEST_AXIS, PrefillRunner

PARTS = {"dsa_attention": "attend", "dsa_indexer_prep": "prepare"}
"""Techniques by the part of a layer that they record."""


class DsaPrefillRunner(PrefillRunner):
    """The prefill body of one model with latent attention over one cache.

    Args:
        model: the decoder.
        kv: its paged cache, of latents and index keys.
        group: pool and shared buffers.
        buckets: token counts to capture; the largest is the limit above which a step runs eager.
        options: backend (breakable or eager), padding and the rest.
        parts: why each part of a layer is a break; see ``dsa_policy.gates``.
        floor: the smallest bucket with recorded parts; see ``dsa_policy.measured_floor``.
        dense_short: steps that see no more keys than are kept run eager in the dense form.
        **sizes: of the request axis and the warm-up, as ``PrefillRunner`` takes them.

    Raises:
        InputError: for a full backend, which would record breaks as they stand, or a model of another kind.
    """

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        parts: Parts,
        floor: int = 0,
        dense_short: bool = False,
        **sizes: Any,
    ) -> None:
        if options.backend == "full":
            raise InputError(
                "backend full would record a selection with the keys of one step; give breakable, which has no break "
                "left where parts say so"
            )
        if not isinstance(model.config, DsaConfig):
            raise InputError(f"{model.config.architecture} has no latent attention; use PrefillRunner for it")
        self.parts, self.floor, self.dense_short = parts, floor, dense_short
        self.topk, self._dense = model.config.index_topk, False
        self.columns = min(self.topk, len(kv.context_positions))
        self.keys = LiveKeys(KeyRanges.of([], kv.full))
        super().__init__(model, kv, group, buckets, options, **sizes)

    @property
    def fixed_axis(self) -> bool:
        """See ``PrefillRunner``: where the selection is recorded."""
        return self.parts.select is None and self.backend != "eager"

    def parts_at(self, size: int) -> Parts:
        """Why each part is a break in a bucket of so many tokens."""
        return self.parts.below(self.floor, size)

    def attend(self, inputs: Mapping[str, Tensor]) -> LatentAttend:
        """Attention of a step: over static keys where these are among the inputs, else over the live spans."""
        slots, breaks = inputs["out_slots"], self.parts_at(len(inputs["out_slots"])).breaks
        axis: dict[str, Any] = {name: inputs[name] for name in REQUEST_AXIS if inputs.get(name) is not None}
        if self._dense:
            return DenseAttention(self.kv, out_slots=slots, spans=self.live.spans)
        if axis and not breaks.select:
            room = len(slots) + self.max_cached
            longest = min(room, len(self.kv.context_positions))
            fixed = KeyRanges.recorded(self.kv.full, tokens=len(slots), keys=room, longest=longest, **axis)
            return self._sparse(slots, fixed, breaks)
        return self._sparse(slots, self.keys, breaks if breaks.select else Breaks())

    def _sparse(self, slots: Tensor, keys: KeyRanges | LiveKeys, breaks: Breaks) -> SparseAttention:
        return SparseAttention(
            self.kv, out_slots=slots, keys=keys, breaks=breaks, index_topk=self.topk, columns=self.columns
        )

    def set_live(self, live: Sequence[Span] | None) -> None:
        """See ``PrefillRunner``; and their keys."""
        super().set_live(live)
        self.keys.follow(live or (), self.kv.full)
        self._dense = self.dense_short and bool(live) and dense_when_short(self._longest, self.topk)

    @property
    def _longest(self) -> int:
        """Keys of the request with the most of them."""
        return max((span.end for span in self.live.spans), default=0)

    def _place(self, spans: Sequence[Span], views: Mapping[str, Tensor]) -> None:
        super()._place(spans, views)
        self._dense = False  # an example is for a recording, which is of the sparse form whatever its length

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """See ``PrefillRunner``; and what is attended to in the dense form."""
        miss = super().ineligible(values)
        if self._dense:
            return Miss(Reason.SHORT_DENSE, f"{self._longest} keys at most, {self.topk} are kept")
        return miss

    def coverages(self) -> dict[str, Coverage]:
        """See ``Runner``: of the prefill, and of each part that is a technique."""
        return {self.technique: self.coverage(), **{name: self.covered(part) for name, part in PARTS.items()}}

    def covered(self, part: str) -> Coverage:
        """How often a part of ``Parts`` was recorded, and why not where it was a break."""
        return coverage_of_part(self.coverage(), lambda size: getattr(self.parts_at(size), part))
