"""A wrong toggle, shape, dtype, folder or checkpoint: one clear error, and no earlier result is lost."""

import json
import shutil

import pytest
import torch

import cglab
from cglab.cli import main
from cglab.errors import InputError, ModelError, SlotError, ToggleError

EARLIER = {
    "results.jsonl": "an earlier result\n",
    "report.html": "<p>an earlier report</p>",
    "00_start_here.ipynb": "{}",
}


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in EARLIER.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def refused(ask, out, monkeypatch):
    """Runs the demo with a setting that is no good; the message, which is one line."""

    def run(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        status, text, error = ask("demo", "--out", out)
        assert (status, text) == (2, "")
        assert error.startswith("cglab: ") and error.count("\n") == 1, error
        assert {path.name: path.read_text() for path in out.iterdir()} == EARLIER
        return error

    return run


@pytest.fixture
def model(root, tmp_path):
    """A copy of the shipped model that may be damaged."""
    folder = tmp_path / "mine"
    shutil.copytree(root / "data" / "models" / "pico-gqa", folder)
    return folder


def test_a_wrong_device(refused):
    assert "good values are auto, cpu, cuda" in refused(CGLAB_DEVICE="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here(refused):
    assert "finds 0 CUDA device(s)" in refused(CGLAB_DEVICE="cuda")


def test_a_model_that_is_not_there(refused):
    assert "pico-gqa" in refused(CGLAB_MODEL="no-such-model")


def test_a_folder_that_is_no_model(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(CGLAB_MODEL=tmp_path / "empty")


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--out", ""), ("bench", "decode", "--record", ""), ("serve-compare", "s3", "--model", ""),
        ("serve-compare", "s3", "--out="), ("serve-compare", "s3", "--variant", " "),
    ],
)  # fmt: skip
def test_an_empty_value_is_neither_this_folder_nor_a_default(words, capsys):
    assert main([*words]) == 2
    assert "the value is empty" in capsys.readouterr().err


def test_an_empty_name_is_no_model_and_no_draft():
    for name, draft in (("", None), ("pico-gqa", "")):
        with pytest.raises(ModelError, match="no (model|draft) ''"):
            cglab.open(name, draft=draft, device="cpu")


@pytest.mark.parametrize("left", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_checkpoint(refused, model, left):
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(left * len(content)) if left < 1 else left])
    assert "model.safetensors" in refused(CGLAB_MODEL=model)


def test_a_config_that_does_not_fit_its_weights(refused, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": config["hidden_size"] * 2}))
    assert "shape" in refused(CGLAB_MODEL=model)


def test_a_wrong_toggle_changes_nothing():
    with cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=64) as lab:
        before = lab.captures.as_dict()
        for name, value, said in (
            ("decode", "fast", "full, breakable, eager"),
            ("decoed", "full", "good names: decode"),
        ):
            with pytest.raises(ToggleError, match=said):
                setattr(lab.captures, name, value)
        assert lab.captures.as_dict() == before
        kept = lab.generate([[1, 2, 3]], 4, stop_at_end=False)
        for prompts, limit, said in (
            ([[1] * 90], 8, "do not fit"),
            ([[-1]], 8, "token ids outside"),
            ([[1.5]], 8, "list of token"),
        ):
            with pytest.raises(InputError, match=said):
                lab.generate(prompts, limit)
        assert lab.generate([[1, 2, 3]], 4, stop_at_end=False).tokens == kept.tokens


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"x": torch.ones(2, 3, 4)}, "axes|shape"),
        ({"x": torch.ones(2, 3, dtype=torch.float64)}, "float64"),
        ({"x": torch.ones(2, 3), "y": torch.ones(1)}, "'y' is a tensor but no slot"),
        ({}, "'x'"),
    ],
)
def test_a_wrong_shape_or_dtype_is_told_by_slot_and_the_recordings_stay(wrong, said):
    with cglab.capture(lambda x: x * 2, slots={"x": cglab.Slot(pad=0.0)}, buckets=(1, 2)) as captured:
        assert captured(x=torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
        with pytest.raises(SlotError, match=said):
            captured(**wrong)
        assert captured(x=torch.full((1, 3), 2.0)).tolist() == [[4.0] * 3]
        assert (captured.coverage().captured, captured.captured_sizes) == (2, [1, 2])
