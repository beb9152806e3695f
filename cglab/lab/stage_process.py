"""One rank of a measured pipeline: what ``stage_job.run_stages`` starts once a stage, through ``torchrun``."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.cache import paged_kv
from cglab.engine.links import StageLinks
from cglab.engine.memory import CacheLayout
from cglab.engine.pipeline import Pipeline
from cglab.engine.requests import Request
from cglab.engine.workload import PrefillStep
from cglab.errors import CglabError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.options import Options
from cglab.lab.sparse_prefill import stage_runner
from cglab.lab.stage_job import ARMS, StageJob
from cglab.lab.step_metrics import break_metrics, recorded_steps
from cglab.lab.steps import step_parity
from cglab.measure.ab import schedule
from cglab.measure.intervals import length, union
from cglab.measure.profiling import profile
from cglab.models.compiled import nothing_compiled
from cglab.models.loading import find_model, load_model
from cglab.models.ops import check_ops, use_ops
from cglab.models.spans import Span
from cglab.models.stages import cut
from cglab.runners.base import GraphGroup
from cglab.runners.pipeline_stage import PipelineStageRunner

PAGE_SIZE: Final = 16
TRACED: Final = 4
"""Forwards of a traced run at least: a pipeline must be full for some of them."""
SMALLEST: Final = 512
"""Tokens of the smallest bucket: caps, and what is left of a forward, are its multiples by powers of two."""
CONVERSATION: Final = "nccl"
"""In the names of kernels that wait for another rank: no work of the model's."""


