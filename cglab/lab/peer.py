"""One decode step with the same boundary for every peer: token ids on the host in, the next ids on the host out.

Within lies all that a step needs each time: building its inputs, copying them to the device, the forward, the greedy
choice, and reading the tokens. Who runs next lies outside. SGLang's step also takes a place in its cache for a token;
the lab takes pages of them outside. Beside it stands the replay alone: the same launch over inputs that are on the
device already, with nothing read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from cglab.engine.batches import DecodeBatch
from cglab.engine.inputs import step_inputs
from cglab.engine.workload import DecodeStep
from cglab.errors import InputError
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.graphs.options import Options
from cglab.lab.facade import Lab
from cglab.lab.step_metrics import bare, host_us, ledger_metrics
from cglab.measure.record import Metric
from cglab.models.body import Portable
from cglab.models.decoder import Decoder
from cglab.runners.base import GraphGroup
from cglab.runners.decode import DecodeRunner

REPLAYS = 5
"""Samples of a replay alone."""
HOST_SAMPLES = 10


class Peer(Protocol):
    """Someone who computes the step, ready to be measured.

    Attributes:
        note: what computes it: whose attention, whose choice of tokens, what is captured.
        metrics: what getting ready took: ``ready_s`` in all, ``held_gb`` of graphs and what they need.
        same_weights: whether its tokens can be compared.
    """

    note: str
    metrics: dict[str, Metric]
    same_weights: bool

    def tokens(self) -> list[int]:
        """The next token of each request."""
        ...

    def seconds(self) -> float:
        """Of one step, host to host."""
        ...

    def replay_seconds(self, calls: int) -> float | None:
        """Of one launch of ``calls`` in a row; None where it cannot be told apart."""
        ...

    def host_us(self) -> float | None:
        """Microseconds until one launch returns, the device idle before; None likewise."""
        ...


@dataclass(frozen=True)
class Point:
    """The step that every peer computes.

    Attributes:
        lab: whose model, cache and prompts they are.
        step: its size, and its inputs on the device.
        batch: the same, planned and in flight for as long as the step is held.
    """

    lab: Lab
    step: DecodeStep
    batch: DecodeBatch

    @classmethod
    def of(cls, lab: Lab, step: DecodeStep) -> Point:
        """The point of a step that ``steady_decode`` holds."""
        batch = lab.engine.scheduler.in_flight
        if not isinstance(batch, DecodeBatch):
            raise InputError("no decode step is held; make the point within steady_decode")
        return cls(lab, step, batch)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of each request that the cache holds."""
        return [request.prompt for request in self.batch.requests]

    @property
    def ids(self) -> list[int]:
        """The token that goes into the step, of each request."""
        return [request.output[-1] for request in self.batch.requests]

    def host_inputs(self) -> dict[str, Tensor]:
        """The step's inputs, built on the host and copied to the device: what every step pays."""
        return step_inputs(self.batch.chunks, tuple(self.step.inputs), self.lab.engine.kv)


@dataclass
class LocalPeer:
    """A peer in this process; see ``Peer``.

    Attributes:
        device: what it computes on.
        token: one step, host to host.
        launch: its forward over inputs on the device.
        restart: brings it back to the state before the step; never timed.
    """

    device: torch.device
    token: Callable[[], list[int]]
    launch: Callable[[], object]
    note: str
    metrics: dict[str, Metric] = field(default_factory=dict)
    restart: Callable[[], object] = lambda: None
    same_weights: bool = True

    @torch.no_grad()
    def tokens(self) -> list[int]:
        """See ``Peer``."""
        self.restart()
        return self.token()

    @torch.no_grad()
    def seconds(self) -> float:
        """See ``Peer``; it ends with a read, which waits for the device."""
        self.restart()
        clock_for(self.device, "wall").synchronize()
        started = perf_counter()
        self.token()
        return perf_counter() - started

    @torch.no_grad()
    def replay_seconds(self, calls: int) -> float:
        """See ``Peer``."""
        clock, samples = clock_for(self.device, "wall"), []
        for _ in range(REPLAYS):
            self.restart()
            samples += sample_seconds(self.launch, clock, repeats=1, warmup=1, calls=calls)
        return median(samples)

    @torch.no_grad()
    def host_us(self) -> float:
        """See ``Peer``."""
        self.restart()
        return host_us(self.launch, self.device, HOST_SAMPLES)


Builder = Callable[[Point], AbstractContextManager[Peer]]
"""Makes a peer ready; it is given back at the end of the context."""


@contextmanager
def lab_peer(point: Point, mode: str, note: str) -> Iterator[Peer]:
    """The lab's own step, by the engine's own code.

    Args:
        point: the step.
        mode: value of the decode toggle.
        note: of the record.
    """
    lab, step = point.lab, point.step
    runner = lab.runner(mode)
    ledger = runner.captured.ledger
    metrics: dict[str, Metric] = {**ledger_metrics(ledger), "compile_s": lab.compile_seconds}
    spent = sum(cost.capture_seconds + cost.warmup_seconds for cost in ledger)
    metrics |= {"ready_s": lab.compile_seconds + spent, "held_gb": metrics.get("capture_gb", 0.0)}
    runner.run(step.live, **step.inputs)
    replay = bare(runner, step) if ledger else partial(runner.run, step.live, **step.inputs)
    yield LocalPeer(
        lab.device, lambda: [token for (token,) in lab.engine.compute(point.batch)], replay,
        f"The lab's engine, decode={mode}, {lab.ops} operations. {note}", metrics,
        restart=partial(setattr, lab.captures, "decode", mode),
    )  # fmt: skip


def plain_model(model: Decoder) -> Decoder:
    """The same weights computed by PyTorch's own operators, block after block."""
    plain = copy(model)
    plain.body = Portable()
    return plain


@contextmanager
def plain_peer(point: Point, mode: str, note: str) -> Iterator[Peer]:
    """The plain modules, eager or captured by themselves: what a graph buys without anything else.

    Args:
        point: the step.
        mode: ``eager`` or ``full``.
        note: of the record.
    """
    lab, step = point.lab, point.step
    group = GraphGroup(lab.device)
    try:
        runner = DecodeRunner(plain_model(lab.model), lab.engine.kv, group, [step.live], Options(mode))
        try:
            runner.capture()
            runner.run(step.live, **step.inputs)
            costs: dict[str, Metric] = {**ledger_metrics(runner.captured.ledger)}
            spent = sum(c.capture_seconds + c.warmup_seconds for c in runner.captured.ledger)
            costs |= {"ready_s": spent, "held_gb": costs.get("capture_gb", 0.0)}

            def token() -> list[int]:
                chosen: list[int] = runner.run(step.live, **point.host_inputs())[0].tolist()
                return chosen

            launch = bare(runner, step) if mode != "eager" else partial(runner.run, step.live, **step.inputs)
            yield LocalPeer(lab.device, token, launch, note, costs)
        finally:
            runner.close()
    finally:
        group.close()


def used_gb(device: torch.device) -> float:
    """Gigabytes in use on a device by the driver's account; 0.0 on a CPU, where other processes move it."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free) / 1e9


@contextmanager
def getting_ready(device: torch.device) -> Iterator[dict[str, Any]]:
    """Fills a dictionary with ``ready_s`` and ``held_gb`` of what is done within."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or a block that is free already would be given for nothing
    told: dict[str, Any] = {}
    held, started = used_gb(device), perf_counter()
    yield told
    told["held_gb"] = used_gb(device) - held
    told["ready_s"] = perf_counter() - started
