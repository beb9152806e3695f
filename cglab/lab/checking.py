"""``check_technique``: random sequences of one technique against the three oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cglab.errors import ToggleError
from cglab.lab.decode_cases import DecodeOracles
from cglab.lab.oracles import StepOracles
from cglab.lab.plants import planted
from cglab.lab.prefill_cases import PrefillOracles
from cglab.lab.techniques import technique
from cglab.lab.verdicts import TechniqueParity
from cglab.models.loading import load_model

CASES: Mapping[str, Callable[..., StepOracles[Any]]] = {"decode": DecodeOracles, "prefill": PrefillOracles}
"""How each available technique is checked; the suite fails for one that is missing here."""


def check_technique(
    name: str,
    cases: int,
    *,
    device: torch.device,
    seed: int = 0,
    plant: str | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int], None] | None = None,
) -> TechniqueParity:
    """Runs random sequences of a technique against the three oracles.

    Args:
        name: an available technique.
        cases: sequences.
        device: the recorder follows from it.
        seed: the same seed draws the same sequences.
        plant: a guard to take away, see ``plants.PLANTS``; the result must then not be ok.
        dtype: float32 judges all three oracles; a lower precision reports what oracle 2 finds without failing it.
        progress: called with the number of finished cases.

    Raises:
        ToggleError: for an unknown or unavailable technique, or fewer than one case.
    """
    if cases < 1:
        raise ToggleError(f"cases must be at least 1, got {cases}")
    technique(name).check(technique(name).values[0])
    with planted(plant):
        oracles = CASES[name](load_model("pico-gqa", device=device, dtype=dtype), device, seed)
        try:
            for number in range(cases):
                oracles.case(number)
                if progress is not None:
                    progress(number + 1)
            return oracles.judge()
        finally:
            oracles.close()
