"""Settings of a bench in words: every value of every bench is read, everything else is told."""

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence

import pytest
import torch

from cglab.cli import main
from cglab.commands.bench_settings import read_settings_of
from cglab.errors import InputError
from cglab.lab.benches import BENCHES


def some(
    device: torch.device,
    *,
    quick: bool = False,
    progress: object = None,
    names: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    reuse: Sequence[bool] = (),
    keep: bool | None = None,
    cases: int = 1,
) -> None:
    """A bench with every kind of setting."""


def test_every_kind_of_value_is_read():
    words = ["names=a,b", "dtypes=float32,bfloat16", "reuse=true,false", "keep=false", "cases=7"]
    assert read_settings_of(some, words) == {
        "names": ("a", "b"), "dtypes": (torch.float32, torch.bfloat16), "reuse": (True, False), "keep": False,
        "cases": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("seeds=1", "cases=N"),
        ("cases", "is no setting"),
        ("quick=true", "is no setting"),
        ("case=7", "did you mean cases?"),
        ("cases=many", "good values are N"),
        ("cases=", "an empty value"),
        ("names=", "names= has an empty value in it; good values are NAME"),
        ("names=a,,b", "an empty value"),
        ("dtypes=", "an empty value"),
        ("dtypes=int3", "float32|bfloat16"),
        ("keep=maybe", "true|false"),
    ],
)
def test_what_is_no_setting_is_told_with_the_good_values(word, told):
    with pytest.raises(InputError, match=re.escape(told)):
        read_settings_of(some, [word])


def test_a_setting_given_twice_is_an_error():
    with pytest.raises(InputError, match="set twice"):
        read_settings_of(some, ["cases=1", "cases=2"])


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_tells_its_settings(name):
    with pytest.raises(InputError, match="is no setting of this bench; it has"):
        read_settings_of(BENCHES[name].run, ["nothing=1"])


DECIDED = [(name, each) for name, bench in BENCHES.items() for each in bench.quick]
VALUES = {"caps": "32", "concurrencies": "2", "dtypes": "bfloat16", "padding": "false"}


@pytest.mark.parametrize(("name", "setting"), DECIDED)
def test_a_setting_that_a_quick_run_decides_is_refused_with_all_of_them(name, setting, capsys):
    assert main(["bench", name, "--quick", "--set", f"{setting}={VALUES.get(setting, '9')}"]) == 2
    told = capsys.readouterr().err
    assert f"{setting} would have no effect" in told and ", ".join(BENCHES[name].quick) in told


def lost_in_a_quick_run(bench):
    """Settings that a choice by ``quick`` alone takes or leaves, as the source is written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(bench)))
    settings = set(inspect.signature(bench).parameters) - {"device", "quick", "progress"}

    def names(node):
        return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}

    by_quick = {"quick"} | {
        target.id
        for node in ast.walk(tree) if isinstance(node, ast.Assign) and "quick" in names(node.value)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    decided = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) and names(node.test) <= by_quick
        and "None" not in (ast.unparse(node.body), ast.unparse(node.orelse))  # a target that is not held up then
    ]  # fmt: skip
    return settings & set().union(*(names(node.body) | names(node.orelse) for node in decided))


@pytest.mark.parametrize("name", BENCHES)
def test_what_a_quick_run_decides_is_declared(name):
    assert lost_in_a_quick_run(BENCHES[name].run) <= set(BENCHES[name].quick)


def test_the_look_at_the_source_sees_such_a_choice():
    assert lost_in_a_quick_run(BENCHES["accept"].run) == {"prompts", "new_tokens"}
    assert lost_in_a_quick_run(BENCHES["dflash"].run) == {"new_tokens"}


def test_a_record_s_command_holds_the_settings(tmp_path, monkeypatch):
    words = ["bench", "parity", "--quick", "--set", "techniques=decode", "--set", "dtypes=float32"]
    monkeypatch.setattr("sys.argv", ["cglab", *words, "--record", str(tmp_path)])
    assert main([*words, "--record", str(tmp_path)]) == 0
    (line,) = (tmp_path / "parity.jsonl").read_text().splitlines()
    assert '"techniques=decode"' in line and '"dtypes=float32"' in line


def test_a_bad_setting_is_bad_input(capsys):
    assert main(["bench", "parity", "--set", "cases=0x"]) == 2
    assert "cases=0x: good values are N" in capsys.readouterr().err
