"""What a server that did not start most likely died of, told by its log and exit status. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Fault(StrEnum):
    """What is wrong with a server."""

    MEMORY = "out of memory"
    MODEL = "wrong model"
    ARGUMENT = "bad argument"
    PORT = "port taken"
    DIED = "died"
    LATE = "not healthy in time"
    SILENT = "no answer"
    REFUSED = "refused"


NEXT_STEP: Final = {
    Fault.MEMORY: "lower --mem-fraction-static, --max-total-tokens or --max-running-requests, or free memory",
    Fault.MODEL: "give a Hugging Face folder with config.json, tokenizer and safetensors, or a hub id",
    Fault.ARGUMENT: "correct the arm's arguments",
    Fault.PORT: "leave the port out and a free one is taken",
    Fault.DIED: "read the log",
    Fault.LATE: "give it more time with deadline_s, or read the log for what it waits for",
    Fault.SILENT: "read the log, and launch the arm again",
    Fault.REFUSED: "correct the request",
}
"""What to do about it."""

_SIGNS: Final = {
    # Most certain first: what argparse says, then the system, then what may also be a consequence.
    Fault.ARGUMENT: (r"error: unrecognized arguments", r"error: argument ", r"error: ambiguous option"),
    Fault.PORT: (r"address already in use", r"at \d+ is not available"),
    Fault.MEMORY: (
        r"out of memory", r"OutOfMemoryError", r"not enough memory", r"cannot allocate memory", r"\bMemoryError\b",
        r"bad_alloc", r"increase --?mem[-_]fraction",
    ),
    Fault.MODEL: (
        r"does not appear to have a file named", r"not a valid model identifier", r"Repository ?Not ?Found",
        r"Can't load the configuration", r"Unrecognized model", r"No such file.*(config\.json|tokenizer)",
        r"Cannot find any model weights", r"Model architectures .* not supported",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The likely reason of a failure.

    Attributes:
        fault: its kind.
        sign: the line of the log that tells it; empty if none does.
    """

    fault: Fault
    sign: str = ""


def diagnose(lines: Sequence[str], exit_code: int) -> Diagnosis:
    """Tells what went wrong from what a server said last.

    Args:
        lines: the end of its log, oldest first.
        exit_code: its exit status, or the negative number of the signal that ended it.

    Returns:
        The first sign of the most certain kind; without any, a process that was killed most likely took more memory
        than there is, as the system does that unasked.
    """
    for fault, signs in _SIGNS.items():
        for line in lines:
            if any(re.search(sign, line, re.IGNORECASE) for sign in signs):
                return Diagnosis(fault, line)
    if exit_code == -signal.SIGKILL:
        return Diagnosis(Fault.MEMORY, "killed with SIGKILL, as the system does when memory runs out")
    return Diagnosis(Fault.DIED)


def describe_exit(exit_code: int) -> str:
    """An exit status in words: ``exit status 2``, ``signal SIGKILL``."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
