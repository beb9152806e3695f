"""Whether compiled kernels were on disk: counted in a block, told in a word."""

import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from cglab.measure.kernel_cache import KernelCacheWatch


@pytest.fixture
def compilers(monkeypatch):
    """Inductor's counters and Triton's listener, as far as the watch asks for them."""
    counters = defaultdict(Counter)
    counters["inductor"].update(fxgraph_cache_hit=5, fxgraph_cache_miss=7)
    compilation = SimpleNamespace(listener=None)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    monkeypatch.setitem(
        sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=compilation))
    )
    return counters, compilation


@pytest.mark.parametrize(
    ("graphs", "kernels", "hits", "misses", "state"),
    [
        ({}, [], 0, 0, "nothing compiled"),
        ({"fxgraph_cache_hit": 2}, [True], 3, 0, "warm"),
        ({"fxgraph_cache_miss": 2}, [False], 0, 3, "cold"),
        ({"fxgraph_cache_hit": 1}, [False], 1, 1, "partly warm"),
    ],
)
def test_hits_and_misses_of_the_block_alone_are_counted(compilers, graphs, kernels, hits, misses, state):
    counters, compilation = compilers
    with KernelCacheWatch() as watch:
        counters["inductor"].update(graphs)
        for hit in kernels:
            compilation.listener(src=None, metadata={}, times=None, cache_hit=hit)
    counters["inductor"].update(fxgraph_cache_miss=9)
    assert (watch.hits, watch.misses, watch.state) == (hits, misses, state)
    assert compilation.listener is None, "as it was"
    with watch:
        counters["inductor"].update(fxgraph_cache_hit=1)
    assert (watch.hits, watch.misses) == (hits + 1, misses), "a second block adds to the first"


def test_a_listener_that_was_there_goes_on_listening(compilers):
    _, compilation = compilers
    heard = []
    compilation.listener = theirs = lambda **facts: heard.append(facts)
    with KernelCacheWatch():
        compilation.listener(src="kernel", cache_hit=True)
    assert heard == [{"src": "kernel", "cache_hit": True}] and compilation.listener is theirs


def test_without_compilers_nothing_is_compiled(monkeypatch):
    for name in ("triton", "torch._dynamo.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with KernelCacheWatch() as watch:
        pass
    assert watch.state == "nothing compiled"
