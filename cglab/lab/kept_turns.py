"""Turns of a point that are kept as they end, so that a run that is cut goes on with the round that it was in.

A round is a turn of every arm side by side. Only whole rounds are taken up: what an arm is compared with ran beside it,
in the same process on the same device, whichever run the other rounds are of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate, count, pairwise, takewhile
from typing import Any

import torch

from cglab.lab.arm_turns import TIMES, Turn
from cglab.lab.dsa_recorded import Earlier
from cglab.measure.legible import check, legible, unreadable
from cglab.measure.record import Record, make_record

RATES = ("tokens_s", "accept_length", "errors", "preemptions")
Round = Mapping[str, Record]


def turn_record(
    turn: Turn, *, bench: str, arm: str, number: int, device: torch.device, run: str, **facts: Any
) -> Record:
    """The record of one turn.

    Args:
        turn: that ended.
        bench: of the point; the record's own has ``_turn`` behind it.
        arm: that it is of.
        number: of the round, from 0.
        device: that it ran on.
        run: that it is of.
        **facts: other fields of a record; the workload says what was asked for.
    """
    facts["workload"] = {**facts["workload"], "round": number, "payload": turn.payload}
    tokens = [float(token) for output in turn.outputs for token in output]
    return make_record(
        bench=f"{bench}_turn", arm=arm, device=device, run=run, metrics=dict(turn.rates),
        samples={
            **{f"{name}_ms": times for name, times in turn.times.items()},
            "output_tokens": tokens, "output_lengths": [float(len(output)) for output in turn.outputs],
        },
        notes="Kept to go on from, where the run of its point is cut.", **facts,
    )  # fmt: skip


def turn_of(record: Record) -> Turn:
    """The turn of a record.

    Raises:
        RecordError: if it does not hold one.
    """
    check(record)
    ends = [0, *accumulate(int(length) for length in record.samples["output_lengths"])]
    tokens = [int(token) for token in record.samples["output_tokens"]]
    if ends[-1] != len(tokens):
        raise unreadable(record, "samples.output_tokens", len(tokens), f"{ends[-1]} of them, as lengths say")
    return Turn(
        {name: record.samples[f"{name}_ms"] for name in (*TIMES, "round")},
        {name: float(record.metrics[name] or 0.0) for name in RATES},
        record.workload["payload"],
        [tokens[first:end] for first, end in pairwise(ends)],
    )


def kept_rounds(
    earlier: Earlier, bench: str, arms: Collection[str], workload: Mapping[str, Any]
) -> list[Round]:
    """Whole rounds of a point from the first on, of each the newest.

    Args:
        earlier: what is recorded.
        bench: of the point.
        arms: that a round has.
        workload: what was asked for.
    """
    found: dict[tuple[int, str], dict[str, Record]] = {}
    for each in legible(earlier.of(f"{bench}_turn", arms), turn_of):
        if all(each.workload.get(name) == value for name, value in workload.items()):
            found.setdefault((each.workload["round"], each.run), {})[each.arm] = each
    whole = {number: by_arm for (number, _), by_arm in found.items() if len(by_arm) == len(arms)}
    return [whole[number] for number in takewhile(whole.__contains__, count())]
