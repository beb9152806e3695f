"""Every arm of a sparse prefill on mixed requests, to the bit, from the floor on that is measured first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cglab.errors import InputError
from cglab.lab.bucket_floor import bucket_floor
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.sparse_arms import ARMS, check_arms, mixed_prompts
from cglab.lab.sparse_prefill import require_latent
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.record import Record, make_record, new_run
from cglab.models.loading import find_model

SMALL: dict[str, Any] = {"token_budget": 32, "prefill_buckets": (4, 8, 16, 32)}
LARGE: dict[str, Any] = {"token_budget": 256, "prefill_buckets": (32, 48, 64, 80, 96, 112, 128, 192, 256)}
"""For models that keep more keys than a small step has: buckets at both sides of S3's floor."""
CONCURRENCY = 4


def dsa_arms(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    model: str = "dsa-tiny",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Iterator[Record]:
    """Every arm on the same requests, logits compared with those of the arm with breaks.

    Args:
        device: where it runs.
        quick: float32 alone.
        progress: called with a line for every stage.
        model: one with latent attention.
        dtypes: of weights and computation.

    Yields:
        A record for each arm and dtype.

    Raises:
        ToggleError: for a model without latent attention.
        InputError: if no dtype is asked for.
    """
    if not dtypes:
        raise InputError("no dtype is asked for; give float32 or bfloat16")
    shape, run = require_latent(find_model(model).config, "an arm of sparse prefill"), new_run()
    sizes = SMALL if shape.index_topk < SMALL["token_budget"] else LARGE
    for dtype in dtypes[:1] if quick else dtypes:
        progress(f"{model} in {dtype}: the floors")
        with open_lab(
            model, device=device, dtype=dtype, max_batch=CONCURRENCY, max_context=2 * shape.index_topk + 64, **sizes
        ) as lab:  # fmt: skip
            floors = [bucket_floor(lab, arm) for arm in ARMS[1:]]
            lab.phases.bucket_floor = max(floor.measured for floor in floors)
            progress(f"{model} in {dtype}: {len(ARMS)} arms")
            yield from _records(lab, [str(floor) for floor in floors], run)


def _records(lab: Lab, floors: Sequence[str], run: str) -> Iterator[Record]:
    rounds = mixed_prompts(lab)
    for found, told in zip(check_arms(lab), ("", *floors), strict=True):
        yield make_record(
            bench="dsa_arms", arm=found.arm, device=lab.device, run=run,
            metrics={
                "requests": float(found.requests), "differing": float(len(found.differing)),
                "tokens_equal": found.tokens_equal, "steps": float(found.coverage["prefill"].steps),
                "captured": float(found.coverage["prefill"].captured), "ok": found.ok,
            },
            workload={
                "lengths": [[len(prompt) for prompt in prompts] for prompts in rounds],
                "bucket_floor": lab.phases.bucket_floor, "buckets": list(lab.prefill_buckets),
            },
            parity={"verdict": "bitwise" if not found.differing else "corrupted"},
            coverage={name: each.as_dict() for name, each in found.coverage.items()}, notes=told, **model_facts(lab),
        )  # fmt: skip
