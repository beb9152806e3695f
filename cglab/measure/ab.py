"""Interleaved A/B: arms take turns, so that a drift of the machine falls on all of them.

One *instance* of an arm is its warm-up and its samples in one turn. Turns alternate direction (A B, B A, A B,
as S3 ordered its servers), which cancels a linear drift over each pair of rounds. A difference that shows
with few instances is measured again with more before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from cglab.errors import InputError
from cglab.measure.statistics import (
    FEWEST_INSTANCES,
    THRESHOLD,
    Interval,
    Verdict,
    bootstrap_interval,
    difference,
    false_positive_rate,
    pooled_median,
)

if TYPE_CHECKING:
    import pandas

Arms = Mapping[str, Callable[[], float]]
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm of an A/B.

    Attributes:
        name: of the arm.
        instances: samples in seconds, by instance, as far as the arm came.
        error: what ended the arm, or None.
        median, interval: of the pooled samples, seconds; None without samples.
        ratio, ratio_interval: over the first arm; None for the first arm, or where either has no samples.
        verdict: against the first arm; None for the first arm, ``undecided`` where either arm failed.
    """

    name: str
    instances: tuple[tuple[float, ...], ...]
    error: str | None
    median: float | None
    interval: Interval | None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class ABResult:
    """All arms of an A/B, the base first.

    Attributes:
        arms: in the order given.
        order: the turns that were taken, as ``(instance, arm)``.
        threshold: smallest relative difference that counts.
        instances: per arm, of those that did not fail.
        false_positive_rate: how often the rule flags equal arms at this number of instances.
    """

    arms: tuple[ArmResult, ...]
    order: tuple[tuple[int, str], ...]
    threshold: float
    instances: int
    false_positive_rate: float

    def __getitem__(self, name: str) -> ArmResult:
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise InputError(f"no arm {name!r}; the arms are {', '.join(arm.name for arm in self.arms)}")

    @property
    def failed(self) -> dict[str, str]:
        """Errors by arm."""
        return {arm.name: arm.error for arm in self.arms if arm.error is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, samples included."""
        return asdict(self)

    def as_frame(self) -> pandas.DataFrame:
        """One row an arm, times in milliseconds."""
        import pandas

        return pandas.DataFrame(
            {
                "arm": arm.name,
                "median_ms": _milli(arm.median),
                "low_ms": _milli(None if arm.interval is None else arm.interval.low),
                "high_ms": _milli(None if arm.interval is None else arm.interval.high),
                "ratio": arm.ratio,
                "verdict": arm.verdict,
                "samples": sum(len(instance) for instance in arm.instances),
                "error": arm.error,
            }
            for arm in self.arms
        )

    def __str__(self) -> str:
        lines = []
        for arm in self.arms:
            text = f"{arm.name}: " + ("no samples" if arm.median is None else f"{arm.median * 1e3:.4g} ms")
            text += "" if arm.ratio is None else f", x{arm.ratio:.3f} of {self.arms[0].name}: {arm.verdict}"
            lines.append(text + ("" if arm.error is None else f" (failed: {arm.error})"))
        lines.append(
            f"A difference counts from {self.threshold:.0%} where instances do not overlap; "
            f"with {self.instances} instances that errs in {self.false_positive_rate:.1%} of equal pairs."
        )
        return "\n".join(lines)


def interleave(
    arms: Arms,
    *,
    instances: int = 3,
    confirm: int = 5,
    repeats: int = 20,
    warmup: int = 3,
    threshold: float = THRESHOLD,
    seed: int = 0,
    progress: Progress | None = None,
) -> ABResult:
    """Measures arms in turns and compares each with the first.

    An exception in an arm ends that arm only: its error and its samples so far are kept, the others go on.

    Args:
        arms: by name, each a function that does the work once and returns its seconds; the first is the base.
        instances: turns of each arm, at least 3.
        confirm: instances to go on to where a difference shows at ``instances``; the verdict is then by all
            of them.
        repeats: samples of one instance.
        warmup: calls before the samples of each instance, whose results are dropped.
        threshold: smallest relative difference that counts.
        seed: of the intervals.
        progress: called with the arm's name and the number of its instance before each turn.

    Raises:
        InputError: for fewer than two arms, fewer than 3 instances, no repeats, or a negative warm-up.
    """
    if len(arms) < 2:
        raise InputError(f"an A/B needs two arms or more, got {list(arms)}")
    if instances < FEWEST_INSTANCES or repeats < 1 or warmup < 0:
        raise InputError(
            f"instances={instances}, repeats={repeats}, warmup={warmup}: "
            f"need at least {FEWEST_INSTANCES}, 1 and 0"
        )
    samples: dict[str, list[list[float]]] = {name: [] for name in arms}
    errors: dict[str, str] = {}
    order: list[tuple[int, str]] = []

    def turns(first: int, last: int) -> None:
        for instance, name in schedule(tuple(arms), first, last):
            if name in errors:
                continue
            if progress is not None:
                progress(name, instance)
            order.append((instance, name))
            samples[name].append([])
            try:
                _take(arms[name], samples[name][-1], repeats, warmup)
            except Exception as error:  # noqa: BLE001 - one arm's failure must not lose the others' samples
                errors[name] = f"{type(error).__name__}: {error}"

    turns(0, instances)
    results = judge(samples, errors, threshold, seed)
    if confirm > instances and any(result.verdict in ("faster", "slower") for result in results):
        turns(instances, confirm)
        results = judge(samples, errors, threshold, seed)
    done = max(len(taken) for taken in samples.values())
    return ABResult(results, tuple(order), threshold, done, false_positive_rate(done, threshold=threshold))


def schedule(names: tuple[str, ...], first: int, last: int) -> list[tuple[int, str]]:
    """Turns of the rounds ``first`` to ``last - 1``: forward in even rounds, backward in odd ones."""
    return [(turn, name) for turn in range(first, last) for name in (names if turn % 2 == 0 else names[::-1])]


def judge(
    samples: Mapping[str, list[list[float]]],
    errors: Mapping[str, str],
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> tuple[ArmResult, ...]:
    """Each arm's median and verdict against the first arm, from samples that were taken in turns.

    Args:
        samples: seconds by arm, then by instance; the first arm is the base. Instances without samples are dropped.
        errors: what ended an arm, by its name; where either arm of a pair failed the verdict is ``undecided``.
        threshold: smallest relative difference that counts.
        seed: of the intervals.
    """
    base = next(iter(samples))
    kept = {name: [taken for taken in instances if taken] for name, instances in samples.items()}
    results = []
    for name, instances in kept.items():
        result: dict[str, Any] = {"median": None, "interval": None}
        if instances:
            result = {
                "median": pooled_median(instances),
                "interval": bootstrap_interval(instances, seed=seed),
            }
        if name != base:
            result["verdict"] = "undecided"
            if instances and kept[base]:
                found = difference(kept[base], instances, threshold=threshold, seed=seed)
                whole = name not in errors and base not in errors
                result |= {
                    "ratio": found.ratio,
                    "ratio_interval": found.interval,
                    "verdict": found.verdict if whole else "undecided",
                }
        results.append(ArmResult(name, tuple(map(tuple, instances)), errors.get(name), **result))
    return tuple(results)


def _take(arm: Callable[[], float], samples: list[float], repeats: int, warmup: int) -> None:
    for _ in range(warmup):
        arm()
    for _ in range(repeats):
        seconds = arm()
        if not (isinstance(seconds, (int, float)) and isfinite(seconds) and seconds > 0):
            raise InputError(f"an arm returns its seconds as a positive number, got {seconds!r}")
        samples.append(float(seconds))


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
