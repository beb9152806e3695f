"""What a recording reads by address: held, watched by name, and refused when it moves."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cglab
from cglab.errors import AddressError
from cglab.graphs.address import AddressContract, InputWatch, closed_over

X = {"x": cglab.Slot(pad=0.0)}


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.fc = nn.Linear(3, 3, device=device)
        self.register_buffer("scale", torch.ones(3, device=device))

    def forward(self, x):
        return self.fc(x) * self.scale


@pytest.fixture
def model(device):
    torch.manual_seed(1)
    return Model(device).requires_grad_(False)


def of(function, device, **options):
    captured = cglab.capture(function, slots=X, buckets=(2,), strict=True, clone=True, **options)
    captured.warm(x=torch.ones(2, 3, device=device))
    return captured


def moves(model, how):
    fc = model.fc
    if how == "replaced parameter":
        fc.weight = nn.Parameter(fc.weight + 1, requires_grad=False)
    elif how == "data assigned":
        fc.weight.data = fc.weight.data + 1
    elif how == "storage swapped":
        fc.weight.data = fc.weight.data.clone()
    elif how == "module replaced":
        model.fc = nn.Linear(3, 3, device=fc.weight.device).requires_grad_(False)
    elif how == "dtype changed":
        model.double().float()
    elif how == "buffer replaced":
        model.scale = model.scale + 1
    elif how == "parameter removed":
        fc.weight = None
    elif how == "parameter deleted":
        del fc.weight


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("module replaced", "fc"),
        ("replaced parameter", "fc.weight"),
        ("data assigned", "fc.weight"),
        ("storage swapped", "fc.weight"),
        ("dtype changed", "fc.weight"),
        ("buffer replaced", "scale"),
        ("parameter removed", "fc.weight"),
        ("parameter deleted", "fc.weight"),
    ],
)
def test_b36_weights_that_moved_are_refused_by_name(device, model, how, name):
    with of(lambda x: model(x), device) as captured:
        moves(model, how)
        with pytest.raises(AddressError, match=rf"model\.{name}.*Copy new values in place"):
            captured(x=torch.ones(2, 3, device=device))


@pytest.mark.parametrize("how", ["method", "module", "forward"])
def test_b36_every_way_to_hand_in_a_module_is_watched(device, model, how):
    function = {"module": model, "forward": model.forward, "method": lambda x: model.forward(x)}[how]
    with of(function, device) as captured:
        moves(model, "replaced parameter")
        with pytest.raises(AddressError, match=r"fc\.weight"):
            captured(x=torch.ones(2, 3, device=device))


@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "optimizer"])
def test_b36_weights_changed_in_place_stay_valid(device, model, how):
    with of(lambda x: model(x), device) as captured:
        if how == "copy_":
            model.fc.weight.copy_(model.fc.weight * 2)
        elif how == "load_state_dict":
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        else:
            model.fc.weight.grad = torch.ones_like(model.fc.weight)
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        x = torch.randn(2, 3, device=device)
        assert torch.equal(captured(x=x), model(x))
        assert captured.coverage().eager == 0


def test_b36_after_a_move_a_new_capture_works(device, model):
    with of(lambda x: model(x), device) as captured:
        moves(model, "module replaced")
        captured.warm(x=torch.ones(2, 3, device=device))
        x = torch.randn(2, 3, device=device)
        assert torch.equal(captured(x=x), model(x))


def test_b35_state_that_comes_back_at_another_address_is_refused(device):
    """Offloaded and restored: values equal, address not. The step after it would read the old memory."""

    class Cache:
        data = torch.zeros(4, 3, device=device)

    def step(x):
        Cache.data.narrow(0, 0, x.shape[0]).add_(x)
        return Cache.data.sum(0, keepdim=True) + x

    with of(step, device, watch={"cache.data": lambda: Cache.data}) as captured:
        captured(x=torch.ones(2, 3, device=device))
        Cache.data = Cache.data.clone()
        with pytest.raises(AddressError, match=r"memory that the recording reads has moved: cache\.data"):
            captured(x=torch.ones(2, 3, device=device))


def test_b35_memory_that_moves_unwatched_is_read_where_it_was(device):
    """What no contract reaches is read by address on both recorders: the tape must not follow Python's handle."""
    state = SimpleNamespace(inner=SimpleNamespace(cache=torch.ones(3, device=device)))
    x = torch.zeros(2, 3, device=device)
    with cglab.capture(lambda x: x + state.inner.cache, slots={"x": cglab.Slot()}, buckets=(2,)) as captured:
        assert captured(x=x).unique().tolist() == [1]
        old = state.inner.cache.detach()
        state.inner.cache.data = torch.full((3,), 9.0, device=device)
        assert captured(x=x).unique().tolist() == [1]
        old.fill_(5.0)
        assert captured(x=x).unique().tolist() == [5]


