"""What a step remembers of earlier ones: the same buffers as without, dropped where it no longer holds, and cheap."""

import gc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import prune

import cglab
from cglab.errors import AddressError, SlotError
from cglab.graphs import address, fits
from cglab.graphs.address import AddressContract
from cglab.graphs.buffers import PAD_BYTES, StaticBuffers
from cglab.graphs.fits import kinds_of
from cglab.graphs.slots import Padding, Slot

X = {"x": Slot(pad=0.0)}
SLOTS = {
    "ids": Slot((-1,), torch.int64, pad=0), "lengths": Slot((-1,), torch.int64, pad=1),
    "x": Slot((-1, 3), torch.float32, pad=0.5), "table": Slot((-1, 4), torch.int64, ragged=(1,), pad=7),
    "wide": Slot((2, -1), torch.float32, axis=1, width=2), "head": Slot((-1,), torch.float32, pad=Padding.HEAD),
    "state": Slot((-1,), torch.float32, pad=Padding.KEEP), "fixed": Slot((3,), torch.int32, axis=None),
}  # fmt: skip


def reference(slots, rows, values, live, size):
    """What a load must leave in the buffers, told without views: plain indexing, slot by slot."""
    for name, slot in slots.items():
        buffer = rows[name] if slot.axis is None else rows[name].movedim(slot.axis, 0)
        first, last = live * slot.width, size * slot.width
        if slot.axis is not None and slot.fill is not None:
            buffer[first:last] = slot.fill
        if name in values:
            value = values[name]
            head = buffer if slot.axis is None else buffer[:first]
            value = value if slot.axis is None else value.movedim(slot.axis, 0)
            if slot.ragged:
                head[...] = slot.fill
                head = head[:, : value.shape[1]]
            head[...] = value


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), st.lists(st.sampled_from(sorted(SLOTS)), unique=True), st.integers(0, 4)
        ),
        max_size=10,
    )
)
def test_g3_p15_plans_that_are_kept_leave_what_loads_without_them_leave(steps):
    device = torch.device("cpu")
    static, plans = StaticBuffers(SLOTS, 8, device), {}
    expected = {name: view.clone() for name, view in static.view(8).items()}
    for step, (live, names, columns) in enumerate(steps, 1):
        size = next(bucket for bucket in (1, 2, 4, 8) if bucket >= live)
        values = {}
        for name in names:
            slot = SLOTS[name]
            shape = [live * slot.width if n == -1 else n for n in slot.shape]
            shape[1:] = [columns] if slot.ragged else shape[1:]
            values[name] = torch.full(shape, 10 * step, dtype=slot.dtype)
        key = (kinds_of(values), live)
        plan = plans.setdefault(key, static.plan(values, live, size))
        plan.load(values)
        reference(SLOTS, expected, values, live, size)
        assert all(torch.equal(view, expected[name]) for name, view in static.view(8).items())


def test_g3_p23_a_padded_load_of_one_type_is_one_copy_and_allocates_nothing(device):
    slots = {f"s{i}": Slot((-1,), torch.int64, pad=i % 2) for i in range(5)}
    static = StaticBuffers(slots, 8, device)
    values = {name: torch.arange(3, device=device) for name in slots}
    plan = static.plan(values, 3, 8)
    assert not plan.fills and [len(targets) for _, _, targets in plan.copies] == [10]
    plan.load(values)
    assert static.view(8)["s1"].tolist() == [0, 1, 2, 1, 1, 1, 1, 1]


def test_a_large_buffer_keeps_no_copy_of_its_pad_value(device):
    static = StaticBuffers({"x": Slot((-1, PAD_BYTES), torch.float32, pad=2.0)}, 2, device)
    plan = static.plan({"x": torch.ones(1, PAD_BYTES, device=device)}, 1, 2)
    assert len(plan.fills) == 1 and not static._pads
    plan.load({"x": torch.ones(1, PAD_BYTES, device=device)})
    assert static.view(2)["x"][:, 0].tolist() == [1, 2]


def test_an_input_with_a_gradient_does_not_tie_the_buffers_to_its_graph(device):
    with cglab.capture(lambda x: x * 2, slots=X, buckets=(4,)) as captured:
        for _ in range(2):
            captured(x=torch.ones(3, 2, device=device, requires_grad=True))
        assert captured._captured.buffers.view(4)["x"].grad_fn is None


@pytest.fixture
def captured(device):
    with cglab.capture(lambda x: x + 1, slots=X, buckets=(2, 4)) as made:
        for _ in range(2):
            assert made(x=torch.ones(3, 2, device=device)).tolist() == [[2.0, 2.0]] * 3
        assert len(made._captured._fits) == 1
        yield made


def test_g3_a_step_like_an_earlier_one_decides_nothing_anew(captured, device, monkeypatch):
    monkeypatch.setattr(captured._captured, "can_run", None)
    monkeypatch.setattr(captured._captured, "live_size", None)
    assert captured(x=torch.zeros(3, 2, device=device)).tolist() == [[1.0, 1.0]] * 3
    assert captured.coverage().captured == 3


def test_g3_b39_what_was_decided_over_a_dropped_recording_is_decided_anew(captured, device):
    backend = captured._captured.recordings._backend
    backend.drop(backend.keys[0])
    assert captured(x=torch.ones(3, 2, device=device)).tolist() == [[2.0, 2.0]] * 3
    assert captured.coverage().reasons == {"CAPTURE_FAILED": 1}


