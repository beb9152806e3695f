"""Trees of drafted tokens against the same trees in plain Python, objects and lists, with many equal scores."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.models.draft_tree import (
    ancestors,
    candidate_count,
    first_candidates,
    next_candidates,
    next_inputs,
    organize,
    parents,
)

PROBABILITIES = (1.0, 0.5, 0.25, 0.0)
"""Exact, and few: paths are often equally likely."""


@dataclass(eq=False)
class Node:
    """A candidate, or the root."""

    token: int
    score: float
    parent: "Node | None"

    def path(self):
        """Itself and those before it, up to the root."""
        return [self] + (self.parent.path() if self.parent else [])


def best(nodes, count):
    """The most probable ones; Python's sort keeps the order of equals."""
    return sorted(nodes, key=lambda node: -node.score)[:count]


def plain_tree(draws, steps, k, count):
    """The same draft as objects: of the steps' candidates those that are kept, in order, after the root."""
    root = Node(-1, 1.0, None)
    frontier, made = [root], []
    for step in range(steps):
        new = [
            Node(token, parent.score * p, parent)
            for parent, row in zip(frontier, draws[step], strict=True)
            for p, token in row
        ]
        made += new
        frontier = best(new, k)
    kept = set(best(made, count))
    return [root, *(node for node in made if node in kept)], frontier


@st.composite
def drafts(draw):
    """Steps, branches, kept nodes, and the rows that the assistant returns for each of two requests."""
    steps, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = draw(st.integers(1, candidate_count(steps, k)))
    cell = st.tuples(st.sampled_from(PROBABILITIES), st.integers(0, 90))

    def row():
        return sorted(draw(st.lists(cell, min_size=k, max_size=k)), key=lambda pair: -pair[0])

    rows = [[[row() for _ in range(k if step else 1)] for step in range(steps)] for _ in range(2)]
    return steps, k, count, rows


def levels_of(rows, steps, k):
    """The levels of a draft of several requests."""
    levels = []
    for step in range(steps):
        table = torch.tensor([row for draws in rows for row in draws[step]])
        p, token = table[..., 0].float(), table[..., 1].long()
        levels.append(next_candidates(levels[-1], p, token) if levels else first_candidates(p, token))
    return levels


@settings(max_examples=200)
@given(drafts())
def test_what_is_kept_whom_it_follows_and_what_it_sees_are_those_of_a_plain_tree(draft):
    steps, k, count, rows = draft
    organized = organize(levels_of(rows, steps, k), count)
    followed = parents(organized.parent_list, organized.top_scores_index, k)
    seen = ancestors(organized.parent_list, organized.top_scores_index, k)
    assert organized.parent_list.shape == (2, (steps - 1) * k + 1)
    for request, draws in enumerate(rows):
        nodes, _ = plain_tree(draws, steps, k, count)
        assert organized.draft_tokens[request].tolist() == [node.token for node in nodes[1:]]
        assert followed[request].tolist() == [0, *(nodes.index(node.parent) for node in nodes[1:])]
        assert seen[request].tolist() == [[other in node.path() for other in nodes] for node in nodes]
        assert (seen[request].sum(-1) - 1).tolist() == [len(node.path()) - 1 for node in nodes]


@settings(max_examples=50)
@given(drafts())
def test_a_kept_node_comes_after_its_parent_whatever_the_ties(draft):
    steps, k, count, rows = draft
    organized = organize(levels_of(rows, steps, k), count)
    assert (organized.top_scores_index.diff(dim=1) > 0).all()
    followed = parents(organized.parent_list, organized.top_scores_index, k)[:, 1:]
    assert (followed < torch.arange(1, count + 1)).all()
    assert (followed >= 0).all()


@settings(max_examples=50)
@given(drafts())
def test_the_next_step_drafts_from_the_chosen_with_their_parents_hidden_states(draft):
    """A row of hidden states holds the token that made it, so that each says whose it is."""
    steps, k, _, rows = draft
    levels = levels_of(rows, steps, k)
    ids, hidden = next_inputs(levels[0], torch.tensor([[-1.0], [-1.0]]))
    for step in range(1, steps):
        ids, hidden = next_inputs(levels[step], ids.unsqueeze(-1).float())
    for request, draws in enumerate(rows):
        _, frontier = plain_tree(draws, steps, k, 1)
        assert ids.view(2, k)[request].tolist() == [node.token for node in frontier]
        assert hidden.view(2, k)[request].tolist() == [node.parent.token for node in frontier]


@pytest.mark.parametrize("k", [1, 3])
def test_b78_of_padding_every_node_sees_itself_and_stands_within_the_width(k):
    zeros = torch.zeros(2, 2 * k + 1, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    seen = ancestors(*zeros, k)
    assert seen.diagonal(dim1=1, dim2=2).all()
    assert parents(*zeros, k).max() < 5


def test_a_chain_is_the_tree_of_one_branch():
    levels = levels_of([[[[(0.5, step + 5)]] for step in range(3)]], 3, 1)
    organized = organize(levels, 3)
    assert organized.draft_tokens.tolist() == [[5, 6, 7]]
    assert organized.parent_list.tolist() == [[-1, 0, 1]]
    assert torch.equal(
        ancestors(organized.parent_list, organized.top_scores_index, 1)[0], torch.ones(4, 4).tril() > 0
    )
