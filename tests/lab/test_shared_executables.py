"""Executables shared between buckets of equal topology: the policy, on a driver that is made up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import BucketError, CaptureError
from cglab.lab.shared_executables import SharedExecutables


class Driver:
    """Graphs are equal in topology if their addresses are, modulo 100; an update may also be refused one way."""

    def __init__(self, one_way=()):
        self.one_way, self.broken = set(one_way), False
        self.live, self.updates, self.launched = {}, 0, []

    def instantiate(self, graph):
        executable = object()
        self.live[executable] = graph
        return executable

    def update(self, executable, graph):
        self.updates += 1
        held = self.live[executable]
        if held % 100 != graph % 100 or (held, graph) in self.one_way or self.broken:
            return "TopologyChanged"
        self.live[executable] = graph
        return None

    def launch(self, executable):
        self.launched.append(self.live[executable])

    def destroy(self, executable):
        del self.live[executable]


def test_buckets_of_equal_topology_share_one_executable_and_a_switch_is_an_update():
    driver = Driver()
    shared = SharedExecutables({8: 801, 4: 401, 2: 202, 1: 101}, driver)
    assert [group.buckets for group in shared.groups] == [[8, 4, 1], [2]]
    assert len(driver.live) == 2 and shared.refused == {(2, 8): "TopologyChanged"}
    assert str(shared) == "2 executables for 4 buckets; 8, 4, 1; 2; refused: TopologyChanged"
    assert [shared.switch(bucket) for bucket in (8, 2, 8, 4, 4, 1, 2)] == [
        False, False, False, True, False, True, False,
    ]  # fmt: skip
    shared.close()
    assert driver.live == {}


def test_a_bucket_joins_only_where_the_way_back_is_open_too():
    driver = Driver(one_way={(401, 801)})
    with SharedExecutables({8: 801, 4: 401}, driver) as shared:
        assert [group.buckets for group in shared.groups] == [[8], [4]]
        shared.launch(8)
        shared.launch(4)
        assert driver.launched == [801, 401] and len(driver.live) == 2, "the first started anew"


def test_a_refusal_after_the_groups_were_made_is_an_error_and_is_tried_again():
    driver = Driver()
    with SharedExecutables({8: 801, 4: 401}, driver) as shared:
        driver.broken = True
        with pytest.raises(CaptureError, match="cannot be updated to bucket 4 any more: TopologyChanged"):
            shared.launch(4)
        assert driver.launched == []
        driver.broken = False
        shared.launch(8)
        shared.launch(4)
        assert driver.launched == [801, 401]


def test_a_bucket_that_was_not_recorded_is_refused_by_name():
    with (
        SharedExecutables({8: 801}, Driver()) as shared,
        pytest.raises(BucketError, match=r"bucket 3 .* \[8\]"),
    ):
        shared.launch(3)


def test_an_interrupted_grouping_leaves_no_executable_behind():
    driver = Driver()
    update = driver.update

    def fails_later(executable, graph):
        if graph == 101:
            raise CaptureError("cudaGraphExecUpdate failed: cudaErrorInvalidValue")
        return update(executable, graph)

    driver.update = fails_later
    with pytest.raises(CaptureError):
        SharedExecutables({8: 801, 2: 202, 1: 101}, driver)
    assert driver.live == {}


@given(st.dictionaries(st.integers(1, 99), st.integers(0, 3), min_size=1), st.lists(st.integers(0, 20)))
def test_every_launch_runs_its_own_bucket_on_as_few_executables_as_there_are_topologies(kinds, order):
    driver = Driver()
    graphs = {bucket: 100 * bucket + kind for bucket, kind in kinds.items()}
    with SharedExecutables(graphs, driver) as shared:
        assert len(driver.live) == len(set(kinds.values()))
        asked = [list(graphs)[place % len(graphs)] for place in order]
        for bucket in asked:
            shared.launch(bucket)
        assert driver.launched == [graphs[bucket] for bucket in asked]
        before = driver.updates
        shared.launch(asked[-1] if asked else next(iter(graphs)))
        assert driver.updates - before <= (not asked), "what it holds already needs no update"


@pytest.mark.gpu
def test_an_executable_of_one_graph_runs_another_of_equal_topology():
    from cglab.lab.shared_executables import CudaGraphDriver

    pytest.importorskip("cuda.bindings.runtime")
    x, out = torch.arange(4.0, device="cuda"), torch.zeros(2, 4, device="cuda")
    graphs = {}
    for bucket, row in enumerate(out, 1):
        graphs[bucket] = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graphs[bucket]):
            row.copy_(x * bucket)
    kept = {bucket: graph.raw_cuda_graph() for bucket, graph in graphs.items()}
    with SharedExecutables(kept, CudaGraphDriver()) as shared:
        assert [group.buckets for group in shared.groups] == [[1, 2]]
        for bucket in (2, 1, 2):
            out.fill_(-1)
            shared.launch(bucket)
            assert torch.equal(out[bucket - 1], x * bucket) and (out[2 - bucket] == -1).all()
        torch.cuda.synchronize()
