"""How far predictions of recorded steps are off, each made without the recording that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from cglab.measure.recombine import Recombination, Size, StepPoint

if TYPE_CHECKING:
    import pandas

Held = Callable[[StepPoint], bool]


def _combination(arm: str, size: Size, _: int) -> Held:
    return lambda each: (each.arm, each.size) == (arm, size)


def _size(_: str, size: Size, __: int) -> Held:
    return lambda each: each.size == size


def _both(_: str, size: Size, base: int) -> Held:
    batch, context = size
    return lambda each: (
        each.size == size or (context != base and each.batch == batch and each.context != base)
    )


HELD_OUT: Final = MappingProxyType({
    "combination": _combination,
    "batch or length": _size,
    "batch and length": _both,
})  # fmt: skip
"""What a prediction never saw: the arm at that size; the size in every arm; every longer step of that batch too."""


@dataclass(frozen=True, slots=True)
class Check:
    """One recorded step and its prediction.

    Attributes:
        held_out: what the prediction never saw, one of ``HELD_OUT``.
        arm, batch, context: which step.
        recorded_ms: its time.
        predicted_ms: None where there is no prediction.
        reason: where the prediction is from, or why there is none.
    """

    held_out: str
    arm: str
    batch: int
    context: int
    recorded_ms: float
    predicted_ms: float | None
    reason: str

    @property
    def error(self) -> float | None:
        """Relative, positive where the prediction is too long."""
        return None if self.predicted_ms is None else self.predicted_ms / self.recorded_ms - 1


@dataclass(frozen=True)
class Checks:
    """All checks of a model's predictions.

    Attributes:
        made: one for each recorded step and each way of holding it out.
    """

    made: tuple[Check, ...]

    def errors(self, held_out: str | None = None) -> list[float]:
        """Absolute relative errors of what was predicted, of one way of holding out or of all."""
        wanted = [each for each in self.made if held_out in (None, each.held_out)]
        return [abs(each.error) for each in wanted if each.error is not None]

    @property
    def mean(self) -> float | None:
        """Mean error of all predictions; None without any."""
        errors = self.errors()
        return sum(errors) / len(errors) if errors else None

    @property
    def worst(self) -> float | None:
        """The largest."""
        return max(self.errors(), default=None)

    def as_frame(self) -> pandas.DataFrame:
        """One row a check, the error in percent."""
        import pandas

        return pandas.DataFrame(
            {
                "held_out": each.held_out, "arm": each.arm, "batch": each.batch, "context": each.context,
                "recorded_ms": each.recorded_ms, "predicted_ms": each.predicted_ms,
                "error_%": None if each.error is None else 100 * each.error, "from": each.reason,
            }
            for each in self.made
        )  # fmt: skip

    def __str__(self) -> str:
        if self.mean is None or self.worst is None:
            return "no prediction could be checked against a recording"
        kinds = {name: errors for name in HELD_OUT if (errors := self.errors(name))}
        by_kind = [
            f"{name} held out: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%} of {len(errors)}"
            for name, errors in kinds.items()
        ]
        left = len(self.made) - len(self.errors())
        return (
            f"error against recordings: mean {self.mean:.1%}, worst {self.worst:.1%} ({'; '.join(by_kind)}); "
            f"{left} of {len(self.made)} are not predicted, since the host decides them or nothing is recorded around"
        )


def check(recombination: Recombination) -> Checks:
    """Predicts every recorded step without it, in each way of holding it out that differs."""
    contexts: Sequence[int] = [each.context for each in recombination.points]
    base = max(dict.fromkeys(contexts), key=contexts.count, default=0)
    made = []
    for (arm, size), recorded in recombination.recorded.items():
        for name, held in HELD_OUT.items():
            if name == "batch and length" and size[1] == base:
                continue  # nothing but the size itself would be held out
            found = recombination.without(held(arm, size, base)).predict(arm, *size)
            made.append(Check(name, arm, *size, recorded, found.step_ms, found.reason))
    return Checks(tuple(made))