def test_g3_p16_a_capture_with_other_inputs_present_is_decided_anew(device):
    slots = {
        "x": Slot((-1,), torch.float32, pad=0.0),
        "y": Slot((-1,), torch.float32, pad=0.0, optional=True),
    }
    with cglab.capture(
        lambda x, y: x * 1 if y is None else x + y, slots=slots, buckets=(2,), clone=True
    ) as step:
        x = torch.ones(2, device=device)
        assert step(x=x, y=x).tolist() == step(x=x, y=x).tolist() == [2, 2]
        step._captured.capture(absent=["y"])
        assert step(x=x, y=x).tolist() == [2, 2] and step.coverage().reasons == {"INPUT_KIND": 1}
        assert step(x=x).tolist() == [1, 1] and step.coverage().captured == 3


@pytest.mark.parametrize(
    "odd", [torch.ones(3, 2).double(), torch.ones(3, 2).to_sparse(), [[1.0, 1.0]] * 3, None]
)
def test_g3_p22_inputs_of_another_kind_are_looked_at_however_often_the_step_ran(captured, odd):
    with pytest.raises(SlotError):
        captured(x=odd)
    assert captured.coverage().captured == 2


@pytest.mark.parametrize("live", [3, 4])
def test_g3_what_a_caller_does_to_a_result_s_form_is_not_kept_for_the_next(captured, device, live):
    x = torch.ones(live, 2, device=device)
    for _ in range(2):
        out = captured(x=x)
        assert out.shape == (live, 2) and not out.requires_grad
        out.unsqueeze_(0).requires_grad_()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_g3_a_result_that_was_first_made_in_another_mode_takes_part_in_a_gradient(device, mode):
    with cglab.capture(lambda x: x + 1, slots=X, buckets=(2, 4)) as step:
        x, weight = torch.ones(3, 2, device=device), torch.ones(2, device=device, requires_grad=True)
        with mode():
            step(x=x), step(x=x)
        step(x=x).mul_(weight).sum().backward()
        assert weight.grad.tolist() == [6.0, 6.0]


def test_g3_few_kinds_are_kept_and_none_after_close(device, monkeypatch):
    monkeypatch.setattr(fits, "MOST_FITS", 3)
    with cglab.capture(lambda x: x + 1, slots=X, buckets=(8,), clone=True) as step:
        for live in (*range(1, 9), *range(1, 9)):
            assert step(x=torch.ones(live, device=device)).tolist() == [2.0] * live
            assert len(step._captured._fits) <= 3
        assert step.coverage().captured == 16
    assert len(step._captured._fits) == 0


# What a replayed step costs the host does not grow with the model


def calls_of(function):
    """Python functions that one call enters, in order."""
    entered = []
    gc.disable()
    sys.setprofile(
        lambda frame, event, _: entered.append(frame.f_code.co_qualname) if event == "call" else None
    )
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered


def test_g3_a_replayed_step_makes_no_python_call_for_each_layer(device, monkeypatch):
    made = []
    x = torch.ones(3, 3, device=device)
    for count in (2, 8):
        layers = [torch.nn.Linear(3, 3, device=device) for _ in range(count)]
        step = cglab.capture(torch.nn.Sequential(*layers).forward, slots={"input": X["x"]}, buckets=(2, 4))
        for _ in range(2):
            step(input=x)
        captured = step._captured
        assert len(captured.contract) == 2 * count
        (segment,) = captured.recordings.steps_of(4)
        with monkeypatch.context() as patch:  # what the recorder itself does is the device's work
            patch.setattr(type(segment), "replay", lambda _: None)
            made.append(calls_of(lambda: captured(input=x)))  # noqa: B023 - called here
        step.close()
    assert made[0] == made[1] and 0 < len(made[0]) < 60


def at_once(entries, addresses, indices):
    """The call that only a build of torch for CUDA has, told in Python."""
    return all(torch.Tensor.data_ptr(entries[i]) == addresses[i] for i in indices)


@pytest.mark.parametrize("compare", [None, at_once])
@pytest.mark.parametrize("how", ["stay", "assign", "none", "table", "delete", "add", "same memory", "plain"])
def test_g3_b36_the_quick_check_finds_what_a_look_at_every_name_finds(monkeypatch, how, compare):
    monkeypatch.setattr(address, "_compare_at_once", compare)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.LayerNorm(3)).requires_grad_(
        False
    )
    contract, first = AddressContract({"m": model}), model[0]
    contract.check()
    if how == "assign":
        model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    elif how == "none":
        first.weight = None
    elif how == "table":
        first._parameters["weight"] = torch.nn.Parameter(first.weight.clone())
    elif how == "plain":
        first._parameters["weight"] = 1.0
    elif how == "delete":
        del first.weight
    elif how == "add":
        first.register_buffer("more", torch.ones(2))
        first._parameters["another"] = torch.nn.Parameter(torch.ones(2))
    elif how == "same memory":
        first.weight = torch.nn.Parameter(first.weight.data)
    if how in ("stay", "add", "same memory"):
        contract.check()
    else:
        with pytest.raises(AddressError, match=r"m\.0\.weight"):
            contract.check()


@pytest.mark.parametrize("compare", [None, at_once])
def test_g3_b36_a_tensor_that_stays_under_another_name_is_found(monkeypatch, compare):
    monkeypatch.setattr(address, "_compare_at_once", compare)
    table = torch.nn.Embedding(4, 3).requires_grad_(False)
    contract = AddressContract({"table": table})
    prune.identity(table, "weight")  # the tensor is ``weight_orig`` now, and what is read is masked
    with pytest.raises(AddressError, match=r"table\.weight"):
        contract.check()
