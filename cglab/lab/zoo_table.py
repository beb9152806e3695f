"""The zoo as Markdown, for the README: a line for each module, how much of it is captured, or what stops it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cglab.lab.profiles import results_folder
from cglab.measure.record import Record
from cglab.measure.records import load

HEADER = (
    "module",
    "of",
    "captured",
    "operations",
    "against eager",
    "what stops the whole",
)
RULE = ("---", "---", "---", "---:", "---", "---")


class Zoo:
    """The block.

    Attributes:
        name, begin, end, not_yet: as a table's.
    """

    name = "zoo"
    begin = f"<!-- {name}: begin (scripts/readme_table.py) -->"
    end = f"<!-- {name}: end -->"
    not_yet = "*Not recorded yet.* `cglab bench zoo --save` records it."

    def text(self, folder: Path | None) -> str:
        """The block from the newest run among the records of a folder."""
        where = results_folder(folder)
        made = [each for each in (load(where).records if where.exists() else ()) if each.bench == "zoo"]
        return self.block([each for each in made if each.run == made[-1].run])

    def block(self, records: Sequence[Record]) -> str:
        """The table as Markdown, under one line on where and when."""
        if not records:
            return self.not_yet
        last = records[-1]
        how = "" if last.shows_graph_times else ", captured on the tape"
        made = f"torch {last.versions['torch']} and transformers {last.versions['transformers']}"
        where = (
            f"Tiny shapes with random weights, on one {last.device.name}{how}, recorded on {last.created[:10]} with "
            f"{made}; compared at every live size, padded where the module allows it:"
        )
        return "\n".join(
            [where, "", *(f"| {' | '.join(line)} |" for line in (HEADER, RULE, *map(_line, records)))]
        )


def _line(record: Record) -> tuple[str, ...]:
    metrics, parity = record.metrics, record.parity or {}
    stop = str(metrics["refusal"] or "-")
    operations = f"{metrics['operations']:.0f}" if metrics["operations"] else "-"
    captured = str(metrics["captured"])
    if metrics["breaks"]:
        captured += f" ({metrics['breaks']:.0f})"
    verdict, package = str(parity.get("verdict", "-")), str(record.workload["package"])
    return (
        str(record.model),
        package,
        captured,
        operations,
        verdict,
        stop.replace("|", "/").replace("\n", " "),
    )
