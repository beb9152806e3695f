"""The first-token bench: one prompt from ids on the host to its first token on the host, by peers in turns.

Prefill of 128 to 8192 tokens by whoever computes one: the lab with and without graphs, ``transformers``, SGLang with
graphs of these very sizes. Nothing is cached, nobody waits, so it is TTFT without a server. The floor is the larger of
two: every weight read once, and the operations of the matrix products at the rate of a large one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from cglab.engine.batches import PrefillBatch
from cglab.engine.workload import PrefillStep, steady_prefill
from cglab.errors import CglabError, InputError
from cglab.lab.facade import Lab
from cglab.lab.floor import matmul_rate, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.peer import LocalPeer, Peer
from cglab.lab.peer_groups import run_apart
from cglab.lab.peer_turns import SGLANG, Judge, PeerTurns, Ready, unavailable
from cglab.lab.peers_bench import chosen_arms, shared, start_sglang
from cglab.lab.pooled import pooled, require_processes
from cglab.lab.step_metrics import Progress, ledger_metrics, model_facts, silent
from cglab.measure.record import Metric, Record, new_run
from cglab.serving.token_worker import TokenWorker

OURS: Final = "breakable"
"""The lab's default, which the others are compared with; always measured."""
MODES: Final = (OURS, "full", "eager")
ARMS: Final = (*MODES, "transformers", SGLANG)
TOKENS: Final = (128, 512, 2048, 8192)
QUICK_TOKENS: Final = (16, 64)
PROCESS: Final = ("-m", "cglab.lab.first_token_process")
"""What Python runs for each of several processes, with the file of its job."""
LIMIT: Final = 1200.0
"""Seconds for one."""


@dataclass(frozen=True)
class PromptPoint:
    """One prompt that every peer computes.

    Attributes:
        lab: whose model and cache they are.
        step: its prefill, held.
        batch: the same, planned and in flight.
    """

    lab: Lab
    step: PrefillStep
    batch: PrefillBatch

    @property
    def prompt(self) -> list[int]:
        """Its token ids."""
        return self.batch.requests[0].prompt

    def eager(self) -> tuple[Tensor, Tensor]:
        """The first token [1] and its logits [1, vocabulary], computed without a graph."""
        self.lab.captures.prefill = "eager"
        computed = self.lab.engine.forward(self.batch)
        return computed.tokens.clone(), computed.logits.clone()


@contextmanager
def lab_peer(point: PromptPoint, mode: str) -> Iterator[Peer]:
    """The lab's own prefill, by the engine's own code."""
    lab, step = point.lab, point.step
    runner = lab.phases.prefill(mode)
    launch = partial(runner.run, step.live, **step.inputs)
    launch()  # captures its bucket
    ledger = [line for line in runner.captured.ledger if line.key.size == runner.captured.pad(step.rows)]
    spent = sum(line.capture_seconds + line.warmup_seconds for line in ledger)
    metrics: dict[str, Metric] = {**ledger_metrics(ledger), "compile_s": lab.compile_seconds}
    metrics |= {"ready_s": lab.compile_seconds + spent, "held_gb": metrics.get("capture_gb", 0.0)}
    yield LocalPeer(
        lab.device, lambda: [token for (token,) in lab.engine.compute(point.batch)], launch,
        f"The lab's engine, prefill={mode}, {lab.ops} operations.", metrics,
        restart=partial(setattr, lab.captures, "prefill", mode),
    )  # fmt: skip


@contextmanager
def transformers_peer(point: PromptPoint, model: Any) -> Iterator[Peer]:
    """The forward of ``transformers`` over a new cache, eager, with the logits of the last token alone."""
    device = point.lab.device

    def forward(ids: Tensor) -> Tensor:
        chosen: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return chosen

    def token() -> list[int]:
        told: list[int] = forward(torch.tensor([point.prompt]).to(device)).tolist()
        return told

    there = torch.tensor([point.prompt]).to(device)
    note = "transformers, eager, SDPA, DynamicCache, argmax."
    yield LocalPeer(device, token, partial(forward, there), note, {"ready_s": 0.0, "held_gb": 0.0})


class SglangPrompt:
    """One prompt on a worker; see ``lab.peer.Peer``. Its forward cannot be told apart from what prepares it."""

    def __init__(self, worker: TokenWorker, point: PromptPoint) -> None:
        self._worker, self._prompt = worker, point.prompt
        self.same_weights = point.lab.weights == "trained"
        graphs = [each for each in worker.captured if each.phase == "prefill"]
        self.metrics: dict[str, Metric] = {"ready_s": worker.ready_s}
        for graph in graphs:
            self.metrics |= {"capture_s": graph.seconds, "held_gb": graph.memory_gb}
        self.note = (
            f"SGLang {worker.installed.version}, {worker.facts['attention']}, PyTorch sampling, prefill graphs "
            f"{'breakable' if graphs else 'none'}; its ModelRunner in a process of its own, in turns with the lab."
        )

    def tokens(self) -> list[int]:
        """See ``Peer``."""
        told: list[int] = self._worker.ask("begin", prompts=[self._prompt])["tokens"]
        return told

    def seconds(self) -> float:
        """See ``Peer``."""
        return float(self._worker.ask("begin", prompts=[self._prompt])["seconds"])

    def replay_seconds(self, calls: int) -> None:
        """See ``Peer``."""

    def host_us(self) -> None:
        """See ``Peer``."""


