"""Peers as Markdown: one line for each that computed a decode token, or why it could not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cglab.lab.markdown import Block, number, table
from cglab.lab.recorded import Recorded, recorded
from cglab.measure.record import Record

COLUMNS = (
    "model", "batch", "peer", "token ms", "over the lab's", "verdict", "replay ms", "over floor", "tokens",
)  # fmt: skip
FASTEST = (
    "model", "batch", "floor ms", "lab's ms", "eager ms", "fastest other", "its ms", "over the lab's",
)  # fmt: skip
OWN = ("floor", "full", "eager", "piecewise", "plain-eager", "plain-graph")
"""Arms that are the lab's own code, or nobody's."""
SAME = {"bitwise": "equal", "drift": "equal but for near-ties", "corrupted": "**other tokens**"}


@dataclass(frozen=True)
class TokenBlock(Block):
    """A block of one decode token, from ids on the host to ids on the host."""

    bench: str = "peers"

    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder."""
        return self.block(recorded("token", folder))

    @abstractmethod
    def block(self, results: Recorded) -> str:
        """The block from records, or that there are none yet."""


@dataclass(frozen=True)
class Peers(TokenBlock):
    """Every peer that computed the token, or why it could not."""

    name: str = "peers"

    def block(self, results: Recorded) -> str:
        """The table, fastest first, under one line on where and when."""
        if not results:
            return self.not_yet
        where = (
            f"One decode token, from ids on the host to the next ids on the host, on one {results.where}; arms in "
            "turns, the lab's own (`full`) in every process: a peer is compared with that of its own. SGLang with "
            "Triton attention and PyTorch sampling, its ModelRunner alone. The replay has its inputs on the device "
            "and reads nothing."
        )
        where += f" On {results.beside}." if results.beside else ""
        return f"{where}\n\n{table(COLUMNS, map(_row, sorted(results.records, key=_order)))}"


@dataclass(frozen=True)
class Fastest(TokenBlock):
    """Of the same steps one line each: the floor, the lab's token, an eager one, and the fastest of all other peers."""

    name: str = "fastest"

    def block(self, results: Recorded) -> str:
        """The table, under one line on where and when."""
        if not results:
            return self.not_yet
        steps: dict[tuple[str, int], dict[str, Record]] = {}
        for record in results.records:
            if isinstance(record.metrics.get("token_ms"), float):
                steps.setdefault((record.model or "", record.workload["batch"]), {})[record.arm] = record
        rows = [(model, str(batch), *_beside(arms)) for (model, batch), arms in sorted(steps.items())]
        others = sorted({arm for arms in steps.values() for arm in arms if arm not in OWN})
        where = (
            "The same step by others: one token, from ids on the host to the next ids on the host, in turns on one "
            f"{results.where}; above 1 the lab is faster. SGLang with Triton attention and PyTorch sampling, its "
            f"ModelRunner alone. Others that ran: {', '.join(others) or 'none'}."
        )
        return f"{where}\n\n{table(FASTEST, rows)}"


def _beside(arms: Mapping[str, Record]) -> tuple[str, ...]:
    others = [record for arm, record in arms.items() if arm not in OWN]
    best = min(others, key=_time, default=None)
    times = [
        number(arms[arm].metrics["token_ms"]) if arm in arms else "-" for arm in ("floor", "full", "eager")
    ]
    if best is None:
        return (*times, "-", "-", "-")
    return (*times, best.arm, number(best.metrics["token_ms"]), number(best.metrics.get("ratio_to_ours")))


def _order(record: Record) -> tuple[str, int, float]:
    return record.model or "", record.workload["batch"], _time(record)


def _time(record: Record) -> float:
    time = record.metrics.get("token_ms")
    return time if isinstance(time, float) else float("inf")


def _row(record: Record) -> tuple[str, ...]:
    metrics = record.metrics
    start = (str(record.model), str(record.workload["batch"]), record.arm)
    if not isinstance(metrics.get("token_ms"), float):
        return (*start, "-", "-", str(metrics.get("error")).splitlines()[0], "-", "-", "-")
    tokens = SAME[record.parity["verdict"]] if record.parity else "-"
    ratio, verdict = number(metrics.get("ratio_to_ours")), str(metrics.get("verdict") or "-")
    replay, floor = number(metrics.get("replay_ms")), number(metrics.get("over_floor"))
    return (*start, number(metrics["token_ms"]), ratio, verdict, replay, floor, tokens)
