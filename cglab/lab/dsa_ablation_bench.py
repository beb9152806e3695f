"""The ablation of S3's three switches on one GPU: T8, T9 and T10 each on and off, in turns, on a model that drafts.

The draft is a NextN layer: after every prefill chunk it extends its own cache, eagerly or as a prefill graph (T10), in
the parts of its target's prefill (T8, T9). Six of the eight combinations exist; the others are named with the reason.
With random weights acceptance is pinned, so that all arms verify and extend alike (S3's method).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import torch

from cglab.engine.load import Load
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, ToggleError
from cglab.lab.arm_turns import INSTANCES, Turn, figures, rounds, samples, verdicts
from cglab.lab.dsa_bench import QUICK_GRID
from cglab.lab.dsa_recorded import Earlier, asked_of, told
from cglab.lab.dsa_sweep import PER_LANE, captured, load_of, open_for, target_prefill
from cglab.lab.facade import Lab
from cglab.lab.kept_turns import Round, kept_rounds, turn_of, turn_record
from cglab.lab.load_run import LoadRun
from cglab.lab.sparse_arms import choose
from cglab.lab.sparse_prefill import SparseArm, extend_sizes
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.lab.ttft_grid import Point, in_order
from cglab.measure.record import Record, make_record, new_run
from cglab.models.kv import PagedKV
from cglab.models.nextn import NextN
from cglab.runners.base import GraphGroup, Runner

BENCH: Final = "dsa_ablation"
POINTS: Final = in_order([Point(512, 0, 1), Point(2048, 0, 4), Point(1024, 32768, 1), Point(4096, 32768, 4)])
"""Two fresh and two cached points of the grid of ``dsa_bench``, with few and many tokens a step."""
PINNED: Final = 1.8
"""Tokens per verify pass, of two: what a NextN layer that is worth its step reaches."""
IDS: Final = ("T8", "T9", "T10")


@dataclass(frozen=True, slots=True)
class Switches:
    """A combination of the three.

    Attributes:
        attention: T8.
        preparation: T9.
        extend: T10.
    """

    attention: bool
    preparation: bool
    extend: bool

    @property
    def name(self) -> str:
        """Those that are on, such as ``T8+T10``."""
        return "+".join(id_ for id_, on in zip(IDS, astuple(self), strict=True) if on) or "none"

    @property
    def missing(self) -> str | None:
        """Why there is no such arm; None for one."""
        if self.preparation and not self.attention:
            return (
                "T9 is recorded in the same graph as T8: without it the preparation is a break with attention"
            )
        return None

    @property
    def mode(self) -> str:
        """The toggle of T10."""
        return "graph" if self.extend else "eager"

    @property
    def arm(self) -> SparseArm:
        """The prefill of the target."""
        attention, preparation = ("graph" if on else "eager" for on in (self.attention, self.preparation))
        return SparseArm("breakable", attention, preparation)


ALL: Final = tuple(Switches(*on) for on in product((False, True), repeat=3))
ARMS: Final[Mapping[str, Switches]] = MappingProxyType(
    {each.name: each for each in ALL if each.missing is None}
)
"""Those that there are, by name; the first is what the others are compared with."""
INVALID: Final[Mapping[str, str]] = MappingProxyType(
    {each.name: each.missing for each in ALL if each.missing}
)
"""Those that there are not, by name, and why."""


def dsa_ablation(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    model: str | None = None,
    tokens: Sequence[int] | None = None,
    new_tokens: int = 64,
    per_lane: int = PER_LANE,
    memory: bool = True,
    again: bool = False,
) -> Iterator[Record]:
    """Requests on a model with sparse attention and a NextN layer, by the three switches, in turns.

    Args:
        device: what is measured.
        quick: a small model and two points that show the machinery.
        progress: called with a line for every stage.
        model: its name; ``dsa-24`` on a GPU and ``dsa-tiny`` on a CPU.
        tokens: only the points with so many fresh tokens.
        new_tokens: of each request; the first comes from the prefill, so at least two.
        per_lane: requests for each in flight where several are; S3's 8.
        memory: whether every bucket of every arm is captured once more, for its memory and seconds.
        again: whether what the same code has recorded on this kind of device is measured once more.

    Yields:
        A record for each arm of each point that is measured, and before them one for each turn of a round that is not
        the last: from these a run that was cut goes on.

    Raises:
        InputError: if no point is asked for, or nothing would be drafted.
    """
    large = device.type == "cuda" and not quick
    points = [each for each in (POINTS if large else QUICK_GRID) if tokens is None or each.tokens in tokens]
    if not points or new_tokens < 2 or per_lane < 1:
        raise InputError(
            f"{len(points)} points with {per_lane} requests a lane of {new_tokens} new tokens; ask for some of the "
            "grid's, for a request, and for two tokens or more"
        )
    new_tokens = new_tokens if large else min(new_tokens, 4)
    name, run = model or ("dsa-24" if large else "dsa-tiny"), new_run()
    progress(f"{name}: open with a NextN layer")
    draft = {"draft": "nextn", "speculation": Speculation(steps=1, pinned=PINNED)}
    with open_for(name, device, points, new_tokens, large=large, **draft) as lab:
        known = Earlier() if again else Earlier.kept(lab.name, lab.dtype, lab.device)
        loads = {point: load_of(point, new_tokens, device, per_lane) for point in points}
        recorded = {point: known.run(BENCH, ARMS, asked_of(point, asked)) for point, asked in loads.items()}
        costs: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
        if memory and not all(recorded.values()):
            costs = {arm: known.costs(BENCH, arm) for arm in ARMS}
            costs = costs if all(costs.values()) else _memory(lab, progress)
        for number, (point, found) in enumerate(recorded.items(), 1):
            if found:
                progress(told(point, found))
                continue
            progress(f"{name}: {point}, {number} of {len(points)}")
            kept = kept_rounds(known, BENCH, ARMS, asked_of(point, loads[point]))[: INSTANCES - 1]
            if kept:
                progress(told(f"{point}, rounds 1 to {len(kept)} of {INSTANCES}", kept[-1]))
            yield from _point(lab, point, loads[point], run, costs, kept)


def switch(lab: Lab, switches: Switches) -> None:
    """Sets the lab's toggles to a combination."""
    choose(lab, switches.arm)
    lab.captures.draft_extend = switches.mode


