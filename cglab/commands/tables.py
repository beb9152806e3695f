"""``techniques``, ``results`` and ``published``: tables of what there is."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from textwrap import shorten, wrap
from typing import get_args

from cglab import settings
from cglab.commands.console import FAILS, HOLDS, Outcome, note, text_table
from cglab.errors import InputError, no_such
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.claims import ClaimResult, PartResult, Status, evaluate, load_claims
from cglab.measure.published import load_published
from cglab.measure.record import Record
from cglab.measure.records import read
from cglab.measure.tree import tree_hash
from cglab.serving.toggles import rows as sglang_rows


def techniques(_options: Namespace) -> Outcome:
    """The ten techniques with their toggles, and what drives each in SGLang."""
    servers = sglang_rows()
    rows = [{**technique.as_dict(), "sglang": servers[technique.id]} for technique in TECHNIQUES.values()]
    columns = ("id", "toggle", "values", "default", "text")
    shown = [{**row, "values": ", ".join(row["values"])} for row in rows]
    table = text_table(columns, [[row[column] for column in columns] for row in shown])
    return Outcome(table, rows)


def results(options: Namespace) -> Outcome:
    """Recorded results, or the claims that are computed from them."""
    records = _records()
    if options.claims is not None:
        return _claims(evaluate(load_claims(), records, tree_hash()), options.claims)
    rows = [
        {
            "recorded": record.created[:19],
            "bench": record.bench,
            "model": record.model,
            "arm": record.arm,
            "workload": _asked_for(record),
            "result": _headline(record),
            "parity": (record.parity or {}).get("verdict"),
            "device": record.device.name,
        }
        for record in records
    ]
    table = text_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else "nothing yet"
    return Outcome(table, [record.as_dict() for record in records])


def _asked_for(record: Record) -> str:
    """The plain values of its workload, as far as a line holds them; ``--json`` has them all."""
    plain = {name: value for name, value in record.workload.items() if not isinstance(value, dict | list)}
    plain.pop("payload", None)
    return shorten(", ".join(f"{name} {value}" for name, value in plain.items()), 90, placeholder=" ...")


_HEADLINES = {
    "step_ms": "a step", "ttft_ms": "to the first token", "ttft_ms_p50": "to the first token",
    "time_ms": "for the trace",
}  # fmt: skip


def _headline(record: Record) -> str | None:
    """The one figure of a record that says most: a time, or whether it held."""
    metrics, held = record.metrics, record.metrics.get("ok")
    for name, what in _HEADLINES.items():
        if isinstance(time := metrics.get(name), float):
            return f"{time:.4g} ms {what}"
    return None if held is None else "holds" if held else "does not hold"


def published(_options: Namespace) -> Outcome:
    """Every table of the source documents."""
    tables = list(load_published().values())
    texts = []
    for table in tables:
        names = [column["name"] for column in table["columns"]]
        units = [f"{column['name']} [{column['unit']}]" for column in table["columns"]]
        rows = [[row[name] for name in names] for row in table["rows"]]
        texts.append(
            f"{table['id']}: {table['title']} ({table['source']}; {table['machine']})\n{text_table(units, rows)}"
        )
    return Outcome("\n\n".join(texts), tables)


def _records() -> tuple[Record, ...]:
    folder = settings.read_settings().data / "results"
    if not folder.exists():
        note(f"no results at {folder}; `cglab bench NAME --save` records some")
        return ()
    found = read(folder)
    for problem in found.problems:
        note(f"not a record: {problem}")
    return found.records


ALL = "all"
"""In place of the ids of all claims."""
OLDER = "older code"


def _claims(claims: Sequence[ClaimResult], wanted: Sequence[str]) -> Outcome:
    """All claims, a line each; or those that are wanted, with their parts.

    Raises:
        InputError: for an id that no claim has.
    """
    known = [claim.id for claim in claims]
    if unknown := [each for each in wanted if each not in (*known, ALL)]:
        raise InputError(no_such("claim", unknown[0], (*known, ALL)))
    chosen = [claim for claim in claims if not wanted or claim.id in wanted or ALL in wanted]
    text = "\n\n".join(map(_told, chosen)) if wanted else _overview(chosen)
    unmet = any(claim.status == "unmet" for claim in chosen)
    return Outcome(text, [claim.as_dict() for claim in chosen], FAILS if unmet else HOLDS)


def _overview(claims: Sequence[ClaimResult]) -> str:
    """A line for each claim with its worst part, under one that counts them."""
    counts = Counter(claim.status for claim in claims)
    older = sum(_code(claim) == OLDER for claim in claims)
    count = ", ".join(f"{counts[status]} {status}" for status in get_args(Status))
    columns = ("claim", "is", "parts met", "about", "worst part", "value", "wanted")
    hint = f"`cglab results --claims {claims[0].id}` tells all of a claim: its parts, and what bounds an unmet one."
    table = text_table(columns, [_overview_row(claim) for claim in claims])
    return f"{count}; {older} of them by older code\n\n{table}\n\n{hint}"


def _overview_row(claim: ClaimResult) -> tuple[str, ...]:
    # Of the parts that make a claim what it is, the one that misses its target most, or meets it least.
    decisive = [part for part in claim.parts if part.status == claim.status]
    worst = min(decisive, key=lambda part: part.margin or 0.0)
    met = sum(part.status == "met" for part in claim.parts)
    about, name = (shorten(text, 44, placeholder=" …") for text in (claim.text.partition(":")[0], worst.name))
    wanted = f"{worst.comparison} {worst.target:g}"
    return claim.id, claim.status, f"{met} of {len(claim.parts)}", about, name, _value(worst, "-"), wanted


def _code(claim: ClaimResult) -> str | None:
    """Which code the records were made with."""
    if not claim.runs:
        return None
    return "this code" if claim.current else OLDER


def _value(part: PartResult, none: str = "not recorded") -> str:
    return none if part.value is None else f"{part.value:.4g}"


def _told(claim: ClaimResult) -> str:
    code = _code(claim)
    lines = [f"{claim.id} {claim.status}{f', by {code}' if code else ''}", *wrap(claim.text, 100)]
    for part in claim.parts:
        lines.append(
            f"{part.status:>10}  {part.name}: {_value(part)}, wanted {part.comparison} {part.target:g}"
        )
        if part.status == "unmet" and part.reason:
            lines += [" " * 12 + line for line in wrap(part.reason, 88)]
    return "\n    ".join(lines)
