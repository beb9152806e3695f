"""The nodes of a ``cudaGraph_t``, as the driver tells them through its Python bindings, which are optional."""

from __future__ import annotations

from typing import Any

import torch

from cglab.graphs.graph_nodes import GraphNode

_KINDS = {
    "KERNEL": "kernel", "MEMCPY": "copy", "MEMSET": "fill", "MEM_ALLOC": "allocation", "MEM_FREE": "free",
    "HOST": "host", "GRAPH": "graph", "EMPTY": "empty", "WAIT_EVENT": "event", "EVENT_RECORD": "event",
}  # fmt: skip
_PREFIX = "CU_GRAPH_NODE_TYPE_"


def count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a kept graph, or None without the driver's Python bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()))
    return int(count) if int(error) == 0 else None


def nodes_of_graph(address: int) -> list[GraphNode] | None:
    """The nodes of a graph with kernels' names and grids, bytes of copies and fills, and edges.

    Args:
        address: of the ``cudaGraph_t``, as ``CUDAGraph.raw_cuda_graph`` gives it.

    Returns:
        In the driver's order; None without the bindings, or where the driver refuses to tell.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    counted = _told(driver.cuGraphGetNodes(address, 0))
    listed = _told(driver.cuGraphGetNodes(address, counted[-1])) if counted and counted[-1] else counted
    if listed is None:
        return None
    handles = listed[0] or []
    waits = _edges(driver, address, [int(handle) for handle in handles])
    return [_node(driver, index, handle, tuple(waits[index])) for index, handle in enumerate(handles)]


def _told(answer: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a call of the driver returned beside its error; None for an error."""
    error, *told = answer
    return tuple(told) if int(error) == 0 else None


def _edges(driver: Any, address: int, handles: list[int]) -> list[list[int]]:
    """For each node, those that it waits for; none where the driver does not tell."""
    waits: list[list[int]] = [[] for _ in handles]
    counted = _told(driver.cuGraphGetEdges(address, 0))
    listed = _told(driver.cuGraphGetEdges(address, counted[-1])) if counted and counted[-1] else None
    if listed is not None:
        places = {handle: index for index, handle in enumerate(handles)}
        for before, behind in zip(listed[0], listed[1], strict=True):
            waits[places[int(behind)]].append(places[int(before)])
    return [sorted(each) for each in waits]


def _node(driver: Any, index: int, handle: Any, after: tuple[int, ...]) -> GraphNode:
    told = _told(driver.cuGraphNodeGetType(handle))
    word = told[0].name.removeprefix(_PREFIX) if told else "unknown"
    kind = _KINDS.get(word, word.lower())
    if kind == "kernel":
        kernel = _told(driver.cuGraphKernelNodeGetParams(handle))
        if kernel is None:
            return GraphNode(index, kind, "a kernel that the driver does not name", after)
        (launch,) = kernel
        return GraphNode(
            index, kind, _kernel_name(driver, launch), after,
            grid=(int(launch.gridDimX), int(launch.gridDimY), int(launch.gridDimZ)),
            block=(int(launch.blockDimX), int(launch.blockDimY), int(launch.blockDimZ)),
        )  # fmt: skip
    return GraphNode(index, kind, word.lower(), after, bytes=_bytes(driver, kind, handle))


def _kernel_name(driver: Any, launch: Any) -> str:
    """As it was written in C++ where that can be told."""
    function = int(launch.func)
    named = _told(driver.cuFuncGetName(launch.func) if function else driver.cuKernelGetName(launch.kern))
    if named is None:
        return "a kernel that the driver does not name"
    name = named[0].decode() if isinstance(named[0], bytes) else str(named[0])
    return torch._C._demangle(name)


def _bytes(driver: Any, kind: str, handle: Any) -> int | None:
    """What a copy or fill moves, or an allocation takes; None for other kinds and where the driver does not tell."""
    if kind == "copy" and (told := _told(driver.cuGraphMemcpyNodeGetParams(handle))):
        return int(told[0].WidthInBytes) * int(told[0].Height) * int(told[0].Depth)
    if kind == "fill" and (told := _told(driver.cuGraphMemsetNodeGetParams(handle))):
        return int(told[0].elementSize) * int(told[0].width) * int(told[0].height)
    if kind == "allocation" and (told := _told(driver.cuGraphMemAllocNodeGetParams(handle))):
        return int(told[0].bytesize)
    return None
