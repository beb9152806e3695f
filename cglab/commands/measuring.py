"""``parity`` and ``bench``: is it the same work, and what does it take."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from cglab import settings
from cglab.commands.bench_settings import read_settings_of, refuse_decided
from cglab.commands.console import FAILS, HOLDS, Outcome, advance, note, progress_bar
from cglab.errors import InputError
from cglab.lab.benches import BENCHES
from cglab.lab.checking import check_technique
from cglab.lab.tables import format_table
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.record import Record
from cglab.measure.records import append


def parity(options: Namespace) -> Outcome:
    """Captured against eager, for one technique or all of this version; status 1 if one differs."""
    device = settings.device()
    names = list(TECHNIQUES) if options.all else [options.technique]
    found = []
    for name in names:
        with progress_bar(options.cases, f"parity of {name}", "case") as bar:
            checked = check_technique(
                name, options.cases, device=device, plant=options.plant, progress=partial(_count_to, bar)
            )
        found.append(checked)
    lines = [str(each) for each in found]
    status = HOLDS if all(each.ok for each in found) else FAILS
    if options.plant is not None:
        lines.append(f"planted {options.plant}: {'caught' if status == FAILS else 'NOT caught'}")
    values = [each.as_dict() for each in found]
    return Outcome("\n".join(lines), values if options.all else values[0], status)


def bench(options: Namespace) -> Outcome:
    """Measures one bench; status 1 if an arm did other work than its oracle, or a suite failed."""
    chosen = BENCHES.get(options.name)
    if chosen is None:
        known = "; ".join(f"{name} ({each.text})" for name, each in BENCHES.items())
        raise InputError(f"{options.name!r} is no bench; there are {known}")
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


def _holds(record: Record) -> bool:
    """Whether an arm did its oracle's work, and what it was to show was shown."""
    corrupted = record.parity is not None and record.parity.get("verdict") == "corrupted"
    return not corrupted and record.metrics.get("ok") is not False


def _count_to(bar: Any, done: int) -> None:
    bar.update(done - bar.n)
