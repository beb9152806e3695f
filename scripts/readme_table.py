"""Write the README's table of results, from records and nothing else.

    python scripts/readme_table.py            write the block between the markers anew
    python scripts/readme_table.py --check    write nothing; exit 1 if the README says something else

The block holds the newest recorded run of each model and batch on a GPU; without one it says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cglab.errors import CglabError
from cglab.lab.recorded import Recorded, recorded

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- results: begin (scripts/readme_table.py) -->", "<!-- results: end -->"

NOT_YET = "*Not recorded yet.* `cglab bench decode --save` on a GPU records it."
HEADER = (
    "| model | batch | eager ms | full ms | breakable ms | full, times faster | full over floor | parity |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
)


def block(results: Recorded) -> str:
    """The table as Markdown, under one line on where and when."""
    if not results:
        return NOT_YET
    arms: dict[tuple[str, int], dict[str, Any]] = {}
    for record in results.records:
        key = (record.model or "", record.workload["batch"])
        arms.setdefault(key, {})[record.arm] = record
    lines = [_line(model, batch, found) for (model, batch), found in sorted(arms.items())]
    last = results.records[-1]
    where = (
        f"One decode step on one {last.device.name}, recorded on {last.created[:10]} with torch "
        f"{last.versions['torch']}, random weights for the published shapes; median of interleaved turns, captured "
        "step against padded eager step for parity. The floor is the bytes read over the measured read bandwidth."
    )
    return "\n".join([where, "", HEADER, *lines])


def _line(model: str, batch: int, arms: dict[str, Any]) -> str:
    step = {arm: record.metrics.get("step_ms") for arm, record in arms.items()}
    full = arms["full"].metrics if "full" in arms else {}
    parity = {str((arms[arm].parity or {}).get("verdict")) for arm in ("full", "breakable") if arm in arms}
    cells = [
        model,
        str(batch),
        *(_number(step.get(arm), 1.0) for arm in ("eager", "full", "breakable")),
        _number(step.get("eager"), step.get("full")),
        _number(step.get("full"), full.get("floor_ms")),
        " / ".join(sorted(parity)) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: Any, over: Any) -> str:
    known = isinstance(value, int | float) and isinstance(over, int | float)
    return f"{value / over:.2f}" if known else "-"


def rewritten(text: str, table: str) -> str:
    """The README with its block replaced.

    Raises:
        ValueError: if the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        message = f"README.md needs the lines {BEGIN!r} and {END!r}, once each and in this order"
        raise ValueError(message)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the README says what the records say, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Write the README's table of results.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, help="where the records are (default: data/results)")
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text(encoding="utf-8")
        wanted = rewritten(text, block(recorded("decode", options.folder)))
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
