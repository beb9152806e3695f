"""A recorded graph as a picture: nodes by kind, and an edge to each from what it waits for."""

from __future__ import annotations

from collections import Counter

import plotly.graph_objects as go

from cglab.graphs.graph_nodes import GraphNode
from cglab.graphs.recorded_graph import RecordedGraph
from cglab.ui.style import COLOURS, GREY, INK, colour, counted, empty, figure

LOOKS = {
    "operation": (COLOURS["full"], "circle"),
    "kernel": (COLOURS["full"], "circle"),
    "copy": (COLOURS["transformers"], "square"),
    "fill": (COLOURS["breakable"], "triangle-up"),
    "break": (COLOURS["breaks"], "diamond"),
    "graph": (COLOURS["graph"], "hexagon"),
    "allocation": (COLOURS["fused"], "triangle-left"),
    "free": (COLOURS["fused"], "triangle-right"),
}
"""Colour and symbol of a kind, so that neither is needed alone."""

LONGEST = 80
"""Letters of a name; kernels of templates have hundreds."""


def recorded_graph(graph: RecordedGraph) -> go.Figure:
    """Nodes from left to right by the longest chain before each, those of one depth above each other."""
    if not graph.nodes:
        return empty(graph.title, "Nothing was recorded yet: call it once")
    kinds = Counter(node.kind for node in graph.nodes)
    note = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    edges = sum(len(node.after) for node in graph.nodes)
    lanes: Counter[int] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for node, depth in zip(graph.nodes, graph.depths, strict=True):
        lanes[depth] += 1
        places[node.index] = depth, lanes[depth]
    deepest, widest = max(graph.depths), max(lanes.values())
    height = 260 + 24 * min(widest, 20)
    made = figure(
        f"Recorded graph of {graph.title}",
        f"{note}; {counted(edges, 'edge')}: what each waits for",
        height=height,
    )
    across: list[int | None] = []
    up: list[int | None] = []
    for node in graph.nodes:
        for before in node.after:
            across += [places[before][0], places[node.index][0], None]
            up += [places[before][1], places[node.index][1], None]
    made.add_scatter(
        x=across, y=up, mode="lines", name="waits for", line={"color": GREY, "width": 1}, hoverinfo="skip"
    )
    for kind in kinds:
        drawn = [node for node in graph.nodes if node.kind == kind]
        code, symbol = LOOKS.get(kind, (colour(kind), "cross"))
        made.add_scatter(
            x=[places[node.index][0] for node in drawn], y=[places[node.index][1] for node in drawn],
            mode="markers", name=kind, text=[_told(node) for node in drawn],
            marker={"color": code, "symbol": symbol, "size": 9, "line": {"color": INK, "width": 0.5}},
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    margin = 0.5 + deepest / 50  # or half a marker would lie outside
    made.update_xaxes(
        title_text="longest chain before it (nodes)", range=[-margin, deepest + margin], zeroline=False,
        dtick=max(1, round(deepest, -1) // 10), tick0=0,
    )  # fmt: skip
    return made.update_yaxes(
        title_text="side by side (nodes)", range=[0.4, widest + 0.6], dtick=max(1, widest // 6), tick0=1
    )


def _told(node: GraphNode) -> str:
    name = node.name if len(node.name) <= LONGEST else node.name[: LONGEST - 1] + "…"
    facts = {
        "segment": node.segment, "grid": node.grid, "block": node.block, "shape": node.shape, "dtype": node.dtype,
        "bytes": node.bytes,
    }  # fmt: skip
    lines = [f"{fact} {value}" for fact, value in facts.items() if value is not None]
    # Templates hold angle brackets, which plotly would take for its own.
    return "<br>".join([f"{node.index}: {name.replace('<', '&lt;')}", *lines])