def test_b35_many_moved_tensors_are_counted(device, model):
    with of(lambda x: model(x), device) as captured:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.scale = model.scale.clone()
        with pytest.raises(
            AddressError, match=r"moved: model\.scale, model\.fc\.weight, model\.fc\.bias\. Copy"
        ):
            captured(x=torch.ones(2, 3, device=device))


def test_b22_p31_a_tensor_that_was_closed_over_and_deleted_is_still_read_rightly(device):
    values = torch.arange(6.0, device=device).view(2, 3)
    expected = values.clone()

    def make():
        table = values.clone()
        reference = weakref.ref(table.untyped_storage())
        return (lambda x: x + table), reference

    function, _ = make()
    with of(function, device) as captured:
        del function
        gc.collect()
        noise = [torch.full((2, 3), float("nan"), device=device) for _ in range(50)]
        assert torch.equal(captured(x=torch.zeros(2, 3, device=device)), expected)
        del noise


def test_b22_a_tensor_that_nothing_else_holds_is_held_by_the_recording(device):
    """Reached through an attribute of an attribute: no contract names it, so the recording must hold it itself."""

    class Box:
        pass

    outer, outer_box = Box(), Box()
    outer.inner = outer_box
    outer_box.table = torch.full((2, 3), 5.0, device=device)

    def step(x):
        return x + outer.inner.table

    with of(step, device) as captured:
        address = outer_box.table.data_ptr()
        assert address in [held.data_ptr() for held in captured._held]
        outer_box.table = None
        gc.collect()
        noise = [torch.full((2, 3), float("nan"), device=device) for _ in range(50)]
        assert torch.equal(
            captured(x=torch.zeros(2, 3, device=device)), torch.full((2, 3), 5.0, device=device)
        )
        del noise


def test_b22_a_closed_over_tensor_that_was_replaced_is_refused(device):
    table = torch.full((2, 3), 5.0, device=device)

    def step(x):
        return x + table

    with of(step, device) as captured:
        table = torch.full((2, 3), 6.0, device=device)
        with pytest.raises(AddressError, match="table"):
            captured(x=torch.zeros(2, 3, device=device))


def test_b42_a_plan_is_made_again_outside_before_each_replay_into_the_same_memory(device):
    """The plan depends on lengths: prepared outside, written in place; planned anew elsewhere, it is refused."""
    plan = {"index": torch.zeros(2, dtype=torch.int64, device=device)}
    table = torch.arange(10.0, device=device)

    def prepare(lengths, in_place=True):
        fresh = lengths.cumsum(0) - lengths
        if in_place:
            plan["index"].copy_(fresh)
        else:
            plan["index"] = fresh

    def step(lengths):
        return table.index_select(0, plan["index"]) + lengths

    lengths = torch.tensor([2, 3], device=device)
    slots = {"lengths": cglab.Slot(pad=1)}
    prepare(lengths)
    with cglab.capture(
        step, slots=slots, buckets=(2,), watch={"plan.index": lambda: plan["index"]}, clone=True
    ) as captured:
        for pair in ([2, 3], [5, 1], [4, 4]):
            lengths = torch.tensor(pair, device=device)
            prepare(lengths)
            assert captured(lengths=lengths).tolist() == [float(pair[0]), float(pair[0] + pair[1])]
        prepare(lengths, in_place=False)
        with pytest.raises(AddressError, match=r"plan\.index"):
            captured(lengths=lengths)


def test_b43_a_moving_window_is_data_in_a_slot_and_not_an_address(device):
    ring = torch.arange(16.0, device=device)
    span = torch.arange(4, device=device)

    def by_data(x, start):
        return x + ring.index_select(0, (start + span) % 16)

    slots = {
        "x": cglab.Slot(shape=(-1, 4), pad=0.0),
        "start": cglab.Slot(shape=(1,), dtype=torch.int64, axis=None),
    }
    with cglab.capture(by_data, slots=slots, buckets=(2,), clone=True, strict=True) as captured:
        for start in (0, 6, 14, 3):  # past the wrap point and back
            got = captured(x=torch.zeros(2, 4, device=device), start=torch.tensor([start], device=device))
            assert got[0].tolist() == [(start + i) % 16 for i in range(4)]
    window = {"view": ring[0:4]}
    with cglab.capture(lambda x: x + window["view"], slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,),
                       watch={"window": lambda: window["view"]}) as captured:  # fmt: skip
        captured(x=torch.zeros(2, 4, device=device))
        window["view"] = ring[4:8]
        with pytest.raises(AddressError, match="window"):
            captured(x=torch.zeros(2, 4, device=device))


