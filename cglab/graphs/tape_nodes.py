"""The operations of a tape as nodes: what each writes, and whose results it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_iter

from cglab.graphs.graph_nodes import GraphNode, LastWriters
from cglab.graphs.writes import written_tensors

if TYPE_CHECKING:
    from cglab.graphs.tape import Node

_KINDS = {"aten::copy_": "copy", "aten::fill_": "fill", "aten::zero_": "fill"}


def nodes_of_tape(operations: Sequence[Node]) -> list[GraphNode]:
    """One node an operation, in order of replay.

    An edge leads from an operation to each later one that touches what it wrote; a tape replays in order, so that no
    other order needs one.
    """
    writers, found = LastWriters(), []
    for index, operation in enumerate(operations):
        touched = [leaf for leaf in tree_iter((operation.args, operation.kwargs)) if isinstance(leaf, Tensor)]
        written = [
            *operation.targets,
            *written_tensors(operation.func, operation.args, operation.kwargs),
        ]
        after = writers.of(touched)
        writers.note(written, index)
        found.append(
            GraphNode(
                index, _KINDS.get(operation.func._schema.name, "operation"), operation.name, after,
                shape=tuple(written[0].shape) if written else None,
                dtype=str(written[0].dtype).removeprefix("torch.") if written else None,
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in written),
            )
        )  # fmt: skip
    return found
