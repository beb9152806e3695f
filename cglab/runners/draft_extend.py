"""T10, the NextN draft extend: the draft's layer over the tokens that its target has just computed (S3).

Captured: the target's embedding of the tokens that follow, both norms and their join, the layer with its KV writes, its
indexer's preparation and its attention, and the last norm, for a fixed number of tokens: a prefill graph of one layer.
Scores and top-k are its break, and a second one publishes the index-share seed, what the last token of each request
attends to: an assignment in Python would be that of the capture for ever (P36). Static: the weights, the target's
embedding and rotary table (P85), the draft's cache, whose page tables are the target's, and four input slots. It
follows every chunk of a prompt and every verify pass, which differ in nothing but their spans. Head and choice stay
outside, on the last token of each request. Padded tokens store to slot 0 and select nothing (P78).

It cannot: serve more tokens than its largest bucket, which run eager, with the reason, as all do where little memory is
free (P71); or do without a break, as requests and seed would then be those of the capture, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cglab.errors import InputError
from cglab.graphs.address import Getter
from cglab.graphs.breaks import eager_break
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.kv import PagedKV
from cglab.models.nextn import NextN
from cglab.models.spans import LiveSpans, Span
from cglab.runners.base import GraphGroup
from cglab.runners.block_draft import free_memory, little_memory
from cglab.runners.dsa_policy import Parts
from cglab.runners.dsa_prefill import DsaPrefillRunner


class DraftExtendRunner(DsaPrefillRunner):
    """The extend of one NextN layer over its own cache.

    Args:
        layer: bound to its target.
        kv: the layer's cache; see ``draft_cache``.
        group: pool and shared buffers.
        buckets: token counts to capture.
        options: backend (breakable or eager) and the rest.
        parts: why each part of the layer is a break; the selection always is one.
        **sizes: floor and warm-up, as ``DsaPrefillRunner`` takes them.

    Attributes:
        seed: [rows, index_topk] int32, the index-share seed by request row: the slots that the last token of each
            request attended to, then -1, as a further step of the draft would reuse them instead of selecting anew.

    Raises:
        InputError: for a selection that is recorded, or as ``DsaPrefillRunner``.
        ModelError: if the layer is bound to no target.
    """

    technique, variant = "draft_extend", "draft_extend"

    def __init__(
        self,
        layer: NextN,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        parts: Parts,
        **sizes: Any,
    ) -> None:
        if parts.select is None:
            raise InputError(
                "an extend without breaks would publish the seed of its capture; give parts with a selection that is "
                "a break, as gates() makes them"
            )
        self.layer = layer
        columns = min(layer.config.index_topk, len(kv.context_positions))
        self.seed = torch.full((len(kv.full.page_table), columns), -1, device=kv.device, dtype=torch.int32)
        refusal = little_memory(free_memory(group.device)) or options.refusal
        options = replace(options, refusal=refusal)
        super().__init__(layer.target, kv, group, buckets, options, parts=parts, **sizes)

    def watched(self) -> dict[str, nn.Module | Getter]:
        """See ``PrefillRunner``: the layer, what it borrows of the target, its cache and the seed."""
        borrowed = ("target.embedding", "target.rotary")
        target = {name: partial(attrgetter(name), self.layer) for name in borrowed}
        return {"layer": self.layer, **target, **self.kv.watched(), "seed": partial(attrgetter("seed"), self)}

    def needed(self) -> tuple[str, ...]:
        """See ``PrefillRunner``."""
        return (*super().needed(), "hidden")

    def slots(self) -> dict[str, Slot]:
        """See ``PrefillRunner``; and the target's hidden states, [tokens, hidden_size]."""
        shape, dtype = (-1, self.layer.config.hidden_size), self.layer.norm.weight.dtype
        return super().slots() | {"hidden": Slot(shape=shape, dtype=dtype, pad=0.0)}

    def step(self, **inputs: Tensor) -> Tensor:
        """One extend.

        Args:
            **inputs: of the target's tokens: ``positions`` and ``out_slots`` [tokens] int64, ``hidden`` [tokens,
                hidden_size], normed; and ``input_ids`` [tokens] int64, for each of them the token that follows.

        Returns:
            [tokens, hidden_size], normed; the last of a request predicts the token after the one that follows it.
        """
        size = len(inputs["out_slots"])
        attend = self._sparse(inputs["out_slots"], self.keys, self.parts_at(size).breaks)
        hidden: Tensor = self.layer(inputs["input_ids"], inputs["hidden"], inputs["positions"], attend)
        _publish_seed(attend.selected, self.seed, live=self.live)
        return hidden

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """See ``PrefillRunner``; with other hidden states."""
        hidden = views["hidden"]
        drawn = torch.randn(hidden.shape, generator=generator, device=generator.device)
        hidden.copy_(drawn)
        super().vary(views, generator)

    def coverages(self) -> dict[str, Coverage]:
        """See ``Runner``: of the extend alone, as its parts are none of the prefill's."""
        return {self.technique: self.coverage()}

    def drafts(self, hidden: Tensor, spans: Sequence[Span], which: Sequence[int] | None = None) -> Tensor:
        """What each request is drafted: [spans asked for] int64; arguments as those of ``last_logits``."""
        return self.last_logits(hidden, spans, which).argmax(-1)


@eager_break
def _publish_seed(selected: Tensor, seed: Tensor, *, live: LiveSpans) -> None:
    """Hands on what the last token of each live request attends to."""
    ends = [end - 1 for end in accumulate(span.length for span in live.spans)]
    packed = np.array([[span.row for span in live.spans], ends], dtype=np.int64)
    rows, last = torch.from_numpy(packed).to(seed.device, non_blocking=True)
    seed.index_copy_(0, rows, selected.index_select(0, last))
