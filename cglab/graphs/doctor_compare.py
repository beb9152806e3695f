"""Two runs of a function compared: what it bakes in is what differs between them. Pure functions.

The first run against the second, on the same inputs, shows what only a first call does, and what changes with every
call. The second against the third, on other inputs, shows what follows from their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from cglab.graphs.doctor_findings import Finding
from cglab.graphs.doctor_watch import Run, Step


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two runs differ.

    Attributes:
        kind: ``BakedBranch``, ``BakedValue`` or ``MovedInput``; ``shape`` while it is open what a shape follows from.
        step: the operation, of the later run where both have one.
        at: its index in that run.
        fact: how they differ.
    """

    kind: str
    step: Step
    at: int
    fact: str

    @property
    def line(self) -> tuple[str, str, int] | None:
        """Kind, file and line, for comparing."""
        place = self.step.place
        return (self.kind, place.file, place.line) if place else None


def differences(before: Sequence[Step], after: Sequence[Step]) -> list[Difference]:
    """Where two runs differ, in order.

    Runs are aligned by operation and line; operations without a partner are a branch, told by the first of them.
    Shapes that differ follow from what came before, so they count only where nothing else does.

    Args:
        before: operations of one run.
        after: operations of another run of the same function.
    """
    found = list(_paths(before, after))
    values = [each for each in found if each.kind != "shape"]
    shapes = [each for each in found if each.kind == "shape"]
    if not any(each.kind in ("BakedBranch", "BakedValue") for each in values):
        values += [Difference("BakedValue", each.step, each.at, each.fact) for each in shapes[:1]]
    return sorted(values, key=lambda each: each.at)


def _paths(before: Sequence[Step], after: Sequence[Step]) -> Iterator[Difference]:
    alike = 0
    keys = [[_key(step) for step in run] for run in (before, after)]
    while alike < min(len(before), len(after)) and keys[0][alike] == keys[1][alike]:
        yield from _compared(before[alike], after[alike], alike)
        alike += 1
    # What both begin with is most of them, and quick; the matcher takes the square of what is left.
    matcher = SequenceMatcher(None, keys[0][alike:], keys[1][alike:], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for old, new in zip(range(i, i_end), range(j, j_end), strict=True):
                yield from _compared(before[alike + old], after[alike + new], alike + new)
        else:
            only, at = (before, alike + i) if i < i_end else (after, alike + j)
            yield Difference("BakedBranch", only[at], at, "one call comes by this line and another does not,")


def _compared(old: Step, new: Step, at: int) -> Iterator[Difference]:
    for one, other in zip(old.values, new.values, strict=False):
        if one != other:
            # A tensor is told as float32[2, 3]; containers are told item by item, so nothing else ends like that.
            kind = "shape" if one.endswith("]") else "BakedValue"
            yield Difference(kind, new, at, f"an argument is {one} in one call and {other} in another")
            return
    if len(old.values) != len(new.values):
        yield Difference("BakedValue", new, at, "the number of its arguments differs between calls")
    elif old.outside != new.outside:
        fact = "a tensor that is no input lies at another address in the next call"
        yield Difference("MovedInput", new, at, fact)


def baked(first: Run, second: Run, third: Run, *, varied: bool) -> list[Finding]:
    """What a capture would bake in, from three runs.

    Args:
        first: on some inputs.
        second: on the same.
        third: on others, or on the same ones again.
        varied: whether the third had other inputs.
    """
    by_call = [each for each in differences(first.steps, second.steps) if each.kind != "MovedInput"]
    by_value = differences(second.steps, third.steps)
    known = {each.line for each in by_call}
    # Once the host knows something of the device, all that follows may differ, and to mend that comes first.
    limit = min((run.until for run in (second, third) if run.until is not None), default=math.inf)

    def seen(each: Difference) -> list[bool]:
        return [any(_key(step) == _key(each.step) for step in run.steps) for run in (first, second, third)]

    findings = []
    for each in by_call:
        once = each.kind == "BakedBranch" and seen(each) in ([True, False, False], [False, True, True])
        kind = "LazyInitialisation" if once else each.kind
        why = "the first call is another than those after it" if once else f"{each.fact} on the same inputs"
        findings.append(_finding(kind, each, why))
    for each in by_value:
        by_first, by_second, _ = seen(each)
        if each.kind == "MovedInput":
            # What only the first call makes moves once, and is no harm: so the first call is no evidence here.
            findings.append(_finding(each.kind, each, each.fact))
        elif varied and each.line not in known and each.at < limit and by_first == by_second:
            findings.append(_finding(each.kind, each, f"{each.fact} on inputs of other values"))
    return findings


def _key(step: Step) -> tuple[str, object]:
    return step.operation, step.place


def _finding(kind: str, each: Difference, fact: str) -> Finding:
    return Finding.unseen(kind, each.step.operation, each.step.place, fact, each.at)
