"""The one door from results up to their pictures: results know which view shows them, not how it is drawn."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def draw(view: str, *data: Any, **options: Any) -> Any:
    """Draws ``data`` with ``cglab.ui.plots.<view>``; plotly is loaded here and not before.

    Returns:
        A plotly figure.
    """
    return getattr(import_module("cglab.ui.plots"), view)(*data, **options)


def show(view: str, *data: Any) -> Any:
    """The widgets of ``cglab.ui.dashboard.<view>`` on ``data``; ipywidgets is loaded here and not before."""
    return getattr(import_module("cglab.ui.dashboard"), view)(*data)
