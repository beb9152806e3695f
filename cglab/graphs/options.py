"""How a step is captured: one dataclass, every field with the lab's default."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.selfcheck import Vary, vary_rows

MANY_SHAPES = 8
"""Different sizes that ran eager before a warning says so."""


class CaptureFailedWarning(UserWarning):
    """A capture failed, and the step runs eager from now on."""


class ManyShapesWarning(UserWarning):
    """Many different sizes ran eager: the buckets do not fit the workload (B57)."""


def outside_level() -> int:
    """The ``stacklevel`` at which its caller warns in the name of the user's own line, whatever lies between."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("cglab.", "torch.")):
        frame, level = frame.f_back, level + 1
    return level


def note_eager_size(name: str, live: int, sizes: set[int], buckets: Sequence[int]) -> None:
    """Adds a size of a step that ran eager; says so once, at the line that called the step, if there are many."""
    sizes.add(live)
    if len(sizes) == MANY_SHAPES:
        warnings.warn(
            ManyShapesWarning(
                f"{name}: {len(sizes)} different sizes ran eager ({sorted(sizes)}); "
                f"the buckets are {list(buckets)}: add sizes that fit, or switch padding on"
            ),
            stacklevel=outside_level(),
        )


@dataclass
class Options:
    """How a step is captured; every field has the lab's default.

    Attributes:
        backend: full, breakable or eager.
        lazy: capture a bucket when a step first needs it (B55). Nothing is captured that is never used; but the first
            use waits for its capture, and memory is taken in the order of use and not largest first.
        padding: pad up to a bucket; without it only exact sizes replay.
        waste_ceiling: refuse a bucket above this multiple of the live rows (P7); None leaves it to the phase, which
            may have none, and infinity admits all.
        inline_breaks: record breaks as they stand in a full capture.
        warmups: fixed number of warm-ups for every shape; None for the policy.
        self_check: end a capture with the self-check; None means on the tape only.
        vary: how the self-check changes inputs.
        clone: hand out copies instead of views.
        debug: hand out views that refuse to be read once they are stale (B20).
        strict: raise when a capture fails, instead of running eager with the reason.
        kill_switch: what switched this capture off, such as ``CGLAB_DISABLE_SEED_GRAPH=1``; the backend is then eager.
        refusal: any other reason why nothing may be captured; the backend is then eager.
    """

    backend: str = "full"
    lazy: bool = False
    padding: bool = True
    waste_ceiling: float | None = None
    inline_breaks: bool = False
    warmups: int | None = None
    self_check: bool | None = None
    vary: Vary = vary_rows
    clone: bool = False
    debug: bool = False
    strict: bool = False
    after_warmup: Callable[[], None] | None = None
    kill_switch: str = ""
    refusal: Miss | None = None

    def __post_init__(self) -> None:
        if self.kill_switch or self.refusal:
            self.backend = "eager"

    @property
    def why_eager(self) -> Miss:
        """Why nothing is captured on the eager backend."""
        if self.kill_switch:
            return Miss(Reason.KILL_SWITCH, self.kill_switch)
        return self.refusal or Miss(Reason.BACKEND_EAGER)
