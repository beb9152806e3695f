"""Stages that share one device: that a pipeline is right where there are fewer GPUs than stages, and no times.

The same requests run eager and captured over the stages, and once more in one process with as many micro-batches, so
that every forward has the same tokens. Each of these gives the same tokens, and each stage's captured step is the
eager one's to the bit. Stages of one device wait for each other and for copies through host memory, so that nothing is
timed, and nothing of this stands for a pipeline's speed: the records are of a bench of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from cglab.lab.stage_job import StageJob, run_stages
from cglab.measure.record import Record, make_record

SIZES: Final[Mapping[str, Any]] = {
    "caps": (512, 2048), "concurrencies": (4,), "prompt": 1024, "requests": 2, "instances": 2,
}  # fmt: skip
"""A prompt in chunks, and two prompts a forward; all as long as a bucket, so that arms agree to the bit."""
MODELS: Final = ("qwen3-8b",)
TIMES: Final = "not comparable: the stages take turns on one device and copy through host memory"
Point = Mapping[str, Any]


def shared_records(job: StageJob, device: torch.device, run: str) -> Iterator[Record]:
    """Runs a job on one device, in one process and over all stages.

    Args:
        job: what to run.
        device: where.
        run: name of the run.

    Yields:
        A record for each arm of each point, without times.

    Raises:
        RankError: if a rank failed, or was not done in time.
    """
    alone = run_stages(replace(job, stages=1, micro_batches=job.stages, shared=True))
    ranks = run_stages(replace(job, shared=True))
    yield from compared(job, ranks, alone[0], device, run)


def compared(
    job: StageJob,
    ranks: Sequence[Mapping[str, Any]],
    alone: Mapping[str, Any],
    device: torch.device,
    run: str,
) -> Iterator[Record]:
    """The records of a job that ran.

    Args:
        job: it.
        ranks: what each rank found.
        alone: what one process found that held the whole model.
        device: where.
        run: name of the run.
    """
    wanted = {_place(point): point["tokens"] for point in _of(alone, "throughput")}
    every = [{_place(point): point for point in _of(rank, "throughput")} for rank in ranks]
    parities = [{(point["cap"], point["arm"]): point for point in _of(rank, "stage")} for rank in ranks]
    for place, point in every[0].items():
        cap, concurrency, arm = place
        stages = [by_arm[cap, arm] for by_arm in parities]
        verdicts = [each["parity"] for each in stages if each["parity"] is not None]
        worse = [each for each in verdicts if each["verdict"] != "bitwise"]
        same = {
            "exact_lengths": all(by_place[place]["exact"] for by_place in every),
            "repeated": all(by_place[place]["repeated"] for by_place in every),
            "tokens_equal": point["tokens"] == every[0][cap, concurrency, "eager"]["tokens"],
            "tokens_equal_one_process": {by_place[place]["tokens"] for by_place in every} == {wanted[place]},
            "ranks_alike": all(by_place[place]["coverage"] == point["coverage"] for by_place in every),
            "bitwise": not worse,
        }
        errors = sum(by_place[place]["errors"] for by_place in every)
        yield make_record(
            bench="pipeline_shared", arm=arm, device=device, run=run,
            metrics={
                **same, "requests": float(point["requests"]), "errors": float(errors),
                "forwards_replayed": float(point["coverage"]["captured"]),
                "forwards_eager": float(point["coverage"]["eager"]), "largest_forward": float(point["largest"]),
                "breaks": sum(each.get("breaks", 0.0) for each in stages), "times_comparable": False,
                "ok": all(same.values()) and not errors and point["largest"] <= cap,
            },
            workload={
                **job.workload(ranks), "cap": cap, "concurrency": concurrency, "requests": point["requests"],
                "times": TIMES,
            },
            parity=(worse or verdicts or [None])[0], coverage=point["coverage"], model=job.model,
            weights=ranks[0]["weights"], dtype=job.dtype,
        )  # fmt: skip


def _of(rank: Mapping[str, Any], kind: str) -> list[Point]:
    return [point for point in rank["points"] if point["kind"] == kind]


def _place(point: Point) -> tuple[int, int, str]:
    return point["cap"], point["concurrency"], point["arm"]
