"""Reads on the host that hide in a device's name or inside an operator, and what only looks like one."""

import pytest
import torch
import torch.nn.functional as F

import cglab
from cglab.graphs.cuda_errors import explain

HOST = torch.device("cpu")  # a module that was built on a CPU keeps such a one
COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
"""What torch says of a copy, in either direction."""


def grouped(x, dtype):
    """[2, 8]: each row of x [2, 2] by a matrix of its own."""
    ends = torch.arange(1, 3, dtype=torch.int32)
    rows = x.to(dtype).repeat(1, 4)
    return F.grouped_mm(rows, rows.repeat(2, 4, 1), offs=ends)


@pytest.mark.parametrize(
    ("step", "operation"),
    [
        (lambda x: x.to("cpu") * 2, "Tensor.to"),
        (lambda x: x.to("cpu:0") * 2, "Tensor.to"),
        (lambda x: x.to(torch.device("cpu")) * 2, "Tensor.to"),
        (lambda x: x.to(device=torch.device("cpu", 0)) * 2, "Tensor.to"),
        (lambda x: x.to(torch.device(type="cpu"), torch.float64) * 2, "Tensor.to"),
        (lambda x: torch.linalg.inv(x), "aten::_linalg_check_errors"),
        (lambda x: torch.linalg.solve(x, x), "aten::_linalg_check_errors"),
        (lambda x: torch.linalg.cholesky_ex(x, check_errors=True).L, "aten::linalg_cholesky_ex"),
        (lambda x: grouped(x, torch.float32), "aten::_grouped_mm"),
        (lambda x: grouped(x, torch.float16), "aten::_grouped_mm"),
    ],
)
def test_a_read_on_the_host_is_refused_by_doctor_and_capture(step, operation):
    found = cglab.doctor(step, torch.eye(2)).findings
    assert [(each.kind, each.operation) for each in found] == [("HostReadError", operation)]
    with (
        cglab.capture(step, slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,), strict=True) as captured,
        pytest.raises(cglab.errors.HostReadError),
    ):
        captured(x=torch.eye(2))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.to(x.device) * 2,
        lambda x: x.to(HOST) * 2,
        lambda x: x.to("cuda") * 2,
        lambda x: x.to(torch.device("cuda")) * 2,
        lambda x: x.to(torch.float64) * 2,
        lambda x: torch.linalg.cholesky_ex(x).L,
        lambda x: grouped(x, torch.bfloat16),
        lambda x: F.grouped_mm(x.repeat(3, 4, 4), x.repeat(3, 4, 4)),  # a batch has no groups
    ],
)
def test_what_stays_on_the_device_of_the_tensor_is_no_read(step):
    assert cglab.doctor(step, torch.eye(2)).healthy


def test_a_grouped_product_that_copies_its_groups_is_explained_as_a_read_and_a_tensor_that_is_moved_is_not():
    """A real capture says the same of both, and the line of both has a ``.to``."""
    grouped_mm, x = torch._check, torch.ones(2)  # raises from within torch, as the product does

    def explained(step):
        with pytest.raises(RuntimeError) as raised:
            step()
        return type(explain(raised.value))

    assert explained(lambda: grouped_mm(x.to(torch.int64) is x, lambda: COPY)) is cglab.errors.HostReadError
    assert explained(lambda: torch._check(x.to("meta") is x, lambda: COPY)) is cglab.errors.NewInputError


def test_flat_weights_that_are_seen_through_their_storage_are_no_hazard():
    """cuDNN's layers point an empty tensor at the memory of their parameters, which looks like a move."""
    weights = torch.arange(4.0).view(2, 2)

    def step(x):
        flat = torch.empty(0).set_(weights.untyped_storage())
        flat.add_(1)
        return x @ flat.view(2, 2)

    x = torch.eye(2)
    report = cglab.doctor(step, x)
    assert report.healthy, str(report)
    with cglab.capture(step, slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,), strict=True) as captured:
        assert torch.equal(
            captured(x=x), torch.arange(4.0).view(2, 2) + 1
        )  # no run but this one left a trace
        weights.sub_(1)
        assert torch.equal(
            weights, torch.arange(4.0).view(2, 2)
        )  # what was written through the view is undone
        weights.mul_(10)
        assert torch.equal(captured(x=x), torch.arange(4.0).view(2, 2) * 10 + 1)
        assert torch.equal(weights, torch.arange(4.0).view(2, 2) * 10 + 1)
        assert captured.coverage().share == 1


@pytest.mark.parametrize(
    "move", [lambda y: y.set_(y + 1), lambda y: y.set_(torch.ones(2).untyped_storage()), torch.Tensor.set_]
)
def test_a_tensor_that_is_moved_from_its_memory_is_refused(move):
    def step(x):
        y = x * 2
        move(y)
        return x + 1

    (found,) = cglab.doctor(step, torch.eye(2)).findings
    assert (found.kind, found.operation) == ("UnsupportedOperationError", "aten::set_")


def test_a_number_that_a_mask_writes_is_captured_and_a_tensor_of_the_device_is_refused():
    """torch fills in the first case; in the second it counts the mask's elements on the host."""
    zero = torch.zeros(())

    def filled(x):
        y = x * 2
        y[y > 2] = 0.0
        return y

    def put(x):
        y = x * 2
        y[y > 2] = zero
        return y

    (found,) = cglab.doctor(put, torch.eye(2)).findings
    assert found.kind == "DynamicShapeError"
    with cglab.capture(filled, slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,), strict=True) as captured:
        for x in (torch.eye(2), torch.arange(4.0).view(2, 2)):
            assert torch.equal(captured(x=x), filled(x))
        assert captured.coverage().share == 1
