"""Claims: each target of the lab, computed from recorded runs.

``data/claims.toml`` holds them as data. A claim has parts; a part selects one record or several that were
measured side by side in one run, and compares a formula over their metrics with a target. A part may have an
alternative: then it is met by either. Only CUDA records count (a tape is no graph), and none whose parity is
corrupted.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cglab.errors import ResultsError
from cglab.measure.formula import Formula, parse_formula
from cglab.measure.record import Record
from cglab.settings import read_settings

Status = Literal["met", "unmet", "unmeasured"]

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True)
class Condition:
    """A formula against a target; ``stretch`` is a harder target that decides nothing."""

    formula: Formula
    comparison: str
    target: float
    stretch: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` meets the target."""
        return bool(_COMPARISONS[self.comparison](value, self.target))

    def margin(self, value: float) -> float:
        """By how much ``value`` meets the target, as a share of it; negative where it does not."""
        if self.comparison == "==":
            return -abs(value - self.target)
        distance = (value - self.target) / (abs(self.target) or 1.0)
        return -distance if self.comparison.startswith("<") else distance


@dataclass(frozen=True, slots=True)
class Bound:
    """What keeps a part from being met, in words with formulas in braces, computed from the records judged."""

    text: str
    formulas: Mapping[str, Formula]

    def told(self, records: Mapping[str, Record]) -> str:
        """The text with its values; where a record lacks what one reads, that is told in its place."""
        metrics = {name: record.metrics for name, record in records.items()}
        text = self.text
        for written, formula in self.formulas.items():
            try:
                value = f"{formula.value(metrics):.3g}"
            except ResultsError as error:
                value = f"(unknown: {error})"
            text = text.replace(written, value)
        return text


@dataclass(frozen=True, slots=True)
class Part:
    """One condition of a claim, the records that it reads, what would do instead, and what bounds it."""

    name: str
    select: Mapping[str, Mapping[str, Any]]
    condition: Condition
    alternative: Condition | None = None
    bound: Bound | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A target of the lab."""

    id: str
    text: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of a part.

    Attributes:
        name, formula, comparison, target: of the condition that decides: the first, or the alternative that
            is met.
        value: of the formula; None if unmeasured.
        status: met, unmet or unmeasured.
        stretch: whether the harder target is met; None without one, or unmeasured.
        margin: by how much the target is met, as a share of it.
        runs: ids of the records.
        devices: names of their devices.
        current: all of them were made with the package as it is now.
        reason: why it is unmeasured; of an unmet part what bounds it, where that is known.
    """

    name: str
    formula: str
    comparison: str
    target: float
    value: float | None = None
    status: Status = "unmeasured"
    stretch: bool | None = None
    margin: float | None = None
    runs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    current: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What became of a claim.

    Attributes:
        value, target: of the part that decides: the measured one that misses its target most, or meets it
            least.
        status: ``unmet`` if any part is, else ``unmeasured`` if any part is, else ``met``.
        runs: ids of all records that were read.
        current: all of them were made with the package as it is now; False if there are none.
    """

    id: str
    text: str
    target: float
    value: float | None
    status: Status
    runs: tuple[str, ...]
    current: bool
    parts: tuple[PartResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def load_claims(path: str | Path | None = None) -> tuple[Claim, ...]:
    """Reads and checks the claims, by default ``claims.toml`` of the data folder.

    Raises:
        ResultsError: if the file cannot be read, or a claim is no claim; it names the claim and part.
    """
    path = read_settings().data / "claims.toml" if path is None else Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"cannot read claims from {path}: {error}") from error
    claims = []
    for raw in content.get("claim", []):
        label = f"claim {raw.get('id')!r} in {path}"
        try:
            claims.append(Claim(raw["id"], raw["text"], tuple(_part(part) for part in raw["part"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ResultsError(f"{label}: a field is missing or of the wrong kind ({error!r})") from error
        except ResultsError as error:
            raise ResultsError(f"{label}: {error}") from error
        if not claims[-1].parts:
            raise ResultsError(f"{label} has no parts")
    return tuple(claims)


def evaluate(claims: Sequence[Claim], records: Sequence[Record], tree: str) -> list[ClaimResult]:
    """Computes claims from records.

    Args:
        claims: from :func:`load_claims`.
        records: all that were recorded; for each part the newest run counts that has what the part reads.
        tree: state of the package now, from :func:`cglab.measure.tree.tree_hash`.
    """
    runs = _runs(records)
    results = []
    for claim in claims:
        parts = tuple(_evaluate(part, runs, tree) for part in claim.parts)
        statuses = {part.status for part in parts}
        status: Status = (
            "unmet" if "unmet" in statuses else "unmeasured" if "unmeasured" in statuses else "met"
        )
        measured = [part for part in parts if part.margin is not None]
        decides = min(measured, key=lambda part: part.margin or 0.0) if measured else parts[0]
        ids = tuple(dict.fromkeys(run for part in parts for run in part.runs))
        current = bool(measured) and all(part.current for part in measured)
        results.append(
            ClaimResult(claim.id, claim.text, decides.target, decides.value, status, ids, current, parts)
        )
    return results


def _part(raw: Mapping[str, Any]) -> Part:
    select = raw["select"] if "select" in raw else {"run": raw["where"]}
    names = tuple(select)
    other = raw.get("alternative")
    return Part(
        raw["name"], select, _condition(raw, names), None if other is None else _condition(other, names),
        _bound(raw["bound"], names) if "bound" in raw else None,
    )  # fmt: skip


def _bound(text: str, names: tuple[str, ...]) -> Bound:
    pattern = re.compile(r"\{[^{}]*\}")
    if re.search("[{}]", pattern.sub("", text)):
        raise ResultsError(f"bound {text!r} has a brace without its partner; write {{formula}}")
    written = pattern.findall(text)
    return Bound(text, {each: parse_formula(each[1:-1], names) for each in written})


def _condition(raw: Mapping[str, Any], names: tuple[str, ...]) -> Condition:
    if raw["comparison"] not in _COMPARISONS:
        raise ResultsError(f"comparison {raw['comparison']!r} is none of {', '.join(_COMPARISONS)}")
    stretch = raw.get("stretch")
    return Condition(
        parse_formula(raw["formula"], names),
        raw["comparison"],
        float(raw["target"]),
        None if stretch is None else float(stretch),
    )


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Records that count, grouped by run, newest run first and newest record first within a run."""
    runs: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.created, reverse=True):
        corrupted = record.parity is not None and record.parity.get("verdict") == "corrupted"
        if record.shows_graph_times and not corrupted:
            runs.setdefault(record.run or record.id, []).append(record)
    return list(runs.values())