def first_token(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    arms: Sequence[str] = ARMS,
    tokens: Sequence[int] | None = None,
    processes: int | None = None,
) -> Iterator[Record]:
    """The first token of a prompt by every peer in turns, beside the floor.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.
        arms: of ``ARMS``; ``breakable`` and the floor are always there.
        tokens: lengths of the prompt; 128 to 8192 on a GPU.
        processes: in how many all of it is measured, one after the other, each an instance of S3's rule; by default 3
            on a GPU. In a single one turns are the instances.

    Yields:
        A record for each arm of each length, those that could not run with the reason.

    Raises:
        CglabError: if no process measured anything.
        InputError: for an unknown arm, or two processes, of which the rule says nothing.
    """
    chosen, run = chosen_arms(OURS, arms, ARMS), new_run()
    count = require_processes(
        processes if processes is not None else 3 if device.type == "cuda" and not quick else 1
    )
    asked: dict[str, Any] = {"quick": quick, "models": models, "arms": chosen, "tokens": tokens, "run": run}
    if count == 1:
        yield from measured(device, progress=progress, **asked)
        return
    found: list[Sequence[Record]] = []
    endings: list[str] = []
    for number in range(count):
        progress(f"process {number + 1} of {count}")
        job = {**asked, "device": str(device), "command": sys.argv}
        records, ending = run_apart(PROCESS, job, LIMIT)
        found.append(records)
        endings.append(ending)
    if not any(found):
        raise CglabError(f"no process measured anything; {endings[0]}")
    yield from pooled(found, endings, OURS)


def measured(
    device: torch.device,
    *,
    quick: bool,
    models: Sequence[str] | None,
    arms: Sequence[str],
    tokens: Sequence[int] | None,
    run: str,
    progress: Progress = silent,
) -> Iterator[Record]:
    """Measures in this process; arguments as those of ``first_token``, ``arms`` with our own first.

    Args:
        run: of the records.
    """
    chosen, large = arms, device.type == "cuda" and not quick
    lengths = sorted(tokens or (TOKENS if large else QUICK_TOKENS))
    calls, repeats, warmup = (3, 8, 2) if large else (1, 3, 1)
    bandwidth = read_bandwidth(device, 4.0 if device.type == "cuda" else 0.2)
    turns = PeerTurns("first-token", device, run, calls, repeats, warmup, progress)
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        with ExitStack() as held:
            sglang: TokenWorker | Exception = InputError("SGLang was not asked for")
            if SGLANG in chosen:
                sglang = start_sglang(held, turns, name, 1, lengths[-1] + 8, prefill=lengths)
            progress(f"{name}: open")
            lab = held.enter_context(
                open_lab(
                    name, device=device, max_batch=1, max_context=lengths[-1] + 1, token_budget=lengths[-1],
                    prefill_buckets=lengths,
                )
            )  # fmt: skip
            theirs = shared(lab) if "transformers" in chosen else None
            rate = matmul_rate(device, lab.dtype, 8192 if large else 256)
            for length in lengths[::-1]:
                with steady_prefill(lab.engine, length) as step:
                    batch = lab.engine.scheduler.in_flight
                    if not isinstance(batch, PrefillBatch):
                        raise InputError("no prefill step is held; measure within steady_prefill")
                    point = PromptPoint(lab, step, batch)
                    made = {arm: _ready(arm, point, theirs, sglang) for arm in chosen}
                    yield from turns.records(
                        f"{name}, {length} tokens", made, _judge(point), _floor(lab, length, bandwidth, rate),
                        workload={**lab.describe(step, "prefill"), "calls": calls}, **model_facts(lab),
                    )  # fmt: skip


def _ready(arm: str, point: PromptPoint, theirs: Any, sglang: TokenWorker | Exception) -> Ready:
    make: Callable[[], AbstractContextManager[Peer]]
    if arm in MODES:
        return partial(lab_peer, point, arm)
    if arm == "transformers":
        make = partial(transformers_peer, point, theirs)
        return unavailable(theirs) if isinstance(theirs, Exception) else make
    if isinstance(sglang, Exception):
        return unavailable(sglang)
    return lambda: nullcontext(SglangPrompt(sglang, point))


def _judge(point: PromptPoint) -> Judge:
    """By the eager step; the default one is the other way."""
    tokens, logits = point.eager()
    point.lab.captures.prefill = OURS
    return Judge.of(tokens, logits, point.lab.engine.forward(point.batch).logits)


def _floor(lab: Lab, tokens: int, bandwidth: float, rate: float) -> tuple[float, str]:
    blocks = sum(
        weight.numel() for name, weight in lab.model.named_parameters() if name.startswith("blocks.")
    )
    head = lab.config.vocab_size * lab.config.hidden_size
    read = (blocks + head) * lab.dtype.itemsize / bandwidth
    computed = 2 * (blocks * tokens + head) / rate  # logits of the last token alone
    bound = "operations at the rate of a large product" if computed > read else "weights read once"
    return max(read, computed), f"The larger of two bounds measured in this run: {bound}."
