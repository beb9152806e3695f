"""A lab for CUDA graphs in LLM inference: capture a step, replay it, measure it, compare it.

The public names below are loaded on first use: ``import cglab`` takes milliseconds, loads neither torch nor
the notebook libraries, and touches no device.

    captured = cglab.capture(function, slots={"x": cglab.Slot(pad=0.0)}, buckets=(1, 2, 4, 8))
    lab = cglab.open("pico-gqa")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> where it lives: a module, or "module:attribute".
_HOMES = {
    "Load": "cglab.engine.load:Load",
    "Padding": "cglab.graphs.slots:Padding",
    "Request": "cglab.engine.requests:Request",
    "Sampling": "cglab.engine.requests:Sampling",
    "Slot": "cglab.graphs.slots:Slot",
    "Speculation": "cglab.engine.speculation:Speculation",
    "capture": "cglab.graphs.capture:capture",
    "doctor": "cglab.graphs.doctor:doctor",
    "eager_break": "cglab.graphs.breaks:eager_break",
    "errors": "cglab.errors",
    "load_ipython_extension": "cglab.ui.magic:load_ipython_extension",  # for %load_ext cglab
    "notebook": "cglab.notebook",
    "open": "cglab.lab:open_lab",
}

__all__ = [
    "Load",
    "Padding",
    "Request",
    "Sampling",
    "Slot",
    "Speculation",
    "__version__",
    "capture",
    "doctor",
    "eager_break",
    "errors",
    "load_ipython_extension",
    "notebook",
    "open",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    module, _, attribute = home.partition(":")
    value = import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
