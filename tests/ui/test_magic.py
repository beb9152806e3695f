"""``%%cglab_doctor`` in a real IPython shell: the call that a cell ends with is looked at, and told by the cell's lines."""

from contextlib import nullcontext

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
    assert ": nothing found that would break a capture" in capsys.readouterr().out


@pytest.mark.parametrize("cell", ["x = 1", "def step(x):\n    return x", "1 + 1", "%time int(3)", "!true"])
def test_a_cell_without_a_call_at_its_end_is_refused_before_it_runs(shell, cell):
    with pytest.raises(cglab.errors.InputError, match="must end with the call"):
        shell.run_cell_magic("cglab_doctor", "", "done = True\n" + cell)
    assert "done" not in shell.user_ns


@pytest.mark.parametrize("name", ["my report", "class", "None", "step", "x"])
def test_a_report_cannot_have_a_name_that_is_none_or_that_the_call_uses(shell, name):
    with pytest.raises(cglab.errors.InputError, match="cannot have that name"):
        shell.run_cell_magic("cglab_doctor", name, "done = True\nstep(x)")
    assert "done" not in shell.user_ns


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("step(torch.ones(2, 2), scale=3.0)", "step(torch.ones(2, 2), scale=3.0)\n1. "),
        (
            "step(torch.ones(2, 2)).sum()",
            "step(torch.ones(2, 2)).sum() (its last call only: step(torch.ones(2, 2)) ran before): nothing found",
        ),
    ],
)
def test_the_report_says_which_call_was_looked_at(shell, capsys, call, said):
    shell.run_cell_magic("cglab_doctor", "", CELL + call)
    assert capsys.readouterr().out.startswith(said)


def test_state_of_an_object_that_is_called_keeps_its_name(shell):
    counter = (
        "class Counter:\n    n = 0\n    def __call__(self, x):\n        self.n += 1\n        return x + 1\n\n"
    )
    shell.run_cell_magic("cglab_doctor", "report", f"import torch\n{counter}Counter()(torch.ones(2))")
    (found,) = shell.user_ns["report"].findings
    assert (found.kind, found.place.line) == ("MutatedState", 6) and found.operation.startswith("Counter")


def test_what_a_builtin_does_lies_in_the_line_that_calls_it(shell, capsys):
    shell.run_cell_magic("cglab_doctor", "", "import torch\n\ntorch.nonzero(torch.ones(2))")
    assert (
        "DynamicShapeError at <cell 1>:4 in <module>: torch.nonzero(torch.ones(2))" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("before", "line"),
    [("%time made = 1\n", 7), ("!true\n", 7), ("made = !echo 1\n", 7), ("\n\n", 8)],
    ids=["line magic", "shell", "shell value", "empty lines"],
)
def test_what_stands_before_the_call_runs_as_in_any_cell(shell, capsys, before, line):
    shell.run_cell_magic("cglab_doctor", "report", before + CELL + "step(torch.ones(2, 2))")
    assert shell.user_ns["report"].findings[0].place.line == line
    assert shell.user_ns["report"].findings[0].place.code == "return y[y > 0]"


def test_an_indented_cell_runs(shell, capsys):
    shell.run_cell_magic("cglab_doctor", "", "    import torch\n    torch.ones(2).nonzero()\n")
    assert "DynamicShapeError at <cell 1>:3" in capsys.readouterr().out


def test_an_error_of_the_function_comes_through(shell):
    with pytest.raises(KeyError, match="mine"):
        shell.run_cell_magic("cglab_doctor", "", "def step():\n    raise KeyError('mine')\n\nstep()")


@pytest.mark.parametrize(
    ("argument", "outcome", "left"),
    [("torch.ones(2, 2)", nullcontext(), {"report"}), ("missing", pytest.raises(NameError), set())],
)
def test_cells_see_their_own_names_and_the_report_s_only(shell, argument, outcome, left):
    before = shell.user_ns.keys() | {"torch", "step"}
    with outcome:
        shell.run_cell_magic("cglab_doctor", "report", f"{CELL}step({argument})")
    assert shell.user_ns.keys() - before == left


def test_setup_of_a_notebook_brings_the_magic(monkeypatch, bare):
    monkeypatch.setattr("IPython.get_ipython", lambda: bare)
    assert "cglab_doctor" not in bare.magics_manager.magics["cell"]
    cglab.notebook.setup()
    assert "cglab_doctor" in bare.magics_manager.magics["cell"]
