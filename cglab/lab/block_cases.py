"""Random sequences of block drafts, with the sampler in the recording and outside.

In the recording nothing but tokens comes out, so they are judged by the probabilities that the same draft, eager and
with its sampler outside, gives them. Each token of a block is chosen by itself, so each one is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import step_inputs
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.graphs.options import Options
from cglab.lab.decode_cases import BUCKETS
from cglab.lab.draft_cases import Drafts, options
from cglab.lab.drafting import BLOCK, Drafting, draft_of, use_ops_of_both
from cglab.lab.oracles import Outcome, Step
from cglab.models.loading import LoadedModel
from cglab.runners.block_draft import BlockDraftRunner, Drafted
from cglab.runners.draft_sampler import DraftSampler

WHOLE = Speculation(steps=BLOCK - 1)


class BlockOracles(Drafts[BlockDraftRunner]):
    """The step of a block draft: sampler inside and outside, full and breakable, padded and exact."""

    technique = "draft_sampler"
    lookahead = WHOLE.lookahead
    filler: ClassVar[Mapping[str, int]] = {"seq_lens": WHOLE.width}

    def __init__(self, loaded: LoadedModel, *args: Any) -> None:
        self.draft = draft_of(loaded, block=True).model
        super().__init__(loaded, *args)

    def use_ops(self, ops: str) -> None:
        """Sets the form in which the models compute over their caches, that of the draft made beside its target's."""
        drafting = Drafting.over(self.kv, self.draft, WHOLE)
        self.fed = drafting.block
        self.draft_kv = self.fed.kv
        use_ops_of_both(ops, self.loaded.model, self.kv, drafting)

    def _runner(self, chosen: Options, *, in_graph: bool) -> BlockDraftRunner:
        sampler = DraftSampler(self.loaded.model, BLOCK, in_graph=in_graph)
        return BlockDraftRunner(self.fed.draft, self.fed.kv, self.group, BUCKETS, chosen, sampler=sampler)

    def make_runners(self) -> dict[tuple[str, bool], BlockDraftRunner]:
        """By mode and place of the sampler, and by padding."""
        self._apart = self._runner(Options("eager"), in_graph=False)
        return {
            (f"{mode}, sampler {'inside' if inside else 'outside'}", padding): self._runner(
                options(mode, padding=padding), in_graph=inside
            )
            for mode, inside, padding in product(("full", "breakable"), (True, False), (True, False))
        }

    def inputs(self, runner: BlockDraftRunner, requests: list[Request]) -> dict[str, Tensor]:
        """The newest tokens, and where their blocks go."""
        self.width = 1 if runner.sampler.why_eager is None else BLOCK  # rows that come out of a request
        chunks = [Chunk(request, request.computed, BLOCK, last=True) for request in requests]
        newest = torch.tensor([request.output[-1] for request in requests], device=self.device)
        return {"input_ids": newest, **step_inputs(chunks, runner.inputs[1:], self.kv)}

    def results(self, runner: BlockDraftRunner, output: Any, step: Step) -> Outcome:
        """Tokens, with their probabilities; and hidden states where they are handed out."""
        drafted = Drafted(*output)
        tokens, told = runner.tokens(drafted), {} if drafted.hidden is None else {"hidden": drafted.hidden}
        hidden = self._apart.run_live_eager(step.live, **step.inputs).hidden
        rows = hidden.unflatten(0, (-1, BLOCK))[:, 1:]
        walked = self.loaded.model.logits(rows).softmax(-1, dtype=torch.float32)
        found = walked.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return {"tokens": tokens, "probabilities": found, **told}

    def parted(self, got: Outcome, want: Outcome) -> Iterator[tuple[int, float]]:
        """Every token that differs, and by how much it is the less probable one."""
        gaps = (want["probabilities"] - got["probabilities"]).abs()
        for row, place in (got["tokens"] != want["tokens"]).nonzero().tolist():
            yield row, float(gaps[row, place])
