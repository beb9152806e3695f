"""Write the tables of results in the README and beside the records, from the records and nothing else.

    python scripts/readme_table.py            write the blocks between the markers anew
    python scripts/readme_table.py --check    write nothing; exit 1 if a file says something else

A block holds the newest recorded run of each model and size on a GPU; without one it says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cglab.errors import CglabError
from cglab.lab.claims_table import Targets
from cglab.lab.markdown import Block, between, number, table
from cglab.lab.peer_table import Fastest, Peers
from cglab.lab.recorded import Recorded, recorded
from cglab.lab.server_tables import Engines, Servers
from cglab.lab.zoo_table import Zoo
from cglab.measure.record import Record

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("eager", "full", "breakable")
TIMES = tuple(f"{arm} ms" for arm in ARMS)

Arms = Mapping[str, Record]


@dataclass(frozen=True)
class Table(Block):
    """A block with one row for each model and size, and the arms side by side.

    Attributes:
        what: the sentence over it, up to the machine.
        how: the sentences after the machine and day.
        size: entries of a record's workload that make a row with its model.
        header: of the columns after the model and the size.
        cells: of the columns after these, from the records of a row by arm.
    """

    what: str
    how: str
    size: tuple[str, ...]
    header: tuple[str, ...]
    cells: Callable[[Arms], Sequence[str]]

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        return self.block(recorded(self.bench, folder))

    def block(self, results: Recorded) -> str:
        """The table, under one line on where and when."""
        rows: dict[tuple[Any, ...], dict[str, Record]] = {}
        for record in results.records:
            if all(name in record.workload for name in self.size):
                key = (record.model or "", *(record.workload[name] for name in self.size))
                arms = rows.setdefault(key, {})
                if any(_apart(record, other) for other in arms.values()):
                    arms.clear()  # by time: the newer one begins its row anew
                arms[record.arm] = record
        if not rows:
            return self.not_yet
        last = results.records[-1]
        where = (
            f"{self.what} on one {last.device.name}, recorded on {last.created[:10]} with torch "
            f"{last.versions['torch']}, random weights for the published shapes, {_forms(rows.values())} operations; "
            f"{self.how}"
        )
        lines = [(*map(str, key), *self.cells(arms)) for key, arms in sorted(rows.items())]
        return f"{where}\n\n{table(('model', *self.size, *self.header), lines)}"


def _forms(rows: Iterable[Arms]) -> str:
    """In which kernels the models of a table computed."""
    found = {each.workload.get("ops", "portable") for arms in rows for each in arms.values()}
    return " and ".join(sorted(found))


def _apart(one: Record, other: Record) -> bool:
    """Whether two records may not share a row: of another run, or on another form of the model's operations."""
    return (one.run, one.workload.get("ops")) != (other.run, other.workload.get("ops"))


def _decode(arms: Arms) -> list[str]:
    full = _metric(arms, "full", "floor_ms")
    step = {arm: _metric(arms, arm, "step_ms") for arm in ARMS}
    times = [number(step[arm]) for arm in ARMS]
    return [*times, number(step["eager"], step["full"]), number(step["full"], full), _parity(arms)]


def _ttft(arms: Arms) -> list[str]:
    times = [number(_metric(arms, arm, "ttft_ms")) for arm in ARMS]
    ratio = number(_metric(arms, "breakable", "ratio_to_eager"))
    verdict = str(arms["breakable"].metrics.get("verdict")) if "breakable" in arms else "-"
    return [
        *times,
        ratio,
        verdict,
        number(_metric(arms, "eager", "gap_share")),
        _captured(arms),
        _parity(arms),
    ]


def _prefill(arms: Arms) -> list[str]:
    times = [number(_metric(arms, arm, "step_ms")) for arm in ARMS]
    names = ("wall_over_busy", "breaks", "break_us", "padding_waste")
    return [*times, *(number(_metric(arms, "breakable", name)) for name in names), _parity(arms)]


DECODE = Table(
    "results", "decode", "One decode step",
    "median of interleaved turns, captured step against padded eager step for parity. The floor is the bytes read "
    "over the measured read bandwidth.",
    ("batch",), (*TIMES, "full, times faster", "full over floor", "parity"), _decode,
)  # fmt: skip
TTFT = Table(
    "ttft", "ttft", "Median time to first token, queueing included,",
    "arms in turns on the same requests, prompts of fresh tokens after cached ones. The gap is the share of the "
    "eager step in which the device waits; full runs eager, with its reason, where its request axis ends.",
    ("tokens", "cached", "concurrency"),
    (*TIMES, "breakable over eager", "verdict", "gap", "full captured", "parity"), _ttft,
)  # fmt: skip
PREFILL = Table(
    "prefill", "prefill", "One prefill step of one request",
    "median of interleaved turns, captured step against padded eager step for parity. Wall over kernel busy, "
    "breaks and padding are of breakable; a break's cost is what it leaves of the gap.",
    ("tokens", "cached"), (*TIMES, "wall over busy", "breaks", "us a break", "padding", "parity"), _prefill,
)  # fmt: skip


