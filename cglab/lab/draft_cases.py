"""Random sequences of speculative steps: verify passes of chains and trees, seed steps, and draft loops.

Tokens of a verify pass are judged by its own logits. A draft hands out none, so what it chose is judged by what a
spelt-out walk along its own paths gives: the probability of every drafted token, one assistant step at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import step_inputs, write_page_tables
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.graphs.options import Options
from cglab.lab.decode_cases import BUCKETS, LARGEST_BATCH, STEPS, RequestBatches
from cglab.lab.drafting import Drafting, draft_of, use_ops_of_both
from cglab.lab.oracles import Outcome, Step
from cglab.models import draft_tree
from cglab.models.draft_tree import Draft
from cglab.models.loading import LoadedModel
from cglab.models.ops import use_ops
from cglab.models.paged import AttentionKind
from cglab.runners.base import window_inputs
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.requests import RequestRunner
from cglab.runners.seed_step import DraftRunner, SeedRunner
from cglab.runners.verify import VerifyRunner

CHAIN, TREE = Speculation(steps=3), Speculation(steps=3, topk=3, tokens=8)
R = TypeVar("R", bound=RequestRunner[Any])
D = TypeVar("D", bound=DraftRunner)


def options(mode: str, *, padding: bool) -> Options:
    """Of a runner under test; there are many, and a few cases do not reach all of their buckets."""
    return Options(mode, padding=padding, strict=True, lazy=True)


class VerifyOracles(RequestBatches[VerifyRunner]):
    """The verify runner: chains and trees, full and breakable, padded and exact."""

    technique = "verify"
    lookahead = TREE.lookahead
    filler: ClassVar[Mapping[str, int]] = {"seq_lens": TREE.width}

    def make_runners(self) -> dict[tuple[str, bool], VerifyRunner]:
        """By mode and form of the draft, and by padding."""
        return {
            (f"{mode}, topk {drafted.topk}", padding): VerifyRunner(
                self.loaded.model, self.kv, self.group, BUCKETS, options(mode, padding=padding),
                width=drafted.width, topk=drafted.topk, steps=drafted.steps,
            )
            for mode, drafted, padding in product(("full", "breakable"), (CHAIN, TREE), (True, False))
        }  # fmt: skip

    def use_ops(self, ops: str) -> None:
        """Sets the form in which the model computes, for chains and trees."""
        heads = self.loaded.config.num_heads
        kinds = [AttentionKind(heads, CHAIN.width), AttentionKind(heads, TREE.width, tree=True)]
        use_ops(ops, self.loaded.model, self.kv, kinds)

    def sequence(self, runner: VerifyRunner, where: dict[str, Any]) -> None:
        """A few passes over random drafts; a random part of each chain is accepted, of a tree its root."""
        self.width, requests = runner.width, list[Request]()
        try:
            for step in range(int(self.random.integers(*STEPS))):
                self.resize(requests, int(self.random.integers(1, LARGEST_BATCH + 1)))
                write_page_tables(self.kv, requests)
                inputs, drafted = self._inputs(requests, runner)
                at = where | {"step": step, "live": len(requests)}
                tokens = self.check(runner, Step(len(requests), len(requests), inputs), at)
                for number, request in enumerate(requests):
                    last = int(self.random.integers(runner.width)) if runner.topk == 1 else 0
                    path = drafted[number][:last]
                    self.extend(request, [*path, tokens[number * runner.width + last]])
        finally:
            for request in requests:
                self.memory.release(request)

    def _inputs(
        self, requests: list[Request], runner: VerifyRunner
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        """Of a pass over random drafts, and the drafted tokens of each request."""
        chunks = [Chunk(request, request.computed, runner.width, last=True) for request in requests]
        names = ("request_rows", "seq_lens", "out_slots", *window_inputs(self.kv))
        drafted = self._draft(len(requests), CHAIN if runner.topk == 1 else TREE)
        newest = torch.tensor([request.output[-1] for request in requests])
        own = draft_tree.verify_inputs(newest, drafted, runner.topk)
        inputs = {name: value.to(self.device) for name, value in own.items()}
        return inputs | step_inputs(chunks, names, self.kv), drafted.draft_tokens.tolist()

    def _draft(self, requests: int, sizes: Speculation) -> Draft:
        """Random tokens at random probabilities, put together as a draft loop does."""

        def drawn(rows: int) -> tuple[Tensor, Tensor]:
            shape = (rows, sizes.topk)
            p = torch.from_numpy(self.random.random(shape)).float().sort(1, descending=True).values
            return p, torch.from_numpy(self.random.integers(0, self.loaded.config.vocab_size, shape))

        levels = [draft_tree.first_candidates(*drawn(requests))]
        for _ in range(1, sizes.steps):
            levels.append(draft_tree.next_candidates(levels[-1], *drawn(requests * sizes.topk)))
        return draft_tree.organize(levels, sizes.lookahead)

    def results(self, runner: VerifyRunner, output: Any, step: Step) -> Outcome:
        """Tokens, logits and hidden states of every drafted token."""
        return dict(zip(("tokens", "logits", "hidden"), output, strict=True))


class Drafts(RequestBatches[R]):
    """Steps that draft for requests which grow by a token in between."""

    lookahead = TREE.lookahead
    scores = "probabilities"

    def sequence(self, runner: R, where: dict[str, Any]) -> None:
        """A few drafts."""
        requests: list[Request] = []
        try:
            for step in range(int(self.random.integers(*STEPS))):
                self.resize(requests, int(self.random.integers(1, LARGEST_BATCH + 1)))
                write_page_tables(self.kv, requests)
                inputs = self.inputs(runner, requests)
                at = where | {"step": step, "live": len(requests)}
                self.check(runner, Step(len(requests), len(requests), inputs), at)
                for request in requests:
                    self.extend(request, [int(self.random.integers(self.loaded.config.vocab_size))])
        finally:
            for request in requests:
                self.memory.release(request)

    @abstractmethod
    def inputs(self, runner: R, requests: list[Request]) -> dict[str, Tensor]:
        """Of the runner's step."""


