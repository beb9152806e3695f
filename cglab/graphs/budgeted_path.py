"""The fastest path through a line of nodes under several budgets: exact dynamic programming with bounds.

Knows nothing of buckets. A state is a node and what the path to it has used of each resource; it keeps the least
time. States are dropped where another one of the same node is no worse in time and in every resource, and where a
Lagrangian bound shows that no completion beats a path already known.

Without the bound there are at most (nodes * distinct sums of resources within the limits) states, so the worst
case is pseudo-polynomial; where every node takes the same, that is nodes * nodes. A first pass keeps few states
per node and only finds a path; passes grow wider until one dropped nothing, and that one is the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

PRICING_ROUNDS = 100
"""Steps in which prices are fitted. They decide how much is pruned, never what is found."""

FIRST_WIDTH = 128
"""States looked at per node in the first pass; one that had to drop some is followed by one eight times as wide."""


@dataclass(frozen=True, slots=True)
class BudgetedPath:
    """A path from node 0 over any of the nodes 1..N, ascending; M = N + 1.

    Attributes:
        span: [M, M] float64, milliseconds from node i to j, the next one after it; infinite forbids.
        rest: [M] float64, milliseconds after a node if it is the last.
        used: [M, R] int64, what a node takes of each resource, from 0; row 0 is zero.
        limits: [R] int64, how much a path may take.
    """

    span: Floats
    rest: Floats
    used: Integers
    limits: Integers

    def least_time(self) -> list[int] | None:
        """Nodes of the fastest path within the limits, without node 0; None if no path of finite time is."""
        prices, to_go, known, path = self._bound()
        width = FIRST_WIDTH
        while True:
            found, complete = self._search(prices, to_go, known, width)
            if found is not None and self._time(found) <= known:
                known, path = self._time(found), found
            if complete:
                return path
            width *= 8

    def _time(self, path: list[int]) -> float:
        nodes = [0, *path]
        return float(self.span[nodes[:-1], nodes[1:]].sum() + self.rest[nodes[-1]])

    def _search(
        self, prices: Floats, to_go: Floats, known: float, width: int
    ) -> tuple[list[int] | None, bool]:
        """The fastest path of those up to ``known`` ms, and whether no state was dropped for want of width."""
        # The bound is a difference of large sums: what rounding may add is allowed for, so nothing is overlooked.
        budget = float(prices @ self.limits)
        highest = known + budget + 1e-9 * (abs(known) + abs(budget))
        times, nodes, parents = np.zeros(1), np.zeros(1, np.int64), np.full(1, -1)
        used = np.zeros((1, self.limits.size), np.int64)
        complete = True
        for node in range(1, self.rest.size):
            time = times + self.span[nodes, node]
            total = used + self.used[node]
            bound = time + to_go[node] + total @ prices
            fits = (total <= self.limits).all(axis=1) & np.isfinite(bound) & (bound <= highest)
            index = np.flatnonzero(fits)
            if index.size > width:
                index, complete = index[np.argpartition(bound[index], width)[:width]], False
            index = index[_undominated(time[index], total[index])]
            times, used = np.append(times, time[index]), np.append(used, total[index], axis=0)
            nodes, parents = np.append(nodes, np.full(index.size, node)), np.append(parents, index)
        ends = times + self.rest[nodes]
        state = int(ends.argmin())
        if not np.isfinite(ends[state]):
            return None, complete
        path = []
        while parents[state] >= 0:
            path.append(int(nodes[state]))
            state = int(parents[state])
        return path[::-1], complete

    def _bound(self) -> tuple[Floats, Floats, float, list[int] | None]:
        """Prices of the resources, [R] ms a unit, that bound the fastest path tightly from below.

        Returns:
            Those prices, the least priced time to go from every node [M], and the time and nodes of the fastest
            path within the limits that was met on the way (infinite and None if there was none).
        """
        scale = np.maximum(self.limits, 1)
        prices, best, known, met, stalled = np.zeros(self.limits.size), -math.inf, math.inf, None, 0
        kept, damping = (prices, self.rest), 1.0
        for _ in range(PRICING_ROUNDS):
            to_go, path = self._to_go(prices)
            lower = float(to_go[0] - prices @ self.limits)
            stalled = 0 if lower > best else stalled + 1
            if stalled == 0:
                best, kept = lower, (prices, to_go)
            excess = (self.used[path].sum(axis=0) - self.limits) / scale
            if (excess <= 0).all() and self._time(path) < known:
                known, met = self._time(path), path
            if not math.isfinite(lower) or known <= best:
                break
            # Polyak's step towards the known path, or a tenth up while there is none; shorter when it overshoots.
            damping = damping / 2 if stalled == 3 else damping
            stalled %= 3
            aim = known if math.isfinite(known) else lower + 0.1 * abs(lower) + 1e-3
            length = damping * (aim - lower) / max(float(excess @ excess), 1e-12)
            prices = np.maximum(prices * scale + length * excess, 0.0) / scale
        return *kept, known, met

    def _to_go(self, prices: Floats) -> tuple[Floats, list[int]]:
        """Least priced time from every node to the end, and the nodes of the best path from node 0."""
        priced = self.used @ prices
        to_go, after = self.rest.copy(), [0] * self.rest.size
        for node in reversed(range(self.rest.size - 1)):
            onward = self.span[node, node + 1 :] + priced[node + 1 :] + to_go[node + 1 :]
            step = int(onward.argmin())
            if onward[step] < to_go[node]:
                to_go[node], after[node] = onward[step], node + 1 + step
        path, node = [], after[0]
        while node:
            path.append(node)
            node = after[node]
        return to_go, path


def _undominated(times: Floats, used: Integers) -> Integers:
    """Indices of the states that no other one matches or beats in time and in every resource."""
    order = np.lexsort((*used.T[::-1], times))
    if used.shape[1] == 1:
        least = np.minimum.accumulate(used[order, 0])
        return order[np.diff(least, prepend=np.iinfo(np.int64).max) < 0]
    # The first of equal rows is the fastest of them.
    order = order[np.sort(np.unique(used[order], axis=0, return_index=True)[1])]
    kept: list[int] = []
    frontier = np.empty_like(used)
    for state in order.tolist():
        if not (frontier[: len(kept)] <= used[state]).all(axis=1).any():
            frontier[len(kept)] = used[state]
            kept.append(state)
    return np.array(kept, np.int64)
