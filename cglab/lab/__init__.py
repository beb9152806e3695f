"""The facade: open a model, toggle captures, generate, compare, profile, close."""

from cglab.lab.facade import Lab, open_lab

__all__ = ["Lab", "open_lab"]
