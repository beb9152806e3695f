"""Which steps ran captured, which ran eager, and why: counted, never lost.

A step that runs eager always carries a ``Miss``: a reason from a closed list and the facts of this step. Zero
is shown as zero (B69).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any


class Reason(Enum):
    """Why a step ran eager."""

    BACKEND_EAGER = "the eager backend was asked for"
    ABOVE_LARGEST = "the batch is above the largest bucket"
    ABOVE_LIMIT = "the step is above the size up to which a capture pays"
    SIZE_NOT_CAPTURED = "padding is off and this exact size was not captured"
    WASTE_CEILING = "the next bucket would exceed the waste ceiling"
    EMPTY_BATCH = "the batch has no rows"
    SHAPE = "an input does not fit the static shape"
    INPUT_KIND = "an optional input is absent, or present, unlike at capture"
    CONSTANT = "a baked Python value differs from capture"
    WIDTH = "the step's width differs from the captured width"
    MORE_REQUESTS = "more requests than the recording's request axis holds"
    MORE_KEYS = "more cached tokens than the recording has room for"
    EMBEDDINGS = "embeddings are supplied, and the recording looks tokens up"
    POSITION_AXES = "rotary positions come on several axes, and the recording has one"
    BLOCK_OF_ONE = "a block of one token drafts nothing"
    NO_HEAD = "the target has no head that a draft could borrow"
    HEAD_NOT_DENSE = "the target's head is quantised or packed, and only its own method scores with it"
    SHARD_UNKNOWN = "a part of a head does not say which tokens it holds"
    NO_ATTENTION = "a layer of the stage has no attention, and only layers with one are captured"
    OTHER_RANK = "another rank has no recording of this bucket"
    COLLECTIVE = "the ranks' collective cannot be recorded here"
    BELOW_FLOOR = "in so small a bucket padded rows are not computed as live ones are, to the bit"
    NEEDS_ATTENTION = "it is recorded only together with the attention after it"
    LIVE_EXTENT = "it reads as many keys as the step has, and the recording fixes none"
    SHORT_DENSE = "the step is short enough for dense attention, and a recording cannot choose by length"
    LITTLE_MEMORY = "less device memory is free than a capture may take"
    CAPTURE_FAILED = "the capture of this bucket failed"
    KILL_SWITCH = "an environment variable switched this capture off"
    NOT_ELIGIBLE = "the runner's own rule sent this step eager"


@dataclass(frozen=True, slots=True)
class Miss:
    """One reason for an eager step, with its facts.

    Attributes:
        reason: member of ``Reason``.
        facts: what was found, for people: "batch 65, largest bucket 64".
    """

    reason: Reason
    facts: str = ""

    def __str__(self) -> str:
        return f"{self.reason.name.lower()}: {self.reason.value}" + (f" ({self.facts})" if self.facts else "")


LatestStep = tuple[int, str, int, int]
"""How a step ran: its order among all steps of the process, the key that was replayed or the name of the reason for
running eager, rows of the bucket (0 for an eager step), and live rows. A bare tuple, as every replay makes one."""

_order = count()


@dataclass
class Coverage:
    """Counts of captured and eager steps.

    Attributes:
        hits: replays by key.
        live_rows: live rows by key; against ``hits[key] * size`` it gives the padding.
        live_sizes: steps by their live size, captured or eager: what a bucket planner works from.
        misses: eager steps by reason name.
        last_facts: the facts of the latest step for each reason.
        notes: things worth knowing that are no reason for an eager step, with counts.
        latest: the step that was counted last; None before the first.
    """

    hits: Counter[str] = field(default_factory=Counter)
    live_rows: Counter[str] = field(default_factory=Counter)
    live_sizes: Counter[int] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    misses: Counter[str] = field(default_factory=Counter)
    last_facts: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    latest: LatestStep | None = field(default=None, compare=False, repr=False)

    def hit(self, key: str, size: int, live: int) -> None:
        """Counts one replay of ``key`` with ``live`` of its ``size`` rows in use."""
        self.hits[key] += 1
        self.live_rows[key] += live
        self.live_sizes[live] += 1
        self.sizes[key] = size
        self.latest = (next(_order), key, size, live)

    def miss(self, miss: Miss, live: int) -> None:
        """Counts one eager step of ``live`` rows."""
        self.live_sizes[live] += 1
        self.misses[miss.reason.name] += 1
        self.last_facts[miss.reason.name] = miss.facts
        self.latest = (next(_order), miss.reason.name, 0, live)

    @property
    def captured(self) -> int:
        """Steps that were replayed."""
        return sum(self.hits.values())

    @property
    def eager(self) -> int:
        """Steps that ran eager."""
        return sum(self.misses.values())

    @property
    def steps(self) -> int:
        """All steps."""
        return self.captured + self.eager

    @property
    def share(self) -> float | None:
        """Share of the steps that were replayed, 0 to 1; None before the first step."""
        return self.captured / self.steps if self.steps else None

    @property
    def reasons(self) -> dict[str, int]:
        """Eager steps by reason, most frequent first."""
        return dict(self.misses.most_common())

    @property
    def padding(self) -> dict[str, float]:
        """Padded rows over all rows replayed, by key, 0 to 1."""
        return {
            key: 1.0 - self.live_rows[key] / (count * self.sizes[key]) for key, count in self.hits.items()
        }

    def unused(self, buckets: Iterable[int]) -> list[int]:
        """Those of ``buckets`` that no replay has used (B55)."""
        used = {self.sizes[key] for key in self.hits}
        return [size for size in buckets if size not in used]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record or a table."""
        return {
            "steps": self.steps,
            "captured": self.captured,
            "eager": self.eager,
            "share": self.share,
            "hits": dict(self.hits),
            "padding": self.padding,
            "reasons": self.reasons,
            "facts": dict(self.last_facts),
            "notes": dict(self.notes),
        }

    def copy(self) -> Coverage:
        """These counts, to subtract later."""
        return self - Coverage()

    def __sub__(self, earlier: Coverage) -> Coverage:
        """What was counted since ``earlier``, a copy of this coverage."""
        return Coverage(
            self.hits - earlier.hits, self.live_rows - earlier.live_rows, self.live_sizes - earlier.live_sizes,
            dict(self.sizes),
            self.misses - earlier.misses, dict(self.last_facts), self.notes - earlier.notes,
        )  # fmt: skip

    def __add__(self, other: Coverage) -> Coverage:
        """Both together, as of two runners of one phase; what came last is that of either."""
        return Coverage(
            self.hits + other.hits, self.live_rows + other.live_rows, self.live_sizes + other.live_sizes,
            self.sizes | other.sizes,
            self.misses + other.misses, self.last_facts | other.last_facts, self.notes + other.notes,
            max((each for each in (self.latest, other.latest) if each), default=None),
        )  # fmt: skip

    def clear(self) -> None:
        """Forgets all counts."""
        for counts in (self.hits, self.live_rows, self.live_sizes, self.misses, self.notes):
            counts.clear()
        self.sizes.clear()
        self.last_facts.clear()

    def __str__(self) -> str:
        if not self.steps:
            return "0 steps"
        why = ", ".join(f"{name.lower()} {count}" for name, count in self.reasons.items())
        return f"{self.captured} of {self.steps} steps captured" + (f"; eager: {why}" if why else "")
