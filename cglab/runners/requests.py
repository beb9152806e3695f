"""What the phases share whose unit is a request: decode, verify, and the steps of a draft.

Such a phase declares its static inputs, each with its padding and with what the self-check draws for it; slots and
self-check follow. Live is a number of requests: how many tokens or branches each has is the phase's width, which
is part of the slots and of no count (P9). Padded requests point at the reserved row 0, store to the reserved slot 0,
and are as long as a step is wide, so that attention has something to read (P12).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from cglab.errors import TokenRangeError
from cglab.graphs.address import AddressContract, Getter
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.assistant import Assistant
from cglab.models.attention import LiveRows
from cglab.models.block_draft import BlockDraft
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.ops import decode_attention
from cglab.runners.base import GraphGroup, Runner, distinct_slots, window_inputs

log = logging.getLogger("cglab.runners")

Model = TypeVar("Model", Decoder, Assistant, BlockDraft)


@dataclass(frozen=True, slots=True)
class Input:
    """A static input of a phase.

    Attributes:
        slot: its shape, type and padding.
        draw: other valid values of a shape, for the self-check.
    """

    slot: Slot
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]


def whole(low: int, high: int, *columns: int, pad: int = 0, width: int = 1) -> Input:
    """An int64 input from ``low`` to below ``high``, with ``width`` rows of ``columns`` for each request."""
    slot = Slot(shape=(-1, *columns), dtype=torch.int64, pad=pad, width=width)
    return Input(
        slot,
        lambda shape, generator: torch.randint(
            low, high, shape, generator=generator, device=generator.device
        ),
    )


def real(dtype: torch.dtype, *columns: int) -> Input:
    """A floating-point input from 0 to 1, with a row of ``columns`` for each request."""
    slot = Slot(shape=(-1, *columns), dtype=dtype, pad=0.0)
    return Input(
        slot, lambda shape, generator: torch.rand(shape, generator=generator, device=generator.device)
    )


class RequestRunner(Runner[int], Generic[Model]):
    """A phase over one paged cache whose unit is a request.

    Args:
        model: what computes it.
        kv: the cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        watched: what recordings read by address beside the cache.
        width: tokens of each request.

    Attributes:
        title: what a capture is called in the log.
        tokens_at: the place of the token ids among the outputs.
        live: how many requests attention's breaks see.
        declared: static inputs by name.
        longest: tokens that a request can have: the cache ends with a page, the model where its positions do.
    """

    title: ClassVar[str]
    tokens_at: ClassVar[int] = 0

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        watched: Mapping[str, nn.Module | Getter],
        *,
        width: int = 1,
    ) -> None:
        self.model: Model = model
        self.kv, self.width, self.live = kv, width, LiveRows()
        self.vocabulary = model.config.vocab_size
        self.longest = min(len(kv.context_positions), len(model.rotary))
        self.declared = self.declare()
        self.inputs = tuple(self.declared)
        super().__init__(group, buckets, AddressContract({**watched, **kv.watched()}), options)

    @abstractmethod
    def declare(self) -> dict[str, Input]:
        """The phase's static inputs, in the order of ``inputs``."""

    def requests(self) -> dict[str, Input]:
        """Rows and lengths of the requests: what every phase reads."""
        return {
            "request_rows": whole(0, len(self.kv.full.page_table)),
            "seq_lens": whole(self.width, self.longest + 1, pad=self.width),
        }

    def stores(self) -> dict[str, Input]:
        """The same of a phase that stores keys and values, with the slots of each pool that they go to."""
        names = ("out_slots", *window_inputs(self.kv))
        slot = Slot(shape=(-1,), dtype=torch.int64, pad=0, width=self.width)
        pools = zip(names, self.kv.pools, strict=True)
        return {name: Input(slot, partial(distinct_slots, pool)) for name, pool in pools} | self.requests()

    def slots(self) -> dict[str, Slot]:
        """See ``Runner``."""
        return {name: declared.slot for name, declared in self.declared.items()}

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """See ``Runner``."""
        for (
            name,
            declared,
        ) in self.declared.items():  # in this order, or the same seed would draw other values
            views[name].copy_(declared.draw(tuple(views[name].shape), generator))

    def attend(self, inputs: Mapping[str, Tensor], *, live: LiveRows | None = None, **step: Any) -> Any:
        """Attention of a step; frozen where the phase stores nothing.

        Args:
            inputs: ``requests``, or ``stores``.
            live: how many rows the breaks see, where these are no requests.
            **step: width and tree, as ``DecodeStep`` takes them.

        Returns:
            What the model's layers attend by: a ``DecodeStep`` or a ``LatentDecode``.
        """
        for name in ("request_rows", "seq_lens", "out_slots", "window_out_slots"):
            if name in inputs:
                step[name] = inputs[name]
        form = decode_attention(self.model.config, self.model.body.name)
        return form(self.kv, live=live or self.live, **step)

    def width_of(self, values: Mapping[str, Tensor]) -> int:
        """Tokens that each request of a step brings."""
        requests = values["request_rows"].shape[0]
        return values["input_ids"].shape[0] // requests if requests else self.width

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """A step whose requests bring more or fewer tokens each is another phase's, also where it would fit (P4)."""
        width = self.width_of(values)
        if width == self.width:
            return None
        return Miss(Reason.WIDTH, f"{width} tokens a request, captured {self.width}")

    def set_live(self, live: int | None) -> None:
        """Breaks read how many requests are live; inside a full recording every row is computed (P37)."""
        self.live.rows = live if self.backend == "breakable" else None

    def rows(self, live: int) -> int:
        """A request is a row."""
        return live

    def prepare(self, views: dict[str, Tensor]) -> None:
        """Pad values are valid inputs: every request is at the reserved row, as long as a step is wide."""
        self.set_live(views["request_rows"].shape[0])

    def capture(self) -> None:
        """See ``Runner``; logged as S0's server does."""
        if self.backend == "eager":
            super().capture()
            return
        log.info("Capture %s graph begin.", self.title)
        super().capture()
        sizes = len(self.captured.captured_sizes)
        log.info("Capture %s graph end (captured %d batch sizes).", self.title, sizes)

    def check(self, output: Any) -> None:
        """Refuses token ids that the vocabulary does not have, before anything is looked up with them (B73).

        Raises:
            TokenRangeError: naming the token and its place.
        """
        tokens = output[self.tokens_at].flatten()
        wrong = ((tokens < 0) | (tokens >= self.vocabulary)).nonzero().flatten().tolist()
        if wrong:
            raise TokenRangeError(
                f"{self.technique} handed out token {int(tokens[wrong[0]])} at {wrong[0]} of {len(tokens)}: the "
                f"vocabulary has 0 to {self.vocabulary - 1}. The step has read or left memory that it does not own; "
                "run it eager and compare"
            )
