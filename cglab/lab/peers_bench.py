"""The peers bench: one decode token from ids on the host to ids on the host, by everyone who can compute it, in turns.

Same prompts, same context, same length of the cache; the same weights too, for all but an SGLang that made its own.
The lab's captured step comes first and is what the others are compared with; a peer that cannot run, or fails, is a
record with the reason. Records are of bench ``token``, which claim G2 reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from cglab.engine.workload import steady_decode
from cglab.errors import InputError
from cglab.lab.floor import bytes_read, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.peer import Builder, Peer, Point, lab_peer, plain_peer
from cglab.lab.peer_graphs import compile_peer as torch_compile
from cglab.lab.peer_graphs import package_peer
from cglab.lab.peer_sglang import SglangPeer, sglang_worker
from cglab.lab.peer_transformers import batching_peer, eager_peer, shared_weights
from cglab.lab.peer_transformers import compile_peer as transformers_compile
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.ab import ABResult, interleave
from cglab.measure.drift import Drift
from cglab.measure.parity import Parity, compare_tokens
from cglab.measure.record import Metric, Record, make_record, new_run
from cglab.serving.installed import Installed, ask, find_python
from cglab.serving.token_worker import TokenWorker

OURS: Final = "full"
"""The arm that the others are compared with; it is always measured, and so is the floor."""
PIECEWISE: Final = (
    "Compiled pieces between attentions, each captured as a graph, attention eager between them: vLLM's piecewise "
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
SGLANG: Final = "sglang"
"""Its record's arm has the version too, as ``sglang-0.5.16``."""
ARMS: Final = (*LOCAL, *TRANSFORMERS, SGLANG)


def peers(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    arms: Sequence[str] = ARMS,
    batches: Sequence[int] | None = None,
) -> Iterator[Record]:
    """One decode token by every peer in turns, beside the floor.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.
        arms: of ``ARMS``; ``full`` and the floor are always there, so that every run can be read by itself.
        batches: requests of a step; 1 and 16 on a GPU, 1 and 4 on a CPU.

    Yields:
        A record for each arm of each step, those that could not run with the reason.

    Raises:
        InputError: for an unknown arm.
    """
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise InputError(f"no peer {unknown[0]!r}; good names: {', '.join(ARMS)}")
    large = device.type == "cuda" and not quick
    chosen = tuple(dict.fromkeys((OURS, *arms)))
    sizes = tuple(sorted(batches or ((1, 16) if large else (1, 4))))
    run, bandwidth = new_run(), read_bandwidth(device, 4.0 if device.type == "cuda" else 0.2)
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        yield from _Bench(name, device, run, bandwidth, chosen, sizes, progress, large=large).records()


