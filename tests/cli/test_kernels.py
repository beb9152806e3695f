"""Notebooks run in this interpreter, and their kernels end with them however they end."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cglab.commands import kernels
from cglab.commands.kernels import execute


def notebook(*sources):
    return new_notebook(cells=[new_markdown_cell("# Title"), *map(new_code_cell, sources)])


def notebooks_run():
    return [each for each in threading.enumerate() if each.name == "notebook"]


def gone(process, seconds=60):
    """Whether a process has ended, or ends by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_copy_is_executed_by_this_interpreter_in_the_folder(tmp_path):
    original = notebook("import os, sys; print(sys.executable, os.getcwd())", "6 * 7")
    steps = []
    executed = execute(original, tmp_path, progress=lambda: steps.append("cell"))
    assert executed.cells[1].outputs[0].text.split() == [sys.executable, str(tmp_path)]
    assert executed.cells[2].outputs[0].data["text/plain"] == "42"
    assert original.cells[1].outputs == []
    assert steps == ["cell", "cell"]


def test_a_failing_cell_tells_its_error(tmp_path):
    with pytest.raises(CellExecutionError) as caught:
        execute(notebook("1 / 0"), tmp_path)
    assert (caught.value.ename, caught.value.evalue) == ("ZeroDivisionError", "division by zero")


def test_a_cell_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(CellTimeoutError):
        execute(notebook("import time; time.sleep(60)"), tmp_path, cell_seconds=1)


def test_a_dead_kernel_tells_what_its_process_said(tmp_path):
    source = "import os; os.write(2, b'out of luck'); os._exit(3)"
    with pytest.raises(DeadKernelError) as caught:
        execute(notebook(source), tmp_path, cell_seconds=20)
    assert "out of luck" in "".join(caught.value.__notes__)


def test_an_interrupt_ends_the_kernel_and_comes_through(tmp_path):
    told = tmp_path / "process"

    def interrupt():
        while not (told.exists() and told.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    source = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        execute(notebook(source), tmp_path)
    assert gone(int(told.read_text()))
    assert not notebooks_run(), "the thread is waited for: what it still does while Python ends hangs there"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_the_kernel_starts_comes_through(tmp_path, capfd, monkeypatch, moment):
    launch, launched = kernels.ThisInterpreter._async_launch_kernel, []

    async def interrupted(self, command, **options):
        if moment == "before":
            os.kill(os.getpid(), signal.SIGINT)
        await launch(self, command, **options)
        launched.append(self.provisioner.pid)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kernels.ThisInterpreter, "_async_launch_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(notebook("pass"), tmp_path)
    assert capfd.readouterr().err == "" and all(map(gone, launched))


def test_an_interrupt_as_the_notebook_ends_is_one_too(tmp_path, monkeypatch):
    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            super().wait(60)
            if timeout == kernels.LOOK_SECONDS:
                raise KeyboardInterrupt
            return True

    monkeypatch.setattr(kernels, "threading", SimpleNamespace(Event=Interrupted, Thread=threading.Thread))
    with pytest.raises(KeyboardInterrupt):
        execute(notebook("pass"), tmp_path)
