"""One result: what was measured, on what, with which state of the package."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from hashlib import sha1
from pathlib import Path
from typing import Any

import torch

from cglab.errors import InputError, ResultsError
from cglab.measure.machine import Device, describe_device, versions
from cglab.measure.tree import is_dirty, tree_hash

SCHEMA = 1

Metric = float | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One arm of one run.

    Attributes:
        id: names the record; made from its content.
        run: shared by the records that were measured side by side in one run.
        schema: version of this layout.
        created: UTC, ISO 8601.
        bench: what was measured, such as ``decode``.
        device: what it ran on.
        versions: of Python, torch, CUDA and packages.
        tree: git tree hash of ``cglab/``, from its files.
        dirty: whether these differ from the commit that was checked out; None where no git told.
        command: what was run, as words.
        model: name of the model; None where there is none.
        weights: ``trained`` or ``random``; None without a model.
        dtype: of the weights, such as ``bfloat16``.
        workload: what was asked for: batch, context, bucket, ...
        arm: setting of the toggles.
        samples: raw samples by name, the unit in the name (``step_ms``).
        metrics: figures by name, the unit in the name.
        parity: verdict against the oracle, as :meth:`cglab.measure.parity.Parity.as_dict`.
        coverage: share of the steps that ran captured, with reasons.
        notes: anything a reader must know.
    """

    bench: str
    arm: str
    device: Device
    id: str = ""
    run: str = ""
    schema: int = SCHEMA
    created: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    tree: str = ""
    dirty: bool | None = None
    command: list[str] = field(default_factory=list)
    model: str | None = None
    weights: str | None = None
    dtype: str | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    parity: dict[str, Any] | None = None
    coverage: dict[str, Any] | None = None
    notes: str = ""

    @property
    def shows_graph_times(self) -> bool:
        """Whether its times are those of CUDA graphs; a tape's are not, and never shown as a speed-up."""
        return self.device.kind == "cuda"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as written."""
        return asdict(self)

    def as_line(self) -> bytes:
        """The record as a line of JSON, ended.

        Raises:
            InputError: for a value that JSON cannot hold: NaN, an infinity, a tensor.
        """
        try:
            return (json.dumps(self.as_dict(), allow_nan=False, ensure_ascii=False) + "\n").encode()
        except (TypeError, ValueError) as error:
            raise InputError(
                f"a record of {self.bench!r} holds what JSON cannot ({error}); use None for no value"
            ) from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Reads what :meth:`as_dict` gave.

        Raises:
            ResultsError: for another schema, or fields that are missing or unknown.
        """
        if values.get("schema") != SCHEMA:
            raise ResultsError(f"schema {values.get('schema')!r}, this version reads {SCHEMA}")
        names = {each.name for each in fields(cls)}
        if names != set(values):
            odd = ", ".join(sorted(names ^ set(values)))
            raise ResultsError(f"fields missing or unknown: {odd}")
        device = values["device"]
        objects = ("device", "metrics", "workload", "samples", "versions")
        texts = ("id", "run", "created", "bench", "arm", "tree", "notes")
        wrong = [name for name in objects if not isinstance(values[name], dict)]
        wrong += [name for name in texts if not isinstance(values[name], str)]
        wrong += [name for name in ("parity", "coverage") if not isinstance(values[name], dict | None)]
        wrong += [name for name in ("model", "weights", "dtype") if not isinstance(values[name], str | None)]
        wrong = wrong or _wrong_values(values)
        if wrong:
            raise ResultsError(f"fields of the wrong kind: {', '.join(wrong)}")
        try:
            return cls(**{**values, "device": Device(**device)})
        except TypeError as error:
            raise ResultsError(f"device: {error}") from error


def _wrong_values(values: Mapping[str, Any]) -> list[str]:
    """Figures, samples and verdicts of a record that are of the wrong kind, and facts of its device."""
    device, parity = values["device"], values["parity"]
    wrong = [f"device.{name}" for name in ("name", "kind") if not isinstance(device.get(name), str)]
    for name, each in values["metrics"].items():
        if not (each is None or isinstance(each, bool | str) or is_number(each)):
            wrong.append(f"metrics.{name}")
    for name, each in values["samples"].items():
        if not (isinstance(each, list) and all(map(is_number, each))):
            wrong.append(f"samples.{name}")
    load = device.get("load")
    wrong += ["device.load"] if load is not None and not is_number(load) else []
    return wrong + (
        ["parity.verdict"] if parity is not None and not isinstance(parity.get("verdict"), str) else []
    )


def is_number(value: Any) -> bool:
    """Whether a value of JSON can be computed with: a whole number may be longer there than any other."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def new_run() -> str:
    """A name for one run, by its time and process."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{os.getpid()}"


def first_line(text: str) -> str:
    """The first line of an error for a record, without folders of this machine, which are nobody else's business."""
    return re.sub(r"(?<![^\s'\"(=])~?/\S*/", "", text.strip().split("\n", 1)[0])


def _command() -> list[str]:
    """What was run, as words; folders of this machine are nobody else's business."""
    started = Path(sys.argv[0])
    words = [started.parent.name if started.name == "__main__.py" else sys.argv[0], *sys.argv[1:]]
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def make_record(
    *,
    bench: str,
    arm: str,
    device: torch.device | str,
    run: str,
    metrics: Mapping[str, Metric],
    samples: Mapping[str, Sequence[float]] | None = None,
    command: Sequence[str] | None = None,
    software: Mapping[str, str | None] | None = None,
    **facts: Any,
) -> Record:
    """A record with the machine, the versions and the state of the package filled in.

    Args:
        bench: what was measured.
        arm: setting of the toggles.
        device: torch device that was measured.
        run: from :func:`new_run`, the same for what was measured side by side.
        metrics: figures by name.
        samples: raw samples by name.
        command: what was run; the process's own arguments if left out.
        software: versions of what ran in another process, such as a server, over those of this one.
        **facts: other fields of :class:`Record`: model, weights, dtype, workload, parity, coverage, notes.

    Raises:
        InputError: for a field that a record does not have, or a value that JSON cannot hold (NaN, tensors).
        DeviceError: if the device is not there.
    """
    try:
        draft = Record(
            bench=bench,
            arm=arm,
            run=run,
            device=describe_device(device),
            created=datetime.now(UTC).isoformat(),
            versions=versions() | dict(software or {}),
            tree=tree_hash(),
            dirty=is_dirty(),
            command=_command() if command is None else list(command),
            metrics=dict(metrics),
            samples={name: list(values) for name, values in (samples or {}).items()},
            **facts,
        )
    except TypeError as error:
        raise InputError(f"no such field of a record: {error}") from error
    return replace(draft, id=sha1(draft.as_line(), usedforsecurity=False).hexdigest()[:16])
