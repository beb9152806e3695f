"""The choices bench: what each choice of the compiled form is worth, by taking it back alone.

A choice stays only while it pays. What it was predicted to gain was worked out before it was built: from the bytes that
it no longer moves over the bandwidth, from products measured alone, and from the launches that it saves, 2.5 us each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cglab.engine.workload import DecodeStep, steady_decode
from cglab.errors import ToggleError
from cglab.lab import steps
from cglab.lab.apart import runner_apart
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import CALLS, Progress, model_facts, silent, sustained
from cglab.measure.ab import interleave
from cglab.measure.record import Record, make_record, new_run
from cglab.models.body import Body, Portable, Taps
from cglab.models.compiled import Compiled, nothing_compiled
from cglab.models.ops import good_ops
from cglab.models.regions import Kernels, torch_kernels, written_kernels
from cglab.runners.base import Runner

WITHOUT: Mapping[str, str] = MappingProxyType({
    "compiled": "every choice",
    "library products": "without the linear layers for at most 16 rows: cuBLAS, and an activation of its own",
    "compiler's turn": "without the kernel for head norm, rotation and store: the compiler's own",
    "gathered attention": "without the paged attention kernel: the padded context is gathered, then SDPA",
    "portable": "without any: PyTorch's operators",
})  # fmt: skip
PREDICTED_MS: Mapping[tuple[str, int, str], float] = MappingProxyType({
    # Products: measured alone at 16.5, 13.5, 51.1 and 31.4 us a layer in cuBLAS, 13.6, 9.7, 47.4 and 27.9 by one row.
    ("qwen3-8b", 1, "library products"): 0.57, ("qwen3-0.6b", 1, "library products"): 0.46,
    # At 16 rows: 2.6 us less for three of them, and 3.6 with the activation's pass for the fourth.
    ("qwen3-8b", 16, "library products"): 0.22,
    # Turn: two launches less a layer; at 16 rows 5.5 + 2.4 + 1.4 + 1.5 us become 3.
    ("qwen3-8b", 1, "compiler's turn"): 0.18, ("qwen3-0.6b", 1, "compiler's turn"): 0.14,
    ("qwen3-8b", 16, "compiler's turn"): 0.25,
    # Attention: 1024 tokens read, written and read again by each request, where 512 are read.
    ("qwen3-8b", 16, "gathered attention"): 1.5,
})  # fmt: skip
"""Milliseconds that a choice was predicted to save on an H200, context 512 in a cache of 1024, where it was."""


class _Gathered:
    """The compiled body under a decode step that attends as the portable one does."""

    name, compile_seconds, compilations = "portable", 0.0, 0

    def __init__(self, body: Compiled) -> None:
        self._body = body
        self.carries, self.through, self.finish = body.carries, body.through, body.finish

    def __call__(
        self, model: Any, hidden: Tensor, turn: Tensor, attend: Any, taps: Taps | None = None
    ) -> Tensor:
        return self._body(model, hidden, turn, attend, taps)


def choices(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 16),
) -> Iterator[Record]:
    """A captured decode step by the compiled form, and by it without each of its choices, in turns.

    Args:
        device: what is measured; it must be able to use the compiled form.
        quick: fewer samples of the shipped model.
        progress: called with a line for every form and size.
        models: names; by default the two Qwen3 shapes.
        batches: of the steps, each at 512 tokens.

    Yields:
        A record for each form at each size.

    Raises:
        ToggleError: on a device that cannot use the compiled form.
    """
    if (why := good_ops(device)["compiled"]) is not None:
        raise ToggleError(f"the choices bench takes the compiled form apart, and {why}; run it on a GPU")
    run = new_run()
    for name in models or (("pico-gqa",) if quick else ("qwen3-8b", "qwen3-0.6b")):
        with open_lab(name, device=device, ops="compiled") as lab:
            bodies = _bodies(lab, progress)
            for batch in batches:
                progress(f"{name}: batch {batch}")
                with steady_decode(lab.engine, batch, min(512, lab.max_context // 2)) as step:
                    yield from _point(lab, bodies, step, run, repeats=3 if quick else 5)


def _bodies(lab: Lab, progress: Progress) -> dict[str, Body]:
    """The forms by name; all are compiled."""
    ours, theirs = written_kernels(), torch_kernels()
    whole = lab.model.body
    if not isinstance(whole, Compiled):
        raise ToggleError(f"the lab computes in {lab.ops}; open it with ops='compiled'")
    made: dict[str, Body] = {"compiled": whole}
    mixed = {
        "library products": Kernels(theirs.thin_linear, ours.turn_and_store),
        "compiler's turn": Kernels(ours.thin_linear, theirs.turn_and_store),
    }
    for name, kernels in mixed.items():
        progress(f"{lab.name}: compile {name}")
        body = Compiled(lab.config, kernels=kernels)
        body.prepare(lab.model, lab.engine.kv)
        made[name] = body
    return {**made, "gathered attention": _Gathered(whole), "portable": Portable()}


def _point(
    lab: Lab, bodies: Mapping[str, Body], step: DecodeStep, run: str, *, repeats: int
) -> Iterator[Record]:
    whole = lab.model.body
    with ExitStack() as kept:
        runners: dict[str, Runner[Any]] = {}
        logits: dict[str, Tensor] = {}
        parity = {}
        try:
            for name, body in bodies.items():
                lab.model.body = body  # read at capture, and by the eager oracle
                runner = kept.enter_context(runner_apart(lab, "decode", "full", [step.live]))
                runner.capture()
                runners[name] = runner
                parity[name] = steps.step_parity(runner, step).as_dict()
                logits[name] = runner.run(step.live, **step.inputs)[1].float().clone()
        finally:
            lab.model.body = whole
        with nothing_compiled(lab.model):
            times = interleave(
                {name: sustained(runner, step, lab.device, CALLS) for name, runner in runners.items()},
                repeats=repeats, warmup=1,
            )  # fmt: skip
        largest = float(logits["portable"].abs().max())
        for name in runners:
            found = times[name]
            off = float((logits[name] - logits["portable"]).abs().max())
            metrics: dict[str, Any] = {
                "step_ms": None if found.median is None else found.median * 1e3, "ratio_to_compiled": found.ratio,
                "verdict": found.verdict, "logits_off": off / largest,
                "predicted_gain_ms": PREDICTED_MS.get((lab.name, step.live, name)),
            }  # fmt: skip
            if found.median is not None and times["compiled"].median is not None:
                metrics["gained_ms"] = (found.median - times["compiled"].median) * 1e3
            yield make_record(
                bench="choices", arm=name, device=lab.device, run=run, metrics=metrics, parity=parity[name],
                samples={"step_ms": [s * 1e3 for instance in found.instances for s in instance]},
                workload=lab.describe(step), notes=WITHOUT[name], **model_facts(lab),
            )  # fmt: skip
