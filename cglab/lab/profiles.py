"""Profiles that are kept: ``<technique>.profile.json`` in ``data/results``, the Chrome traces that it names beside it.

Perfetto opens the traces too.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import torch

from cglab import settings
from cglab.errors import ResultsError
from cglab.lab.comparison import Profile
from cglab.measure.machine import describe_device
from cglab.measure.profiling import STEP
from cglab.measure.trace_file import load_trace


def results_folder(folder: str | Path | None = None) -> Path:
    """``folder``, or ``results`` in the data folder."""
    return settings.read_settings().data / "results" if folder is None else Path(folder)


def trace_path(folder: str | Path, technique: str, arm: str) -> Path:
    """Where an arm's Chrome trace is kept."""
    return Path(folder) / f"{technique}-{arm}.trace.json.gz"


def save_profile(profile: Profile, folder: str | Path, device: torch.device) -> None:
    """Describes a profile whose traces were kept at ``trace_path``.

    Raises:
        ResultsError: if that cannot be written.
    """
    path = Path(folder) / f"{profile.technique}.profile.json"
    facts = {
        "technique": profile.technique, "workload": profile.workload, "model": Path(profile.model).name,
        "device": describe_device(device).name, "created": datetime.now(UTC).isoformat(),
        "traces": {arm: trace_path(folder, profile.technique, arm).name for arm in profile.traces},
    }  # fmt: skip
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultsError(
            f"cannot describe the profile at {path}: {error}; free space or name another folder"
        ) from error


def recorded_profile(technique: str = "decode", folder: str | Path | None = None) -> Profile:
    """A recorded profile; without traces if there is none.

    Args:
        technique: the toggle.
        folder: None takes ``results`` in the data folder.

    Raises:
        ResultsError: if there is one and it cannot be read.
    """
    path = results_folder(folder) / f"{technique}.profile.json"
    if not path.exists():
        return Profile(technique, "", {}, {})
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        traces = {arm: load_trace(path.with_name(name)).window(STEP) for arm, name in facts["traces"].items()}
        recorded = f"{facts['device']} on {facts['created'][:10]}"
        return Profile(facts["technique"], facts["model"], facts["workload"], traces, recorded)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path} is no recorded profile ({error!r}); record it again with lab.profile(save=...)"
        ) from error
