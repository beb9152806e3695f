"""Fixed steps of speculative decoding for measuring: a seed step, a draft loop, a verify pass, or all of them.

Requests are held still as ``workload.steady_decode`` holds them, over real keys, values and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from cglab.engine.batches import Chunk, DecodeBatch
from cglab.engine.engine import Engine
from cglab.engine.inputs import step_inputs
from cglab.engine.speculator import Speculator
from cglab.engine.workload import DecodeStep, steady_decode
from cglab.errors import InputError
from cglab.models.draft_tree import Draft, verify_inputs
from cglab.runners.base import window_inputs
from cglab.runners.seed_step import Drafted


@contextmanager
def steady_draft(
    engine: Engine, phase: str, batch: int, context: int, *, seed: int = 0
) -> Iterator[DecodeStep]:
    """Holds a step of one phase of speculative decoding.

    What the phases before it hand on is computed eager, once.

    Args:
        engine: with a speculator, and enough free rows and pages.
        phase: ``seed_step``, ``draft_loop`` or ``verify``.
        batch: live requests.
        context: tokens of each, of which all but the newest are in the cache.
        seed: of the prompts.

    Raises:
        InputError: without a speculator, or as ``steady_decode``.
    """
    speculator = _speculator(engine)
    with steady_decode(engine, batch, context, seed=seed) as step:
        rows, newest = step.inputs["request_rows"], step.inputs["input_ids"]
        where = {"request_rows": rows, "seq_lens": step.inputs["seq_lens"] - 1}
        inputs = {"input_ids": newest, "hidden": speculator.hidden.index_select(0, rows), **where}
        seed_runner = speculator.phases.seed_step()
        if phase != "seed_step" and seed_runner is not None:
            drafted: Drafted = seed_runner.run_live_eager(batch, **inputs)
            inputs = drafted._asdict() | where
        if phase == "verify":
            draft = Draft(*speculator.phases.draft_loop().run_live_eager(batch, **inputs))
            inputs = _verify_inputs(engine, speculator, newest, draft)
        yield DecodeStep(batch, context, inputs)


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


def _speculator(engine: Engine) -> Speculator:
    if engine.speculator is None:
        raise InputError("steps of drafts need a draft model; open the model with draft=")
    return engine.speculator


def _held(engine: Engine) -> DecodeBatch:
    """The batch that is held in flight."""
    return DecodeBatch(tuple(engine.scheduler.running))


def _verify_inputs(engine: Engine, speculator: Speculator, newest: Tensor, draft: Draft) -> dict[str, Tensor]:
    speculation = speculator.speculation
    chunks = [Chunk(r, r.computed, speculation.width, last=True) for r in _held(engine).requests]
    names = ("request_rows", "seq_lens", "out_slots", *window_inputs(engine.kv))
    return step_inputs(chunks, names, engine.kv) | verify_inputs(newest, draft, speculation.topk)
