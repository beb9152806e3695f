"""Peers that put the lab's weights into graphs by other means: ``torch.compile``, and ``breakable-cuda-graphs``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module, metadata
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import mark_static_address
from torch._dynamo.utils import counters

from cglab.errors import DeviceError, NotInstalledError, ToggleError
from cglab.graphs.breaks import staged
from cglab.lab.peer import LocalPeer, Peer, Point, getting_ready, plain_model
from cglab.models.kv import LayerPool, PagedKV
from cglab.models.ops import DECODE_ATTENTION
from cglab.runners.decode import INPUTS

PACKAGE: Final = "breakable-cuda-graphs"
READY_CALLS: Final = 4
"""Calls after which ``torch.compile`` has compiled, warmed up, recorded and replayed."""


def graphs_skipped() -> int:
    """How many graphs ``torch.compile`` has left uncaptured in this process."""
    return int(counters["inductor"]["cudagraph_skips"])


def told_skipped(count: int) -> str:
    """For a note; empty where there is nothing to tell."""
    return f" It skipped {count} graphs, and runs these uncaptured." if count else ""


class GatheredAttention:
    """Attention of the portable form over one tensor a layer, without breaks and books: what a compiler can trace.

    Args:
        pool: tells where positions live.
        caches: keys and values of every layer, each [slots, kv_heads, head_dim].
        request_rows, seq_lens, out_slots: [requests] int64, as ``DecodeStep`` takes them.
    """

    def __init__(
        self,
        pool: LayerPool,
        caches: Sequence[tuple[Tensor, Tensor]],
        request_rows: Tensor,
        seq_lens: Tensor,
        out_slots: Tensor,
    ) -> None:
        self.caches, self.out_slots = caches, out_slots
        position, last = pool.context_positions, seq_lens.unsqueeze(1) - 1
        self.slots = pool.slots(request_rows, torch.minimum(position, last))
        mask = torch.zeros(self.slots.shape, device=last.device, dtype=caches[0][0].dtype)
        self.mask = mask.masked_fill(position > last, float("-inf")).unsqueeze(1).unsqueeze(1)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``decoder.Attend``."""
        rows, heads, width = query.shape
        keys, values = self.caches[layer_index]
        keys.index_copy_(0, self.out_slots, key)
        values.index_copy_(0, self.out_slots, value)
        keys, values = [cache[self.slots].transpose(1, 2) for cache in (keys, values)]
        folded = query.view(rows, key.shape[1], heads // key.shape[1], width)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask).reshape(
            rows, heads * width
        )


def compiled_step(point: Point, **options: Any) -> Callable[..., Tensor]:
    """The whole plain step, from ids to next ids, as one graph of ``torch.compile``.

    Its cache is a copy of the lab's, one tensor a layer: the compiler would not record a step that writes into views
    of one tensor.

    Args:
        point: the step; the prompts' keys and values are copied.
        **options: of ``torch.compile``.

    Raises:
        ToggleError: for a model with sliding windows, which this form has not.
    """
    kv: PagedKV = point.lab.engine.kv
    if kv.sliding is not None:
        raise ToggleError("the plain step of torch.compile has no sliding windows; take a model without them")
    model, pool = plain_model(point.lab.model), kv.full
    caches = [(keys.clone(), values.clone()) for keys, values in map(pool.tensors, pool.layers)]
    for tensor in (pool.page_table, *(each for both in caches for each in both)):
        mark_static_address(tensor)

    def step(
        input_ids: Tensor, positions: Tensor, out_slots: Tensor, request_rows: Tensor, seq_lens: Tensor
    ) -> Tensor:
        attend = GatheredAttention(pool, caches, request_rows, seq_lens, out_slots)
        return model.logits(model(input_ids, positions, attend)).argmax(-1)

    compiled: Callable[..., Tensor] = torch.compile(step, fullgraph=True, dynamic=False, **options)
    return compiled


@contextmanager
def compile_peer(point: Point) -> Iterator[Peer]:
    """``torch.compile(mode="reduce-overhead")`` of the plain modules.

    Raises:
        DeviceError: on a CPU, where that mode records no graph.
    """
    device = point.lab.device
    if device.type != "cuda":
        raise DeviceError("torch.compile(mode='reduce-overhead') records CUDA graphs; it needs a CUDA device")
    before = graphs_skipped()
    with getting_ready(device) as metrics, torch.no_grad():
        step = compiled_step(point, mode="reduce-overhead")
        for _ in range(READY_CALLS):
            step(**point.step.inputs).tolist()
    skipped = graphs_skipped() - before
    yield LocalPeer(
        device, lambda: step(**point.host_inputs()).tolist(), partial(step, **point.step.inputs),
        "torch.compile(mode='reduce-overhead', fullgraph=True) of the plain modules from ids to next ids, SDPA over "
        f"the gathered cache of {len(point.lab.engine.kv.context_positions)} tokens.{told_skipped(skipped)}",
        {**metrics, "graphs_skipped": float(skipped)},
    )  # fmt: skip


class PackageBreaks:
    """A stage for the lab's breaks that hands them to the package."""

    def __init__(self, no_graph: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.no_graph = no_graph

    def reach(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``graphs.breaks.Stage``."""
        return self.no_graph(body)(*args, **kwargs)


@contextmanager
def package_peer(point: Point) -> Iterator[Peer]:
    """The lab's step captured by ``breakable-cuda-graphs``, with the same breaks at attention as the lab's own.

    Raises:
        DeviceError: on a CPU.
        NotInstalledError: the package is not there.
    """
    lab, step = point.lab, point.step
    if lab.device.type != "cuda":
        raise DeviceError(f"{PACKAGE} records CUDA graphs; it needs a CUDA device")
    try:
        package = import_module(PACKAGE.replace("-", "_"))
    except ImportError as error:
        raise NotInstalledError(f"{PACKAGE} is not installed; pip install {PACKAGE}==0.1.0") from error
    static = {name: step.inputs[name].clone() for name in INPUTS}

    def forward() -> Tensor:
        rows = {name: static[name] for name in ("request_rows", "seq_lens", "out_slots")}
        attend: Any = DECODE_ATTENTION[lab.ops]
        attend = attend(lab.engine.kv, **rows)
        return lab.model.logits(lab.model(static["input_ids"], static["positions"], attend)).argmax(-1)

    graph = package.BreakableCUDAGraph()
    try:
        with getting_ready(lab.device) as metrics, torch.no_grad():
            stream = torch.cuda.Stream(lab.device)
            stream.wait_stream(torch.cuda.current_stream(lab.device))
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            torch.cuda.current_stream(lab.device).wait_stream(stream)
            with staged(PackageBreaks(package.no_graph)), package.breakable_graph(graph):
                output = forward()

        def token() -> list[int]:
            for name, value in point.host_inputs().items():
                static[name].copy_(value)
            graph.replay()
            chosen: list[int] = output.tolist()
            return chosen

        yield LocalPeer(
            lab.device, token, graph.replay,
            f"{PACKAGE} {metadata.version(PACKAGE)}: the lab's {lab.ops} operations, broken at attention as in the "
            "piecewise arm; without padding, buckets, address checks and a key table.",
            metrics,
        )  # fmt: skip
    finally:
        graph.reset()
