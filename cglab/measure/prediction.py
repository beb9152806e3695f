"""Predict before capturing: the launch gap of an eager trace is the most that a graph can win.

``wall - busy`` is the time in which the device waits. A graph removes waiting, not work, so

    gained = predicted + (busy eager - busy captured) - (gap that the captured step still has)

and an outcome that differs from the prediction is explained when these two terms, measured apart, account for
it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from cglab.errors import InputError
from cglab.measure.trace import Trace

TOLERANCE = 0.05
"""Share of the predicted gain by which the outcome may differ."""

BUSY_TOLERANCE = 0.012
"""Share by which kernel-busy time may differ between arms that did the same work (S2's own check)."""

NOTHING_TO_WIN = 0.03
"""A launch gap below this share of the wall is within what counts as no difference (S3's rule)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a graph can win over an eager step, microseconds per step.

    Attributes:
        wall_us: eager wall time.
        busy_us: eager kernel-busy time.
        profiled: the wall time is the profiler's, which overstates the gap.
    """

    wall_us: float
    busy_us: float
    profiled: bool

    @property
    def gain_us(self) -> float:
        """The launch gap."""
        return self.wall_us - self.busy_us

    @property
    def speedup(self) -> float:
        """Wall over busy: the ratio if the whole gap goes."""
        return self.wall_us / self.busy_us

    def __str__(self) -> str:
        source = ", wall from the profiled run" if self.profiled else ""
        return (
            f"a graph can win {self.gain_us:.1f} us of {self.wall_us:.1f} us a step "
            f"({self.gain_us / self.wall_us:.0%}, up to {self.speedup:.2f}x){source}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction beside what came of it, microseconds per step.

    Attributes:
        predicted_us, gained_us: launch gap of the eager step, and eager wall minus captured wall.
        busy_change_us: kernel-busy time that the captured step saves; None without its trace.
        remaining_gap_us: idle device time that its trace still shows; None without one.
        unexplained_us: what these two leave of the difference; None without a trace.
        verdict: ``as predicted`` within the tolerance, ``explained`` where the unexplained part is, else
            ``unexplained``.
    """

    predicted_us: float
    gained_us: float
    busy_change_us: float | None
    remaining_gap_us: float | None
    unexplained_us: float | None
    verdict: Literal["as predicted", "explained", "unexplained"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"predicted {self.predicted_us:.1f} us, gained {self.gained_us:.1f} us a step: {self.verdict}"
        if self.busy_change_us is None or self.verdict == "as predicted":
            return text
        return (
            f"{text} (kernels {self.busy_change_us:+.1f} us, remaining gap {self.remaining_gap_us:.1f} us, "
            f"left over {self.unexplained_us:+.1f} us)"
        )


def predict_gain(eager: Trace, *, wall_us: float | None = None) -> Prediction:
    """The launch gap of an eager step.

    Args:
        eager: trace of the eager step, one window a step.
        wall_us: wall time of a step in an unprofiled run; without it the trace's own is used.

    Raises:
        InputError: if the trace is unreliable, or the wall time lies below the busy time by more than two runs of
            one step differ, so that they are not of one step.
    """
    busy = eager.busy_us()
    if busy is None:
        raise InputError(
            f"no prediction from this trace: {eager.unreliable}; profile the step on a CUDA device"
        )
    busy /= eager.steps
    wall = eager.wall_us / eager.steps if wall_us is None else wall_us
    if wall < (1 - NOTHING_TO_WIN) * busy:
        raise InputError(
            f"a step of {wall:.1f} us cannot hold {busy:.1f} us of device work; measure both on one shape"
        )
    return Prediction(wall, busy, profiled=wall_us is None)


def outcome(
    prediction: Prediction,
    captured_wall_us: float,
    captured: Trace | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> Outcome:
    """Compares what was gained with what was predicted.

    Args:
        prediction: of the eager step.
        captured_wall_us: wall time of the captured step, unprofiled.
        captured: its trace, to explain a difference; an unreliable one explains nothing.
        tolerance: share of the predicted gain. Where the prediction is that there is nothing to win (a gap
            under 3 % of the wall), a gain or loss under 3 % of the wall is as predicted.
    """
    gained = prediction.wall_us - captured_wall_us
    allowed = tolerance * prediction.gain_us
    if prediction.gain_us < NOTHING_TO_WIN * prediction.wall_us:
        allowed = NOTHING_TO_WIN * prediction.wall_us
    busy, idle = (None, None) if captured is None else (captured.busy_us(), captured.idle())
    change = remaining = left = None
    if captured is not None and busy is not None and idle is not None:
        change = prediction.busy_us - busy / captured.steps
        remaining = idle.total / captured.steps
        left = gained - (prediction.gain_us + change - remaining)
    verdict: Literal["as predicted", "explained", "unexplained"] = "unexplained"
    if abs(gained - prediction.gain_us) <= allowed:
        verdict = "as predicted"
    elif left is not None and abs(left) <= allowed:
        verdict = "explained"
    return Outcome(prediction.gain_us, gained, change, remaining, left, verdict)


@dataclass(frozen=True, slots=True)
class SameWork:
    """Whether two arms did the same work on the device, per step.

    Attributes:
        only_base, only_other: surplus device work by name and count.
        busy_ratio: kernel-busy time of the other arm over the base's.
        ok: nothing surplus but what was declared, and busy within the tolerance.
    """

    only_base: dict[str, float]
    only_other: dict[str, float]
    busy_ratio: float
    ok: bool


def same_work(base: Trace, other: Trace, *, declared: frozenset[str] = frozenset()) -> SameWork:
    """Compares the device work of two arms, by name, count and time; a gain counts only where they agree.

    Args:
        base: trace with one window a step.
        other: likewise, of the other arm.
        declared: names whose counts may differ, such as the copies at a break.

    Raises:
        InputError: if a trace is unreliable.
    """
    for trace in (base, other):
        if not trace.reliable:
            raise InputError(f"work cannot be compared by this trace: {trace.unreliable}")
    ours, theirs = _per_step(base), _per_step(other)
    only_base, only_other = _surplus(ours, theirs), _surplus(theirs, ours)
    ratio = ((other.busy_us() or 0.0) / other.steps) / ((base.busy_us() or 0.0) / base.steps)
    same = set(only_base) | set(only_other) <= declared and abs(ratio - 1) <= BUSY_TOLERANCE
    return SameWork(only_base, only_other, ratio, same)


def _surplus(counts: dict[str, float], over: dict[str, float]) -> dict[str, float]:
    return {name: more for name, count in counts.items() if (more := count - over.get(name, 0.0)) > 0}


def _per_step(trace: Trace) -> dict[str, float]:
    return {name: count / trace.steps for name, count in trace.kernels.items()}
