"""Parity of a technique: random sequences of steps against three oracles.

1. *Padded eager*: the same step at the padded size, eager: bitwise, every output and every KV slot.
2. *Live eager*: the step at its live size, float32: within the drift that eager itself shows on the same rows
   between two heights and between two orders of attention's sums, tokens equal but for near-ties.
3. *Poison*: NaN in reserved memory, hostile values in static buffers: live rows, live KV and inputs stay as they are.

What a sequence is made of is the technique's business (``lab.cases``); what a step must satisfy is said here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cglab.engine.cache import paged_kv
from cglab.engine.memory import CacheLayout, RequestMemory
from cglab.graphs.out_forms import same_bits
from cglab.lab.deviations import ArmCounts, Deviation, furthest
from cglab.lab.poison import poison
from cglab.lab.steps import leaves
from cglab.lab.verdicts import TechniqueParity
from cglab.measure.drift import Drift
from cglab.models.kv import PagedKV
from cglab.models.loading import LoadedModel
from cglab.models.ops import use_ops
from cglab.runners.base import GraphGroup, Runner

Outcome = dict[
    str, Tensor
]  # of a step: tokens, logits, what else the phase hands out, keys and values of every pool
State = Mapping[str, Tensor]  # keys and values of every pool, by their names in ``PagedKV.caches``
R = TypeVar("R", bound=Runner[Any])
KINDS = {"logits": "logits", "hidden": "hidden", "probabilities": "probabilities", "told": "probabilities"}
PAGE_SIZE, MAX_CONTEXT, TIE_SHARE = 16, 96, 0.01
ALL_HEIGHTS = 40  # in so many first steps rounding is measured at every height: a few cases have a bound too


@dataclass(frozen=True)
class Step:
    """One step of a technique.

    Attributes:
        live: what the runner calls live: a number of rows, or the spans of a prefill.
        rows: live rows along the bucket axis.
        inputs: tensors by slot name.
    """

    live: Any
    rows: int
    inputs: dict[str, Tensor]


class StepOracles(ABC, Generic[R]):
    """Checks the runners of one technique, step by step.

    Subclasses say how many ``requests`` there are at most, at which ``heights`` rounding is measured, with what a
    slot's spare rows are filled there where that is not 0 (``filler``), how many positions ahead a step stores
    (``lookahead``), what tokens are chosen by (``scores``), and how many rows come out for a live one (``width``).

    Args:
        loaded: a model with small layers.
        device: where it runs.
        seed: of the sequences.
        ops: the form in which the model computes; see ``models.ops``.

    Attributes:
        kv: a cache full of noise, the state that every case starts from.
        draft_kv: likewise of a block draft, beside its target's; None where nothing has one.
        memory: who holds which of its rows and pages.
        counts: what each runner was put to, by backend and padding.
        deviations: all that was off, of every runner.
    """

    technique: ClassVar[str]
    requests: ClassVar[int]
    heights: ClassVar[Sequence[int]]
    filler: ClassVar[Mapping[str, int]] = {}
    lookahead: ClassVar[int] = 0
    scores: ClassVar[str] = "logits"
    width = 1
    draft_kv: PagedKV | None = None

    def __init__(self, loaded: LoadedModel, device: torch.device, seed: int, ops: str = "portable") -> None:
        dtype = loaded.model.embedding.weight.dtype
        self.exact = dtype == torch.float32
        self.loaded, self.device = loaded, device
        layout = CacheLayout.for_requests(
            self.requests, MAX_CONTEXT, PAGE_SIZE, budget=MAX_CONTEXT, window=loaded.config.sliding_window,
            lookahead=self.lookahead,
        )  # fmt: skip
        self.memory = RequestMemory(layout, MAX_CONTEXT, prefix_reuse=False)
        self.kv = paged_kv(layout, loaded.config, device=device, dtype=dtype)
        self.use_ops(ops)
        generator = torch.Generator(device).manual_seed(seed)
        for cache in self.caches().values():
            cache.normal_(generator=generator)
        self._kinds = KINDS | dict.fromkeys(self.caches(), "kv")
        self._clean = self._state()
        self.random = np.random.default_rng(seed)
        # The sequences do not depend on how drift is measured.
        self._heights = np.random.default_rng(seed + 1)
        self.group = GraphGroup(device)
        self.runners = self.make_runners()
        for runner in self.runners.values():
            runner.capture()
        self.drift, self.deviations = Drift(), list[Deviation]()
        self.counts = {arm: ArmCounts() for arm in self.runners}
        self._parted: list[tuple[dict[str, Any], float]] = []
        name, recorder = str(dtype).removeprefix("torch."), self.group.recorder.name
        self.result = TechniqueParity(self.technique, dtype=name, recorder=recorder, ops=ops)

    def use_ops(self, ops: str) -> None:
        """Sets the form in which the models compute over the cache."""
        use_ops(ops, self.loaded.model, self.kv)

    @abstractmethod
    def make_runners(self) -> dict[tuple[str, bool], R]:
        """The runners under test, by backend and padding."""

    @abstractmethod
    def sequence(self, runner: R, where: dict[str, Any]) -> None:
        """One random sequence; hands every step to ``check``."""

    @abstractmethod
    def results(self, runner: R, output: Any, step: Step) -> Outcome:
        """Tokens, logits and what else the phase hands out, of live rows."""

    def caches(self) -> dict[str, Tensor]:
        """Keys and values that a step may leave behind, by name."""
        drafts = {} if self.draft_kv is None else self.draft_kv.caches()
        return self.kv.caches() | {f"draft {name}": cache for name, cache in drafts.items()}

    def case(self, number: int) -> None:
        """One sequence on one of the runners."""
        mode, padding = list(self.runners)[number % len(self.runners)]
        steps, captured = self.result.steps, self.result.captured
        self.sequence(self.runners[mode, padding], {"case": number, "mode": mode, "padding": padding})
        self.restore()
        self.result.cases += 1
        self.counts[mode, padding].count(self.result.steps - steps, self.result.captured - captured)

    def restore(self, state: State | None = None) -> None:
        """Brings the cache back to ``state``, or to what it held at first."""
        for name, cache in self.caches().items():
            cache.copy_((state or self._clean)[name])

    def _state(self) -> State:
        return {name: cache.clone() for name, cache in self.caches().items()}

    def _beside_padding(self) -> dict[str, Tensor]:
        """Keys and values but for the reserved page."""
        return {name: cache[:, self.kv.page_size :] for name, cache in self.caches().items()}

    def _outcome(self, runner: R, output: Any, step: Step) -> Outcome:
        left = {name: cache.clone() for name, cache in self._beside_padding().items()}
        # Not before: what tokens are judged by may take a step of its own.
        return {name: value.clone() for name, value in self.results(runner, output, step).items()} | left

    def check(self, runner: R, step: Step, where: dict[str, Any]) -> list[int]:
        """One step against all three oracles; the cache holds the step's own KV afterwards.

        Returns:
            The tokens that the runner gave.
        """
        state, before = self._state(), runner.coverage().captured
        output = runner.run(step.live, **step.inputs)
        replayed = runner.coverage().captured > before
        self.result.steps += 1
        self.result.captured += replayed
        live = step.rows * self.width
        if wrong := [leaf.shape[0] for leaf in leaves(output) if leaf.shape[0] != live]:
            self._off(Deviation(1, where, f"{wrong[0]} rows came out for {live} live ones"))
            output = head(output, live)
        got = self._outcome(runner, output, step)
        if replayed and not wrong:
            size = min(n for n in runner.serving(step.live).captured.captured_sizes if n >= step.rows)
            with self._from(state):
                padded = runner.run_padded_eager(step.live, size, **step.inputs)
                self._same(1, got, self._outcome(runner, padded, step), where)
            with self._from(state):
                self._poisoned(runner, step, got, where)
        with self._from(state):
            want = self._outcome(runner, runner.run_live_eager(step.live, **step.inputs), step)
        if replayed:
            self._rounding(runner, step, want, state)
        self._near(got, want, where)
        self.restore(state)
        for name, cache in self._beside_padding().items():
            cache.copy_(got[name])
        return got["tokens"].tolist()

    @contextmanager
    def _from(self, state: State) -> Iterator[None]:
        self.restore(state)
        yield

    def _same(self, oracle: int, got: Outcome, want: Outcome, where: dict[str, Any]) -> None:
        for name in got:
            if not same_bits(got[name], want[name]):
                far, place = self._furthest(name, got, want)
                kind = self.scores if name == "tokens" else self._kinds.get(name, "")
                told = f"{name} differ in bits, by {far:.3g}"
                self._off(Deviation(oracle, where | place, told, kind, far))

    def _off(self, found: Deviation) -> None:
        self.deviations.append(found)
        self.result.fault(found.oracle, dict(found.where), found.what)

    def _furthest(self, name: str, got: Outcome, want: Outcome) -> tuple[float, dict[str, int]]:
        """How far a quantity is off, and where; tokens by what they are chosen by."""
        if name == "tokens":
            far, row = max(((gap, row) for row, gap in self.parted(got, want)), default=(inf, None))
            return far, {} if row is None else {"row": row}
        return furthest(got[name], want[name], self.kv.page_size if name in self.caches() else None)

    def _poisoned(self, runner: R, step: Step, got: Outcome, where: dict[str, Any]) -> None:
        """Oracle 3."""
        with poison(runner.serving(step.live), self.kv, step.live, step.inputs, self.draft_kv):
            again = self._outcome(runner, runner.run(step.live, **step.inputs), step)
        self._same(3, again, got, where)
        for name, view in runner.serving(step.live).captured.buffers.view(step.rows).items():
            if name in step.inputs and not torch.equal(view, step.inputs[name]):
                self._off(Deviation(3, where, f"static input {name} does not hold the live values"))

    def _rounding(self, runner: R, step: Step, want: Outcome, state: State) -> None:
        """What another height does to the same rows, live ones first, and what attention spelt out does (MATH)."""
        heights = [height for height in self.heights if height > step.rows]
        if self.result.steps > ALL_HEIGHTS:
            heights = [int(self._heights.choice(heights))]
        ways: list[tuple[int, AbstractContextManager[None]]] = [(height, nullcontext()) for height in heights]
        for height, way in [*ways, (step.rows, sdpa_kernel(SDPBackend.MATH))]:
            with self._from(state), way:
                taller = runner.run_live_eager(step.live, **self._padded(step, height))
                other = self._outcome(runner, head(taller, step.rows * self.width), step)
            for name, kind in self._kinds.items():
                if name in want:
                    self.drift.allow(kind, other[name], want[name])

    def _padded(self, step: Step, height: int) -> dict[str, Tensor]:
        """The inputs with rows of padding of our own: the runner's may be what is wrong."""
        more = height - step.rows
        return {
            name: torch.cat([value, value.new_full((more * len(value) // step.rows, *value.shape[1:]), fill)])
            for name, value in step.inputs.items()
            for fill in (self.filler.get(name, 0),)
        }

    def _near(self, got: Outcome, want: Outcome, where: dict[str, Any]) -> None:
        for name, kind in self._kinds.items():
            if name in want:
                self.drift.judge(kind, got[name], want[name], where | self._furthest(name, got, want)[1])
        self.result.compared_tokens += got["tokens"].numel()
        self._parted += [(where | {"row": row}, gap) for row, gap in self.parted(got, want)]

    def parted(self, got: Outcome, want: Outcome) -> Iterator[tuple[int, float]]:
        """Tokens that differ from live eager: the row, and how far the choice lies below live eager's best."""
        for row in (got["tokens"] != want["tokens"]).nonzero().flatten().tolist():
            scores = want["logits"][row].double()
            yield row, float(scores.max() - scores[got["tokens"][row]])

    def judge(self) -> TechniqueParity:
        """The verdict on everything checked so far; other batch heights are only reported in low precision."""
        result, drift = self.result, self.drift
        result.max_drift, result.bound = drift.worst.get(self.scores, 0.0), drift.bound(self.scores)
        result.kv_drift, result.kv_bound = drift.worst.get("kv", 0.0), drift.bound("kv")
        far = [(where, gap) for where, gap in self._parted if not gap < result.bound]
        result.ties, result.differing = len(self._parted) - len(far), len(far)
        if self.exact:
            for each in drift.beyond():
                self._off(Deviation(2, each.where, str(each), each.name, each.drift))
            for where, gap in far:
                far_off = f"another token, {gap:.3g} below the best; the bound is {result.bound:.3g}"
                self._off(Deviation(2, where, far_off, self.scores, gap))
            if result.ties > TIE_SHARE * max(result.compared_tokens, 1):
                told = f"{result.ties} of {result.compared_tokens} tokens differ at near-ties: more than 1 %"
                self._off(Deviation(2, {}, told))
        return result

    def close(self) -> None:
        """Gives recordings and pool back."""
        for runner in self.runners.values():
            runner.close()
        self.group.close()


def head(output: Any, rows: int) -> Any:
    """The first rows of every tensor of a step's output."""
    if not isinstance(output, tuple):
        return output[:rows]
    return tuple(None if leaf is None else leaf[:rows] for leaf in output)
