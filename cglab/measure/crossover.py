"""Crossover finder: up to which size a graph still wins, used as a capture limit.

A graph saves the launch gap, which large steps no longer have: S2's pipeline prefill goes from 2.48 times at a
2K cap over 1.12 at 8K to 0.98 at 16K, so SGLang captures up to 8192 tokens there. The same question is put here
to any two measured arms, size by size, with S3's rule for what counts as a win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cglab.errors import InputError
from cglab.measure.statistics import (
    THRESHOLD,
    Difference,
    Instances,
    Interval,
    bootstrap_interval,
    difference,
    pooled_median,
)

Outcome = Literal["no win", "crossover", "win everywhere"]


@dataclass(frozen=True, slots=True)
class SizeEvidence:
    """Both arms at one size, in the unit of their samples (milliseconds, as a rule).

    Attributes:
        size: live size, rows or tokens.
        eager: pooled median of the eager arm.
        eager_interval: its 95 % bootstrap interval.
        captured: pooled median of the captured arm.
        captured_interval: its 95 % bootstrap interval.
        difference: captured against eager; ``faster`` is a win of the graph.
    """

    size: int
    eager: float
    eager_interval: Interval
    captured: float
    captured_interval: Interval
    difference: Difference

    @property
    def wins(self) -> bool:
        """Whether the graph is faster by S3's rule."""
        return self.difference.verdict == "faster"


@dataclass(frozen=True, slots=True)
class Crossover:
    """Up to which size a graph pays, and the evidence.

    Attributes:
        limit: largest size at which the graph wins, None if it does nowhere.
        safe_limit: largest winning size with no smaller one at which the graph is slower by the rule: the
            capture limit for a policy that must make no size worse. None if there is no such size.
        next_size: smallest measured size above ``limit``; the crossover lies between the two. None where the
            largest measured size still wins, or none does.
        breaks: sizes below ``limit`` at which the graph does not win, ascending: the data is not monotone
            there. Empty for clean data.
        undecided: sizes with too few instances for a verdict, ascending; they count as not won.
        evidence: by size, ascending.
    """

    limit: int | None
    safe_limit: int | None
    next_size: int | None
    breaks: tuple[int, ...]
    undecided: tuple[int, ...]
    evidence: tuple[SizeEvidence, ...]

    @property
    def outcome(self) -> Outcome:
        """Whether the graph wins nowhere, up to a size, or at every size measured."""
        if self.limit is None:
            return "no win"
        return "win everywhere" if all(point.wins for point in self.evidence) else "crossover"


def find_crossover(
    eager: Mapping[int, Instances],
    captured: Mapping[int, Instances],
    *,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> Crossover:
    """The largest size at which the captured arm is faster by S3's rule.

    The rule errs in about 9 % of equal pairs with three instances (``false_positive_rate``), so a size in
    ``breaks``, and the limit itself, deserve to be measured again with more before a policy rests on them.

    Args:
        eager: samples of the eager arm by size and instance, any unit of time, less is better.
        captured: likewise of the captured arm, at the same sizes and in the same unit; padding included.
        threshold: smallest relative difference of the pooled medians that counts (S3: 3 %).
        seed: of the intervals.

    Raises:
        InputError: if no size was measured, the arms differ in sizes, a size is below 1, or an arm has no
            samples or some that are not finite and positive.
    """
    if not eager or eager.keys() != captured.keys():
        raise InputError(
            f"both arms need the same sizes, at least one; only eager has {sorted(eager.keys() - captured.keys())}, "
            f"only captured has {sorted(captured.keys() - eager.keys())}; measure these in the other arm"
        )
    if min(eager) < 1:
        raise InputError(f"sizes are whole numbers from 1; {min(eager)} is not")
    evidence = tuple(
        SizeEvidence(
            size,
            pooled_median(eager[size]),
            bootstrap_interval(eager[size], seed=seed),
            pooled_median(captured[size]),
            bootstrap_interval(captured[size], seed=seed),
            difference(eager[size], captured[size], threshold=threshold, seed=seed),
        )
        for size in sorted(eager)
    )
    won = [point.size for point in evidence if point.wins]
    slower = [point.size for point in evidence if point.difference.verdict == "slower"]
    safe = [size for size in won if not slower or size < slower[0]]
    limit = won[-1] if won else None
    above = [point.size for point in evidence if limit is not None and point.size > limit]
    return Crossover(
        limit,
        safe[-1] if safe else None,
        above[0] if above else None,
        tuple(
            point.size for point in evidence if limit is not None and point.size < limit and not point.wins
        ),
        tuple(point.size for point in evidence if point.difference.verdict == "undecided"),
        evidence,
    )
