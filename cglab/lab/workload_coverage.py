"""Coverage of a whole workload: what ran captured, what running eager cost and why, and what to capture next."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cglab.graphs.coverage import Coverage, Reason
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.step_times import Group, Spent
from cglab.lab.techniques import TECHNIQUES
from cglab.lab.views import draw

if TYPE_CHECKING:
    import pandas

NOT_MEASURED = "not measured"

ADVICE: Mapping[str, str] = {
    Reason.BACKEND_EAGER.name: "capture it: set its toggle to another value than eager",
    Reason.ABOVE_LARGEST.name: "add a larger bucket",
    Reason.ABOVE_LIMIT.name: "raise the size up to which it is captured",
    Reason.SIZE_NOT_CAPTURED.name: "add this size to the buckets, or switch padding on",
    Reason.WASTE_CEILING.name: "add a bucket nearer to this size, or raise the waste ceiling",
    Reason.MORE_REQUESTS.name: "record it with room for more requests",
    Reason.MORE_KEYS.name: "record it with room for more cached tokens",
    Reason.LITTLE_MEMORY.name: "free device memory: a smaller cache, or fewer buckets",
    Reason.CAPTURE_FAILED.name: "ask cglab.doctor what broke its capture",
    Reason.KILL_SWITCH.name: "take the environment variable away",
}
"""What could have the steps of a reason captured; other reasons lie in the steps themselves."""


@dataclass(frozen=True, slots=True)
class TechniqueShare:
    """How much of one technique ran captured.

    Attributes:
        technique: its name; ``block_draft`` is the draft that a sampler follows.
        steps, captured: all steps, and those replayed.
        share: of the steps, 0 to 1.
        seconds: device time of the steps that were timed; None for a part of another technique's step.
        time_share: of that time, what was spent in replays, 0 to 1; None where nothing was timed.
    """

    technique: str
    steps: int
    captured: int
    share: float
    seconds: float | None
    time_share: float | None


@dataclass(frozen=True, slots=True)
class EagerCost:
    """What one reason for running eager cost.

    Attributes:
        technique, reason, facts: whose steps, why, and what was found at the last of them.
        steps: that ran eager for it.
        seconds: device time of those that were timed; None where none was.
        predicted_gain: seconds that capturing these would have saved, predicted from measured steps: at each size
            eager time less that of the captured step of the nearest larger bucket. None where no such step was timed.
        predicted_steps: those that the prediction is of.
        advice: what would have them captured; None where nothing would.
    """

    technique: str
    reason: str
    facts: str
    steps: int
    seconds: float | None
    predicted_gain: float | None
    predicted_steps: int
    advice: str | None

    def __str__(self) -> str:
        why = f"{self.technique}, {self.reason.lower()}" + (f" ({self.facts})" if self.facts else "")
        gain = (
            NOT_MEASURED
            if self.predicted_gain is None
            else f"{self.predicted_gain * 1e3:.4g} ms of {self.predicted_steps} steps"
        )
        return f"{why}: {self.advice or 'nothing to capture'}; predicted gain: {gain}"


@dataclass(frozen=True)
class WorkloadCoverage:
    """What the engine ran since the lab was opened.

    The step that a comparison repeats is no part of it; the prompts that it computes before that are.

    Attributes:
        model: name or folder.
        recorder: ``cuda`` or ``tape``.
        techniques: one each that ran.
        costs: reasons for running eager, the costliest first; those without a time last.
    """

    model: str
    recorder: str
    techniques: tuple[TechniqueShare, ...]
    costs: tuple[EagerCost, ...]

    @property
    def next_capture(self) -> EagerCost | None:
        """What to capture next: by predicted gain, and without one by time; None where nothing would gain."""
        open_ = [
            each
            for each in self.costs
            if each.advice and (each.predicted_gain is None or each.predicted_gain > 0)
        ]
        return max(
            open_,
            key=lambda each: (each.predicted_gain or 0.0, each.seconds or 0.0, each.steps),
            default=None,
        )

    @property
    def note(self) -> str:
        """What a reader must know before using the times; empty on a GPU."""
        return TAPE_NOTE if self.recorder == "tape" else ""

    def as_frame(self) -> pandas.DataFrame:
        """One row a technique: steps, captured, share, seconds and share of time."""
        import pandas

        columns = list(TechniqueShare.__dataclass_fields__)
        return pandas.DataFrame([asdict(each) for each in self.techniques], columns=columns)

    def reasons_frame(self) -> pandas.DataFrame:
        """One row a technique and reason, the costliest first."""
        import pandas

        columns = list(EagerCost.__dataclass_fields__)
        return pandas.DataFrame([asdict(each) for each in self.costs], columns=columns)

    def plot(self) -> Any:
        """Shares of steps and time by technique, and eager time by reason, a plotly figure."""
        return draw("workload_coverage", self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        following = self.next_capture
        return {
            "model": self.model, "recorder": self.recorder, "note": self.note,
            "techniques": [asdict(each) for each in self.techniques], "costs": [asdict(each) for each in self.costs],
            "next": None if following is None else asdict(following),
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.techniques:
            return "0 steps: nothing ran on this lab's engine yet"
        lines = [
            f"{each.technique}: {each.captured} of {each.steps} steps captured; of the time {_percent(each.time_share)}"
            for each in self.techniques
        ]
        lines += [
            f"eager {_milliseconds(each.seconds)}: {each.technique}, {each.reason.lower()}, {each.steps} steps"
            for each in self.costs
        ]
        lines.append(f"next: {self.next_capture or 'nothing that would gain'}")
        return "\n".join([*lines, self.note]).rstrip()

    def _repr_html_(self) -> str:
        shares = [
            (each.technique, each.steps, each.captured, _percent(each.share), _percent(each.time_share))
            for each in self.techniques
        ]
        costs = [
            (each.technique, each.reason.lower(), each.facts, each.steps, _milliseconds(each.seconds),
             each.advice or "", _milliseconds(each.predicted_gain))
            for each in self.costs
        ]  # fmt: skip
        heads = (
            ("technique", "steps", "captured", "of steps", "of time"),
            ("technique", "eager because", "facts", "steps", "time", "to capture it", "predicted gain"),
        )
        following = html.escape(f"Next: {self.next_capture or 'nothing that would gain'}. {self.note}")
        return f"{_table(heads[0], shares)}{_table(heads[1], costs)}<p>{following}</p>"


def workload_coverage(
    model: str,
    recorder: str,
    groups: Mapping[Group, Spent],
    parts: Mapping[str, Coverage],
    facts: Mapping[str, str],
) -> WorkloadCoverage:
    """Sums up what an engine ran.

    Args:
        model, recorder: of the lab.
        groups: its steps, see ``StepTimes.groups``.
        parts: techniques within the steps of others, see ``StepTimes.parts``.
        facts: the latest of each technique and reason, by ``technique/REASON``.
    """
    names = dict.fromkeys(group.technique for group in groups)
    shares = [_share(name, {g: s for g, s in groups.items() if g.technique == name}) for name in names]
    shares += [
        TechniqueShare(name, part.steps, part.captured, part.captured / part.steps, None, None)
        for name, part in parts.items()
        if part.steps
    ]
    eager = dict.fromkeys((group.technique, group.label) for group in groups if not group.size)
    costs = [_cost(*each, groups, facts.get("/".join(each), "")) for each in eager]
    costs += [
        EagerCost(name, reason, part.last_facts.get(reason, ""), steps, None, None, 0, ADVICE.get(reason))
        for name, part in parts.items()
        for reason, steps in part.misses.items()
    ]
    shares.sort(key=lambda each: _place(each.technique))
    costs.sort(key=lambda each: (-1.0 if each.seconds is None else each.seconds, each.steps), reverse=True)
    return WorkloadCoverage(model, recorder, tuple(shares), tuple(costs))


def predicted_gain(technique: str, reason: str, groups: Mapping[Group, Spent]) -> tuple[float | None, int]:
    """Seconds that capturing the eager steps of a reason would have saved, from steps that were timed.

    A captured step of a larger bucket takes at least as long as one of the size itself would. It counts only if it
    does the same work: with the same parts beside it, and if captured steps were all of one mode.

    Returns:
        The gain, and the number of steps that it is of; None and 0 where no eager step has such a captured one.
    """
    own = {group: spent for group, spent in groups.items() if group.technique == technique and spent.timed}
    gain, steps = 0.0, 0
    for group, spent in own.items():
        if group.label != reason or group.size:
            continue
        alike = [each for each in own if each.size and _beside(each) == _beside(group)]
        larger = [each.size for each in alike if each.size >= group.live]
        if larger and len({each.mode for each in alike}) == 1:
            same = [own[each] for each in alike if each.size == min(larger)]
            mean = sum(each.seconds for each in same) / sum(each.timed for each in same)
            gain += spent.seconds - spent.timed * mean
            steps += spent.timed
    return (gain, steps) if steps else (None, 0)


def _beside(group: Group) -> str:
    """What a mode says after its first word: other parts of the step, such as a seed that is fused into it."""
    return group.mode.partition(", ")[2]


def _share(name: str, groups: Mapping[Group, Spent]) -> TechniqueShare:
    steps = sum(spent.steps for spent in groups.values())
    replayed = [spent for group, spent in groups.items() if group.size]
    seconds, captured = _seconds(groups.values()), sum(spent.steps for spent in replayed)
    time_share = (_seconds(replayed) or 0.0) / seconds if seconds else None
    return TechniqueShare(name, steps, captured, captured / steps, seconds, time_share)


def _cost(technique: str, reason: str, groups: Mapping[Group, Spent], facts: str) -> EagerCost:
    own = [s for g, s in groups.items() if (g.technique, g.label) == (technique, reason) and not g.size]
    gain, steps = predicted_gain(technique, reason, groups)
    return EagerCost(
        technique,
        reason,
        facts,
        sum(spent.steps for spent in own),
        _seconds(own),
        gain,
        steps,
        ADVICE.get(reason),
    )


def _seconds(spent: Iterable[Spent]) -> float | None:
    timed = [each.seconds for each in spent if each.timed]
    return sum(timed) if timed else None


def _place(technique: str) -> int:
    names = list(TECHNIQUES)
    return names.index(technique) if technique in names else len(names)


def _percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{share:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{seconds * 1e3:.4g} ms"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    heading = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><tr>{heading}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
