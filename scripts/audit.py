"""Ask for known vulnerabilities of every pin of constraints.txt, and say which of them nobody answered for.

    .venv-audit/bin/python scripts/audit.py        what `make audit` runs

``pip-audit`` itself says "no known vulnerabilities" of packages that its service does not know, as behind a mirror of
PyPI that has no advisories. Exit status 0: all were asked about and nothing is known. 1: something is known. 2: the
service did not answer, for all or for some, so that nothing is said about those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
COMMAND = (
    sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json",
    "--requirement", str(PINS),
)  # fmt: skip
SOUND, KNOWN, UNASKED = 0, 1, 2
SECONDS = 540


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


def main(command: Sequence[str] = COMMAND) -> int:
    """Asks, and prints the verdict; see the module for the exit status."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        status, lines = verdict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        status, lines = UNASKED, [f"not asked about: the service gave no answer within {SECONDS} s"]
    except (ValueError, LookupError, TypeError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        status, lines = UNASKED, [f"not asked about: pip-audit ended with {done.returncode}: {said}"]
    print("\n".join(lines), file=sys.stderr if status else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
