"""Reads on the host that hide in a device's name or inside an operator, and what only looks like one."""

import pytest
import torch

import cglab

HOST = torch.device("cpu")  # a module that was built on a CPU keeps such a one


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
    ],
)
def test_what_stays_on_the_device_of_the_tensor_is_no_read(step):
    assert cglab.doctor(step, torch.eye(2)).healthy
