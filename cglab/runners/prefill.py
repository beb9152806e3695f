"""T6, the prefill body: all new tokens of all requests of a step on one token axis.

Captured: embedding, all layers and the last norm, for a fixed number of tokens. Head and logits stay outside, on the
last row of each request, because few rows need them. Static: the weights, the paged cache and its page tables, and
three input slots (ids, positions, where the new KV goes; with sliding-window layers a fourth, where theirs goes). How
the tokens are split into requests, and how many are live, is data, so one recording serves every split. In
``breakable`` attention is an eager break in each layer that reads the live spans; in ``full`` it is recorded over a
fixed request axis, which three more slots describe. Padded tokens write to the reserved slot 0, and their rows are
zero after every attention (P53).

It cannot: serve more tokens than its largest bucket, which is the limit up to which a capture pays, or pad a step to
more than twice its tokens (P7); in ``full``, serve more requests or more cached tokens than the axis holds. Each of
these runs eager, in the form with spans, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from cglab.errors import InputError
from cglab.graphs.address import AddressContract, Getter
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.decoder import Decoder
from cglab.models.draft_cache import Feeder
from cglab.models.kv import PagedKV
from cglab.models.request_axis import RequestAxisAttention
from cglab.models.spans import LiveSpans, PrefillAttention, Span, first_key
from cglab.runners.base import GraphGroup, Runner, distinct_slots, window_inputs

INPUTS = ("input_ids", "positions", "out_slots")
"""Slots of every prefill step."""
REQUEST_AXIS = ("request_rows", "cu_seqlens_q", "cu_seqlens_k")
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
        max_requests: places on the request axis of a full recording.
        max_cached: cached tokens, of all requests together, that a full recording has room for beside the new ones;
            None for as many as the largest bucket has. Every layer gathers that many keys, used or not; one with a
            window no more than a window for each place on the axis.
        warmup_length: most tokens of each request of the example that a capture warms up with (B58).
        feeder: of a block draft, whose cache is then filled in the same recording.

    Attributes:
        inputs: names of the slots that a caller fills.

    Raises:
        InputError: for a warm-up length or a request axis below 1, or negative room for cached tokens.
    """

    technique = "prefill"
    variant: str | None = "prefill"
    waste_ceiling: ClassVar[float | None] = 2.0

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        max_requests: int = 16,
        max_cached: int | None = None,
        warmup_length: int = WARMUP_LENGTH,
        feeder: Feeder | None = None,
    ) -> None:
        self.max_cached = max(buckets) if max_cached is None else max_cached
        self.max_requests, self.warmup_length = max_requests, warmup_length
        if max_requests < 1 or warmup_length < 1 or self.max_cached < 0:
            raise InputError(
                f"max_requests {max_requests} and warmup_length {warmup_length} must be at least 1, "
                f"max_cached {max_cached} at least 0"
            )
        self.model, self.kv, self.live, self.feeder = model, kv, LiveSpans(), feeder
        self.inputs = self.needed()
        super().__init__(group, buckets, AddressContract(self.watched()), options)

    def watched(self) -> dict[str, nn.Module | Getter]:
        """Everything that recordings read by address."""
        fed = {} if self.feeder is None else self.feeder.watched(self.model, self.kv)
        return {"model": self.model, **self.kv.watched(), **fed}

    @property
    def fixed_axis(self) -> bool:
        """Whether a recording holds requests on a fixed axis, instead of leaving them to breaks."""
        return self.backend == "full"

    def needed(self) -> tuple[str, ...]:
        """Names of the slots that a caller fills."""
        return INPUTS + window_inputs(self.kv)

    def slots(self) -> dict[str, Slot]:
        """Rows of int64, one element a token; and the request axis of a full recording, int32."""
        tokens = {name: Slot(shape=(-1,), dtype=torch.int64, pad=0) for name in self.inputs}
        if not self.fixed_axis:
            return tokens
        places = (self.max_requests, self.max_requests + 1, self.max_requests + 1)
        return tokens | {
            name: Slot(shape=(count,), dtype=torch.int32, axis=None, pad=0)
            for name, count in zip(REQUEST_AXIS, places, strict=True)
        }

    def step(self, **inputs: Tensor) -> Any:
        """The body of one prefill step.

        Args:
            **inputs: ``self.inputs``, each [tokens] int64; and ``REQUEST_AXIS``, or none of it for the form with spans.

        Returns:
            [tokens, hidden_size]: normed hidden states in the model's dtype.
        """
        tokens = inputs["input_ids"], inputs["positions"], self.attend(inputs)
        feeder = self.feeder
        hidden: Tensor = feeder.forward(*tokens, inputs["out_slots"]) if feeder else self.model(*tokens)
        return hidden

    def attend(self, inputs: Mapping[str, Tensor]) -> Any:
        """Attention of a step: over the request axis where it is among the inputs, else over the live spans."""
        slots = {name: inputs[name] for name in self.inputs if name.endswith("out_slots")}
        axis = {name: inputs[name] for name in REQUEST_AXIS if inputs.get(name) is not None}
        if not axis:
            return PrefillAttention(self.kv, live=self.live, **slots)
        return RequestAxisAttention(self.kv, keys=len(inputs["out_slots"]) + self.max_cached, **slots, **axis)

    @torch.no_grad()
    def last_logits(
        self, hidden: Tensor, spans: Sequence[Span], which: Sequence[int] | None = None
    ) -> Tensor:
        """Scores of the token after each request's last one; eager, after the body.

        Args:
            hidden: [tokens, hidden_size], as ``run`` returned them for these spans.
            spans: the step's requests.
            which: indices of the spans that are asked for, those that end their prompt; None for all.

        Returns:
            [spans asked for, vocabulary] in the model's dtype.
        """
        ends = [end - 1 for end in accumulate(span.length for span in spans)]
        rows = torch.tensor(ends if which is None else [ends[i] for i in which], dtype=torch.int64)
        return self.model.logits(hidden.index_select(0, rows.to(hidden.device, non_blocking=True)))

    def set_live(self, live: Sequence[Span] | None) -> None:
        """Breaks read the spans of this step; what was derived from the step before is dropped (P45)."""
        self.live.spans = live or ()

    def rows(self, live: Sequence[Span]) -> int:
        """A token is a row."""
        return sum(span.length for span in live)

    def derived(self, live: Sequence[Span]) -> dict[str, Tensor]:
        """The request axis of a full recording, in one copy; absent requests start at the end with length 0 (P27)."""
        if not self.fixed_axis:
            return {}
        absent = self.max_requests - len(live)
        rows = [span.row for span in live] + [0] * absent
        queries = list(accumulate((s.length for s in live), initial=0))
        keys = list(accumulate((s.end for s in live), initial=0))
        packed = [*rows, *queries, *[queries[-1]] * absent, *keys, *[keys[-1]] * absent]
        on_device = torch.from_numpy(np.array(packed, dtype=np.int32)).to(self.kv.device, non_blocking=True)
        places = (self.max_requests, self.max_requests + 1, self.max_requests + 1)
        return dict(zip(REQUEST_AXIS, on_device.split(places), strict=True))

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """What does not fit a full recording; nothing but the size sends a breakable step eager.

        Raises:
            InputError: if the spans are not as long as the inputs.
        """
        spans = self.live.spans
        tokens, given = self.rows(spans), values["out_slots"].shape[0]
        if tokens != given:
            raise InputError(f"the spans have {tokens} tokens, the inputs {given}; give one span a request")
        limit = self.captured.buckets[-1]
        if tokens > limit and self.backend != "eager":
            return Miss(Reason.ABOVE_LIMIT, f"{tokens} tokens, captured up to {limit}")
        if not self.fixed_axis:
            return None
        if len(spans) > self.max_requests:
            return Miss(Reason.MORE_REQUESTS, f"{len(spans)} requests, the axis holds {self.max_requests}")
        reads = [pool.window for pool in self.kv.pools if pool.layers]
        cached = max(sum(span.start - first_key(span.start, window) for span in spans) for window in reads)
        if cached > self.max_cached:
            return Miss(Reason.MORE_KEYS, f"{cached} cached tokens, there is room for {self.max_cached}")
        bucket = self.captured.pad(tokens)
        return bucket if isinstance(bucket, Miss) else None

    def prepare(self, views: dict[str, Tensor]) -> None:
        """Requests of the warm-up length at the reserved row; their KV goes to the reserved slot (P28, P44)."""
        size, length = views["out_slots"].shape[0], self.warmup_length
        if self.fixed_axis:  # as many as the axis holds
            length = max(length, -(-size // self.max_requests))
        length = min(length, len(self.kv.context_positions))
        spans = [Span(0, 0, min(length, size - start)) for start in range(0, size, length)]
        self._place(spans[: self.max_requests] if self.fixed_axis else spans, views)

    def _place(self, spans: Sequence[Span], views: Mapping[str, Tensor]) -> None:
        self.set_live(spans)
        for name, value in self.derived(spans).items():
            views[name].copy_(value)

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Random tokens at random positions, written to distinct slots; requests of other lengths, some cached."""
        size, context = views["out_slots"].shape[0], len(self.kv.context_positions)

        def draw(high: int, count: int = size) -> Tensor:
            return torch.randint(0, high, (count,), generator=generator, device=generator.device)

        shape = self.model.config
        for name, high in (("input_ids", shape.vocab_size), ("positions", shape.max_position)):
            if name in views:
                views[name].copy_(draw(high))
        for name, pool in zip(("out_slots", *window_inputs(self.kv)), self.kv.pools, strict=True):
            views[name].copy_(distinct_slots(pool, (size,), generator))
        rows = len(self.kv.full.page_table)
        spans: list[Span] = []
        left, cached = size, self.max_cached
        while left:
            last = self.fixed_axis and len(spans) + 1 == self.max_requests
            length = min(left, context) if last else 1 + int(draw(min(left, context), 1))
            start = int(draw(max(min(context - length, cached), 0) + 1, 1))
            spans.append(Span(int(draw(rows, 1)), start, length))
            left, cached = 0 if last else left - length, cached - start
        self._place(spans, views)
