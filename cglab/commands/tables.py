"""``techniques``, ``results`` and ``published``: tables of what there is."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from textwrap import wrap

from cglab import settings
from cglab.commands.console import FAILS, HOLDS, Outcome, note, text_table
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.claims import ClaimResult, evaluate, load_claims
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
    if options.claims:
        return _claims(evaluate(load_claims(), records, tree_hash()))
    rows = [
        {
            "recorded": record.created[:19],
            "bench": record.bench,
            "model": record.model,
            "arm": record.arm,
            "workload": ", ".join(f"{name} {value}" for name, value in record.workload.items()),
            "result": _headline(record),
            "parity": (record.parity or {}).get("verdict"),
            "device": record.device.name,
        }
        for record in records
    ]
    table = text_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else "nothing yet"
    return Outcome(table, [record.as_dict() for record in records])


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


def _claims(claims: Sequence[ClaimResult]) -> Outcome:
    unmet = any(claim.status == "unmet" for claim in claims)
    text = "\n\n".join(_told(claim) for claim in claims)
    return Outcome(text, [claim.as_dict() for claim in claims], FAILS if unmet else HOLDS)


def _told(claim: ClaimResult) -> str:
    state = "" if not claim.runs else ", by this code" if claim.current else ", by older code"
    lines = [f"{claim.id} {claim.status}{state}", *wrap(claim.text, 100)]
    for part in claim.parts:
        value = "not recorded" if part.value is None else f"{part.value:.4g}"
        lines.append(f"{part.status:>10}  {part.name}: {value}, wanted {part.comparison} {part.target:g}")
        if part.status == "unmet" and part.reason:
            lines += [" " * 12 + line for line in wrap(part.reason, 88)]
    return "\n    ".join(lines)
