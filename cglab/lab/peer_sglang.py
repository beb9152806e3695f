"""SGLang as a peer: its own process on the same device, taking turns; always told with its attention and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from cglab.errors import InputError
from cglab.lab.peer import REPLAYS, Point
from cglab.measure.record import Metric
from cglab.models.presets import PRESETS
from cglab.serving.arm import model_path
from cglab.serving.random_weights import RANDOM_WEIGHTS, write_folder
from cglab.serving.token_worker import TokenWorker

SAMPLING: Final = ("--sampling-backend", "pytorch", "--grammar-backend", "none")
ON_GPU: Final = (
    "--attention-backend", "triton", "--cuda-graph-backend-decode", "full", "--mem-fraction-static", "0.5",
)  # fmt: skip
ON_CPU: Final = (
    "--device", "cpu", "--attention-backend", "torch_native", "--cuda-graph-backend-decode", "disabled",
    "--mem-fraction-static", "0.3",
)  # fmt: skip


def worker_arguments(
    model: str,
    folder: Path,
    dtype: torch.dtype,
    *,
    batch: int,
    context: int,
    on_gpu: bool,
    prefill: Sequence[int] = (),
) -> tuple[str, ...]:
    """What SGLang is started with, so that its steps are those of the lab.

    Args:
        model: a shape of ``PRESETS``, whose weights are then random, or what else names a model.
        folder: where a shape is written for it.
        dtype: of the weights.
        batch: most requests.
        context: tokens of a request at most: the length of the lab's cache.
        on_gpu: with graphs and Triton's attention; else neither.
        prefill: tokens of its breakable prefill graphs; none captures none.
    """
    kind, random = str(dtype).removeprefix("torch."), model in PRESETS
    path = str(write_folder(PRESETS[model], folder, kind)) if random else model_path(model)
    graphs = ("breakable", "--cuda-graph-bs-prefill", *map(str, prefill)) if prefill else ("disabled",)
    return (
        "--model-path", path, *(RANDOM_WEIGHTS if random else ()), "--dtype", kind, *SAMPLING,
        *((*ON_GPU, "--cuda-graph-backend-prefill", *graphs) if on_gpu else ON_CPU), "--context-length", str(context),
        "--max-total-tokens", str(batch * context), "--max-running-requests", str(batch),
        "--batch-size", str(batch), "--input-len", "8", "--output-len", "2",
    )  # fmt: skip


class SglangPeer:
    """One batch on a worker; see ``lab.peer.Peer``.

    Its cache grows with every step, so it begins anew with every turn, as much before the lab's context as a turn has
    steps: its last step is as long as the lab's, and all others are shorter.

    Args:
        worker: of SGLang.
        point: the step.
        turn: steps of a turn, warm-ups among them.
    """

    def __init__(self, worker: TokenWorker, point: Point, *, turn: int) -> None:
        if turn >= point.step.context:
            raise InputError(
                f"turns of {turn} steps do not fit before a context of {point.step.context} tokens"
            )
        self._worker, self._point, self._turn, self._left = worker, point, turn, 0
        self._ids: list[int] = []
        self.same_weights = point.lab.weights == "trained"
        facts, graphs = worker.facts, [each for each in worker.captured if each.phase == "decode"]
        self.metrics: dict[str, Metric] = {"ready_s": worker.ready_s}
        for graph in graphs:
            self.metrics |= {"capture_s": graph.seconds, "held_gb": graph.memory_gb}
        self.note = (
            f"SGLang {worker.installed.version} on torch {facts['torch']}, {facts['attention']}, PyTorch sampling, "
            f"decode graphs {'full' if graphs else 'none'}; its ModelRunner as its one-batch benchmark calls it, in a "
            "process of its own whose turns alternate with the lab's. Places in its cache are taken within the step."
        )
        if not self.same_weights:
            self.note += " Weights of the same shape, random and its own, so tokens are not compared."

    def tokens(self) -> list[int]:
        """See ``Peer``."""
        self._worker.ask("begin", prompts=self._point.prompts)
        self._left = 0
        told: list[int] = self._worker.ask("step", tokens=self._point.ids)["tokens"]
        return told

    def seconds(self) -> float:
        """See ``Peer``; told by the worker, so what is asked of it does not count."""
        if not self._left:
            self._begin(self._turn)
        self._left -= 1
        answer = self._worker.ask("step", tokens=self._ids)
        self._ids = answer["tokens"]
        return float(answer["seconds"])

    def replay_seconds(self, calls: int) -> float:
        """See ``Peer``: its forward, which copies into its buffers, plans attention and replays."""
        samples = []
        for _ in range(REPLAYS):
            self._begin(1)
            samples.append(float(self._worker.ask("launch", calls=calls)["seconds"]))
        self._left = 0
        return sorted(samples)[len(samples) // 2]

    def host_us(self) -> None:
        """See ``Peer``: it has no launch without what comes before it."""

    def _begin(self, steps: int) -> None:
        """Prompts that are as much shorter as the steps that follow."""
        known = self._point.step.context - steps
        self._ids = self._worker.ask("begin", prompts=[prompt[:known] for prompt in self._point.prompts])[
            "tokens"
        ]
        self._left = steps
