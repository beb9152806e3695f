"""Parity of whole requests: a load under one batch schedule, in every mode of both phases, against three oracles.

1. *Padded eager*: the same schedule with every replayed step run eager at its padded size: the logits of every token
   bitwise.
2. *Alone*: every request by itself, eager, float32: tokens equal but for near-ties, logits within the drift that
   eager itself shows between the batch and the request alone.
3. *Poison*: the schedule again with reserved memory full of NaN and hostile static inputs before every step: the
   logits of every token bitwise.

The cache is small, so that requests give way to each other and are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cglab.engine.batches import SchedulerOptions
from cglab.engine.load import Load, drive
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.lab.phases import LabPhases
from cglab.lab.poison import poison
from cglab.lab.techniques import Captures
from cglab.lab.through import PhasesThrough
from cglab.lab.verdicts import TechniqueParity
from cglab.lab.watched import Watched, WatchedEngine, against
from cglab.measure.drift import Drift
from cglab.models.kv import PagedKV
from cglab.models.loading import LoadedModel, load_model
from cglab.models.ops import check_ops, use_ops
from cglab.runners.base import GraphGroup, Runner

MODEL, MODES = "pico-gqa", ("eager", "full", "breakable")
LOAD = Load(count=64, concurrency=8, prompt_tokens=(4, 24), new_tokens=(2, 24), shared_prefix=16)
# Small pages, few of them: requests outgrow their share.
PAGES, PAGE_SIZE, MAX_CONTEXT, BUDGET = 36, 4, 64, 32
BUCKETS, PREFILL_BUCKETS = (1, 2, 4, 8), (4, 8, 16, 24, 32)


@dataclass
class _Scheduled(Watched):
    """What one run of the load gave.

    Attributes:
        served: for every step, the size it was replayed at; None where it ran eager.
        preemptions: how often a request gave way.
    """

    served: list[int | None] = field(default_factory=list)
    preemptions: int = 0


class RequestOracles:
    """Runs one load in every mode of both phases.

    Args:
        loaded: a model with small layers.
        device: where it runs.
        load: the requests.
        prefix_reuse: a shared prefix is computed once.
        mixed: requests that decode ride along in prefill steps.
        ops: the form in which the model computes; see ``models.ops``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: torch.device,
        load: Load,
        *,
        prefix_reuse: bool,
        mixed: bool = False,
        ops: str = "portable",
    ) -> None:
        self.loaded, self.device, self.load, self.ops = loaded, device, load, ops
        dtype = loaded.model.embedding.weight.dtype
        self.kv = PagedKV(
            loaded.config, pages=PAGES, page_size=PAGE_SIZE, rows=BUCKETS[-1] + 1, max_context=MAX_CONTEXT,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.group, self.captures = GraphGroup(device), Captures()
        self.phases = LabPhases(
            loaded.model, self.kv, self.group, self.captures, buckets=BUCKETS, prefill_buckets=PREFILL_BUCKETS,
            options=Options(strict=True),
        )  # fmt: skip
        use_ops(ops, loaded.model, self.kv)
        self.policy = SchedulerOptions(BUDGET, prefix_reuse=prefix_reuse, mixed=mixed)
        self.exact = dtype == torch.float32
        self._dtype = str(dtype).removeprefix("torch.")
        self.drift = Drift()
        self._alone: dict[tuple[int, int], Tensor] = {}

    def _run(self, how: Callable[..., Any], found: _Scheduled | None = None) -> _Scheduled:
        found = found or _Scheduled()
        engine = WatchedEngine(
            found, self.loaded.model, self.kv, PhasesThrough(self.phases, how), self.policy
        )
        drive(engine, self.load, self.loaded.config.vocab_size)
        found.preemptions = sum(request.preemptions for request in found.requests)
        engine.scheduler.check_invariants()
        return found

    def _served(self) -> _Scheduled:
        """The load as it is served; which steps were replayed, and at which size."""
        found = _Scheduled()

        def how(runner: Runner[Any], live: Any, inputs: dict[str, Tensor]) -> Any:
            before = runner.coverage().captured
            output = runner.run(live, **inputs)
            replayed = runner.coverage().captured > before
            sizes = [size for size in runner.captured.captured_sizes if size >= runner.rows(live)]
            found.served.append(min(sizes) if replayed else None)
            return output

        return self._run(how, found)

    def _padded(self, served: Sequence[int | None]) -> _Scheduled:
        """Oracle 1: what was replayed runs eager at the same size."""
        sizes = iter(served)

        def how(runner: Runner[Any], live: Any, inputs: dict[str, Tensor]) -> Any:
            size = next(sizes)
            if size is None:
                return runner.run_live_eager(live, **inputs)
            return runner.run_padded_eager(live, size, **inputs)

        return self._run(how)

    def _poisoned(self) -> _Scheduled:
        """Oracle 3."""

        def how(runner: Runner[Any], live: Any, inputs: dict[str, Tensor]) -> Any:
            with poison(runner, self.kv, live, inputs):
                return runner.run(live, **inputs)

        return self._run(how)

    def alone(self) -> None:
        """Oracle 2: every request by itself, eager; and what batching alone does to its logits."""
        self.captures.decode = self.captures.prefill = "eager"
        found = _Scheduled()
        phases = PhasesThrough(
            self.phases, lambda runner, live, inputs: runner.run_live_eager(live, **inputs)
        )
        engine = WatchedEngine(found, self.loaded.model, self.kv, phases, self.policy)
        for request in self.load.requests(self.loaded.config.vocab_size):
            engine.flush_cache()
            list(engine.stream([request]))
        self._alone = found.logits
        batched = self._served()
        for place, row in batched.logits.items():
            if place in self._alone and self._same_context(place, batched, found):
                self.drift.allow("logits", row, self._alone[place])
        self._tokens = {request.index: request.output for request in found.requests}

    @staticmethod
    def _same_context(place: tuple[int, int], one: _Scheduled, other: _Scheduled) -> bool:
        index, step = place
        outputs = [
            next(r.output for r in run.requests if r.index == index and r.limit > 1) for run in (one, other)
        ]
        return outputs[0][:step] == outputs[1][:step]

    def check(self, decode: str, prefill: str) -> TechniqueParity:
        """The load with these modes against all three oracles; ``alone`` comes before."""
        self.captures.decode, self.captures.prefill = decode, prefill
        result = TechniqueParity(f"decode={decode}, prefill={prefill}", dtype=self._dtype, ops=self.ops)
        result.recorder, result.capturable = self.group.recorder.name, {decode, prefill} != {"eager"}
        got = self._served()
        result.cases, result.steps = self.load.count, len(got.served)
        result.captured = sum(size is not None for size in got.served)
        result.preemptions = got.preemptions
        for oracle, other in ((1, self._padded(got.served)), (3, self._poisoned())):
            if other.logits.keys() != got.logits.keys():
                result.fault(oracle, {}, "another schedule")
            for place in sorted(got.logits.keys() & other.logits.keys()):
                if not same_bits(got.logits[place], other.logits[place]):
                    result.fault(oracle, {"request": place[0], "token": place[1]}, "logits differ in bits")
        against(
            got, got.requests[-self.load.count :], self._tokens, self._alone, result,
            bound=self.drift.bound("logits"), exact=self.exact, what="the request alone",
        )  # fmt: skip
        return result

    def close(self) -> None:
        """Gives recordings and pool back."""
        self.phases.close()
        self.group.close()


def check_requests(
    device: torch.device,
    *,
    modes: Sequence[tuple[str, str]] = tuple(product(MODES, MODES)),
    load: Load = LOAD,
    prefix_reuse: bool = True,
    mixed: bool = False,
    dtype: torch.dtype = torch.float32,
    ops: str | None = None,
    model: str = MODEL,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[TechniqueParity]:
    """Runs one load in several modes against the three oracles.

    Args:
        device: the recorder follows from it.
        modes: of decode and prefill.
        load: the requests.
        prefix_reuse: a shared prefix is computed once.
        mixed: requests that decode ride along in prefill steps.
        dtype: float32 judges all three oracles; a lower precision reports what oracle 2 finds without failing it.
        ops: the form in which the model computes; None for the device's own default.
        model: a small one, by its name.
        progress: called with each pair of modes.

    Yields:
        One verdict for each pair of modes.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    form = check_ops(ops, device, loaded.config)
    oracles = RequestOracles(loaded, device, load, prefix_reuse=prefix_reuse, mixed=mixed, ops=form)
    try:
        oracles.alone()
        for decode, prefill in modes:
            progress(f"decode={decode}, prefill={prefill}")
            yield replace(oracles.check(decode, prefill), model=model)
    finally:
        oracles.close()
