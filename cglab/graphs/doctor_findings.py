"""What the doctor says: kinds of hazards, what a stream capture makes of each, and the smallest change that helps.

A kind is the name of the error that a capture raises. What a capture takes without an error, and gets wrong at every
replay, has a name of its own, such as ``BakedValue`` or ``MovedInput``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cglab.errors import CaptureError, Place

EFFECTS = {
    "HostReadError": "the capture fails here: the host would wait for a device that only records",
    "DynamicShapeError": "the capture fails here: only the device knows how much memory the result takes",
    "NewInputError": "the capture fails here, or every replay reads what the host held at capture",
    "UnsupportedOperationError": "the capture fails here, or records what no replay can repeat",
    "UnjoinedStreamError": "the capture fails: what that stream does is neither ordered nor recorded",
    "OutputStructureError": "cglab.capture refuses it: such a result can neither be kept nor cut",
    "EmptyCaptureError": "nothing is captured, and a replay returns the same values for ever",
    "CaptureError": "the capture fails here, with an error of the function's own",
    "CaptureMemoryError": "the capture fails here: memory ran out",
    "BakedValue": "the capture succeeds, and every replay computes with the value of the capture",
    "BakedBranch": "the capture succeeds, and every replay takes the path of the capture",
    "BakedAddress": "the capture succeeds, and every replay uses the address of the capture",
    "MovedInput": "the capture succeeds, and every replay reads the memory of the capture",
    "EscapedTensor": "the capture succeeds, and every replay of its pool overwrites the tensor",
    "MutatedState": "the capture succeeds, and it changes once: a replay runs no Python",
    "LazyInitialisation": "the capture records what only a first call does, and every replay does it again",
}
"""What a stream capture does about a hazard, by kind."""

ADVICE = {
    "BakedValue": "hand it in as a static slot, a tensor, or compute it on the device",
    "BakedBranch": "choose on the device (torch.where), capture one variant for each path, "
    "or choose in a function marked @cglab.eager_break",
    "BakedAddress": "hand the tensor in as a static slot, whose address never changes",
    "MovedInput": "hand it in as a static slot, or keep one tensor and write into it: tensor.copy_(new)",
    "EscapedTensor": "return it, or copy it into a tensor that was made before: kept.copy_(value)",
    "MutatedState": "keep it in a tensor that is changed in place, or change it in an @cglab.eager_break",
    "LazyInitialisation": "warm up: call it once before the capture (cglab.capture does so by itself)",
}
"""The smallest change against what is no error, by kind."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard.

    Attributes:
        kind: the error that a capture would raise, such as ``HostReadError``, or of what it takes without an error
            a name of ``EFFECTS``.
        operation: what does it: an operator, a method, or the Python state by name.
        place: the user's line; None if it lies in nobody's file.
        fact: what was seen.
        effect: what a stream capture would do.
        advice: the smallest change that helps.
        at: how many operations ran before it.
    """

    kind: str
    operation: str
    place: Place | None
    fact: str
    effect: str
    advice: str
    at: int = 0

    @classmethod
    def of_error(cls, error: CaptureError, place: Place | None, at: int) -> Finding:
        """What a capture refuses with ``error``."""
        kind = type(error).__name__
        effect = EFFECTS.get(kind, EFFECTS["CaptureError"])
        return cls(kind, error.operation or "capture", place, error.summary, effect, error.advice or "", at)

    @classmethod
    def unseen(cls, kind: str, operation: str, place: Place | None, fact: str, at: int) -> Finding:
        """What a capture takes without an error."""
        return cls(kind, operation, place, fact, EFFECTS[kind], ADVICE[kind], at)

    @property
    def line(self) -> tuple[str, int] | None:
        """File and line, for comparing."""
        return (self.place.file, self.place.line) if self.place else None

    @property
    def refused(self) -> bool:
        """Whether a capture raises; otherwise it succeeds, and replays are wrong."""
        return self.kind.endswith("Error")

    def as_value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        place = self.place
        where = {
            "file": place and place.file, "line": place and place.line, "function": place and place.function,
            "code": place and place.code,
        }  # fmt: skip
        said = {"fact": self.fact, "effect": self.effect, "advice": self.advice}
        return {"kind": self.kind, "operation": self.operation, **where, **said}

    def __str__(self) -> str:
        where = self.place or "no line of yours"
        said = [
            f"{self.kind} at {where}",
            f"{self.fact} ({self.operation})",
            self.effect,
            f"next step: {self.advice}",
        ]
        return "\n  ".join(said)


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found, in the order of execution.

    Attributes:
        findings: one for each line and kind.
        notes: what could not be looked at, and why.
        operations: how many the function ran, breaks left out.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    operations: int = 0

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def as_value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "healthy": self.healthy,
            "operations": self.operations,
            "findings": [finding.as_value() for finding in self.findings],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        found = [f"{i}. {finding}" for i, finding in enumerate(self.findings, 1)]
        nothing = f"nothing found that would break a capture ({self.operations} operations)"
        return "\n".join([*(found or [nothing]), *(f"note: {note}" for note in self.notes)])
