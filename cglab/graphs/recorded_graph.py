"""What ``inspect`` returns: a recorded step as lines, as a table, as a picture, and against another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from graphlib import TopologicalSorter
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from cglab.errors import InputError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.graph_nodes import GraphNode
from cglab.graphs.recorder import Segment

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class RecordedGraph(Sequence[str]):
    """One bucket's recording; as a sequence it is its lines, and equals a list of them.

    Attributes:
        title: what was recorded, for headings.
        lines: one an operation (tape) or segment (cuda), and one a break, in order of replay.
        nodes: the same in full: see ``GraphNode``. On a GPU they are the driver's, where its Python bindings are
            installed, and otherwise one a segment.
    """

    title: str
    lines: tuple[str, ...]
    nodes: tuple[GraphNode, ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each node, how many lie before it on the longest chain of edges."""
        depths: dict[int, int] = {}
        waits = {node.index: node.after for node in self.nodes}
        for index in TopologicalSorter(waits).static_order():
            depths[index] = max((depths[before] + 1 for before in waits[index]), default=0)
        return tuple(depths[node.index] for node in self.nodes)

    def as_frame(self) -> pandas.DataFrame:
        """One row a node: index, kind, name, grid, block, shape, dtype, bytes, segment, break, after (edges), depth."""
        import pandas

        rows = [node.as_row() | {"depth": depth} for node, depth in zip(self.nodes, self.depths, strict=True)]
        columns = [*GraphNode(0, "", "").as_row(), "depth"]
        whole = {"bytes": "Int64", "segment": "Int64"}  # whole numbers beside what nobody says
        return pandas.DataFrame(rows, columns=columns).astype(whole)

    def plot(self) -> Any:
        """Nodes by kind and the edges between them, a plotly figure; ``as_frame`` has the same facts."""
        # Only on use, and by name: nothing here knows who draws.
        return import_module("cglab.lab.views").draw("recorded_graph", self)

    def diff(self, other: RecordedGraph) -> GraphDiff:
        """What another bucket or arm has in addition, lacks, or has with another grid, shape or size.

        Nodes are matched by kind and name, in order.

        Raises:
            InputError: if the other is nothing that ``inspect`` returns.
        """
        if not isinstance(other, RecordedGraph):
            raise InputError(
                f"a recorded graph cannot be compared with a {type(other).__name__}; "
                "give what inspect returns for another bucket or arm"
            )
        base, others = ([(node.kind, node.name) for node in graph.nodes] for graph in (self, other))
        added: list[GraphNode] = []
        removed: list[GraphNode] = []
        pairs: list[tuple[GraphNode, GraphNode]] = []
        for tag, low, high, start, end in SequenceMatcher(None, base, others, autojunk=False).get_opcodes():
            if tag == "equal":
                pairs += zip(self.nodes[low:high], other.nodes[start:end], strict=True)
            else:
                removed += self.nodes[low:high]
                added += other.nodes[start:end]
        changed = [pair for pair in pairs if pair[0].differences(pair[1])]
        return GraphDiff(
            self.title, other.title, tuple(added), tuple(removed), tuple(changed), len(pairs) - len(changed)
        )

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        return list(self.lines[place]) if isinstance(place, slice) else self.lines[place]

    def __len__(self) -> int:
        return len(self.lines)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RecordedGraph):
            return self.nodes == other.nodes and self.lines == other.lines
        return isinstance(other, list) and list(self.lines) == other

    __hash__ = None  # type: ignore[assignment]  # it equals a list

    def __repr__(self) -> str:
        return repr(list(self.lines))


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """How one recording differs from another.

    Attributes:
        base, other: their titles.
        added: nodes of the other alone.
        removed: nodes of the base alone.
        changed: pairs that have one kind and name, and another grid, block, shape, dtype or number of bytes.
        alike: pairs that differ in none of these.
    """

    base: str
    other: str
    added: tuple[GraphNode, ...]
    removed: tuple[GraphNode, ...]
    changed: tuple[tuple[GraphNode, GraphNode], ...]
    alike: int

    @property
    def same(self) -> bool:
        """Whether both record the same."""
        return not (self.added or self.removed or self.changed)

    def as_frame(self) -> pandas.DataFrame:
        """One row a difference: change, index in the base and in the other, kind, name, and what changed."""
        import pandas

        rows: list[tuple[Any, ...]] = [
            ("removed", node.index, None, node.kind, node.name, "") for node in self.removed
        ]
        rows += [("added", None, node.index, node.kind, node.name, "") for node in self.added]
        rows += [
            ("changed", one.index, two.index, one.kind, one.name, one.differences(two))
            for one, two in self.changed
        ]
        columns = ["change", "index", "other_index", "kind", "name", "facts"]
        return pandas.DataFrame(rows, columns=columns).astype({"index": "Int64", "other_index": "Int64"})

    def __str__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.removed)} removed, {len(self.changed)} changed"
        return f"{self.base} against {self.other}: {counts}, {self.alike} alike"


def recorded_graph(title: str, steps: Sequence[Segment | BreakCall]) -> RecordedGraph:
    """Puts the segments and breaks of one recording together.

    A break waits for all of the segment before it, and the segment after it waits for the break.

    Args:
        title: what was recorded.
        steps: in order of replay.
    """
    nodes: list[GraphNode] = []
    ends: tuple[int, ...] = ()  # what nothing before the next segment or break waits for
    segment = 0
    for step in steps:
        if isinstance(step, BreakCall):
            found, number = [GraphNode(0, "break", step.name)], None
        else:
            found, number = step.graph(), segment
            segment += 1
        if not found:  # an empty segment between two breaks
            continue
        base = len(nodes)
        awaited = {before for node in found for before in node.after}
        nodes += [
            replace(
                node, index=base + node.index, segment=number,
                after=tuple(base + before for before in node.after) or ends,
            )
            for node in found
        ]  # fmt: skip
        ends = tuple(base + node.index for node in found if node.index not in awaited)
    return RecordedGraph(title, tuple(line for step in steps for line in step.operations()), tuple(nodes))
