"""Engines that keep the logits of every token of every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.batches import Batch, DecodeBatch
from cglab.engine.engine import Engine
from cglab.engine.phases import Forward
from cglab.engine.requests import Request
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculator import Speculator
from cglab.lab.verdicts import TechniqueParity


@dataclass
class Watched:
    """What was seen.

    Attributes:
        requests: in order of arrival.
        logits: that each token was chosen from, by request and place in its output.
    """

    requests: list[Request] = field(default_factory=list)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass
class WatchedDrafts(Watched):
    """What was seen of speculative decoding.

    Attributes:
        steps: of every step of a runner, in order: its technique, the size that it was replayed at (None where it ran
            eager), and every output.
        accepted: what became of drafts.
    """

    steps: list[tuple[str, int | None, tuple[Tensor, ...]]] = field(default_factory=list)
    accepted: AcceptLengths = field(default_factory=AcceptLengths)


def against(
    found: Watched, requests: Sequence[Request], tokens: Mapping[int, Sequence[int]],
    logits: Mapping[tuple[int, int], Tensor], result: TechniqueParity, *, bound: float, exact: bool, what: str,
) -> None:  # fmt: skip
    """Oracle 2 for whole requests: tokens equal but for near-ties, logits within what rounding does.

    Args:
        found: what was served.
        requests: of it.
        tokens: that the oracle has, by request.
        logits: that it chose them from.
        result: what is noted there.
        bound: largest drift of logits that is rounding.
        exact: whether what lies beyond is a fault, or only told.
        what: the oracle, for people.
    """
    result.bound = bound
    for request in requests:
        for place, (token, want) in enumerate(zip(request.output, tokens[request.index], strict=True)):
            key, where = (request.index, place), {"request": request.index, "token": place}
            far = float((found.logits[key].double() - logits[key].double()).abs().max())
            result.max_drift = max(result.max_drift, far)
            result.compared_tokens += 1
            if exact and not far <= bound:
                result.fault(2, where, f"logits drift by {far:.3g}, bound {bound:.3g}")
            if token != want:
                gap = float(logits[key].max() - logits[key][token])
                tie = gap < bound
                result.ties, result.differing = result.ties + tie, result.differing + (not tie)
                if exact and not tie:
                    result.fault(2, where, f"token {token} where {what} has {want}, {gap:.3g} higher")
                break  # from here on the contexts differ


class WatchedEngine(Engine):
    """Keeps the requests, and the logits of every token that prefill and plain decoding give."""

    def __init__(self, found: Watched, *args: Any) -> None:
        super().__init__(*args)
        self._found = found

    def submit(self, request: Request) -> None:
        """See ``Engine``."""
        self._found.requests.append(request)
        super().submit(request)

    def forward(self, batch: Batch) -> Forward:
        """See ``Engine``."""
        computed = super().forward(batch)
        ending = [chunk.request for chunk in batch.chunks if chunk.last]
        for request, row in zip(ending, computed.logits.clone(), strict=True):
            self._found.logits[request.index, len(request.output)] = row
        return computed


class WatchedSpeculator(Speculator):
    """Keeps the logits of every token that a verify pass committed; its steps are noted by whoever runs them."""

    def __init__(self, found: WatchedDrafts, *args: Any) -> None:
        super().__init__(*args)
        self._found = found
        self._paths: list[list[int]] = []

    def step(self, batch: DecodeBatch, segments: ForwardSegments) -> list[list[int]]:
        """See ``Speculator``."""
        self._paths.clear()
        tokens = super().step(batch, segments)
        _, _, (_, logits, *_) = self._found.steps[-1]  # the verify pass comes last
        rows = logits.unflatten(0, (len(batch.requests), -1))
        for request, path, row in zip(batch.requests, self._paths, rows, strict=True):
            for place, node in enumerate(path, len(request.output)):
                self._found.logits[request.index, place] = row[node]
        return tokens

    def _accept(self, *given: Any) -> list[int]:
        self._paths.append(super()._accept(*given))
        return self._paths[-1]
