"""Faults in the captures of every runner: an exception at recorded operations, and memory that runs out at a bucket.

After each fault the caches are to hold what they held, the step runs eager with its reason and is right, the next
capture succeeds and replays to the bit, and no byte of the pool is lost. The step is drawn by the sequences of the
technique's own parity suite, so a technique that has one is swept, whatever runners it is made of.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from cglab.errors import CaptureError, CaptureMemoryError, InputError
from cglab.graphs import faults
from cglab.graphs.coverage import Reason
from cglab.graphs.options import CaptureFailedWarning
from cglab.graphs.out_forms import same_bits
from cglab.graphs.tape_pool import TapePool
from cglab.lab.checking import CASES, LATENT_ALONE, OF_LATENT
from cglab.lab.differential_bench import opened_small
from cglab.lab.oracles import R, Step, StepOracles
from cglab.lab.recovery import Swept, frozen_heap, spread
from cglab.lab.step_metrics import Progress, silent
from cglab.lab.steps import leaves
from cglab.lab.techniques import technique
from cglab.measure.memory import memory_now
from cglab.measure.record import Record, make_record, new_run
from cglab.runners.base import Runner

TRIES: Final = 40
"""Sequences in which a step that fits a bucket is looked for."""
SWEPT: Final = [(name, name in LATENT_ALONE) for name in CASES] + [
    (name, True) for name in OF_LATENT if name not in LATENT_ALONE
]
"""Techniques, and whether the model has latent attention: together these have every kind of runner."""
ALLOCATIONS: Final = 10
"""Operations of a bucket's capture that still find memory where it runs out."""
WHY_EAGER: Final = {Reason.CAPTURE_FAILED.name}

Arm = tuple[str, bool]
Results = dict[str, Tensor]


@dataclass
class SweptRunner(Swept):
    """What a sweep of one runner showed.

    Attributes:
        exhausted: buckets in whose capture memory ran out.
    """

    exhausted: list[int] = field(default_factory=list)


class Faulty(StepOracles[R]):
    """Put before the sequences of a technique, it plans faults in the capture for the first step that fits a bucket.

    Attributes:
        sample: operations to try, spread evenly, first and last among them; None for all.
        swept: by backend and padding.
    """

    sample: int | None = None
    swept: dict[Arm, SweptRunner]

    def check(self, runner: R, step: Step, where: dict[str, Any]) -> list[int]:
        """Sweeps a runner that was not, and leaves behind what the step, run eager, leaves."""
        arm = where["mode"], where["padding"]
        if arm not in self.swept and isinstance(runner.captured.pad(step.rows), int):
            found = _Sweep(self, arm, step).run()
            if found is not None:
                self.swept[arm] = found
        return leaves(runner.run_live_eager(step.live, **step.inputs))[0].flatten().tolist()


