"""The state of the package's folder as git names it, without git.

A record carries the tree hash of ``cglab/``: what ``git rev-parse HEAD:cglab`` prints on a clean checkout. It
is computed from the files, so that it also holds on a machine to which only the files were copied.
"""

from __future__ import annotations

import os
import stat
import subprocess
from hashlib import sha1
from pathlib import Path

from cglab.errors import ResultsError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of ``cglab``."""

_PASSED_OVER = {"__pycache__", ".ipynb_checkpoints", ".git"}


def tree_hash(folder: str | Path = PACKAGE) -> str:
    """SHA-1 of ``folder`` as a git tree object, in hex.

    Compiled files, notebook checkpoints and empty folders are passed over, as git would not have them.

    Raises:
        ResultsError: if the folder cannot be read.
    """
    try:
        return (_tree(Path(folder)) or _object("tree", b"")).hex()
    except OSError as error:
        raise ResultsError(f"cannot read {folder} to tell its state: {error}") from error


def is_dirty(folder: str | Path = PACKAGE) -> bool | None:
    """Whether ``folder`` differs from the commit that is checked out; None where no git tells."""
    folder = Path(folder).resolve()
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD:./"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() != tree_hash(folder)


def _tree(folder: Path) -> bytes | None:
    """Object id of a folder, or None if git would find nothing in it."""
    entries: list[tuple[bytes, bytes, bytes]] = []
    for path in folder.iterdir():
        name = os.fsencode(path.name)
        if path.name in _PASSED_OVER or path.suffix == ".pyc":
            continue
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entries.append((name, b"120000", _object("blob", os.fsencode(path.readlink()))))
        elif stat.S_ISDIR(mode):
            inner = _tree(path)
            if inner is not None:
                entries.append((name, b"40000", inner))
        elif stat.S_ISREG(mode):
            kind = b"100755" if mode & stat.S_IXUSR else b"100644"
            entries.append((name, kind, _object("blob", path.read_bytes())))
    # Git sorts a folder as if its name ended with a slash.
    entries.sort(key=lambda entry: entry[0] + b"/" if entry[1] == b"40000" else entry[0])
    body = b"".join(kind + b" " + name + b"\0" + digest for name, kind, digest in entries)
    return _object("tree", body) if entries else None


def _object(kind: str, content: bytes) -> bytes:
    return sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).digest()
