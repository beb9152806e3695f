"""``%%cglab_doctor`` in a real IPython shell: the call that a cell ends with is looked at, and told by the cell's lines."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import cglab

CELL = """import torch

def step(x, scale=2.0):
    y = x * scale
    return y[y > 0]

"""


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A shell that nothing was loaded into, and that keeps no history."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell(config=config)


@pytest.fixture
def shell(bare):
    bare.run_line_magic("load_ext", "cglab")
    return bare


def test_findings_are_told_by_the_lines_of_the_cell(shell, capsys):
    shell.run_cell_magic("cglab_doctor", "report", CELL + "step(torch.ones(2, 2), scale=3.0)\n")
    printed = capsys.readouterr().out
    assert "DynamicShapeError at <cell 1>:6 in step: return y[y > 0]" in printed
    assert [each.kind for each in shell.user_ns["report"].findings] == ["DynamicShapeError"]
    assert "step" in shell.user_ns, "what stands before the call runs as in any cell"


def test_arguments_in_stars_and_names_of_earlier_cells_work(shell, capsys):
    shell.run_cell(
        "import torch\ngiven, more = (torch.ones(2),), {'b': torch.ones(2)}\nclass Box:\n    add = staticmethod(torch.add)"
    )
    shell.run_cell_magic("cglab_doctor", "", "Box.add(*given, other=sum(t for t in more.values()))")
    assert capsys.readouterr().out.startswith("nothing found that would break a capture")


@pytest.mark.parametrize("cell", ["x = 1", "def step(x):\n    return x", "1 + 1"])
def test_a_cell_without_a_call_at_its_end_is_refused_before_it_runs(shell, cell):
    with pytest.raises(cglab.errors.InputError, match="must end with the call"):
        shell.run_cell_magic("cglab_doctor", "", "done = True\n" + cell)
    assert "done" not in shell.user_ns


def test_a_report_cannot_have_any_name(shell):
    with pytest.raises(cglab.errors.InputError, match="cannot have that name"):
        shell.run_cell_magic("cglab_doctor", "my report", "int(3)")


def test_an_error_of_the_function_comes_through(shell):
    with pytest.raises(KeyError, match="mine"):
        shell.run_cell_magic("cglab_doctor", "", "def step():\n    raise KeyError('mine')\n\nstep()")


def test_setup_of_a_notebook_brings_the_magic(monkeypatch, bare):
    monkeypatch.setattr("IPython.get_ipython", lambda: bare)
    assert "cglab_doctor" not in bare.magics_manager.magics["cell"]
    cglab.notebook.setup()
    assert "cglab_doctor" in bare.magics_manager.magics["cell"]
