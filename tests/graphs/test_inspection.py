"""What inspect tells of a recording: lines, nodes with edges, and how two recordings differ."""

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cglab
from cglab.errors import BucketError, InputError
from cglab.graphs.cuda_nodes import nodes_of_graph
from cglab.graphs.recorded_graph import recorded_graph

X = {"x": cglab.Slot(pad=0.0)}


@cglab.eager_break
def halve(x, out):
    out.copy_(x / 2)


def two_parts(x):
    doubled = x * 2
    out = torch.empty_like(doubled)
    halve(doubled, out)
    return out.exp().sum(-1)


def captured_of(function, device, backend="full", sizes=(2, 4), **options):
    captured = cglab.capture(function, slots=X, buckets=sizes, backend=backend, strict=True, **options)
    captured(x=torch.ones(sizes[-1], 3, device=device))
    return captured


def test_lines_are_what_they_were_a_list_in_order_of_replay():
    with captured_of(two_parts, "cpu", "breakable") as captured:
        graph = captured.inspect(4)
        assert graph == ["aten::mul", "break halve", "aten::exp", "aten::sum", "aten::copy_"]
        assert graph[1:3] == ["break halve", "aten::exp"] and graph[-1] == "aten::copy_" and len(graph) == 5
        assert Counter(graph)["aten::exp"] == 1 and repr(graph) == repr(list(graph))
        assert graph != captured.inspect(2) and graph != ["aten::mul"]


def test_nothing_was_recorded_before_the_first_call_and_another_size_names_the_good_ones():
    captured = cglab.capture(two_parts, slots=X, buckets=(2,), backend="breakable")
    assert captured.inspect(2) == [] and captured.inspect(2).as_frame().empty
    captured(x=torch.ones(2, 3))
    with pytest.raises(BucketError, match=r"no recording of size 3; it has \[2\]"):
        captured.inspect(3)
    captured.close()


def test_the_table_says_kind_shape_bytes_segment_and_break_of_every_node():
    with captured_of(two_parts, "cpu", "breakable") as captured:
        frame = captured.inspect(4).as_frame()
    assert frame["kind"].tolist() == ["operation", "break", "operation", "operation", "copy"]
    assert frame["shape"].tolist()[2:] == [(4, 3), (4,), (4,)] and frame["dtype"][0] == "float32"
    assert frame["bytes"].tolist()[2:] == [48, 16, 16] and frame["bytes"].isna()[1]
    assert frame["segment"].dropna().tolist() == [0, 1, 1, 1] and frame["break"][1] == "halve"
    assert frame["after"].tolist() == [(), (0,), (1,), (2,), (3,)] and frame["depth"].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_break_before_anything_was_recorded_still_orders_what_follows():
    """Segments between two breaks may be empty; the second break waits for the first."""

    def step(x):
        halve(x, x)
        halve(x, x)
        return x + 1

    with captured_of(step, "cpu", "breakable") as captured:
        nodes = captured.inspect(4).nodes
    assert [node.kind for node in nodes[:3]] == ["break", "break", "operation"]
    assert [node.after for node in nodes[:3]] == [(), (0,), (1,)]


@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10),
    keep=st.booleans(),
)
def test_edges_lead_to_the_results_that_an_operation_reads_even_where_the_pool_gave_memory_twice(pairs, keep):
    reads = [{place % (index + 1) for place in pair} for index, pair in enumerate(pairs)]
    last_use = {place: index for index, places in enumerate(reads) for place in places}

    def step(x):
        made = {0: x}  # value 0 is the input, value n + 1 the result of operation n
        for index, places in enumerate(reads):
            one, *other = sorted(places)
            made[index + 1] = made[one] + (made[other[0]] if other else made[one])
            for place in [] if keep else [p for p in made if last_use.get(p, len(reads)) <= index]:
                del made[place]
        return made[len(reads)]

    with captured_of(step, "cpu", sizes=(2,), self_check=False) as captured:
        nodes = captured.inspect(2).nodes
    assert [node.after for node in nodes[:-1]] == [
        tuple(sorted(place - 1 for place in places if place)) for places in reads
    ]


def test_two_buckets_differ_in_shapes_alone():
    with captured_of(two_parts, "cpu", "breakable") as captured:
        small, large = captured.inspect(2), captured.inspect(4)
    found = small.diff(large)
    assert not found.same and not found.added and not found.removed and found.alike == 1  # the break
    assert "shape (2, 3) -> (4, 3), bytes 24 -> 48" in found.as_frame()["facts"].tolist()
    assert str(found).startswith(
        "two_parts breakable, bucket 2 against two_parts breakable, bucket 4: 0 added"
    )


