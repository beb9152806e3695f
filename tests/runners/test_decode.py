"""T1, the decode step: captured against eager, and what padding must never touch."""

import importlib
import inspect
import pkgutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cglab.runners
from cglab.errors import AddressError, InputError, SlotError
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.out_forms import same_bits
from cglab.models.attention import DecodeAttention, LiveRows
from cglab.runners.base import GraphGroup, Runner
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.decode import INPUTS, DecodeRunner
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.pipeline_stage import PipelineStageRunner
from cglab.runners.prefill import PrefillRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner

from .conftest import CONFIG, World

TESTED = {
    "decode": DecodeRunner, "prefill": PrefillRunner, "pp_prefill": PipelineStageRunner,
    "seed_step": SeedRunner, "draft_loop": DraftLoopRunner, "verify": VerifyRunner, "block_draft": BlockDraftRunner,
    "draft_extend": DraftExtendRunner,
}  # fmt: skip
"""Techniques that have a suite, here or in a file of their own; the completeness test keeps it whole."""

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
paddings = pytest.mark.parametrize("padding", [True, False], ids=["padded", "exact"])


def test_every_technique_of_the_runners_is_tested_here():
    found = {}
    for module in pkgutil.iter_modules(cglab.runners.__path__):
        for _, kind in inspect.getmembers(
            importlib.import_module(f"cglab.runners.{module.name}"), inspect.isclass
        ):
            if issubclass(kind, Runner) and not inspect.isabstract(kind):
                found[kind.technique] = kind
    assert found == TESTED, "a new runner belongs into TESTED and into the parity suite"


class ShortWorld(World):
    """Its positions end in the middle of the cache's last page."""

    config = replace(CONFIG, max_position=13)


def test_the_self_check_draws_what_the_model_has_and_the_same_in_any_order_of_the_inputs():
    one = ShortWorld(torch.device("cpu"), buckets=(8,))
    try:
        views = one.runner.captured.buffers.view(8)
        for seed in range(40):
            one.runner.vary(views, torch.Generator().manual_seed(seed))
            drawn = {name: view.clone() for name, view in views.items()}
            assert int(drawn["positions"].max()) < 13 and int(drawn["seq_lens"].max()) <= 13
            one.runner.vary(dict(reversed(views.items())), torch.Generator().manual_seed(seed))
            assert all(torch.equal(view, drawn[name]) for name, view in views.items())
    finally:
        one.close()


@pytest.mark.parametrize("technique", TESTED)
def test_a_runner_adds_to_the_base_and_repeats_nothing_of_it(technique):
    own = set(vars(TESTED[technique])) - {"__doc__", "__module__", "__annotations__"}
    assert own >= {"technique", "step"} and own & {"slots", "declare"}
    assert not own & {"run", "capture", "run_padded_eager", "run_live_eager", "coverage", "close"}


def step_and_oracle(world, lengths):
    """One captured step and the padded eager one from the same state: outputs and caches."""
    runner, values, live = world.runner, world.inputs(lengths), len(lengths)
    before = world.cache()
    tokens, logits = runner.run(live, **values)
    after = world.cache()
    world.restore(before)
    bucket = runner.captured.pad(live)
    if isinstance(bucket, Miss):
        expected = runner.run_live_eager(live, **values)
    else:
        expected = runner.run_padded_eager(live, bucket, **values)
    assert same_bits(tokens, expected[0]) and same_bits(logits, expected[1]), f"{lengths} in {bucket}"
    wanted = world.cache()
    assert same_bits(after[:, :, 1:], wanted[:, :, 1:]), f"cache after {lengths} in {bucket}"
    return tokens, logits, before, after


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_live_size_of_every_bucket_is_bitwise(world, backend, dtype):
    one = world(backend, dtype=dtype)
    for live in (8, 1, 7, 2, 6, 3, 5, 4):
        step_and_oracle(one, [3 + live + i % 4 for i in range(live)])
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0


@backends
@paddings
@settings(max_examples=20)
@given(steps=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=8), min_size=1, max_size=8))
def test_p15_batches_that_grow_and_shrink_are_bitwise(world, backend, padding, steps):
    one = world.made[0] if world.made else world(backend, padding=padding)
    one.runner.coverage().clear()
    for lengths in steps:
        step_and_oracle(one, lengths)
    hits = sum(padding or len(lengths) in (1, 2, 4, 8) for lengths in steps)
    assert one.runner.coverage().captured == hits and one.runner.coverage().steps == len(steps)


@backends
def test_live_eager_agrees_within_drift_and_in_tokens(world, backend):
    one = world(backend)
    for live in (8, 3, 5, 1):
        values = one.inputs([5 + i for i in range(live)])
        before = one.cache()
        tokens, logits = one.runner.run(live, **values)
        one.restore(before)
        free_tokens, free_logits = one.runner.run_live_eager(live, **values)
        torch.testing.assert_close(logits, free_logits, rtol=1e-3, atol=1e-4)
        gap = free_logits.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
        assert ((tokens == free_tokens) | (gap < 1e-3)).all()


