"""Medians, bootstrap intervals, and S3's rule for when a difference counts.

The unit of evidence is the *instance* (one server, or one block of steps in a process): samples within an
instance share its placement, clocks and caches, so more of them say nothing about another instance. Intervals
are therefore resampled in two levels, instances first, and the rule looks at whole instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cglab.errors import InputError

Instances = Sequence[Sequence[float]]
Verdict = Literal["faster", "slower", "no difference", "undecided"]

THRESHOLD = 0.03
"""Smallest relative difference that counts (S3)."""

FEWEST_INSTANCES = 3
"""Instances an arm needs before the rule says anything (S3 used three)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A bootstrap interval, in the unit of the samples."""

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Another arm against a base, for samples where less is better.

    Attributes:
        ratio: median of the other arm's pooled samples over the base's; below 1 is faster.
        interval: bootstrap interval of ``ratio``.
        separated: no median of an instance of one arm lies within the range of the other's.
        verdict: by S3's rule; ``undecided`` with fewer than three instances in an arm.
    """

    ratio: float
    interval: Interval
    separated: bool
    verdict: Verdict


def median(samples: Sequence[float]) -> float:
    """Median of finite samples.

    Raises:
        InputError: for no samples, or any that is NaN or infinite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        odd = int(np.sum(~np.isfinite(values)))
        raise InputError(f"a median needs finite samples, got {values.size} of which {odd} are not finite")
    return float(np.median(values))


def pooled_median(instances: Instances) -> float:
    """Median over the samples of all instances together, as S3 pools them."""
    return median([sample for instance in instances for sample in instance])


def bootstrap_interval(
    instances: Instances, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the pooled median.

    Args:
        instances: samples by instance; a single instance gives the plain bootstrap.
        level: share of the resampled medians inside.
        resamples: resampled medians.
        seed: of the generator; equal arguments give equal intervals.

    Raises:
        InputError: for an instance without samples, samples that are not finite, or a level outside (0, 1).
    """
    return _percentiles(_resampled_medians(instances, resamples, np.random.default_rng(seed)), level)


def bootstrap_ratio(
    base: Instances, other: Instances, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Interval of ``median(other) / median(base)``; arguments as in :func:`bootstrap_interval`."""
    generator = np.random.default_rng(seed)
    below = _resampled_medians(base, resamples, generator)
    return _percentiles(_resampled_medians(other, resamples, generator) / below, level)


def difference(
    base: Instances, other: Instances, *, threshold: float = THRESHOLD, seed: int = 0
) -> Difference:
    """S3's rule: a difference from ``threshold`` on counts where the instances of the arms do not overlap.

    Args:
        base: samples by instance, less is better.
        other: likewise, of the other arm.
        threshold: smallest relative difference of the pooled medians that counts.
        seed: of the interval.

    Raises:
        InputError: if an arm has no samples, or some that are not finite and positive.
    """
    for name, arm in (("base", base), ("other", other)):
        if not arm or any(not instance or min(instance) <= 0 for instance in arm):
            raise InputError(f"the {name} arm needs positive samples in every instance")
    ratio = pooled_median(other) / pooled_median(base)
    ours, theirs = [median(instance) for instance in base], [median(instance) for instance in other]
    separated = max(ours) < min(theirs) or max(theirs) < min(ours)
    verdict: Verdict = "no difference"
    if min(len(base), len(other)) < FEWEST_INSTANCES:
        verdict = "undecided"
    elif separated and abs(ratio - 1) >= threshold:
        verdict = "faster" if ratio < 1 else "slower"
    return Difference(ratio, bootstrap_ratio(base, other, seed=seed), separated, verdict)


@lru_cache
def false_positive_rate(
    instances: int,
    *,
    spread: float = 0.05,
    threshold: float = THRESHOLD,
    trials: int = 100_000,
    seed: int = 0,
) -> float:
    """How often the rule flags two equal arms, by simulation.

    Two equal arms of ``n`` instances are fully separated in ``2 / C(2n, n)`` of all runs (0.10 for 3, 0.008
    for 5), whatever the noise; the threshold only takes away from that. Flagged points are therefore measured
    again with more instances.

    Args:
        instances: per arm.
        spread: relative standard deviation between the medians of instances (normal). The wider, the worse
            the rule; 0.05 gives about 0.09 for three instances and under 0.01 for five.
        threshold: as in :func:`difference`.
        trials: simulated pairs of arms.
        seed: of the generator.

    Raises:
        InputError: if a count is below 1 or the spread is negative.
    """
    if instances < 1 or trials < 1 or spread < 0:
        raise InputError(f"instances={instances}, trials={trials}, spread={spread}: need at least 1, 1 and 0")
    medians = np.random.default_rng(seed).normal(1.0, spread, (trials, 2, instances))
    base, other = medians[:, 0], medians[:, 1]
    separated = (base.max(1) < other.min(1)) | (other.max(1) < base.min(1))
    large = np.abs(np.median(other, 1) / np.median(base, 1) - 1) >= threshold
    return float(np.mean(separated & large))


def _resampled_medians(
    instances: Instances, resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Medians of ``resamples`` two-level resamples: instances with replacement, then samples within each."""
    lengths = np.array([len(instance) for instance in instances])
    if lengths.size == 0 or lengths.min() == 0:
        raise InputError("a bootstrap needs samples in every instance")
    table = np.full((lengths.size, lengths.max()), np.nan)
    for row, instance in zip(table, instances, strict=True):
        row[: len(instance)] = instance
    if np.isfinite(table).sum() != lengths.sum():
        raise InputError("a bootstrap needs finite samples")
    chosen = generator.integers(lengths.size, size=(resamples, lengths.size))
    inside = (generator.random((*chosen.shape, lengths.max())) * lengths[chosen][..., None]).astype(np.int64)
    drawn = table[chosen[..., None], inside]
    # An instance keeps its own number of samples: draws beyond it are dropped.
    drawn[np.arange(lengths.max()) >= lengths[chosen][..., None]] = np.nan
    return np.asarray(np.nanmedian(drawn.reshape(resamples, -1), axis=1))


def _percentiles(values: NDArray[np.float64], level: float) -> Interval:
    if not 0 < level < 1:
        raise InputError(f"an interval of level {level} is none; use a share between 0 and 1, such as 0.95")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)
