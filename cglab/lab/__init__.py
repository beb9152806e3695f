"""The facade: open a model, toggle captures, generate, compare, profile, close."""

from cglab.lab.facade import Lab
from cglab.lab.facade import open_lab as open  # noqa: A004 - cglab.open is the lab's front door

__all__ = ["Lab", "open"]
