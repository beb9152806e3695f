"""Bucket rules and keys: pure functions, so every fact is stated as a number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import BucketError
from cglab.graphs.backends import BACKENDS
from cglab.graphs.buckets import (
    bucket_list,
    exact_sizes,
    padding_waste,
    sglang_decode,
    sglang_prefill,
    sglang_speculative,
    smallest_bucket,
    within_ceiling,
)
from cglab.graphs.keys import ShapeKey, require_key
from cglab.graphs.recorders import recorder_for

RULES = (sglang_decode, sglang_speculative, sglang_prefill, exact_sizes)


@pytest.mark.parametrize(
    ("rule", "maximum", "count"),
    [
        (sglang_decode, 256, 36),
        (sglang_decode, 512, 52),
        (sglang_speculative, 48, 23),
        (sglang_speculative, 80, 29),
        (sglang_speculative, 256, 51),
        (sglang_prefill, 2048, 42),
        (sglang_prefill, 4096, 50),
        (sglang_prefill, 8192, 58),
    ],
)
def test_sglang_bucket_counts_are_exact(rule, maximum, count):
    sizes = rule(maximum)
    assert len(sizes) == count
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == maximum


def test_sglang_lists_have_their_grid_steps():
    assert sglang_decode(512)[:7] == [1, 2, 4, 8, 12, 16, 24]
    assert sglang_decode(512)[-3:] == [480, 496, 512]
    assert sglang_decode(600)[-4:] == [512, 544, 576, 600]
    assert sglang_speculative(80)[-3:] == [64, 72, 80]
    assert sglang_prefill(700) == [
        4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288, 320, 352,
        384, 416, 448, 480, 512, 576, 640,
    ]  # fmt: skip


def test_p06_the_maximum_is_a_bucket_even_off_the_grid():
    assert 700 not in sglang_prefill(700)  # SGLang's own list: batches between 640 and 700 would run eager
    assert bucket_list(700, sglang_prefill)[-1] == 700
    assert smallest_bucket(650, bucket_list(700, sglang_prefill)) == 700


def test_b61_a_generated_list_reaches_the_configured_maximum():
    sizes = bucket_list(37)
    assert sizes[-1] == 37
    assert all(smallest_bucket(live, sizes) is not None for live in range(1, 38))


def test_b62_a_list_never_exceeds_the_capacity():
    assert bucket_list(4) == [1, 2, 4]
    with pytest.raises(BucketError, match="bucket 8 is above the maximum of 4.*raise the maximum"):
        bucket_list(4, explicit=[2, 8])


@given(st.sampled_from(RULES), st.integers(1, 700), st.sampled_from([1, 2, 4, 8]))
def test_p05_aligned_lists_hold_the_largest_aligned_batch(rule, maximum, alignment):
    top = maximum - maximum % alignment
    if top == 0:
        with pytest.raises(BucketError, match="multiple"):
            bucket_list(maximum, rule, alignment=alignment)
        return
    sizes = bucket_list(maximum, rule, alignment=alignment)
    assert sizes[-1] == top
    assert sizes == sorted(set(sizes))
    assert all(size % alignment == 0 and 1 <= size <= maximum for size in sizes)
    # What was a bucket of the plain list is still served without more than the alignment's waste.
    assert all(smallest_bucket(size, sizes) - size < alignment for size in rule(top))


@given(st.lists(st.integers(1, 100), min_size=1, unique=True), st.integers(1, 120))
def test_p03_above_the_largest_bucket_there_is_none(sizes, live):
    buckets = bucket_list(100, explicit=sizes)
    bucket = smallest_bucket(live, buckets)
    if live > max(sizes):
        assert bucket is None
    else:
        assert bucket == min(size for size in sizes if size >= live)


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ([], "empty"),
        ([0], "whole numbers from 1"),
        ([True], "whole numbers from 1"),
        ([2.0], "whole numbers from 1"),
        (["2"], "whole numbers from 1"),
        ([2, 2], "given twice"),
        ([3], "not a multiple of 2"),
    ],
)
def test_an_explicit_list_is_exact_or_refused(explicit, message):
    assert bucket_list(8, explicit=[6, 2], alignment=2) == [2, 6]
    with pytest.raises(BucketError, match=message):
        bucket_list(8, explicit=explicit, alignment=2)


@pytest.mark.parametrize("buckets", [[], [0], [2.5], ["2"], [2, 2], [1, "x"]])
def test_capture_refuses_a_bad_bucket_list_before_anything_runs(buckets):
    import cglab

    with pytest.raises(BucketError):
        cglab.capture(lambda x: x, slots={"x": cglab.Slot()}, buckets=buckets)


def test_p07_b67_the_waste_ceiling_is_twice_and_inclusive():
    assert within_ceiling(32, 64, 2.0)
    assert not within_ceiling(31, 64, 2.0)
    assert within_ceiling(1, 4096, None)
    buckets = [2816, 3072, 8192]
    assert smallest_bucket(2700, buckets) == 2816 and within_ceiling(2700, 2816, 2.0)
    assert smallest_bucket(3208, buckets) == 8192 and not within_ceiling(3208, 8192, 2.0)
    assert padding_waste(3208, 8192) == pytest.approx(1.5536, abs=1e-4)


def test_p02_keys_are_equal_only_when_every_field_is():
    assert ShapeKey(4) == ShapeKey(4) and hash(ShapeKey(4)) == hash(ShapeKey(4))
    assert ShapeKey(4) != ShapeKey(4, "chunked_prefix:2")
    assert ShapeKey(4, "a") != ShapeKey(4, "b")
    assert len({ShapeKey(4), ShapeKey(4, "a"), ShapeKey(8), ShapeKey(4)}) == 3
    assert str(ShapeKey(4, "lora")) == "4/lora"


@pytest.mark.parametrize("size", [0, -1, 1.0, "1", True, None])
def test_a_key_needs_a_positive_whole_size(size):
    with pytest.raises(BucketError, match="at least 1"):
        ShapeKey(size)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_p01_b59_a_raw_size_is_refused_by_every_look_up(name):
    assert ShapeKey(4) != 4
    recorder = recorder_for("cpu")
    backend = BACKENDS[name](recorder, recorder.new_pool())
    for look_up in (require_key, backend.can_run, backend.replay, backend.artifact):
        with pytest.raises(BucketError, match=r"write ShapeKey\(4\)"):
            look_up(4)
