"""Drift that is rounding, and drift that is not."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.measure.drift import HEADROOM, Drift, difference


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_the_verdict_does_not_depend_on_scale(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, 16, generator=generator) * scale
    noise = torch.randn(8, 16, generator=generator) * 1e-5 * scale
    drift = Drift()
    drift.allow("logits", rows + noise, rows)
    drift.judge("logits", rows + noise * HEADROOM * 0.9, rows, {})
    assert not drift.beyond()
    drift.judge("logits", rows + noise * HEADROOM * 1.2, rows, {"case": 1})
    (told,) = drift.beyond()
    assert told.where == {"case": 1} and told.drift > told.bound and "logits drift by" in str(told)


def test_a_row_far_out_is_allowed_where_correct_ways_part_as_far_on_it_whatever_the_order():
    """A bound from other rows, or from the rows before it, would fail it."""
    drift, rows = Drift(), torch.ones(1, 4)
    drift.allow("logits", rows + 1e-6, rows)
    drift.judge("logits", rows + 1e-4, rows, {"case": 0})
    assert drift.beyond()
    drift.allow("logits", rows + 5e-5, rows)
    assert not drift.beyond()


def test_quantities_are_judged_apart():
    drift, rows = Drift(), torch.ones(1, 4)
    drift.allow("logits", rows + 1e-2, rows)
    drift.allow("kv", rows + 1e-6, rows)
    drift.judge("kv", rows + 1e-3, rows, {})
    assert [each.name for each in drift.beyond()] == ["kv"]
    assert drift.worst["kv"] == pytest.approx(1e-3, rel=1e-2)


def test_without_anything_allowed_only_bitwise_passes():
    drift = Drift()
    drift.judge("kv", torch.ones(2), torch.ones(2), {})
    assert not drift.beyond() and drift.bound("kv") == 0.0
    drift.judge("kv", torch.ones(2), torch.ones(2).nextafter(torch.tensor(2.0)), {})
    assert drift.beyond()


def test_nan_is_never_rounding():
    drift, rows = Drift(), torch.ones(3)
    drift.allow("logits", rows + 1, rows)
    drift.judge("logits", torch.tensor([1.0, math.nan, 1.0]), rows, {})
    assert [each.drift for each in drift.beyond()] == [math.inf]
    for odd in (math.nan, math.inf):
        for one, other in permutations((torch.tensor([1.0, odd]), torch.ones(2))):
            with pytest.raises(InputError, match="finite"):
                drift.allow("logits", one, other)
        with pytest.raises(InputError, match="finite"):
            drift.allow("logits", torch.tensor([odd]), torch.tensor([odd]))
    with pytest.raises(InputError, match="finite"):
        drift.allow("logits", torch.ones(0), torch.ones(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_that_single_precision_cannot_tell_apart_are_apart(dtype):
    assert difference(torch.tensor([2**24 + 1], dtype=dtype), torch.tensor([2**24], dtype=dtype)) == 1.0
