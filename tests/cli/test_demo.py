"""``cglab demo``: what it leaves, and that no interrupt, kill or full disk costs what an earlier run left."""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

import cglab
from cglab.cli import main
from cglab.commands import demo, files
from cglab.measure.records import load

pytestmark = pytest.mark.end_to_end

FILES = ("00_start_here.ipynb", "report.html", "results.jsonl")
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def fake(monkeypatch, tour):
    """The demo with its long parts done before: opening, the tour itself, and the kernel."""
    monkeypatch.setattr(cglab, "open", lambda: nullcontext(SimpleNamespace(buckets=[1, 2])), raising=False)
    monkeypatch.setattr(demo, "run_tour", lambda lab, progress: tour)
    monkeypatch.setattr(demo, "execute", lambda notebook, folder, progress: notebook)


@pytest.fixture
def out(tmp_path, fake):
    """A folder in which an earlier demo left its files."""
    folder = tmp_path / "out"
    assert main(["demo", "--out", str(folder)]) == 0
    return folder


def test_the_main_job_end_to_end(command, tmp_path, tour):
    earlier = tmp_path / "out" / "results.jsonl"
    earlier.parent.mkdir()
    earlier.write_bytes(tour.records[0].as_line())
    run = command("demo", OMP_NUM_THREADS="1", seconds=280)
    assert run.returncode == 0, run.stderr
    for word in (
        "bucket",
        "parity",
        "captured",
        "step ms",
        "bitwise",
        "breakable",
        "no graph speed-ups",
        *FILES,
    ):
        assert word in run.stdout
    # How many steps a turn has depends on how much their times scatter; all of them are captured, or none.
    shares = re.findall(r"(?:reference|bitwise) +(\d+)/(\d+)", run.stdout)
    assert len(shares) == 4 * 3
    assert [captured for captured, _ in shares[::3]] == ["0"] * 4
    assert all(captured == steps != "0" for arm in (1, 2) for captured, steps in shares[arm::3])
    assert "Traceback" not in run.stderr and "notebook" in run.stderr
    found = load(earlier.parent)
    assert not found.problems
    assert found.records[0] == tour.records[0]
    assert len(found.records) == 1 + 4 * 3
    executed = nbformat.read(earlier.parent / FILES[0], as_version=4)
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any("application/vnd.plotly.v1+json" in o.get("data", {}) for cell in code for o in cell.outputs)
    assert "Plotly.newPlot(" in (earlier.parent / FILES[1]).read_text()


def test_results_grow_and_the_other_files_are_new(ask, out):
    before = contents(out)
    status, text, _ = ask("demo", "--out", out)
    assert status == 0
    after = contents(out)
    assert sorted(after) == sorted(FILES)
    assert after["results.jsonl"].startswith(before["results.jsonl"])
    assert after["results.jsonl"].count(b"\n") == 2 * before["results.jsonl"].count(b"\n")
    assert all(str(out / name) in text for name in FILES)


