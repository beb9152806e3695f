"""The peers bench: one decode token from ids on the host to ids on the host, by everyone who can compute it, in turns.

Same prompts, same context, same length of the cache; the same weights too, for all but an SGLang that made its own.
The lab's captured step comes first and is what the others are compared with; a peer that cannot run, or fails, is a
record with the reason, also where it takes its process along. Records are of bench ``token``, which claim G2 reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from cglab.engine.workload import steady_decode
from cglab.errors import InputError, no_such
from cglab.lab.facade import Lab
from cglab.lab.floor import bytes_read, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.peer import Builder, Peer, Point, lab_peer, plain_peer
from cglab.lab.peer_graphs import compile_peer as torch_compile
from cglab.lab.peer_graphs import package_peer
from cglab.lab.peer_groups import BENCH, PeerJob, measured_apart
from cglab.lab.peer_sglang import SglangPeer, worker_arguments
from cglab.lab.peer_transformers import batching_peer, eager_peer, shared_weights
from cglab.lab.peer_transformers import compile_peer as transformers_compile
from cglab.lab.peer_turns import SGLANG, Judge, PeerTurns, Ready, unavailable
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.record import Record, new_run
from cglab.serving.installed import ask, find_python
from cglab.serving.token_worker import TokenWorker

FLOOR: Final = "Weights and live keys and values, read once at the bandwidth measured in this run."
OURS: Final = "full"
"""The arm that the others are compared with; it is always measured, and so is the floor."""
PIECEWISE: Final = (
    "Pieces between attentions, compiled where the operations are, each a graph, attention eager: vLLM's piecewise "
    "scheme, on this model; vLLM itself is no arm."
)
LOCAL: Final[dict[str, Builder]] = {
    OURS: partial(lab_peer, mode="full", note="One graph a bucket."),
    "eager": partial(lab_peer, mode="eager", note="No graph."),
    "piecewise": partial(lab_peer, mode="breakable", note=PIECEWISE),
    "plain-eager": partial(
        plain_peer, mode="eager", note="Plain modules, SDPA over the gathered cache, no graph."
    ),
    "plain-graph": partial(
        plain_peer, mode="full", note="Plain modules, SDPA over the gathered cache, one graph."
    ),
    "torch-compile": torch_compile,
    "breakable-cuda-graphs": package_peer,
}
"""Peers that compute on the lab's model."""
TRANSFORMERS: Final[dict[str, Callable[[Point, Any], AbstractContextManager[Peer]]]] = {
    "transformers": eager_peer,
    "transformers-compile": transformers_compile,
    "transformers-batching": batching_peer,
}
"""Peers that compute on a model of ``transformers`` over the same weights."""
ARMS: Final = (*LOCAL, *TRANSFORMERS, SGLANG)


def peers(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    arms: Sequence[str] = ARMS,
    batches: Sequence[int] | None = None,
    apart: bool = True,
) -> Iterator[Record]:
    """One decode token by every peer in turns, beside the floor.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.
        arms: of ``ARMS``; ``full`` and the floor are always there, so that every run can be read by itself.
        batches: requests of a step; 1 and 16 on a GPU, 1 and 4 on a CPU.
        apart: measures by groups, each in a process of its own with ``full``; else all in this one.

    Yields:
        A record for each arm of each step, those that could not run with the reason.

    Raises:
        InputError: for an unknown arm.
    """
    chosen = chosen_arms(OURS, arms, ARMS)
    large = device.type == "cuda" and not quick
    sizes = tuple(sorted(set(batches or ((1, 16) if large else (1, 4)))))
    context, cache = (512, 1024) if large else (64, 128)
    calls, repeats, warmup = (5, 20, 3) if large else (1, 4, 1)
    run = new_run()
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        job = PeerJob(
            name, str(device), run, chosen, sizes, context, cache, calls=calls, repeats=repeats, warmup=warmup
        )
        yield from measured_apart(job, progress) if apart else measured(job, progress)


