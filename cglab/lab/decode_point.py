"""One size of the decode step by several arms in turns: its records, whatever bench asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cglab.engine.workload import DecodeStep
from cglab.lab.facade import Lab
from cglab.lab.floor import bytes_read, kv_bytes
from cglab.lab.step_metrics import (
    UNCAPTURED,
    bare_metrics,
    ledger_columns,
    ledger_metrics,
    model_facts,
    sustained,
    timed_metrics,
)
from cglab.lab.transformers_arm import ARM, TransformersArm
from cglab.measure.ab import interleave
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record
from cglab.measure.trace import Trace
from cglab.models.compiled import nothing_compiled


@dataclass(frozen=True)
class DecodeMeasuring:
    """How the decode steps of one bench are measured.

    Attributes:
        bench: name of its records.
        run: of its records.
        bandwidth: bytes a second that the device reads, measured in this run.
        arms: modes of the decode toggle, eager first.
        calls: steps in a row behind one sample.
        repeats: samples of an arm in one turn.
    """

    bench: str
    run: str
    bandwidth: float
    arms: Sequence[str]
    calls: int
    repeats: int

    def records(
        self, lab: Lab, step: DecodeStep, other: TransformersArm | None = None, *, notes: str = ""
    ) -> list[Record]:
        """Measures the arms at one size.

        Args:
            lab: an open lab; what an arm needs is captured if it was not.
            step: the size, held still.
            other: the eager step of ``transformers`` at this size, which then takes its turns too.
            notes: of the arms that capture nothing: on ``other``, or why there is none.

        Returns:
            A record for each arm; that of eager has its ratio to ``transformers``.
        """
        runners = {arm: lab.runner(arm) for arm in self.arms}
        before = {arm: runner.coverage().copy() for arm, runner in runners.items()}
        traces: dict[str, Trace] = {
            arm: profile(partial(runner.run, step.live, **step.inputs), steps=3, device=lab.device)
            for arm, runner in runners.items()
        }
        timed: dict[str, Callable[[], float]] = {
            arm: sustained(runner, step, lab.device, self.calls) for arm, runner in runners.items()
        }
        if other is not None:
            traces[ARM], timed[ARM] = other.trace(), other.timed(self.calls)
        with nothing_compiled(lab.model):  # B57, B58
            times = interleave(timed, repeats=self.repeats, warmup=1)
        floor, kv = bytes_read(lab.model, lab.config, step), kv_bytes(lab.model, lab.config, step)
        made = []
        for arm in timed:
            metrics: dict[str, Any] = {
                **timed_metrics(arm, times, traces, lab.device), "floor_ms": floor / self.bandwidth * 1e3,
                "floor_bytes": float(floor), "kv_bytes": float(kv), "bandwidth_tb_s": self.bandwidth / 1e12,
            }  # fmt: skip
            samples = {"step_ms": [s * 1e3 for instance in times[arm].instances for s in instance]}
            facts: dict[str, Any] = {"notes": notes if arm in UNCAPTURED else ""}
            if arm in runners:
                runner = runners[arm]
                ledger = runner.captured.ledger
                metrics |= {**ledger_metrics(ledger), **bare_metrics(runner, step, lab.device)}
                samples |= ledger_columns(ledger)
                if ledger:
                    metrics["compile_s"] = lab.compile_seconds
                facts |= {
                    "parity": None if arm == "eager" else lab.step_parity(arm, step).as_dict(),
                    "coverage": (runner.coverage() - before[arm]).as_dict(),
                }
            if arm == "eager" and other is not None and (ratio := times[ARM].ratio) is not None:
                metrics["ratio_to_transformers"] = 1 / ratio
            made.append(
                make_record(
                    bench=self.bench, arm=arm, device=lab.device, run=self.run, metrics=metrics, samples=samples,
                    workload={**lab.describe(step), "calls": self.calls}, **{**model_facts(lab), **facts},
                )
            )  # fmt: skip
        return made
