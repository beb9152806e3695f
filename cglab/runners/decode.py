"""T1, the decode step: one new token for every running request.

Captured: embedding, all layers with their KV writes and attention, head and greedy sampling, for a fixed number of
requests. Static: the weights, the paged cache and its page table, and five input slots (ids, positions, where the
new KV goes, request rows, lengths). Padded requests point at the reserved row 0 and write to the reserved slot 0;
their length is 1, so that attention has something to read. In ``full`` attention is recorded inline over every row;
in ``breakable`` it is a break in each layer that sees live requests only.

It cannot: serve a batch above its largest bucket, requests with more than one new token, or a model whose weights
have moved. Each of these runs eager, or is refused, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cglab.graphs.address import AddressContract
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.attention import DecodeAttention, LiveRows
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup, Runner

INPUTS = ("input_ids", "positions", "out_slots", "request_rows", "seq_lens")


class DecodeRunner(Runner[int]):
    """The decode step of one model over one cache.

    Args:
        model: the decoder.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
    """

    technique = "decode"
    inputs = INPUTS

    def __init__(
        self, model: Decoder, kv: PagedKV, group: GraphGroup, buckets: Sequence[int], options: Options
    ) -> None:
        self.model, self.kv, self.live = model, kv, LiveRows()
        contract = AddressContract({
            "model": model,
            "kv.keys": lambda: kv.keys, "kv.values": lambda: kv.values, "kv.page_table": lambda: kv.page_table,
        })  # fmt: skip
        super().__init__(group, buckets, contract, options)

    def slots(self) -> dict[str, Slot]:
        """Five rows of int64, one element a request."""
        one = Slot(shape=(-1,), dtype=torch.int64, pad=0)
        length = Slot(shape=(-1,), dtype=torch.int64, pad=1)
        return {name: length if name == "seq_lens" else one for name in INPUTS}

    def step(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One decode step.

        Args:
            **inputs: ``INPUTS``, each [requests] int64.

        Returns:
            Next token ids [requests] int64, and logits [requests, vocabulary] in the model's dtype.
        """
        attention = DecodeAttention(
            self.kv, out_slots=inputs["out_slots"], request_rows=inputs["request_rows"],
            seq_lens=inputs["seq_lens"], live=self.live,
        )  # fmt: skip
        hidden = self.model(inputs["input_ids"], inputs["positions"], attention)
        logits = self.model.logits(hidden)
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
        """Random tokens at random positions of random rows, written to distinct slots."""
        size = views["input_ids"].shape[0]
        rows, pages = self.kv.page_table.shape
        slots = self.kv.keys.shape[1]

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (size,), generator=generator)

        positions = draw(0, pages * self.kv.page_size)
        views["input_ids"].copy_(draw(0, self.model.config.vocab_size))
        views["positions"].copy_(positions)
        views["seq_lens"].copy_(positions + 1)
        views["request_rows"].copy_(draw(0, rows))
        views["out_slots"].copy_(
            torch.randperm(slots, generator=generator)[:size] if slots >= size else draw(0, slots)
        )
