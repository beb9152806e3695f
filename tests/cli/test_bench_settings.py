"""Settings of a bench in words: every value of every bench is read, everything else is told."""

import re
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
        ("cases=many", "good values are N"),
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


def test_a_record_s_command_holds_the_settings(tmp_path, monkeypatch):
    words = ["bench", "parity", "--quick", "--set", "techniques=decode", "--set", "dtypes=float32"]
    monkeypatch.setattr("sys.argv", ["cglab", *words, "--record", str(tmp_path)])
    assert main([*words, "--record", str(tmp_path)]) == 0
    (line,) = (tmp_path / "parity.jsonl").read_text().splitlines()
    assert '"techniques=decode"' in line and '"dtypes=float32"' in line


def test_a_bad_setting_is_bad_input(capsys):
    assert main(["bench", "parity", "--set", "cases=0x"]) == 2
    assert "cases=0x: good values are N" in capsys.readouterr().err
