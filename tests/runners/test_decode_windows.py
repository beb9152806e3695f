"""The decode step of a model with sliding-window layers: captured against eager, over a pool that drops pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, InputError
from cglab.graphs.out_forms import same_bits
from cglab.runners.decode import INPUTS

backends = pytest.mark.parametrize("backend", ["full", "breakable"])


def check(one, lengths):
    """One captured step equals padded eager to the bit: tokens, logits, and both pools but for slot 0."""
    values, live, before = one.inputs(lengths), len(lengths), one.cache()
    got, after = one.runner.run(live, **values), one.cache()
    one.restore(before)
    wanted = one.runner.run_padded_eager(live, one.runner.captured.pad(live), **values)
    assert all(map(same_bits, got, wanted)), lengths
    for cache, expected in zip(after, one.kv.caches().values(), strict=True):
        assert same_bits(cache[:, 1:], expected[:, 1:]), f"cache after {lengths}"
    return got


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=15)
@given(steps=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=8), min_size=1, max_size=6))
def test_p15_batches_within_and_beyond_the_window_are_bitwise(windows, backend, dtype, steps):
    one = windows.made[0] if windows.made else windows(backend, dtype=dtype)
    one.runner.coverage().clear()
    for lengths in steps:
        check(one, lengths)
    assert one.runner.coverage().captured == len(steps) and one.runner.coverage().eager == 0


@backends
def test_b25_dropped_pages_and_all_else_outside_the_window_may_hold_nan(windows, backend):
    one = windows(backend)
    lengths = [16, 11, 5]
    values, before = one.inputs(lengths), one.cache()
    clean = one.runner.run(3, **values)
    one.restore(before)
    table = one.kv.sliding.page_table
    seen = [slot for row, length in enumerate(lengths, 1) for slot in one.window_slots_of(row, length - 1, 1)]
    hidden = torch.ones(one.kv.sliding.keys.shape[1], dtype=torch.bool)
    hidden[seen] = False
    assert not table[1, 0] and table[3, 0], "the longest request has dropped a page, the shortest none"
    for cache in (one.kv.sliding.keys, one.kv.sliding.values):
        cache[:, hidden.to(one.device)] = float("nan")
    poisoned = one.runner.run(3, **values)
    assert all(map(same_bits, clean, poisoned)) and not clean[1].isnan().any()
    assert one.runner.coverage().eager == 0
    for cache in (one.kv.sliding.keys, one.kv.sliding.values):
        cache[:, seen[0]] = float("nan")
    assert one.runner.run(3, **values)[1][0].isnan().all(), "the oldest position in a window is read"


@backends
def test_p11_b26_padded_requests_write_to_slot_0_of_both_pools_only(windows, backend):
    one = windows(backend)
    one.runner.run(8, **one.inputs([16, 15, 14, 13, 12, 11, 10, 9]))
    before, values = one.cache(), one.inputs([6, 5, 16])
    one.runner.run(3, **values)
    for i, (cache, saved) in enumerate(zip(one.cache(), before, strict=True)):
        changed = set((cache != saved).flatten(2).any(-1).any(0).nonzero().flatten().tolist())
        assert changed - {0} == set(values["out_slots" if i < 2 else "window_out_slots"].tolist())
    assert one.runner.captured.buffers.view(4)["window_out_slots"][3:].tolist() == [0]


@backends
def test_live_eager_agrees_within_drift_and_in_tokens(windows, backend):
    one = windows(backend)
    for lengths in ([16, 2, 9], [7]):
        values, before = one.inputs(lengths), one.cache()
        tokens, logits = one.runner.run(len(lengths), **values)
        one.restore(before)
        free_tokens, free_logits = one.runner.run_live_eager(len(lengths), **values)
        torch.testing.assert_close(logits, free_logits, rtol=1e-3, atol=1e-4)
        gap = free_logits.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
        assert ((tokens == free_tokens) | (gap < 1e-3)).all()


def test_only_a_model_with_windows_has_the_slot(world, windows):
    assert world().runner.inputs == INPUTS
    one = windows()
    assert set(one.runner.inputs) == set(one.runner.slots()) == {*INPUTS, "window_out_slots"}
    values = one.inputs([5])
    del values["window_out_slots"]
    with pytest.raises(InputError, match="window_out_slots"):
        one.runner.run(1, **values)


@pytest.mark.parametrize("name", ["keys", "values", "page_table"])
def test_b36_the_window_pool_is_under_the_address_contract(windows, name):
    one = windows()
    values = one.inputs([6, 5, 4])
    one.runner.run(3, **values)
    setattr(one.kv.sliding, name, getattr(one.kv.sliding, name).clone())
    with pytest.raises(AddressError, match=rf"moved: kv\.sliding\.{name}"):
        one.runner.run(3, **values)
