"""Traces of sizes: how many steps of each live size a run had, by phase. What a bucket planner works from.

It is recorded from the steps of an engine, or from what coverage counted::

    with engine.watched() as steps:
        drive(engine, load, vocabulary)
    SizeTrace.from_steps("chat", steps, model="qwen3-8b", load=load.as_dict()).save()

A trace holds no times: with a scheduler that never looks at a clock it is the same on every machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cglab.engine.generation import StepRecord
from cglab.errors import InputError, ResultsError, no_such
from cglab.graphs.coverage import Coverage
from cglab.measure.records import replace_file
from cglab.settings import read_settings

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class SizeTrace:
    """Steps of one run by phase and live size.

    Attributes:
        name: of its file; lower-case letters, digits and dashes.
        phases: for each phase, such as ``decode``, the number of steps by live size, rows or tokens.
        source: what was run: model, load, and what else a reader must know; plain values.

    Raises:
        InputError: for another kind of name, or counts of steps that are none.
    """

    name: str
    phases: Mapping[str, Mapping[int, int]]
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"a trace cannot be named {self.name!r}; use lower-case letters, digits and dashes"
            )
        if not self.phases:
            raise InputError(f"trace {self.name!r} has no phase; record at least one, such as decode")
        for phase, steps in self.phases.items():
            wrong = [
                item for item in steps.items() if any(type(part) is not int or part < 1 for part in item)
            ]
            if wrong or not steps:
                what = f"size {wrong[0][0]!r} {wrong[0][1]!r} times" if wrong else "no steps"
                raise InputError(
                    f"phase {phase!r} of trace {self.name!r} has {what}; sizes and counts are whole numbers from 1"
                )

    @classmethod
    def from_steps(cls, name: str, steps: Iterable[StepRecord], **source: Any) -> Self:
        """A trace of what an engine computed.

        Args:
            name: of the trace.
            steps: as ``engine.watched()`` noted them; a step's live size is its tokens, one a request in decode.
            **source: what was run.

        Raises:
            InputError: if there was no step.
        """
        phases: dict[str, Counter[int]] = {}
        for step in steps:
            phases.setdefault(step.kind, Counter())[step.tokens] += 1
        return cls(name, phases, source)

    @classmethod
    def from_coverage(cls, name: str, coverage: Mapping[str, Coverage], **source: Any) -> Self:
        """A trace of what runners counted; phases without a step, and steps without a live row, are left out.

        Args:
            name: of the trace.
            coverage: by phase, as ``runner.coverage() - before`` gives it.
            **source: what was run.

        Raises:
            InputError: if there was no step at all.
        """
        live = {
            phase: {size: count for size, count in counts.live_sizes.items() if size}
            for phase, counts in coverage.items()
        }
        return cls(name, {phase: sizes for phase, sizes in live.items() if sizes}, source)

    def steps(self, phase: str) -> dict[int, int]:
        """Number of steps by live size of one phase, ascending.

        Raises:
            InputError: for a phase that the trace does not have.
        """
        if phase not in self.phases:
            raise InputError(
                f"trace {self.name!r} has no phase {phase!r}; it has {', '.join(sorted(self.phases))}"
            )
        return dict(sorted(self.phases[phase].items()))

    def as_frame(self) -> pandas.DataFrame:
        """One row a phase and live size, with its number of steps."""
        import pandas

        rows = [(phase, size, count) for phase in self.phases for size, count in self.steps(phase).items()]
        return pandas.DataFrame(rows, columns=["phase", "live size", "steps"])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as written; JSON has no numbers as keys, so sizes are text."""
        phases = {
            phase: {str(size): count for size, count in self.steps(phase).items()} for phase in self.phases
        }
        return {"schema": SCHEMA, "name": self.name, "source": dict(self.source), "phases": phases}

    def save(self, folder: str | Path | None = None) -> Path:
        """Writes the trace to ``NAME.json``, whole or not at all.

        Args:
            folder: None takes ``traces`` in the data folder; it is made if needed.

        Returns:
            Where it was written.

        Raises:
            ResultsError: if it cannot be written.
            InputError: if ``source`` holds what JSON cannot.
        """
        path = _path(self.name, folder)
        try:
            text = json.dumps(self.as_dict(), indent=1, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise InputError(f"the source of trace {self.name!r} is no plain data: {error}") from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            raise ResultsError(
                f"cannot write {path}: {error}; what was there is untouched. Free space or name another folder"
            ) from error
        return path


def load_size_trace(name: str, folder: str | Path | None = None) -> SizeTrace:
    """Reads a trace that was saved.

    Args:
        name: of the trace.
        folder: None takes ``traces`` in the data folder.

    Raises:
        ResultsError: if there is none, or the file is no trace.
    """
    path = _path(name, folder)
    if not path.exists():
        known = sorted(each.stem for each in path.parent.glob("*.json"))
        raise ResultsError(no_such(f"trace in {path.parent}", name, known))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA:
            raise ResultsError(f"{path} has schema {values['schema']!r}, this version reads {SCHEMA}")
        phases = {
            phase: {int(size): count for size, count in steps.items()}
            for phase, steps in values["phases"].items()
        }
        return SizeTrace(values["name"], phases, dict(values["source"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is no trace of sizes ({error!r}); record it again") from error


def _path(name: str, folder: str | Path | None) -> Path:
    return (read_settings().data / "traces" if folder is None else Path(folder)) / f"{name}.json"
