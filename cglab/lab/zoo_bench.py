"""The zoo bench: does a module that nobody here wrote capture, does it compute the same, and did the doctor know?

Each is examined by the doctor and captured; refused whole, it is captured with its breaks, where it has any. What was
captured is compared with eager bit by bit: at every bucket's own size, and padded, with eager over the padded rows.
A module that asks whether it is captured, and computes otherwise then, is told the same in both; how far that is from
what it computes outside of a capture is a figure beside the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cglab.errors import CaptureError, InputError, NotInstalledError, no_such
from cglab.graphs.breaks import Aside, eager_break, staged
from cglab.graphs.capture import CapturedFunction, capture
from cglab.graphs.capture_state import said_to_capture
from cglab.graphs.coverage import Coverage
from cglab.graphs.doctor import doctor
from cglab.graphs.doctor_findings import Finding
from cglab.graphs.slots import Slot
from cglab.lab import transformers_arm
from cglab.lab.step_metrics import Progress, silent
from cglab.lab.zoo import SPECIMENS, Inputs, Specimen
from cglab.measure.parity import Parity, compare_logits, worst
from cglab.measure.record import Record, make_record, new_run

PAD = 1
"""Of every slot: a token, a mask's and a number's valid value."""
SEED = 0
"""Of weights and inputs."""


class Capture(StrEnum):
    """How much of a module was captured."""

    WHOLE = "whole"
    WITH_BREAKS = "with breaks"
    REFUSED = "refused"


@dataclass
class Examined:
    """What was found out about one module.

    Attributes:
        verdict: how much of it was captured.
        findings: the doctor's, of the whole module.
        refusal: the error that the whole capture ended in; None where there was none.
        breaks: run between the segments of the largest bucket.
        operations: recorded for the largest bucket.
        parity: captured against eager, told alike whether it is captured; None where nothing was captured.
        from_plain: largest difference from eager that is told that it is not.
        coverage: of the compared steps.
    """

    verdict: Capture
    findings: Sequence[Finding]
    refusal: CaptureError | None = None
    breaks: int = 0
    operations: int = 0
    parity: Parity | None = None
    from_plain: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def foreseen(self) -> bool:
        """Whether the doctor said of exactly those modules that are not captured whole that a capture would fail."""
        return any(finding.refused for finding in self.findings) == (self.verdict is not Capture.WHOLE)


def examine(specimen: Specimen, device: torch.device) -> Examined:
    """Doctors, captures and compares one module.

    Args:
        specimen: what to make, and how it is called.
        device: the recorder follows from it.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        module = specimen.build().eval().to(device)
        most = max(specimen.buckets)
        example = _on(device, specimen.inputs(most))
        others = {rows: _on(device, specimen.inputs(rows)) for rows in range(1, most + 1)}
    findings = doctor(module, **example, **specimen.constants).findings
    try:
        with _captured(module, specimen, example, "full") as captured:
            return _compared(Examined(Capture.WHOLE, findings), captured, module, specimen, others)
    except CaptureError as error:
        refused = Examined(Capture.REFUSED, findings, error)
    if not specimen.breaks:
        return refused
    for path in specimen.breaks:
        part = module.get_submodule(path)
        part.forward = eager_break(part.forward)
    refused.verdict = Capture.WITH_BREAKS
    with _captured(module, specimen, example, "breakable") as captured:
        return _compared(refused, captured, module, specimen, others)


def _captured(module: nn.Module, specimen: Specimen, example: Inputs, backend: str) -> CapturedFunction:
    captured = capture(
        module, slots={name: Slot(pad=PAD) for name in example}, buckets=specimen.buckets, backend=backend,
        strict=True, clone=True, padding=specimen.padding,
    )  # fmt: skip
    captured.warm(**example, **specimen.constants)
    return captured