class StageProcess:
    """A stage that is opened once and measured at every cap.

    Args:
        job: what to measure.
        links: to the other ranks.
        device: of this stage.
    """

    def __init__(self, job: StageJob, links: StageLinks, device: torch.device) -> None:
        self.job, self.links, self.device = job, links, device
        source, dtype = find_model(job.model), getattr(torch, job.dtype)
        stage = cut(source.config.num_layers, job.stages)[links.rank]
        self.loaded = load_model(source, device=device, dtype=dtype, seed=job.seed, stage=stage)
        layout = CacheLayout.for_requests(
            max(job.concurrencies) + job.stages, job.prompt + 1, PAGE_SIZE, budget=max(job.caps),
            window=source.config.sliding_window,
        )  # fmt: skip
        self.kv = paged_kv(layout, source.config, device=device, dtype=dtype, layers=stage.layers)
        self.ops = check_ops(job.ops, device, source.config)
        use_ops(self.ops, self.loaded.model, self.kv)
        self.group = GraphGroup(device)

    def points(self) -> Iterator[dict[str, Any]]:
        """Every cap: the arms in turns at each concurrency, then one compared step of each, traced unless shared."""
        for cap in self.job.caps:
            runners = {arm: self._runner(arm, cap) for arm in ARMS}
            for concurrency in self.job.concurrencies:
                yield from self._throughput(runners, cap, concurrency)
            for arm, runner in runners.items():
                yield self._compared(runner, cap, arm) if self.job.shared else self._traced(runner, cap, arm)
            for runner in runners.values():
                runner.close()

    def _runner(self, arm: str, cap: int) -> PipelineStageRunner:
        sizes, size = [], cap
        while size >= min(SMALLEST, cap):
            sizes.append(size)
            size //= 2
        runner = stage_runner(self.loaded.model, self.kv, self.group, sizes, Options(arm))
        runner.capture()
        return runner

    def _pipeline(self, runner: PipelineStageRunner, cap: int, concurrency: int) -> Pipeline:
        options = SchedulerOptions(cap, max_running=concurrency, prefix_reuse=False)
        micro_batches = self.job.micro_batches or self.links.count
        return Pipeline(runner, self.links, options, micro_batches=min(micro_batches, concurrency))

    def _requests(self, count: int) -> list[Request]:
        drawn = torch.Generator().manual_seed(self.job.seed)
        vocabulary = self.loaded.config.vocab_size
        prompts = torch.randint(0, vocabulary, (count, self.job.prompt), generator=drawn).tolist()
        return [Request(index, prompt, 1) for index, prompt in enumerate(prompts)]

    def _throughput(
        self, runners: dict[str, PipelineStageRunner], cap: int, concurrency: int
    ) -> Iterator[dict[str, Any]]:
        """One point of the sweep by arm; every run is the same requests."""
        pipelines = {arm: self._pipeline(runner, cap, concurrency) for arm, runner in runners.items()}
        found: dict[str, dict[str, Any]] = {}
        for arm, pipeline in pipelines.items():
            pipeline.run(self._requests(concurrency))  # warm-up
            pipeline.segments.drain()
            runners[arm].coverage().clear()
            found[arm] = {"seconds": [], "outputs": [], "stage_ms": [], "errors": 0}
        count = self.job.count(concurrency)
        for _, arm in schedule(ARMS, 0, self.job.instances):
            asked, pipeline = self._requests(count), pipelines[arm]
            self.links.gather(torch.zeros(1))  # all ranks begin together
            started = time.perf_counter()
            with nothing_compiled(self.loaded.model):
                pipeline.run(asked)
            found[arm]["seconds"].append(time.perf_counter() - started)
            found[arm]["outputs"].append([request.output for request in asked])
            found[arm]["errors"] += sum(request.finish not in ("length", "stop") for request in asked)
            found[arm]["stage_ms"].append(median(s.seconds for s in pipeline.segments.drain()) * 1e3)
        for arm, each in found.items():
            counts, outputs = runners[arm].coverage(), each.pop("outputs")
            yield {
                "kind": "throughput", "cap": cap, "concurrency": concurrency, "arm": arm, "requests": count,
                "coverage": counts.as_dict(), "largest": pipelines[arm].largest,
                "exact": all(len(output) == 1 for run in outputs for output in run),
                "tokens": hashlib.sha1(repr(outputs[0]).encode(), usedforsecurity=False).hexdigest(),
                "repeated": all(run == outputs[0] for run in outputs), **each,
            }  # fmt: skip

    def _compared(self, runner: PipelineStageRunner, cap: int, arm: str) -> dict[str, Any]:
        """Parity of one step, and how many breaks its recording has."""
        found: dict[str, Any] = {
            "kind": "stage", "cap": cap, "concurrency": min(self.job.concurrencies), "arm": arm, "parity": None,
        }  # fmt: skip
        if arm != "eager":
            step = self._step(runner, cap)
            found["parity"] = step_parity(runner, step).as_dict()
            found["breaks"] = float(sum(isinstance(each, BreakCall) for each in recorded_steps(runner, step)))
        return found

    def _traced(self, runner: PipelineStageRunner, cap: int, arm: str) -> dict[str, Any]:
        """As ``_compared``, with the kernel-busy time of the stage while the pipeline runs, and the cost of breaks."""
        concurrency = min(self.job.concurrencies)
        pipeline = self._pipeline(runner, cap, concurrency)
        count = max(concurrency, TRACED * cap // self.job.prompt)
        before = runner.coverage().steps
        trace = profile(lambda: pipeline.run(self._requests(count)), steps=1, warmup=1, device=self.device)
        forwards = (
            runner.coverage().steps - before
        ) // 3  # of a warm-up, the profiler's own and the traced run
        work = [each for each in trace.device_events if CONVERSATION not in each.name.lower()]
        busy_ms = length(union((each.start, each.end) for each in work)) / 1e3 if trace.reliable else None
        per_forward = None if busy_ms is None else busy_ms / max(forwards, 1)
        found = self._compared(runner, cap, arm) | {
            "forwards": forwards, "busy_ms": per_forward, "traced_busy_ms": busy_ms,
            "traced_wall_ms": trace.wall_us / 1e3,
        }  # fmt: skip
        if arm != "eager":
            found |= break_metrics(runner, self._step(runner, cap), self.device, busy_ms=per_forward, calls=1)
        return found

    def _step(self, runner: PipelineStageRunner, cap: int) -> PrefillStep:
        """One forward of this stage alone, over the reserved row, with noise for proxies."""
        tokens = min(cap, max(runner.captured.buckets))
        spans = [
            Span(0, 0, min(self.job.prompt, tokens - first)) for first in range(0, tokens, self.job.prompt)
        ]
        zeros = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        noise = runner.noise(tokens, torch.Generator(self.device).manual_seed(self.job.seed))
        return PrefillStep(spans, dict.fromkeys(runner.own, zeros) | noise)


def main(path: Path) -> int:
    """Measures a job as the rank that ``torchrun`` says this is; the exit status."""
    job, rank = StageJob.read(path), int(os.environ["RANK"])
    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device(job.device, 0 if job.shared else rank)
        torch.cuda.set_device(device)  # what libraries make of their own accord belongs there too (B19)
    links: StageLinks | None = None
    result: dict[str, Any] = {"points": [], "whole": False}
    try:
        links = StageLinks(device, deadline=job.deadline, staged=job.shared)
        process = StageProcess(job, links, device)
        result |= {
            "ops": process.ops, "weights": process.loaded.weights, "joined": str(links.joint),
            "layers": [layer for pool in process.kv.pools for layer in pool.layers],
        }  # fmt: skip
        for point in process.points():
            result["points"].append(point)
            job.write(rank, result)  # at once: whatever ends it early leaves what it has measured
        result["whole"] = True
    except CglabError as error:
        result["error"] = str(error)
    finally:
        if links is not None:
            links.close()
    job.write(rank, result)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