@dataclass(frozen=True)
class Checks(Block):
    """The block of what was checked and not timed: one line a run, whatever came out."""

    name: str = "checks"
    bench: str = "parity"
    records_it: ClassVar[str] = "and its like on a GPU record it"

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        found = {bench: recorded(bench, folder) for bench in CHECKED}
        rows = [row for bench, each in found.items() for row in _checked(bench, each.records)]
        if not rows:
            return self.not_yet
        where = next(each.where for each in found.values() if each)
        return f"Checked on one {where}:\n\n{table(('check', 'of what', 'done', 'held'), rows)}"


CHECKED = {
    "parity": "random batches against three oracles",
    "requests": "64 requests at concurrency 8, nine pairs of modes",
    "recovery": "a fault at every recorded operation",
    "notebooks": "notebooks under nbval",
    "gpu-tests": "tests that need a GPU",
}


def _checked(bench: str, records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row for each thing that was checked: what, how much was done, and whether it held."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        form = record.workload.get("ops", "portable")
        shown = {
            "parity": f"{record.arm}, {record.dtype}, {form}",
            "requests": f"{record.dtype}, prefix reuse "
            f"{'on' if record.workload.get('prefix_reuse') else 'off'}, {form}",
            "recovery": f"{record.arm} capture",
        }.get(bench, str(record.model))
        groups.setdefault(shown, []).append(record)
    rows: list[tuple[str, ...]] = []
    for what, made in sorted(groups.items()):
        total = {name: sum(_count(record, name) for record in made) for name in SUMMED}
        done = {
            "parity": f"{total['cases']:,} sequences, {total['steps']:,} steps, {total['captured']:,} replayed",
            "requests": f"{total['steps']:,} steps, {total['captured']:,} replayed, "
            f"{total['preemptions']:,} preemptions",
            "recovery": f"{total['tried']:,} of {total['operations']:,} operations",
        }.get(bench, f"{total['passed']:,} of {total['tests'] - total['skipped']:,}")
        failed = sum(record.metrics.get("ok") is not True for record in made)
        held = "yes" if not failed else f"**no**: {failed} of {len(made)} runs"
        rows.append((CHECKED[bench], what, done, held))
    return rows


SUMMED = (
    "cases", "steps", "captured", "preemptions", "tried", "operations", "passed", "tests", "skipped",
)  # fmt: skip


def _count(record: Record, name: str) -> int:
    value = record.metrics.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


BLOCKS: Mapping[str, Sequence[Block]] = {
    "README.md": (Targets(), DECODE, Fastest()),
    "data/results/README.md": (Peers(), TTFT, PREFILL, Servers(), Engines(), Checks(), Zoo()),
}
"""The blocks of each file."""


def _metric(arms: Arms, arm: str, name: str) -> Any:
    return arms[arm].metrics.get(name) if arm in arms else None


def _captured(arms: Arms) -> str:
    counts = arms["full"].coverage if "full" in arms else None
    return "-" if counts is None else f"{counts['captured']} of {counts['steps']}"


def _parity(arms: Arms) -> str:
    verdicts = {str((arms[arm].parity or {}).get("verdict")) for arm in ARMS[1:] if arm in arms}
    return " / ".join(sorted(verdicts)) or "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the files say what the records say, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Write the tables of results.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, help="where the records are (default: data/results)")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the files to write")
    options = parser.parse_args(arguments)
    try:
        old = {name: (options.root / name).read_text(encoding="utf-8") for name in BLOCKS}
        new = {name: _written(text, name, options.folder) for name, text in old.items()}
    except (CglabError, OSError, ValueError) as error:
        print(f"no table: {error}", file=sys.stderr)
        return 1
    changed = [name for name in BLOCKS if new[name] != old[name]]
    for name in changed:
        if options.check:
            print(f"{name} is not what the records say: run scripts/readme_table.py", file=sys.stderr)
        else:
            (options.root / name).write_text(new[name], encoding="utf-8")
    return int(options.check and bool(changed))


def _written(text: str, name: str, folder: Path | None) -> str:
    """A file with its blocks written anew."""
    try:
        for block in BLOCKS[name]:
            text = between(text, block.begin, block.end, block.text(folder))
    except ValueError as error:
        message = f"{name}: {error}"
        raise ValueError(message) from error
    return text


if __name__ == "__main__":
    sys.exit(main())
