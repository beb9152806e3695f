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

from collections.abc import Sequence

import torch
from torch import Tensor

from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.sampling import sample
from cglab.runners.base import GraphGroup
from cglab.runners.requests import Input, RequestRunner, whole

INPUTS = ("input_ids", "positions", "out_slots", "request_rows", "seq_lens")
"""Slots of every decode step."""
TEMPERATURES = Input(
    Slot(shape=(-1,), dtype=torch.float32, pad=0.0),
    lambda shape, generator: torch.randint(-1, 3, shape, generator=generator).clamp_min(0),
)
"""Temperatures, of which the self-check draws half greedy."""


class DecodeRunner(RequestRunner[Decoder]):
    """The decode step of one model over one cache.

    Args:
        model: the decoder.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        sampling: draw the next token by each request's temperature and seed, instead of the most likely one.
    """

    technique, title = "decode", "decode"

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
        self.sampling = sampling
        # A form of its own and not a branch on temperatures, which would freeze at their first values (P2, P37).
        self.variant = "sampling" if sampling else None
        super().__init__(model, kv, group, buckets, options, {"model": model})

    def declare(self) -> dict[str, Input]:
        """A token, its position and its place for each request; and how it is to be drawn."""
        positions = whole(0, self.longest)
        step = {"input_ids": whole(0, self.vocabulary), "positions": positions, **self.stores()}
        drawing = {"temperatures": TEMPERATURES, "seeds": whole(-(2**63), 2**63 - 1)}
        return step | drawing if self.sampling else step

    def step(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One decode step.

        Args:
            **inputs: ``self.inputs``, each [requests]; temperatures float32, all others int64.

        Returns:
            Next token ids [requests] int64, and logits [requests, vocabulary] in the model's dtype.
        """
        hidden = self.model(inputs["input_ids"], inputs["positions"], self.attend(inputs))
        logits = self.model.logits(hidden)
        if self.sampling:
            return sample(logits, inputs["temperatures"], inputs["seeds"], inputs["positions"]), logits
        return logits.argmax(-1), logits
