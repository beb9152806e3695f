"""Peers of ``transformers``: its model over the very tensors of the lab's, eager, compiled, and batched continuously.

Query, key and value are rows of one matrix of the lab's, so a view of it is the checkpoint's tensor: both models hold
the same memory, and their tokens can be compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from cglab.errors import DeviceError, InputError
from cglab.lab.peer import LocalPeer, Peer, Point, getting_ready
from cglab.lab.peer_graphs import graphs_skipped, told_skipped
from cglab.lab.transformers_arm import CachedStep, random_transformers, transformers_arm
from cglab.measure.record import Metric
from cglab.models.decoder import Decoder
from cglab.models.layout import checkpoint_layout

READY_CALLS: Final = 4
GAPS: Final = 28
"""Steps of one run of continuous batching; the first two gaps, which hold the end of the prefill, do not count."""
CACHE_SHARE: Final = 0.2
"""Of the memory that is free, for the cache of continuous batching, which would take nine tenths."""


def shared_weights(model: Decoder, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A causal model of ``transformers`` whose parameters are views of the lab's.

    Args:
        model: whose weights are taken.
        device: where they lie.
        dtype: their dtype.

    Raises:
        ModelError: if this version of ``transformers`` has no model of the architecture.
        InputError: if it has a weight that the lab's has not, or the other way round.
    """
    theirs, held = (
        random_transformers(model.config, device=device, dtype=dtype),
        dict(model.named_parameters()),
    )
    views: dict[str, Tensor] = {}
    for name, piece in checkpoint_layout(model.config).items():
        rows = piece.of(held[piece.parameter]).detach()
        views[name] = rows if tuple(rows.shape) == piece.shape else rows[0]  # a head's norm, repeated
    missing, unknown = theirs.load_state_dict(views, strict=False, assign=True)
    theirs.tie_weights()
    if unknown or set(missing) - {"lm_head.weight"}:
        raise InputError(f"transformers' model has other weights than ours: {[*missing, *unknown][:3]}")
    return theirs.requires_grad_(requires_grad=False)


def _tokens(step: CachedStep, point: Point) -> list[int]:
    step.tokens = torch.tensor(point.ids).to(point.lab.device).unsqueeze(1)
    chosen: list[int] = step().flatten().tolist()
    return chosen


def _local(step: CachedStep, point: Point, note: str, metrics: dict[str, Metric]) -> LocalPeer:
    return LocalPeer(
        point.lab.device, partial(_tokens, step, point), step, note, metrics, restart=step.restart
    )


@contextmanager
def eager_peer(point: Point, model: Any) -> Iterator[Peer]:
    """Eager, on the cache that makes the faster step.

    Args:
        point: the step.
        model: of :func:`shared_weights`.
    """
    chosen = transformers_arm(model, point.step, point.lab.device, calls=1, length=point.lab.max_context)
    told = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in chosen.seconds.items())
    note = f"transformers, eager, SDPA, {chosen.step.cache} (the faster: {told}), argmax."
    yield _local(chosen.step, point, note, {"ready_s": 0.0, "held_gb": 0.0})


class StaticStep(CachedStep):
    """Steps on a static cache that is rewound in place, as graphs hold its addresses."""

    def restart(self) -> None:
        """Back to the end of the prompt; what lies after it is not seen."""
        self._held, self.tokens = self._prompt, self._first
        for layer in self._prompt.layers:
            layer.cumulative_length.fill_(self._context - 1)


@contextmanager
def compile_peer(point: Point, model: Any) -> Iterator[Peer]:
    """The forward compiled with ``mode="reduce-overhead"`` over a static cache, as its documentation has it.

    Raises:
        DeviceError: on a CPU, where that mode records no graph.
    """
    lab = point.lab
    if lab.device.type != "cuda":
        raise DeviceError("torch.compile(mode='reduce-overhead') records CUDA graphs; it needs a CUDA device")
    step = StaticStep(model, "StaticCache", point.step.live, point.step.context, length=lab.max_context)
    before = graphs_skipped()
    with getting_ready(lab.device) as metrics:
        step.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for _ in range(READY_CALLS):
            step.restart()
            _tokens(step, point)
    skipped = graphs_skipped() - before
    note = (
        f"transformers, forward compiled with mode='reduce-overhead', SDPA, StaticCache of {lab.max_context} tokens, "
        f"argmax outside of it.{told_skipped(skipped)}"
    )
    yield _local(step, point, note, {**metrics, "graphs_skipped": float(skipped)})


class BatchingPeer:
    """Continuous batching, timed by the stamps that it puts on tokens; see ``Peer``.

    Its loop prepares a step while the one before it runs, so the time between tokens is what a step costs there, its
    scheduler included. A launch cannot be told apart.

    Args:
        point: the step; its prompts are computed anew in every run, with the step's token at their end.
        run: computes so many tokens of each prompt; gives tokens and stamps of each request.
        metrics: what getting ready took.
    """

    same_weights = True

    def __init__(
        self,
        point: Point,
        run: Callable[[list[list[int]], int], list[tuple[list[int], list[float]]]],
        metrics: dict[str, Metric],
    ) -> None:
        self.metrics = metrics
        self.note = (
            "transformers.generate_batch: the time between tokens by its own stamps, scheduler included; its loop "
            "prepares a step while the one before runs."
        )
        self._run, self._gaps = run, deque[float]()
        self._prompts = [[*prompt, token] for prompt, token in zip(point.prompts, point.ids, strict=True)]

    def tokens(self) -> list[int]:
        """See ``Peer``."""
        return [tokens[0] for tokens, _ in self._run(self._prompts, 1)]

    def seconds(self) -> float:
        """See ``Peer``: the next gap of a run of ``GAPS`` steps."""
        if not self._gaps:
            stamps = [times for _, times in self._run(self._prompts, GAPS + 1)]
            steps = [max(at) for at in zip(*stamps, strict=True)]  # a step is over with its last token
            self._gaps.extend([later - earlier for earlier, later in pairwise(steps)][2:])
        return self._gaps.popleft()

    def replay_seconds(self, calls: int) -> None:
        """See ``Peer``."""

    def host_us(self) -> None:
        """See ``Peer``."""


@contextmanager
def batching_peer(point: Point, model: Any) -> Iterator[Peer]:
    """Continuous batching, its manager started anew with every turn: its thread would share the others' time.

    Args:
        point: the step.
        model: of :func:`shared_weights`.
    """
    import transformers

    sizes = transformers.ContinuousBatchingConfig(max_memory_percent=CACHE_SHARE, allow_block_sharing=False)

    def run(prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
        chosen = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
        found = model.generate_batch(
            prompts, generation_config=chosen, continuous_batching_config=sizes, record_timestamps=True
        )
        if len(found) != len(prompts):
            raise InputError(f"generate_batch answered {len(found)} of {len(prompts)} requests; see its log")
        return [(each.generated_tokens, each.timestamps) for each in found.values()]

    with getting_ready(point.lab.device) as metrics:
        run(point.prompts, GAPS + 1)
    yield BatchingPeer(point, run, metrics)
