"""A group's process with peers that end it: as ``cglab.lab.peer_process``, which a test has replaced by this."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from cglab.lab.peer import LocalPeer
from cglab.lab.peer_process import main
from cglab.lab.peers_bench import LOCAL


@contextmanager
def aborts(point):
    """Measured at batch 1; of a larger one it dies, as C++ does."""
    if point.step.live > 1:
        os.abort()
    with LOCAL["eager"](point) as peer:
        yield peer


@contextmanager
def poisons(point):
    """What a lost CUDA context does: nothing works from then on, and closing raises too."""

    def lost():
        raise RuntimeError(f"CUDA error: unspecified launch failure in {Path.cwd()}/kernel.cu\nCompile with")

    try:
        yield LocalPeer(point.lab.device, lost, lost, "a note")
    finally:
        lost()


LOCAL |= {"torch-compile": aborts, "breakable-cuda-graphs": poisons}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
