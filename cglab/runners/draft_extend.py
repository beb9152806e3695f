"""T10, the NextN draft extend: the draft's layer over the tokens that its target has just computed (S3).

Captured: the target's embedding of the tokens that follow, both norms and their join, the layer with its KV writes, its
indexer's preparation and its attention, and the last norm, for a fixed number of tokens: a prefill graph of one layer.
Scores and top-k are its break, and a second one publishes the index-share seed, what the last token of each request
attends to: an assignment in Python would be that of the capture for ever (P36). Static: the weights, the target's
embedding and rotary table (P85), the draft's cache, whose page tables are the target's, and four input slots. It
follows every chunk of a prompt and every verify pass, which differ in nothing but their spans. Head and choice stay
outside, on the last token of each request. Padded tokens store to slot 0 and select nothing (P78).

It cannot: serve more tokens than its largest bucket, or be one recording without breaks, as requests would be frozen;
the first runs eager, with its reason, the second is refused. Little free memory keeps it eager too (P71).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn

from cglab.errors import InputError
from cglab.graphs.address import Getter
from cglab.graphs.breaks import eager_break
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.indexer import KeyRanges
from cglab.models.kv import PagedKV
from cglab.models.nextn import NextN
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from cglab.runners.base import GraphGroup
from cglab.runners.block_draft import free_memory, little_memory
from cglab.runners.prefill import WARMUP_LENGTH, PrefillRunner


@dataclass(slots=True)
class LiveEnds:
    """The last token of each live request, read inside the break that publishes; changed in place.

    Attributes:
        rows: [requests] int64, of the page table.
        ends: [requests] int64, where among the step's tokens.
    """

    rows: Tensor
    ends: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> LiveEnds:
        """Those of a step; one copy to the device."""
        ends = [end - 1 for end in accumulate(span.length for span in spans)]
        packed = np.array([[span.row for span in spans], ends], dtype=np.int64)
        return cls(*torch.from_numpy(packed).to(device, non_blocking=True))


class DraftExtendRunner(PrefillRunner):
    """The extend of one NextN layer over its own cache.

    Args:
        layer: bound to its target.
        kv: the layer's cache; see ``draft_cache``.
        group: pool and shared buffers.
        buckets: token counts to capture.
        options: backend and the rest.
        breaks: which parts of the layer are breaks.
        warmup_length: see ``PrefillRunner``.

    Attributes:
        seed: [rows, index_topk] int32, the index-share seed by request row: the slots that the last token of each
            request attended to, then -1, as a further step of the draft would reuse them instead of selecting anew.

    Raises:
        InputError: for the backend ``full``, or breaks without a selection that is one.
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
        breaks: Breaks = Breaks(),  # noqa: B008 - frozen
        warmup_length: int = WARMUP_LENGTH,
    ) -> None:
        if options.backend == "full" or not breaks.select:
            raise InputError(
                f"a draft extend with backend {options.backend!r} and {breaks} would select for the requests of its "
                "capture; give 'breakable' or 'eager', and breaks with select"
            )
        self.layer, self.breaks, device = layer, breaks, kv.device
        self._nothing = KeyRanges.of((), kv.full), LiveEnds.of((), device)
        self.keys, self.last = LiveKeys(self._nothing[0]), LiveEnds.of((), device)
        columns = min(layer.config.index_topk, len(kv.context_positions))
        self.seed = torch.full((len(kv.full.page_table), columns), -1, device=device, dtype=torch.int32)
        refusal = little_memory(free_memory(group.device)) or options.refusal
        super().__init__(
            layer.target, kv, group, buckets, replace(options, refusal=refusal), warmup_length=warmup_length
        )

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
        attend = SparseAttention(
            self.kv, out_slots=inputs["out_slots"], keys=self.keys, breaks=self.breaks,
            index_topk=self.layer.config.index_topk,
        )  # fmt: skip
        hidden: Tensor = self.layer(inputs["input_ids"], inputs["hidden"], inputs["positions"], attend)
        _publish_seed(attend.selected, self.seed, last=self.last)
        return hidden

    def set_live(self, live: Sequence[Span] | None) -> None:
        """See ``PrefillRunner``; the breaks read the keys and the last tokens of this step."""
        super().set_live(live)
        keys, last = self._nothing
        if live:
            keys, last = KeyRanges.of(live, self.kv.full), LiveEnds.of(live, self.kv.device)
        self.keys.ranges, self.last.rows, self.last.ends = keys, last.rows, last.ends

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """See ``PrefillRunner``; with other hidden states."""
        hidden = views["hidden"]
        drawn = torch.randn(hidden.shape, generator=generator, device=generator.device)
        hidden.copy_(drawn)
        super().vary(views, generator)

    def drafts(self, hidden: Tensor, spans: Sequence[Span], which: Sequence[int] | None = None) -> Tensor:
        """What each request is drafted: [spans asked for] int64; arguments as those of ``last_logits``."""
        return self.last_logits(hidden, spans, which).argmax(-1)


@eager_break
def _publish_seed(selected: Tensor, seed: Tensor, *, last: LiveEnds) -> None:
    """Hands on what the last token of each live request attends to."""
    seed.index_copy_(0, last.rows, selected.index_select(0, last.ends))
