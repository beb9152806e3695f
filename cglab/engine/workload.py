"""Fixed decode steps for measuring: a batch of requests held at one context length.

Repeating the step writes the same KV at the same slots, so every arm does the same work from the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cglab.engine.engine import Engine
from cglab.engine.requests import Request


@dataclass(frozen=True)
class DecodeStep:
    """Inputs of one decode step that can be run over and over.

    Attributes:
        live: requests.
        context: tokens of each in the cache, the new one included.
        inputs: tensors by slot name.
    """

    live: int
    context: int
    inputs: dict[str, Tensor]


@contextmanager
def steady_decode(engine: Engine, batch: int, context: int, *, seed: int = 0) -> Iterator[DecodeStep]:
    """Admits ``batch`` requests with random prompts of ``context - 1`` tokens, prefills them, holds them.

    Args:
        engine: with enough free rows and pages.
        batch: live requests.
        context: length that attention sees in the step.
        seed: of the prompts.

    Raises:
        InputError: if they do not fit the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, max(context - 1, 1))
    prompts = torch.randint(0, engine.model.config.vocab_size, shape, generator=generator).tolist()
    engine.check(prompts, [1] * batch)
    requests = [Request(index, prompt, 1) for index, prompt in enumerate(prompts)]
    try:
        for request in requests:
            if not engine.admit(request):
                engine.rows.take(batch)  # raises with the numbers
            request.output.append(int(engine.prefill(request).argmax()))
        yield DecodeStep(batch, shape[1] + 1, engine.decode_inputs(requests))
    finally:
        for request in requests:
            engine.release(request)