def test_an_eager_step_needs_no_contract(device, model):
    with of(lambda x: model(x), device) as captured:
        moves(model, "replaced parameter")
        x = torch.ones(5, 3, device=device)  # above the largest bucket
        assert torch.equal(captured(x=x), model(x))


# The contract itself


def test_a_contract_names_parameters_buffers_tensors_and_getters(model, device):
    tensor = torch.ones(2, device=device)
    contract = AddressContract({"m": model, "t": tensor, "g": lambda: tensor, "none": lambda: None})
    assert len(contract) == 3 + 1 + 1
    contract.check()
    contract.clear()
    assert len(contract) == 0
    contract.check()


def test_a_contract_keeps_the_memory_and_lets_go_of_it(device):
    owner = {"t": torch.ones(4, device=device)}
    address = owner["t"].data_ptr()
    contract = AddressContract({"t": lambda: owner["t"]})
    owner["t"] = torch.zeros(4, device=device)
    assert owner["t"].data_ptr() != address, "the old memory is held, so it was not given out again"
    with pytest.raises(AddressError, match="moved: t"):
        contract.check()
    held = weakref.ref(contract._held[0])
    contract.clear()
    gc.collect()
    assert held() is None


def test_what_a_function_closes_over_is_found(model, device):
    table = torch.ones(2, device=device)

    def inner(x):
        return model(x) + table + GLOBAL

    found = closed_over(inner)
    assert set(found) == {"model", "table", "GLOBAL"}
    assert closed_over(model) == {"Model": model}
    assert closed_over(model.forward)["Model"] is model
    assert closed_over(len) == {}


GLOBAL = torch.ones(1)


def test_the_watch_tells_outside_memory_from_what_is_made_inside(device):
    outside, view_base = torch.ones(3, device=device), torch.ones(4, device=device)
    with InputWatch() as watch:
        inside = outside * 2
        inside.add_(view_base[1:])
        torch.zeros(3, device=device).add_(inside)
    assert [t.untyped_storage().data_ptr() for t in watch.outside.values()] == [
        outside.data_ptr(), view_base.data_ptr(),
    ]  # fmt: skip


class Owner:
    def __init__(self, model):
        self.model = model

    def step(self, x):
        return self.model(x)

    __call__ = step


def decorated(model):
    def step(x):
        return model(x)

    @functools.wraps(step)
    def outer(**inputs):
        return step(**inputs)

    return outer


REACHES = {
    "method of a plain object": lambda model: Owner(model).step,
    "callable object": Owner,
    "partial": lambda model: functools.partial(lambda m, x: m(x), model),
    "decorated": decorated,
    "no_grad": lambda model: torch.no_grad()(lambda x: model(x)),
    "default": lambda model: eval("lambda x, m=model: m(x)", {"model": model}),
}


@pytest.mark.parametrize("reach", REACHES)
def test_b36_weights_that_moved_are_refused_however_the_function_reaches_them(device, model, reach):
    captured = of(REACHES[reach](model), device)
    captured(x=torch.ones(2, 3, device=device))
    model.fc.weight = nn.Parameter(model.fc.weight + 1, requires_grad=False)
    with pytest.raises(AddressError, match=r"fc\.weight"):
        captured(x=torch.ones(2, 3, device=device))


def test_b36_a_module_that_was_replaced_under_its_own_name_is_refused(device, model):
    owner, current = Owner(model), model
    bound, closure = of(owner.step, device), of(lambda x: current(x), device)
    owner.model = current = Model(device)
    for captured in (bound, closure):
        with pytest.raises(AddressError, match="is another module than was captured"):
            captured(x=torch.ones(2, 3, device=device))


def test_a_module_switched_to_evaluation_is_not_replayed_in_training(device):
    dropout = nn.Sequential(nn.Dropout(0.5)).train()
    captured = of(lambda x: dropout(x), device)
    captured(x=torch.ones(2, 3, device=device))
    dropout.eval()
    with pytest.raises(AddressError, match="training and evaluation"):
        captured(x=torch.ones(2, 3, device=device))
