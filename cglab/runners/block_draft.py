"""The step of a block draft: all tokens of a block at once, over the context that its target's steps have stored (S4).

Captured: the block's ids (the newest token, then masks), the target's embedding, the draft's layers with their KV
writes and attention, which goes both ways inside a block, and the sampler, unless that stays outside (T5), for a fixed
number of requests. Static: the draft's weights; of the target the embedding, the head and the rotary table, which all
lie where they lay at capture (P85); the draft's cache, whose page tables are the target's; and the input slots. What a
block stores is overwritten by the verify step after it. Padded requests are one block long, at the reserved row 0,
and store to the reserved slot 0.

It cannot: draft blocks of another size, as the draft was trained for one, or for a batch above its largest bucket; nor
is anything captured where hardly any memory is left (P71). These run eager, or are refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.options import Options
from cglab.models.block_draft import BlockDraft
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup
from cglab.runners.draft_sampler import DraftSampler
from cglab.runners.requests import Input, RequestRunner, whole

LEAST_FREE: Final = 1 << 30
"""Bytes of device memory below which a draft is not captured: SGLang's threshold."""


def little_memory(free: int | None) -> Miss | None:
    """Why a draft is not captured with so many bytes free; None if it is, or where nobody counts them (P71)."""
    if free is None or free >= LEAST_FREE:
        return None
    return Miss(Reason.LITTLE_MEMORY, f"{free / 2**30:.2f} GiB free, {LEAST_FREE / 2**30:.0f} wanted")


def free_memory(device: torch.device) -> int | None:
    """Bytes of a device that nobody has; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class Drafted(NamedTuple):
    """What a block step hands out; ``BlockDraftRunner.tokens`` makes tokens of it.

    Attributes:
        chosen: [requests, block_size - 1] int64; None where the sampler is no part of the step.
        hidden: [requests * block_size, hidden_size], normed; None where it is.
    """

    chosen: Tensor | None
    hidden: Tensor | None


class BlockDraftRunner(RequestRunner[BlockDraft]):
    """The step of a block draft over its own cache.

    Args:
        draft: bound to its target.
        kv: the draft's cache; see ``draft_cache``.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        sampler: of the draft's target and block size.

    Raises:
        InputError: for a sampler of another target or block size.
        ModelError: if the draft is bound to no target.
    """

    technique, title = "block_draft", "DFLASH draft"

    def __init__(
        self,
        draft: BlockDraft,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        sampler: DraftSampler,
    ) -> None:
        width = draft.config.block_size
        if sampler.target is not draft.target or sampler.block_size != width:
            raise InputError(
                f"the sampler is of blocks of {sampler.block_size} or of another target; make it with "
                f"DraftSampler(draft.target, {width})"
            )
        self.sampler, self._sampled_eager = sampler, Coverage()
        borrowed = ("target.embedding", "target.rotary", "target.head")
        watched = {name: partial(attrgetter(name), draft) for name in borrowed}
        refusal = little_memory(free_memory(group.device)) or options.refusal
        options = replace(options, refusal=refusal)
        super().__init__(draft, kv, group, buckets, options, {"draft": draft, **watched}, width=width)

    def declare(self) -> dict[str, Input]:
        """The newest token of each request, and where its block goes."""
        return {"input_ids": whole(0, self.vocabulary), **self.stores()}

    def width_of(self, values: Mapping[str, Tensor]) -> int:
        """Tokens of each block; the inputs have one id of each."""
        requests = values["request_rows"].shape[0]
        return values["out_slots"].shape[0] // requests if requests else self.width

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """Nothing but the size sends a step eager.

        Raises:
            InputError: for blocks of another size.
        """
        if self.width_of(values) != self.width:
            raise InputError(
                f"{self.width_of(values)} slots a request are no block of {self.width}; give {self.width} of each"
            )
        return None

    def step(self, **inputs: Tensor) -> Drafted:
        """One block of each request.

        Args:
            **inputs: int64: ``input_ids`` [requests], the newest tokens; ``out_slots`` [requests * block_size];
                ``request_rows`` and ``seq_lens`` [requests], the lengths with the block.
        """
        newest, width = inputs["input_ids"], self.width
        blocks = newest.new_full((len(newest), width), self.model.config.mask_token_id)
        blocks[:, 0].copy_(newest)
        positions = inputs["seq_lens"].unsqueeze(1) - width + self.kv.context_positions[:width]
        everything = newest.new_ones((len(newest), width, width), dtype=torch.bool)
        attend = self.attend(inputs, width=width, tree=everything)
        hidden = self.model(blocks.flatten(), positions.flatten(), attend)
        if self.sampler.why_eager is None:
            return Drafted(self.sampler(hidden), None)
        return Drafted(None, hidden)

    @torch.no_grad()
    def tokens(self, drafted: Drafted) -> Tensor:
        """The tokens of a step, chosen by its graph or now, as they are that step's in either case (P62).

        Args:
            drafted: what ``run`` returned, before the next step.

        Returns:
            [requests, block_size - 1] int64.

        Raises:
            InputError: for the result of another runner.
        """
        if drafted.chosen is not None:
            return drafted.chosen
        why, hidden = self.sampler.why_eager, drafted.hidden
        if why is None or hidden is None:
            raise InputError("these are no drafts of this runner; give what its run returned")
        tokens = self.sampler(hidden)
        self._sampled_eager.miss(why, len(tokens))
        if self.captured.options.debug:
            super().check((tokens,))
        return tokens

    def sampling(self) -> Coverage:
        """Steps whose tokens were chosen in the graph, and eager, with the reasons."""
        return self.coverage() if self.sampler.why_eager is None else self._sampled_eager

    def coverages(self) -> dict[str, Coverage]:
        """See ``Runner``: of the draft, and of its sampler."""
        return {**super().coverages(), "draft_sampler": self.sampling()}

    def check(self, output: Any) -> None:
        """See ``RequestRunner``; hidden states are checked when they have become tokens."""
        if output.chosen is not None:
            super().check(output)