MOMENTS = {
    "opening": ("cglab.open", set()),
    "measuring": ("cglab.commands.demo.run_tour", set()),
    "adding the results": ("cglab.measure.records.os.replace", set()),
    "drawing the report": ("cglab.commands.demo.report_page", {"results.jsonl"}),
    "writing the report": ("cglab.commands.files.Path.replace", {"results.jsonl"}),
    "the notebook": ("cglab.commands.demo.execute", {"results.jsonl", "report.html"}),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_at_any_moment_leaves_whole_files(ask, out, monkeypatch, moment):
    place, written = MOMENTS[moment]
    before = contents(out)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    status, text, error = ask("demo", "--out", out)
    assert (status, text) == (130, "")
    assert error.splitlines()[-1].startswith("cglab: interrupted")
    after = contents(out)
    assert sorted(after) == sorted(FILES), "no half-written file is left over"
    assert {name for name in FILES if after[name] != before[name]} <= written
    assert after["results.jsonl"].startswith(before["results.jsonl"])
    assert not load(out).problems


def test_an_interrupt_of_the_real_thing(environment, out):
    before = contents(out)
    run = subprocess.Popen(
        [sys.executable, "-m", "cglab", "demo", "--out", str(out)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        seen = ""
        while "%" not in seen:  # the bar: the job is at work
            more = run.stderr.read(1)
            assert more, seen
            seen += more
        run.send_signal(signal.SIGINT)
        text, error = run.communicate(timeout=120)
    finally:
        run.kill()
    assert (run.returncode, text) == (130, ""), error
    assert "Traceback" not in error
    assert contents(out) == before


def test_a_kill_at_any_moment_leaves_whole_files(out, monkeypatch):
    """Runs of the demo that do nothing but write, killed without warning."""
    line = "<p>a long report</p>\n"
    monkeypatch.setattr(demo, "report_page", lambda tour: f"BEGIN {random.random()}\n{line * 200_000}END\n")
    records = len(load(out).records)

    def runs():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while True:
            main(["demo", "--out", str(out)])

    for milliseconds in (20, 90, 170, 260, 330, 410):
        before = (out / "results.jsonl").stat().st_size
        child = multiprocessing.get_context("fork").Process(target=runs)
        child.start()
        while (out / "results.jsonl").stat().st_size == before and child.is_alive():
            time.sleep(0.01)
        time.sleep(milliseconds / 1e3)
        child.kill()
        child.join()
        report = (out / "report.html").read_text()
        assert report.startswith(("BEGIN", "<!doctype")) and report.endswith(("END\n", "</html>"))
        assert json.loads((out / FILES[0]).read_text())["nbformat"] == 4
        found = load(out)
        assert not found.problems
        assert len(found.records) >= records and len(found.records) % records == 0
    assert len(found.records) > records, "the runs did write"
    assert main(["demo", "--out", str(out)]) == 0


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        ("cglab.measure.records.os.fsync", "results.jsonl"),
        ("cglab.commands.files.Path.replace", "report.html"),
    ],
)
def test_a_full_disk_is_one_error_and_loses_nothing(ask, out, monkeypatch, place, lost):
    before = contents(out)

    def full(*_, **__):
        raise NO_SPACE

    monkeypatch.setattr(place, full)
    status, text, error = ask("demo", "--out", out)
    assert (status, text) == (1, "")
    message = error.splitlines()[-1]
    assert message.startswith("cglab: cannot write") and lost in message
    assert "No space left on device" in message and "untouched" in message
    assert contents(out)[lost] == before[lost]
    assert not load(out).problems


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of half a megabyte, where this machine lets us have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs more rights than this machine gives")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_really_full_disk_is_one_error_and_loses_nothing(ask, out, small_disk):
    for name in FILES[::2]:
        (small_disk / name).write_bytes((out / name).read_bytes())
    (small_disk / "report.html").write_text("<p>an earlier report</p>")
    status, text, error = ask("demo", "--out", small_disk)
    assert (status, text) == (1, "")
    assert "report.html: No space left on device" in error.splitlines()[-1]
    assert (small_disk / "report.html").read_text() == "<p>an earlier report</p>"
    assert (small_disk / FILES[0]).read_bytes() == (out / FILES[0]).read_bytes()
    kept = load(small_disk)
    assert not kept.problems
    assert len(kept.records) == 2 * len(load(out).records)
    assert sorted(contents(small_disk)) == sorted(FILES)


@pytest.mark.parametrize("where", ["a file", "no place"])
def test_a_folder_that_cannot_be_written_into_is_refused_before_anything_runs(
    ask, tmp_path, fake, monkeypatch, where
):
    monkeypatch.setattr(cglab, "open", lambda: pytest.fail("the model was opened"), raising=False)
    taken = tmp_path / "taken"
    taken.write_text("kept")
    status, text, error = ask("demo", "--out", taken if where == "a file" else "/proc/nowhere/out")
    assert (status, text, error.count("\n")) == (2, "", 1)
    assert "cannot write into" in error and "--out" in error
    assert taken.read_text() == "kept"


def test_a_failing_notebook_is_told_and_costs_nothing_else(ask, out, monkeypatch):
    before = contents(out)

    def failing(notebook, folder, progress):
        raise CellExecutionError("a long traceback\n" * 40, "ValueError", "no such arm")

    monkeypatch.setattr(demo, "execute", failing)
    status, text, error = ask("demo", "--out", out)
    assert status == 1
    assert "bitwise" in text and FILES[0] not in text
    assert error.splitlines()[-1] == f"cglab: {FILES[0]} failed and was not stored: ValueError: no such arm"
    after = contents(out)
    assert after[FILES[0]] == before[FILES[0]]
    assert after["results.jsonl"] > before["results.jsonl"]


def test_a_differing_step_is_status_1(ask, out, monkeypatch, tour):
    monkeypatch.setattr(type(tour), "ok", False)
    assert ask("demo", "--out", out)[0] == 1


def test_a_missing_notebook_is_said_at_once(ask, tmp_path, fake, monkeypatch):
    monkeypatch.setattr(demo, "START", tmp_path / "notebooks" / "gone.ipynb")
    status, text, error = ask("demo", "--out", tmp_path / "out")
    assert (status, text) == (2, "")
    assert "gone.ipynb" in error and not (tmp_path / "out").exists()


def test_a_file_keeps_readers_out_of_its_making(tmp_path):
    files.write_whole(tmp_path / "a.txt", "first")
    files.write_whole(tmp_path / "a.txt", "second")
    assert contents(tmp_path) == {"a.txt": b"second"}
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644
