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
    Fault.ARGUMENT: (r"error: unrecognized arguments", r"error: argument ", r"error: ambiguous option"),
    Fault.PORT: (r"address already in use", r"at \d+ is not available"),
    Fault.MEMORY: (
        r"out of memory", r"OutOfMemoryError", r"not enough memory", r"leave no GPU memory", r"^MemoryError\b",
        r"can(no|')t allocate memory", r"bad_alloc", r"exit code:? -9\b",
    ),
    Fault.MODEL: (
        r"does not appear to have a file named", r"not a valid model identifier", r"Repository ?Not ?Found",
        r"Can't load the configuration", r"does not recognize this architecture", r"Unrecognized model",
        r"No such file.*(config\.json|tokenizer)", r"Cannot find any model weights", r"architectures .* not supported",
    ),
}  # fmt: skip
_ERROR: Final = re.compile(
    r"^[\w.]*(Error|Exception)\b|\berror: |\[Errno \d+\]|exit code:? -?\d", re.IGNORECASE
)
"""A line that tells of an error. SGLang warns a lot, and of what does not matter, before it dies."""
_OWN_KILL: Final = re.compile(r"kill_process_tree called")
"""A server of which a part failed kills itself, with the signal that the system uses."""


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
        The last error of a known kind, as others may only follow from it; else the last error at all. A process that
        was killed and says nothing of it most likely took more memory than there is: the system does that unasked.
    """
    errors = [line.strip() for line in lines if _ERROR.search(line.strip())]
    for line in reversed(errors):
        for fault, signs in _SIGNS.items():
            if any(re.search(sign, line, re.IGNORECASE) for sign in signs):
                return Diagnosis(fault, line)
    if exit_code == -signal.SIGKILL and not any(_OWN_KILL.search(line) for line in lines):
        return Diagnosis(Fault.MEMORY, "killed with SIGKILL, as the system does when memory runs out")
    return Diagnosis(Fault.DIED, errors[-1] if errors else "")


def describe_exit(exit_code: int) -> str:
    """An exit status in words: ``exit status 2``, ``signal SIGKILL``."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
