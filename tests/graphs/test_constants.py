"""Plain Python arguments are baked in by type and content; another value runs eager, with that value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from cglab import Slot, capture
from cglab.errors import AddressError, ClosedError, SlotError
from cglab.graphs.slots import Padding


@dataclass
class Settings:
    factor: float


def scaled(x, factor):
    if isinstance(factor, Settings):
        factor = factor.factor
    return x * (factor[0] if isinstance(factor, list) else factor)


def ones(device):
    return torch.ones(4, dtype=torch.int64, device=device)


def test_the_eager_backend_follows_a_python_value_too(device):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,), backend="eager")
    step(x=ones(device), factor=1)
    assert step(x=ones(device), factor=5).tolist() == [5] * 4
    assert step.coverage().reasons == {"BACKEND_EAGER": 2}


@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (1, True), (0.0, -0.0), ([1], [1.0])])
def test_an_equal_value_of_another_type_is_another_value(device, first, second):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,))
    step(x=ones(device), factor=first)
    want = scaled(ones(device), second)
    got = step(x=ones(device), factor=second)
    assert got.dtype == want.dtype and torch.equal(got, want)
    assert step.coverage().reasons == {"CONSTANT": 1}


@pytest.mark.parametrize("value", [[1], Settings(1)])
def test_a_value_that_was_changed_in_place_is_another_value(device, value):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,))
    step(x=ones(device), factor=value)
    if isinstance(value, list):
        value[0] = 7
    else:
        value.factor = 7
    assert step(x=ones(device), factor=value).tolist() == [7] * 4
    assert step.coverage().reasons == {"CONSTANT": 1}
    assert "now" in step.coverage().last_facts["CONSTANT"]


def test_nan_equals_nan(device):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,))
    step(x=ones(device), factor=float("nan"))
    step(x=ones(device), factor=float("nan"))
    assert step.coverage().captured == 2


@pytest.mark.parametrize("value", [[torch.ones(4)], {"k": (torch.ones(1),)}, np.ones(3), [np.ones(3)]])
def test_a_tensor_or_array_inside_a_python_value_is_refused_by_name(device, value):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,))
    with pytest.raises(SlotError, match="'factor' holds a"):
        step(x=ones(device), factor=value)


def test_a_module_handed_in_is_watched(device):
    step = capture(lambda x, layer: layer(x), slots={"x": Slot()}, buckets=(2,))
    layer = nn.Linear(4, 4, device=device)
    step(x=torch.ones(2, 4, device=device), layer=layer)
    layer.weight = nn.Parameter(torch.zeros(4, 4, device=device))
    with pytest.raises(AddressError, match="layer.weight"):
        step(x=torch.ones(2, 4, device=device), layer=layer)


def test_another_value_runs_with_absent_and_state_slots(device):
    slots = {"x": Slot(), "maybe": Slot(optional=True), "state": Slot(pad=Padding.KEEP)}
    step = capture(
        lambda x, maybe, state, k: x * k + state + (0 if maybe is None else maybe), slots=slots, buckets=(4,)
    )
    step(x=ones(device), state=ones(device), k=1)
    assert step(x=ones(device), k=2).tolist() == [3] * 4


def test_another_value_does_not_run_on_a_closed_step(device):
    step = capture(scaled, slots={"x": Slot()}, buckets=(4,))
    step(x=ones(device), factor=1)
    step.close()
    with pytest.raises(ClosedError):
        step(x=ones(device), factor=2)


@pytest.mark.parametrize("mode", ["autocast", "default dtype"])
def test_a_mode_of_torch_that_changes_eager_is_no_silent_replay(device, mode):
    """A replay would compute in the types of the capture, whatever mode the caller is in now."""
    weight = torch.eye(4, device=device)

    def step(x):
        return (x @ weight) + torch.ones(4, device=x.device)

    x = torch.full((2, 4), 1 / 3, device=device)
    with capture(step, slots={"x": Slot()}, buckets=(2,), strict=True) as captured:
        captured(x=x)
        before = torch.get_default_dtype()
        try:
            if mode == "default dtype":
                torch.set_default_dtype(torch.float64)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mode == "autocast"):
                got, wanted = captured(x=x), step(x)
        finally:
            torch.set_default_dtype(before)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
        assert captured.coverage().reasons == {"CONSTANT": 1}
        assert f"torch {mode}" in captured.coverage().last_facts["CONSTANT"]
        assert torch.equal(captured(x=x), step(x)) and captured.coverage().captured == 2
