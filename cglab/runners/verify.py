"""T2, verify: the target's scores for the tokens that were drafted, all of a request in one step (S0, S1).

Captured: the target's embedding, layers with their KV writes and attention, head and the choice of the token after
each, for a fixed number of requests with ``width`` tokens each: the newest token, which is not in the cache yet, and
the drafted ones. For a draft of several branches the tree is worked out in the graph as well, from the draft loop's
own outputs: which tokens each one sees, and at which depth it stands. Static: the weights, the paged cache and its
page tables, the width, and the input slots. Nothing of a batch is read on the host (B44). Padded requests are one
width long, at the reserved row 0, and store to the reserved slot 0.

It cannot: serve another width, as that is another step (P4), or a batch above its largest bucket; each of these runs
eager, with its reason. A tree deeper than a sliding window is refused. Which tokens are accepted is not its business,
and what rejected ones stored is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.options import Options
from cglab.models import draft_tree
from cglab.models.decoder import Decoder
from cglab.models.draft_cache import Feeder
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup
from cglab.runners.requests import Input, RequestRunner, whole


class Verified(NamedTuple):
    """What the target says after each token of a step, request by request.

    Attributes:
        tokens: [requests * width] int64, the most likely next ones.
        logits: [requests * width, vocabulary] in the model's dtype.
        states: [requests * width, hidden_size]; None where the capture hands out none.
    """

    tokens: Tensor
    logits: Tensor
    states: Tensor | None

    @property
    def hidden(self) -> Tensor:
        """The normed hidden states, which the next draft starts from.

        Raises:
            InputError: if this capture hands out none (P8).
        """
        if self.states is None:
            raise InputError("this capture hands out no hidden states; make the runner with hidden=True")
        return self.states


class VerifyRunner(RequestRunner[Decoder]):
    """The verify step of one model over one cache.

    Args:
        model: the target.
        kv: its paged cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        width: tokens of each request, the newest one included.
        topk: branches of a draft at each step; 1 for a chain.
        steps: of a draft.
        hidden: whether hidden states are handed out; a draft that does without them saves their copy.
        feeder: of a block draft, whose cache is then filled in the same recording.

    Raises:
        InputError: for more branches than there are tokens, a tree deeper than a sliding window, or a feeder and
            branches: its cache is not moved to an accepted path.
    """

    technique, title = "verify", "target verify"

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        width: int,
        topk: int = 1,
        steps: int,
        hidden: bool = True,
        feeder: Feeder | None = None,
    ) -> None:
        draft_tree.check_branches(
            steps, topk, vocabulary=model.config.vocab_size, window=model.config.sliding_window
        )
        if feeder is not None and topk > 1:
            raise InputError(f"a block draft is a chain and topk is {topk}; give topk=1 with a feeder")
        self.topk, self.parents, self.hidden, self.feeder = topk, (steps - 1) * topk + 1, hidden, feeder
        fed = {} if feeder is None else feeder.watched(model, kv)
        super().__init__(model, kv, group, buckets, options, {"model": model, **fed}, width=width)

    def declare(self) -> dict[str, Input]:
        """The tokens of each request and their places; and its tree, unless that is a chain."""
        candidates = self.topk * self.parents
        tree = {
            "parent_list": whole(-1, candidates, self.parents),
            "top_scores_index": whole(0, candidates, self.width - 1),
        }
        chain = {"input_ids": whole(0, self.vocabulary, width=self.width), **self.stores()}
        return chain | tree if self.topk > 1 else chain

    def step(self, **inputs: Tensor) -> Verified:
        """One verify step.

        Args:
            **inputs: ``self.inputs``, int64: per token [requests * width], per request [requests], with the lengths
                after this step; the tree as ``draft_tree.Draft`` has it.
        """
        width = self.width_of(inputs)
        tree, depth = None, self.kv.context_positions[:width]
        if self.topk > 1:
            tree = draft_tree.ancestors(inputs["parent_list"], inputs["top_scores_index"], self.topk)
            depth = tree.sum(-1) - 1
        positions = (inputs["seq_lens"].unsqueeze(1) - width + depth).flatten()
        tokens = inputs["input_ids"], positions, self.attend(inputs, width=width, tree=tree)
        feeder = self.feeder
        hidden = feeder.forward(*tokens, inputs["out_slots"]) if feeder else self.model(*tokens)
        logits = self.model.logits(hidden)
        return Verified(logits.argmax(-1), logits, hidden if self.hidden else None)
