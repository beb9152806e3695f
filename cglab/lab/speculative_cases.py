"""Parity of speculative decoding: whole requests in every form, against plain decoding and against three oracles.

1. *Padded eager*: the same schedule with every replayed step run eager at its padded size: candidates, drafts, the
   target's choices, logits and hidden states bitwise, step by step, and so every accept length.
2. *Plain*: the same requests decoded token by token, eager, float32: tokens equal but for near-ties, the logits of
   every token within the drift that plain decoding itself shows between the batch and each request alone.
3. *Poison*: the schedule again over hostile memory, bitwise as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.batches import SchedulerOptions
from cglab.engine.cache import paged_kv
from cglab.engine.memory import CacheLayout
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.engine.speculator import Speculator
from cglab.errors import InputError
from cglab.graphs.buckets import exact_sizes
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.lab.block_cases import WHOLE
from cglab.lab.draft_cases import CHAIN, TREE
from cglab.lab.drafting import Drafting, draft_of, use_ops_of_both
from cglab.lab.oracles import TIE_SHARE
from cglab.lab.phases import LabPhases
from cglab.lab.poison import poison
from cglab.lab.prompts import held_out
from cglab.lab.steps import leaves
from cglab.lab.techniques import Captures
from cglab.lab.through import How, PhasesThrough
from cglab.lab.verdicts import TechniqueParity
from cglab.lab.watched import WatchedDrafts, WatchedEngine, WatchedSpeculator, against
from cglab.measure.drift import Drift
from cglab.models.loading import LoadedModel, load_model
from cglab.models.ops import check_ops
from cglab.runners.base import GraphGroup, Runner

PAGE_SIZE, BUDGET = 16, 256
BUCKETS = (1, 2, 4, 8, 16, 24)


class Form(NamedTuple):
    """How a speculative step is computed.

    Attributes:
        part: value of ``toggle``.
        draft_loop, verify: values of their toggles.
        topk: candidates of a draft's steps.
        padding: up to a bucket, or exact sizes.
        block: by a block draft, and no assistant.
    """

    part: str
    draft_loop: str
    verify: str
    topk: int = 1
    padding: bool = True
    block: bool = False

    @property
    def toggle(self) -> str:
        """The technique of this kind of draft alone."""
        return "draft_sampler" if self.block else "seed_step"

    @property
    def captures(self) -> bool:
        """Whether anything is captured; what is part of an eager draft is not."""
        return (self.part == "graph" and not self.block) or "full" in (self.draft_loop, self.verify)

    def __str__(self) -> str:
        first, second = ("sampler", "draft") if self.block else ("seed", "loop")
        modes = f"{first}={self.part}, {second}={self.draft_loop}, verify={self.verify}"
        return f"{modes}, topk {self.topk}, {'padded' if self.padding else 'exact'}"


PARTS = {False: ("eager", "graph", "fused"), True: ("eager", "graph")}
FORMS = tuple(
    Form(*modes, topk, padding, block)
    for topk, padding, block in (
        *product((1, 3), (True, False), [False]),
        *product([1], (True, False), [True]),
    )
    for modes in product(PARTS[block], ("eager", "full"), ("eager", "full"))
)
"""All of them, those that share their recordings side by side."""


class SpeculativeOracles:
    """Runs the same prompts in every form.

    Args:
        loaded: the shipped model.
        device: where it runs.
        prompts: token ids; all of them run at once.
        new_tokens: of each.
        topk: candidates of a draft's steps, 1 or 3.
        padding: up to a bucket, or exact sizes.
        block: drafted by blocks.
        ops: the form in which the models compute; see ``models.ops``.
    """

    def __init__(
        self, loaded: LoadedModel, device: torch.device, prompts: Sequence[Sequence[int]], new_tokens: int, *,
        topk: int, padding: bool, block: bool = False, ops: str = "portable",
    ) -> None:  # fmt: skip
        self.loaded, self.device, self.prompts, self.new_tokens, self.ops = (
            loaded,
            device,
            prompts,
            new_tokens,
            ops,
        )
        dtype = loaded.model.embedding.weight.dtype
        self.exact, self._dtype = dtype == torch.float32, str(dtype).removeprefix("torch.")
        self.speculation: Speculation = WHOLE if block else CHAIN if topk == 1 else TREE
        context = max(map(len, prompts)) + new_tokens
        layout = CacheLayout.for_requests(
            len(prompts), context, PAGE_SIZE, budget=BUDGET, window=loaded.config.sliding_window,
            lookahead=self.speculation.lookahead,
        )  # fmt: skip
        self.kv = paged_kv(layout, loaded.config, device=device, dtype=dtype)
        self.drafting = Drafting.over(self.kv, draft_of(loaded, block=block).model, self.speculation)
        use_ops_of_both(ops, loaded.model, self.kv, self.drafting)
        self.group, self.captures = GraphGroup(device), Captures()
        self.captures.prefill = self.captures.decode = "eager"
        count = len(prompts)
        buckets = [size for size in BUCKETS if size < 2 * count] if padding else exact_sizes(count)
        self.phases = LabPhases(
            loaded.model, self.kv, self.group, self.captures, buckets=buckets, prefill_buckets=[BUDGET],
            options=Options(padding=padding, strict=True, lazy=True), drafting=self.drafting,
        )  # fmt: skip
        self.drift = Drift()

    def _run(
        self, how: How, found: WatchedDrafts | None = None, *, drafts: bool = True, only: int | None = None
    ) -> WatchedDrafts:
        """The requests, or only one of them; with ``found`` the logits of every token are kept there."""
        phases, run = PhasesThrough(self.phases, how), found or WatchedDrafts()
        parts = self.loaded.model, self.drafting.drafter(self.kv, phases), self.kv, phases, self.speculation
        speculator = None
        if drafts:
            speculator = Speculator(*parts) if found is None else WatchedSpeculator(run, *parts)
        policy = SchedulerOptions(BUDGET, prefix_reuse=False)
        engine = WatchedEngine(run, self.loaded.model, self.kv, phases, policy, speculator)
        asked = [Request(index, list(prompt), self.new_tokens) for index, prompt in enumerate(self.prompts)]
        list(engine.stream(asked if only is None else [asked[only]]))
        engine.scheduler.check_invariants()
        if speculator is not None:
            run.accepted = speculator.accepted
        return run

    def plain(self) -> None:
        """Oracle 2's own: every request decoded token by token, and what the batch alone does to its logits."""
        batch = self._run(_live_eager, drafts=False)
        self._tokens, self._logits = (
            {request.index: request.output for request in batch.requests},
            batch.logits,
        )
        for index, tokens in self._tokens.items():
            alone = self._run(_live_eager, drafts=False, only=index)
            for place, token in enumerate(alone.requests[0].output):
                self.drift.allow("logits", alone.logits[index, place], self._logits[index, place])
                if token != tokens[place]:
                    break  # from here on the contexts differ

    def _served(self) -> WatchedDrafts:
        """The requests as they are served, with every output of every step."""
        found = WatchedDrafts()

        def how(runner: Runner[Any], live: Any, inputs: Mapping[str, Tensor]) -> Any:
            before = runner.coverage().captured
            output = runner.run(live, **inputs)
            size = runner.captured.pad(runner.rows(live)) if runner.coverage().captured > before else None
            kept = tuple(each.clone() for each in leaves(output))
            found.steps.append((runner.technique, size if isinstance(size, int) else None, kept))
            return output

        return self._run(how, found)

    def _again(self, served: WatchedDrafts, result: TechniqueParity, oracle: int) -> None:
        """The same schedule, padded eager (oracle 1) or over hostile memory (3): bitwise, step by step."""
        steps = iter(served.steps)

        def how(runner: Runner[Any], live: Any, inputs: Mapping[str, Tensor]) -> Any:
            technique, size, want = next(steps)
            if oracle == 3:
                with poison(runner, self.kv, live, inputs, self.drafting.kv):
                    output = runner.run(live, **inputs)
            elif size is None:
                output = runner.run_live_eager(live, **inputs)
            else:
                output = runner.run_padded_eager(live, size, **inputs)
            if technique == runner.technique and all(map(same_bits, leaves(output), want)):
                return output
            where = {"technique": runner.technique, "live": runner.rows(live)}
            result.fault(oracle, where, "outputs differ in bits")
            # As it was served, so that the schedule stays the same.
            kept = iter(want)
            if not isinstance(output, tuple):
                return next(kept)
            made: Any = type(output)
            return made(*(None if each is None else next(kept) for each in output))

        again = self._run(how)
        if next(steps, None) is not None or again.accepted.as_dict() != served.accepted.as_dict():
            result.fault(oracle, {}, f"accept lengths {again.accepted} instead of {served.accepted}")

    def check(self, form: Form) -> tuple[TechniqueParity, AcceptLengths]:
        """The requests in one form against all three oracles; ``plain`` comes before."""
        for name, value in zip((form.toggle, "draft_loop", "verify"), form, strict=False):
            setattr(self.captures, name, value)
        result = TechniqueParity(str(form), dtype=self._dtype, ops=self.ops, cases=len(self.prompts))
        result.recorder, result.capturable = self.group.recorder.name, form.captures
        served = self._served()
        drafted = [size for technique, size, _ in served.steps if technique != "prefill"]
        result.steps, result.captured = len(drafted), sum(size is not None for size in drafted)
        self._again(served, result, 1)
        self._again(served, result, 3)
        against(
            served, served.requests, self._tokens, self._logits, result, bound=self.drift.bound("logits"),
            exact=self.exact, what="plain decoding",
        )  # fmt: skip
        if self.exact and result.ties > TIE_SHARE * result.compared_tokens:
            told = f"{result.ties} of {result.compared_tokens} tokens differ at near-ties: more than 1 %"
            result.fault(2, {}, told)
        return result, served.accepted

    def close(self) -> None:
        """Gives recordings and pool back."""
        self.phases.close()
        self.group.close()


