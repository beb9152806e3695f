"""Layers are found in the order of kernels, and not where there are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.lab.profiles import recorded_profile
from cglab.measure.layers import Layers, find_layers


def test_layers_are_numbered_between_what_comes_before_and_after():
    found = find_layers(["embed", *["norm", "qkv", "attend", "mlp"] * 3, "head"])
    assert found == Layers(1, 4, 3)
    assert [found.of(index) for index in (0, 1, 4, 5, 12, 13)] == [None, 1, 1, 2, 3, None]


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d"], ["a", "a", *"bcdefgh"]])
def test_what_does_not_repeat_has_no_layers(names):
    assert find_layers(names) is None


@given(
    layer=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8),
    count=st.integers(2, 12),
)
def test_whatever_repeats_is_covered_whole(layer, count):
    found = find_layers(["begin", *layer * count, "end"])
    assert found.start == 1 and found.period * found.count == len(layer) * count
    assert len(layer) % found.period == 0  # a layer that repeats within itself is several


def test_a_recorded_step_has_as_many_layers_as_its_model():
    trace = recorded_profile("decode").traces["full"]
    rows = trace.rows(trace.steps - 1)
    kernels = sorted((row["start_us"], row["name"]) for row in rows if row["lane"].startswith("stream"))
    assert find_layers([name for _, name in kernels]).count == 28  # qwen3-0.6b
