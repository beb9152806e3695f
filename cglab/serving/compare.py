"""An interleaved comparison of real servers: one server at a time, arms in turns, every result kept when it is there.

S3's scheme: several instances of each arm, in the order A B B A A B, so that a drift of the machine falls on both;
medians over the pooled samples; a difference counts from 3 % where the medians of the instances do not overlap. The
rule alone errs often with three instances, and the rate is told wherever it is used.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cglab.errors import InputError, ServerError
from cglab.measure.ab import schedule
from cglab.measure.record import Record, first_line, make_record, new_run
from cglab.measure.statistics import FEWEST_INSTANCES
from cglab.serving import parity
from cglab.serving.arm import ServerArm, command
from cglab.serving.benchmark import PointResult, run_benchmark
from cglab.serving.comparison import ServerComparison, Turn
from cglab.serving.endpoint import Endpoint
from cglab.serving.fairness import overruled, require_equal_arms, require_equal_servers, seeded
from cglab.serving.installed import Installed, ask, find_python
from cglab.serving.occupancy import TIMER, Watch, watch_occupancy
from cglab.serving.parity import Replies
from cglab.serving.scrape import Scrape, graph_share, scrape
from cglab.serving.server import RunningServer, launch
from cglab.serving.workload import Workload

BENCH = "servers"
FAILED = "server_failures"
"""Bench of the record of an arm whose server did not start, or died: what a version refuses is a result too."""
PARITY_TOKENS = 32


class Launch(Protocol):
    """How a server is started; a test puts its own here."""

    def __call__(
        self, arm: ServerArm, *, log_folder: str, deadline_s: float
    ) -> AbstractContextManager[RunningServer]:
        """Starts it and waits until it is healthy."""
        ...


@dataclass
class _Run:
    """What a comparison goes by, and what it has so far."""

    arms: tuple[ServerArm, ...]
    workloads: tuple[Workload, ...]
    installed: Installed
    folder: Path
    declared: Collection[str]
    deadline: float
    devices: int
    keep: Callable[[Record], None]
    start: Launch
    facts: Mapping[str, Any]
    run: str
    turns: list[Turn] = field(default_factory=list)
    replies: dict[str, Replies] = field(default_factory=dict)
    parity: dict[str, parity.ServerParity] = field(default_factory=dict)
    software: dict[str, str | None] = field(default_factory=dict)


def compare_servers(
    arms: Sequence[ServerArm],
    workloads: Sequence[Workload],
    *,
    folder: str | Path,
    instances: int = 3,
    order: str | None = None,
    confirm: int | None = None,
    declared: Collection[str] = (),
    deadline: float = 600.0,
    devices: int = 1,
    keep: Callable[[Record], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
    start: Launch = launch,
    run: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> ServerComparison:
    """Measures arms in turns, each instance a server of its own.

    A server that dies or does not start ends its arm only, with the error kept; what was measured stays.

    Args:
        arms: the base first; equal in all but their toggles and ``declared``.
        workloads: the points, the same for all.
        folder: for logs, data files and results of the benchmark.
        instances: of each arm, at least 3 for a verdict; 1 and 2 show times alone.
        order: the turns as letters, such as ``ABBAAB``; None for forward and backward rounds, which is that.
        confirm: instances to go on to where a difference shows; None for none.
        declared: flags or variables that make the difference where no toggle does.
        deadline: seconds for a server to become healthy, and for the points of one.
        devices: GPUs of a server.
        keep: called with each record at once.
        progress: called with what comes next.
        start: what starts a server.
        run: a name that the records of several calls share, where one call cannot have all instances, such as ``AB``,
            ``BA`` and ``AB`` after it; None for one of its own.
        facts: more fields of the records: ``model``, ``weights``, ``dtype``, ``notes``.

    Raises:
        InputError: before anything starts: arms that differ in more, a flag that this version lacks, a bad order;
            and once two servers run that resolved their arguments differently.
        ToggleError: a toggle that this version lacks.
        NotInstalledError: no SGLang here.
    """
    arms = tuple(replace(arm, arguments=seeded(arm)) for arm in arms)
    require_equal_arms(arms, declared)
    installed = ask(find_python(arms[0].python))
    for arm in arms:
        command(arm, installed, 1)  # refuses now what a launch would refuse in the middle
    names = [arm.name for arm in arms]
    planned = _turns(names, instances, order)
    state = _Run(
        arms, tuple(workloads), installed, Path(folder), declared, deadline, devices, keep, start, facts or {},
        run=run or new_run(), software=_software(installed),
    )  # fmt: skip
    _take(state, planned, progress)
    found = _comparison(state)
    if confirm is not None and confirm > instances and _flagged(found):
        _take(state, [(name, turn) for turn, name in schedule(tuple(names), instances, confirm)], progress)
        found = _comparison(state)
    return found


def _turns(names: Sequence[str], instances: int, order: str | None) -> list[tuple[str, int]]:
    """Arm and instance of every turn."""
    if instances < 1:
        raise InputError(f"instances={instances}; give 1 or more, {FEWEST_INSTANCES} for a verdict")
    if order is None:
        return [(name, turn) for turn, name in schedule(tuple(names), 0, instances)]
    letters = {chr(ord("A") + place): name for place, name in enumerate(names)}
    if sorted(order) != sorted([*letters] * instances):
        raise InputError(
            f"order {order!r} does not have each of {', '.join(letters)} {instances} times; for three instances of two "
            "arms ABBAAB does"
        )
    return [(letters[letter], order[:place].count(letter)) for place, letter in enumerate(order)]


def _take(state: _Run, turns: Sequence[tuple[str, int]], progress: Callable[[str], None]) -> None:
    arms = {arm.name: arm for arm in state.arms}
    for name, instance in turns:
        if any(turn.arm == name and turn.error for turn in state.turns):
            continue
        progress(f"{name}, instance {instance + 1}")
        state.turns.append(_turn(state, arms[name], instance))


def _turn(state: _Run, arm: ServerArm, instance: int) -> Turn:
    """One server from its start to its end."""
    turn = Turn(arm.name, instance)
    place = state.folder / f"{arm.name}-{instance + 1}"
    points: list[PointResult] = []
    try:
        with state.start(arm, log_folder=str(place), deadline_s=state.deadline) as server:
            before = scrape(server)
            taken_back = overruled(arm, before.arguments, state.installed)
            turn = replace(turn, before=before, started_s=server.started_s, overruled=taken_back)
            _require_equal(state, arm, before)
            if arm.name not in state.replies:
                _check_parity(state, arm, server)
                before = scrape(server)  # the passes of the check are none of the load's
            turn = replace(turn, before=before)
            # Reading the gauge costs the server a little, so only where its forwards are timed.
            timed = arm.environment.get(TIMER, "0") != "0"
            with watch_occupancy(server) if timed else nullcontext(Watch()) as watch:
                for result in run_benchmark(
                    server, state.workloads, place, deadline=state.deadline, devices=state.devices
                ):
                    points.append(result)
                    turn.occupancy[result.workload.name] = watch.take().median
                    shares, before = _shares(server, before)
                    state.keep(_record(state, arm, turn, result, shares))
            turn = replace(turn, after=scrape(server))
    except ServerError as error:
        turn = replace(turn, error=str(error))
        state.keep(_failure(state, arm, turn))
    return replace(turn, points=tuple(points))


def _require_equal(state: _Run, arm: ServerArm, found: Scrape) -> None:
    base = next((turn for turn in state.turns if turn.before is not None), None)
    if base is None or base.before is None:
        return
    of_base = next(each for each in state.arms if each.name == base.arm)
    require_equal_servers(
        (of_base, base.before.arguments), (arm, found.arguments), state.installed, state.declared
    )


def _check_parity(state: _Run, arm: ServerArm, server: Endpoint) -> None:
    bodies = parity.parity_bodies(state.workloads[0].vocabulary)
    asked = [body["input_ids"] for body in bodies]
    state.replies[arm.name] = parity.ask_all(server, asked, PARITY_TOKENS)
    base = state.arms[0].name
    if base not in state.replies:
        return  # by the order of the turns it comes later, and is compared with then
    others = state.replies.keys() - state.parity.keys() - {base}
    state.parity |= {name: parity.compare(state.replies[name], state.replies[base]) for name in others}


def _shares(server: Endpoint, earlier: Scrape) -> tuple[dict[str, float | None], Scrape]:
    """Share of passes since an earlier scrape that replayed a graph, warm-ups included, by phase; and the scrape."""
    try:
        now = scrape(server)
    except ServerError:  # it died after the point, whose result stands; the next one tells of it
        return {}, earlier
    passes = now.passes_since(earlier)
    return {f"graph_share_{phase}": graph_share(passes, phase) for phase in ("prefill", "decode")}, now


def _record(
    state: _Run, arm: ServerArm, turn: Turn, point: PointResult, shares: Mapping[str, float | None]
) -> Record:
    captured = {} if turn.before is None else turn.before.metrics()
    return make_record(
        bench=BENCH,
        arm=arm.name,
        device="cpu" if arm.device == "cpu" else "cuda",
        run=state.run,
        software=state.software,
        workload={
            **point.workload.as_dict(), "base": state.arms[0].name, "instance": turn.instance,
            "toggles": dict(arm.toggles), "arguments": _words(arm), "environment": dict(arm.environment),
            "payload": point.payload,
        },
        samples=point.samples(),
        metrics={
            **point.metrics(), **captured, **shares, "started_s": turn.started_s,
            "occupancy_percent": turn.occupancy.get(point.workload.name),
            **{f"overruled_{flag.strip('-')}": made for flag, made in turn.overruled.items()},
        },
        parity=state.parity[arm.name].as_dict() if arm.name in state.parity else None,
        **state.facts,
    )  # fmt: skip


def _failure(state: _Run, arm: ServerArm, turn: Turn) -> Record:
    """Why an arm ended, without its log and the folders of this machine."""
    told = first_line(str(turn.error)).split(" The log is ", 1)[0]
    return make_record(
        bench=FAILED, arm=arm.name, device="cpu" if arm.device == "cpu" else "cuda", run=state.run,
        software=state.software, metrics={"started_s": turn.started_s},
        workload={
            "base": state.arms[0].name, "instance": turn.instance, "toggles": dict(arm.toggles),
            "arguments": _words(arm), "environment": dict(arm.environment),
        },
        **{**state.facts, "notes": told},
    )  # fmt: skip


def _words(arm: ServerArm) -> list[str]:
    """Arguments as a record has them: folders of this machine are nobody else's business."""
    return [Path(word).name if Path(word).is_absolute() else word for word in arm.arguments]


def _comparison(state: _Run) -> ServerComparison:
    names = tuple(arm.name for arm in state.arms)
    return ServerComparison(names, state.workloads, tuple(state.turns), dict(state.parity))


def _flagged(found: ServerComparison) -> bool:
    rows = found.rows()
    return not found.failed and any(row["verdict"] in ("faster", "slower") for row in rows)


def _software(installed: Installed) -> dict[str, str | None]:
    """Versions of the server's own Python, which a record must not take from this one."""
    code = "from importlib.metadata import version; print(version('torch'))"
    answer = subprocess.run(
        [str(installed.python), "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return {"sglang": installed.version, "torch": answer.stdout.strip() or None, "cuda": None}
