"""Trees of drafted tokens, as pure functions of tensors that a recording of any kind holds.

Every step of a draft makes candidates: the first k for the request, each later one k for each of the k candidates
that were drafted from. They are numbered through all steps, so a candidate's number tells which one it follows. At the
end the best of them by the probability of their whole path are verified. No child is more probable than its parent,
and the sort is stable, so a node that is kept comes after its own parent, which is kept too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError


class Level(NamedTuple):
    """The candidates of one step.

    Attributes:
        first: the number of the first of them.
        scores: [R, n] float32, the probability of each one's path.
        tokens: [R, n] int64.
        chosen: [R, k] int64 below n, those that the next step drafts from, the most probable first.
    """

    first: int
    scores: Tensor
    tokens: Tensor
    chosen: Tensor


class Draft(NamedTuple):
    """What is to be verified of each request, beside the token that it starts from: the root, node 0.

    Attributes:
        parent_list: [R, (steps - 1) * k + 1] int64: -1 for the root, then the numbers of the candidates that were
            drafted from. Candidate n follows entry ``n // k``.
        top_scores_index: [R, D - 1] int64 ascending, the candidate that node 1, 2, ... is.
        draft_tokens: [R, D - 1] int64, their tokens.
    """

    parent_list: Tensor
    top_scores_index: Tensor
    draft_tokens: Tensor


def check_branches(steps: int, topk: int, *, vocabulary: int, window: int | None = None) -> None:
    """Refuses a draft that a target cannot score.

    Args:
        steps: of the draft.
        topk: candidates drafted from at each step.
        vocabulary: tokens of the target.
        window: tokens that its sliding-window layers see, the query's own included; None without such layers. A node
            sees its whole way to the root, and so a branch that is longer would see more than plain decoding.

    Raises:
        InputError: for branches that there are no tokens for, or that are longer than the window.
    """
    if not 1 <= topk <= vocabulary:
        raise InputError(f"topk {topk} is none; give 1 to {vocabulary}")
    if topk > 1 and window is not None and steps >= window:
        raise InputError(
            f"a tree of {steps} steps is deeper than the window of {window} tokens that the target sees; "
            f"give at most {window - 1} steps, or topk=1"
        )


def candidate_count(steps: int, topk: int) -> int:
    """Candidates of a whole draft: the most nodes that it can have beside the root."""
    return topk + (steps - 1) * topk * topk


def first_candidates(topk_p: Tensor, topk_index: Tensor) -> Level:
    """The candidates of the seed step.

    Args:
        topk_p: [R, k] float32, descending.
        topk_index: [R, k] int64, their tokens.
    """
    return Level(0, topk_p, topk_index, _best(topk_p, topk_p.shape[1]))


def next_candidates(level: Level, topk_p: Tensor, topk_index: Tensor) -> Level:
    """The candidates of a step that drafted from those chosen at ``level``.

    Args:
        level: the step before.
        topk_p: [R * k, k] float32, the row of each chosen candidate.
        topk_index: [R * k, k] int64.
    """
    requests, k = level.chosen.shape
    before = level.scores if k == 1 else level.scores.gather(1, level.chosen)
    scores = (before.unsqueeze(-1) * topk_p.view(requests, k, k)).flatten(1)
    first = level.first + level.tokens.shape[1]
    return Level(first, scores, topk_index.view(requests, k * k), _best(scores, k))


def next_inputs(level: Level, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What the next step drafts from.

    Args:
        level: the step before.
        hidden: its hidden states: [R, width] of the seed step, or [R * k, width].

    Returns:
        Tokens [R * k] int64, and hidden states [R * k, width].
    """
    requests, k = level.chosen.shape
    if k == 1:
        return level.tokens.flatten(), hidden
    rows = hidden.unflatten(0, (requests, -1))
    parent = (level.chosen // k).unsqueeze(-1).expand(-1, -1, rows.shape[-1])
    return level.tokens.gather(1, level.chosen).flatten(), rows.gather(1, parent).flatten(0, 1)


def organize(levels: Sequence[Level], count: int) -> Draft:
    """Keeps the ``count`` most probable candidates of all steps.

    Args:
        levels: one for each step, in order.
        count: nodes beside the root, at most ``candidate_count``.
    """
    scores = torch.cat([level.scores for level in levels], 1)
    tokens = torch.cat([level.tokens for level in levels], 1)
    kept = _best(scores, count).sort(1).values if count < scores.shape[1] else _best(scores, count)
    drafted_from = [level.chosen + level.first for level in levels[:-1]]
    parents = torch.cat((torch.full_like(kept[:, :1], -1), *drafted_from), 1)
    return Draft(parents, kept, tokens.gather(1, kept))


def verify_inputs(newest: Tensor, draft: Draft, topk: int) -> dict[str, Tensor]:
    """What a verify pass reads of a draft.

    Args:
        newest: [R] int64, the token that each draft starts from.
        draft: of each request.
        topk: candidates drafted from at each step; a chain needs no tree.

    Returns:
        ``input_ids`` [R * D] int64; of trees ``parent_list`` and ``top_scores_index`` as well, as they are.
    """
    return {"input_ids": after_newest(newest, draft.draft_tokens), **tree_inputs(draft, topk)}


def after_newest(newest: Tensor, draft_tokens: Tensor) -> Tensor:
    """[R * D] int64: the tokens of a verify pass, a copy of what was drafted, which its replay may overwrite."""
    return torch.cat((newest.unsqueeze(1), draft_tokens), 1).flatten()


def tree_inputs(draft: Draft, topk: int) -> dict[str, Tensor]:
    """``parent_list`` and ``top_scores_index`` as they are; nothing for a chain."""
    if topk == 1:
        return {}
    return {"parent_list": draft.parent_list, "top_scores_index": draft.top_scores_index}


def _best(scores: Tensor, count: int) -> Tensor:
    """[R, count] int64: places of the largest of [R, n], of equals the earlier ones; all of them as they stand."""
    requests, candidates = scores.shape
    if count == candidates:
        return torch.arange(count, device=scores.device).expand(requests, -1)
    return scores.sort(stable=True, dim=1, descending=True).indices[:, :count]


def parents(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> Tensor:
    """The node that each node follows.

    Args:
        parent_list: see ``Draft``.
        top_scores_index: see ``Draft``.
        topk: candidates drafted from at each step.

    Returns:
        [R, D] int64; the root's is itself.
    """
    followed = parent_list.gather(1, top_scores_index // topk)
    nodes = torch.cat((parent_list[:, :1], top_scores_index), 1)
    same = nodes.unsqueeze(1) == followed.unsqueeze(2)
    return F.pad(same.to(torch.uint8).argmax(-1), (1, 0))


def ancestors(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> Tensor:
    """What each node sees of the others: itself and those on its way to the root.

    Args:
        parent_list: see ``Draft``; of padding, whatever it is, every node sees itself.
        top_scores_index: see ``Draft``.
        topk: candidates drafted from at each step.

    Returns:
        [R, D, D] bool; a row's sum is the node's depth, plus one.
    """
    jump = parents(parent_list, top_scores_index, topk)
    width = jump.shape[1]
    node = torch.arange(width, device=jump.device)
    seen = (node.unsqueeze(1) == node).expand(len(jump), -1, -1)
    steps = (parent_list.shape[1] - 1) // topk + 1
    for _ in range(
        steps.bit_length()
    ):  # each doubles how far a node sees, and a path has as many nodes as steps
        seen = seen | seen.gather(1, jump.unsqueeze(-1).expand(-1, -1, width))
        jump = jump.gather(1, jump)
    return seen