class _Sweep:
    """Faults in the capture for one step of one runner."""

    def __init__(self, oracles: Faulty[Any], arm: Arm, step: Step) -> None:
        self.oracles, self.arm, self.step = oracles, arm, step
        self.state = {name: cache.clone() for name, cache in oracles.caches().items()}
        self.failed: list[str] = []

    def run(self) -> SweptRunner | None:
        """All faults; None if this step replays nothing even without."""
        with self.fresh() as runner:
            with faults.planned(None) as plan:
                self.capture(runner, self.step.rows)
            self.eager = self.outcome(lambda: runner.run_live_eager(self.step.live, **self.step.inputs))
            self.replayed = self.outcome(lambda: runner.run(self.step.live, **self.step.inputs))
            if runner.captured.counts.reasons:
                return None
            buckets = list(runner.captured.buckets)
        level, count = self.level(), plan.seen
        tried = spread(count, self.oracles.sample)
        for index in tried:
            self.raises(index)
            self.lost(level, f"operation {index}")
        for size in buckets:
            self.runs_out(size)
            self.lost(level, f"no memory at bucket {size}")
        return SweptRunner(count, tried, self.failed, self.level() - level, buckets)

    def raises(self, index: int) -> None:
        """An exception at one operation; the step after it, and the capture after that."""
        told = f"operation {index}"
        with self.fresh() as runner, faults.planned(index) as plan:
            error = self.capture(runner, self.step.rows)
            if error is None or plan.seen <= index:  # not reached: something else was in its way
                self.failed.append(f"{told}: the fault did not fail the capture, which ended with {error}")
            self.untouched(told)
            self.right(runner, self.eager, WHY_EAGER, f"{told}, the eager step after it")
        with self.fresh() as runner:
            if error := self.capture(runner, self.step.rows):
                self.failed.append(f"{told}: the capture after it failed ({error.summary})")
            self.right(runner, self.replayed, set(), f"{told}, the replay after it")

    def runs_out(self, size: int) -> None:
        """No memory at one bucket: all others are captured, larger ones first, and serve."""
        told = f"no memory at bucket {size}"
        with self.fresh() as runner:
            for each in reversed(runner.captured.buckets):
                with faults.planned(ALLOCATIONS if each == size else None, torch.OutOfMemoryError):
                    error = self.capture(runner, each)
                if isinstance(error, CaptureMemoryError) != (each == size):
                    self.failed.append(f"{told}: the capture of bucket {each} ended with {error}")
            self.untouched(told)
            if runner.captured.captured_sizes != [each for each in runner.captured.buckets if each != size]:
                self.failed.append(f"{told}: captured are {runner.captured.captured_sizes}")
            mine = runner.captured.pad(self.step.rows) == size
            self.right(
                runner, self.eager if mine else self.replayed, WHY_EAGER if mine else set(), f"{told}, a step"
            )

    @contextmanager
    def fresh(self) -> Iterator[Runner[Any]]:
        """What serves the step, anew and with nothing captured; all that is made with it is closed too."""
        made = self.oracles.make_runners()
        runner = made[self.arm].serving(self.step.live)
        runner.captured.options = replace(runner.captured.options, lazy=True)  # one bucket at a time
        self.oracles.restore(self.state)
        try:
            runner.capture()
            yield runner
        finally:
            for each in made.values():
                each.close()
            self.oracles.restore(self.state)

    def capture(self, runner: Runner[Any], rows: int) -> CaptureError | None:
        """Captures the bucket for so many rows; the error in which that ends."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureFailedWarning)
                Runner.capture_for(runner, rows)  # its own bucket alone, where it has others to choose from
        except CaptureError as error:
            return error
        return None

    def outcome(self, run: Callable[[], Any]) -> Results:
        """What a step hands out, and leaves in the caches beside the reserved page; the caches go back."""
        found = {f"output {place}": leaf.clone() for place, leaf in enumerate(leaves(run()))}
        found |= {name: cache.clone() for name, cache in self.caches().items()}
        self.oracles.restore(self.state)
        return found

    def caches(self, state: Results | None = None) -> Results:
        """Keys and values beside the reserved page, as they are or were."""
        page = self.oracles.kv.page_size
        return {name: cache[:, page:] for name, cache in (state or self.oracles.caches()).items()}

    def untouched(self, told: str) -> None:
        """Fails a capture that left a trace in the caches."""
        was = self.caches(self.state)
        if odd := [name for name, cache in self.caches().items() if not same_bits(cache, was[name])]:
            self.failed.append(f"{told}: the failed capture wrote to {', '.join(odd)}")

    def right(self, runner: Runner[Any], wanted: Results, reasons: set[str], told: str) -> None:
        """Fails a step that is not to the bit what is wanted, or ran otherwise."""
        got = self.outcome(lambda: runner.run(self.step.live, **self.step.inputs))
        if set(runner.captured.counts.reasons) != reasons:
            self.failed.append(f"{told}: eager for {runner.captured.counts.reasons}, not for {reasons}")
        if not reasons and not runner.captured.counts.captured:
            self.failed.append(f"{told}: nothing was replayed")
        if odd := [name for name in wanted if not same_bits(got[name], wanted[name])]:
            self.failed.append(f"{told}: {', '.join(odd)} differ")

    def level(self) -> int:
        """Bytes that recordings hold."""
        gc.collect()
        pool = self.oracles.group.pool
        return memory_now(self.oracles.device, pool if isinstance(pool, TapePool) else None).allocated

    def lost(self, level: int, told: str) -> None:
        """Fails memory that did not come back."""
        if (grown := self.level() - level) > 0:
            self.failed.append(f"{told}: {grown} bytes more than before")


def sweep_faults(
    name: str,
    device: torch.device,
    *,
    sample: int | None = None,
    forms: int | None = None,
    seed: int = 0,
    latent: bool = False,
) -> dict[Arm, SweptRunner]:
    """Plans faults in the captures of every padded runner of a technique.

    Args:
        name: of the technique.
        device: the recorder follows from it.
        sample: operations to try of each runner; None for all.
        forms: runners of each backend, such as those of chains and of trees; None for all.
        seed: of weights, caches and the steps.
        latent: on a model with latent attention, whose runners may be others.

    Returns:
        What was tried and went wrong, by backend and padding.

    Raises:
        InputError: for a sample without both ends, or if no step was drawn that a runner replays.
    """
    if sample is not None and sample < 2:
        raise InputError(f"sample={sample} leaves out the first or the last operation; give 2 or more")
    with opened_small(name, Faulty, device, seed, latent=latent) as oracles, frozen_heap():
        oracles.sample, oracles.swept = sample, {}
        backends: dict[str, list[Arm]] = {}
        for mode, padding in oracles.runners:
            if padding:
                backends.setdefault(mode.split(",")[0], []).append((mode, padding))
        wanted = [arm for each in backends.values() for arm in each[:forms]]
        for arm in wanted:
            for number in range(TRIES):
                if arm in oracles.swept:
                    break
                where = {"case": number, "mode": arm[0], "padding": arm[1]}
                oracles.sequence(oracles.runners[arm], where)
                oracles.restore()
        if missed := [mode for mode, _ in wanted if (mode, True) not in oracles.swept]:
            raise InputError(
                f"{TRIES} sequences of {name} drew no step that {missed[0]} replays; try another seed"
            )
        swept: dict[Arm, SweptRunner] = oracles.swept
    return swept


def fault_bench(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    techniques: Sequence[str] = tuple(CASES),
    sample: int | None = None,
) -> Iterator[Record]:
    """Faults in the captures of every padded runner of every technique, on models as small as can be.

    Args:
        device: the recorder follows from it.
        quick: two operations of each runner instead of all.
        progress: called with a line for every technique.
        techniques: which; all of them by default.
        sample: operations of each runner, spread evenly; all of them by default.

    Yields:
        A record for each technique and kind of model; ``ok`` says that after every fault all was
        as it had been and came out right.

    Raises:
        ToggleError: for an unknown technique.
    """
    run = new_run()
    names = [technique(each).name for each in techniques]
    for name, latent in [each for each in SWEPT if each[0] in names]:
        progress(f"faults in the captures of {name}{', latent attention' * latent}")
        swept = sweep_faults(name, device, sample=2 if quick else sample, latent=latent)
        failed = [f"{mode}: {line}" for (mode, _), found in swept.items() for line in found.failed]
        yield make_record(
            bench="faults", arm=name, device=device, run=run, weights="random", dtype="float32",
            workload={"runners": [mode for mode, _ in swept], "latent": latent},
            metrics={
                "operations": float(sum(each.operations for each in swept.values())),
                "tried": float(sum(len(each.tried) for each in swept.values())),
                "exhausted": float(sum(len(each.exhausted) for each in swept.values())),
                "failed": float(len(failed)), "ok": not failed,
                "memory_growth_bytes": float(max(each.growth for each in swept.values())),
            },
            notes="; ".join(failed[:5]),
        )  # fmt: skip
