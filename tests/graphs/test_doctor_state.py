"""Python state that a call changes is told at its line, wherever it is kept; what only looks changed is none."""

import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import cglab

CASES = tomllib.loads(Path(__file__).with_name("doctor_state.toml").read_text())


def planted(tmp_path, source):
    """The function, and the numbers of the lines that are marked with ``#``."""
    text = CASES["head"] + textwrap.dedent(source)
    file = tmp_path / "planted.py"
    file.write_text(text)
    scope = {"__name__": "planted"}
    exec(compile(text, str(file), "exec"), scope)
    return scope["step"], {i for i, line in enumerate(text.splitlines(), 1) if line.endswith("#")}


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module named as what ``planted`` defines, so that its classes are the user's."""
    known = ModuleType("planted")
    known.__file__ = str(tmp_path / "planted.py")
    monkeypatch.setitem(sys.modules, "planted", known)


@pytest.mark.parametrize("name", CASES["changed"])
def test_state_that_a_call_changes_is_told_at_its_line(tmp_path, module, name):
    step, lines = planted(tmp_path, CASES["changed"][name])
    report = cglab.doctor(step, torch.ones(2, 2))
    found = {each.place.line for each in report.findings if each.kind == "MutatedState"}
    assert found == lines and len(lines) == 1, str(report)


@pytest.mark.parametrize("name", CASES["unchanged"])
def test_an_equal_value_in_a_new_object_is_no_change(tmp_path, module, name):
    source = f"""
        class Step(nn.Module):
            known = [1, 2]
            def forward(self, x):
                {CASES["unchanged"][name]}
                return x * 2
        step = Step()
        """
    report = cglab.doctor(planted(tmp_path, source)[0], torch.ones(2, 2))
    assert report.healthy, str(report)
    changing = source.replace("return", "st['n'] += 1\n                return")
    assert not cglab.doctor(planted(tmp_path, changing)[0], torch.ones(2, 2)).healthy


def test_an_input_named_as_the_function_hides_nothing_of_it():
    calls = {"n": 0}

    def bias(x, bias, function):
        calls["n"] += 1
        return x + bias + function

    report = cglab.doctor(bias, x=torch.ones(2), bias=1.0, function=2.0)
    assert [each.kind for each in report.findings] == ["MutatedState"]

    def shift(x, shift):
        own.total += 1
        return x + shift.by

    own, shift.total = shift, 0
    report = cglab.doctor(shift, x=torch.ones(2), shift=SimpleNamespace(total=0, by=1.0))
    assert [each.kind for each in report.findings] == ["MutatedState"]


class Hostile(dict):
    """Answers nothing."""

    def _refuse(self, *_):
        raise RuntimeError("not for you")

    items = keys = values = get = __repr__ = __len__ = __iter__ = __getattr__ = _refuse

    def __hash__(self):
        return 1


class HostileList(list):
    def _refuse(self, *_):
        raise RuntimeError("not for you")

    __repr__ = __len__ = __iter__ = __getitem__ = _refuse


def test_objects_whose_methods_raise_are_looked_at_without_them():
    hostile, table, items = Hostile(one=1), {Hostile(): 1}, HostileList([1])

    def step(x):
        assert all(each is not None for each in (hostile, table, items))
        return x * 2

    assert cglab.doctor(step, torch.ones(2)).healthy

    def changing(x):
        dict.__setitem__(hostile, "one", hostile["one"] + 1)
        return x * 2

    assert [each.kind for each in cglab.doctor(changing, torch.ones(2)).findings] == ["MutatedState"]


def test_a_profilers_handle_is_no_baked_value():
    def step(x):
        with torch.profiler.record_function("a"):
            return x * 2

    report = cglab.doctor(step, torch.ones(2))
    assert report.healthy, str(report)


@pytest.mark.parametrize("ask", ["requires_grad", "parameter", "same", "other"])
def test_inputs_of_other_values_are_of_the_same_kind(ask):
    asked = {
        "requires_grad": lambda x, y: x.requires_grad,
        "parameter": lambda x, y: isinstance(x, torch.nn.Parameter),
        "same": lambda x, y: x is y,
        "other": lambda x, y: x is not y,
    }[ask]
    paths = []

    def step(x, y, z):
        paths.append(asked(x, y))
        return x * 2 if paths[-1] else x + 1

    x = torch.nn.Parameter(torch.ones(2)) if ask == "parameter" else torch.ones(2, requires_grad=True)
    y = torch.ones(2) if ask == "other" else x
    kinds = {each.kind for each in cglab.doctor(step, x, y=y, z=torch.ones(2)).findings}
    assert kinds == {"MutatedState"} and set(paths) == {True}
