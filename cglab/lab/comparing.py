"""``lab.compare`` and ``lab.profile``: one step held still, and each arm's turn at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cglab.engine.draft_workload import steady_speculation
from cglab.errors import ToggleError
from cglab.lab import steps
from cglab.lab.comparison import Comparison, Profile
from cglab.lab.profiles import save_profile, trace_path
from cglab.lab.techniques import check_arms, technique
from cglab.measure.ab import Progress, interleave
from cglab.measure.profiling import profile
from cglab.models.compiled import nothing_compiled

if TYPE_CHECKING:
    from cglab.lab.facade import Lab

Sizes = Mapping[str, int | None]
WHOLE = "speculative"
"""What a profile of whole speculative steps calls its technique."""
IN_WHOLE = ("seed_step", "draft_sampler")
"""Techniques whose arms are also shown so."""


class Turns(NamedTuple):
    """How arms take turns; see ``measure.ab.interleave``."""

    instances: int
    repeats: int
    progress: Progress | None = None


def compare(lab: Lab, name: str, arms: Sequence[str], sizes: Sizes, turns: Turns) -> Comparison:
    """See ``Lab.compare``."""
    checked = check_arms(name, arms)
    made = {arm: lab.phases.arm(name, arm) for arm in checked}
    with steps.fixed_step(lab.engine, name, sizes, lab.sizes) as step, nothing_compiled(*lab.models):
        before = {arm: runner.coverage().copy() for arm, runner in made.items()}
        parity = {arm: steps.step_parity(made[arm], step) for arm in checked if arm != "eager"}
        times = interleave(
            {arm: steps.timed(runner, step, lab.device) for arm, runner in made.items()},
            **turns._asdict(),
        )
        workload = lab.describe(step, name)
    return Comparison(
        name, lab.name, workload, lab.group.recorder.name, times, parity,
        {arm: runner.coverage() - before[arm] for arm, runner in made.items()},
        {arm: steps.ledger_rows(runner) for arm, runner in made.items()},
    )  # fmt: skip


def trace_whole(
    lab: Lab, name: str, arms: Sequence[str], sizes: Sizes, *, repeats: int, save: str | Path | None
) -> Profile:
    """See ``Lab.profile``: arms of one toggle of drafts, each in a whole speculative step."""
    name = technique(name).name
    if name not in IN_WHOLE:
        raise ToggleError(
            f"whole steps are traced by arm of {' or '.join(IN_WHOLE)}, not of {name}; profile one of them, "
            "or leave whole out"
        )
    checked, toggle, traces = check_arms(name, arms), getattr(lab.captures, name) or "eager", {}
    batch, context = steps.chosen_sizes(name, sizes, lab.sizes).values()
    workload = {"batch": batch, "context": context, "cache": lab.max_context, "ops": lab.ops, **lab.drafted}
    try:
        for arm in checked:
            setattr(lab.captures, name, arm)
            lab.phases.for_decoding()  # captured now, and not within a trace
            kept = save and trace_path(save, WHOLE, arm)
            with steady_speculation(lab.engine, batch, context) as run:
                traces[arm] = profile(run, steps=repeats, device=lab.device, save=kept)
    finally:
        setattr(lab.captures, name, toggle)
    made = Profile(WHOLE, lab.name, workload, traces)
    if save is not None:
        save_profile(made, save, lab.device)
    return made


def trace(
    lab: Lab, name: str, arms: Sequence[str], sizes: Sizes, *, repeats: int, save: str | Path | None
) -> Profile:
    """See ``Lab.profile``."""
    checked, traces = check_arms(name, arms), {}
    with steps.fixed_step(lab.engine, name, sizes, lab.sizes) as step:
        for arm in checked:
            run = partial(lab.phases.arm(name, arm).run, step.live, **step.inputs)
            kept = save and trace_path(save, name, arm)
            traces[arm] = profile(run, steps=repeats, device=lab.device, save=kept)
        made = Profile(name, lab.name, lab.describe(step, name), traces)
    if save is not None:
        save_profile(made, save, lab.device)
    return made
