"""Results that were recorded before, often on another machine: for a notebook whose machine has no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.lab.profiles import results_folder
from cglab.lab.tables import rows
from cglab.lab.views import draw
from cglab.measure.legible import legible
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.tree import tree_hash

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Recorded:
    """Records of one bench on CUDA devices: of each model, dtype and workload the newest run, with all its arms.

    The form of the model's operations is none of the workload: a newer run of another form replaces an older one.

    Attributes:
        bench: such as ``decode``.
        records: by time.
    """

    bench: str
    records: tuple[Record, ...]

    def __bool__(self) -> bool:
        return bool(self.records)

    @property
    def command(self) -> str:
        """The bench of the command line that writes such records."""
        return COMMANDS.get(self.bench, self.bench.replace("_", "-"))

    @property
    def device(self) -> str:
        """Names of the devices."""
        return ", ".join(dict.fromkeys(record.device.name for record in self.records))

    @property
    def where(self) -> str | None:
        """Device and day, for ``cglab.notebook.not_run``; None without records."""
        return f"{self.device} on {self.records[-1].created[:10]}" if self.records else None

    @property
    def beside(self) -> str:
        """What the host did in the minute before, of which the run itself is a part; empty where no record tells."""
        told = [each.device for each in self.records if each.device.load is not None]
        if not told:
            return ""
        host, load = told[-1], max(each.load or 0.0 for each in told)
        return f"a host of {host.cores} cores and {host.gpus} GPUs, its load up to {load:.1f}"

    @property
    def note(self) -> str:
        """How old the results are, and whether of the code as it is now."""
        if not self.records:
            return str(self)
        current = all(record.tree == tree_hash() for record in self.records)
        days = sorted({record.created[:10] for record in self.records})
        age = "with the code as it is now" if current else "with an older state of the code"
        return f"Recorded {' to '.join(dict.fromkeys((days[0], days[-1])))} {age}; arms measured in turns"

    def as_frame(self) -> pandas.DataFrame:
        """One row a record, with the columns that its bench is read by; device and day at the end."""
        import pandas

        when = [{"device": record.device.name, "recorded": record.created[:10]} for record in self.records]
        return pandas.DataFrame(
            [{**row, **facts} for row, facts in zip(rows(self.records), when, strict=True)]
        )

    def plot(self) -> Any:
        """Step time by model, batch size and arm, a plotly figure; it says so where there is nothing yet."""
        return draw(f"recorded_{self.bench}", self)

    def __str__(self) -> str:
        if not self.records:
            return f"no {self.bench} result of a GPU is recorded yet; `cglab bench {self.command}` on one records it"
        return f"{len(self.records)} {self.bench} results recorded on {self.where}"


VERDICTS = ("parity", "requests", "speculation")
"""Benches whose records say whether something held."""
IN_PARTS = ("token", "first-token")
"""Benches whose arms may be those of several runs, each with what they are compared with in it."""
COMMANDS: Mapping[str, str] = {
    "token": "peers",
    "ttft_crossover": "ttft",
    "pp_prefill": "pipeline",
    "pipeline_shared": "pipeline",
    "pp_prefill_crossover": "pipeline",
    "dsa_prefill": "dsa",
    "dsa_prefill_sweep": "dsa",
    "dsa_floor": "dsa",
    "dsa_ablation_turn": "dsa-ablation",
    "dsa_choice": "dsa",
}
"""What has a name of its own among the records of a command, which has another."""


def newest(bench: str, records: Iterable[Record]) -> Recorded:
    """The newest run of each model, dtype and workload on a CUDA device, of records that can be read."""
    groups: dict[tuple[str | None, str | None, str], list[Record]] = {}
    for record in legible(each for each in records if each.bench == bench and each.shows_graph_times):
        groups.setdefault((record.model, record.dtype, _key(record)), []).append(record)
    kept = [r for group in groups.values() for r in group if r.run == group[-1].run]
    return Recorded(bench, tuple(sorted(kept, key=lambda record: record.created)))


def _key(record: Record) -> str:
    """What was asked for, whatever the form of the model's operations (older records know only one).

    But a verdict stands for itself: no other arm's or form's replaces it.
    """
    asked = {name: value for name, value in record.workload.items() if name != "ops"}
    if record.bench in VERDICTS:
        asked |= {"arm": record.arm, "ops": record.workload.get("ops", "portable")}
    if record.bench in IN_PARTS:
        asked["arm"] = record.arm
    return json.dumps(asked, sort_keys=True)


def recorded(bench: str = "decode", folder: str | Path | None = None) -> Recorded:
    """Recorded results of a bench.

    Args:
        bench: what was measured.
        folder: None takes ``results`` in the data folder; one that does not exist holds nothing.
    """
    where = results_folder(folder)
    return newest(bench, load(where).records if where.exists() else ())
