"""The engines bench: the lab's own engine and a real SGLang server on the same requests, in turns, in one table.

Both are sent the token ids of one load, as many requests in flight, and are read by the same definitions of TTFT, TPOT
and rates. The lab is called within its process and SGLang over HTTP, so SGLang's times hold its server's part too: who
needs a server pays it. Whoever wins, the table says it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from cglab.errors import ServerError
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.ab import schedule
from cglab.measure.latency import Latency
from cglab.measure.record import Metric, Record, make_record, new_run
from cglab.measure.statistics import difference
from cglab.models.presets import PRESETS
from cglab.serving.arm import ServerArm
from cglab.serving.benchmark import run_benchmark
from cglab.serving.installed import ask, find_python
from cglab.serving.random_weights import RANDOM_WEIGHTS, write_folder
from cglab.serving.server import launch
from cglab.serving.workload import Workload, point

LAB, SGLANG = "lab", "sglang"
MEASURES: Final = ("ttft", "tpot", "e2e")
# The same attention and sampling as in every figure of SGLang on one GPU that is recorded here.
_GPU: Final = (
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--mem-fraction-static", "0.7",
)  # fmt: skip

Taken = tuple[Latency, dict[str, list[float]]]
"""Figures of one run, and seconds of its requests by measure."""


def engines(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """Loads by engine, in turns: decode captured in full, prefill as each engine has it by default.

    Args:
        device: what is measured.
        quick: one instance of each, which shows times and no verdict.
        progress: called before every turn.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.

    Yields:
        A record for each engine and load, by model.

    Raises:
        NotInstalledError: no SGLang here.
        ServerError: a server failed; what was measured before it is given first.
    """
    installed = ask(find_python())
    large = device.type == "cuda"
    run = new_run()
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        taken: dict[str, list[list[Taken]]] = {LAB: [], SGLANG: []}
        facts: dict[str, Any] = {}
        workloads: tuple[Workload, ...] = ()
        failure: ServerError | None = None
        for instance, engine in schedule((LAB, SGLANG), 0, 1 if quick else 3):
            progress(f"{name}: {engine}, instance {instance + 1}")
            if engine == LAB:
                facts, workloads, results = _lab(name, device, large=large)
                taken[LAB].append(results)
            else:
                try:
                    taken[SGLANG].append(_server(name, workloads, facts["dtype"], large=large))
                except ServerError as error:
                    failure = error
                    break
        for place, workload in enumerate(workloads):
            for engine in [engine for engine, instances in taken.items() if instances]:
                each = {arm: [results[place] for results in instances] for arm, instances in taken.items()}
                yield make_record(
                    bench="engines", arm=engine, device=device, run=run, metrics=_metrics(each, engine, workload),
                    software={"sglang": installed.version},
                    samples={f"{what}_ms": [1e3 * s for _, by in each[engine] for s in by[what]] for what in MEASURES},
                    workload={**workload.as_dict(), "payload": workload.payload, "decode": "full"}, **facts,
                )  # fmt: skip
        if failure is not None:
            raise failure


def _workloads(vocabulary: int, *, large: bool) -> tuple[Workload, ...]:
    """Lanes start together: the lab's clients have no offset."""
    sizes = ((512, 128, 1, 8), (512, 128, 16, 32)) if large else ((64, 16, 1, 4), (64, 16, 4, 8))
    return tuple(
        point(new, out, lanes, vocabulary=vocabulary, count=count, lane_offset=0.0)
        for new, out, lanes, count in sizes
    )


def _lab(
    name: str, device: torch.device, *, large: bool
) -> tuple[dict[str, Any], tuple[Workload, ...], list[Taken]]:
    """The lab's own engine; a first run of other requests captures its buckets."""
    most = _workloads(1, large=large)[-1].load
    sizes: dict[str, Any] = {} if large else {"dtype": torch.float32}
    results = []
    with open_lab(name, device=device, max_batch=most.concurrency, max_context=most.longest, **sizes) as lab:
        lab.captures.decode = "full"
        workloads = _workloads(lab.config.vocab_size, large=large)
        for workload in workloads:
            lab.load(replace(workload.load, seed=workload.load.seed + 1))
            run = lab.load(workload.load)
            done = [each for each in run.result.requests if each.completed]
            times = {
                what: [s for each in done if (s := getattr(each, what)) is not None] for what in MEASURES
            }
            results.append((run.latency, times))
        return model_facts(lab), workloads, results


def _server(name: str, workloads: Sequence[Workload], dtype: str, *, large: bool) -> list[Taken]:
    with _kept_on_failure() as folder:
        random = name in PRESETS
        model = str(write_folder(PRESETS[name], Path(folder) / "model", dtype)) if random else name
        words = (*(_GPU if large else ()), *(RANDOM_WEIGHTS if random else ()), "--dtype", dtype)
        arm = ServerArm(
            SGLANG, model, {"decode": "full"} if large else {}, words, device="cuda" if large else "cpu"
        )
        with launch(arm, log_folder=folder) as server:
            return [
                (
                    result.latency,
                    {what: [ms / 1e3 for ms in result.samples()[f"{what}_ms"]] for what in MEASURES},
                )
                for result in run_benchmark(server, workloads, Path(folder) / "bench")
            ]


@contextmanager
def _kept_on_failure() -> Iterator[str]:
    """A folder that goes if all went well: the error of a server names the log in it."""
    folder = tempfile.mkdtemp(prefix="cglab-engines-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _metrics(taken: Mapping[str, Sequence[Taken]], engine: str, workload: Workload) -> dict[str, Metric]:
    """Medians over the instances, and for SGLang the ratio to the lab with its verdict; none if a request failed."""
    flat = [figures.as_dict() for figures, _ in taken[engine]]
    known = {name: [value for one in flat if (value := one[name]) is not None] for name in flat[0]}
    metrics: dict[str, Metric] = {name: float(median(values)) for name, values in known.items() if values}
    whole = all(figures.completed == workload.load.count for each in taken.values() for figures, _ in each)
    if engine == SGLANG and not whole:
        metrics |= {f"{what}_verdict": "undecided" for what in MEASURES}
    elif engine == SGLANG:
        for what in MEASURES:
            found = difference([by[what] for _, by in taken[LAB]], [by[what] for _, by in taken[SGLANG]])
            metrics |= {f"{what}_ratio": found.ratio, f"{what}_verdict": found.verdict}
    return metrics
