"""The workspace's bench on a lab: toggles set its captures, a run measures one step, one trace and one load.

It keeps no lab alive: a dashboard that is left over holds no model (N02). Its methods are the worker's to call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from cglab.engine.load import Load
from cglab.errors import CaptureError, ClosedError
from cglab.graphs.options import CaptureFailedWarning
from cglab.lab.available import Draft, draft_kind, in_load, unavailable
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.steps import PREFILLS, size_name
from cglab.lab.techniques import TECHNIQUES, technique
from cglab.measure.ab import schedule
from cglab.models.dsa_config import DsaConfig
from cglab.ui.sections import Results, Section, SectionName, compared_step, loaded, profiled
from cglab.ui.worker import Watch
from cglab.ui.workspace import Workload

REPEATS, INSTANCES = 5, 3
"""Few: the workspace is for looking, ``cglab bench`` for results."""

SHORT: Final = (Workload(4, 64, 8), Workload(4, 128, 32))
"""What is asked for at first, on a CPU and on a GPU: a run is over within seconds on either."""

EAGER: Final[Mapping[str, str]] = MappingProxyType({"pp_prefill": "off"})
"""What a toggle says that captures nothing, where that is not ``eager``."""

STEP_SHARE, TRACE_SHARE, LOAD_SHARE = 0.5, 0.2, 0.3
"""How much of a run's progress its comparison, its trace and its load are."""


class LabBench:
    """A bench on an open lab; see ``workspace.Bench``."""

    def __init__(self, lab: Lab) -> None:
        self._lab = weakref.ref(lab)
        draft = "" if lab.drafting is None else f", draft {lab.drafting.name}"
        self.title = f"{lab.name}{draft}, {lab.weights} weights, on {lab.device}"
        room, short = lab.max_context, SHORT[lab.device.type == "cuda"]
        new = min(short.new, max(1, room // 4))
        self.largest = Workload(lab.buckets[-1], room - 1, room - 2)
        self.default = Workload(lab.sizes.default("batch"), min(short.prompt, room - new), new)

    @property
    def lab(self) -> Lab:
        """The lab, if it is still there."""
        lab = self._lab()
        if lab is None:
            raise ClosedError("the lab of this dashboard is gone; open one and call its dashboard() again")
        return lab

    def modes(self) -> dict[str, str]:
        """Every toggle as the lab has it; one that this version lacks captures nothing."""
        return {
            name: value or EAGER.get(name, "eager") for name, value in self.lab.captures.as_dict().items()
        }

    def unavailable(self) -> dict[str, str]:
        """Reasons by toggle."""
        draft, latent = self._draft(self.lab), isinstance(self.lab.config, DsaConfig)
        found = {name: unavailable(name, draft, latent=latent) for name in TECHNIQUES}
        return {name: why for name, why in found.items() if why is not None}

    def choose(self, name: str, mode: str, workload: Workload) -> None:
        """Captures what the mode needs for the workload, if it is not there yet, then sets the lab's toggle.

        Raises:
            CaptureError: if nothing could be captured; the toggle is then as it was.
        """
        lab = self.lab
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureFailedWarning)  # told by the error below
            runner = lab.runner(mode, name)
            if mode != "eager":
                runner.capture_for(min(self._rows(name, workload), lab.sizes.largest(name)))
        captured = runner.captured
        if captured.failures and not captured.captured_sizes:
            raise CaptureError(f"{mode} cannot be captured: {next(iter(captured.failures.values()))}")
        setattr(lab.captures, name, mode)

    def run(self, name: str, modes: Mapping[str, str], workload: Workload, watch: Watch) -> Results:
        """Compares the mode of a toggle with eager, or eager with all its modes, and leaves the toggle as it was."""
        lab, mode = self.lab, modes[name]
        values = [value for value in technique(name).values if value != "eager"]
        arms = ("eager", *(values if mode == "eager" else [mode]))
        sizes: dict[str, Any] = (
            {"tokens": min(workload.prompt, lab.sizes.largest("prefill"))}
            if name in PREFILLS
            else {"batch": workload.batch, "context": workload.prompt}
        )
        steps = _Share(watch, STEP_SHARE, len(arms) * INSTANCES)
        compared = lab.compare(
            name,
            arms,
            instances=INSTANCES,
            repeats=REPEATS,
            progress=lambda arm, _: steps(f"timing {arm}"),
            **sizes,
        )
        watch("tracing", STEP_SHARE)
        traced = lab.profile(name, arms, repeats=1, **sizes)
        sections = compared_step(compared) | {"timeline": profiled(traced)}
        watch("running a load", STEP_SHARE + TRACE_SHARE)
        sections |= self._loaded(name, (arms[0], arms[1] if mode == "eager" else mode), workload, watch)
        parity = {arm: str(each.verdict) for arm, each in compared.parity.items()}
        return Results(compared.title, parity, sections, traced, compared)

    def _loaded(
        self, name: str, arms: Sequence[str], workload: Workload, watch: Watch
    ) -> dict[SectionName, Section]:
        """A load by each arm in turns; each arm runs once before, so that nothing is captured within a timed run."""
        lab = self.lab
        if why := in_load(name, self._draft(lab)):
            return {"users": Section(why), "occupancy": Section(why)}
        prompt, before = min(workload.prompt, lab.max_context - workload.new), getattr(lab.captures, name)
        asked = Load(2 * workload.batch, workload.batch, prompt, workload.new)
        runs: dict[str, list[LoadRun]] = {arm: [] for arm in arms}
        try:
            for turn, (instance, arm) in enumerate(schedule(tuple(arms), -1, INSTANCES)):
                share = STEP_SHARE + TRACE_SHARE + turn / (len(arms) * (INSTANCES + 1)) * LOAD_SHARE
                watch(f"load on {arm}", share)
                setattr(lab.captures, name, arm)
                run = lab.load(asked, watch=watch.check)
                runs[arm] += [run] if instance >= 0 else []
        finally:
            setattr(lab.captures, name, before)
        return loaded(runs)

    @staticmethod
    def _draft(lab: Lab) -> Draft | None:
        return None if lab.drafting is None else draft_kind(lab.drafting.model.config)

    def _rows(self, name: str, workload: Workload) -> int:
        """Live rows of a technique's step."""
        return workload.prompt if size_name(name) == "tokens" else workload.batch


class _Share:
    """Progress of equal turns within the first part of a job."""

    def __init__(self, watch: Watch, share: float, turns: int) -> None:
        self._watch, self._share, self._turns, self._taken = watch, share, turns, 0

    def __call__(self, what: str) -> None:
        self._watch(what, self._share * min(1.0, self._taken / self._turns))
        self._taken += 1
