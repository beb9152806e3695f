"""Parity of a technique: random sequences of batches against three oracles.

1. *Padded eager*: the same step at the padded size, eager: bitwise, logits, tokens and every KV slot.
2. *Live eager*: the step at its live size, float32: within a measured drift, tokens equal but for near-ties.
3. *Poison*: reserved memory full of NaN, static buffers full of hostile values before the load: live rows, live KV
   and the inputs stay bitwise unchanged.

A case is one sequence: requests come, grow by what was generated, and end; every step is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.engine.engine import Engine
from cglab.engine.requests import Request
from cglab.errors import ToggleError
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.lab.plants import planted
from cglab.lab.techniques import technique
from cglab.lab.verdicts import TechniqueParity
from cglab.measure.parity import compare_logits, compare_tokens, measured_bound
from cglab.models.kv import PagedKV
from cglab.models.loading import LoadedModel, load_model
from cglab.runners.base import GraphGroup
from cglab.runners.decode import DecodeRunner

BUCKETS = (1, 2, 4, 8)
LARGEST_BATCH = 10  # above the largest bucket, so that eager steps are among the cases
MAX_CONTEXT = 96
STEPS = (2, 5)
DRAWS, TIE_SHARE = 6, 0.01


@dataclass(frozen=True)
class _Outcome:
    tokens: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor


class DecodeOracles:
    """Checks the decode runner of one model, step by step.

    Args:
        loaded: a model with small layers.
        device: where it runs.
        seed: of the sequences.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, seed: int) -> None:
        dtype = loaded.model.embedding.weight.dtype
        self.exact = dtype == torch.float32
        pages = LARGEST_BATCH * MAX_CONTEXT // 16 + 1
        self.kv = PagedKV(
            loaded.config,
            pages=pages,
            rows=LARGEST_BATCH + 1,
            max_context=MAX_CONTEXT,
            device=device,
            dtype=dtype,
        )
        generator = torch.Generator(device).manual_seed(seed)
        for cache in (self.kv.keys, self.kv.values):
            cache.normal_(generator=generator)
        self._clean = (self.kv.keys.clone(), self.kv.values.clone())
        self.engine = Engine(loaded.model, self.kv, device)
        self.group = GraphGroup(device)
        self.vocabulary = loaded.config.vocab_size
        self.random = np.random.default_rng(seed)
        self.runners = {
            (mode, padding): DecodeRunner(
                loaded.model,
                self.kv,
                self.group,
                BUCKETS,
                Options(backend=mode, padding=padding, strict=True),
            )
            for mode in ("full", "breakable")
            for padding in (True, False)
        }
        for runner in self.runners.values():
            runner.capture()
        self.result = TechniqueParity(
            "decode", dtype=str(dtype).removeprefix("torch."), recorder=self.group.recorder.name
        )
        self.result.bound = self._drift_bound()
        self.random = np.random.default_rng(seed)  # the sequences do not depend on how the bound was measured

    def _drift_bound(self) -> float:
        """Largest difference between the same rows at two heights, both eager, with headroom.

        Every live size is set against every larger bucket, a few times: rounding drifts with both, and the rows.
        """
        pairs = []
        runner = self.runners["full", True]
        heights = [(live, size) for live in range(1, BUCKETS[-1]) for size in BUCKETS if size > live]
        for live, size in heights * DRAWS:
            with self._requests(size) as requests:
                inputs = self.engine.decode_inputs(requests)
                together = runner.run_live_eager(size, **inputs)[1].clone()
                head = {name: value[:live] for name, value in inputs.items()}
                pairs.append((runner.run_live_eager(live, **head)[1], together[:live]))
        self._restore()
        return measured_bound(pairs)

    @contextmanager
    def _requests(self, count: int) -> Iterator[list[Request]]:
        requests: list[Request] = []
        try:
            self._resize(requests, count)
            yield requests
        finally:
            for request in requests:
                self.engine.release(request)

    def _resize(self, requests: list[Request], count: int) -> None:
        """Ends random requests or admits new ones until ``count`` run; their KV is what the cache holds."""
        while len(requests) > count:
            self.engine.release(requests.pop(int(self.random.integers(len(requests)))))
        while len(requests) < count:
            length = int(self.random.integers(1, MAX_CONTEXT - 2 * STEPS[1]))
            prompt = self.random.integers(0, self.vocabulary, length).tolist()
            request = Request(len(requests), prompt, STEPS[1] + 1)
            self.engine.admit(request)
            request.output.append(int(self.random.integers(self.vocabulary)))
            requests.append(request)

    def _restore(self, state: tuple[Tensor, Tensor] | None = None) -> None:
        keys, values = state or self._clean
        self.kv.keys.copy_(keys)
        self.kv.values.copy_(values)

    def _outcome(self, output: tuple[Tensor, Tensor]) -> _Outcome:
        page = self.kv.page_size
        return _Outcome(
            output[0].clone(),
            output[1].clone(),
            self.kv.keys[:, page:].clone(),
            self.kv.values[:, page:].clone(),
        )

    def case(self, number: int) -> None:
        """One sequence of batches on one of the four runners."""
        mode, padding = list(self.runners)[number % len(self.runners)]
        runner = self.runners[mode, padding]
        with self._requests(int(self.random.integers(1, LARGEST_BATCH + 1))) as requests:
            for step in range(int(self.random.integers(*STEPS))):
                if step:
                    self._resize(requests, int(self.random.integers(1, LARGEST_BATCH + 1)))
                where = {
                    "case": number,
                    "step": step,
                    "mode": mode,
                    "padding": padding,
                    "live": len(requests),
                }
                tokens = self._check(runner, requests, where)
                for request, token in zip(requests, tokens, strict=False):
                    if len(request.output) <= STEPS[1]:
                        request.output.append(token % self.vocabulary)
        self._restore()
        self.result.cases += 1

    def _check(self, runner: DecodeRunner, requests: list[Request], where: dict[str, Any]) -> list[int]:
        live, inputs = len(requests), self.engine.decode_inputs(requests)
        state = self.kv.keys.clone(), self.kv.values.clone()
        before = runner.coverage().captured
        got = self._outcome(runner.run(live, **inputs))
        replayed = runner.coverage().captured > before
        self.result.steps += 1
        self.result.captured += replayed
        if got.tokens.shape[0] != live or got.logits.shape[0] != live:
            self.result.fault(1, where, f"{got.tokens.shape[0]} rows came out for {live} live ones")
            return got.tokens[:live].tolist()
        if replayed:
            size = min(s for s in runner.captured.captured_sizes if s >= live)
            self._restore(state)
            self._same(1, got, self._outcome(runner.run_padded_eager(live, size, **inputs)), where)
            self._restore(state)
            self._poisoned(runner, size, inputs, got, where)
        self._restore(state)
        self._near(got, self._outcome(runner.run_live_eager(live, **inputs)), where)
        self._restore(state)
        self.kv.keys[:, self.kv.page_size :].copy_(got.keys)
        self.kv.values[:, self.kv.page_size :].copy_(got.values)
        return got.tokens.tolist()

    def _same(self, oracle: int, got: _Outcome, want: _Outcome, where: dict[str, Any]) -> None:
        for name in ("tokens", "logits", "keys", "values"):
            if not same_bits(getattr(got, name), getattr(want, name)):
                self.result.fault(oracle, where, f"{name} differ in bits")

    def _poisoned(
        self, runner: DecodeRunner, size: int, inputs: dict[str, Tensor], got: _Outcome, where: dict[str, Any]
    ) -> None:
        """Oracle 3. Hostile values are in range, since a padded row may be computed: they point at live memory."""
        page, live = self.kv.page_size, where["live"]
        for cache in (self.kv.keys, self.kv.values):
            cache[:, :page] = float("nan")
        row_zero = self.kv.page_table[0].clone()
        self.kv.page_table[0] = self.kv.page_table[int(inputs["request_rows"][0])]
        hostile = {
            "input_ids": self.vocabulary - 1, "positions": MAX_CONTEXT - 1, "seq_lens": MAX_CONTEXT,
            "request_rows": int(inputs["request_rows"][0]), "out_slots": int(inputs["out_slots"][0]) // page * page,
        }  # fmt: skip
        for name, view in runner.captured.buffers.view(runner.captured.buffers.maximum).items():
            view.fill_(hostile[name])
        runner.captured.buffers.poison(live, size)
        again = self._outcome(runner.run(live, **inputs))
        self.kv.page_table[0] = row_zero
        self._same(3, again, got, where)
        for name, view in runner.captured.buffers.view(live).items():
            if not torch.equal(view, inputs[name]):
                self.result.fault(3, where, f"static input {name} does not hold the live values")

    def _near(self, got: _Outcome, want: _Outcome, where: dict[str, Any]) -> None:
        result = self.result
        drift = [(got.logits.float() - want.logits.float()).abs().max()]
        drift += [
            (getattr(got, n).float() - getattr(want, n).float()).abs().max() for n in ("keys", "values")
        ]
        worst = float(torch.stack(drift).max())
        result.max_drift = float("nan") if math.isnan(worst) else max(result.max_drift, worst)
        logits = compare_logits(got.logits, want.logits, bound=result.bound)
        tokens = compare_tokens(
            got.tokens.unsqueeze(-1).tolist(), want.tokens.unsqueeze(-1).tolist(),
            reference_logits=list(want.logits.unsqueeze(1).float()), bound=result.bound, forced=True, limit=1.0,
        )  # fmt: skip
        result.ties += tokens.tied
        result.compared_tokens += got.tokens.numel()
        if (
            not self.exact
        ):  # other batch compositions round differently in low precision: reported, not failed
            return
        if not worst <= result.bound:
            what = "" if logits.ok else f"; logits: {logits.detail}"
            result.fault(2, where, f"logits or KV drift by {worst:.3g}, bound {result.bound:.3g}{what}")
        if not tokens.ok:
            result.fault(2, where, tokens.detail)

    def close(self) -> None:
        """Gives recordings and pool back."""
        for runner in self.runners.values():
            runner.close()
        self.group.close()


