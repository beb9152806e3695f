"""Fixed steps of speculative decoding for measuring: a seed step, a draft loop, a verify pass, or all of them.

Requests are held still as ``workload.steady_decode`` holds them, over real keys, values and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cglab.engine.batches import DecodeBatch
from cglab.engine.drafters import seeded
from cglab.engine.engine import Engine
from cglab.engine.speculator import Speculator
from cglab.engine.workload import DecodeStep, PrefillStep, steady_decode, steady_prefill
from cglab.errors import InputError


@contextmanager
def steady_draft(
    engine: Engine, phase: str, batch: int, context: int, *, seed: int = 0
) -> Iterator[DecodeStep]:
    """Holds a step of one phase of speculative decoding.

    What the phases before it hand on is computed eager, once.

    Args:
        engine: with a speculator, and enough free rows and pages.
        phase: ``verify``, or a technique of the drafter's runners; ``draft_sampler`` is the block draft's.
        batch: live requests.
        context: tokens of each, of which all but the newest are in the cache.
        seed: of the prompts.

    Raises:
        InputError: without a speculator, or as ``steady_decode``.
    """
    speculator = _speculator(engine)
    with steady_decode(engine, batch, context, seed=seed):
        phase = "block_draft" if phase == "draft_sampler" else phase
        given = _given(speculator, speculator.inputs(_held(engine).requests))
        yield DecodeStep(batch, context, next(inputs for name, inputs in given if name == phase))


@contextmanager
def steady_speculation(
    engine: Engine, batch: int, context: int, *, seed: int = 0
) -> Iterator[Callable[[], object]]:
    """Holds a whole speculative step: seed, loop, verify, and what the host makes of it.

    Args:
        engine: with a speculator, and enough free rows and pages.
        batch: live requests.
        context: tokens of each, of which all but the newest are in the cache.
        seed: of the prompts.

    Yields:
        A function that runs it: drafts start where the target left them, at the same place, and nothing is kept.

    Raises:
        InputError: without a speculator, or as ``steady_decode``.
    """
    speculator = _speculator(engine)
    with steady_decode(engine, batch, context, seed=seed):
        accepted, held = speculator.accepted, _held(engine)
        speculator.accepted = accepted.copy()
        try:
            yield lambda: speculator.step(held, engine.segments)
        finally:
            speculator.accepted = accepted


@contextmanager
def steady_extend(
    engine: Engine, tokens: int, cached: int = 0, requests: int = 1, *, seed: int = 0
) -> Iterator[PrefillStep]:
    """Holds the draft extend that follows a prefill step, over what the target makes of it; eager, once.

    Args:
        engine: with a NextN layer, and enough free rows and pages.
        tokens: as ``steady_prefill`` takes them, and so the next two.
        cached: tokens of each request that are in both caches before.
        requests: how many share the step.
        seed: of the prompts.

    Raises:
        InputError: without a speculator, or as ``steady_prefill``.
    """
    _speculator(engine)
    with steady_prefill(engine, tokens, cached, requests, seed=seed) as step:
        hidden = engine.phases.prefill().run_live_eager(step.live, **step.inputs)
        # A row's last token is followed by the next row's first: any token will do, as long as there is one.
        following = step.inputs["input_ids"].roll(-1)
        where = {name: step.inputs[name] for name in ("positions", "out_slots")}
        yield PrefillStep(step.live, {"input_ids": following, "hidden": hidden.clone(), **where})


def _speculator(engine: Engine) -> Speculator:
    if engine.speculator is None:
        raise InputError("steps of drafts need a draft model; open the model with draft=")
    return engine.speculator


def _held(engine: Engine) -> DecodeBatch:
    """The batch that is held in flight."""
    return DecodeBatch(tuple(engine.scheduler.running))


@torch.no_grad()
def _given(speculator: Speculator, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What each runner of a step is given, by technique and in order."""
    drafter, live = speculator.drafter, len(inputs["newest"])
    given = drafter.start(inputs)
    output: Any = given
    for name, runner in drafter.before_verify.items():
        yield name, given
        output = runner.run_live_eager(live, **given)
        if name == "seed_step":
            given = seeded(output, given)
    yield "verify", speculator.verify_inputs(drafter.proposal(output), inputs)