def _point(
    lab: Lab,
    point: Point,
    asked: Load,
    run: str,
    costs: Mapping[str, Mapping[str, float]],
    kept: Sequence[Round],
) -> Iterator[Record]:
    """The turns of every round but the last, each as it ends, then the records of the point."""
    runs: dict[str, list[LoadRun | Turn]] = {name: [turn_of(each[name]) for each in kept] for name in ARMS}
    last: Mapping[str, LoadRun] = {}
    choices = {name: partial(switch, lab, each) for name, each in ARMS.items()}
    for number, last in enumerate(rounds(lab, asked, choices, first=len(kept)), len(kept)):
        for name, ended in last.items():
            runs[name].append(ended)
            if number < INSTANCES - 1:  # what the last one shows is in the records of the point
                yield turn_record(
                    Turn.of(ended), bench=BENCH, arm=name, number=number, device=lab.device, run=run,
                    workload=asked_of(point, asked), **model_facts(lab),
                )  # fmt: skip
    earlier = (
        f" Rounds of earlier runs: {', '.join(next(iter(each.values())).run for each in kept)}."
        if kept
        else ""
    )
    _, draft_kv = _layer(lab)
    caches = [*lab.engine.kv.caches().values(), *draft_kv.caches().values()]
    for name, switches in ARMS.items():
        yield make_record(
            bench=BENCH, arm=name, device=lab.device, run=run,
            metrics={
                **figures(runs[name]), **verdicts(runs, name), **costs[name],
                "cache_gb": sum(cache.nbytes for cache in caches) / 1e9,
            },
            samples=samples(runs[name]),
            workload={
                **asked_of(point, asked), **lab.drafted, "decode": "full", "payload": last[name].result.payload,
                "toggles": f"{switches.arm.name}, draft_extend {switches.mode}", "invalid": dict(INVALID),
            },
            coverage={phase: each.as_dict() for phase, each in last[name].coverage.items()},
            notes=f"One GPU, acceptance pinned; S3 ran four and eight.{earlier}", **model_facts(lab),
        )  # fmt: skip


def _memory(lab: Lab, progress: Progress) -> dict[str, dict[str, float]]:
    """What the graphs of the target and those of the layer cost in each arm; of an eager extend nothing."""
    targets: dict[SparseArm, dict[str, float]] = {}  # arms with and without T10 have the same
    found = {}
    for name, switches in ARMS.items():
        progress(f"{lab.name}: the memory of {name}")
        if switches.arm not in targets:
            targets[switches.arm] = captured(lab, partial(target_prefill, lab, switches.arm))
        costs = found[name] = {**targets[switches.arm], "draft_graph_gb": 0.0}
        if switches.extend:
            of_layer = captured(lab, partial(_extend, lab, switches.arm))
            costs["draft_graph_gb"] = of_layer["graph_gb"]
            costs |= {each: costs[each] + of_layer[each] for each in ("capture_s", "warmup_s")}
    return found


def _extend(lab: Lab, arm: SparseArm, group: GraphGroup) -> Runner[Any]:
    layer, kv = _layer(lab)
    sizes = extend_sizes(lab.phases.buckets, lab.prefill_buckets)
    return arm.extend(layer, kv, group, sizes, replace(lab.phases.options, backend="breakable"))


def _layer(lab: Lab) -> tuple[NextN, PagedKV]:
    if lab.drafting is None:
        raise ToggleError('the ablation drafts with a NextN layer; open the model with draft="nextn"')
    return lab.drafting.nextn
