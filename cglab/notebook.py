"""What every notebook starts with, and how its cells speak.

nbval compares the cells that are marked as checked, on a CPU and on a GPU alike. So checked cells print facts
(:func:`fact`: structure, counts, equality) and never measurements; a number that varies is said as a word
(:func:`within`); and what a machine cannot do is said by the cell itself (:func:`not_run`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from cglab import settings
from cglab.errors import InputError
from cglab.models.sources import shipped_drafts
from cglab.ui.magic import load_ipython_extension


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a notebook runs and on what.

    Attributes:
        device: ``cpu``, or a CUDA device with its index, such as ``cuda:0``.
        model: name, folder or hub id of the model under test.
        data: folder of shipped models, published tables and recorded results.
    """

    device: str
    model: str
    data: Path

    @property
    def has_cuda(self) -> bool:
        """Whether this notebook records real CUDA graphs; otherwise the tape stands in."""
        return self.device != "cpu"

    @property
    def draft(self) -> str:
        """The draft model for it: the shipped one of ``pico-gqa``; of any other model one of random weights."""
        return "pico-gqa-assistant" if self.model == "pico-gqa" else "random"

    @property
    def block_draft(self) -> str:
        """The same of block drafts."""
        own = f"{self.model}-dflash"
        return own if own in shipped_drafts() else "random-block"


def setup() -> Bench:
    """Prepare a notebook: read the settings, choose the device, style the plots, and bring ``%%cglab_doctor``.

    Prints one line, the same on every machine; the machine's own facts are in the returned value.

    Raises:
        ToggleError: an environment variable has a bad value.
        DeviceError: CUDA is asked for and there is no device.
    """
    # Plots load plotly, which only a notebook needs.
    from cglab.ui.plots import register_template

    chosen = settings.read_settings()
    bench = Bench(device=str(settings.device(chosen)), model=chosen.model, data=chosen.data)
    register_template()
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        load_ipython_extension(shell)
    print("cglab is ready: settings read, device chosen, plots styled")
    return bench


def model_name() -> str:
    """The model under test: ``CGLAB_MODEL``, or ``pico-gqa``."""
    return settings.read_settings().model


def fact(name: str, value: object) -> None:
    """Print ``name: value``, for checked cells.

    Raises:
        InputError: the value is a float: a measurement differs from run to run.
    """
    if isinstance(value, float):
        message = (
            f"{name} is the measurement {value!r}, which differs from run to run; "
            "a fact is a count, a word or a truth value. Say it with within(value, low, high)"
        )
        raise InputError(message)
    print(f"{name}: {value}")


def within(value: float, low: float, high: float) -> str:
    """Say in words whether a measured number lies in ``[low, high]``, in the number's own unit.

    Raises:
        InputError: the bounds are not in order.
    """
    if not low <= high:
        message = f"the bounds {low} and {high} are not in order; give the lower one first"
        raise InputError(message)
    if math.isnan(value):
        return "not a number"
    if value < low:
        return f"below {low}"
    if value > high:
        return f"above {high}"
    return f"within {low} to {high}"


def not_run(reason: str, *, recorded: str | None = None) -> None:
    """Say that a cell's work was not done on this machine, and what stands in for it.

    Args:
        reason: what is missing, such as ``no CUDA device``.
        recorded: where and when the result that is shown instead was recorded, such as
            ``an H200 on 2026-11-29``.
    """
    print(f"not run: {reason}" + (f"; recorded on {recorded}:" if recorded else ""))