def measured(job: PeerJob, progress: Progress = silent) -> Iterator[Record]:
    """Measures a job in this process.

    Args:
        job: what to measure.
        progress: called with a line for every stage.

    Yields:
        A record for each arm of each step and for its floor.
    """
    device, name, most = torch.device(job.device), job.model, job.batches[-1]
    bandwidth = read_bandwidth(device, 4.0 if device.type == "cuda" else 0.2)
    turns = PeerTurns(BENCH, device, job.run, job.calls, job.repeats, job.warmup, progress)
    with ExitStack() as held:
        sglang: TokenWorker | Exception = InputError("SGLang was not asked for")
        if SGLANG in job.arms:
            sglang = start_sglang(held, turns, name, most, job.cache)
        progress(f"{name}: open")
        lab = held.enter_context(
            open_lab(name, device=device, max_batch=most, max_context=job.cache, buckets=job.batches)
        )
        theirs = shared(lab) if set(job.arms) & set(TRANSFORMERS) else None
        for batch in job.batches:
            with steady_decode(lab.engine, batch, job.context) as step:
                point = Point.of(lab, step)
                yield from turns.records(
                    f"{name}, batch {batch}", {arm: _ready(arm, point, turns, theirs, sglang) for arm in job.arms},
                    _judge(point), (bytes_read(lab.model, lab.config, step) / bandwidth, FLOOR),
                    workload={**lab.describe(step), "calls": job.calls}, **model_facts(lab),
                )  # fmt: skip


def chosen_arms(ours: str, arms: Sequence[str], good: Sequence[str]) -> tuple[str, ...]:
    """The lab's own arm and those that were asked for, each once.

    Raises:
        InputError: for one that is none of the good ones.
    """
    if unknown := [arm for arm in arms if arm not in good]:
        raise InputError(no_such("peer", unknown[0], good))
    return tuple(dict.fromkeys((ours, *arms)))


def start_sglang(
    held: ExitStack,
    turns: PeerTurns,
    name: str,
    batch: int,
    context: int,
    prefill: Sequence[int] = (),
) -> TokenWorker | Exception:
    """Starts SGLang, or says why it does not; before all else, as it measures what is free when it starts.

    Args:
        held: ends it.
        turns: get its version.
        name: of the model.
        batch: most requests.
        context: tokens of a request at most.
        prefill: tokens of the prefill graphs that it captures; none by default.
    """
    try:
        installed = ask(find_python())
        turns.sglang = installed.version
        turns.progress(f"{name}: start SGLang {installed.version}")
        folder = Path(held.enter_context(TemporaryDirectory(prefix="cglab-peers-"))) / "model"
        on_gpu = turns.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        words = worker_arguments(
            name, folder, dtype, batch=batch, context=context, on_gpu=on_gpu, prefill=prefill
        )
        return held.enter_context(TokenWorker(installed, words, on_cpu=not on_gpu))
    except Exception as error:  # noqa: BLE001 - without it the others are measured all the same
        return error


def shared(lab: Lab) -> Any:
    """The model of ``transformers`` over the lab's weights, or why there is none."""
    try:
        return shared_weights(lab.model, device=lab.device, dtype=lab.dtype)
    except Exception as error:  # noqa: BLE001 - likewise
        return error


def _ready(arm: str, point: Point, turns: PeerTurns, theirs: Any, sglang: TokenWorker | Exception) -> Ready:
    """How an arm gets ready at a point."""
    if arm in LOCAL:
        return partial(LOCAL[arm], point)
    if arm in TRANSFORMERS:
        return (
            unavailable(theirs)
            if isinstance(theirs, Exception)
            else partial(TRANSFORMERS[arm], point, theirs)
        )
    if isinstance(sglang, Exception):
        return unavailable(sglang)
    return lambda: nullcontext(SglangPeer(sglang, point, turn=turns.turn))


def _judge(point: Point) -> Judge:
    """By the eager step; the captured one is the other way."""
    lab, step = point.lab, point.step
    tokens, logits = lab.runner("eager").run_live_eager(step.live, **step.inputs)
    return Judge.of(tokens, logits.clone(), lab.runner(OURS).run(step.live, **step.inputs)[1])
