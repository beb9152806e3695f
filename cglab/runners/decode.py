"""T1, the decode step: one new token for every running request.

Captured: embedding, all layers with their KV writes and attention, head and the choice of the next token, for a
fixed number of requests. Static: the weights, the paged cache and its page tables, and the input slots (ids,
positions, where the new KV goes, request rows, lengths; with sliding-window layers where their KV goes; in the form
with sampling temperatures and seeds). Padded requests point at the reserved row 0 and write to the reserved slot 0;
their length is 1, so that attention has something to read. In ``full`` attention is recorded inline over every row;
in ``breakable`` it is a break in each layer that sees live requests only.

It cannot: serve a batch above its largest bucket, requests with more than one new token, or a model whose weights
have moved. Each of these runs eager, or is refused, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cglab.graphs.address import AddressContract
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.attention import LiveRows
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.ops import DECODE_ATTENTION
from cglab.models.sampling import sample
from cglab.runners.base import GraphGroup, Runner, distinct_slots, window_inputs

INPUTS = ("input_ids", "positions", "out_slots", "request_rows", "seq_lens")
"""Slots of every decode step."""
SAMPLING_INPUTS = ("temperatures", "seeds")
"""Slots that the form with sampling adds."""


class DecodeRunner(Runner[int]):
    """The decode step of one model over one cache.

    Args:
        model: the decoder.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        sampling: draw the next token by each request's temperature and seed, instead of the most likely one.

    Attributes:
        inputs: names of this form's slots.
    """

    technique = "decode"

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        sampling: bool = False,
    ) -> None:
        self.model, self.kv, self.live, self.sampling = model, kv, LiveRows(), sampling
        # A form of its own and not a branch on temperatures, which would freeze at their first values (P2, P37).
        self.variant = "sampling" if sampling else None
        self.inputs = INPUTS + window_inputs(kv) + sampling * SAMPLING_INPUTS
        super().__init__(group, buckets, AddressContract({"model": model, **kv.watched()}), options)

    def slots(self) -> dict[str, Slot]:
        """One element a request: int64 but for the temperatures, 0 in padding but for the lengths."""
        one = Slot(shape=(-1,), dtype=torch.int64, pad=0)
        others = {"seq_lens": replace(one, pad=1), "temperatures": replace(one, dtype=torch.float32)}
        return {name: others.get(name, one) for name in self.inputs}

    def step(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One decode step.

        Args:
            **inputs: ``self.inputs``, each [requests]; temperatures float32, all others int64.

        Returns:
            Next token ids [requests] int64, and logits [requests, vocabulary] in the model's dtype.
        """
        attention = DECODE_ATTENTION[self.model.body.name](
            self.kv, out_slots=inputs["out_slots"], window_out_slots=inputs.get("window_out_slots"),
            request_rows=inputs["request_rows"], seq_lens=inputs["seq_lens"], live=self.live,
        )  # fmt: skip
        hidden = self.model(inputs["input_ids"], inputs["positions"], attention)
        logits = self.model.logits(hidden)
        if self.sampling:
            return sample(logits, inputs["temperatures"], inputs["seeds"], inputs["positions"]), logits
        return logits.argmax(-1), logits

    def set_live(self, live: int | None) -> None:
        """Breaks read how many requests are live; inside a full recording every row is computed (P37)."""
        self.live.rows = live if self.backend == "breakable" else None

    def rows(self, live: int) -> int:
        """A request is a row."""
        return live

    def prepare(self, views: dict[str, Tensor]) -> None:
        """Pad values are valid inputs: every request is one token at the reserved row."""
        self.set_live(views["request_rows"].shape[0])

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """A step whose requests bring more than one token each is not a decode step (P4)."""
        width = values["input_ids"].shape[0] // max(values["request_rows"].shape[0], 1)
        return Miss(Reason.WIDTH, f"{width} tokens a request, captured 1") if width > 1 else None

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Random tokens at random positions of random rows, written to distinct slots; a third of them greedy."""
        size = views["input_ids"].shape[0]

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (size,), generator=generator)

        positions = draw(0, len(self.kv.context_positions))
        drawn = {
            "input_ids": draw(0, self.model.config.vocab_size), "positions": positions, "seq_lens": positions + 1,
            "request_rows": draw(0, len(self.kv.full.page_table)),
            "out_slots": distinct_slots(self.kv.full, size, generator),
        }  # fmt: skip
        if self.kv.sliding is not None:
            drawn["window_out_slots"] = distinct_slots(self.kv.sliding, size, generator)
        if self.sampling:
            drawn["temperatures"] = draw(-1, 3).clamp_min(0)
            drawn["seeds"] = draw(-(2**63), 2**63 - 1)
        for name, view in views.items():
            view.copy_(drawn[name])
