"""The differential bench: very many random steps of every technique, each beside the same padded step run eagerly.

The parity bench holds a step against three oracles and takes a dozen runs for it. Here it is one run, to the bit, on
models so small that a hundred thousand steps take half an hour: what goes wrong once in ten thousand steps, such as a
stale row or a pool that wanders, needs many of them and no more. The sequences are those of the parity bench:
requests come, grow and end, steps fit a bucket, miss it, or are above the largest.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from cglab.errors import InputError
from cglab.graphs.coverage import Reason
from cglab.graphs.options import ManyShapesWarning
from cglab.graphs.out_forms import same_bits
from cglab.lab.checking import CASES, LATENT, LATENT_ALONE
from cglab.lab.deviations import Deviation
from cglab.lab.oracles import Outcome, R, Step, StepOracles, head
from cglab.lab.step_metrics import Progress, silent
from cglab.lab.steps import leaves
from cglab.lab.techniques import technique
from cglab.measure.record import Record, make_record, new_run
from cglab.models.config import ModelConfig
from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import LoadedModel, find_model, random_model

STEPS: Final = 100_000
QUICK_STEPS: Final = 500
SHAPE: Final = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128, qk_norm=True, tie_embeddings=False,
)  # fmt: skip
"""As small as has all that a decoder has."""
ROUNDING: Final = 1e-4
"""More than another order of sums changes numbers of about one, and less than any wrong row does; measured: 1e-6."""

OF_SIZE: Final = {
    Reason.ABOVE_LARGEST.name, Reason.ABOVE_LIMIT.name, Reason.SIZE_NOT_CAPTURED.name, Reason.WASTE_CEILING.name,
}  # fmt: skip
"""Why a step runs eager whose size is none of a bucket."""
MISSES: Final = OF_SIZE | {Reason.MORE_KEYS.name}
"""Why steps of the sequences run eager; any other reason, such as a capture that failed, would hide what is wrong."""


class Differential(StepOracles[R]):
    """Put before the sequences of a technique, it holds every step against one eager run."""

    def check(self, runner: R, step: Step, where: dict[str, Any]) -> list[int]:
        """One step to the bit: all that it hands out, and every slot of the caches but those of the reserved page.

        Its inputs are to stay as they were, and one that ran eager needs a reason that the sequences give it.

        It is held against the same step, eager, over inputs that are padded here to its bucket: what loads, pads and
        trims a step is under test. One that ran eager is held against itself at its live size.

        Returns:
            What it hands out first: the tokens, where a sequence goes on from them.
        """
        state, before, reasons = self._state(), runner.coverage().captured, Counter(runner.coverage().reasons)
        given = {name: value.clone() for name, value in step.inputs.items()}
        output = runner.run(step.live, **step.inputs)
        replayed = runner.coverage().captured - before
        if written := [name for name, value in given.items() if not same_bits(step.inputs[name], value)]:
            self._off(Deviation(1, where, f"the step wrote to its inputs {', '.join(written)}"))
        if not replayed:
            self._missed(runner, step, set(Counter(runner.coverage().reasons) - reasons), where)
        self.result.steps += 1
        self.result.captured += replayed
        live, size = step.rows * self.width, step.rows
        if wrong := [leaf.shape[0] for leaf in leaves(output) if leaf.shape[0] != live]:
            self._off(Deviation(1, where, f"{wrong[0]} rows came out for {live} live ones"))
        got = {name: value.clone() for name, value in self._named(head(output, live)).items()}
        if replayed:
            size = min(n for n in runner.serving(step.live).captured.captured_sizes if n >= step.rows)
        self.restore(state)
        step = replace(step, inputs=given)  # not what the run may have made of them
        eager = runner.run_live_eager(step.live, **self._padded(step, size))
        wanted = self._named(head(eager, live))
        if got.keys() != wanted.keys():
            self._off(
                Deviation(1, where, f"{', '.join(sorted(got.keys() ^ wanted.keys()))}: of one run only")
            )
            return got["output 0"].flatten().tolist()
        if replayed and (self.technique, runner.backend) == ("prefill", "full"):
            # Recorded attention has a request axis, and sums in another order than what a break runs.
            self._close(got, wanted, where)
            self.restore(state)
            wanted = self._named(runner.run_padded_eager(step.live, size, **step.inputs))
        self._same(1, got, wanted, where)
        return got["output 0"].flatten().tolist()

    def _missed(self, runner: R, step: Step, why: set[str], where: dict[str, Any]) -> None:
        """An eager step is right by itself, so it shows something only where it had to be eager."""
        exact = step.rows in runner.serving(step.live).captured.buckets
        if not why or why - MISSES or (exact and why & OF_SIZE):
            told = f"{step.rows} rows ran eager, for {', '.join(sorted(why)) or 'no reason'}"
            self._off(Deviation(1, where, told))

    def _close(self, got: Outcome, wanted: Outcome, where: dict[str, Any]) -> None:
        for name, value in got.items():
            far = float((value - wanted[name]).abs().max())
            if not far <= ROUNDING:
                self._off(Deviation(2, where, f"{name} is off by {far:.3g}, which is no rounding", far=far))

    def _named(self, output: Any) -> Outcome:
        return {f"output {place}": leaf for place, leaf in enumerate(leaves(output))} | self._beside_padding()


def differential(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    techniques: Sequence[str] = tuple(CASES),
    steps: int = STEPS,
    seed: int = 0,
) -> Iterator[Record]:
    """Random steps of all techniques, in every backend, form and padding, beside padded eager in float32.

    Args:
        device: the recorder follows from it: the tape on a CPU.
        quick: few steps.
        progress: called with a line for every technique.
        techniques: which; all of them by default.
        steps: of all together, in equal shares.
        seed: of weights, caches and sequences.

    Yields:
        A record for each technique, and one of all together; ``ok`` says that no bit differed and that every runner
        replayed steps.

    Raises:
        InputError: for fewer steps than a share takes.
        ToggleError: for an unknown technique.
    """
    run, steps = new_run(), QUICK_STEPS if quick else steps
    names = [technique(name).name for name in techniques]
    share = -(-steps // len(names))
    if share < 1:
        raise InputError(f"steps={steps} leave nothing for {len(names)} techniques; give one each or more")
    records: list[Record] = []
    for name in names:
        progress(f"{share} steps of {name}")
        records.append(_record(name, share, device, seed, run))
        yield records[-1]
    total = {
        figure: sum(float(record.metrics[figure] or 0) for record in records)
        for figure in ("sequences", "total_steps", "captured", "arms", "different", "seconds")
    }
    yield make_record(
        bench="differential", arm="all", device=device, run=run, weights="random", dtype="float32",
        workload={"steps": steps, "seed": seed, "techniques": names},
        metrics=total | {"ok": all(record.metrics["ok"] is True for record in records)},
    )  # fmt: skip


def _record(name: str, steps: int, device: torch.device, seed: int, run: str) -> Record:
    started = time.perf_counter()
    found = compared(name, steps, device, seed)
    counts, result = found.counts.values(), found.result
    return make_record(
        bench="differential", arm=name, device=device, run=run, model=result.model, weights="random",
        dtype=result.dtype, workload={"steps": steps, "seed": seed, "ops": result.ops},
        metrics={
            "sequences": float(result.cases), "total_steps": float(result.steps), "captured": float(result.captured),
            "arms": float(len(counts)), "least_captured": float(min(each.captured for each in counts)),
            "different": float(len(found.deviations)), "seconds": time.perf_counter() - started,
            "ok": not found.deviations and all(each.captured for each in counts),
        },
        notes="; ".join(map(str, found.deviations[:3])),
    )  # fmt: skip


def compared(name: str, steps: int, device: torch.device, seed: int = 0) -> StepOracles[Any]:
    """Runs sequences of a technique until so many steps were compared.

    Args:
        name: of the technique.
        steps: at least; the last sequence is not cut short.
        device: where they run.
        seed: of weights, cache and sequences.

    Returns:
        What was counted, and what differed; its runners are closed.
    """
    with opened_small(name, Differential, device, seed) as oracles:
        number = 0
        while oracles.result.steps < steps:
            oracles.case(number)
            number += 1
        found: StepOracles[Any] = oracles
    return found


@contextmanager
def opened_small(
    name: str, check: type[Any], device: torch.device, seed: int = 0, *, latent: bool = False
) -> Iterator[Any]:
    """A technique's sequences on a model as small as can be, closed at the end.

    Args:
        name: of the technique.
        check: a ``StepOracles`` whose ``check`` is done at every step, in place of the three oracles.
        device: where they run.
        seed: of weights, cache and sequences.
        latent: a model with latent attention; what only such a model has needs no word.
    """
    latent = latent or name in LATENT_ALONE
    small = _latent() if latent else SHAPE
    loaded = LoadedModel(
        random_model(small, device=device, dtype=torch.float32, seed=seed), small, None, "random"
    )
    made = type(f"{check.__name__}{CASES[name].__name__}", (check, CASES[name]), {})
    oracles = made(loaded, device, seed, "portable")
    oracles.result.model = "latent and tiny" if latent else "tiny"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ManyShapesWarning)  # runners of exact sizes are among them
            yield oracles
    finally:
        oracles.close()


def _latent() -> DsaConfig:
    """The shipped tiny shape with latent attention, less a layer: one dense, one with experts, one that shares."""
    shape = find_model(LATENT).config
    if not isinstance(shape, DsaConfig):
        raise InputError(f"{LATENT} has no latent attention; its config.json is not the one that was shipped")
    return replace(shape, num_layers=3)