class DraftOracles(Drafts[D]):
    """Steps of an assistant: its own, or the shape that fits a model with windows, with random weights."""

    filler: ClassVar[Mapping[str, int]] = {"seq_lens": 1}

    def __init__(self, loaded: LoadedModel, *args: Any) -> None:
        self.assistant = draft_of(loaded).assistant
        super().__init__(loaded, *args)

    def use_ops(self, ops: str) -> None:
        """Sets the form in which the models compute over the cache."""
        use_ops_of_both(ops, self.loaded.model, self.kv, Drafting(self.assistant, CHAIN))

    def start(self, requests: list[Request]) -> dict[str, Tensor]:
        """What a seed step reads: the newest tokens, and hidden states before them, which are random."""
        shape = (len(requests), self.assistant.config.backbone_size)
        hidden = torch.from_numpy(self.random.standard_normal(shape))
        rows = {"input_ids": [request.output[-1] for request in requests]}
        rows |= {"request_rows": [request.row for request in requests]}
        rows |= {"seq_lens": [request.computed for request in requests]}
        inputs = {name: torch.tensor(row, device=self.device) for name, row in rows.items()}
        return inputs | {"hidden": hidden.to(self.device, self.assistant.pre.weight.dtype)}

    def parted(self, got: Outcome, want: Outcome) -> Iterator[tuple[int, float]]:
        """The first drafted token of each request that differs, and by how much its path is the less probable one.

        After it the drafts are of other texts.
        """
        for row, differ in enumerate(got["tokens"] != want["tokens"]):
            for place in differ.nonzero().flatten().tolist()[:1]:
                gap = want["probabilities"][row, place] - got["probabilities"][row, place]
                yield row, abs(float(gap))

    @torch.no_grad()
    def walked(self, runner: D, step: Step, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One assistant step of every request, spelt out: probabilities [R, V] float32, and hidden states."""
        prefix = runner.frozen(step.inputs)
        logits, hidden = self.assistant(ids, hidden, prefix.positions, prefix.attend)
        return logits.softmax(-1, dtype=torch.float32), hidden


class SeedOracles(DraftOracles[SeedRunner]):
    """The seed step: one candidate and several, padded and exact."""

    technique = "seed_step"

    def make_runners(self) -> dict[tuple[str, bool], SeedRunner]:
        """By number of candidates, and by padding."""
        return {
            (f"full, topk {topk}", padding): SeedRunner(
                self.assistant, self.kv, self.group, BUCKETS, options("full", padding=padding), topk=topk
            )
            for topk, padding in product((1, 3), (True, False))
        }

    def inputs(self, runner: SeedRunner, requests: list[Request]) -> dict[str, Tensor]:
        """See ``Drafts``."""
        return self.start(requests)

    def results(self, runner: SeedRunner, output: Any, step: Step) -> Outcome:
        """Candidates with their probabilities, told and walked, and hidden states."""
        told, tokens, hidden = output
        walked, _ = self.walked(runner, step, step.inputs["input_ids"], step.inputs["hidden"])
        return {"tokens": tokens, "hidden": hidden, "probabilities": walked.gather(1, tokens), "told": told}


class LoopOracles(DraftOracles[DraftLoopRunner]):
    """The draft loop: chains and trees, with and without the seed step, full and breakable, padded and exact."""

    technique = "draft_loop"

    def make_runners(self) -> dict[tuple[str, bool], DraftLoopRunner]:
        """By mode and form, and by padding."""
        return {
            (f"{mode}, topk {drafted.topk}{', fused' * fused}", padding): DraftLoopRunner(
                self.assistant, self.kv, self.group, BUCKETS, options(mode, padding=padding),
                steps=drafted.steps, topk=drafted.topk, tokens=drafted.width, fused=fused,
            )
            for mode, drafted, fused, padding in product(
                ("full", "breakable"), (CHAIN, TREE), (False, True), (True, False)
            )
        }  # fmt: skip

    def inputs(self, runner: DraftLoopRunner, requests: list[Request]) -> dict[str, Tensor]:
        """What a seed step makes of its own, unless the loop begins with it."""
        start = self.start(requests)
        if runner.fused:
            return start
        seed = Step(0, 0, start)
        p, hidden = self.walked(runner, seed, start["input_ids"], start["hidden"])
        best = p.topk(runner.topk)
        places = {name: start[name] for name in ("request_rows", "seq_lens")}
        return {"topk_p": best.values, "topk_index": best.indices, "hidden": hidden, **places}

    def results(self, runner: DraftLoopRunner, output: Any, step: Step) -> Outcome:
        """The draft, and its tokens in the order of what a walk along their own paths makes of their probability."""
        draft = Draft(*output)
        paths = self._path_probabilities(runner, draft, step)
        order = paths.sort(dim=1, descending=True, stable=True).indices
        return {
            "tokens": draft.draft_tokens.gather(1, order), "probabilities": paths.gather(1, order),
            "parent_list": draft.parent_list, "top_scores_index": draft.top_scores_index,
        }  # fmt: skip

    def _path_probabilities(self, runner: DraftLoopRunner, draft: Draft, step: Step) -> Tensor:
        """[R, D - 1] float32, of the nodes beside the root: each after the token and hidden state of its parent."""
        parents = draft_tree.parents(draft.parent_list, draft.top_scores_index, runner.topk)
        inputs, rows = step.inputs, torch.arange(len(parents), device=self.device)
        if runner.fused:
            p, hidden = self.walked(runner, step, inputs["input_ids"], inputs["hidden"])
        else:
            hidden = inputs["hidden"]
            p = hidden.new_zeros(len(hidden), self.loaded.config.vocab_size, dtype=torch.float32)
            p.scatter_(1, inputs["topk_index"], inputs["topk_p"])
        after, states = (
            [p],
            [hidden],
        )  # of each node: next tokens, on the path's probability, and the hidden state
        found = []
        for node in range(1, parents.shape[1]):
            parent, tokens = parents[:, node], draft.draft_tokens[:, node - 1]
            reached = torch.stack(after)[parent, rows, tokens]
            found.append(reached)
            p, hidden = self.walked(runner, step, tokens, torch.stack(states)[parent, rows])
            after.append(p * reached.unsqueeze(1))
            states.append(hidden)
        return torch.stack(found, 1)
