"""Static buffers: what a load leaves in every element, live rows and padded tail alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.errors import CaptureError, SlotError
from cglab.graphs.buffers import SharedBuffers, StaticBuffers
from cglab.graphs.captured import Captured
from cglab.graphs.options import CaptureFailedWarning, Options
from cglab.graphs.slots import Padding, Slot

INT = torch.int64


def buffers(device, maximum=8, shared=None, **slots):
    return StaticBuffers(slots, maximum, device, shared)


def load(static, live, size, **values):
    for name, value in values.items():
        assert static.misfit(name, value, size) is None
    static.load(values, live, size)
    return {name: view.tolist() for name, view in static.view(size).items()}


def ints(device, *values):
    return torch.tensor(values, device=device, dtype=INT)


def test_p11_stale_lengths_become_the_sentinel(device):
    static = buffers(device, seq_lens=Slot((-1,), INT, pad=1))
    load(static, 8, 8, seq_lens=ints(device, *range(100, 108)))
    assert load(static, 3, 4, seq_lens=ints(device, 7, 8, 9)) == {"seq_lens": [7, 8, 9, 1]}


def test_p12_p13_p14_b28_index_tails_are_zero_on_every_load(device):
    names = ("request_rows", "out_slots", "positions")
    static = buffers(device, **{name: Slot((-1,), INT, pad=Padding.ZERO) for name in names})
    big = ints(device, *range(4000, 4008))
    load(static, 8, 8, **dict.fromkeys(names, big))
    assert load(static, 5, 8, **dict.fromkeys(names, big[:5])) == dict.fromkeys(
        names, [*range(4000, 4005), 0, 0, 0]
    )


@given(st.lists(st.integers(1, 8), min_size=2, max_size=12))
def test_p15_nothing_of_an_earlier_batch_leaks_into_a_later_one(lives):
    static = buffers(torch.device("cpu"), x=Slot((-1, 2), torch.float32, pad=-3.0), n=Slot((-1,), INT, pad=1))
    for step, live in enumerate(lives, 1):
        size = next(b for b in (1, 2, 4, 8) if b >= live)
        got = load(static, live, size, x=torch.full((live, 2), float(step)), n=torch.full((live,), 10 + step))
        assert got["x"] == [[step, step]] * live + [[-3, -3]] * (size - live)
        assert got["n"] == [10 + step] * live + [1] * (size - live)


def test_p15_a_full_bucket_after_a_padded_one_is_all_live(device):
    static = buffers(device, n=Slot((-1,), INT, pad=1))
    load(static, 3, 4, n=ints(device, 5, 6, 7))
    assert load(static, 4, 4, n=ints(device, 1, 2, 3, 4)) == {"n": [1, 2, 3, 4]}


def test_p16_an_absent_optional_input_never_shows_the_old_buffer(device):
    seen = []

    def step(x, bias=None):
        seen.append(bias is None)
        return x * 2 if bias is None else x * 2 + bias

    slots = {"x": Slot(pad=0.0), "bias": Slot(optional=True, pad=0.0)}
    x, bias = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
    with cglab.capture(step, slots=slots, buckets=(2,)) as captured:
        assert torch.equal(captured(x=x, bias=bias), x * 3)
        assert torch.equal(captured(x=x), x * 2), "the old bias must not be added"
        assert captured.coverage().reasons == {"INPUT_KIND": 1}
        assert "'bias' is None, at capture it was a tensor" in captured.coverage().last_facts["INPUT_KIND"]
    with cglab.capture(step, slots=slots, buckets=(2,)) as captured:
        assert torch.equal(captured(x=x), x * 2)
        assert torch.equal(captured(x=x, bias=bias), x * 3)
        assert captured.coverage().reasons == {"INPUT_KIND": 1} and captured.coverage().captured == 1


@pytest.mark.parametrize("strict", [False, True])
def test_p16_b15_a_failed_capture_with_other_inputs_leaves_no_recording_of_the_former_ones(device, strict):
    """It would be replayed over the pad value of an input that the step does not have any more."""
    broken = []

    def step(x, bias=None):
        if x.shape[0] in broken:
            raise ValueError("no")
        return x * 2 if bias is None else x * bias

    slots = {"x": Slot((-1, 3), torch.float32, pad=0.0), "bias": Slot((-1, 3), torch.float32, optional=True)}
    x = torch.ones(2, 3, device=device)
    with Captured("step", step, slots, (2, 4), device, Options(strict=strict)) as captured:
        assert torch.equal(captured(x=x, bias=x * 5), x * 5)
        broken.append(2)
        caught = pytest.raises(CaptureError) if strict else pytest.warns(CaptureFailedWarning)
        with caught:
            captured.capture(absent=["bias"])
        assert captured.captured_sizes == [4] and [line["bucket"] for line in captured.memory()] == ["4"]
        broken.clear()
        assert torch.equal(captured(x=x), x * 2)
        assert captured.coverage().reasons == {"CAPTURE_FAILED": 1}
        assert torch.equal(captured(x=torch.ones(4, 3, device=device)), torch.full_like(x, 2.0).repeat(2, 1))
        assert captured.coverage().captured == 2


def test_p17_a_slot_that_other_steps_overwrite_is_refilled_before_it_is_read(device):
    """Embeddings of an image batch must not show in the text batch after it: the choice is data, per row."""
    table = torch.arange(12.0, device=device).view(6, 2)

    def step(ids, embeds, use):
        return torch.where(use.unsqueeze(-1), embeds, table.index_select(0, ids))

    slots = {"ids": Slot(pad=0), "embeds": Slot(pad=0.0), "use": Slot(pad=False)}
    ids, image = ints(device, 1, 2, 3), torch.full((3, 2), 99.0, device=device)
    yes = torch.ones(3, dtype=torch.bool, device=device)
    with cglab.capture(step, slots=slots, buckets=(4,)) as captured:
        assert torch.equal(captured(ids=ids, embeds=image, use=yes), image)
        text = captured(ids=ids, embeds=torch.zeros_like(image), use=~yes)
        assert torch.equal(text, table[1:4])
        assert captured.coverage().captured == 2


def test_p18_p19_p21_a_capture_resets_what_another_runner_left_in_a_shared_buffer(device):
    shared = SharedBuffers()
    slots = {"positions": Slot((-1,), INT, pad=Padding.ZERO), "seq_lens": Slot((-1,), INT, pad=1)}
    first = buffers(device, shared=shared, **slots)
    load(first, 8, 8, positions=ints(device, *range(900, 908)), seq_lens=ints(device, *range(50, 58)))
    second = buffers(device, shared=shared, **slots)
    assert second.view(8)["positions"].data_ptr() == first.view(8)["positions"].data_ptr()
    assert second.view(8)["positions"].tolist() == [0] * 8
    assert second.view(8)["seq_lens"].tolist() == [1] * 8
    load(first, 8, 8, positions=ints(device, *range(900, 908)), seq_lens=ints(device, *range(50, 58)))
    second.reset()  # what a later capture begins with
    assert second.view(8)["positions"].tolist() == [0] * 8 and second.view(8)["seq_lens"].tolist() == [1] * 8


def test_p19_a_recapture_reads_and_writes_through_reserved_indices_only(device):
    cache = torch.zeros(10, device=device)

    def store(value, slot):
        cache.index_copy_(0, slot, value)
        return cache.index_select(0, slot) + 1

    slots = {"value": Slot(pad=0.0), "slot": Slot(pad=0)}
    with cglab.capture(store, slots=slots, buckets=(4,), self_check=False) as captured:
        captured(value=torch.ones(4, device=device), slot=ints(device, 5, 6, 7, 8))
        live = cache.clone()
        captured._captured.capture()  # again, while 5 to 8 are live
        assert torch.equal(cache[1:], live[1:])
        assert captured._captured.buffers.view(4)["slot"].tolist() == [0] * 4


@pytest.mark.parametrize("pad", [0, 1, 0.5, Padding.ZERO])
def test_p21_what_a_load_resets_is_what_a_capture_resets(pad):
    static = buffers(torch.device("cpu"), x=Slot((-1,), torch.float32, pad=pad))
    static._buffers["x"].fill_(77)
    static.load({}, 2, 8)
    tail = static.view(8)["x"][2:].clone()
    static._buffers["x"].fill_(77)
    static.reset()
    assert torch.equal(static.view(8)["x"][2:], tail)


def test_p20_buffers_whose_values_depend_on_the_shape_are_not_shared(device):
    shared = SharedBuffers()
    slot = Slot((-1,), INT, shared=False)
    one, two = buffers(device, shared=shared, index=slot), buffers(device, shared=shared, index=slot)
    assert one.view(8)["index"].data_ptr() != two.view(8)["index"].data_ptr()


def test_shared_buffers_are_told_apart_by_name_size_and_type(device):
    shared = SharedBuffers()
    base = shared.get("x", (4, 2), INT, device)
    assert shared.get("x", (8,), INT, device).data_ptr() == base.data_ptr()
    for other in (("y", (8,), INT), ("x", (9,), INT), ("x", (8,), torch.int32)):
        assert shared.get(*other, device).data_ptr() != base.data_ptr()


def test_state_slots_keep_their_tail_and_are_never_shared(device):
    shared = SharedBuffers()
    state = Slot((-1,), torch.float32, pad=Padding.KEEP)
    one, two = buffers(device, shared=shared, s=state), buffers(device, shared=shared, s=state)
    load(one, 8, 8, s=torch.arange(8.0, device=device))
    assert load(one, 2, 4, s=torch.zeros(2, device=device))["s"] == [0, 0, 2, 3]
    assert load(one, 2, 4)["s"] == [0, 0, 2, 3], "without a value nothing is loaded"
    assert two.view(8)["s"].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "holds torch.float32, got torch.float64"),
        (torch.zeros(2), "has 2 axes"),
        (torch.zeros(()), "grows on axis 0"),
        (torch.zeros(2, 3).to_sparse(), "dense tensor, got a torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.zeros(3)] * 2, layout=torch.jagged), "dense tensor, got a nested"),
        ([[1.0, 2.0, 3.0]], "takes a tensor, got a list"),
    ],
)
def test_p22_a_wrong_kind_of_tensor_is_refused_by_slot_name(value, message):
    with cglab.capture(lambda x: x + 1, slots={"x": Slot(pad=0.0)}, buckets=(2,)) as captured:
        captured(x=torch.zeros(2, 3))
        with pytest.raises(SlotError, match=message):
            captured(x=value)
        assert torch.equal(captured(x=torch.ones(2, 3)), torch.full((2, 3), 2.0)), "still usable"


@pytest.mark.parametrize("value", [torch.zeros(2, 3).to_sparse(), [1.0]])
def test_p22_the_first_call_is_checked_too(value):
    with cglab.capture(lambda x: x + 1, slots={"x": Slot()}, buckets=(2,)) as captured:
        with pytest.raises(SlotError, match="slot 'x' takes a"):
            captured(x=value)
        assert captured(x=torch.ones(2)).tolist() == [2, 2]


def test_p22_a_wrong_shape_runs_eager_with_the_axis(device):
    with cglab.capture(lambda x: x + 1, slots={"x": Slot(pad=0.0)}, buckets=(2,)) as captured:
        captured(x=torch.zeros(2, 3, device=device))
        out = captured(x=torch.zeros(2, 4, device=device))
        assert torch.equal(out, torch.ones(2, 4, device=device))
        assert captured.coverage().last_facts == {"SHAPE": "slot 'x': axis 1 is 4, the static buffer has 3"}


def test_p22_a_slot_that_is_no_parameter_or_never_resolved_is_refused():
    with pytest.raises(SlotError, match="'y' is no parameter"):
        cglab.capture(lambda x: x, slots={"x": Slot(), "y": Slot()}, buckets=(1,))
    with pytest.raises(SlotError, match="no shape or dtype"):
        Slot().resolve("x", None)
    with pytest.raises(SlotError, match="not resolved"):
        buffers(torch.device("cpu"), x=Slot())
    with pytest.raises(SlotError, match="grows on axis 2"):
        Slot(axis=2).resolve("x", torch.zeros(3))


def test_p22_inputs_that_disagree_on_the_batch_are_refused(device):
    slots = {"x": Slot(pad=0.0), "y": Slot(pad=0.0)}
    with cglab.capture(lambda x, y: x + y, slots=slots, buckets=(4,)) as captured:
        captured(x=torch.zeros(3, device=device), y=torch.zeros(3, device=device))
        with pytest.raises(SlotError, match=r"disagree on the batch size: \{'x': 3, 'y': 2\}"):
            captured(x=torch.zeros(3, device=device), y=torch.zeros(2, device=device))


def test_p23_copies_of_many_types_are_grouped_and_right(device, monkeypatch):
    types = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float32, torch.int64]
    static = buffers(device, **{f"s{i}": Slot((-1,), t, pad=0) for i, t in enumerate(types)})
    groups = []
    plain = torch._foreach_copy_

    def spy(targets, sources, **options):
        groups.append({(t.dtype, s.dtype, s.device) for t, s in zip(targets, sources, strict=True)})
        return plain(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    values = {f"s{i}": torch.arange(3, device=device).to(t) for i, t in enumerate(types)}
    values["s6"] = values["s6"].cpu()
    got = load(static, 3, 4, **values)
    assert all(got[name] == [*value.tolist(), 0] for name, value in values.items())
    assert all(len(group) == 1 for group in groups), "one kind of copy in each grouped call"
    assert len(groups) == len({(t.dtype, t.device) for t in values.values()})


def test_p24_a_slot_may_grow_on_another_axis(device):
    static = buffers(device, mrope=Slot((3, -1), INT, axis=1, pad=0), back=Slot((2, -1), INT, axis=-1, pad=7))
    load(static, 8, 8, mrope=torch.full((3, 8), 9, device=device), back=torch.full((2, 8), 9, device=device))
    got = load(
        static,
        2,
        4,
        mrope=torch.ones(3, 2, dtype=INT, device=device),
        back=torch.ones(2, 2, dtype=INT, device=device),
    )
    assert got["mrope"] == [[1, 1, 0, 0]] * 3
    assert got["back"] == [[1, 1, 7, 7]] * 2


def test_p25_b29_the_live_count_is_an_input_of_every_replay(device):
    """Mean over live tokens: the bucket's own size, or the first batch's, would give another mean."""

    def mean(x, live):
        seen = torch.arange(x.shape[0], device=x.device) < live
        return (x * seen.unsqueeze(-1)).sum(0) / live

    slots = {"x": Slot(pad=5.0), "live": Slot(shape=(1,), dtype=INT, axis=None)}
    with cglab.capture(mean, slots=slots, buckets=(64,)) as captured:
        for live in (64, 47, 1, 50):
            x = torch.randn(live, 4, device=device)
            got = captured(x=x, live=ints(device, live))
            assert torch.allclose(got, x.mean(0), atol=1e-6)
        assert captured.coverage().captured == 4


def test_b25_a_wider_table_runs_eager_and_a_narrower_one_leaves_no_old_columns(device):
    def total(table):
        return table.sum(-1)

    slots = {"table": Slot(shape=(-1, 16), dtype=INT, ragged=(1,), pad=0)}
    with cglab.capture(total, slots=slots, buckets=(4,)) as captured:
        for width in (16, 17, 3, 16, 1):
            table = torch.full((3, width), 10, device=device)
            assert captured(table=table).tolist() == [10 * width] * 3
        assert captured.coverage().reasons == {"SHAPE": 1}
        assert "axis 1 is 17, the static buffer has 16" in captured.coverage().last_facts["SHAPE"]
        assert captured.coverage().captured == 4


def test_b26_padded_rows_write_to_the_reserved_slot_only(device):
    cache = torch.zeros(12, device=device)

    def store(value, slot):
        cache.index_copy_(0, slot, value)
        return value + 0

    slots = {"value": Slot(pad=7.0), "slot": Slot(pad=0)}
    with cglab.capture(store, slots=slots, buckets=(4,)) as captured:
        captured(value=torch.full((4,), 1.0, device=device), slot=ints(device, 1, 2, 3, 4))
        captured(value=torch.full((3,), 2.0, device=device), slot=ints(device, 5, 6, 7))
        assert cache.tolist() == [7, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0], (
            "slot 4 of the former batch is not written again"
        )


def test_b28_a_smaller_batch_after_large_positions_stays_in_range(device):
    table = torch.arange(20.0, device=device)

    def look_up(positions, length):
        return (
            table[:10].index_select(0, positions)
            if length is None
            else table.index_select(0, positions + length)
        )

    slots = {"positions": Slot(pad=0), "length": Slot(pad=0)}
    with cglab.capture(look_up, slots=slots, buckets=(8,)) as captured:
        captured(positions=torch.full((8,), 15, device=device), length=torch.full((8,), 4, device=device))
        assert captured(
            positions=ints(device, 1, 2, 3, 4, 5), length=ints(device, 1, 1, 1, 1, 1)
        ).tolist() == [2, 3, 4, 5, 6]
        tail = captured._captured.buffers.view(8)
        assert tail["positions"].tolist()[5:] == [0] * 3 and tail["length"].tolist()[5:] == [0] * 3


def test_poison_reaches_open_tails_and_nothing_else(device):
    static = buffers(
        device, head=Slot((-1,), torch.float32, pad=Padding.HEAD), index=Slot((-1,), INT, pad=Padding.HEAD),
        zero=Slot((-1,), INT, pad=0), state=Slot((-1,), torch.float32, pad=Padding.KEEP),
    )  # fmt: skip
    assert sorted(static.poison(3, 8)) == ["head", "index"]
    got = static.view(8)
    assert got["head"][3:].isnan().all() and not got["head"][:3].isnan().any()
    assert (got["index"][3:] == torch.iinfo(INT).max).all()
    assert not got["zero"].any() and not got["state"].any()


def test_a_slot_of_several_rows_a_request_pads_in_those_rows(device):
    static = buffers(device, ids=Slot((-1,), INT, width=3, pad=0))
    got = load(static, 2, 3, ids=ints(device, 1, 2, 3, 4, 5, 6))
    assert got["ids"] == [1, 2, 3, 4, 5, 6, 0, 0, 0]
    with cglab.capture(
        lambda ids: ids * 2, slots={"ids": Slot(shape=(-1,), width=3)}, buckets=(4,)
    ) as captured:
        assert captured(ids=ints(device, 1, 2, 3, 4, 5, 6)).tolist() == [2, 4, 6, 8, 10, 12]
        with pytest.raises(SlotError, match="no multiple of its width 3"):
            captured(ids=ints(device, 1, 2, 3, 4))


def test_state_given_to_an_eager_step_is_what_the_next_replay_reads(device):
    step = cglab.capture(
        lambda x, state: x + state, slots={"x": Slot(), "state": Slot(pad=Padding.KEEP)}, buckets=(2, 4),
        waste_ceiling=1.0,
    )  # fmt: skip
    ones = torch.ones(4, device=device)
    step(x=ones, state=ones)
    assert step(x=ones[:3], state=ones[:3] * 9).tolist() == [10] * 3
    assert step.coverage().reasons == {"WASTE_CEILING": 1}
    assert step(x=ones[:2]).tolist() == [10] * 2
    assert step(x=ones[:3], state=None).tolist() == [10] * 3, "None leaves the state, eager as captured"
    with pytest.raises(SlotError, match="state for 4 rows, this step has 6"):
        step(x=torch.ones(6, device=device))


def test_b25_a_first_call_that_fills_a_ragged_slot_in_part_captures(device):
    table = Slot(shape=(8,), dtype=torch.float32, axis=None, ragged=(0,))
    step = cglab.capture(lambda x, t: x + t.sum(), slots={"x": Slot(), "t": table}, buckets=(4,))
    assert step(x=torch.ones(4, device=device), t=torch.ones(3, device=device)).tolist() == [4] * 4
    assert step.coverage().captured == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (4, 8)}, {"shape": (8, -1)}, {"shape": (-1, -1)}, {"shape": (-1,), "axis": 5}, {"width": 0},
        {"shape": (-1,), "axis": None}, {"pad": None}, {"pad": "zero"},
    ],
)  # fmt: skip
def test_p22_a_declaration_that_cannot_hold_is_refused_when_it_is_made(wrong):
    with pytest.raises(SlotError, match="a slot"):
        Slot(**wrong)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.int64, 0.5), (torch.uint8, -1), (torch.bool, 2), (torch.int8, 300), (INT, float("nan"))],
)
def test_a_pad_value_that_the_dtype_does_not_hold_is_refused(dtype, pad):
    with pytest.raises(SlotError, match="pad with whole numbers"):
        Slot(pad=pad).resolve("x", torch.ones(2, dtype=dtype))


def test_inputs_without_a_name_and_models_that_are_no_name_are_told():
    with pytest.raises(SlotError, match=r"by name: .*\(x=\.\.\.\)"):
        cglab.capture(lambda x: x, slots={"x": Slot()}, buckets=(1,))(torch.ones(1))
    with pytest.raises(cglab.errors.ModelError, match="by a string or a path"):
        cglab.open(3)
    with pytest.raises(cglab.errors.DeviceError, match="cannot record on meta"):
        cglab.capture(lambda x: x + 1, slots={"x": Slot()}, buckets=(1,))(x=torch.ones(1, device="meta"))


def test_b39_a_capture_again_that_fails_leaves_recordings_that_are_not_told_as_failures(device):
    reads = []

    def step(x):
        return x * x.sum().item() if reads else x * 2

    slots = {"x": Slot((-1, 3), torch.float32, pad=0.0)}
    captured = Captured("step", step, slots, (2, 4), device)
    captured.capture()
    reads.append(True)
    with pytest.warns(CaptureFailedWarning, match="bucket 4"):
        captured.capture()
    assert captured.captured_sizes == [2, 4] and not captured.failures
    assert torch.equal(captured(x=torch.ones(3, 3, device=device)), torch.full((3, 3), 2.0, device=device))
    captured.close()
