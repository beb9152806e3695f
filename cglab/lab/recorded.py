"""Results that were recorded before, often on another machine: for a notebook whose machine has no GPU.

Decode results are records in ``data/results/*.jsonl``. A recorded profile is ``<technique>.profile.json`` with the
Chrome traces that it names beside it; Perfetto opens these too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab import settings
from cglab.errors import ResultsError
from cglab.lab.comparison import Profile
from cglab.lab.views import draw
from cglab.measure.profiling import STEP
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.trace_file import load_trace
from cglab.measure.tree import tree_hash

if TYPE_CHECKING:
    import pandas

COLUMNS = ("model", "weights", "dtype", "batch", "context", "arm", "step_ms", "ratio", "parity", "captured")


@dataclass(frozen=True)
class Recorded:
    """Records of one bench on CUDA devices: of each model and workload the newest run, all its arms.

    Attributes:
        bench: such as ``decode``.
        records: by time.
    """

    bench: str
    records: tuple[Record, ...]

    def __bool__(self) -> bool:
        return bool(self.records)

    @property
    def device(self) -> str:
        """Names of the devices."""
        return ", ".join(dict.fromkeys(record.device.name for record in self.records))

    @property
    def where(self) -> str | None:
        """Device and day, for ``cglab.notebook.not_run``; None without records."""
        return f"{self.device} on {self.records[-1].created[:10]}" if self.records else None

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
        """One row a record: workload, arm, ratio to eager in the same run, parity, coverage, every metric."""
        import pandas

        eager = {
            (r.run, r.model, _key(r)): r.metrics.get("step_ms") for r in self.records if r.arm == "eager"
        }
        rows: list[dict[str, Any]] = []
        for record in self.records:
            step, base = record.metrics.get("step_ms"), eager.get((record.run, record.model, _key(record)))
            counts = record.coverage or {}
            rows.append({
                "model": record.model, "weights": record.weights, "dtype": record.dtype, **record.workload,
                "arm": record.arm, "step_ms": step,
                "ratio": step / base if isinstance(step, float) and isinstance(base, float) else None,
                "parity": (record.parity or {}).get("verdict"),
                "captured": f"{counts['captured']}/{counts['steps']}" if "captured" in counts else None,
                **record.metrics, "device": record.device.name, "recorded": record.created[:10], "id": record.id,
            })  # fmt: skip
        return pandas.DataFrame(rows, columns=None if rows else list(COLUMNS))

    def plot(self) -> Any:
        """Step time by model, batch size and arm, a plotly figure; it says so where there is nothing yet."""
        return draw("recorded_decode", self)

    def __str__(self) -> str:
        if not self.records:
            return f"no {self.bench} result of a GPU is recorded yet; `cglab bench {self.bench}` on one records it"
        return f"{len(self.records)} {self.bench} results recorded on {self.where}"


def newest(bench: str, records: Iterable[Record]) -> Recorded:
    """The newest run of each model and workload on a CUDA device."""
    groups: dict[tuple[str | None, str], list[Record]] = {}
    for record in records:
        if record.bench == bench and record.shows_graph_times:
            groups.setdefault((record.model, _key(record)), []).append(record)
    kept = [r for group in groups.values() for r in group if r.run == group[-1].run]
    return Recorded(bench, tuple(sorted(kept, key=lambda record: record.created)))


def _key(record: Record) -> str:
    return json.dumps(record.workload, sort_keys=True)


def recorded(bench: str = "decode", folder: str | Path | None = None) -> Recorded:
    """Recorded results of a bench.

    Args:
        bench: what was measured.
        folder: None takes ``results`` in the data folder; one that does not exist holds nothing.
    """
    where = _folder(folder)
    return newest(bench, load(where).records if where.exists() else ())


def save_profile(profile: Profile, folder: str | Path, device: str) -> Path:
    """Describes a profile whose traces were kept in ``folder`` under ``trace_name``; returns the description's path."""
    path = Path(folder) / f"{profile.technique}.profile.json"
    facts = {
        "technique": profile.technique, "workload": profile.workload, "device": device,
        "created": datetime.now(UTC).isoformat(),
        "traces": {arm: trace_name(profile.technique, arm) for arm in profile.traces},
    }  # fmt: skip
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return path


def trace_name(technique: str, arm: str) -> str:
    """File name of an arm's Chrome trace."""
    return f"{technique}-{arm}.trace.json.gz"


def recorded_profile(technique: str = "decode", folder: str | Path | None = None) -> Profile:
    """A recorded profile; without traces if there is none.

    Args:
        technique: the toggle.
        folder: None takes ``results`` in the data folder.

    Raises:
        ResultsError: if there is one and it cannot be read.
    """
    path = _folder(folder) / f"{technique}.profile.json"
    if not path.exists():
        return Profile(technique, {}, {})
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        traces = {arm: load_trace(path.with_name(name)).window(STEP) for arm, name in facts["traces"].items()}
        return Profile(facts["technique"], facts["workload"], traces, f"{facts['device']}, {facts['created'][:10]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is no recorded profile ({error!r}); record it again with lab.profile(save=...)") from error


def _folder(folder: str | Path | None) -> Path:
    return settings.read_settings().data / "results" if folder is None else Path(folder)
