"""nbval proves little about a notebook that stores nothing; these guards close that gap."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from scripts import refresh_notebooks
from scripts.refresh_notebooks import FOLDER, WIDGET_VIEW, normal_form, problems, refresh

STORED = sorted(FOLDER.glob("*.ipynb"))
CHECKED = "# NBVAL_CHECK_OUTPUT\nprint('graphs captured: 4')"


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    notebook = normal_form(new_notebook(cells=list(cells)))
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return path


def good_cell(source: str = CHECKED, **fields) -> nbformat.NotebookNode:
    stream = new_output("stream", name="stdout", text="graphs captured: 4\n")
    return new_code_cell(source, **{"execution_count": 1, "outputs": [stream], **fields})


def figure(title: dict | None) -> nbformat.NotebookNode:
    data = {refresh_notebooks.PLOTLY: {"data": [], "layout": {"title": title} if title else {}}}
    return new_output("display_data", data=data)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_notebook_is_well(path):
    assert problems(path) == []


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_n07_n08_n10_checked_cells_hold_printed_text_that_names_no_device_and_figures_are_small(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        if refresh_notebooks.is_checked(cell):
            assert {output.output_type for output in cell.outputs} == {"stream"}
            text = "".join(output.text for output in cell.outputs)
            assert not {"cuda", "cuda:0", "cpu", "tape"} & set(text.replace(",", " ").split()), text
        for output in cell.outputs:
            assert len(json.dumps(output)) < 400_000, cell.source


def test_good_notebook_has_no_problem(tmp_path):
    plot = new_code_cell("figure", execution_count=2, outputs=[figure({"text": "Replay time"})])
    prose = [new_markdown_cell("# Capture"), new_markdown_cell("Now the plot.")]
    assert problems(write(tmp_path / "good.ipynb", prose[0], good_cell(), prose[1], plot)) == []


@pytest.mark.parametrize(
    ("fault", "cells"),
    [
        ("never executed", [good_cell(execution_count=None)]),
        (
            "ends in a value",
            [good_cell(outputs=[new_output("execute_result", data={"text/plain": "4"}, execution_count=1)])],
        ),
        ("stores no output", [good_cell(outputs=[])]),
        ("stores no output", [good_cell("4", outputs=[], metadata={"tags": ["nbval-check-output"]})]),
        ("13 lines", [good_cell(CHECKED + "\nx = 1" * 11)]),
        ("no cell is checked", [good_cell("print('graphs captured: 4')")]),
        ("2 code cells but only 1 text cells", [good_cell(), good_cell()]),
        ("without a title", [good_cell(outputs=[figure(None)])]),
        ("without a title", [good_cell(outputs=[figure({"text": ""})])]),
        ("standard error", [good_cell(outputs=[new_output("stream", name="stderr", text="careful")])]),
        (
            "stores an error: ValueError: no",
            [good_cell(outputs=[new_output("error", ename="ValueError", evalue="no")])],
        ),
    ],
)
def test_planted_fault_is_named(tmp_path, fault, cells):
    found = problems(write(tmp_path / "faulty.ipynb", new_markdown_cell("# Fault"), *cells))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda notebook: notebook.metadata.update(widgets={"state": {}}),
        lambda notebook: notebook.metadata.update(language_info={"name": "python", "version": "3.11.7"}),
        lambda notebook: notebook.metadata.kernelspec.update(name="someones-own"),
        lambda notebook: notebook.cells[1].metadata.update(execution={"iopub.execute_input": "now"}),
        lambda notebook: notebook.cells[1].outputs.append(
            new_output("display_data", data={WIDGET_VIEW: {"model_id": "1f"}, "text/plain": "Checkbox()"})
        ),
    ],
    ids=["widget state", "interpreter version", "kernel name", "time stamps", "widget view"],
)
def test_normal_form_drops_what_differs_between_runs(tmp_path, spoil):
    path = write(tmp_path / "spoilt.ipynb", new_markdown_cell("# Capture"), good_cell())
    whole = path.read_text()
    notebook = nbformat.reads(whole, as_version=4)
    spoil(notebook)
    path.write_text(nbformat.writes(notebook) + "\n")
    assert any("normal form" in problem for problem in problems(path))
    assert nbformat.writes(normal_form(notebook)) + "\n" == whole


def test_refresh_is_idempotent_and_leaves_a_well_notebook(tmp_path):
    widget = new_code_cell("import ipywidgets\nipywidgets.Checkbox(description='padding')")
    prose = [new_markdown_cell("# Capture"), new_markdown_cell("A toggle.")]
    path = write(tmp_path / "new.ipynb", prose[0], new_code_cell(CHECKED), prose[1], widget)
    assert len(problems(path)) == 3
    assert refresh(path)
    assert problems(path) == []
    stored = path.read_bytes()
    assert not refresh(path)
    assert path.read_bytes() == stored
    cells = json.loads(stored)["cells"]
    assert cells[1]["outputs"][0]["text"] == ["graphs captured: 4\n"]
    assert cells[3]["outputs"] == []


def test_kernel_is_the_interpreter_that_refreshes_and_ends_with_it(tmp_path, monkeypatch):
    foreign = tmp_path / "kernels" / "python3"
    foreign.mkdir(parents=True)
    spec = {"argv": ["false"], "display_name": "Python 3", "language": "python"}
    (foreign / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    source = "# NBVAL_CHECK_OUTPUT\nimport os, sys\nprint(sys.executable, os.getpid())"
    path = write(tmp_path / "kernel.ipynb", new_markdown_cell("# Kernel"), new_code_cell(source))
    refresh(path)
    executable, process = json.loads(path.read_text())["cells"][1]["outputs"][0]["text"][0].split()
    assert executable == sys.executable
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_failing_cell_keeps_the_old_file_and_the_next_notebook_runs(tmp_path, capsys):
    bad = write(tmp_path / "bad.ipynb", new_markdown_cell("# Bad"), good_cell(CHECKED + "\n1 / 0"))
    fine = write(tmp_path / "fine.ipynb", new_markdown_cell("# Fine"), new_code_cell(CHECKED))
    before = bad.read_bytes()
    assert refresh_notebooks.main([str(bad), str(fine)]) == 1
    assert bad.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert problems(fine) == []


def test_full_disk_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = write(tmp_path / "kept.ipynb", new_markdown_cell("# Kept"), good_cell())
    before = path.read_bytes()

    def full(*_):
        message = "No space left on device"
        raise OSError(28, message)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        refresh_notebooks._replace(path, "half a noteb")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_check_exits_1_and_executes_nothing(tmp_path, capsys):
    path = write(tmp_path / "unrun.ipynb", new_markdown_cell("# Unrun"), new_code_cell(CHECKED))
    before = path.read_bytes()
    assert refresh_notebooks.main(["--check", str(path)]) == 1
    assert "never executed" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_file_that_is_no_notebook_is_said_and_left(tmp_path, capsys):
    path = tmp_path / "torn.ipynb"
    path.write_text('{"cells": [')
    assert refresh_notebooks.main([str(path)]) == 1
    assert "torn.ipynb: is not a notebook" in capsys.readouterr().err
    assert path.read_text() == '{"cells": ['


@pytest.fixture
def project(tmp_path, root):
    """A folder with this project's own pytest settings and one notebook."""
    for name in ("pyproject.toml", "conftest.py", "tests/notebooks/sanitize.cfg"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((root / name).read_text())
    (tmp_path / "notebooks").mkdir()
    return tmp_path


@pytest.mark.parametrize(("stored", "status"), [("0x7f00beef", 0), ("another word", 1)])
def test_nbval_compares_and_sanitizes_from_any_folder(project, stored, status):
    source = "# NBVAL_CHECK_OUTPUT\nprint(hex(id(object())))"
    stream = new_output("stream", name="stdout", text=stored + "\n")
    cells = [new_markdown_cell("# Address"), good_cell(source, outputs=[stream])]
    write(project / "notebooks" / "address.ipynb", *cells)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "address.ipynb"],
        cwd=project / "notebooks",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == status, run.stdout + run.stderr
