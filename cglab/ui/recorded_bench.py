"""The workspace's bench on recorded results: toggling recombines recorded parts into a predicted step, on any machine.

What is measured here is nothing. A run shows the recording of the combination where there is one, and beside it the
prediction that never saw it, with the error of all such predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from cglab.errors import ResultsError
from cglab.lab.available import NEEDS
from cglab.lab.comparison import Profile
from cglab.lab.profiles import recorded_profile
from cglab.lab.recorded import Recorded, recorded
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.recombine import Predicted, Recombination, broken_host_ms, step_points
from cglab.measure.recombine_checks import Checks, check
from cglab.measure.record import Record
from cglab.ui.plots import bucket_cost
from cglab.ui.predictions import checks_figure, predicted_step
from cglab.ui.sections import Results, Section, SectionName, profiled
from cglab.ui.worker import Watch
from cglab.ui.workspace import Sources, Workload

ARMS: Final = TECHNIQUES["decode"].values
FORM: Final = "compiled"
"""The form of operations whose recordings are recombined: that of every recording of late."""


def recorded_sources(folder: str | Path | None = None) -> Sources:
    """A source for each model whose decode steps were recorded on a GPU.

    Args:
        folder: of the records; None takes ``results`` in the data folder.
    """
    steps = [each for bench in ("decode", "growth") for each in recorded(bench, folder).records]
    models = dict.fromkeys(each.model for each in steps if each.workload.get("ops") == FORM and each.model)
    return {
        f"recorded: {model}": lambda model=model: RecordedBench(model, folder)  # type: ignore[misc]
        for model in models
    }


class RecordedBench:
    """A bench on the records of one model; see ``workspace.Bench``.

    Args:
        model: its name.
        folder: of the records; None takes ``results`` in the data folder.

    Raises:
        ResultsError: if no record has what a prediction is made of.
    """

    def __init__(self, model: str, folder: str | Path | None = None) -> None:
        self.model, self._folder = model, folder
        taken = [recorded(bench, folder) for bench in ("decode", "growth")]
        records = [each for bench in taken for each in bench.records if each.model == model]
        self._records = [each for each in records if each.workload.get("ops") == FORM and each.arm in ARMS]
        points = step_points(self._records, model, ARMS)
        if not points:
            raise ResultsError(
                f"none of {len(self._records)} recorded decode steps of {model} tells its size, its time and its parts "
                "(step_ms, busy_ms, launches), from which a step is predicted; record them with cglab bench decode"
            )
        self._steps = Recombination(points, broken_host_ms(recorded("replay", folder).records, model))
        self._checks = check(self._steps)
        where = Recorded("decode", tuple(self._records)).where
        self.title = f"{model}, recorded on {where}: predictions and recordings, nothing is measured here"
        batches, contexts = ([each.size[axis] for each in points] for axis in (0, 1))
        self.largest = Workload(max(batches), max(contexts), 4096)
        self.default = Workload(min(batches, key=lambda each: abs(each - 8)), min(contexts), 128)

    def modes(self) -> dict[str, str]:
        """Every toggle at its default; only that of decode steps can be used."""
        return {name: each.default for name, each in TECHNIQUES.items()}

    def unavailable(self) -> dict[str, str]:
        """Reasons by toggle."""
        return {
            name: f"no parts of it are recorded to recombine; it needs {NEEDS[name]}"
            for name in TECHNIQUES
            if name != "decode"
        }

    def choose(self, name: str, mode: str, workload: Workload) -> None:
        """Nothing is captured."""

    def run(self, name: str, modes: Mapping[str, str], workload: Workload, watch: Watch) -> Results:
        """The recorded and the predicted step of eager and the mode chosen, or of all where eager is chosen."""
        arms = ARMS[::-1] if modes[name] == "eager" else ("eager", modes[name])
        batch, context = workload.batch, workload.prompt
        own = {arm: self._own(arm, batch, context) for arm in arms}
        unseen = {arm: self._steps.without(_is(arm, batch, context)) for arm in arms}
        predicted = {arm: unseen[arm].predict(arm, batch, context) for arm in arms}
        title = (
            f"{name} step of {self.model}, batch {batch}, context {context}: predicted from recorded parts"
        )
        return Results(
            title,
            {
                arm: str(each.parity["verdict"])
                for arm, each in own.items()
                if each is not None and each.parity
            },
            self._sections(title, own, predicted, workload),
            self._profile,
        )

    def _own(self, arm: str, batch: int, context: int) -> Record | None:
        """The newest recording of exactly this combination."""
        wanted = (arm, batch, context)
        found = [
            r for r in self._records if (r.arm, r.workload.get("batch"), r.workload.get("context")) == wanted
        ]
        return max(found, key=lambda record: record.created, default=None)

    @cached_property
    def _profile(self) -> Profile | None:
        """The recorded trace, if it is one of this model."""
        found = recorded_profile("decode", self._folder)
        return found if found.traces and found.model == self.model else None

    @cached_property
    def _ttft(self) -> tuple[Record, ...]:
        return recorded("ttft", self._folder).records

    def _sections(
        self,
        title: str,
        own: Mapping[str, Record | None],
        predicted: Mapping[str, Predicted],
        workload: Workload,
    ) -> dict[SectionName, Section]:
        table, profile = _table(own, predicted), self._profile
        told = "Prediction: each arm's own recording of this size was left out of it. "
        ledgers = {arm: _ledger(each) for arm, each in own.items() if each is not None}
        return {
            "step": Section(told + _error(self._checks), predicted_step(title, own, predicted), table),
            "users": Section(
                "Of requests that all decode, by prediction: a token each a step; the time to first token is that of "
                "recorded loads of this prompt and concurrency", None, self._users(predicted, workload),
            ),
            "timeline": Section(f"No trace of {self.model} is recorded") if profile is None else profiled(profile),
            "coverage": Section("As recorded, at this very size", None, _coverage(own)),
            "buckets": Section("As recorded, at this very size", bucket_cost(ledgers), _rows(ledgers)),
            "occupancy": Section("A single step has none; record a load with cglab bench ttft"),
            "checks": Section(str(self._checks), checks_figure(self._checks), self._checks.as_frame()),
        }  # fmt: skip

    def _users(self, predicted: Mapping[str, Predicted], workload: Workload) -> Any:
        import pandas

        asked = (self.model, workload.prompt, workload.batch)
        ttft = {
            each.arm: each.metrics.get("ttft_ms")
            for each in self._ttft
            if (each.model, each.workload.get("tokens"), each.workload.get("concurrency")) == asked
        }
        return pandas.DataFrame(
            {
                "arm": arm, "tok_s_predicted": each.step_ms and workload.batch / each.step_ms * 1e3,
                "tok_s_low": each.high_ms and workload.batch / each.high_ms * 1e3,
                "tok_s_high": each.low_ms and workload.batch / each.low_ms * 1e3,
                "tpot_ms_predicted": each.step_ms, "tpot_low_ms": each.low_ms, "tpot_high_ms": each.high_ms,
                "ttft_ms_recorded": ttft.get(arm),
            }
            for arm, each in predicted.items()
        )  # fmt: skip


def _is(arm: str, batch: int, context: int) -> Any:
    return lambda each: (each.arm, each.batch, each.context) == (arm, batch, context)


def _error(checks: Checks) -> str:
    """The error in one sentence; all checks are a section of their own."""
    if checks.mean is None or checks.worst is None:
        return "No prediction of this model could be checked."
    return (
        f"Such predictions were off by {checks.mean:.1%} in the mean and {checks.worst:.1%} at worst, "
        f"over {len(checks.errors())} recorded combinations, each without its own recording."
    )


def _table(own: Mapping[str, Record | None], predicted: Mapping[str, Predicted]) -> Any:
    import pandas

    rows = []
    for arm, each in predicted.items():
        recorded_ms = None if own[arm] is None else own[arm].metrics.get("step_ms")  # type: ignore[union-attr]
        both = isinstance(recorded_ms, float) and each.step_ms is not None
        rows.append({
            "arm": arm, "predicted_ms": each.step_ms, "low_ms": each.low_ms, "high_ms": each.high_ms,
            "recorded_ms": recorded_ms, "error_%": 100 * (each.step_ms / recorded_ms - 1) if both else None,  # type: ignore[operator]
            "device_ms": each.device_ms, "host_ms": each.host_ms, "gap_ms": each.gap_ms, "from": each.reason,
        })  # fmt: skip
    return pandas.DataFrame(rows)


def _coverage(own: Mapping[str, Record | None]) -> Any:
    import pandas

    return pandas.DataFrame(
        {
            "arm": arm, "steps": counts.get("steps"), "captured": counts.get("captured"), "eager": counts.get("eager"),
            "reasons": ", ".join(counts.get("reasons", ())).lower(),
        }
        for arm, each in own.items()
        if each is not None and (counts := each.coverage)
    )  # fmt: skip


def _ledger(record: Record) -> list[dict[str, Any]]:
    """The bucket ledger of a record, in the form of a lab's."""
    columns: Iterable[str] = ("warmup_ms", "capture_ms", "pool_bytes", "device_bytes")
    samples: Mapping[str, Sequence[float]] = record.samples
    if not all(
        f"bucket_{name}" in samples for name in ("warmup_ms", "capture_ms", "pool_bytes", "device_bytes")
    ):
        return []
    return [
        {"bucket": f"{size:.0f}", **{name: samples[f"bucket_{name}"][index] for name in columns}}
        for index, size in enumerate(samples.get("bucket", ()))
    ]


def _rows(ledgers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    import pandas

    return pandas.DataFrame([{"arm": arm, **row} for arm, rows in ledgers.items() for row in rows])
