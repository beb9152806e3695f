"""Execute the notebooks and store them in normal form, or check that they are.

    python scripts/refresh_notebooks.py              execute and store all of notebooks/
    python scripts/refresh_notebooks.py FILE...      only these
    python scripts/refresh_notebooks.py --check      execute nothing; exit 1 and name what is wrong

Normal form keeps what a reader needs (outputs, execution counts, cell ids) and drops what differs from run to
run or machine to machine: times, widget state and views, the interpreter's version and kernel name. A checked
cell that was stored without an execution count is not compared by nbval and passes in silence: that is why
``--check`` exists.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import cast

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.reader import NotJSONError
from nbstripout import strip_output

from cglab.commands.kernels import CELL_SECONDS, execute

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
LONGEST_CELL = 12  # lines; what is longer belongs into the library

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"
_CHECK_COMMENT = re.compile(r"^\s*#\s*NBVAL_CHECK_OUTPUT\b", re.MULTILINE)
_DROPPED_KEYS = ["metadata.widgets", "cell.metadata.execution"]


def normal_form(notebook: NotebookNode) -> NotebookNode:
    """A copy of the notebook in normal form; the normal form of a normal form is itself."""
    normal: NotebookNode = strip_output(
        deepcopy(notebook), keep_output=True, keep_count=True, keep_id=True, extra_keys=_DROPPED_KEYS
    )
    normal.metadata.language_info = {"name": "python"}
    normal.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for cell in _code_cells(normal):
        cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
    return normal


def refresh(path: Path, *, cell_seconds: int = CELL_SECONDS) -> bool:
    """Execute one notebook and store it in normal form, whole or not at all.

    Returns:
        Whether the stored file changed.
    """
    before = path.read_text(encoding="utf-8")
    after = _text(normal_form(execute(_parse(before), path.parent, cell_seconds=cell_seconds)))
    if after == before:
        return False
    _replace(path, after)
    return True


def problems(path: Path) -> list[str]:
    """What is wrong with one stored notebook, as one sentence each; empty when it is well."""
    text = path.read_text(encoding="utf-8")
    notebook = _parse(text)
    found = [] if text == _text(normal_form(notebook)) else ["not in normal form: run `make refresh`"]
    code = [cell for cell in _code_cells(notebook) if cell.source.strip()]
    prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    if len(prose) < len(code):
        found.append(f"{len(code)} code cells but only {len(prose)} text cells: every step needs a sentence")
    if not any(is_checked(cell) for cell in code):
        found.append("no cell is checked, so nbval would only prove that it runs")
    for cell in code:
        name = f"cell {notebook.cells.index(cell)}"
        found += [f"{name}: {problem}" for problem in _cell_problems(cell)]
    return found


def is_checked(cell: NotebookNode) -> bool:
    """Whether nbval compares the cell's output in lax mode."""
    tagged = "nbval-check-output" in cell.metadata.get("tags", [])
    return tagged or _CHECK_COMMENT.search(cell.source) is not None


def _cell_problems(cell: NotebookNode) -> Iterator[str]:
    if cell.execution_count is None:
        yield "was never executed"
    if is_checked(cell) and not cell.outputs:
        yield "is checked but stores no output, so nothing is compared"
    length = len(cell.source.strip().splitlines())
    if length > LONGEST_CELL:
        yield f"has {length} lines, more than {LONGEST_CELL}: move code into the library"
    if is_checked(cell) and any(output.output_type == "execute_result" for output in cell.outputs):
        yield "is checked and ends in a value, whose text may differ by machine: print it as a fact, or assign it"
    may_raise = "raises-exception" in cell.metadata.get("tags", [])
    for output in cell.outputs:
        if output.output_type == "error" and not may_raise:
            yield f"stores an error: {output.ename}: {output.evalue}"
        if output.get("name") == "stderr":
            yield f"prints to standard error: {output.text.strip()[:80]}"
        figure = output.get("data", {}).get(PLOTLY)
        if figure is not None and not _title(figure):
            yield "shows a figure without a title"


def _title(figure: NotebookNode) -> str:
    title = figure.get("layout", {}).get("title", "")
    return cast("str", title if isinstance(title, str) else title.get("text", ""))


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _parse(text: str) -> NotebookNode:
    return cast("NotebookNode", nbformat.reads(text, as_version=4))


def _text(notebook: NotebookNode) -> str:
    return cast("str", nbformat.writes(notebook)) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then rename: a full disk or an interrupt leaves the old file whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when all notebooks are well, 1 when one is not, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Execute notebooks and store them in normal form.")
    parser.add_argument("files", nargs="*", type=Path, help="notebooks (default: all of notebooks/)")
    parser.add_argument("--check", action="store_true", help="execute nothing, name what is wrong")
    parser.add_argument("--seconds", type=int, default=CELL_SECONDS, help="time limit of one cell")
    options = parser.parse_args(arguments)
    files: list[Path] = options.files or sorted(FOLDER.glob("*.ipynb"))
    if missing := [str(path) for path in files if not path.is_file()]:
        parser.error(f"no such notebook: {', '.join(missing)}")
    failed = False
    for path in files:
        try:
            if not options.check:
                changed = refresh(path, cell_seconds=options.seconds)
                print(f"{path.name}: {'stored' if changed else 'unchanged'}")
            found = problems(path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            found = [f"kept as it was, because it failed:\n{error}"]
        except NotJSONError as error:
            found = [f"is not a notebook: {error}"]
        for problem in found:
            print(f"{path.name}: {problem}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