def _live_eager(runner: Runner[Any], live: Any, inputs: Mapping[str, Tensor]) -> Any:
    return runner.run_live_eager(live, **inputs)


def check_speculation(
    device: torch.device,
    *,
    prompts: int = 20,
    new_tokens: int = 200,
    forms: Sequence[Form] = FORMS,
    dtype: torch.dtype = torch.float32,
    ops: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Form, TechniqueParity, AcceptLengths]]:
    """Runs held-out prompts of the shipped model, all at once, in several forms against the three oracles.

    Args:
        device: the recorder follows from it.
        prompts: how many.
        new_tokens: of each.
        forms: those that differ in toggles alone side by side, as they share recordings.
        dtype: float32 judges all three oracles; a lower precision reports what oracle 2 finds without failing it.
        ops: the form in which the models compute; None for the device's own default.
        progress: called with each form.

    Yields:
        A verdict for each form, and what became of its drafts.

    Raises:
        InputError: for no prompts, more than the largest bucket holds, or too few new tokens for a draft.
    """
    if not 1 <= prompts <= BUCKETS[-1] or new_tokens < 2:
        raise InputError(
            f"{prompts} prompts of {new_tokens} new tokens make no batch that drafts; give 1 to {BUCKETS[-1]} prompts, "
            "the largest bucket, and 2 tokens or more"
        )
    loaded, chosen = load_model("pico-gqa", device=device, dtype=dtype), check_ops(ops, device)
    texts = held_out(prompts)
    for (topk, padding, block), group in groupby(forms, key=lambda form: form[3:]):
        oracles = SpeculativeOracles(
            loaded, device, texts, new_tokens, topk=topk, padding=padding, block=block, ops=chosen
        )
        try:
            oracles.plain()
            for form in group:
                progress(str(form))
                yield form, *oracles.check(form)
        finally:
            oracles.close()
