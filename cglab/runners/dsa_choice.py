"""T9 or T9b, chosen for each prefill step of a model with sparse attention by what was measured (beyond S3).

Captured: what T9 captures, its only break the selection; and for each room for cached tokens in which recording the
selection too was measured to be faster, what T9b captures over keys of that extent. A bucket of either is recorded on
its first use, in one pool. Which of them a step replays is decided before any padding from its tokens and cached tokens
(``dsa_policy.SelectionRule``), and counted as ``dsa_selection`` with the reason where the break stays.

It cannot: know a cost that nobody recorded. Without costs, and for a step larger or with more cached tokens than was
measured, the break stays. So it does for more requests than a recording's axis holds, which T9b would run eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.options import Options
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.spans import Span
from cglab.runners.base import GraphGroup
from cglab.runners.dsa_policy import Parts, SelectionRule, coverage_of_part
from cglab.runners.dsa_prefill import DsaPrefillRunner

SELECTION = "dsa_selection"
"""What coverage calls the selection: scores and top-k."""


class DsaChoiceRunner(DsaPrefillRunner):
    """T9, and in its place T9b where the rule says so.

    Args:
        model: the decoder.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: token counts to capture.
        options: as ``DsaPrefillRunner`` takes them.
        parts: of T9.
        whole: of T9b; where a toggle or a kill switch leaves its selection a break, that is the reason of every step.
        rule: for which steps the selection is recorded.
        **sizes: floor, request axis and warm-up, as ``DsaPrefillRunner`` takes them.

    Attributes:
        recorded: the runner with the selection recorded, by its room for cached tokens.
    """

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        parts: Parts,
        whole: Parts,
        rule: SelectionRule,
        **sizes: Any,
    ) -> None:
        super().__init__(model, kv, group, buckets, options, parts=parts, **sizes)
        self.rule, self._never = rule, whole.select
        self._left = Miss(Reason.LIVE_EXTENT)
        self.recorded = {
            room: DsaPrefillRunner(model, kv, group, buckets, options, parts=whole, **sizes | {"max_cached": room})
            for room in (rule.rooms if self._never is None else ())
        }  # fmt: skip

    def room_for(self, live: Sequence[Span]) -> int | Miss:
        """The room of the recording that a step replays, or why its selection stays a break."""
        if self._never is not None:
            return self._never
        if len(live) > self.max_requests:
            return Miss(Reason.MORE_REQUESTS, f"{len(live)} requests, the axis holds {self.max_requests}")
        return self.rule.room_for(self.rows(live), sum(span.start for span in live))

    def serving(self, live: Sequence[Span]) -> DsaPrefillRunner:
        """See ``Runner``."""
        room = self.room_for(live)
        return self if isinstance(room, Miss) else self.recorded[room]

    def run(self, live: Sequence[Span], **values: Tensor) -> Any:
        """See ``Runner``: by the runner that the rule chooses."""
        room = self.room_for(live)
        if isinstance(room, Miss):
            self._left = room
            return super().run(live, **values)
        return self.recorded[room].run(live, **values)

    def run_padded_eager(self, live: Sequence[Span], size: int, **values: Tensor) -> Any:
        """See ``Runner``: likewise, over the static buffers of that runner."""
        serving = self.serving(live)
        if serving is self:
            return super().run_padded_eager(live, size, **values)
        return serving.run_padded_eager(live, size, **values)

    def capture(self) -> None:
        """See ``Runner``: of both."""
        super().capture()
        for runner in self.recorded.values():
            runner.capture()

    def capture_for(self, rows: int) -> None:
        """See ``Runner``: of both, where some step of so many tokens has its selection recorded."""
        super().capture_for(rows)
        for room, runner in self.recorded.items():
            if rows <= self.rule.rooms[room]:
                runner.capture_for(rows)

    def coverage(self) -> Coverage:
        """See ``Runner``: of both together."""
        return reduce(add, (runner.coverage() for runner in self.recorded.values()), super().coverage())

    def coverages(self) -> dict[str, Coverage]:
        """See ``Runner``; and how often the selection was recorded, why not at the latest step where it was not."""
        left = coverage_of_part(super().coverage(), lambda _: self._left)
        recorded = (runner.covered("select") for runner in self.recorded.values())
        return {**super().coverages(), SELECTION: reduce(add, recorded, left)}

    def tries(self) -> int:
        """See ``Runner``: of both."""
        return super().tries() + sum(runner.tries() for runner in self.recorded.values())

    def memory(self) -> list[dict[str, Any]]:
        """See ``Runner``: of both."""
        return [*super().memory(), *(row for runner in self.recorded.values() for row in runner.memory())]

    def close(self) -> None:
        """See ``Runner``: of both."""
        for runner in self.recorded.values():
            runner.close()
        super().close()
