"""The recorded benches: each measures its arms in turns and returns result records.

A bench says what it did with its own numbers: times unprofiled, busy time from a run apart, parity and coverage
beside them, and what was predicted from the eager trace before anything was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from cglab.lab import suites
from cglab.lab.capture_bench import capture
from cglab.lab.checking import CASES, check_technique
from cglab.lab.choices_bench import choices
from cglab.lab.decode_bench import decode
from cglab.lab.growth_bench import growth
from cglab.lab.load_bench import load
from cglab.lab.mtp_bench import mtp
from cglab.lab.planner_bench import planner
from cglab.lab.prefill_bench import prefill
from cglab.lab.recovery import recovery_sweep
from cglab.lab.replay_bench import replay
from cglab.lab.request_cases import LOAD, check_requests
from cglab.lab.step_metrics import Progress, silent
from cglab.lab.ttft_bench import ttft
from cglab.lab.verdicts import TechniqueParity
from cglab.measure.record import Record, make_record, new_run
from cglab.models.ops import good_ops


@dataclass(frozen=True)
class Bench:
    """One bench.

    Attributes:
        text: what it measures.
        run: called with the device, ``quick`` and a progress function; gives the records, each when it is made.
    """

    text: str
    run: Callable[..., Iterable[Record]]


def recovery(device: torch.device, *, quick: bool = False, progress: Progress = silent) -> list[Record]:
    """An exception at recorded operations of a captured decode step; after each, a right step and a right capture.

    Args:
        device: where it runs.
        quick: first, last and a few operations instead of all.
        progress: called with a line for every mode.
    """
    records, run = [], new_run()
    for mode in ("full", "breakable"):
        progress(f"recovery of a {mode} capture")
        swept = recovery_sweep(device, mode, sample=6 if quick else None)
        records.append(
            make_record(
                bench="recovery", arm=mode, device=device, run=run,
                model="pico-gqa", weights="trained", dtype="float32",
                metrics={
                    "operations": float(swept.operations), "tried": float(len(swept.tried)),
                    "failed": float(len(swept.failed)), "ok": not swept.failed,
                    "memory_growth_bytes": float(swept.growth),
                },
                notes="; ".join(swept.failed[:5]),
            )
        )  # fmt: skip
    return records


def parity(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    techniques: Sequence[str] = tuple(CASES),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    cases: int = 2000,
    seed: int = 0,
    ops: Sequence[str] | None = None,
) -> Iterator[Record]:
    """Random sequences of batches of each technique against the three oracles, a quarter as many in low precision.

    Args:
        device: the recorder follows from it.
        quick: few sequences.
        progress: called with a line for every dtype.
        techniques: which are checked.
        dtypes: of weights and computation.
        cases: sequences in float32.
        seed: of the sequences.
        ops: forms in which the model computes; None for all that the device can use.

    Yields:
        A record for each technique, dtype and form.
    """
    run, cases = new_run(), 20 if quick else cases
    for name, dtype, form in product(techniques, dtypes, _forms(ops, device)):
        progress(f"parity of {name} in {dtype}, {form}")
        count = cases if dtype == torch.float32 else max(cases // 4, 1)
        found = check_technique(name, count, device=device, dtype=dtype, seed=seed, ops=form)
        yield make_record(
            bench="parity", arm=name, device=device, run=run, model="pico-gqa", weights="trained",
            dtype=found.dtype, workload={"cases": found.cases, "seed": seed, "ops": form}, metrics=_flat(found),
            notes="; ".join(map(str, found.mismatches[:3])),
        )  # fmt: skip


def requests(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    reuse: Sequence[bool] = (True, False),
    ops: Sequence[str] | None = None,
) -> Iterator[Record]:
    """Requests at concurrency 8, in every mode of both phases, against the three oracles.

    Args:
        device: the recorder follows from it.
        quick: few requests in one mode.
        progress: called with a line for every mode.
        dtypes: of weights and computation.
        reuse: with a shared prefix computed once, and without.
        ops: forms in which the model computes; None for all that the device can use.

    Yields:
        A record for each pair of modes.
    """
    run = new_run()
    options: dict[str, Any] = (
        {"load": replace(LOAD, count=8), "modes": [("full", "breakable")]} if quick else {}
    )
    for dtype, reused, form in product(dtypes, reuse, _forms(ops, device)):
        checked: dict[str, Any] = {"prefix_reuse": reused, "dtype": dtype, "ops": form, "progress": progress}
        for found in check_requests(device, **checked, **options):
            yield make_record(
                bench="requests", arm=found.technique, device=device, run=run, model="pico-gqa",
                weights="trained", dtype=found.dtype, metrics=_flat(found),
                workload={**options.get("load", LOAD).as_dict(), "prefix_reuse": reused, "ops": form},
                notes="; ".join(map(str, found.mismatches[:3])),
            )  # fmt: skip


def _forms(ops: Sequence[str] | None, device: torch.device) -> Sequence[str]:
    """The forms that were asked for, or all that the device can use."""
    return ops or [name for name, why in good_ops(device).items() if why is None]


def _flat(found: TechniqueParity) -> dict[str, Any]:
    """A verdict as metrics: numbers as floats, lists left out."""
    metrics: dict[str, Any] = {"ok": found.ok}
    for name, value in found.as_dict().items():
        if isinstance(value, bool | str):
            metrics[name] = value
        elif isinstance(value, int | float):
            metrics[name] = float(value)
    return metrics


BENCHES: Mapping[str, Bench] = {
    "decode": Bench(
        "decode step: eager, full, breakable and transformers in turns; launches, gaps, floor, capture cost",
        decode,
    ),
    "choices": Bench(
        "captured decode step with each choice of the compiled form taken back, in turns; predicted and found gain",
        choices,
    ),
    "growth": Bench(
        "decode step, eager and full in turns, by batch and context; its terms beside their least", growth
    ),
    "prefill": Bench(
        "prefill step: the arms in turns at several sizes; wall over busy, breaks, padding",
        prefill,
    ),
    "capture": Bench(
        "all buckets captured in one go: seconds and bytes, where they go, and how they grow", capture
    ),
    "replay": Bench("what a replay costs the host over the bare graph's, verb by verb", replay),
    "ttft": Bench("time to first token under concurrency, prefill eager, breakable and full in turns", ttft),
    "load": Bench(
        "three loads with decoding, prefill eager and breakable in turns: latency, occupancy", load
    ),
    "mtp": Bench(
        "loads with drafts, the assistant's seed step eager, captured and fused in turns: rates, TPOT, TTFT",
        mtp,
    ),
    "planner": Bench("the best buckets for the traces of three loads, beside SGLang's list", planner),
    "recovery": Bench(
        "a fault at every recorded operation of a capture, and what is left afterwards", recovery
    ),
    "parity": Bench("random sequences of batches against the three oracles", parity),
    "requests": Bench("whole requests in every mode against the three oracles", requests),
    "notebooks": Bench("every notebook under nbval, on the model of CGLAB_MODEL", suites.notebooks),
    "gpu-tests": Bench("the tests that need a CUDA device", suites.gpu_tests),
}
