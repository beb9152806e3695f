"""What an SGLang can be asked for is asked of it, in its own Python; and how to get one is said where there is none."""

import sys
from pathlib import Path

import pytest

from cglab.errors import NotInstalledError, ToggleError
from cglab.serving import installed as module
from cglab.serving.installed import ask, find_python
from tests.serving.conftest import make_python


def test_a_version_tells_its_arguments_variables_and_modules(installed):
    assert installed.version == "0.5.23"
    assert installed.arguments["--tp-size"] == installed.arguments["--tensor-parallel-size"]
    assert installed.argument("--tp-size").default == 1
    assert installed.argument("--dtype").choices == ("auto", "bfloat16", "float32")
    assert not installed.argument("--enable-metrics").takes_value
    assert "SGLANG_FAKE" in installed.variables
    assert installed.modules >= {
        "sglang", "sglang.launch_server", "sglang.srt", "sglang.srt.server_args", "sglang.test.few_shot_gsm8k"
    }  # fmt: skip
    assert all(name.split(".")[0] == "sglang" for name in installed.modules)


def test_it_is_asked_once(installed, monkeypatch):
    monkeypatch.setattr(module.subprocess, "run", None)
    assert ask(installed.python) is installed


def test_two_versions_are_two_answers(tmp_path):
    assert ask(make_python(tmp_path, "0.5.16")).version == "0.5.16"


def test_sglang_is_never_imported_here(installed):
    assert "sglang" not in sys.modules and "vllm" not in sys.modules


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without SGLang, and the folder of an environment that may come."""
    monkeypatch.delenv("CGLAB_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(module, "VENV", tmp_path / "venv" / "python")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    return tmp_path / "venv"


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_order_is_explicit_variable_environment_own(nowhere, monkeypatch, tmp_path):
    with pytest.raises(NotInstalledError, match=r"make test-sglang.*cglab\[sglang\].*CGLAB_SGLANG_PYTHON"):
        find_python()
    monkeypatch.setattr(module, "find_spec", lambda name: name == "sglang")
    assert find_python() == Path(sys.executable)
    venv = executable(nowhere / "python")
    assert find_python() == venv
    named = executable(tmp_path / "named" / "python")
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", str(named))
    assert find_python() == named
    explicit = executable(tmp_path / "explicit" / "python")
    assert find_python(explicit) == explicit


def test_a_python_that_is_named_and_is_none_is_no_reason_to_take_another(nowhere, monkeypatch):
    executable(nowhere / "python")
    with pytest.raises(NotInstalledError, match="is no Python that can be run"):
        find_python("/no/such/python")
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", "/no/such/python")
    with pytest.raises(NotInstalledError, match="/no/such/python"):
        find_python()
    monkeypatch.setenv("CGLAB_SGLANG_PYTHONS", "x")
    with pytest.raises(ToggleError, match="CGLAB_SGLANG_PYTHON"):
        find_python()


def test_a_link_into_an_environment_is_kept(tmp_path):
    """What it points to is the base interpreter, which has none of the environment's packages."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(link) == link


@pytest.mark.parametrize(
    ("body", "said"),
    [("exit 3", "has no SGLang; `make test-sglang`"), ("echo ImportError: libcuda >&2; exit 1", "libcuda; run"), ("exit 1", "said: nothing"),
     ("exit 0", "answers as no Python does: ''"), ("echo hello", "answers as no Python does: 'hello"),
     ("echo '{}'", "answers as no Python does")],
)  # fmt: skip
def test_an_sglang_that_is_not_there_or_does_not_import_is_told(tmp_path, body, said):
    python = executable(tmp_path / "python")
    python.write_text(f"#!/bin/sh\n{body}\n")
    with pytest.raises(NotInstalledError, match=said):
        ask(python)


def test_an_interpreter_without_sglang_says_so(tmp_path):
    """The real question, put to a real interpreter."""
    python = executable(tmp_path / "python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    with pytest.raises(NotInstalledError, match="has no SGLang"):
        ask(python)
