"""``parity`` and ``bench``: is it the same work, and what does it take."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from cglab import settings
from cglab.commands.console import FAILS, HOLDS, Outcome, note, progress_bar
from cglab.errors import InputError
from cglab.lab import benches, oracles
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.records import append

SHOWN = 10  # mismatches in the text; the JSON has them all


def parity(options: Namespace) -> Outcome:
    """Captured against eager, for one technique or all of this version; status 1 if one differs."""
    if options.plant is not None and options.plant not in oracles.PLANTS:
        known = "; ".join(f"{name} ({text})" for name, text in oracles.PLANTS.items())
        raise InputError(f"{options.plant!r} is no fault that can be planted; there are {known}")
    device = settings.device()
    names = [t.name for t in TECHNIQUES.values() if t.available] if options.all else [options.technique]
    found = []
    for name in names:
        with progress_bar(options.cases, f"parity of {name}", "case") as bar:
            found.append(
                oracles.check_technique(
                    name, options.cases, device=device, plant=options.plant, progress=lambda done, b=bar: b.update(done - b.n)
                )
            )
    values = [each.as_dict() for each in found]
    text = "\n".join(_told(value) for value in values)
    status = HOLDS if all(each.ok for each in found) else FAILS
    if options.plant is not None:
        text += f"\nplanted: {options.plant}, {'caught' if status == FAILS else 'NOT caught'}"
    return Outcome(text, values if options.all else values[0], status)


def bench(options: Namespace) -> Outcome:
    """Measures one bench; status 1 if an arm did other work than its oracle."""
    chosen = benches.BENCHES.get(options.name)
    if chosen is None:
        known = "; ".join(f"{name} ({each.text})" for name, each in benches.BENCHES.items())
        raise InputError(f"{options.name!r} is no bench; there are {known}")
    folder = settings.read_settings().data / "results" if options.save else options.record
    with progress_bar(None, options.name) as bar:
        records = chosen.run(settings.device(), quick=options.quick, progress=lambda done: bar.update(done - bar.n))
    if folder is not None:
        append(folder / f"{options.name}.jsonl", records)
        note(f"{len(records)} records added to {folder / options.name}.jsonl")
    corrupted = any(record.parity and record.parity.get("verdict") == "corrupted" for record in records)
    return Outcome(benches.format_table(records), [r.as_dict() for r in records], FAILS if corrupted else HOLDS)


def _told(value: dict[str, Any]) -> str:
    wrong = value["mismatches"]
    lines = [
        f"{value['technique']}: {value['cases']} cases, {'bitwise' if value['bitwise'] else 'NOT bitwise'}, "
        f"tokens {'equal' if value['tokens_equal'] else 'DIFFER'}, {len(wrong)} mismatches"
    ]
    lines += ["  " + ", ".join(f"{key} {fact}" for key, fact in each.items()) for each in wrong[:SHOWN]]
    return "\n".join([*lines, f"  and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else lines)