def check_technique(
    name: str,
    cases: int,
    *,
    device: torch.device,
    seed: int = 0,
    plant: str | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int], None] | None = None,
) -> TechniqueParity:
    """Runs random sequences of a technique against the three oracles.

    Args:
        name: an available technique.
        cases: sequences.
        device: the recorder follows from it.
        seed: the same seed draws the same sequences.
        plant: a guard to take away, see ``plants.PLANTS``; the result must then not be ok.
        dtype: float32 judges all three oracles; a lower precision reports drift of oracle 2 without failing it.
        progress: called with the number of finished cases.

    Raises:
        ToggleError: for an unknown or unavailable technique, or fewer than one case.
    """
    if cases < 1:
        raise ToggleError(f"cases must be at least 1, got {cases}")
    technique(name).check(technique(name).values[0])
    with planted(plant):
        oracles = DecodeOracles(load_model("pico-gqa", device=device, dtype=dtype), device, seed)
        try:
            for number in range(cases):
                oracles.case(number)
                if progress is not None:
                    progress(number + 1)
        finally:
            oracles.close()
    result = oracles.result
    if result.ties > TIE_SHARE * max(result.compared_tokens, 1) and dtype == torch.float32:
        result.fault(
            2, {}, f"{result.ties} of {result.compared_tokens} tokens differ at near-ties: more than 1 %"
        )
    return result
