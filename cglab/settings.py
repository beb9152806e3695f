"""The one reader of environment variables: every setting, its good values and its default.

| variable | good values | default |
| --- | --- | --- |
| ``CGLAB_DEVICE`` | ``auto``, ``cpu``, ``cuda`` | ``auto``: CUDA where there is a device, else the CPU |
| ``CGLAB_MODEL`` | a preset, a model folder or a hub id | ``pico-gqa`` |
| ``CGLAB_OPS`` | ``auto``, ``portable``, ``compiled`` | ``auto``: compiled on a CUDA device, else portable |
| ``CGLAB_DATA`` | an existing folder | ``data`` in the repository |
| ``CGLAB_DISABLE_DSA_ATTENTION_GRAPH`` | ``0``, ``1`` | ``0``; ``1`` keeps sparse prefill attention a break |
| ``CGLAB_DISABLE_DSA_INDEXER_GRAPH`` | ``0``, ``1`` | ``0``; ``1`` keeps the indexer's preparation a break |
| ``CGLAB_DISABLE_NEXTN_GRAPH`` | ``0``, ``1`` | ``0``; ``1`` keeps the NextN draft extend eager |
| ``CGLAB_DISABLE_SEED_GRAPH`` | ``0``, ``1`` | ``0``; ``1`` keeps the seed step eager, whatever its toggle says |
| ``CGLAB_SGLANG_PYTHON`` | a Python with SGLang | the one of ``make test-sglang``, else this one if it has SGLang |

A value that is not good, and a ``CGLAB_`` variable that is not in the table, is an error and never a guess: a
misspelt ``CGLAB_DEVICE`` would otherwise measure the wrong machine in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cglab.errors import DeviceError, ToggleError, no_such

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")
FORMS = ("auto", "portable", "compiled")
SWITCH = ("0", "1")
SEED_GRAPH_SWITCH = "CGLAB_DISABLE_SEED_GRAPH"
DSA_ATTENTION_SWITCH = "CGLAB_DISABLE_DSA_ATTENTION_GRAPH"
DSA_INDEXER_SWITCH = "CGLAB_DISABLE_DSA_INDEXER_GRAPH"
NEXTN_SWITCH = "CGLAB_DISABLE_NEXTN_GRAPH"
KILL_SWITCHES = (DSA_ATTENTION_SWITCH, DSA_INDEXER_SWITCH, NEXTN_SWITCH, SEED_GRAPH_SWITCH)
SGLANG_PYTHON = "CGLAB_SGLANG_PYTHON"
VARIABLES = ("CGLAB_DATA", "CGLAB_DEVICE", *KILL_SWITCHES, "CGLAB_MODEL", "CGLAB_OPS", SGLANG_PYTHON)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes:
        device: ``auto``, ``cpu`` or ``cuda``; :func:`device` resolves it.
        model: the model that notebooks and commands run; whether it exists is for the loader to say.
        ops: the form in which models compute; None for the device's own default.
        data: folder of shipped models, published tables and recorded results.
        switches: kill switches that are set, each of a capture.
        sglang_python: the Python that starts SGLang's servers; whether it can is for whoever starts one to say.
    """

    device: str
    model: str
    data: Path
    ops: str | None = None
    switches: frozenset[str] = frozenset()
    sglang_python: Path | None = None


def user_path(name: str | Path) -> Path:
    """A path with ``~`` resolved; that of a user who is unknown stays as it is, and is then not found."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own fails on such a user


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read every setting, without touching a device.

    Args:
        environment: variables to read; the process's own if left out. An empty value counts as not set.

    Raises:
        ToggleError: a variable is unknown or has a value that is not good.
    """
    variables = os.environ if environment is None else environment
    unknown = sorted(name for name in variables if name.startswith("CGLAB_") and name not in VARIABLES)
    if unknown:
        raise ToggleError(no_such("setting", unknown[0], VARIABLES))
    requested = variables.get("CGLAB_DEVICE") or "auto"
    if requested not in DEVICES:
        message = f"CGLAB_DEVICE={requested!r} is not a device setting; good values are {', '.join(DEVICES)}"
        raise ToggleError(message)
    folder = variables.get("CGLAB_DATA")
    data = Path(folder) if folder else Path(__file__).resolve().parent.parent / "data"
    if folder and not data.is_dir():
        message = (
            f"CGLAB_DATA={folder!r} is not a folder; name an existing folder, "
            "or unset it to use the repository's own data/"
        )
        raise ToggleError(message)
    ops = variables.get("CGLAB_OPS") or "auto"
    if ops not in FORMS:
        message = f"CGLAB_OPS={ops!r} is not a form of ops; good values are {', '.join(FORMS)}"
        raise ToggleError(message)
    model = variables.get("CGLAB_MODEL") or "pico-gqa"
    thrown = {name: variables.get(name) or "0" for name in KILL_SWITCHES}
    for name, value in thrown.items():
        if value not in SWITCH:
            message = f"{name}={value!r} is no switch; good values are {', '.join(SWITCH)}"
            raise ToggleError(message)
    python = variables.get(SGLANG_PYTHON)
    return Settings(
        requested, model, data, None if ops == "auto" else ops,
        switches=frozenset(name for name, value in thrown.items() if value == "1"),
        sglang_python=user_path(python) if python else None,
    )  # fmt: skip


def device(settings: Settings | None = None) -> torch.device:
    """Resolve the device to work on; the first call may initialise CUDA.

    Args:
        settings: as read before; read from the environment if left out.

    Returns:
        The CPU, or the current CUDA device with its index.

    Raises:
        DeviceError: CUDA is asked for and there is no device.
        ToggleError: as :func:`read_settings`.
    """
    return named_device((settings or read_settings()).device, source="CGLAB_DEVICE")


def named_device(requested: str, *, source: str = "device") -> torch.device:
    """The device of a name: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.

    Args:
        requested: the name.
        source: where it was asked for, for the message.

    Raises:
        DeviceError: there is no such device here.
    """
    # Here, so that reading settings stays free of torch.
    import torch

    if requested == "cpu":
        return torch.device("cpu")
    present = torch.cuda.is_available()
    if requested == "auto" and not present:
        return torch.device("cpu")
    if requested in ("auto", "cuda") and present:
        return torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.device_count() if present else 0
    if requested in [f"cuda:{index}" for index in range(found)]:
        return torch.device(requested)
    good = ["auto", "cpu", *(["cuda"] if present else []), *(f"cuda:{index}" for index in range(found))]
    message = (
        f"{source}={requested!r} is not here: torch {torch.__version__} finds {found} CUDA device(s); "
        f"good values are {', '.join(good)}"
    )
    raise DeviceError(message)
