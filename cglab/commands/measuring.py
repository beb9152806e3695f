"""``parity`` and ``bench``: is it the same work, and what does it take."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cglab import settings
from cglab.commands.bench_settings import read_settings_of, refuse_decided, settings_of
from cglab.commands.console import FAILS, HOLDS, Outcome, advance, note, progress_bar, text_table
from cglab.errors import InputError, no_such
from cglab.lab.benches import BENCHES
from cglab.lab.checking import check_technique
from cglab.lab.parity_matrix import ArmRow, NotRun, plan_matrix, run_matrix
from cglab.lab.tables import format_table
from cglab.measure.parity import Verdict
from cglab.measure.record import Record
from cglab.measure.records import append


def parity(options: Namespace) -> Outcome:
    """Captured against eager: one technique, status 1 if it differs; or the whole matrix, status 1 for corruption."""
    device = settings.device()
    if options.all:
        return _matrix(device, options.cases, options.plant)
    with progress_bar(options.cases, f"parity of {options.technique}", "case") as bar:
        found = check_technique(
            options.technique,
            options.cases,
            device=device,
            plant=options.plant,
            progress=partial(_count_to, bar),
        )
    lines = [str(found)]
    if options.plant is not None:
        lines.append(f"planted {options.plant}: {'NOT caught' if found.ok else 'caught'}")
    return Outcome("\n".join(lines), found.as_dict(), HOLDS if found.ok else FAILS)


def _matrix(device: torch.device, cases: int, plant: str | None) -> Outcome:
    planned, not_run = plan_matrix(device)
    with progress_bar(cases * len(planned), "parity", "case") as bar:
        found = run_matrix(
            planned, not_run, cases=cases, plant=plant,
            progress=lambda each: advance(bar, f"parity of {each.technique}, {each.recorder}, {each.ops}"),
        )  # fmt: skip
    columns = (
        "technique", "backend", "form", "recorder", "padding", "ops", "captured", "verdict", "drift", "bound",
    )  # fmt: skip
    lines = [text_table(columns, [_matrix_cells(row) for row in found.rows])]
    lines += [str(row) for row in found.rows if row.detail]
    lines += ["not run:", *(f"  {text}" for text in _reasons(found.not_run))] if found.not_run else []
    if plant is not None:
        caught = found.worst not in (None, Verdict.BITWISE)
        lines.append(f"planted {plant}: {f'told as {found.worst}' if caught else 'NOT caught'}")
    return Outcome("\n".join(lines), found.as_dict(), HOLDS if found.ok else FAILS)


def _matrix_cells(row: ArmRow) -> tuple[object, ...]:
    exact = row.verdict is Verdict.BITWISE
    return (
        row.technique, row.backend, row.form, row.recorder, "padded" if row.padding else "exact", row.ops,
        f"{row.captured}/{row.steps}", row.verdict.value,
        None if exact else f"{row.drift:.2g}", None if exact else f"{row.bound:.2g}",
    )  # fmt: skip


def _reasons(not_run: Sequence[NotRun]) -> list[str]:
    """One line for each place and reason, with the techniques that it is said of."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for each in not_run:
        said.setdefault((each.recorder, each.ops, each.why), []).append(each.technique)
    return [
        f"{recorder}, {ops} ops: {why} ({', '.join(names)})" for (recorder, ops, why), names in said.items()
    ]


def bench(options: Namespace) -> Outcome:
    """Measures one bench; status 1 if an arm did other work than its oracle, or a suite failed. Unnamed: lists them."""
    if options.name is None:
        return _benches(options)
    chosen = BENCHES.get(options.name)
    if chosen is None:
        raise InputError(f"{no_such('bench', options.name, BENCHES)}; `cglab bench` says what each measures")
    given = read_settings_of(chosen.run, options.set)
    if options.quick:
        refuse_decided(chosen.quick, given)
    folder = settings.read_settings().data / "results" if options.save else options.record
    records: list[Record] = []
    with progress_bar(None, options.name, "stage") as bar:
        run = partial(chosen.run, settings.device(), quick=options.quick, **given)
        for record in run(progress=partial(advance, bar)):
            records.append(record)
            if folder is not None:  # at once: whatever ends the bench early leaves what it has measured
                append(folder / f"{options.name}.jsonl", [record])
    if folder is not None:
        note(f"{len(records)} records added to {folder / options.name}.jsonl")
    return Outcome(
        format_table(records), [r.as_dict() for r in records], HOLDS if all(map(_holds, records)) else FAILS
    )


def _benches(options: Namespace) -> Outcome:
    if options.quick or options.set or options.save or options.record is not None:
        raise InputError("no bench is named; `cglab bench` alone lists them")
    rows = [
        {"bench": name, "measures": each.text, "settings": settings_of(each.run)}
        for name, each in BENCHES.items()
    ]
    return Outcome(text_table(("bench", "measures"), [(row["bench"], row["measures"]) for row in rows]), rows)


def _holds(record: Record) -> bool:
    """Whether an arm did its oracle's work, and what it was to show was shown."""
    corrupted = record.parity is not None and record.parity.get("verdict") == "corrupted"
    return not corrupted and record.metrics.get("ok") is not False


def _count_to(bar: Any, done: int) -> None:
    bar.update(done - bar.n)
