"""The bucket floor of sparse prefill, measured: every live size of every bucket, recorded parts against breaks (S3).

Both run eagerly at the padded size, so that nothing is captured to find out where a capture would be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cglab.engine.workload import PrefillStep, steady_prefill
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.lab.facade import Lab
from cglab.lab.sparse_arms import ARMS
from cglab.lab.sparse_prefill import SparseArm, kernel_rows
from cglab.runners.dsa_policy import floor_by_rule, measured_floor
from cglab.runners.dsa_prefill import DsaPrefillRunner


@dataclass(frozen=True)
class BucketFloor:
    """Where an arm is exact.

    Attributes:
        arm: its name.
        buckets: that were swept.
        differing: live sizes that were not bitwise, by bucket.
        rows: up to so many a library may choose another kernel, by S3's rule.
    """

    arm: str
    buckets: tuple[int, ...]
    differing: dict[int, tuple[int, ...]]
    rows: int

    @property
    def measured(self) -> int:
        """The smallest bucket from which all were bitwise; one more than the largest where none is."""
        return measured_floor(self.buckets, self.differing)

    @property
    def by_rule(self) -> int:
        """S3's rule: the smallest bucket whose shortest step has more than ``rows`` rows."""
        return floor_by_rule(self.buckets, self.rows)

    def __str__(self) -> str:
        where = ", ".join(f"bucket {size} at {_ranges(lives)}" for size, lives in self.differing.items())
        return (
            f"{self.arm}: floor {self.measured} measured, {self.by_rule} by S3's rule ({self.rows} rows); "
            f"not bitwise: {where or 'nothing'}"
        )


def bucket_floor(
    lab: Lab, arm: SparseArm = ARMS[2], *, cached: int = 0, largest: int | None = None
) -> BucketFloor:
    """Sweeps every live size of every bucket of a lab.

    Args:
        lab: of a model with latent attention, with no requests in flight.
        arm: whose recorded parts are compared with breaks.
        cached: tokens of the request that are in the cache before, in whole pages.
        largest: buckets above it are left out; None sweeps all.
    """
    buckets = [size for size in lab.prefill_buckets if largest is None or size <= largest]
    made = [
        each.make(
            lab.model, lab.engine.kv, lab.group, buckets, Options(lazy=True, self_check=False), floor=0
        )
        for each in (ARMS[0], arm)
    ]  # fmt: skip
    differing: dict[int, tuple[int, ...]] = {}
    try:
        for live in range(1, min(buckets[-1], lab.max_context - cached - 1) + 1):
            size = made[0].captured.pad(live)
            if not isinstance(size, int):
                continue
            with steady_prefill(lab.engine, live, cached) as step:
                outcomes = [_outcome(runner, step, size) for runner in made]
            if not all(same_bits(one, other) for one, other in zip(*outcomes, strict=True)):
                differing[size] = (*differing.get(size, ()), live)
    finally:
        for runner in made:
            runner.close()
    return BucketFloor(arm.name, tuple(buckets), differing, kernel_rows(lab.device))


def _outcome(runner: DsaPrefillRunner, step: PrefillStep, size: int) -> list[Tensor]:
    """Hidden states of the live tokens, and what they left in the cache."""
    padded = {name: F.pad(value, (0, size - len(value))) for name, value in step.inputs.items()}
    hidden: Tensor = runner.run_live_eager(step.live, **padded, **runner.derived(step.live))
    slots = step.inputs["out_slots"]
    left = [cache.index_select(1, slots) for cache in runner.kv.caches().values()]
    return [hidden[: step.rows], *left]


def _ranges(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in _runs(numbers))


def _runs(numbers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for place, number in enumerate(numbers, 1):
        if place == len(numbers) or numbers[place] != number + 1:
            yield numbers[start], number
            start = place
