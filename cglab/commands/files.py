"""Files that are there whole or not at all: written beside their name, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cglab.errors import InputError, ResultsError


def output_folder(folder: Path) -> Path:
    """Makes a folder if needed, and finds out now whether files can be written there.

    Raises:
        InputError: if not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"cannot write into {folder}: {error.strerror}; choose another with --out"
        ) from error
    return folder


def write_whole(target: Path, content: str) -> None:
    """Writes a text file, or leaves the earlier one as it was.

    Raises:
        ResultsError: if it cannot be written.
    """
    part = None
    try:
        handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        Path(part).replace(target)
    except OSError as error:
        raise ResultsError(
            f"cannot write {target}: {error.strerror}; what was there is untouched. "
            "Free space or choose another folder, and run again"
        ) from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)
