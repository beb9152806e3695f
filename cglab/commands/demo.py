"""``demo``: the tour of a real model, its start notebook executed, a report to read and records to keep.

Each of the three files is written when it is complete and then renamed into place, so that an interrupt or a
full disk at any moment leaves what an earlier run left.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

import cglab
from cglab import settings
from cglab.commands.console import FAILS, HOLDS, Outcome, advance, note, progress_bar, text_table
from cglab.commands.files import output_folder, write_whole
from cglab.commands.kernels import execute
from cglab.commands.report import report_page
from cglab.commands.tour import Tour, run_tour, stages
from cglab.errors import InputError
from cglab.measure.records import append
from cglab.measure.tree import PACKAGE

START = PACKAGE.parent / "notebooks" / "00_start_here.ipynb"


def demo(options: Namespace) -> Outcome:
    """Runs the main job into a folder; status 1 if a captured step differs or the notebook fails.

    Raises:
        InputError: for a bad setting or model, or a folder that cannot be written into; before anything runs.
        ResultsError: if a file cannot be written; earlier ones are untouched.
    """
    settings.device()
    notebook = _start_notebook()
    folder = output_folder(options.out)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    with progress_bar(None, "open the model") as bar:
        with cglab.open() as lab:
            bar.reset(total=stages(lab.buckets) + cells)
            tour = run_tour(lab, partial(advance, bar))
        # First what took longest to measure; a failure from here on loses none of it.
        append(folder / "results.jsonl", tour.records)
        write_whole(folder / "report.html", report_page(tour))
        failure = _run_notebook(notebook, folder, partial(advance, bar, "notebook"))
    if failure is not None:
        note(f"cglab: {START.name} failed and was not stored: {failure}")
    return Outcome(_summary(tour, folder), status=HOLDS if tour.ok and failure is None else FAILS)


def _start_notebook() -> Any:
    if not START.is_file():
        raise InputError(f"no {START.name} in {START.parent}; the demo runs in a clone of the repository")
    return nbformat.read(START, as_version=4)


def _run_notebook(notebook: Any, folder: Path, progress: Callable[[], object]) -> str | None:
    """Executes and stores the notebook; why it failed, or None."""
    try:
        executed = execute(notebook, START.parent, progress=progress)
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        return " ".join([str(error).strip().splitlines()[0], *getattr(error, "__notes__", [])]).strip()
    write_whole(folder / START.name, nbformat.writes(executed) + "\n")
    return None


def _summary(tour: Tour, folder: Path) -> str:
    parts = [
        f"{tour.model} ({tour.weights} weights, {tour.dtype}), decode step, recorder {tour.recorder}",
        _table(tour.rows()),
        "Generation of the same prompts by each arm:\n" + _table(tour.generation_rows()),
        tour.note,
        "\n".join(f"{what:12}{folder / name}" for what, name in (
            ("notebook", START.name), ("report", "report.html"), ("results", "results.jsonl"),
        )),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    return text_table(list(rows[0]), [list(row.values()) for row in rows])