def _evaluate(part: Part, runs: Sequence[Sequence[Record]], tree: str) -> PartResult:
    conditions = [part.condition] + ([] if part.alternative is None else [part.alternative])
    tried = [_judge(part, condition, runs, tree) for condition in conditions]
    return next((result for result in tried if result.status == "met"), tried[0])


def _judge(part: Part, condition: Condition, runs: Sequence[Sequence[Record]], tree: str) -> PartResult:
    told: dict[str, Any] = {
        "name": part.name,
        "formula": condition.formula.text,
        "comparison": condition.comparison,
        "target": condition.target,
    }
    reason = "no run has the records that it reads"
    for chosen in _selections(part, runs):
        try:
            value = condition.formula.value({name: record.metrics for name, record in chosen.items()})
        except ResultsError as error:
            reason = str(error)
            continue
        records = list(chosen.values())
        stretch = condition.stretch
        met = condition.holds(value)
        return PartResult(
            **told,
            value=value,
            status="met" if met else "unmet",
            reason=None if met or part.bound is None else part.bound.told(chosen),
            stretch=None if stretch is None else bool(_COMPARISONS[condition.comparison](value, stretch)),
            margin=condition.margin(value),
            runs=tuple(record.id for record in records),
            devices=tuple(dict.fromkeys(record.device.name for record in records)),
            current=all(record.tree == tree for record in records),
        )
    return PartResult(**told, reason=reason)


def _selections(part: Part, runs: Sequence[Sequence[Record]]) -> Iterator[dict[str, Record]]:
    """Per run that has all of them, the newest record of each selection."""
    for run in runs:
        chosen = {
            name: next((record for record in run if _matches(_facts(record), where)), None)
            for name, where in part.select.items()
        }
        if None not in chosen.values():
            yield {name: record for name, record in chosen.items() if record is not None}


def _facts(record: Record) -> dict[str, Any]:
    return {**vars(record), "device": asdict(record.device)}


def _matches(values: Any, where: Any) -> bool:
    """Whether ``values`` holds everything in ``where``, objects by their own entries."""
    if isinstance(where, Mapping):
        return isinstance(values, Mapping) and all(
            key in values and _matches(values[key], wanted) for key, wanted in where.items()
        )
    return bool(values == where)
