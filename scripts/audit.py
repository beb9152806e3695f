"""Ask for known vulnerabilities of every pin of constraints.txt, and say which of them nobody answered for.

    .venv-audit/bin/python scripts/audit.py                  what `make audit` runs
    .venv/bin/python scripts/audit.py --advisories FOLDER    what `make audit ADVISORIES=FOLDER` runs

The second asks a checkout of PyPA's advisory database instead of a service. ``pip-audit`` itself says "no known
vulnerabilities" of packages that its service does not know, as behind a mirror of PyPI that has no advisories. Exit
status 0: all were asked about and nothing is known. 1: something is known. 2: the service did not answer, for all or
for some, so that nothing is said about those; or the checkout is older than 30 days.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
COMMAND = (
    sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json",
    "--requirement", str(PINS),
)  # fmt: skip
SOUND, KNOWN, UNASKED = 0, 1, 2
SECONDS = 540
DAYS = 30
"""How old the newest advisory of a checkout may be."""


def verdict(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The exit status, and what to say, for what ``pip-audit --format json`` reports.

    Args:
        report: its ``dependencies``: each with ``vulns``, or with a ``skip_reason``.
    """
    pins = report["dependencies"]
    skipped = [pin for pin in pins if "skip_reason" in pin]
    known = [(pin, each) for pin in pins for each in pin.get("vulns", ())]
    lines = [
        f"{pin['name']} {pin['version']}: {each['id']}, fixed in {', '.join(each['fix_versions']) or 'no version yet'}"
        for pin, each in known
    ]
    lines.append(
        f"{len(pins) - len(skipped)} of {len(pins)} pins were asked about; {len(known)} vulnerabilities"
    )
    if skipped:
        lines.append(
            f"not asked about: {skipped[0]['skip_reason']}"
            + f" and {len(skipped) - 1} more" * (len(skipped) > 1)
        )
    return KNOWN if known else UNASKED if skipped or not pins else SOUND, lines


def offline(database: Path, today: date | None = None) -> tuple[int, list[str]]:
    """The exit status, and what to say, by a checkout of the advisory database."""
    from advisories import newest, report  # what they need is not in the environment of `pip-audit`

    try:
        latest = newest(database)
        status, lines = verdict(report(PINS.read_text(encoding="utf-8"), database))
    except (OSError, ValueError) as error:
        return UNASKED, [f"{database} is no checkout of PyPA's advisory database: {error}"]
    lines.append(f"the newest advisory is of {latest}")
    if status == SOUND and ((today or datetime.now(UTC).date()) - latest).days > DAYS:
        return UNASKED, [*lines, f"nothing is said of later ones; update the checkout, {DAYS} days are good"]
    return status, lines


def ask(command: Sequence[str] = COMMAND) -> tuple[int, list[str]]:
    """The exit status, and what to say, by the service that ``pip-audit`` asks."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        return verdict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return UNASKED, [f"not asked about: the service gave no answer within {SECONDS} s"]
    except (ValueError, LookupError, TypeError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return UNASKED, [f"not asked about: pip-audit ended with {done.returncode}: {said}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Asks, and prints the verdict; see the module for the exit status."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--advisories", type=Path, metavar="FOLDER")
    database = parser.parse_args(arguments).advisories
    status, lines = ask() if database is None else offline(database)
    print("\n".join(lines), file=sys.stderr if status else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
