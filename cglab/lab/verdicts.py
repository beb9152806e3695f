"""What random sequences of a technique showed against its oracles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TechniqueParity:
    """What the cases showed.

    Attributes:
        technique: the toggle.
        model: what ran.
        cases: sequences that ran.
        bitwise: oracles 1 and 3 held in every step.
        tokens_equal: oracle 2 held in every step.
        mismatches: what did not, at most ``KEPT`` of each oracle.
        steps, captured: steps checked, and those of them that were replayed.
        capturable: whether steps can be captured at all; not where every phase is eager.
        preemptions: how often a request gave way to an older one.
        ties: tokens that differ from live eager at a near-tie of its own.
        differing: tokens that differ from live eager and are no near-tie; none may in float32.
        max_drift, kv_drift: worst drift of logits, and of keys and values, from live eager.
        bound, kv_bound: largest drift that rounding explains; see ``measure.drift``.
    """

    technique: str
    cases: int = 0
    bitwise: bool = True
    tokens_equal: bool = True
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    captured: int = 0
    ties: int = 0
    differing: int = 0
    compared_tokens: int = 0
    max_drift: float = 0.0
    bound: float = 0.0
    kv_drift: float = 0.0
    kv_bound: float = 0.0
    preemptions: int = 0
    capturable: bool = True
    dtype: str = ""
    recorder: str = ""
    model: str = "pico-gqa"
    ops: str = "portable"

    KEPT = 20

    @property
    def ok(self) -> bool:
        """Whether all held, ties stayed rare, and steps were captured at all."""
        return self.bitwise and self.tokens_equal and (self.captured > 0) == self.capturable

    def fault(self, oracle: int, where: dict[str, Any], detail: str) -> None:
        """Notes a mismatch."""
        if oracle == 2:
            self.tokens_equal = False
        else:
            self.bitwise = False
        if sum(each["oracle"] == oracle for each in self.mismatches) < self.KEPT:
            self.mismatches.append({"oracle": oracle, **where, "detail": detail})

    def as_dict(self) -> dict[str, Any]:
        """One entry of ``cglab parity --json``."""
        return dict(vars(self).items())

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        padded = "bitwise" if self.bitwise else "DIFFER"
        live = "equal" if self.tokens_equal else "DIFFERS"
        first = (
            f"{self.technique} on {self.model} ({self.recorder}, {self.dtype}): {verdict}; {self.cases} sequences, "
            f"{self.steps} steps, {self.captured} captured; padded eager and poison {padded}; live eager {live} "
            f"(drift {self.max_drift:.2g} of {self.bound:.2g}, {self.ties} near-ties, {self.differing} other tokens)"
        )
        lines = [first]
        lines += [f"  {mismatch}" for mismatch in self.mismatches[:5]]
        return "\n".join(lines)
