"""The command ``cglab``: demo, techniques, parity, bench, serve-compare, results, published, doctor.

Results go to standard output, once and whole; with ``--json`` as one JSON value. Progress and notes go to
standard error. Exit status: 0 when what was asked holds, 1 when it does not, 2 for bad input, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

from cglab import __version__
from cglab.commands.console import BAD_INPUT, FAILS, Outcome, note
from cglab.errors import CglabError, InputError

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells count them

Command = Callable[[argparse.Namespace], Outcome]

_EXIT_STATUS = "exit status: 0 what was asked holds, 1 it does not, 2 bad input, 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: words after ``cglab``; the process's own if left out.

    Returns:
        The exit status.
    """
    with _interrupts() as interrupts:
        try:
            status = _run(arguments)
            sys.stdout.flush()
        except BaseException as error:
            # An interrupt in the middle of an import may come out as another error.
            told = _failure(KeyboardInterrupt() if interrupts else error)
            if told is None:
                raise
            return told
    return status


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Counts Ctrl-C, which stays what it is: a KeyboardInterrupt. Where it is ignored it stays ignored."""
    seen: list[int] = []

    def interrupted(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _failure(error: BaseException) -> int | None:
    """Says what went wrong, in one message; the exit status, or None for a bug, which keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        note("cglab: interrupted; earlier results and reports are as they were, nothing is half-written")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Python flushes standard output once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    # An OSError is a full or failing disk that nothing below knew more about.
    if isinstance(error, CglabError | OSError):
        note(f"cglab: {error}")
        return BAD_INPUT if isinstance(error, InputError) else FAILS
    return None


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as told:  # argparse has said it: help, or what is wrong
        return told.code if isinstance(told.code, int) else BAD_INPUT
    # Whatever a library or a user's function prints must not end up in the JSON.
    with redirect_stdout(sys.stderr):
        outcome = _command(options.run)(options)
    as_json = getattr(options, "json", False)
    text = json.dumps(_finite(outcome.value), allow_nan=False, indent=2) if as_json else outcome.text
    # A terminal that cannot show a character gets its escape, not an error.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")
    return outcome.status


def _finite(value: Any) -> Any:
    """``value`` with None for what JSON has no number for: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _command(home: str) -> Command:
    """Loads a command on use: ``cglab --help`` needs no torch."""
    module, _, name = home.partition(":")
    command: Command = getattr(import_module(f"cglab.commands.{module}"), name)
    return command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cglab",
        description="A lab for CUDA graphs in LLM inference: capture, replay, measure and compare a step.",
        epilog=_EXIT_STATUS,
    )
    parser.add_argument("--version", action="version", version=f"cglab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, dest="command")

    def add(name: str, home: str, text: str, *, as_json: bool = True) -> argparse.ArgumentParser:
        sentence = text[0].upper() + text[1:] + "."
        command = commands.add_parser(name, help=text, description=sentence, epilog=_EXIT_STATUS)
        command.set_defaults(run=home)
        if as_json:
            command.add_argument("--json", action="store_true", help="one JSON value on standard output")
        return command

    demo = add("demo", "demo:demo", "the tour: notebook, report and results of a real model", as_json=False)
    demo.add_argument(
        "--out", type=_folder, default=Path("out"), metavar="DIR", help="where to (default: out)"
    )

    add("techniques", "tables:techniques", "what can be captured, and by which toggle")

    parity = add("parity", "measuring:parity", "captured against eager, on random batches")
    which = parity.add_mutually_exclusive_group(required=True)
    which.add_argument("--technique", metavar="NAME", help="one technique, by its toggle's name")
    which.add_argument(
        "--all",
        action="store_true",
        help="every technique, backend, recorder, padding and form of ops; 1: corrupted",
    )
    parity.add_argument(
        "--cases", type=_count, default=100, metavar="N", help="of a technique (default: 100)"
    )
    parity.add_argument("--plant", metavar="NAME", help="break one guard on purpose, to see it told")

    bench = add("bench", "measuring:bench", "measures one bench, arms in turns")
    bench.add_argument("name", metavar="NAME", nargs="?", help="the bench; without it all are listed")
    bench.add_argument("--quick", action="store_true", help="fewer and smaller points")
    bench.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a setting of the bench, such as seed=2; may be given several times; an unknown one lists them",
    )  # fmt: skip
    keep = bench.add_mutually_exclusive_group()
    keep.add_argument("--save", action="store_true", help="add the records to data/results")
    keep.add_argument(
        "--record", type=_folder, metavar="DIR", help="add the records to a file in this folder"
    )

    serve = add("serve-compare", "serving:serve_compare", "a recipe's arms on real SGLang servers, in turns")
    serve.add_argument(
        "recipe", metavar="RECIPE", help="by name or source, such as s3; an unknown one lists them"
    )
    serve.add_argument(
        "--instances", type=_count, default=3, metavar="N", help="servers of each arm (default: 3)"
    )
    serve.add_argument(
        "--order", type=_word, metavar="ABBAAB", help="the turns; forward and backward rounds if left out"
    )
    serve.add_argument(
        "--confirm", type=_count, metavar="N", help="instances to go on to where a difference shows"
    )
    # Every command has its home in ``run``.
    serve.add_argument(
        "--run", dest="run_name", type=_word, metavar="NAME", help="joins the records of several commands"
    )
    serve.add_argument(
        "--variant", type=_word, metavar="NAME", help="published, gpu or cpu (default: by the device)"
    )
    serve.add_argument(
        "--model", type=_word, metavar="NAME", help="another model than the recipe's: a folder or a hub id"
    )
    serve.add_argument(
        "--deadline",
        type=_count,
        default=900,
        metavar="S",
        help="seconds for a server's start, and for its points",
    )
    serve.add_argument(
        "--out", type=_folder, default=Path("out/servers"), metavar="DIR", help="logs, data, records"
    )
    serve.add_argument("--save", action="store_true", help="add the records to data/results instead")

    results = add("results", "tables:results", "what was recorded")
    results.add_argument(
        "--claims", nargs="*", metavar="ID",
        help="the targets, a line each; with ids such as G1, or all, their parts and what bounds them; 1: one is unmet",
    )  # fmt: skip

    add("published", "tables:published", "what the source documents measured")

    doctor = add("doctor", "examine:examine", "what would break a capture, and the fix")
    doctor.add_argument(
        "target", metavar="FILE:FUNCTION",
        help="a function without arguments, or FILE defines example_inputs(): a tuple or a dict of inputs",
    )  # fmt: skip
    return parser


def _word(text: str) -> str:
    if not text.strip():
        message = "the value is empty; leave the option out, or say what is meant"
        raise argparse.ArgumentTypeError(message)
    return text


def _folder(text: str) -> Path:
    return Path(_word(text))  # an empty path would be the folder that this runs in


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        message = f"{text!r} is not a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return value
