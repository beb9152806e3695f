"""Peers by groups, each in a process of its own: who takes its process along takes no other group with it.

An error of the device such as an illegal address ends all that its process could still compute there. So every group
has the lab's own arm in turns with its members, and what they are compared with is that of their own process, which
is told in their records.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any, Final

import torch

from cglab.lab.peer_turns import SGLANG
from cglab.lab.step_metrics import Progress
from cglab.measure.record import Record, first_line, make_record
from cglab.measure.records import append, read
from cglab.serving.guarded import GuardedProcess

BENCH: Final = "token"
"""Of the records."""
PROCESS: Final = ("-m", "cglab.lab.peer_process")
"""What Python runs for a group, with the file of its job."""
ALONE: Final = (
    "torch-compile", "breakable-cuda-graphs", "transformers", "transformers-compile", "transformers-batching",
)  # fmt: skip
"""Peers with somebody else's graphs, compiler or kernels, each a group; SGLang has a process of its own anyway."""
RAISED: Final = re.compile(r"^(?:\s*what\(\):\s*(.+)|((?:\w+\.)*\w*(?:Error|Exception)\b.*))$", re.MULTILINE)
"""What Python or C++ says of what ended a process."""


@dataclass(frozen=True)
class PeerJob:
    """What the peers of one model are to compute.

    Attributes:
        model: name.
        device: what is measured.
        run: of the records.
        arms: peers, the one that the others are compared with first.
        batches: requests of a step, smallest first.
        context: tokens of each request.
        cache: tokens that a request may have.
        calls, repeats, warmup: see ``PeerTurns``.
        limit: seconds for a group, after which its process is ended.
        command: words of the command that the records tell.
    """

    model: str
    device: str
    run: str
    arms: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    cache: int
    calls: int
    repeats: int
    warmup: int
    limit: float = 900.0
    command: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> PeerJob:
        """The job of a file that ``measured_apart`` has written."""
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(values[name]) for name in ("arms", "batches", "command")}
        return cls(**{**values, **lists})

    def leave(self, path: Path, record: Record) -> None:
        """Keeps a record beside the file of the job, at once: whatever ends the process leaves what it measured."""
        append(path.with_suffix(".jsonl"), [record])


def groups(arms: Sequence[str]) -> list[tuple[str, ...]]:
    """Arms by process, each with the first of them.

    SGLang stays with the lab's own arms: what claims compare is then measured side by side.
    """
    ours = arms[0]
    together = tuple(arm for arm in arms if arm not in ALONE)
    return [together, *((ours, arm) for arm in arms if arm in ALONE)]


def measured_apart(job: PeerJob, progress: Progress) -> Iterator[Record]:
    """Measures a job group by group.

    Yields:
        Records as from one process: of what each group has in it, those of the first group that has it. Last those of
        arms whose process ended before them, with the reason.
    """
    job = replace(job, command=tuple(sys.argv))
    found: dict[tuple[str, int], Record] = {}
    ended: dict[str, str] = {}
    for group in groups(job.arms):
        progress(f"{job.model}: {', '.join(group)} in a process of their own")
        records, reason = _measured(replace(job, arms=group))
        for record in records:
            place = _arm(record), record.workload["batch"]
            if place not in found:
                found[place] = record
                yield record
        ended |= {arm: reason for arm in group if arm not in ended}
    for batch in job.batches:
        known = next((record for (_, size), record in found.items() if size == batch), None)
        for arm in job.arms:
            if (arm, batch) not in found:
                yield make_record(
                    bench=BENCH, arm=arm, device=torch.device(job.device), run=job.run,
                    metrics={"error": ended[arm]}, **_facts(job, batch, known),
                )  # fmt: skip


def _measured(job: PeerJob) -> tuple[Sequence[Record], str]:
    """Records of a group, and how its process ended."""
    return run_apart(PROCESS, asdict(job), job.limit)


def run_apart(words: Sequence[str], values: Mapping[str, Any], limit: float) -> tuple[Sequence[Record], str]:
    """Runs Python on a job in a process of its own.

    Args:
        words: of its command line, before the file of the job.
        values: the job.
        limit: seconds, after which the process is ended.

    Returns:
        The records that it left beside that file, and how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="cglab-peers-") as folder:
        path, said = Path(folder, "job.json"), Path(folder, "said")
        path.write_text(json.dumps(dict(values)), encoding="utf-8")
        with said.open("wb") as log:
            process = GuardedProcess([sys.executable, *words, str(path)], environment=os.environ, log=log)
            try:
                code = process.exit_code(wait=limit)
            finally:
                process.end()
        kept = path.with_suffix(".jsonl")
        records = read(kept).records if kept.exists() else ()
        return records, _ending(code, limit, said.read_text(encoding="utf-8", errors="replace"))


def _ending(code: int | None, limit: float, said: str) -> str:
    """How a process ended and what it said last of it, in one line."""
    if code is None:
        return f"its process did not end within {limit:g} s"
    how = f"by {Signals(-code).name}" if code < 0 else f"with exit status {code}"
    told = ["".join(each) for each in RAISED.findall(said)][-1:]
    return f"its process ended {how} before it was measured" + "".join(
        f": {first_line(each)}" for each in told
    )


def _arm(record: Record) -> str:
    """As it was asked for."""
    return SGLANG if record.arm.startswith(f"{SGLANG}-") else record.arm


def _facts(job: PeerJob, batch: int, known: Record | None) -> dict[str, Any]:
    """Fields of the records of a step: those of a record that is there, or what is known before anything ran."""
    if known is not None:
        return {name: getattr(known, name) for name in ("model", "weights", "dtype", "workload")}
    workload = {"batch": batch, "context": job.context, "cache": job.cache, "calls": job.calls}
    return {"model": job.model, "workload": workload}