class _Bench:
    """One model."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        run: str,
        bandwidth: float,
        arms: Sequence[str],
        batches: Sequence[int],
        progress: Progress,
        *,
        large: bool,
    ) -> None:
        self.name, self.device, self.run, self.bandwidth = name, device, run, bandwidth
        self.arms, self.batches, self.progress = arms, batches, progress
        self.context, self.cache = (512, 1024) if large else (64, 128)
        self.calls, self.repeats, self.warmup = (5, 20, 3) if large else (1, 4, 1)
        self.reasons: dict[str, str] = {}
        self.installed: Installed | None = None

    def records(self) -> Iterator[Record]:
        """All points, largest batch last."""
        with ExitStack() as held:
            worker = self._attempt(SGLANG, partial(self._worker, held))
            self.progress(f"{self.name}: open")
            lab = held.enter_context(
                open_lab(
                    self.name, device=self.device, max_batch=self.batches[-1], max_context=self.cache,
                    buckets=self.batches,
                )
            )  # fmt: skip
            theirs = self._attempt(
                "transformers", partial(shared_weights, lab.model, device=lab.device, dtype=lab.dtype)
            ) if set(self.arms) & set(TRANSFORMERS) else None  # fmt: skip
            for batch in self.batches:
                with steady_decode(lab.engine, batch, self.context) as step:
                    yield from self._point(Point.of(lab, step), worker, theirs)

    def _worker(self, held: ExitStack) -> TokenWorker | None:
        """SGLang first, while the device is empty: it measures what is free when it starts."""
        if SGLANG not in self.arms:
            return None
        self.installed = ask(find_python())
        self.progress(f"{self.name}: start SGLang {self.installed.version}")
        folder = Path(held.enter_context(TemporaryDirectory(prefix="cglab-peers-")))
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        return held.enter_context(
            sglang_worker(
                self.installed, self.name, folder / "model", dtype, batch=self.batches[-1], context=self.cache,
                on_gpu=on_gpu,
            )
        )  # fmt: skip

    def _attempt(self, arm: str, make: Callable[[], Any]) -> Any:
        """What is made, or None with the reason kept: one peer's failure must not lose the others."""
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its record
            self.reasons[arm] = f"{type(error).__name__}: {error}"
            return None

    def _point(self, point: Point, worker: TokenWorker | None, theirs: Any) -> Iterator[Record]:
        """Every peer ready at once, then the turns."""
        ready: dict[str, Peer] = {}
        shared, self.reasons = dict(self.reasons), dict(self.reasons)
        with ExitStack() as held:
            for arm in self.arms:
                self.progress(f"{self.name}: batch {point.step.live}, {arm} gets ready")
                made = self._attempt(arm, partial(self._ready, arm, point, held, worker, theirs))
                if made is not None:
                    ready[arm] = made
                elif arm not in self.reasons:
                    self.reasons[arm] = self.reasons["transformers"]
            self.progress(f"{self.name}: batch {point.step.live}, turns")
            judge = _Judge(point)
            parities = {arm: self._attempt(arm, partial(judge.parity, peer)) for arm, peer in ready.items()}
            ready = {arm: peer for arm, peer in ready.items() if arm not in self.reasons}
            alone = {arm: self._alone(peer) for arm, peer in ready.items()}
            times = self._turns(ready)
            floor = bytes_read(point.lab.model, point.lab.config, point.step) / self.bandwidth
            for arm in self.arms:
                metrics: dict[str, Metric] = {"floor_ms": floor * 1e3}
                samples, note, parity = {}, "", None
                if arm in ready:
                    metrics |= {**_timed(times, arm, floor), **alone[arm], **ready[arm].metrics}
                    samples = {"token_ms": [s * 1e3 for turn in times[arm].instances for s in turn]}
                    note, parity = ready[arm].note, parities[arm]
                yield self._record(
                    point, arm, metrics | _reason(self.reasons.get(arm)), samples, note, parity
                )
            note = "Weights and live keys and values, read once at the bandwidth measured in this run."
            yield self._record(
                point, "floor", {"token_ms": floor * 1e3, "floor_ms": floor * 1e3}, {}, note, None
            )
        self.reasons = shared

    def _ready(
        self, arm: str, point: Point, held: ExitStack, worker: TokenWorker | None, theirs: Any
    ) -> Peer | None:
        if arm == SGLANG:
            return None if worker is None else SglangPeer(worker, point, turn=self.warmup + self.repeats)
        if arm in LOCAL:
            return held.enter_context(LOCAL[arm](point))
        return None if theirs is None else held.enter_context(TRANSFORMERS[arm](point, theirs))

    def _alone(self, peer: Peer) -> dict[str, Metric]:
        replay, host = peer.replay_seconds(self.calls), peer.host_us()
        return {"replay_ms": None if replay is None else replay * 1e3, "host_us": host}

    def _turns(self, ready: dict[str, Peer]) -> ABResult:
        """Ours has a second name where it is alone, as turns are taken by two."""
        timed = {arm: peer.seconds for arm, peer in ready.items()}
        if len(timed) < 2:
            timed["again"] = next(iter(timed.values()))
        return interleave(timed, repeats=self.repeats, warmup=self.warmup)

    def _record(
        self, point: Point, arm: str, metrics: dict[str, Metric], samples: dict[str, list[float]], note: str,
        parity: Parity | None,
    ) -> Record:  # fmt: skip
        lab, named = point.lab, arm
        software = {}
        if arm == SGLANG and self.installed is not None:
            named, software = f"{SGLANG}-{self.installed.version}", {"sglang": self.installed.version}
        return make_record(
            bench="token", arm=named, device=self.device, run=self.run, metrics=metrics, samples=samples,
            workload={**lab.describe(point.step), "calls": self.calls}, software=software,
            parity=None if parity is None else parity.as_dict(), notes=note, **model_facts(lab),
        )  # fmt: skip


class _Judge:
    """Compares tokens with those of the eager step; how far two right computations part is the bound of a near-tie."""

    def __init__(self, point: Point) -> None:
        lab, step = point.lab, point.step
        tokens, self.logits = (
            each.clone() for each in lab.runner("eager").run_live_eager(step.live, **step.inputs)
        )
        self.tokens: list[int] = tokens.tolist()
        drift = Drift()
        drift.allow("logits", lab.runner(OURS).run(step.live, **step.inputs)[1], self.logits)
        self.bound = drift.bound("logits")

    def parity(self, peer: Peer) -> Parity | None:
        """Each token equal, or at a near-tie; ties are counted, and with this few tokens have no limit."""
        if not peer.same_weights:
            return None
        rows = [row.unsqueeze(0) for row in self.logits]
        return compare_tokens(
            [[token] for token in peer.tokens()], [[token] for token in self.tokens], reference_logits=rows,
            bound=self.bound, limit=1.0,
        )  # fmt: skip


def _timed(times: ABResult, arm: str, floor: float) -> dict[str, Metric]:
    found = times[arm]
    if found.median is None or found.interval is None:
        return _reason(found.error)
    return {
        "token_ms": found.median * 1e3, "token_low_ms": found.interval.low * 1e3,
        "token_high_ms": found.interval.high * 1e3, "ratio_to_ours": found.ratio, "verdict": found.verdict,
        "over_floor": found.median / floor, **_reason(found.error),
    }  # fmt: skip


def _reason(reason: str | None) -> dict[str, Metric]:
    """Why an arm has no figures; nothing where it has."""
    return {} if reason is None else {"error": reason}
