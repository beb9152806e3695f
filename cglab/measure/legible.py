"""What must be in a record for those who read it later: one rule for every reader, and one way to be told.

A line that is whole may still be of an earlier version of a bench, or edited by hand: a field is gone, or is of another
kind. Who reads it anyway fails far from the cause, or draws a wrong conclusion. So what each bench's readers need is
listed here, and a record without it is passed over with a warning that names record and field.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cglab.errors import RecordError
from cglab.graphs.options import outside_level
from cglab.measure.record import Record, is_number
from cglab.measure.records import ResultsWarning

MOST: Final = 2**31 - 1
"""Largest count that anything here can have."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field is to be.

    Attributes:
        text: in words.
        fits: whether a value is one.
    """

    text: str
    fits: Callable[[Any], bool]


def _listed(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(each, value))


SIZE: Final = Kind("a whole number", lambda value: type(value) is int and 0 <= value <= MOST)
COUNT: Final = Kind("a whole number from 1", lambda value: type(value) is int and 1 <= value <= MOST)
WHOLE: Final = Kind(
    "a whole number from 1", lambda value: is_number(value) and 1 <= value <= MOST and value == int(value)
)
"""As metrics have it, which are floats."""
NUMBER: Final = Kind("a number", is_number)
TRUTH: Final = Kind("true or false", lambda value: isinstance(value, bool))
COUNTS: Final = Kind("a list of whole numbers from 1", _listed(COUNT.fits))
NUMBERS: Final = Kind("a list of numbers", _listed(is_number))
TIMES: Final = Kind("a list of times", _listed(lambda value: is_number(value) and value > 0))
TABLE: Final = Kind("a table", lambda value: isinstance(value, dict))
ANYTHING: Final = Kind("there", lambda value: value is not None)
COSTS: Final = dict.fromkeys(
    ("metrics.buckets?", "metrics.capture_s?", "metrics.warmup_s?", "metrics.graph_gb?", "metrics.draft_graph_gb?"),
    NUMBER,
)  # fmt: skip

NEEDED: Final[Mapping[str, Mapping[str, Kind]]] = {
    "decode": {"workload.batch": SIZE, "coverage.reasons?": TABLE},
    "capture": {"workload.phase": ANYTHING},
    "token": {"workload.batch": COUNT, "workload.context?": COUNT},
    "prefill": {"workload.tokens?": COUNT, "workload.cached?": SIZE},
    "ttft": {"workload.tokens": COUNT, "workload.concurrency": COUNT, "workload.cached?": SIZE},
    "ttft_crossover": {"workload.sizes": COUNTS},
    "planner": {"workload.phase": ANYTHING, "workload.load": ANYTHING},
    "pipeline": {"workload.cap": COUNT, "workload.stages": COUNT, "metrics.tok_s": NUMBER},
    "dsa_prefill": {
        "workload.fresh": COUNT, "workload.cached": SIZE, "workload.concurrency": COUNT,
        "workload.step.tokens": COUNT, "workload.step.cached": SIZE, "workload.step.requests": COUNT,
        "samples.ttft_ms": TIMES, "metrics.instances": WHOLE, "metrics.ttft_ratio?": NUMBER, "metrics.bitwise?": TRUTH,
    },
    "dsa_ablation_turn": {
        "workload.round": SIZE, "workload.payload": ANYTHING,
        **{f"samples.{name}_ms": TIMES for name in ("ttft", "tpot", "e2e", "round")},
        **{f"samples.{name}": NUMBERS for name in ("queueing_ms", "output_tokens", "output_lengths")},
        **{f"metrics.{name}": NUMBER for name in ("tokens_s", "accept_length", "errors", "preemptions")},
    },
    "dsa_prefill_sweep": COSTS,
    "dsa_ablation": COSTS,
}  # fmt: skip
"""By bench the fields that its readers need, as paths; one with a question mark may be absent or null."""


def check(record: Record) -> None:
    """Stops at a record that its bench's readers cannot read.

    Raises:
        RecordError: naming the record, the field, what it is and what it is to be.
    """
    require(record, NEEDED.get(record.bench, {}))


def require(record: Record, needed: Mapping[str, Kind]) -> None:
    """Stops at a record that lacks what is needed; see ``NEEDED`` for the paths, ``check`` for the error."""
    for path, kind in needed.items():
        value = at(record, path.removesuffix("?"))
        if not (kind.fits(value) or (value is None and path.endswith("?"))):
            raise unreadable(record, path.removesuffix("?"), value, kind.text)


def at(record: Record, path: str) -> Any:
    """What a record has at a path such as ``workload.step.tokens``; None where it has nothing."""
    first, *names = path.split(".")
    value = getattr(record, first)
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def unreadable(record: Record, path: str, value: Any, wanted: str) -> RecordError:
    """The error of a record whose field is not what it is to be."""
    told = "absent" if value is None else f"{str(value)[:40]!r}"
    return RecordError(
        f"record {record.id} of {record.bench}, arm {record.arm}, has {path} {told}, and it is to be {wanted}: it is "
        "damaged or of an earlier version; measure it again"
    )


def legible(records: Iterable[Record], read: Callable[[Record], object] = check) -> list[Record]:
    """The records that can be read, in order; of others a ``ResultsWarning`` says how many and what is wrong first.

    Args:
        records: of any benches.
        read: raises a ``RecordError`` for a record that cannot be read.
    """
    kept, odd = [], []
    for each in records:
        try:
            read(each)
        except RecordError as error:
            odd.append(error)
        else:
            kept.append(each)
    if odd:
        told = f"passed over {len(odd)} records, which stay in their files; the first: {odd[0]}"
        warnings.warn(ResultsWarning(told), stacklevel=outside_level())
    return kept
