"""Write the README's tables of results, from records and nothing else.

    python scripts/readme_table.py            write the blocks between the markers anew
    python scripts/readme_table.py --check    write nothing; exit 1 if the README says something else

A block holds the newest recorded run of each model and size on a GPU; without one it says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cglab.errors import CglabError
from cglab.lab.peer_table import Peers
from cglab.lab.recorded import Recorded, recorded
from cglab.lab.zoo_table import Zoo
from cglab.measure.record import Record

README = Path(__file__).resolve().parent.parent / "README.md"
ARMS = ("eager", "full", "breakable")
TIMES = tuple(f"{arm} ms" for arm in ARMS)

Arms = Mapping[str, Record]


@dataclass(frozen=True)
class Table:
    """One block of the README.

    Attributes:
        name: in its markers.
        bench: whose records it holds.
        what: the sentence over it, up to the machine.
        how: the sentences after the machine and day.
        size: entries of a record's workload that make a row with its model.
        header: of the columns after the model and the size.
        cells: of the columns after these, from the records of a row by arm.
    """

    name: str
    bench: str
    what: str
    how: str
    size: tuple[str, ...]
    header: tuple[str, ...]
    cells: Callable[[Arms], Sequence[str]]

    @property
    def begin(self) -> str:
        """The line before the block."""
        return f"<!-- {self.name}: begin (scripts/readme_table.py) -->"

    @property
    def end(self) -> str:
        """The line after the block."""
        return f"<!-- {self.name}: end -->"

    @property
    def not_yet(self) -> str:
        """The block without records."""
        return f"*Not recorded yet.* `cglab bench {self.bench} --save` on a GPU records it."

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        return self.block(recorded(self.bench, folder))

    def block(self, results: Recorded) -> str:
        """The table as Markdown, under one line on where and when."""
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
        names = ("model", *self.size, *self.header)
        rule = ("---", *("---:" for _ in names[1:-1]), "---")
        lines = [(*map(str, key), *self.cells(arms)) for key, arms in sorted(rows.items())]
        return "\n".join([where, "", *(f"| {' | '.join(line)} |" for line in (names, rule, *lines))])


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
    times = [_number(step[arm]) for arm in ARMS]
    return [*times, _number(step["eager"], step["full"]), _number(step["full"], full), _parity(arms)]


def _ttft(arms: Arms) -> list[str]:
    times = [_number(_metric(arms, arm, "ttft_ms")) for arm in ARMS]
    ratio = _number(_metric(arms, "breakable", "ratio_to_eager"))
    verdict = str(arms["breakable"].metrics.get("verdict")) if "breakable" in arms else "-"
    return [
        *times,
        ratio,
        verdict,
        _number(_metric(arms, "eager", "gap_share")),
        _captured(arms),
        _parity(arms),
    ]


def _prefill(arms: Arms) -> list[str]:
    times = [_number(_metric(arms, arm, "step_ms")) for arm in ARMS]
    names = ("wall_over_busy", "breaks", "break_us", "padding_waste")
    return [*times, *(_number(_metric(arms, "breakable", name)) for name in names), _parity(arms)]


TABLES = (
    Table(
        "results", "decode", "One decode step",
        "median of interleaved turns, captured step against padded eager step for parity. The floor is the bytes read "
        "over the measured read bandwidth.",
        ("batch",), (*TIMES, "full, times faster", "full over floor", "parity"), _decode,
    ),
    Table(
        "ttft", "ttft", "Median time to first token, queueing included,",
        "arms in turns on the same requests, prompts of fresh tokens after cached ones. The gap is the share of the "
        "eager step in which the device waits; full runs eager, with its reason, where its request axis ends.",
        ("tokens", "cached", "concurrency"),
        (*TIMES, "breakable over eager", "verdict", "gap", "full captured", "parity"), _ttft,
    ),
    Table(
        "prefill", "prefill", "One prefill step of one request",
        "median of interleaved turns, captured step against padded eager step for parity. Wall over kernel busy, "
        "breaks and padding are of breakable; a break's cost is what it leaves of the gap.",
        ("tokens", "cached"), (*TIMES, "wall over busy", "breaks", "us a break", "padding", "parity"), _prefill,
    ),
)  # fmt: skip


class Checks:
    """The block of what was checked and not timed: one line a run, whatever came out.

    Attributes:
        name, begin, end, not_yet: as a table's.
    """

    name = "checks"
    begin = f"<!-- {name}: begin (scripts/readme_table.py) -->"
    end = f"<!-- {name}: end -->"
    not_yet = "*Not recorded yet.* `cglab bench parity --save` and its like on a GPU record it."

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        found = {bench: recorded(bench, folder) for bench in CHECKED}
        lines = [f"| {line} |" for bench, each in found.items() for line in _checked(bench, each.records)]
        if not lines:
            return self.not_yet
        where = next(each.where for each in found.values() if each)
        head = [
            f"Checked on one {where}:",
            "",
            "| check | of what | done | held |",
            "| --- | --- | --- | --- |",
        ]
        return "\n".join([*head, *lines])


CHECKED = {
    "parity": "random batches against three oracles",
    "requests": "64 requests at concurrency 8, nine pairs of modes",
    "recovery": "a fault at every recorded operation",
    "notebooks": "notebooks under nbval",
    "gpu-tests": "tests that need a GPU",
}


def _checked(bench: str, records: Sequence[Record]) -> list[str]:
    """A line for each thing that was checked: what, how much was done, and whether it held."""
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
    lines = []
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
        lines.append(f"{CHECKED[bench]} | {what} | {done} | {held}")
    return lines


SUMMED = (
    "cases", "steps", "captured", "preemptions", "tried", "operations", "passed", "tests", "skipped",
)  # fmt: skip


def _count(record: Record, name: str) -> int:
    value = record.metrics.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


BLOCKS: tuple[Table | Checks | Peers | Zoo, ...] = (*TABLES, Peers(), Checks(), Zoo())


def _metric(arms: Arms, arm: str, name: str) -> Any:
    return arms[arm].metrics.get(name) if arm in arms else None


def _captured(arms: Arms) -> str:
    counts = arms["full"].coverage if "full" in arms else None
    return "-" if counts is None else f"{counts['captured']} of {counts['steps']}"


def _parity(arms: Arms) -> str:
    verdicts = {str((arms[arm].parity or {}).get("verdict")) for arm in ARMS[1:] if arm in arms}
    return " / ".join(sorted(verdicts)) or "-"


def _number(value: Any, over: Any = 1.0) -> str:
    known = isinstance(value, int | float) and isinstance(over, int | float)
    return f"{value / over:.2f}" if known else "-"


def rewritten(text: str, table: Table | Checks | Peers | Zoo, block: str) -> str:
    """The README with one block replaced.

    Raises:
        ValueError: if the block's markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(table.begin)
    _, end, after = rest.partition(table.end)
    if not begin or not end or table.begin in rest or table.end in after:
        message = f"README.md needs the lines {table.begin!r} and {table.end!r}, once each and in this order"
        raise ValueError(message)
    return f"{before}{table.begin}\n{block}\n{table.end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the README says what the records say, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Write the README's tables of results.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, help="where the records are (default: data/results)")
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    try:
        text = wanted = options.readme.read_text(encoding="utf-8")
        for block in BLOCKS:
            wanted = rewritten(wanted, block, block.text(options.folder))
    except (CglabError, OSError, ValueError) as error:
        print(f"no table: {error}", file=sys.stderr)
        return 1
    if wanted == text:
        return 0
    if options.check:
        print("README.md is not what the records say: run scripts/readme_table.py", file=sys.stderr)
        return 1
    options.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
