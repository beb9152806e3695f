"""A runner of an open lab's model, in a pool of its own: captured, measured and given back without touching the lab."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cglab.graphs.options import Options
from cglab.graphs.recorder import Recorder
from cglab.lab.facade import Lab
from cglab.lab.techniques import technique
from cglab.runners.base import GraphGroup, Runner
from cglab.runners.decode import DecodeRunner
from cglab.runners.prefill import PrefillRunner


@contextmanager
def runner_apart(
    lab: Lab,
    phase: str,
    mode: str,
    buckets: Sequence[int] | None = None,
    *,
    recorder: Recorder | None = None,
) -> Iterator[Runner[Any]]:
    """A runner that has captured nothing yet; ``capture`` records all its buckets in one go.

    Args:
        lab: an open lab.
        phase: ``decode`` or ``prefill``.
        mode: ``full``, ``breakable`` or ``eager``.
        buckets: sizes; None for the lab's list.
        recorder: records on the lab's device; None for the usual one.

    Raises:
        ToggleError: for an unknown phase or mode.
    """
    technique(phase).check(mode)
    group = GraphGroup(lab.device)
    if recorder is not None:
        group.recorder = recorder
    try:
        made = DecodeRunner if phase == "decode" else PrefillRunner
        listed = lab.buckets if phase == "decode" else lab.prefill_buckets
        runner = made(lab.model, lab.engine.kv, group, buckets or listed, Options(mode))
        try:
            yield runner
        finally:
            runner.close()
    finally:
        group.close()
