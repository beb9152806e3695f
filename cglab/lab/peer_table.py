"""Peers as Markdown, for the README: one line for each that computed a decode token, or why it could not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cglab.lab.recorded import Recorded, recorded
from cglab.measure.record import Record

HEADER = (
    "model",
    "batch",
    "peer",
    "token ms",
    "over the lab's",
    "verdict",
    "replay ms",
    "over floor",
    "tokens",
)
RULE = ("---", "---:", "---", "---:", "---:", "---", "---:", "---:", "---")
SAME = {"bitwise": "equal", "drift": "equal but for near-ties", "corrupted": "**other tokens**"}


class Peers:
    """The block.

    Attributes:
        name, begin, end, not_yet: as a table's.
    """

    name = "peers"
    begin = f"<!-- {name}: begin (scripts/readme_table.py) -->"
    end = f"<!-- {name}: end -->"
    not_yet = "*Not recorded yet.* `cglab bench peers --save` on a GPU records it."

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        return self.block(recorded("token", folder))

    def block(self, results: Recorded) -> str:
        """The table as Markdown, fastest first, under one line on where and when."""
        if not results:
            return self.not_yet
        where = (
            f"One decode token, from ids on the host to the next ids on the host, on one {results.where}; arms in "
            "turns, with the lab's own (`full`) in every run. SGLang with Triton attention and PyTorch sampling, its "
            "ModelRunner alone. The replay has its inputs on the device and reads nothing."
        )
        lines = [_line(each) for each in sorted(results.records, key=_order)]
        return "\n".join([where, "", *(f"| {' | '.join(line)} |" for line in (HEADER, RULE, *lines))])


def _order(record: Record) -> tuple[str, int, float]:
    time = record.metrics.get("token_ms")
    return record.model or "", record.workload["batch"], time if isinstance(time, float) else float("inf")


def _line(record: Record) -> tuple[str, ...]:
    metrics = record.metrics
    start = (str(record.model), str(record.workload["batch"]), record.arm)
    if not isinstance(metrics.get("token_ms"), float):
        reason = str(metrics.get("error")).splitlines()[0].replace("|", "/")
        return (*start, "-", "-", reason, "-", "-", "-")
    tokens = SAME[record.parity["verdict"]] if record.parity else "-"
    ratio, verdict = _number(metrics.get("ratio_to_ours")), str(metrics.get("verdict") or "-")
    replay, floor = _number(metrics.get("replay_ms")), _number(metrics.get("over_floor"))
    return (*start, _number(metrics["token_ms"]), ratio, verdict, replay, floor, tokens)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "-"
