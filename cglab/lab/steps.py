"""One step of a technique, held still: made, run by any runner, compared and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cglab.engine.draft_workload import steady_draft, steady_extend
from cglab.engine.engine import Engine
from cglab.engine.workload import Step, steady_decode, steady_prefill
from cglab.errors import ToggleError, no_such
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.lab.draft_round import Round
from cglab.lab.techniques import DRAFTING, SPARSE, technique
from cglab.measure.parity import Parity, compare_logits, compare_tokens, worst
from cglab.runners.base import Runner

PREFILLS = ("prefill", *SPARSE, "draft_extend")
"""Techniques whose step is one of prefill, or comes after one."""
SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    **dict.fromkeys(("decode", *DRAFTING), ("batch", "context")),
    **dict.fromkeys(PREFILLS, ("tokens", "cached", "requests")),
})  # fmt: skip
"""What a step of a technique is measured by; the first counts the live rows of a bucket."""

Arm = Runner[Any] | Round
"""What takes its turn in a comparison."""

SHORTEST = 16
"""Tokens of the shortest prefill step that is swept unasked."""


def size_name(name: str) -> str:
    """What counts the live rows of a technique's step: ``batch`` or ``tokens``.

    Raises:
        ToggleError: for an unknown technique.
    """
    return SIZES[technique(name).name][0]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How large measured steps of a lab are, and can be.

    Attributes:
        buckets: batch sizes of decode, verify and draft steps, ascending.
        prefill_buckets: token counts of prefill steps, ascending.
        max_context: longest request, prompt and new tokens.
    """

    buckets: Sequence[int]
    prefill_buckets: Sequence[int]
    max_context: int

    def default(self, size: str) -> int:
        """A size that is not given."""
        return {
            "batch": min(4, self.buckets[-1]), "context": min(128, self.max_context),
            "tokens": min(128, self.largest("prefill")), "cached": 0, "requests": 1,
        }[size]  # fmt: skip

    def largest(self, name: str, requests: int = 1) -> int:
        """Most live rows of one step of a technique, that of prefill shared by ``requests``."""
        if name not in PREFILLS:
            return self.buckets[-1]
        return min(self.prefill_buckets[-1], requests * (self.max_context - 1))  # a new token each needs room

    def swept(self, name: str, requests: int = 1) -> list[int]:
        """Sizes that are measured unasked, ascending.

        Args:
            name: the toggle.
            requests: that share each prefill step; its sizes are multiples of it.

        Returns:
            Of prefill the largest, a quarter of it, and so on down to ``SHORTEST``; of others every bucket.
        """
        if name not in PREFILLS:
            return list(self.buckets)
        if isinstance(requests, bool) or not isinstance(requests, int) or requests < 1:
            raise ToggleError(
                f"requests={requests!r} share no step of {name}; give a whole number of at least 1"
            )
        sizes = [self.largest(name, requests) // requests * requests]
        while (smaller := sizes[-1] // 4 // requests * requests) >= SHORTEST:
            sizes.append(smaller)
        return sizes[::-1]


def chosen_sizes(name: str, given: Mapping[str, int | None], sizes: StepSizes) -> dict[str, int]:
    """The sizes of a technique's step, each as given or by default.

    Args:
        name: the toggle.
        given: ``tokens``, ``cached`` and ``requests`` of prefill, ``batch`` and ``context`` of others; None for the
            default.
        sizes: of the lab.

    Raises:
        ToggleError: for a size that the technique does not have, or that is no whole number.
    """
    known = SIZES[technique(name).name]
    if wrong := sorted(key for key, value in given.items() if value is not None and key not in known):
        raise ToggleError(no_such(f"size of {name}", wrong[0], known))
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ToggleError(f"{key}={value!r} is no size of {name}; give a whole number")
    return {key: sizes.default(key) if (value := given.get(key)) is None else value for key in known}


def fixed_step(
    engine: Engine, name: str, given: Mapping[str, int | None], sizes: StepSizes
) -> AbstractContextManager[Step]:
    """The step of a technique at a size.

    Args:
        engine: holds its requests.
        name: the toggle.
        given: see ``chosen_sizes``.
        sizes: of the lab.

    Raises:
        ToggleError: for a size that the technique does not have.
    """
    chosen = chosen_sizes(name, given, sizes)
    if name in PREFILLS:
        steady = steady_extend if name == "draft_extend" else steady_prefill
        return steady(engine, chosen["tokens"], chosen["cached"], chosen["requests"])
    if name == "decode":
        return steady_decode(engine, chosen["batch"], chosen["context"])
    return steady_draft(engine, name, chosen["batch"], chosen["context"])


def describe(step: Step, arm: Arm) -> dict[str, Any]:
    """The workload of a step as it is recorded, with the bucket that serves it (None: it runs eager)."""
    runner = arm.last if isinstance(arm, Round) else arm
    bucket = next((size for size in runner.captured.buckets if size >= step.rows), None)
    return {**step.workload, "bucket": bucket}


def ledger_rows(arm: Arm) -> list[dict[str, Any]]:
    """What each captured bucket of an arm cost."""
    return arm.ledger_rows() if isinstance(arm, Round) else arm.captured.memory()


def run_step(arm: Arm, step: Step) -> tuple[Tensor, ...]:
    """Runs it; the tensors that come out."""
    return leaves(arm.run(step.live, **step.inputs))


def leaves(output: Any) -> tuple[Tensor, ...]:
    """The tensors of a step's output, without what this capture does not hand out."""
    parts = output if isinstance(output, tuple) else (output,)
    return tuple(part for part in parts if part is not None)


def timed(arm: Arm, step: Step, device: torch.device) -> Callable[[], float]:
    """Seconds of one run by the wall clock, the device waited for."""
    clock, run = clock_for(device, "wall"), partial(arm.run, step.live, **step.inputs)
    return lambda: sample_seconds(run, clock, repeats=1, warmup=0)[0]


def step_parity(arm: Arm, step: Step) -> Parity:
    """One captured step against the same step run eager at the padded size (oracle 1), every output."""
    if isinstance(arm, Round):
        return worst(_parity(runner, piece) for runner, piece in arm.pieces(step))  # type: ignore[arg-type]
    return _parity(arm, step)


def _parity(runner: Runner[Any], step: Step) -> Parity:
    before, size = runner.coverage().captured, runner.captured.pad(step.rows)
    got = [tensor.clone() for tensor in run_step(runner, step)]
    if isinstance(size, int) and runner.coverage().captured > before:
        want = runner.run_padded_eager(step.live, size, **step.inputs)
    else:  # it ran eager, at its live size
        want = runner.run_live_eager(step.live, **step.inputs)
    return compare_outputs(got, leaves(want))


def _in_rows(output: Tensor) -> Tensor:
    """An output of one number a row as a column."""
    return output.unsqueeze(-1) if output.dim() == 1 else output


def compare_outputs(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Parity:
    """The worst of a step's outputs: numbers as logits, the rest as tokens."""
    return worst(
        compare_logits(_in_rows(one), _in_rows(other))
        if one.is_floating_point()
        else compare_tokens(one.view(len(one), -1).tolist(), other.view(len(other), -1).tolist())
        for one, other in zip(got, wanted, strict=True)
    )
