"""``check_technique``: random sequences of one technique against the three oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cglab.errors import ToggleError
from cglab.lab.block_cases import BlockOracles
from cglab.lab.decode_cases import DecodeOracles
from cglab.lab.draft_cases import LoopOracles, SeedOracles, VerifyOracles
from cglab.lab.extend_cases import ExtendOracles
from cglab.lab.oracles import StepOracles
from cglab.lab.pipeline_cases import PipelineOracles
from cglab.lab.plants import planted
from cglab.lab.prefill_cases import PrefillOracles
from cglab.lab.sparse_cases import IndexerOracles, SparseAttentionOracles
from cglab.lab.techniques import SPARSE, technique
from cglab.lab.verdicts import TechniqueParity
from cglab.models.loading import LoadedModel, find_model, load_model, random_model
from cglab.models.ops import check_ops

CASES: Mapping[str, type[StepOracles[Any]]] = {
    "decode": DecodeOracles, "verify": VerifyOracles, "draft_loop": LoopOracles, "seed_step": SeedOracles,
    "draft_sampler": BlockOracles, "prefill": PrefillOracles, "pp_prefill": PipelineOracles,
    "dsa_attention": SparseAttentionOracles, "dsa_indexer_prep": IndexerOracles, "draft_extend": ExtendOracles,
}  # fmt: skip
"""How each available technique is checked; the suite fails for one that is missing here."""

LATENT_ALONE = (*SPARSE, "draft_extend")
"""Those that only a model with latent attention has."""

OF_LATENT = ("decode", "pp_prefill", *LATENT_ALONE)
"""Those that are checked on one."""

MODEL, LATENT, WINDOW = "pico-gqa", "dsa-tiny", 20


def check_technique(
    name: str,
    cases: int,
    *,
    device: torch.device,
    seed: int = 0,
    plant: str | None = None,
    dtype: torch.dtype = torch.float32,
    windowed: bool = False,
    latent: bool = False,
    ops: str | None = None,
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
        windowed: the shipped model's shape with random weights, every second layer with a window that most sequences
            outgrow, instead of the shipped model.
        latent: a small random model with latent attention instead; one that is checked so anyway needs no word.
        ops: the form in which the model computes; None for the device's own default.
        progress: called with the number of finished cases.

    Raises:
        ToggleError: for an unknown or unavailable technique, fewer than one case, ops that the device or the model
            cannot use, or latent attention where it is not checked.
    """
    if cases < 1:
        raise ToggleError(f"cases must be at least 1, got {cases}")
    opened = opened_oracles(
        name, device=device, seed=seed, plant=plant, dtype=dtype, windowed=windowed, latent=latent, ops=ops
    )
    with opened as oracles:
        for number in range(cases):
            oracles.case(number)
            if progress is not None:
                progress(number + 1)
        return oracles.judge()


@contextmanager
def opened_oracles(
    name: str,
    *,
    device: torch.device,
    seed: int = 0,
    plant: str | None = None,
    dtype: torch.dtype = torch.float32,
    windowed: bool = False,
    latent: bool = False,
    ops: str | None = None,
) -> Iterator[StepOracles[Any]]:
    """The runners of a technique with their oracles, captured, and closed at the end; arguments as above.

    Raises:
        ToggleError: as ``check_technique``.
    """
    technique(name).check(technique(name).values[0])
    latent = latent or name in LATENT_ALONE
    if latent and (windowed or name not in OF_LATENT):
        raise ToggleError(
            f"{name} is not checked on a model with latent attention, nor any with windows; without these are "
            f"{', '.join(OF_LATENT)}"
        )
    loaded = load_model(LATENT, device=device, dtype=dtype) if latent else _model(windowed, device, dtype)
    form, called = check_ops(ops, device, loaded.config), LATENT if latent else MODEL
    with planted(plant):
        oracles = CASES[name](loaded, device, seed, form)
        oracles.result.model = f"{called} with windows" if windowed else called
        try:
            yield oracles
        finally:
            oracles.close()


def model_of(name: str) -> str:
    """The model that a technique is checked on."""
    return LATENT if name in LATENT_ALONE else MODEL


def _model(windowed: bool, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if not windowed:
        return load_model(MODEL, device=device, dtype=dtype)
    shape = find_model(MODEL).config
    config = replace(shape, sliding_window=WINDOW, window_layers=tuple(range(0, shape.num_layers, 2)))
    return LoadedModel(random_model(config, device=device, dtype=dtype), config, None, "random")
