"""The zoo as Markdown: a line for each module, how much of it is captured, or what stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cglab.lab.markdown import Block, table
from cglab.lab.profiles import results_folder
from cglab.measure.record import Record
from cglab.measure.records import load

COLUMNS = ("module", "of", "captured", "operations", "against eager", "what stops the whole")


@dataclass(frozen=True)
class Zoo(Block):
    """The block of the newest run, on whatever device."""

    name: str = "zoo"
    bench: str = "zoo"
    records_it: ClassVar[str] = "records it"

    def text(self, folder: Path | None) -> str:
        """The block from the newest run among the records of a folder."""
        where = results_folder(folder)
        made = [each for each in (load(where).records if where.exists() else ()) if each.bench == self.bench]
        return self.block([each for each in made if each.run == made[-1].run])

    def block(self, records: Sequence[Record]) -> str:
        """The table, under one line on where and when."""
        if not records:
            return self.not_yet
        last = records[-1]
        how = "" if last.shows_graph_times else ", captured on the tape"
        made = f"torch {last.versions['torch']} and transformers {last.versions['transformers']}"
        where = (
            f"Tiny shapes with random weights, on one {last.device.name}{how}, recorded on {last.created[:10]} with "
            f"{made}; compared at every live size, padded where the module allows it:"
        )
        return f"{where}\n\n{table(COLUMNS, map(_row, records))}"


def _row(record: Record) -> tuple[str, ...]:
    metrics, parity = record.metrics, record.parity or {}
    breaks, operations = metrics["breaks"], metrics["operations"]
    return (
        str(record.model),
        str(record.workload["package"]),
        f"{metrics['captured']} ({breaks:.0f})" if breaks else str(metrics["captured"]),
        f"{operations:.0f}" if operations else "-",
        str(parity.get("verdict", "-")),
        str(metrics["refusal"] or "-"),
    )