def _compared(
    found: Examined,
    captured: CapturedFunction,
    module: nn.Module,
    specimen: Specimen,
    inputs: dict[int, Inputs],
) -> Examined:
    sizes = sorted(specimen.buckets)
    parities: list[Parity] = []
    # What a module keeps from step to step is each one's own.
    untold, told = deepcopy(module), deepcopy(module)
    for rows, live in inputs.items():
        if not specimen.padding and rows not in sizes:
            continue
        bucket = next(size for size in sizes if size >= rows)
        padded = _padded(live, bucket) | dict(specimen.constants)
        with torch.no_grad():
            plain = _tensors(untold(**padded))
            with staged(Aside()), said_to_capture():
                wanted = _tensors(told(**padded))
        got = _tensors(captured(**live, **specimen.constants))
        parities += map(_parity, got, wanted)
        found.from_plain = max(found.from_plain, *(each.max_abs for each in map(_parity, got, plain)))
    recorded = captured.inspect(sizes[-1])
    found.breaks = sum(line.startswith("break ") for line in recorded)
    found.operations = len(recorded) - found.breaks
    found.parity, found.coverage = worst(parities), captured.coverage()
    return found


def _on(device: torch.device, inputs: Inputs) -> Inputs:
    return {name: value.to(device) for name, value in inputs.items()}


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _padded(inputs: Inputs, size: int) -> dict[str, Any]:
    return {
        name: torch.cat([value, value.new_full((size - len(value), *value.shape[1:]), PAD)])
        for name, value in inputs.items()
    }


def _parity(captured: Tensor, eager: Tensor) -> Parity:
    live = len(captured)
    return compare_logits(captured.reshape(live, -1), eager[:live].reshape(live, -1))


def zoo(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    modules: Sequence[str] | None = None,
) -> Iterator[Record]:
    """Doctors, captures and compares modules of ``transformers`` and ``torch.nn``.

    Args:
        device: the recorder follows from it: the tape on a CPU.
        quick: those of torch alone.
        progress: called with a module's name.
        modules: names in ``SPECIMENS``; None for all.

    Yields:
        A record for each module.

    Raises:
        InputError: for an unknown name.
        NotInstalledError: if ``transformers`` is asked for and not there.
    """
    known = [name for name, each in SPECIMENS.items() if not quick or each.package == "torch"]
    names = known if modules is None else modules
    if unknown := [name for name in names if name not in SPECIMENS]:
        raise InputError(no_such("module of the zoo", unknown[0], SPECIMENS))
    if not transformers_arm.installed() and any(SPECIMENS[name].package == "transformers" for name in names):
        raise NotInstalledError(
            "the zoo has models of transformers, which is not installed; pip install transformers, or name others: "
            f"modules={','.join(name for name, each in SPECIMENS.items() if each.package == 'torch')}"
        )
    run = new_run()
    for name in names:
        progress(name)
        yield _record(name, SPECIMENS[name], examine(SPECIMENS[name], device), device, run)


def _told(finding: Finding) -> str:
    """Kind, fact and line, without the folder of this machine."""
    place = "" if finding.place is None else f" ({Path(finding.place.file).name}, line {finding.place.line})"
    return f"{finding.kind}: {finding.fact}{place}"


def _record(name: str, specimen: Specimen, found: Examined, device: torch.device, run: str) -> Record:
    first = found.findings[0] if found.findings else None
    refusal = found.refusal
    return make_record(
        bench="zoo", arm="breakable" if found.verdict is Capture.WITH_BREAKS else "full", device=device, run=run,
        model=name, weights="random", dtype="float32",
        workload={
            "package": specimen.package, "buckets": list(specimen.buckets), "padding": specimen.padding,
            "breaks_at": list(specimen.breaks),
        },
        metrics={
            "captured": found.verdict.value, "operations": float(found.operations), "breaks": float(found.breaks),
            "from_plain_eager": found.from_plain if isfinite(found.from_plain) else None,
            "findings": float(len(found.findings)), "foreseen": found.foreseen,
            "first_finding": None if first is None else _told(first),
            "refusal": None if refusal is None else f"{type(refusal).__name__}: {refusal.summary}",
            "next_step": None if refusal is None else refusal.advice,
        },
        parity=None if found.parity is None else found.parity.as_dict(), coverage=found.coverage.as_dict(),
        notes="" if device.type == "cuda" else "captured on the tape",
    )  # fmt: skip
