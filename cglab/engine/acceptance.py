"""Which drafted tokens count, and what is said about it: decisions of the host, without a device.

A request's draft is a tree: node 0 is its newest token, which the target chose itself, and every other node follows an
earlier one; without branches it is a chain. A node is accepted if its parent was and the target would have chosen it
there. What the target chooses at the last accepted node comes on top, so a pass commits at least one token: the one
that plain decoding would have given.

Accept length has three flavours in the field that differ a little and are told apart here by name, as SGLang's serving
benchmark and its log would have them mixed: tokens per verify pass, the share of drafts that were right, and the
completion tokens of a request over its passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from cglab.errors import InputError


def greedy_path(
    chosen: Sequence[int], tokens: Sequence[int], parents: Sequence[int], deepest: int
) -> list[int]:
    """The accepted nodes of one request.

    Args:
        chosen: the target's token after each node.
        tokens: the token of each node.
        parents: the node that each node follows, an earlier one; the root's own entry is not read.
        deepest: drafted tokens of a path that may count. Deeper nodes are placeholders, which fill up a request with
            fewer drafts than others: whatever is in them, they are never accepted (B71, B75, B77).

    Returns:
        Nodes from the root on, the root included.
    """
    path = [0]
    for node in range(1, len(tokens)):  # children come after their parents, and siblings differ
        if len(path) > deepest:
            break
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
    return path


def countable(parents: Sequence[int], deepest: int) -> int:
    """How many nodes beside the root are at most so deep; the others are placeholders."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return sum(1 <= each <= deepest for each in depth)


def pinned_path(mean_length: float, passes: int, deepest: int) -> list[int]:
    """The nodes of a chain that count as accepted, whatever the target chose (S3's method).

    Args:
        mean_length: tokens that a pass commits on average.
        passes: verify passes of this request so far; lengths differ by at most one, and their sum after n passes is
            ``n * mean_length`` rounded down.
        deepest: see ``greedy_path``.
    """
    length = math.floor((passes + 1) * mean_length) - math.floor(passes * mean_length)
    return list(range(min(length, deepest + 1)))


def committed(path: Sequence[int], chosen: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The new tokens of a request: the accepted drafts, then the target's choice after the last of them.

    Args:
        path: nodes from ``greedy_path`` or ``pinned_path``.
        chosen: the target's token after each node.
        tokens: the token of each node.
    """
    return [tokens[node] for node in path[1:]] + [chosen[path[-1]]]


@dataclass
class AcceptLengths:
    """What became of drafts, in three flavours that are never mixed; may be added up over calls.

    Attributes:
        pinned: the mean that passes were made to commit; None where the target decided.
        passes: verify passes of single requests, by the tokens that they committed, the target's own included.
        correct: drafted tokens that were accepted.
        proposed: drafted tokens that were verified; of a tree all of its nodes but the root.
        placeholders: tokens that were verified only to fill up.
        completions: requests that came to their end, by completion tokens and verify passes.
    """

    pinned: float | None = None
    passes: Counter[int] = field(default_factory=Counter)
    correct: int = 0
    proposed: int = 0
    placeholders: int = 0
    completions: Counter[tuple[int, int]] = field(default_factory=Counter)

    def verified(self, committed: int, proposed: int, placeholders: int) -> None:
        """Notes one request's part of a verify pass: before a limit or stop token cuts what it committed."""
        self.passes[committed] += 1
        self.correct += committed - 1
        self.proposed += proposed
        self.placeholders += placeholders

    def completed(self, tokens: int, passes: int) -> None:
        """Notes a request that came to its end; one without a pass says nothing."""
        if passes:
            self.completions[tokens, passes] += 1

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean tokens that a verify pass committed, the target's own included: 1 if no draft is ever right."""
        count = self.passes.total()
        return sum(length * times for length, times in self.passes.items()) / count if count else None

    @property
    def accept_rate(self) -> float | None:
        """Accepted drafts over proposed ones, 0 to 1; with branches well under 1 at best."""
        return self.correct / self.proposed if self.proposed else None

    @property
    def completion_per_pass(self) -> float | None:
        """Mean over requests of completion tokens per verify pass: the prompt's own token counts, what is cut not."""
        return (
            mean(tokens / passes for tokens, passes in self.completions.elements())
            if self.completions
            else None
        )

    @property
    def distribution(self) -> dict[int, float]:
        """Share of verify passes by the tokens that they committed, from one on."""
        count = self.passes.total()
        return {length: self.passes[length] / count for length in range(1, max(self.passes, default=0) + 1)}

    def copy(self) -> AcceptLengths:
        """These numbers, to subtract later."""
        return self + AcceptLengths(self.pinned)

    def __add__(self, other: AcceptLengths) -> AcceptLengths:
        """Both together.

        Raises:
            InputError: if one is pinned and the other is not, or elsewhere.
        """
        self._require_same(other)
        return AcceptLengths(
            self.pinned, self.passes + other.passes, self.correct + other.correct, self.proposed + other.proposed,
            self.placeholders + other.placeholders, self.completions + other.completions,
        )  # fmt: skip

    def __sub__(self, earlier: AcceptLengths) -> AcceptLengths:
        """What was noted since ``earlier``, a copy of these numbers.

        Raises:
            InputError: as for a sum.
        """
        self._require_same(earlier)
        return AcceptLengths(
            self.pinned, self.passes - earlier.passes, self.correct - earlier.correct,
            self.proposed - earlier.proposed, self.placeholders - earlier.placeholders,
            self.completions - earlier.completions,
        )  # fmt: skip

    def _require_same(self, other: AcceptLengths) -> None:
        if self.pinned != other.pinned:
            raise InputError(
                f"accept lengths pinned at {self.pinned} and at {other.pinned} are no one number; keep them apart"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record or a table."""
        return {
            "pinned": self.pinned,
            "tokens_per_pass": self.tokens_per_pass,
            "accept_rate": self.accept_rate,
            "completion_per_pass": self.completion_per_pass,
            "passes": self.passes.total(),
            "distribution": self.distribution,
            "correct": self.correct,
            "proposed": self.proposed,
            "placeholders": self.placeholders,
            "requests": self.completions.total(),
        }

    def __str__(self) -> str:
        if self.tokens_per_pass is None:
            return "no verify pass"
        how = f", pinned at {self.pinned:g}" if self.pinned is not None else ""
        rate = "none" if self.accept_rate is None else f"{self.correct} of {self.proposed}"
        return (
            f"{self.tokens_per_pass:.3f} tokens per verify pass ({self.passes.total()} passes{how}), "
            f"drafts accepted: {rate}"
        )
