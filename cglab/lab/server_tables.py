"""Tables of real servers: a recipe's arms beside each other, and the lab's own engine beside SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cglab.lab.markdown import Block, number, table
from cglab.lab.recorded import recorded
from cglab.measure.record import Record
from cglab.measure.statistics import FEWEST_INSTANCES, false_positive_rate
from cglab.serving.compare import BENCH
from cglab.serving.recorded import RecordedServers, recorded_servers

COMPARED = (
    "recipe", "arms", "point", "TTFT ms", "TPOT ms", "E2E ms", "graphs GB", "capture s", "prefill in graphs",
    "decode in graphs", "outputs",
)  # fmt: skip
BESIDE = ("model", "point", "engine", "TTFT ms", "TPOT ms", "E2E ms", "tok/s", "TTFT", "TPOT", "E2E")
TIMES = ("TTFT", "TPOT", "E2E")


@dataclass(frozen=True)
class Servers(Block):
    """The block of the newest comparison of each set of arms on GPUs, and of the arms that could not run."""

    name: str = "servers"
    bench: str = BENCH

    @property
    def not_yet(self) -> str:
        """The block without records, which no bench makes."""
        return "*Not recorded yet.* `cglab serve-compare s1 --save` on a GPU records one."

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        return self.block(recorded_servers(folder))

    def block(self, found: RecordedServers) -> str:
        """One row a point and arm beside the base; then what failed."""
        runs = [run for run in found.runs if run[0].shows_graph_times]
        failed = [
            f"* `{each.arm}`, {each.model}, SGLang {each.versions.get('sglang')}: {each.notes}"
            for each in found.failures if each.shows_graph_times
        ]  # fmt: skip
        if not runs and not failed:
            return self.not_yet
        lines = [line for run in runs for line in _compared(run)]
        parts = [f"{_head(runs)}\n\n{table(COMPARED, lines)}"] if runs else []
        if failed:
            parts.append("Did not run, in the server's own words:\n\n" + "\n".join(failed))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Engines(Block):
    """The block of the newest run of the lab's engine beside SGLang's on GPUs."""

    name: str = "engines"
    bench: str = "engines"

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        results = recorded(self.bench, folder)
        if not results:
            return self.not_yet
        return (
            f"The same requests to both engines in turns, on one {results.where}; SGLang is asked over HTTP, the lab "
            "within its process. Verdicts are of SGLang, by S3's rule."
            + (f" On {results.beside}." if results.beside else "")
            + "\n\n"
            f"{table(BESIDE, map(_beside, results.records))}"
        )


def _head(runs: Sequence[Sequence[Record]]) -> str:
    last, instances = runs[-1][-1], min(len({each.workload["instance"] for each in run}) for run in runs)
    rate = (
        f", which errs in {false_positive_rate(instances):.1%} of equal pairs"
        if instances >= FEWEST_INSTANCES
        else ""
    )
    return (
        f"SGLang {last.versions.get('sglang')} with {last.model} ({last.weights} weights) on one {last.device.name}, "
        f"recorded on {last.created[:10]}: servers in turns, {instances} of each arm or more; medians of the first arm "
        f"-> the second, and the verdict by S3's rule{rate}."
    )


def _compared(run: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row for each point and each arm but the base."""
    rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in RecordedServers((tuple(run),)).rows():
        rows.setdefault((row["point"], row["arm"]), {})[row["measure"]] = row
    base, recipe = run[0].workload["base"], run[0].notes.split(",", 1)[0].removeprefix("recipe ")
    newest = {each.arm: each for each in run if each.parity or each.arm == base}
    lines = []
    for (point, arm), measures in rows.items():
        if arm == base:
            continue
        times = [
            f"{number(rows[point, base][name]['ms'])} -> {number(measures[name]['ms'])} {measures[name]['verdict']}"
            for name in TIMES
        ]
        told = next(each for each in run if each.arm == arm and each.workload["name"] == point).metrics
        shares = [_percent(told.get(f"graph_share_{phase}")) for phase in ("prefill", "decode")]
        parity = newest[arm].parity if arm in newest else None
        equal = f"{parity['equal_outputs']} of {parity['outputs']} equal" if parity else "-"
        costs = [number(told.get("graph_memory_gb")), number(told.get("capture_seconds"))]
        lines.append((recipe, f"{base}, {arm}", point, *times, *costs, *shares, equal))
    return lines


def _beside(record: Record) -> tuple[str, ...]:
    metrics = record.metrics
    times = [number(metrics.get(f"{name.lower()}_ms_p50")) for name in TIMES]
    verdicts = [str(metrics.get(f"{name.lower()}_verdict") or "-") for name in TIMES]
    return (
        str(record.model), record.workload["name"], record.arm, *times, number(metrics.get("output_tok_s")), *verdicts,
    )  # fmt: skip


def _percent(share: Any) -> str:
    return f"{100 * share:.0f} %" if isinstance(share, int | float) else "-"
