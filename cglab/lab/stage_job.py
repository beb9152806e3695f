"""What the ranks of a pipeline are to measure, and how they are started: one process a stage, by ``torchrun``."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from cglab.errors import RankError
from cglab.serving.guarded import GuardedProcess

ARMS: Final = ("eager", "breakable")
START_SECONDS: Final = 120.0
"""What starting the processes may take beside the job's own limit."""

FIRST: Final = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""What torchrun says of the rank that failed first."""
RAISED: Final = re.compile(r"^(?:\[rank\d+\]:\s*)?([\w.]+(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class StageJob:
    """S2's protocol: prompts of one length with one new token each, prefix reuse off, at several caps.

    Attributes:
        model: what is cut into stages; see ``cglab.open``.
        stages: how many, one process each.
        device: ``cpu`` or ``cuda``, of which each stage has one, unless they share the first.
        caps: aggregate tokens of one forward: the token budget, and the largest bucket of the captured arm.
        concurrencies: requests at a time.
        requests: so many times the concurrency run in all.
        most: requests of a run at most, but never fewer than the concurrency; None for no bound.
        prompt: tokens of a prompt.
        instances: turns of each arm.
        dtype: of weights and computation.
        ops: the form in which the model computes; None for the device's own default.
        seed: of weights and prompts.
        deadline: seconds that a rank waits for another; one that dies is noticed at once.
        limit: seconds after which all are ended.
        folder: where the ranks leave what they measured.
        shared: all stages have one device and hand their proxies over through host memory; nothing is traced then.
        micro_batches: in flight at most; None for one a stage.
    """

    model: str
    stages: int
    device: str
    caps: tuple[int, ...]
    concurrencies: tuple[int, ...]
    requests: int = 10
    most: int | None = None
    prompt: int = 8192
    instances: int = 3
    dtype: str = "bfloat16"
    ops: str | None = None
    seed: int = 0
    deadline: float = 300.0
    limit: float = 570.0
    folder: str = ""
    shared: bool = False
    micro_batches: int | None = None

    @classmethod
    def read(cls, path: Path) -> StageJob:
        """The job of a file that ``run_stages`` has written."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            **{**values, "caps": tuple(values["caps"]), "concurrencies": tuple(values["concurrencies"])}
        )

    def count(self, concurrency: int) -> int:
        """Requests of a run."""
        wanted = self.requests * concurrency
        return wanted if self.most is None else max(concurrency, min(wanted, self.most))

    def workload(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a record says was asked for, beside its own point; how the ranks were joined, as they found."""
        return {
            "stages": self.stages, "prompt": self.prompt, "new_tokens": 1, "prefix_reuse": False,
            "ops": ranks[0]["ops"], "joined": ranks[0]["joined"],
        }  # fmt: skip

    def result(self, rank: int) -> Path:
        """Where a rank leaves what it measured."""
        return Path(self.folder, f"rank{rank}.json")

    def write(self, rank: int, result: Mapping[str, Any]) -> None:
        """Leaves what a rank has so far in place of what it left before, never half of it."""
        place = self.result(rank)
        new = place.with_suffix(".new")
        new.write_text(json.dumps(result), encoding="utf-8")
        new.replace(place)


def run_stages(job: StageJob) -> list[dict[str, Any]]:
    """Runs a job with one process a stage, from a terminal or a notebook alike.

    Returns:
        What each rank measured, by rank.

    Raises:
        RankError: if a rank failed or did not end in time; it says what each of them said, and has what they measured
            until then. None is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, path = replace(job, folder=folder), Path(folder, "job.json")
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}",
            f"--log-dir={folder}", "-m", "cglab.lab.stage_process", str(path),
        ]  # fmt: skip
        said = Path(folder, "said")
        with said.open("wb") as log:
            # It ends with this process, however that ends; ranks that did not end in time left nothing, told below.
            ranks = GuardedProcess(command, environment=os.environ, log=log, grace=0.5)
            try:
                ranks.exit_code(wait=job.limit + START_SECONDS)
            finally:
                ranks.end()
        return _results(job, said.read_text(encoding="utf-8", errors="replace"))


def _results(job: StageJob, said: str) -> list[dict[str, Any]]:
    paths = [job.result(rank) for rank in range(job.stages)]
    found = [json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in paths]
    if all(each.get("whole") for each in found):
        return found
    silent = [not each.get("whole") and "error" not in each for each in found]
    told = [f"rank {rank}: {each.get('error', 'ended without a word')}" for rank, each in enumerate(found)]
    if any(silent):  # some died without a word of their own
        if first := FIRST.search(said):
            told.insert(0, "rank {} ended first, with exit code {}".format(*first.groups()))
        told += RAISED.findall(said)[-1:]
    error = RankError(f"the pipeline of {job.model} stopped on all ranks; " + "; ".join(told))
    error.measured = tuple(found) if all("ops" in each for each in found) else ()
    raise error
