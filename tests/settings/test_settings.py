"""Every variable has good values, and anything else is an error that names them."""

from pathlib import Path

import pytest
import torch

from cglab.errors import DeviceError, ModelError, NotInstalledError, ToggleError
from cglab.models.drafts import find_draft
from cglab.models.sources import find_folder
from cglab.serving.arm import model_path
from cglab.serving.installed import find_python
from cglab.settings import KILL_SWITCHES, Settings, device, read_settings


def test_defaults(root):
    assert read_settings({}) == Settings(device="auto", model="pico-gqa", data=root / "data")
    assert read_settings({"CGLAB_DEVICE": "", "CGLAB_MODEL": "", "CGLAB_DATA": ""}) == read_settings({})


def test_every_variable_is_read(tmp_path):
    given = {"CGLAB_DEVICE": "cpu", "CGLAB_MODEL": "qwen3-8b", "CGLAB_DATA": str(tmp_path)}
    assert read_settings(given) == Settings(device="cpu", model="qwen3-8b", data=tmp_path)


@pytest.mark.parametrize(("given", "ops"), [("", None), ("auto", None), ("portable", "portable")])
def test_ops_are_the_devices_own_unless_a_form_is_named(given, ops):
    assert read_settings({"CGLAB_OPS": given}).ops == ops


@pytest.mark.parametrize("switch", KILL_SWITCHES)
def test_nothing_is_switched_off_unless_its_variable_says_so(switch):
    assert read_settings({switch: ""}).switches == read_settings({switch: "0"}).switches == frozenset()
    assert read_settings({switch: "1"}).switches == {switch}
    with pytest.raises(ToggleError, match=f"{switch}='yes' is no switch"):
        read_settings({switch: "yes"})


@pytest.mark.parametrize(
    ("given", "python"), [("", None), ("some/python", Path("some/python")), ("~/p", Path.home() / "p")]
)
def test_the_python_of_servers_is_only_named(given, python):
    assert read_settings({"CGLAB_SGLANG_PYTHON": given}).sglang_python == python


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("CGLAB_MODEL", "llama-3.1-8b")
    assert read_settings().model == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"CGLAB_DEVICE": "gpu"}, ["CGLAB_DEVICE", "'gpu'", "auto, cpu, cuda"]),
        ({"CGLAB_DEVICE": "CUDA"}, ["'CUDA'", "auto, cpu, cuda"]),
        ({"CGLAB_OPS": "fast"}, ["CGLAB_OPS", "'fast'", "auto, portable, compiled"]),
        ({"CGLAB_DISABLE_SEED_GRAPH": "yes"}, ["CGLAB_DISABLE_SEED_GRAPH", "'yes'", "0, 1"]),
        ({"CGLAB_DATA": "no/such/folder"}, ["CGLAB_DATA", "'no/such/folder'", "existing folder"]),
        (
            {"CGLAB_DEVCIE": "cpu"},
            ["CGLAB_DEVCIE", "CGLAB_DATA, CGLAB_DEVICE, CGLAB_DISABLE_DSA_ATTENTION_GRAPH"],
        ),
    ],
)
def test_bad_value_names_variable_value_and_good_values(given, said):
    with pytest.raises(ToggleError) as caught:
        read_settings(given)
    assert all(word in str(caught.value) for word in said)


def asked(name: str) -> Settings:
    return Settings(device=name, model="pico-gqa", data=Path())


@pytest.mark.parametrize(
    ("name", "present", "expected"),
    [
        ("cpu", True, torch.device("cpu")),
        ("cpu", False, torch.device("cpu")),
        ("auto", False, torch.device("cpu")),
        ("auto", True, torch.device("cuda", 1)),
        ("cuda", True, torch.device("cuda", 1)),
    ],
)
def test_device_is_what_is_asked_for_and_there(monkeypatch, name, present, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: present)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert device(asked(name)) == expected


def test_cuda_that_is_not_there_is_an_error_not_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"CGLAB_DEVICE='cuda'.*auto, cpu"):
        device(asked("cuda"))


@pytest.mark.parametrize(
    ("find", "kind"),
    [
        (find_folder, ModelError),
        (find_draft, ModelError),
        (model_path, ModelError),
        (find_python, NotInstalledError),
    ],
)
def test_the_home_of_a_user_who_is_unknown_is_a_clear_error(find, kind, monkeypatch):
    with pytest.raises(kind, match="~nobody-of-this-name"):
        find("~nobody-of-this-name/models/x")
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", "~nobody-of-this-name/python")
    assert str(read_settings().sglang_python).startswith("~nobody")
