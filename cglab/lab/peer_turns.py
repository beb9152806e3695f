"""Peers on one step in turns: each made ready, its tokens compared, its times taken, and a record made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from cglab.lab.peer import Peer
from cglab.lab.step_metrics import Progress
from cglab.measure.ab import ABResult, interleave
from cglab.measure.drift import Drift
from cglab.measure.parity import Parity, compare_tokens
from cglab.measure.record import Metric, Record, first_line, make_record
from cglab.measure.statistics import THRESHOLD

SGLANG: Final = "sglang"
"""Its record's arm has the version too, as ``sglang-0.5.16``."""
Ready = Callable[[], AbstractContextManager[Peer]]
"""Makes a peer ready, or raises why it cannot run; it is given back at the end of the context."""


def unavailable(error: Exception) -> Ready:
    """A peer that cannot run at any step, for a reason that is known already."""

    def raises() -> NoReturn:
        raise error

    return raises


@dataclass(frozen=True)
class Judge:
    """Compares tokens with those of the eager step.

    Attributes:
        tokens: the oracle's.
        logits: [requests, vocabulary] that it chose them from.
        bound: of a near-tie: how far two right computations of the logits part, with the usual headroom.
    """

    tokens: list[int]
    logits: Tensor
    bound: float

    @classmethod
    def of(cls, tokens: Tensor, logits: Tensor, again: Tensor) -> Judge:
        """A judge by the eager step.

        Args:
            tokens: [requests] int64, the oracle's.
            logits: [requests, vocabulary], its own.
            again: the same computed another right way.
        """
        drift = Drift()
        drift.allow("logits", again, logits)
        return cls(tokens.tolist(), logits.clone(), drift.bound("logits"))

    def parity(self, peer: Peer) -> Parity | None:
        """Each token equal, or at a near-tie; ties are counted, and of so few tokens any share may be."""
        if not peer.same_weights:
            return None
        rows = [row.unsqueeze(0) for row in self.logits]
        return compare_tokens(
            [[token] for token in peer.tokens()], [[token] for token in self.tokens], reference_logits=rows,
            bound=self.bound, limit=1.0,
        )  # fmt: skip


@dataclass
class PeerTurns:
    """How the peers of one bench are measured.

    Attributes:
        bench: name of its records.
        device: what is measured.
        run: of its records.
        calls: launches in a row behind one sample of a replay.
        repeats: samples of a turn.
        warmup: steps of a turn before them.
        progress: called before every stage.
        sglang: its version; None where it was not asked for, or is not there.
    """

    bench: str
    device: torch.device
    run: str
    calls: int
    repeats: int
    warmup: int
    progress: Progress
    sglang: str | None = field(default=None)

    @property
    def turn(self) -> int:
        """Steps of a turn."""
        return self.repeats + self.warmup

    def records(
        self,
        where: str,
        arms: Mapping[str, Ready],
        judge: Judge,
        floor: tuple[float, str],
        **facts: Any,
    ) -> Iterator[Record]:
        """A record for each arm, in order, and one for the floor.

        Args:
            where: the step in words, for the progress.
            arms: by name; what the others are compared with comes first.
            judge: of the tokens.
            floor: seconds that no step can go below, and what they are made of.
            **facts: fields of all records: workload, model, weights, dtype.
        """
        ready: dict[str, Peer] = {}
        reasons: dict[str, str] = {}
        parities: dict[str, Parity | None] = {}
        alone: dict[str, dict[str, Metric]] = {}
        seconds, what = floor
        with ExitStack() as held:
            for arm, make in arms.items():
                self.progress(f"{where}: {arm} gets ready")
                try:
                    peer = held.enter_context(make())
                    parities[arm] = judge.parity(peer)
                    alone[arm] = self._alone(peer)
                    ready[arm] = peer
                except Exception as error:  # noqa: BLE001 - one that fails must not lose the others
                    reasons[arm] = f"{type(error).__name__}: {error}"
            self.progress(f"{where}: turns")
            times, ours = self._turns(ready), next(iter(arms))
            for arm in arms:
                metrics: dict[str, Metric] = {"floor_ms": seconds * 1e3}
                shown: dict[str, Any] = {}
                if arm in ready:
                    metrics |= {**_timed(times, arm, ours, seconds), **alone[arm], **ready[arm].metrics}
                    parity = parities[arm]
                    shown = {
                        "samples": {"token_ms": [s * 1e3 for turn in times[arm].instances for s in turn]},
                        "parity": None if parity is None else parity.as_dict(), "notes": ready[arm].note,
                    }  # fmt: skip
                yield self._record(arm, metrics | _reason(reasons.get(arm)), **shown, **facts)
            metrics = {"token_ms": seconds * 1e3, "floor_ms": seconds * 1e3}
            yield self._record("floor", metrics, notes=what, **facts)

    def _alone(self, peer: Peer) -> dict[str, Metric]:
        replay, host = peer.replay_seconds(self.calls), peer.host_us()
        return {"replay_ms": None if replay is None else replay * 1e3, "host_us": host}

    def _turns(self, ready: Mapping[str, Peer]) -> ABResult:
        """Without any there are none; one that is alone has a second name, as turns are taken by two."""
        timed = {arm: peer.seconds for arm, peer in ready.items()}
        if not timed:
            return ABResult((), (), THRESHOLD, 0, 0.0)
        if len(timed) < 2:
            timed["again"] = next(iter(timed.values()))
        return interleave(timed, repeats=self.repeats, warmup=self.warmup)

    def _record(self, arm: str, metrics: Mapping[str, Metric], **facts: Any) -> Record:
        software = {}
        if arm == SGLANG and self.sglang is not None:
            arm, software = f"{SGLANG}-{self.sglang}", {"sglang": self.sglang}
        return make_record(
            bench=self.bench,
            arm=arm,
            device=self.device,
            run=self.run,
            metrics=metrics,
            software=software,
            **facts,
        )


def _timed(times: ABResult, arm: str, ours: str, floor: float) -> dict[str, Metric]:
    """Times of an arm, and what they are compared with; nothing is, where that one is not among them."""
    found, base = times[arm], times.arms[0]
    if found.median is None or found.interval is None:
        return _reason(found.error)
    compared: dict[str, Metric] = {"ratio_to_ours": None, "verdict": None}
    if base.name == ours != arm and base.median is not None:
        compared = {
            "ratio_to_ours": found.ratio, "verdict": found.verdict, "ours_ms": base.median * 1e3,
        }  # fmt: skip
    return {
        "token_ms": found.median * 1e3, "token_low_ms": found.interval.low * 1e3,
        "token_high_ms": found.interval.high * 1e3, **compared,
        "over_floor": found.median / floor, **_reason(found.error),
    }  # fmt: skip


def _reason(reason: str | None) -> dict[str, Metric]:
    """Why an arm has no figures; nothing where it has."""
    return {} if reason is None else {"error": first_line(reason)}
