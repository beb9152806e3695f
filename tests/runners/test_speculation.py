"""T2 to T4, verify, the draft loop and the seed step: captured against eager, and what padding must never touch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.graphs.out_forms import same_bits
from cglab.runners.base import GraphGroup

from .conftest import PrefillWorld, Speculative, World

phases = pytest.mark.parametrize("phase", ["verify", "seed", "loop", "fused"])
backends = pytest.mark.parametrize("backend", ["full", "breakable"])
branches = pytest.mark.parametrize("topk", [1, 3])
kinds = pytest.mark.parametrize("windows", [False, True], ids=["full-attention", "windows"])
TAILS = {"seq_lens": {"verify": (4, 7), "seed": (1, 1), "loop": (1, 1), "fused": (1, 1)}}
"""What padded rows hold, by phase and for one branch or three, where that is not 0."""


def committed_of(live):
    return [1 + (3 * live + 2 * i) % 9 for i in range(live)]


def check(one, committed, seed=0):
    """One captured step equals padded eager to the bit: outputs, and the caches but for slot 0."""
    got, wanted, after, expected = one.both(one.inputs(committed, seed), len(committed))
    assert all(map(same_bits, got, wanted)), committed
    assert all(same_bits(a[:, 1:], b[:, 1:]) for a, b in zip(after, expected, strict=True)), committed
    return got


@phases
@backends
@branches
@kinds
def test_every_live_size_of_every_bucket_is_bitwise(shared, phase, backend, topk, windows):
    one = shared(phase, backend, topk=topk, windows=windows)
    for live in (8, 1, 7, 2, 6, 3, 5, 4):
        check(one, committed_of(live), live)
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0


@phases
@backends
@branches
def test_every_live_size_is_bitwise_in_bfloat16(shared, phase, backend, topk):
    one = shared(phase, backend, topk=topk, windows=topk > 1, dtype=torch.bfloat16)
    for live in (8, 1, 7, 2, 6, 3, 5, 4):
        check(one, committed_of(live), live)
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0


@phases
@backends
@settings(max_examples=8)
@given(
    steps=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=5),
    topk=st.sampled_from([1, 3]),
    windows=st.booleans(),
)
def test_p15_batches_that_grow_and_shrink_are_bitwise(shared, phase, backend, steps, topk, windows):
    one = shared(phase, backend, topk=topk, windows=windows)
    for seed, committed in enumerate(steps):
        check(one, committed, seed)
    assert one.runner.coverage().captured == len(steps) and one.runner.coverage().eager == 0


@phases
@branches
def test_b59_p01_exact_sizes_replay_with_padding_off(speculative, phase, topk):
    one = speculative(phase, "full", (1, 2, 4), topk=topk, padding=False)
    for live in (1, 2, 4):
        check(one, committed_of(live))
    one.runner.run(3, **one.inputs([5, 5, 5]))
    assert one.runner.coverage().captured == 3 and one.runner.coverage().reasons == {"SIZE_NOT_CAPTURED": 1}


@phases
@branches
def test_p03_b66_a_batch_above_the_largest_bucket_runs_eager_and_right(speculative, phase, topk):
    one = speculative(phase, "full", (1, 2), topk=topk)
    values, before = one.inputs([4, 5, 6]), one.cache()
    got = one.runner.run(3, **values)
    one.restore(before)
    assert all(map(same_bits, got, one.runner.run_live_eager(3, **values)))
    assert one.runner.coverage().reasons == {"ABOVE_LARGEST": 1}


@phases
@backends
@branches
def test_p09_the_bucket_is_that_of_the_requests_whatever_each_brings(shared, phase, backend, topk):
    one = shared(phase, backend, topk=topk)
    one.runner.run(3, **one.inputs([4, 5, 6]))
    (key,) = one.runner.coverage().hits
    assert key.split("/")[0] == "4" and one.runner.coverage().live_rows[key] == 3


@phases
@backends
@branches
@kinds
def test_live_eager_agrees_within_drift_and_in_tokens(shared, phase, backend, topk, windows):
    one = shared(phase, backend, topk=topk, windows=windows)
    for live in (8, 3, 1):
        values, before = one.inputs(committed_of(live), live), one.cache()
        got = one.runner.run(live, **values)
        one.restore(before)
        for ours, free in zip(got, one.runner.run_live_eager(live, **values), strict=True):
            torch.testing.assert_close(ours, free, rtol=1e-3, atol=1e-4)


@phases
@backends
@branches
def test_p11_p12_p13_p14_b26_a_padded_step_resets_every_tail_and_touches_its_own_slots(
    shared, phase, backend, topk
):
    """After a batch of eight at large lengths, a batch of three; a frozen step stores nothing at all."""
    one = shared(phase, backend, topk=topk)
    one.runner.run(8, **one.inputs([9, 8, 7, 9, 8, 7, 9, 8]))
    before, values = one.cache(), one.inputs([6, 5, 4])
    one.runner.run(3, **values)
    changed = set((one.cache() != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist())
    stored = values["out_slots"].tolist() if phase == "verify" else []
    assert changed - {0} == set(stored)
    assert phase == "verify" or not changed
    filled = TAILS["seq_lens"][phase][topk > 1]
    for name, view in one.runner.captured.buffers.view(4).items():
        tail = view[len(view) // 4 * 3 :]
        assert (tail == (filled if name == "seq_lens" else 0)).all() and len(tail), name


@phases
@backends
@branches
@kinds
def test_p12_p41_b25_only_what_live_requests_have_in_the_cache_is_read(shared, phase, backend, topk, windows):
    """NaN wherever else: other rows, pages dropped, slot 0, and for a draft the very next position (P41)."""
    one = shared(phase, backend, topk=topk, windows=windows)
    committed = [9, 5, 1]
    values = one.inputs(committed)
    clean = one.runner.run(3, **values)
    for pool, slots in zip(one.kv.pools, one.reads(committed), strict=True):
        one.poison(pool, set(range(pool.keys.shape[1])) - set(slots))
    poisoned = one.runner.run(3, **values)
    assert all(map(same_bits, clean, poisoned)) and one.runner.coverage().eager == 0
    assert not any(leaf.isnan().any() for leaf in poisoned if leaf.is_floating_point())


@backends
@kinds
def test_p41_a_draft_sees_the_last_token_in_the_cache(shared, backend, windows):
    one = shared("seed", backend, windows=windows)
    values = one.inputs([9, 5])
    for pool, slots in zip(one.kv.pools, one.reads([9]), strict=True):
        one.poison(pool, slots[-1:])
    p, _, hidden = one.runner.run(2, **values)
    assert p[0].isnan().all() and hidden[0].isnan().all() and not hidden[1].isnan().any()


@phases
@backends
@branches
def test_b78_b32_rows_of_padding_are_never_handed_out(shared, phase, backend, topk):
    one = shared(phase, backend, topk=topk)
    widths = {"verify": (one.runner.width,) * 3}.get(phase, (1, 1, 1))
    for live in (1, 3, 5):
        output = one.runner.run(live, **one.inputs(committed_of(live)))
        assert tuple(len(leaf) for leaf in output) == tuple(live * width for width in widths)


@phases
@backends
@branches
def test_p43_a_step_does_not_write_what_it_was_given(shared, phase, backend, topk):
    one = shared(phase, backend, topk=topk)
    values = one.inputs([6, 5, 4])
    given = {name: value.clone() for name, value in values.items()}
    first = one.runner.run(3, **values)
    views = one.runner.captured.buffers.view(4)
    loaded = {name: view.clone() for name, view in views.items()}
    again = one.runner.run(3, **values)
    one.runner.run_live_eager(3, **values)
    assert all(same_bits(values[name], given[name]) for name in given)
    assert all(same_bits(views[name], loaded[name]) for name in loaded)
    assert all(map(same_bits, first, again))


@phases
@backends
def test_b47_one_token_in_the_cache_is_enough(shared, phase, backend):
    check(shared(phase, backend, topk=3), [1, 1])


@phases
@backends
def test_p19_p28_a_recapture_while_requests_are_live_changes_nothing_of_theirs(speculative, phase, backend):
    one = speculative(phase, backend, (1, 4), topk=3)
    values = one.inputs([6, 5, 4])
    before = one.cache()
    first, noise = one.runner.run(3, **values), torch.randn_like(before)
    one.restore(noise)
    one.runner.capture()
    assert same_bits(one.cache()[:, :, 1:], noise[:, :, 1:])
    one.restore(before)
    assert all(map(same_bits, first, one.runner.run(3, **values)))


@phases
def test_p29_largest_first_and_smaller_buckets_take_no_memory(shared, phase):
    ledger = shared(phase, "full", topk=3).runner.captured.memory()
    assert [line["bucket"].split("/")[0] for line in ledger] == ["8", "4", "2", "1"]
    assert all(line["pool_bytes"] == 0 for line in ledger[1:])


@phases
@branches
def test_a_breakable_recording_breaks_once_for_every_attention(shared, phase, topk):
    one = shared(phase, "breakable", topk=topk)
    forwards = {"verify": 1, "seed": 1, "loop": one.steps - 1, "fused": one.steps}[phase]
    assert {line["breaks"] for line in one.runner.captured.memory()} == {2 * forwards}
    assert {line["breaks"] for line in shared(phase, "full", topk=topk).runner.captured.memory()} == {0}


def test_p02_the_fused_form_is_part_of_the_key(shared):
    labels = {
        phase: [line["bucket"] for line in shared(phase, "full").runner.captured.memory()]
        for phase in ("loop", "fused")
    }
    assert labels == {"loop": ["8", "4", "2", "1"], "fused": ["8/fused", "4/fused", "2/fused", "1/fused"]}


@backends
def test_b40_p18_all_phases_of_one_group_interleave_over_a_poisoned_pool(device, speculative, backend):
    group = GraphGroup(device)
    drafting = [
        speculative(phase, backend, (2, 4), topk=topk, group=group, seed=topk)
        for phase in ("verify", "seed", "loop", "fused")
        for topk in (1, 3)
    ]
    decode, prefill = (kind(device, backend, (2, 4), group=group) for kind in (World, PrefillWorld))
    for one in (decode, prefill):
        one.runner.capture()
    generator = torch.Generator().manual_seed(5)
    try:
        for turn in torch.randperm(30, generator=generator).tolist():
            noise = group.pool.borrow((100_000,), torch.float32).fill_(float("nan"))
            del noise
            one, live = [*drafting, decode, prefill][turn % 10], 1 + turn % 4
            if one is prefill:
                got, wanted, _, _ = one.both([(1, 2, live)])
                assert same_bits(got, wanted)
            elif one is decode:
                got, wanted, _, _ = Speculative.both(one, one.inputs([5] * live), live)
                assert all(map(same_bits, got, wanted))
            else:
                check(one, committed_of(live), turn)
        assert all(one.runner.coverage().eager == 0 for one in [*drafting, decode, prefill])
    finally:
        for one in (decode, prefill):
            one.runner.close()
