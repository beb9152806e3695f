"""What cells say must hold on every machine, so the helpers refuse measurements and speak in words."""

import sys
import types

import pytest

from cglab import notebook
from cglab.errors import DeviceError, InputError, ToggleError


@pytest.fixture
def styled(monkeypatch):
    """Counts how often the plots are styled, without loading plotly."""
    calls = []
    plots = types.ModuleType("cglab.ui.plots")
    plots.register_template = lambda: calls.append("styled")
    monkeypatch.setitem(sys.modules, "cglab.ui", types.ModuleType("cglab.ui"))
    monkeypatch.setitem(sys.modules, "cglab.ui.plots", plots)
    monkeypatch.setenv("CGLAB_DEVICE", "cpu")
    return calls


def test_setup_prints_the_same_for_every_model(styled, monkeypatch, capsys):
    bench = notebook.setup()
    first = capsys.readouterr().out
    monkeypatch.setenv("CGLAB_MODEL", "qwen3-8b")
    other = notebook.setup()
    assert capsys.readouterr().out == first
    assert styled == ["styled", "styled"]
    assert (bench.device, bench.model, bench.has_cuda) == ("cpu", "pico-gqa", False)
    assert (other.model, notebook.model_name()) == ("qwen3-8b", "qwen3-8b")


def test_setup_refuses_a_bad_setting_before_it_styles_anything(styled, monkeypatch):
    monkeypatch.setenv("CGLAB_DEVICE", "gpu")
    with pytest.raises(ToggleError, match="CGLAB_DEVICE='gpu'"):
        notebook.setup()
    assert styled == []


def test_setup_refuses_cuda_where_there_is_none(styled, monkeypatch):
    monkeypatch.setenv("CGLAB_DEVICE", "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError):
        notebook.setup()


def test_fact_prints_a_fact_and_refuses_a_measurement(capsys):
    notebook.fact("graphs captured", 4)
    notebook.fact("outputs equal", value=True)
    assert capsys.readouterr().out == "graphs captured: 4\noutputs equal: True\n"
    with pytest.raises(InputError, match=r"step time is the measurement 0\.5"):
        notebook.fact("step time", 0.5)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (1.0, "within 1 to 3"),
        (3.0, "within 1 to 3"),
        (0.99, "below 1"),
        (3.01, "above 3"),
        (float("nan"), "not a number"),
    ],
)
def test_within_says_a_word(value, word):
    assert notebook.within(value, 1, 3) == word


def test_within_refuses_bounds_out_of_order():
    with pytest.raises(InputError, match="3 and 1"):
        notebook.within(2.0, 3, 1)


def test_not_run_says_why_and_what_is_shown_instead(capsys):
    notebook.not_run("no CUDA device")
    notebook.not_run("no CUDA device", recorded="an H200 on 2026-11-29")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "not run: no CUDA device"
    assert second == "not run: no CUDA device; recorded on an H200 on 2026-11-29:"
