"""The grid of the TTFT bench: its points, and the step that the batches of a point are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cglab.engine.load import Load
from cglab.engine.workload import steady_prefill
from cglab.lab.facade import Lab
from cglab.lab.step_metrics import Progress, sustained
from cglab.measure.parity import Parity
from cglab.measure.profiling import profile
from cglab.measure.trace import Trace

CAPTURED = ("breakable", "full")
ARMS = ("eager", *CAPTURED)
MOST_TOKENS = 49152
"""Fresh tokens of one run of a load, beyond which it has no more requests than are in flight."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the grid.

    Attributes:
        tokens: fresh tokens of each request.
        cached: tokens before them that are in the prefix cache, the same for all.
        concurrency: requests in flight.
    """

    tokens: int
    cached: int
    concurrency: int

    @property
    def load(self) -> Load:
        """Twice as many requests as are in flight, at least 4; fewer where that would be ``MOST_TOKENS``."""
        wanted = min(2 * self.concurrency, MOST_TOKENS // self.tokens)
        count = max(4, self.concurrency, wanted)
        return Load(count, self.concurrency, self.tokens, 1, shared_prefix=self.cached)

    def requests_a_step(self, budget: int) -> int:
        """How many requests a batch under the token budget takes."""
        return max(1, min(self.concurrency, budget // self.tokens))


@dataclass(frozen=True)
class Probe:
    """The step that a point's batches are made of.

    Attributes:
        trace: of it, eager.
        eager_seconds: of it, eager and unprofiled.
        parity: of the captured arms, against padded eager.
        workload: its size and bucket.
    """

    trace: Trace
    eager_seconds: float
    parity: Mapping[str, Parity]
    workload: Mapping[str, Any]


def grid(sizes: Sequence[tuple[int, int]], concurrencies: Sequence[int]) -> list[Point]:
    """All points, from the largest step to the smallest: buckets are captured on first use, best largest first."""
    return in_order(Point(tokens, cached, many) for tokens, cached in sizes for many in concurrencies)


def in_order(points: Iterable[Point]) -> list[Point]:
    """Points from the largest step to the smallest."""
    return sorted(points, key=lambda point: (-point.tokens * point.concurrency, point.cached))


FULL_GRID = in_order([
    *grid(((128, 0), (512, 0), (2048, 0), (8192, 0), (1024, 8192)), (1, 4, 16)),
    *grid(((256, 0), (768, 0), (1024, 0), (1536, 0)), (1,)),  # where the crossover lies
])  # fmt: skip
QUICK_GRID = grid(((16, 0), (48, 0), (16, 32)), (1, 3))


def probe_steps(lab: Lab, points: Sequence[Point], progress: Progress) -> dict[Point, Probe]:
    """The step of every point, measured once where points share it."""
    made: dict[tuple[int, int, int], Probe] = {}
    probes = {}
    for point in points:
        requests = point.requests_a_step(lab.engine.scheduler.options.token_budget)
        sizes = requests * point.tokens, point.cached, requests
        if sizes not in made:
            progress(
                f"{lab.name}: step of {sizes[0]} tokens, {requests} requests after {point.cached} cached"
            )
            made[sizes] = _probe(lab, *sizes)
        probes[point] = made[sizes]
    return probes


def _probe(lab: Lab, tokens: int, cached: int, requests: int) -> Probe:
    with steady_prefill(lab.engine, tokens, cached, requests) as step:
        parity = {arm: lab.step_parity(arm, step, "prefill") for arm in CAPTURED}
        eager = lab.runner("eager", "prefill")
        trace = profile(lambda: eager.run(step.live, **step.inputs), steps=2, device=lab.device, warmup=1)
        once = sustained(eager, step, lab.device, 1)
        return Probe(trace, median(once() for _ in range(3)), parity, lab.describe(step, "prefill"))


def estimate(lab: Lab, points: Sequence[Point], probes: Mapping[Point, Probe]) -> float:
    """Seconds that one turn of all arms takes at every point, if all are as slow as eager."""
    budget, total = lab.engine.scheduler.options.token_budget, 0.0
    for point in points:
        requests = point.requests_a_step(budget)
        steps = -(-point.load.count // requests) + point.cached / (requests * point.tokens)
        total += steps * probes[point].eager_seconds
    return total * len(ARMS)
