"""Which buckets to capture for a recorded trace, from what a runner's buckets were measured to cost.

The search is ``graphs.planner``: exact, under budgets. Here its inputs are put together from measurements, and its
answer is shown beside SGLang's list on the same trace. By default the plan may take as much graph memory as that
list takes, so the list is one of the sets compared and the plan is never slower.

Costs between measured sizes are interpolated along straight lines, and the plan says of which sizes. Nothing is
extrapolated: a size beyond what was measured is no candidate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cglab.errors import InputError, no_such
from cglab.graphs.buckets import BucketRule, sglang_decode, sglang_prefill, sglang_speculative
from cglab.graphs.planner import BucketBudget, BucketOutcome, BucketPlan, plan_buckets, run_trace
from cglab.lab.bucket_costs import MeasuredCosts
from cglab.lab.size_trace import SizeTrace
from cglab.lab.techniques import DRAFTING
from cglab.lab.views import draw

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """How SGLang captures a phase.

    Attributes:
        sizes: its list of buckets.
        ceiling: largest bucket over live size that it replays; None for any.
        unit: what a size counts.
    """

    sizes: BucketRule
    ceiling: float | None
    unit: str


PHASES: Mapping[str, PhaseRule] = MappingProxyType({
    "decode": PhaseRule(sglang_decode, None, "requests"),
    **dict.fromkeys(DRAFTING, PhaseRule(sglang_speculative, None, "requests")),
    "prefill": PhaseRule(sglang_prefill, 2.0, "tokens"),
})  # fmt: skip
"""SGLang's rule for each phase; its ceiling holds in prefill only (P7)."""


@dataclass(frozen=True)
class PhasePlan:
    """The best buckets of a phase for a trace, beside SGLang's list.

    Attributes:
        trace: what was planned for.
        phase: such as ``decode``.
        plan: both sets of buckets, and what the trace takes on each.
        budget: what the plan kept to.
        interpolated: buckets of either set that were not measured themselves.
        eager_interpolated: live sizes whose eager step was not.
        unmeasured: live sizes that were no candidates, as nothing was measured there.
    """

    trace: SizeTrace
    phase: str
    plan: BucketPlan
    budget: BucketBudget
    interpolated: tuple[int, ...]
    eager_interpolated: tuple[int, ...]
    unmeasured: tuple[int, ...]

    @property
    def outcomes(self) -> dict[str, BucketOutcome]:
        """Both outcomes by name, the plan first."""
        return {"plan": self.plan.chosen, "SGLang's list": self.plan.sglang}

    @property
    def note(self) -> str:
        """What a reader must know: where costs come from."""
        between = {"buckets": self.interpolated, "eager live sizes": self.eager_interpolated}
        lines = [f"{len(sizes)} {what}" for what, sizes in between.items() if sizes]
        told = f"Costs of {' and '.join(lines)} are interpolated" if lines else "All costs are measured"
        if self.unmeasured:
            told += f"; nothing was measured at live sizes {_range(self.unmeasured)}, which are no candidates"
        return told

    def as_frame(self) -> pandas.DataFrame:
        """One row a set: time of the trace, padding waste, steps captured and eager, memory, capture seconds, sizes."""
        import pandas

        return pandas.DataFrame(
            {
                "set": name, "buckets": len(each.buckets), "time_ms": each.time_ms, "waste": each.waste,
                "captured": each.captured_steps, "eager": each.eager_steps, "memory_mb": each.memory_bytes / 1e6,
                "capture_s": each.capture_seconds, "sizes": ", ".join(map(str, each.buckets)),
            }
            for name, each in self.outcomes.items()
        )  # fmt: skip

    def plot(self) -> Any:
        """The trace's live sizes, and below them the buckets of both sets, a plotly figure."""
        return draw("bucket_plan", self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "trace": self.trace.as_dict(), "phase": self.phase, "note": self.note, "budget": asdict(self.budget),
            "outcomes": {
                # A time of infinity, where steps may not run eager, is none.
                name: asdict(each) | {"time_ms": each.time_ms if math.isfinite(each.time_ms) else None}
                for name, each in self.outcomes.items()
            },
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{name}: {len(each.buckets)} buckets, {each.time_ms:.4g} ms, waste {each.waste:.1%}, "
            f"{each.eager_steps} steps eager, {each.memory_bytes / 1e6:.4g} MB, {each.capture_seconds:.3g} s"
            for name, each in self.outcomes.items()
        ]
        return "\n".join([f"{self.phase} steps of trace {self.trace.name}", *lines, self.note])


def plan(trace: SizeTrace, phase: str, costs: MeasuredCosts, budget: BucketBudget | None = None) -> PhasePlan:
    """The buckets on which the steps of a phase take the least time.

    The maximum is ``costs.maximum``, captured wherever SGLang's list captures it. Candidates are the sizes measured,
    the live sizes of the trace and SGLang's list.

    Args:
        trace: recorded steps.
        phase: one of ``PHASES`` that the trace has.
        costs: of the runner of that phase.
        budget: what the buckets may cost together; None for the memory that SGLang's list takes.

    Raises:
        InputError: for another phase, or costs that were not measured where they are needed.
        BucketError: if no set of buckets within the budget runs the trace.
    """
    if phase not in PHASES:
        raise InputError(no_such("phase with a rule", phase, PHASES))
    rule, steps, top = PHASES[phase], trace.steps(phase), costs.maximum
    listed = rule.sizes(top)
    wanted = {*steps, *costs.step_ms.points}
    candidates = {*listed, *(size for size in wanted if size <= top and costs.covers(size))}
    known = costs.at(candidates)
    if budget is None:
        budget = BucketBudget(memory_bytes=run_trace(steps, known, listed, ceiling=rule.ceiling).memory_bytes)
    found = plan_buckets(
        steps, known, budget, maximum=top, maximum_is_bucket=top in listed, ceiling=rule.ceiling, rule=rule.sizes
    )  # fmt: skip
    used = sorted({*found.chosen.buckets, *found.sglang.buckets})
    return PhasePlan(
        trace, phase, found, budget,
        tuple(size for size in used if not costs.measured(size)),
        tuple(size for size in steps if costs.eager_ms and size not in costs.eager_ms.points),
        tuple(size for size in steps if size <= top and size not in candidates),
    )  # fmt: skip


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
