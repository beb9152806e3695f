"""Parity as recorded benches: random sequences, whole requests, speculative requests, and faults in a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from cglab.errors import InputError
from cglab.lab.checking import CASES, LATENT_ALONE, check_technique, model_of
from cglab.lab.recovery import recovery_sweep
from cglab.lab.request_cases import LOAD, check_requests
from cglab.lab.speculative_cases import FORMS, check_speculation
from cglab.lab.step_metrics import Progress, silent
from cglab.lab.verdicts import TechniqueParity
from cglab.measure.record import Record, make_record, new_run
from cglab.models.config import ModelConfig
from cglab.models.loading import find_model
from cglab.models.ops import good_ops

DRAFTS = ("assistant", "block")
"""Kinds of draft whose speculation is checked."""
UNCOUNTED = (
    "Tokens per pass are over all passes, those that only repeat included: bench accept counts by the rule."
)


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
    forms = {name: _forms(ops, device, find_model(model_of(name)).config) for name in techniques}
    for name, dtype, form in ((n, d, f) for n, d in product(techniques, dtypes) for f in forms[n]):
        progress(f"parity of {name} in {dtype}, {form}")
        count = cases if dtype == torch.float32 else max(cases // 4, 1)
        found = check_technique(name, count, device=device, dtype=dtype, seed=seed, ops=form)
        yield make_record(
            bench="parity", arm=name, device=device, run=run, model=found.model,
            weights="random" if name in LATENT_ALONE else "trained", dtype=found.dtype,
            workload={"cases": found.cases, "seed": seed, "ops": form}, metrics=_flat(found),
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


def speculation(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    prompts: int = 20,
    new_tokens: int = 200,
    ops: Sequence[str] | None = None,
    topk: Sequence[int] = (1, 3),
    drafts: Sequence[str] = DRAFTS,
    padding: Sequence[bool] = (True, False),
) -> Iterator[Record]:
    """Held-out prompts drafted and verified, in every form of the steps, against plain decoding and three oracles.

    Args:
        device: the recorder follows from it.
        quick: few prompts and tokens, in the captured and padded forms.
        progress: called with a line for every form.
        dtypes: of weights and computation.
        prompts: how many, all at once.
        new_tokens: of each.
        ops: forms in which the models compute; None for all that the device can use.
        topk: candidates of a draft's steps, of 1 and 3.
        drafts: kinds of draft, of ``DRAFTS``; blocks have one candidate alone.
        padding: whether steps are padded to buckets, or captured at every size.

    Yields:
        A record for each form, dtype and ops.

    Raises:
        InputError: for candidates or a draft that there are none of, or if no form is left.
    """
    run = new_run()
    sizes = {"prompts": 5, "new_tokens": 10} if quick else {"prompts": prompts, "new_tokens": new_tokens}
    there = sorted({(DRAFTS[form.block], form.topk) for form in FORMS})
    asked = set(product(drafts, topk))
    if odd := {each for each in drafts if each not in DRAFTS} | (set(topk) - {each for _, each in there}):
        message = f"no form has {', '.join(sorted(map(str, odd)))}"
    elif not asked & set(there):
        message = f"no form has topk in {tuple(topk)} and drafts in {tuple(drafts)}"
    else:
        message = ""
    if message:
        good = ", ".join(f"drafts={draft} with topk={count}" for draft, count in there)
        raise InputError(f"{message}; there are {good}")
    forms = [
        form for form in FORMS
        if (DRAFTS[form.block], form.topk) in asked and form.padding in padding
        and (not quick or (form.padding and "eager" not in form))
    ]  # fmt: skip
    if not forms:
        raise InputError(
            f"no form is left with padding in {tuple(padding)}; a quick run has padded ones only"
        )
    for dtype, used in product(dtypes, _forms(ops, device)):
        checked = check_speculation(device, forms=forms, dtype=dtype, ops=used, progress=progress, **sizes)
        for form, found, accepted in checked:
            yield make_record(
                bench="speculation", arm=str(form).rsplit(", topk", 1)[0], device=device, run=run, model="pico-gqa",
                weights="trained", dtype=found.dtype,
                metrics=_flat(found) | {"tokens_per_pass": accepted.tokens_per_pass},
                workload={**sizes, "topk": form.topk, "padding": form.padding, "ops": used},
                notes="; ".join(map(str, found.mismatches[:3])) or UNCOUNTED,
            )  # fmt: skip


def _forms(
    ops: Sequence[str] | None, device: torch.device, config: ModelConfig | None = None
) -> Sequence[str]:
    """The forms that were asked for, or all that the device can use, those of the model if it is given."""
    good = [name for name, why in good_ops(device, config).items() if why is None]
    return good if ops is None else [name for name in ops if config is None or name in good]


def _flat(found: TechniqueParity) -> dict[str, Any]:
    """A verdict as metrics: numbers as floats, lists left out."""
    metrics: dict[str, Any] = {"ok": found.ok}
    for name, value in found.as_dict().items():
        if isinstance(value, bool | str):
            metrics[name] = value
        elif isinstance(value, int | float):
            metrics[name] = float(value)
    return metrics