def test_two_arms_differ_by_the_break_and_by_what_is_recorded_in_its_place():
    with (
        captured_of(two_parts, "cpu", "breakable") as breakable,
        captured_of(two_parts, "cpu", inline_breaks=True) as full,
    ):
        base, other = full.inspect(4), breakable.inspect(4)
    found, back = base.diff(other), other.diff(base)
    assert [node.name for node in found.added] == ["halve"]
    assert [node.name for node in found.removed] == ["aten::div", "aten::copy_"]
    assert back.removed == found.added and back.added == found.removed and back.alike == found.alike
    assert base.diff(base).same and base.diff(base).alike == len(base.nodes)
    assert found.as_frame()["change"].tolist() == ["removed", "removed", "added"]


@pytest.mark.parametrize("other", [None, ["aten::mul"], 2])
def test_a_recording_is_compared_with_a_recording_only(other):
    with captured_of(two_parts, "cpu", "breakable") as captured, pytest.raises(InputError, match="inspect"):
        captured.inspect(2).diff(other)


def test_every_recorder_tells_its_nodes_and_their_order(device):
    with captured_of(two_parts, device, "breakable") as captured:
        graph = captured.inspect(4)
    frame = graph.as_frame()
    assert frame["break"].dropna().tolist() == ["halve"]
    place = frame.index[frame["kind"] == "break"][0]
    assert set(frame["depth"][:place]) < set(range(place + 1)) and (frame["depth"][place + 1 :] > place).all()
    assert frame["segment"].dropna().unique().tolist() == [0, 1]


@pytest.mark.gpu
def test_the_driver_tells_kernels_grids_and_edges_of_a_raw_graph(cuda):
    pytest.importorskip("cuda.bindings.driver")
    with captured_of(two_parts, cuda, inline_breaks=True) as captured:
        graph = captured.inspect(4)
    kernels = [node for node in graph.nodes if node.kind == "kernel"]
    assert f"graph of {len(graph.nodes)} nodes" == graph[0] and len(kernels) >= 4
    assert any("elementwise" in node.name for node in kernels) and not any(
        "_Z" in node.name for node in kernels
    )
    assert all(min(node.grid) >= 1 and min(node.block) >= 1 for node in kernels)
    assert sum(len(node.after) for node in graph.nodes) == len(graph.nodes) - 1, "one stream is one chain"


class Handle(int):
    pass


class FakeDriver(ModuleType):
    """A graph of a kernel, a copy after it and a kind of node that nobody knew, as the bindings tell it."""

    kinds = ("KERNEL", "MEMCPY", "BATCH_MEM_OP")

    def cuGraphGetNodes(self, graph, room):
        return 0, [Handle(100 + place) for place in range(room)] or None, 3

    def cuGraphGetEdges(self, graph, room):
        return 0, [Handle(100), Handle(101)][:room], [Handle(101), Handle(102)][:room], None, 2

    def cuGraphNodeGetType(self, node):
        return 0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{self.kinds[node - 100]}")

    def cuGraphKernelNodeGetParams(self, node):
        sizes = {
            f"{what}Dim{axis}": size
            for what in ("grid", "block")
            for axis, size in zip("XYZ", (7, 2, 1), strict=True)
        }
        return 0, SimpleNamespace(func=0, kern=5, **sizes)

    def cuKernelGetName(self, kernel):
        return 0, b"_Z6scaledPf"

    def cuGraphMemcpyNodeGetParams(self, node):
        return 0, SimpleNamespace(WidthInBytes=64, Height=2, Depth=1)


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver("driver")
    package = SimpleNamespace(driver=made)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=package))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return made


def test_the_drivers_nodes_have_names_grids_bytes_and_edges(driver):
    kernel, copy, other = nodes_of_graph(1)
    assert (kernel.kind, kernel.name, kernel.grid, kernel.after) == (
        "kernel",
        "scaled(float*)",
        (7, 2, 1),
        (),
    )
    assert (copy.kind, copy.bytes, copy.after) == ("copy", 128, (0,))
    assert (other.kind, other.bytes, other.after) == ("batch_mem_op", None, (1,))


@pytest.mark.parametrize(
    "call", ["cuGraphGetNodes", "cuGraphGetEdges", "cuGraphKernelNodeGetParams", "cuKernelGetName"]
)
def test_what_the_driver_refuses_to_tell_is_left_out_and_not_guessed(driver, monkeypatch, call):
    monkeypatch.setattr(FakeDriver, call, lambda *_: (1, None))
    nodes = nodes_of_graph(1)
    if call == "cuGraphGetNodes":
        assert nodes is None
    elif call == "cuGraphGetEdges":
        assert [node.after for node in nodes] == [(), (), ()]
    else:
        assert nodes[0].name == "a kernel that the driver does not name" and nodes[1].after == (0,)


def test_without_the_drivers_bindings_a_segment_is_one_node(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert nodes_of_graph(1) is None


def test_segments_of_one_node_are_put_together_with_breaks():
    class Whole:
        nodes = None

        def graph(self):
            return [cglab.graphs.graph_nodes.GraphNode(0, "graph", "graph of ? nodes")]

        def operations(self):
            return ["graph of ? nodes"]

    graph = recorded_graph("step", [Whole(), Whole()])
    assert graph == ["graph of ? nodes"] * 2 and [node.after for node in graph.nodes] == [(), (0,)]
