"""Opens one file of safetensors, compressed with xz or not.

The shipped drafts are compressed: sign and exponent of a trained weight say little, so a third of the bytes goes and no
bit of a weight does. Only this lab opens them; a model stays plain, since transformers and SGLang read its folder too.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from cglab.errors import ModelError

SUFFIX: Final = ".xz"
UNREADABLE: Final = (SafetensorError, OSError, lzma.LZMAError, EOFError)
"""What a file that is damaged raises when it is opened or read."""
MOST_BYTES: Final = 1 << 28
"""Of a compressed file once it is whole: some kilobytes could fill a disk."""
TWO_BYTES: Final = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
"""How weights of two bytes are compressed: a high byte is like other high bytes."""
_STEP: Final = 1 << 20


@contextmanager
def opened(shard: Path) -> Iterator[Any]:
    """The tensors of a file, by safetensors' own handle; a compressed one is a file of its own for that long.

    Raises:
        ModelError: if a compressed file is too large, or there is no room to expand it.
        SafetensorError, OSError, LZMAError, EOFError: if it is damaged.
    """
    if shard.suffix != SUFFIX:
        with safe_open(shard, framework="pt") as tensors:
            yield tensors
        return
    with _writing(shard):
        temporary = TemporaryDirectory()
    with temporary as folder:
        whole = Path(folder, shard.stem)
        _expand(shard, whole)
        with safe_open(whole, framework="pt") as tensors:
            yield tensors


def _expand(shard: Path, whole: Path) -> None:
    size = 0
    with lzma.open(shard) as compressed:
        while content := compressed.read(_STEP):
            size += len(content)
            if size > MOST_BYTES:
                raise ModelError(
                    f"{shard} holds more than {MOST_BYTES >> 20} MiB, too much for a compressed file; "
                    f"expand it to {shard.stem} beside it where you trust it"
                )
            with _writing(shard), whole.open("ab") as file:
                file.write(content)


@contextmanager
def _writing(shard: Path) -> Iterator[None]:
    """Tells a disk that is full from a file that is damaged, which another download would mend."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{shard} cannot be expanded in the folder for temporary files ({error}); free space there, or set TMPDIR "
            "to a folder that can be written"
        ) from error


def compress(shard: Path) -> Path:
    """Puts a compressed file in the place of a plain one; equal files give equal bytes.

    Returns:
        Where it is.
    """
    path = shard.with_name(shard.name + SUFFIX)
    path.write_bytes(lzma.compress(shard.read_bytes(), filters=TWO_BYTES))
    shard.unlink()
    return path
