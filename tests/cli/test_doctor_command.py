"""``cglab doctor FILE:FUNCTION``: where the function comes from, what it is called with, what is said."""

import json
import sys

import pytest
import torch

SOURCE = """
import torch
from torch import nn

{more}

def careful():
    return torch.ones(3) * 2

def reads(x, scale=1.0):
    if x.sum().item() > 0:
        return x * scale
    return x

def fails(x):
    return x.view(7, 7)

class Layer(nn.Module):
    def forward(self, x):
        return x.nonzero()

layer = Layer()
"""


@pytest.fixture
def file(tmp_path):
    def write(more=""):
        path = tmp_path / "model.py"
        path.write_text(SOURCE.format(more=more))
        return path

    return write


TUPLE = "def example_inputs():\n    return (torch.ones(3),)"
OWN_ERROR = "import cglab\ndef mine():\n    raise cglab.errors.NewInputError('my own')\n"
DICT = "def example_inputs():\n    return {'x': torch.ones(3), 'scale': 2.0}"


def test_a_function_without_arguments_is_healthy(ask, file):
    status, out, error = ask("doctor", f"{file()}:careful")
    assert (status, error) == (0, "")
    assert "nothing found that would break a capture" in out


@pytest.mark.parametrize("more", [TUPLE, DICT])
def test_the_first_refusal_its_line_and_its_fix(ask, file, more):
    path = file(more)
    line = 1 + path.read_text().splitlines().index("    if x.sum().item() > 0:")
    status, out, _ = ask("doctor", f"{path}:reads")
    assert status == 1
    assert out.startswith(f"1. HostReadError at {path}:{line} in reads: if x.sum().item() > 0:")
    assert "next step:" in out and "eager_break" in out


def test_json_has_the_findings_and_the_same_status(ask, file):
    path = file(TUPLE)
    status, out, _ = ask("doctor", f"{path}:reads", "--json")
    value = json.loads(out)
    assert (status, value["target"], value["healthy"]) == (1, f"{path}:reads", False)
    assert [each["kind"] for each in value["findings"]] == ["HostReadError"]
    assert value["findings"][0]["file"] == str(path) and value["findings"][0]["advice"]
    status, out, _ = ask("doctor", f"{path}:careful", "--json")
    assert (status, json.loads(out)["findings"]) == (0, [])


def test_a_module_is_a_function_too(ask, file):
    status, out, _ = ask("doctor", f"{file(TUPLE)}:layer")
    assert status == 1
    assert "DynamicShapeError" in out and "x.nonzero()" in out


def test_example_inputs_are_not_forced_on_a_function_without_arguments(ask, file):
    assert ask("doctor", f"{file(TUPLE)}:careful")[0] == 0


@pytest.mark.parametrize(
    ("more", "name", "said"),
    [
        (
            "",
            "reads",
            ["reads(x, scale=1.0)", "missing a required argument: 'x'", "define in", "example_inputs()"],
        ),
        ("def example_inputs():\n    return torch.ones(3)", "reads", ["gives a Tensor", "a tuple", "a dict"]),
        ("def example_inputs():\n    return {'y': 1}", "reads", ["cannot be called", "must fit it"]),
        ("", "raeds", ["'raeds' is no function of", "careful, fails, reads"]),
        (TUPLE, "fails", ["fails itself fails", "RuntimeError", ", line "]),
        ("import no_such_package", "careful", ["cannot be loaded", "ModuleNotFoundError", ", line 5"]),
        ("def broken(:", "careful", ["cannot be loaded", "SyntaxError", "line 5"]),
        ("TEXT = 'x'", "TEXT", ["'TEXT' is no function of"]),
        ("builtin = torch.nonzero", "builtin", ["not written in Python", "a function of yours"]),
        ("example_inputs = (torch.ones(3),)", "reads", ["is a tuple", "make it a function"]),
        (
            "def example_inputs():\n    raise SystemExit(0)",
            "reads",
            ["example_inputs() of", "SystemExit", "line 6"],
        ),
        (
            "def example_inputs():\n    return 1 / 0",
            "reads",
            ["example_inputs() of", "ZeroDivisionError", "line 6"],
        ),
        (
            "def example_inputs(size):\n    return (size,)",
            "reads",
            ["missing 1 required", "takes no argument"],
        ),
        (OWN_ERROR + "mine()", "careful", ["cannot be loaded", "NewInputError: my own"]),
        (OWN_ERROR, "mine", ["mine itself fails", "NewInputError: my own"]),
    ],
)
def test_bad_input_is_one_message(ask, file, more, name, said):
    status, out, error = ask("doctor", f"{file(more)}:{name}")
    assert (status, out) == (2, "")
    assert error.startswith("cglab: ") and "Traceback" not in error
    assert all(word in error for word in said), error


@pytest.mark.parametrize("target", ["model.py", "nowhere.py:step", "model.py:", ":step"])
def test_what_is_no_file_and_function_is_refused(ask, target):
    status, out, error = ask("doctor", target)
    assert (status, out) == (2, "")
    assert "FILE:FUNCTION" in error


def test_what_the_function_prints_is_not_the_answer(ask, file):
    path = file("def chatty():\n    print('hello')\n    return torch.ones(1)")
    status, out, error = ask("doctor", f"{path}:chatty")
    assert status == 0
    assert "hello" not in out and "hello" in error


@pytest.mark.parametrize("where", ["file", "function"])
def test_a_function_that_leaves_the_process_is_not_found_healthy(ask, file, where):
    more = "raise SystemExit(0)" if where == "file" else "def leaves():\n    raise SystemExit(0)"
    status, _, told = ask("doctor", f"{file(more)}:leaves")
    assert status == 2 and "SystemExit" in told


def test_a_file_named_like_a_package_does_not_take_its_place(ask, file):
    path = file()
    ask("doctor", f"{path.rename(path.with_name('torch.py'))}:careful")
    assert sys.modules["torch"] is torch
