"""SGLang's server with a key: whoever asks it for more than its health and its metrics must have it.

    CGLAB_SERVER_KEY=... python start_server.py ARGUMENTS

SGLang takes a key as an argument alone, where the machine's list of processes would show it. Here it becomes one
within the process, and the line of the log that tells all arguments has it blanked. Without the variable the server
has no key.
"""

import logging
import os
import runpy
import sys
from typing import Any


def blank_in_log(secret: str) -> None:
    """No line of the log has the secret from now on, however it got there."""
    make = logging.getLogRecordFactory()

    def without(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit: its handler tells the caller
            return record
        if secret in said:
            record.msg, record.args = said.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(without)


if __name__ == "__main__":
    # Out of the environment: nothing that the server starts has it.
    key = os.environ.pop("CGLAB_SERVER_KEY", None)
    if key:
        blank_in_log(key)
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