@backends
def test_p11_p12_p13_p14_b26_a_padded_step_touches_its_own_slots_and_slot_zero_only(world, backend):
    """After a batch of eight at large positions, a batch of three: five stale tails, each of which would corrupt."""
    one = world(backend)
    one.runner.run(8, **one.inputs([16, 15, 14, 13, 12, 11, 10, 9]))
    before = one.cache()
    values = one.inputs([6, 5, 4])
    one.runner.run(3, **values)
    changed = (one.cache() != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert set(changed) - {0} == set(values["out_slots"].tolist())
    tail = {name: view[3:].tolist() for name, view in one.runner.captured.buffers.view(4).items()}
    assert tail == {
        "input_ids": [0],
        "positions": [0],
        "out_slots": [0],
        "request_rows": [0],
        "seq_lens": [1],
    }


@backends
def test_p12_padded_requests_read_the_reserved_row(world, backend):
    """Poison everything that the three live requests do not own: their logits must not move by a bit."""
    one = world(backend)
    one.runner.run(8, **one.inputs([16] * 8))
    before = one.cache()
    values = one.inputs([6, 5, 4])
    _, clean = one.runner.run(3, **values)
    one.restore(before)
    owned = {slot for row in (1, 2, 3) for slot in one.slots_of(row)}
    foreign = [slot for slot in range(one.kv.full.keys.shape[1]) if slot not in owned]
    one.kv.full.keys[:, foreign] = float("nan")
    one.kv.full.values[:, foreign] = float("nan")
    _, poisoned = one.runner.run(3, **values)
    assert same_bits(clean, poisoned) and not clean.isnan().any()
    assert one.runner.coverage().eager == 0


@backends
def test_b25_what_a_request_owns_beyond_its_length_is_not_read(world, backend):
    one = world(backend)
    before = one.cache()
    values = one.inputs([6, 5, 4])
    _, clean = one.runner.run(3, **values)
    one.restore(before)
    for row, length in ((1, 6), (2, 5), (3, 4)):
        one.kv.full.keys[:, one.slots_of(row)[length:]] = float("inf")
        one.kv.full.values[:, one.slots_of(row)[length:]] = float("nan")
    assert same_bits(one.runner.run(3, **values)[1], clean)


def test_p04_a_step_of_another_width_is_no_decode_step(world):
    one = world("full")
    values = one.inputs([6, 5])
    wide = {**values, **{n: values[n].repeat_interleave(2) for n in ("input_ids", "positions", "out_slots")}}
    miss = one.runner.ineligible(wide)
    assert miss.reason is Reason.WIDTH and miss.facts == "2 tokens a request, captured 1"
    with pytest.raises(
        (InputError, SlotError)
    ):  # eager, where the attention of this phase refuses it by name
        one.runner.run(2, **wide)
    assert one.runner.coverage().reasons == {"WIDTH": 1} and one.runner.coverage().captured == 0
    assert one.runner.ineligible(values) is None


@backends
def test_p53_p54_padded_rows_are_zeroed_and_no_rows_call_nothing(device, world, backend):
    one = world(backend)
    shape = (4, one.model.config.num_heads, one.model.config.head_dim)
    for live in (4, 2, 0):
        values = one.inputs([3, 3, 3, 3])
        values["out_slots"][live:] = 0
        attend = DecodeAttention(one.kv, live=LiveRows(live),
                                 **{n: values[n] for n in ("out_slots", "request_rows", "seq_lens")})  # fmt: skip
        q = torch.full(shape, float("nan"), device=device)
        q[:live] = 1.0
        k = torch.full((4, 2, shape[2]), float("nan"), device=device)
        k[:live] = 1.0
        before = one.cache()
        out = attend(0, q, k, k)
        assert not out.isnan().any() and not out[live:].any()
        if live == 0:
            assert same_bits(one.cache()[:, :, 1:], before[:, :, 1:]), (
                "nothing was stored but in the reserved slot"
            )


def test_p53_over_a_poisoned_pool_padded_rows_reach_no_live_row(world):
    one = world("breakable")
    clean = one.runner.run(3, **one.inputs([6, 5, 4]))[1]
    noise = one.group.pool.borrow((100_000,), torch.float32).fill_(float("nan"))
    del noise
    assert same_bits(one.runner.run(3, **one.inputs([6, 5, 4]))[1], clean)


@backends
def test_p19_p28_a_recapture_while_requests_are_live_changes_nothing_of_theirs(world, backend):
    one = world(backend)
    values = one.inputs([6, 5, 4])
    first = one.runner.run(3, **values)
    before, noise = one.cache(), torch.randn_like(one.cache())
    one.restore(noise)  # other than what the first capture may have left
    one.runner.capture()
    assert same_bits(one.cache()[:, :, 1:], noise[:, :, 1:])
    one.restore(before)
    again = one.runner.run(3, **values)
    assert same_bits(first[1], again[1])


def test_p29_largest_first_and_one_line_for_each_bucket(world):
    one = world("full")
    ledger = one.runner.captured.memory()
    assert [line["bucket"] for line in ledger] == ["8", "4", "2", "1"]
    assert all(line["pool_bytes"] == 0 for line in ledger[1:])


def test_a_breakable_recording_breaks_once_a_layer(world):
    one = world("breakable")
    assert {line["breaks"] for line in one.runner.captured.memory()} == {one.model.config.num_layers}
    full = world("full")
    assert {line["breaks"] for line in full.runner.captured.memory()} == {0}


@backends
def test_b36_weights_replaced_are_refused_and_weights_copied_are_followed(world, backend):
    one = world(backend)
    values = one.inputs([6, 5, 4])
    one.runner.run(3, **values)
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.copy_(parameter * 1.25)
    step_and_oracle(one, [7, 6, 5])
    name, parameter = next(iter(one.model.named_parameters()))
    parameter.data = parameter.data.clone()
    with pytest.raises(AddressError, match=rf"moved: model\.{name}"):
        one.runner.run(3, **values)


@pytest.mark.parametrize("name", ["keys", "values", "page_table"])
def test_b35_a_cache_restored_elsewhere_is_refused_by_name(world, name):
    one = world("full")
    values = one.inputs([6, 5, 4])
    one.runner.run(3, **values)
    setattr(one.kv.full, name, getattr(one.kv.full, name).clone())
    with pytest.raises(AddressError, match=rf"moved: kv\.{name}"):
        one.runner.run(3, **values)


@backends
def test_b40_p18_two_models_in_one_group_interleave(device, world, backend):
    """One pool, shared input buffers: each runner fills its own inputs right before its own replay."""
    group = GraphGroup(device)
    first, second = world(backend, group=group, seed=1), world(backend, group=group, seed=2)
    views = [one.runner.captured.buffers.view(8) for one in (first, second)]
    assert all(views[0][name].data_ptr() == views[1][name].data_ptr() for name in INPUTS)
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        one = (first, second)[int(torch.randint(2, (1,), generator=generator))]
        live = int(torch.randint(1, 9, (1,), generator=generator))
        step_and_oracle(one, torch.randint(2, 17, (live,), generator=generator).tolist())


def test_b66_a_batch_above_the_largest_bucket_runs_eager_and_right(world):
    one = world("full", buckets=(2, 4))
    tokens, logits, _, _ = step_and_oracle(one, [5, 6, 7, 8, 9])
    assert tokens.shape == (5,) and logits.shape == (5, 97)
    assert one.runner.coverage().reasons == {"ABOVE_LARGEST": 1}


def test_b59_exact_sizes_replay_with_padding_off(world):
    one = world("full", padding=False)
    for live in (1, 2, 4, 8, 3):
        step_and_oracle(one, [5] * live)
    assert one.runner.coverage().captured == 4 and one.runner.coverage().reasons == {"SIZE_NOT_CAPTURED": 1}


@backends
def test_b72_tokens_of_a_batch_that_ends_in_waves_equal_eager(world, backend):
    """Greedy decoding with requests that leave: captured and eager engines see the same tokens at every size."""

    def decode(one, run):
        lengths, last, output = [1] * 8, [10 + i for i in range(8)], [[] for _ in range(8)]
        for step in range(12):
            live = max(8 - step * 8 // 12, 1)
            values = one.inputs([n + 1 for n in lengths[:live]], last[:live])
            tokens = run(one.runner, live, values).tolist()
            for i, token in enumerate(tokens):
                output[i].append(token)
                lengths[i] += 1
                last[i] = token
        return output

    one = world(backend)
    before = one.cache()
    captured = decode(one, lambda runner, live, values: runner.run(live, **values)[0])
    one.restore(before)
    eager = decode(one, lambda runner, live, values: runner.run_live_eager(live, **values)[0])
    assert captured == eager
    assert one.runner.coverage().eager == 0


@backends
def test_closing_gives_the_groups_pool_back(world, backend):
    one = world(backend)
    one.runner.run(3, **one.inputs([6, 5, 4]))
    assert one.group.pool.reserved_bytes > 0
    one.close()
    assert one.group.pool.reserved_bytes == 0


@backends
def test_b64_with_the_cache_full_a_padded_batch_is_captured_lazily_and_replays(world, backend):
    """Every page belongs to a request; what padding points at was set aside when the cache was made."""
    one = world(backend, lazy=True)
    assert sorted(one.kv.full.page_table[1:].flatten().tolist()) == list(range(1, 33)), "no page is free"
    for live in (3, 8, 7, 1):
        step_and_oracle(one, [3 + live + i % 4 for i in range(live)])
    assert one.runner.captured.captured_sizes == [1, 4, 8] and one.runner.captured.unused_sizes == [2]
    assert one.runner.coverage().captured == 4 and one.runner.coverage().eager == 0
