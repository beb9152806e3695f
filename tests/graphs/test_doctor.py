"""The doctor: every hazard at the line where it was planted, and nothing in a clean function."""

import pytest
import torch

import cglab

PLANTED = {
    "item": ("n = x.sum().item()", "HostReadError"),
    "tolist": ("n = x.tolist()[0][0]", "HostReadError"),
    "numpy": ("n = float(x.numpy()[0, 0])", "HostReadError"),
    "branch": ("n = 1 if x.sum() > 0 else 2", "HostReadError"),
    "int": ("n = int(x[0, 0])", "HostReadError"),
    "format": ("n = len(f'{x.sum()}')", "HostReadError"),
    "to cpu": ("n = x.cpu()[0, 0] * 1", "HostReadError"),
    "in": ("n = 1.0 * (3.0 in x)", "HostReadError"),
    "mask": ("n = x[x > 0].sum()", "DynamicShapeError"),
    "nonzero": ("n = x.nonzero().sum()", "DynamicShapeError"),
    "masked_select": ("n = x.masked_select(x > 0).sum()", "DynamicShapeError"),
    "unique": ("n = x.unique().sum()", "DynamicShapeError"),
    "repeat": ("n = x.repeat_interleave(torch.ones(2, dtype=torch.int64), 0).sum()", "DynamicShapeError"),
    "new tensor": ("n = torch.tensor([1.0, 2.0]).sum()", "NewInputError"),
    "from_numpy": ("n = torch.from_numpy(__import__('numpy').ones(2)).sum()", "NewInputError"),
    "resize": ("n = x.clone().resize_(1).sum()", "UnsupportedOperationError"),
    "set": ("n = x.clone().set_(x).sum()", "UnsupportedOperationError"),
}


def write(tmp_path, line, decorate=""):
    """A module with the line in the middle of a function; returns the function, its file and the line's number."""
    text = f"import torch\nimport cglab\n\n\n{decorate}def step(x):\n    y = x * 2\n    {line}\n    return y + n\n"
    file = tmp_path / "planted.py"
    file.write_text(text)
    scope = {"__name__": "planted"}
    exec(compile(text, str(file), "exec"), scope)
    return scope["step"], str(file), text.splitlines().index(f"    {line}") + 1


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_hazard_is_found_at_its_line(tmp_path, name):
    line, kind = PLANTED[name]
    step, file, number = write(tmp_path, line)
    report = cglab.doctor(step, x=torch.ones(2, 2))
    assert [(f.kind, f.place.file, f.place.line, f.place.code) for f in report.findings] == [
        (kind, file, number, line)
    ]
    assert not report.healthy
    assert report.findings[0].advice and report.findings[0].effect
    assert f"{file}:{number}" in str(report) and "next step" in str(report)


@pytest.mark.parametrize("name", PLANTED)
def test_the_same_hazard_inside_a_break_is_none(tmp_path, name):
    step, _, _ = write(tmp_path, PLANTED[name][0], "@cglab.eager_break\n")

    def outer(x):
        return step(x) * 2

    assert cglab.doctor(outer, x=torch.ones(2, 2)).healthy


@pytest.mark.parametrize("name", PLANTED)
def test_what_the_doctor_finds_a_capture_refuses_and_the_other_way_round(tmp_path, name):
    line, kind = PLANTED[name]
    step, _, number = write(tmp_path, line)
    captured = cglab.capture(step, slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,), strict=True)
    with pytest.raises(cglab.errors.CaptureError) as caught:
        captured(x=torch.ones(2, 2))
    assert type(caught.value).__name__ == kind and caught.value.place.line == number
    captured.close()


def test_one_run_finds_them_all_in_order(tmp_path):
    def step(x):
        a = x[x > 0].sum()
        b = x.sum().item()
        c = torch.tensor([1.0, 2.0])
        return a + b + c

    report = cglab.doctor(step, x=torch.ones(2, 2))
    assert [finding.kind for finding in report.findings] == [
        "DynamicShapeError",
        "HostReadError",
        "NewInputError",
    ]
    assert [str(report).count(f"{i}. ") for i in (1, 2, 3)] == [1, 1, 1]


def test_a_hazard_in_a_helper_is_told_at_the_helpers_line():
    def helper(x):
        return x.sum().item()

    report = cglab.doctor(lambda x: x * helper(x), x=torch.ones(2, 2))
    assert report.findings[0].place.function == "helper"


def test_a_hazard_in_a_loop_is_told_once():
    def step(x):
        return sum(x.sum().item() for _ in range(5))

    assert len(cglab.doctor(step, x=torch.ones(2, 2)).findings) == 1


CLEAN = {
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(2, 2)),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
    "where": lambda x: torch.where(x > 0, x, -x),
    "index": lambda x: x[torch.arange(2)],
    "put": lambda x: torch.zeros(4, 2).index_copy_(0, torch.arange(2), x),
    "topk": lambda x: x.topk(1, -1),
    "static": lambda x: x.nonzero_static(size=2),
    "shape branch": lambda x: x * 2 if x.shape[0] > 1 else x,
    "scalar fill": lambda x: x.clone().fill_(3.0),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_function_is_healthy(name):
    report = cglab.doctor(CLEAN[name], x=torch.ones(2, 2))
    assert report.healthy, str(report)
    assert str(report).startswith("nothing found that would break a capture")


def test_the_doctor_undoes_what_the_function_writes():
    state = torch.zeros(3)
    cglab.doctor(lambda x: state.add_(x.sum()), x=torch.ones(2, 2))
    assert state.tolist() == [0] * 3


def test_the_functions_own_error_comes_through():
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cglab.doctor(step, x=torch.ones(2, 2))
    assert cglab.doctor(CLEAN["where"], x=torch.ones(2, 2)).healthy, "and leaves nothing behind"


def test_positional_inputs_and_no_inputs_work():
    assert cglab.doctor(lambda x, y: x + y, torch.ones(2), torch.ones(2)).healthy
    assert not cglab.doctor(lambda: torch.ones(2).sum().item()).healthy
