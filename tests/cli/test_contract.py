"""What holds for every command: one value on standard output, one line for an error, the exit statuses."""

import json
import os
import signal
import subprocess
import sys

import pytest

from cglab.cli import main
from cglab.commands import tables
from cglab.commands.console import Outcome
from cglab.errors import CaptureError, InputError, ResultsError

ALL = ["demo", "techniques", "parity", "bench", "serve-compare", "results", "published", "doctor"]


def raising(error):
    def command(_options):
        raise error

    return command


def test_help_lists_every_command_and_needs_no_torch(environment):
    code = "import sys; from cglab.cli import main; sys.exit(main(['--help']) + 8 * ('torch' in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0
    assert all(f"    {name}" in run.stdout for name in ALL)
    assert "exit status: 0" in run.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["techniqes"],
        ["parity"],
        ["parity", "--technique", "decode", "--all"],
        ["parity", "--all", "--cases", "0"],
        ["parity", "--all", "--cases", "many"],
        ["bench", "decode", "--save", "--record", "somewhere"],
        ["doctor"],
        ["published", "--out", "x"],
    ],
)
def test_words_that_are_no_command_end_with_2(ask, words):
    status, out, error = ask(*words)
    assert (status, out) == (2, "")
    assert "usage: cglab" in error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("a wrong toggle"), 2),
        (ResultsError("a full disk"), 1),
        (CaptureError("refused"), 1),
        (OSError(28, "No space"), 1),
    ],
)
def test_an_error_is_one_message_and_no_traceback(ask, monkeypatch, error, status):
    monkeypatch.setattr(tables, "techniques", raising(error))
    assert ask("techniques") == (status, "", f"cglab: {error}\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(tables, "techniques", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["techniques"])


def test_json_is_the_only_thing_on_standard_output(ask, monkeypatch):
    original = tables.load_published

    def noisy():
        sys.stdout.write("a library that prints\n")
        return original()

    monkeypatch.setattr(tables, "load_published", noisy)
    status, out, error = ask("published", "--json")
    assert status == 0
    assert isinstance(json.loads(out), list)
    assert error == "a library that prints\n"


def test_json_has_no_number_that_json_lacks(ask_json, monkeypatch):
    odd = {"drift": float("nan"), "bounds": (float("inf"), 1.5), "count": 3, "ok": True}
    monkeypatch.setattr(tables, "techniques", lambda _options: Outcome("", odd))
    assert ask_json("techniques") == (0, {"drift": None, "bounds": [None, 1.5], "count": 3, "ok": True})


def test_an_interrupt_is_one_line_and_130(ask, monkeypatch):
    monkeypatch.setattr(tables, "techniques", raising(KeyboardInterrupt()))
    status, out, error = ask("techniques")
    assert (status, out) == (130, "")
    assert error.count("\n") == 1 and "interrupted" in error


def test_an_interrupt_that_comes_out_as_another_error_is_an_interrupt(ask, monkeypatch):
    def half_imported(_options):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise AttributeError("module 'numpy' has no attribute 'matrix'") from None

    monkeypatch.setattr(tables, "techniques", half_imported)
    status, out, error = ask("techniques")
    assert (status, out) == (130, "")
    assert error.count("\n") == 1 and "interrupted" in error
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored(ask, monkeypatch):
    monkeypatch.setattr(
        tables, "techniques", lambda _options: os.kill(os.getpid(), signal.SIGINT) or Outcome("whole")
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert ask("techniques") == (0, "whole\n", "")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("words", [["published"], ["techniques", "--json"], ["--help"]])
def test_a_closed_pipe_is_quiet(environment, tmp_path, words):
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "cglab", *words],
        env=environment, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert run.stderr == ""
    assert run.returncode == 141 or words == ["--help"]  # argparse itself passes over it


def test_a_terminal_without_unicode_gets_escapes_not_an_error(command):
    run = command("published", PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert run.stdout.isascii()


def test_a_misspelt_setting_is_refused_by_name(command):
    run = command("results", CGLAB_DEVCIE="cpu")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("cglab: 'CGLAB_DEVCIE' is no setting (did you mean CGLAB_DEVICE?)")
    assert run.stderr.count("\n") == 1
