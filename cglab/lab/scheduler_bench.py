"""The scheduler bench: what a step costs the host beside the forward, against requests that run and that wait.

No model computes: tokens are made up. The scheduler, the books of pages, the inputs of a decode step and their copy
to the device are the engine's own. What a replay itself costs the host does not grow with requests; see ``replay``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from cglab.engine.batches import Batch, SchedulerOptions
from cglab.engine.inputs import step_inputs, write_page_tables
from cglab.engine.memory import CacheLayout
from cglab.engine.requests import Request
from cglab.engine.scheduler import Scheduler
from cglab.errors import InputError
from cglab.lab.step_metrics import Progress, silent
from cglab.measure.host_growth import HostPoint, fit_host_growth
from cglab.measure.record import Record, make_record, new_run
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.runners.decode import INPUTS

RUNNING: Final = (1, 8, 64, 256, 512, 1024, 2000)
WAITING: Final = (0, 8, 64, 512, 2000)
BESIDE: Final = 64
"""Requests that run while others wait."""
PROMPT: Final = 100
PAGE: Final = 16
STEPS: Final = 3 * PAGE
"""Measured steps, so that every request begins three pages."""
COUNTED: Final = 3
"""Steps whose calls are counted; the least of them."""
PARTS: Final = ("plan", "inputs", "commit")
SMALLEST: Final = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=512, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=2, max_position=4096, qk_norm=False,
)  # fmt: skip
"""Of a cache that is as small as one can be: only its books are used."""


class Crowd:
    """Requests that run, all decoding, and others that wait since no row is free.

    Args:
        running: how many run.
        waiting: how many wait.
        device: where the inputs of a step go.
        steps: how many steps all of them last.
    """

    def __init__(self, running: int, waiting: int, device: torch.device, *, steps: int = STEPS) -> None:
        self.limit = steps + COUNTED + 2  # the first token is that of the prompt, and none may be the last
        layout = CacheLayout.for_requests(running, PROMPT + self.limit, PAGE, budget=running * PROMPT)
        self.scheduler = Scheduler(layout, SchedulerOptions(running * PROMPT))
        self.kv = PagedKV(
            SMALLEST, pages=layout.pages, page_size=PAGE, rows=layout.rows, max_context=layout.max_context,
            device=device, dtype=torch.float32,
        )  # fmt: skip
        for index in range(running + waiting):
            prompt = [(index * 31 + at) % SMALLEST.vocab_size for at in range(PROMPT)]
            self.scheduler.add(Request(index, prompt, self.limit), 0.0)
        self.running = running
        self.step()

    def step(self) -> dict[str, float]:
        """One step with made-up tokens; seconds by part."""
        started = perf_counter()
        batch = self.scheduler.plan(0.0)
        planned = perf_counter()
        if batch is None or len(batch.requests) != self.running:
            raise InputError(f"{self.running} requests should be in the step, not {batch}; give fewer steps")
        self._inputs(batch)
        ready = perf_counter()
        tokens = [[7]] * len(batch.requests)
        handed = perf_counter()
        self.scheduler.commit(batch, tokens, 0.0)
        return {"plan": planned - started, "inputs": ready - planned, "commit": perf_counter() - handed}

    def _inputs(self, batch: Batch) -> None:
        write_page_tables(self.kv, batch.requests)
        step_inputs(batch.chunks, INPUTS, self.kv)

    def calls(self) -> int:
        """Python functions that a step calls: the same on every machine."""
        return min(self._counted() for _ in range(COUNTED))

    def _counted(self) -> int:
        count = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event == "call"

        before, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # a collection may call whatever others have left
        sys.setprofile(note)
        try:
            self.step()
        finally:
            sys.setprofile(before)
            if collecting:
                gc.enable()
        return count


def scheduler(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    running: Sequence[int] | None = None,
    waiting: Sequence[int] | None = None,
) -> Iterator[Record]:
    """The host's part of a decode step by number of requests that run, and that wait.

    Args:
        device: where inputs are copied to.
        quick: a small run that shows the machinery.
        progress: called with a line for every size.
        running: three sizes or more; up to 2,000 by default.
        waiting: numbers that wait while 64 run, 0 among them; up to 2,000 by default.

    Yields:
        A record for each size, and one with the fit: ``ok`` says that no term is worse than it must be, by calls, and
        in a run that is not quick by times too.
    """
    run = new_run()
    ran = running or ((1, 4, 16) if quick else RUNNING)
    queued = waiting or ((0, 16) if quick else WAITING)
    points: dict[str, dict[int, HostPoint]] = {"running": {}, "waiting": {}}
    for arm, sizes in (("running", ran), ("waiting", queued)):
        for size in sizes:
            beside = min(BESIDE, max(ran))
            load = (size, 0) if arm == "running" else (beside, size)
            progress(f"{load[0]} run, {load[1]} wait")
            record, points[arm][size] = _measured(arm, load, device, run)
            yield record
    found = fit_host_growth(points["running"], points["waiting"])
    yield make_record(
        bench="scheduler", arm="fit", device=device, run=run, workload={"context": PROMPT},
        metrics={**asdict(found), "ok": found.least_calls and (quick or found.least_times)},
    )  # fmt: skip


def _measured(arm: str, load: tuple[int, int], device: torch.device, run: str) -> tuple[Record, HostPoint]:
    crowd = Crowd(*load, device)
    calls = crowd.calls()
    taken = [crowd.step() for _ in range(STEPS)]
    parts = {f"{part}_us": median(step[part] for step in taken) * 1e6 for part in PARTS}
    point = HostPoint(sum(parts.values()), calls)
    samples = {f"{part}_us": [step[part] * 1e6 for step in taken] for part in PARTS}
    record = make_record(
        bench="scheduler", arm=arm, device=device, run=run, samples=samples,
        workload={"running": load[0], "waiting": load[1], "context": PROMPT},
        metrics={**parts, "step_us": point.us, "calls": float(calls)},
    )  # fmt: skip
    return record, point
