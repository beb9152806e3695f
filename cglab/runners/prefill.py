"""T6, the prefill body: all new tokens of all requests of a step on one token axis.

Captured: embedding, all layers and the last norm, for a fixed number of tokens. Head and logits stay outside, on the
last row of each request, because few rows need them. Static: the weights, the paged cache and its page table, and
three input slots (ids, positions, where the new KV goes). How the tokens are split into requests, and how many are
live, is data: attention is an eager break in each layer that reads the live spans, so one recording serves every
split. Padded tokens write to the reserved slot 0, and their rows are zero after every break (P53).

It cannot: serve more tokens than its largest bucket, which is the limit up to which a capture pays, or pad a step to
more than twice its tokens (P7). Each of these runs eager with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.address import AddressContract
from cglab.graphs.coverage import Miss
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.runners.base import GraphGroup, Runner

INPUTS = ("input_ids", "positions", "out_slots")
WARMUP_LENGTH = 128
"""Tokens of an example request: a kernel's whole tile, and cheap at any bucket, as attention costs their square."""


class PrefillRunner(Runner[Sequence[Span]]):
    """The prefill body of one model over one cache.

    Args:
        model: the decoder.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: token counts to capture; the largest is the limit above which a step runs eager.
        options: backend, padding and the rest.
        warmup_length: most tokens of each request of the example that a capture warms up with (B58).

    Raises:
        InputError: for a warm-up length below 1.
    """

    technique = "prefill"
    inputs = INPUTS
    variant: ClassVar[str | None] = "prefill"
    waste_ceiling: ClassVar[float | None] = 2.0

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        warmup_length: int = WARMUP_LENGTH,
    ) -> None:
        if warmup_length < 1:
            raise InputError(f"warmup_length is {warmup_length}; give at least 1 token")
        self.model, self.kv, self.live, self.warmup_length = model, kv, LiveSpans(), warmup_length
        contract = AddressContract({
            "model": model,
            "kv.keys": lambda: kv.keys, "kv.values": lambda: kv.values, "kv.page_table": lambda: kv.page_table,
        })  # fmt: skip
        super().__init__(group, buckets, contract, options)

    def slots(self) -> dict[str, Slot]:
        """Three rows of int64, one element a token."""
        return {name: Slot(shape=(-1,), dtype=torch.int64, pad=0) for name in INPUTS}

    def step(self, **inputs: Tensor) -> Tensor:
        """The body of one prefill step.

        Args:
            **inputs: ``INPUTS``, each [tokens] int64.

        Returns:
            [tokens, hidden_size]: normed hidden states in the model's dtype.
        """
        attention = PrefillAttention(self.kv, out_slots=inputs["out_slots"], live=self.live)
        hidden: Tensor = self.model(inputs["input_ids"], inputs["positions"], attention)
        return hidden

    @torch.no_grad()
    def last_logits(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        """Scores of the token after each request's last one; eager, after the body.

        Args:
            hidden: [tokens, hidden_size], as ``run`` returned them for these spans.
            spans: the step's requests.

        Returns:
            [len(spans), vocabulary] in the model's dtype.
        """
        ends = torch.tensor(list(accumulate(span.length for span in spans)), dtype=torch.int64)
        return self.model.logits(hidden.index_select(0, ends.to(hidden.device, non_blocking=True) - 1))

    def set_live(self, live: Sequence[Span] | None) -> None:
        """Breaks read the spans of this step; what was derived from the step before is dropped (P45)."""
        self.live.spans = live or ()

    def rows(self, live: Sequence[Span]) -> int:
        """A token is a row."""
        return sum(span.length for span in live)

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """Nothing but the size sends a breakable step eager.

        Raises:
            InputError: if the spans are not as long as the inputs.
        """
        tokens, given = self.rows(self.live.spans), values["input_ids"].shape[0]
        if tokens != given:
            raise InputError(f"the spans have {tokens} tokens, the inputs {given}; give one span a request")
        return None

    def prepare(self, views: dict[str, Tensor]) -> None:
        """Requests of the warm-up length at the reserved row; their KV goes to the reserved slot (P28, P44)."""
        size, length = views["input_ids"].shape[0], self.warmup_length
        self.set_live([Span(0, 0, min(length, size - start)) for start in range(0, size, length)])

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Random tokens at random positions, written to distinct slots; requests of other lengths, some cached."""
        size = views["input_ids"].shape[0]
        rows, pages = self.kv.page_table.shape
        slots, context = self.kv.keys.shape[1], pages * self.kv.page_size

        def draw(high: int, count: int = size) -> Tensor:
            return torch.randint(0, high, (count,), generator=generator)

        views["input_ids"].copy_(draw(self.model.config.vocab_size))
        views["positions"].copy_(draw(self.model.config.max_position))
        views["out_slots"].copy_(
            torch.randperm(slots, generator=generator)[:size] if slots >= size else draw(slots)
        )
        spans, left = [], size
        while left:
            length = 1 + int(draw(min(left, context), 1))
            start = int(draw(context - length + 1, 1))
            spans.append(Span(int(draw(rows, 1)), start, length))
            left -= length
        self.set_live(spans)
