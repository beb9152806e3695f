"""What the DSA benches need not measure again: what the same code has recorded on this kind of device.

A grid takes longer than one lease of a GPU. A point is taken as it was recorded where one run has all arms of it, in
turns, under the same load; a part of its arms, or arms of several runs, are nothing that could be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from cglab.engine.load import Load
from cglab.lab.profiles import results_folder
from cglab.lab.ttft_grid import Point
from cglab.measure.legible import legible
from cglab.measure.machine import describe_device
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.tree import tree_hash

COSTS: Final = ("buckets", "capture_s", "warmup_s", "graph_gb", "draft_graph_gb")
"""What a bench measures of an arm's captures once, whatever the point."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Records of one model by the same code on one kind of device.

    Attributes:
        records: in the order in which they were made.
    """

    records: tuple[Record, ...] = ()

    @classmethod
    def kept(cls, model: str, dtype: torch.dtype, device: torch.device) -> Earlier:
        """Those in ``data/results`` that can be read.

        Raises:
            ResultsError: if a file of results cannot be read.
        """
        folder = results_folder()
        stored = load(folder).records if folder.exists() else ()
        like = (tree_hash(), model, str(dtype).removeprefix("torch."), describe_device(device).name)
        mine = (each for each in stored if (each.tree, each.model, each.dtype, each.device.name) == like)
        return cls(tuple(legible(mine)))

    def of(self, bench: str, arms: Collection[str]) -> Iterable[Record]:
        """Those of a bench's arms."""
        return (each for each in self.records if each.bench == bench and each.arm in arms)

    def run(self, bench: str, arms: Collection[str], workload: Mapping[str, Any]) -> Mapping[str, Record]:
        """Records by arm, of a bench's newest run that has all these arms with this workload; nothing without one."""
        runs: dict[str, dict[str, Record]] = {}
        for each in self.of(bench, arms):
            if all(each.workload.get(name) == value for name, value in workload.items()):
                runs.setdefault(each.run, {})[each.arm] = each
        whole = [found for found in runs.values() if len(found) == len(arms)]
        return whole[-1] if whole else {}

    def costs(self, bench: str, arm: str) -> dict[str, float]:
        """What was recorded last of an arm's captures; nothing where it was not measured."""
        known = [each.metrics for each in self.of(bench, (arm,)) if "graph_gb" in each.metrics]
        return {name: float(known[-1][name] or 0.0) for name in COSTS if name in known[-1]} if known else {}


def told(what: object, found: Mapping[str, Record]) -> str:
    """The line that says why something is not measured."""
    run = next(iter(found.values())).run
    return f"{what}: recorded by this code on this kind of device, in run {run}; again=true measures it again"


def asked_of(point: Point, asked: Load) -> dict[str, Any]:
    """The part of a record's workload that says what was asked for at a point."""
    return {
        "fresh": point.tokens,
        "cached": point.cached,
        "concurrency": point.concurrency,
        **asked.as_dict(),
    }
