"""The facade: open a model, toggle captures, generate, compare, profile, close."""

from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab

__all__ = ["Lab", "open_lab"]
