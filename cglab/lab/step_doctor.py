"""The doctor on a step of the lab's own: what its runner knows about it is told, so that nothing is a false alarm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cglab.graphs.doctor import examined
from cglab.graphs.doctor_findings import Report
from cglab.runners.base import Runner


def examine_step(runner: Runner[Any], live: Any, inputs: dict[str, Tensor]) -> Report:
    """What would break a capture of one step, at its live size.

    The runner draws the other valid inputs, as a request row or a cache slot is no number like any other. Breaks are
    looked into where the runner has them recorded.

    Args:
        runner: of any technique; its recordings, if it has any, are not used.
        live: what the runner calls live.
        inputs: tensors by slot name.
    """
    given = {**inputs, **runner.derived(live)}
    with runner.during(live):
        return examined(runner.step, (), given, vary=runner.vary, inline_breaks=runner.backend == "full")
