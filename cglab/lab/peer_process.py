"""One group of peers: what ``peer_groups.measured_apart`` starts in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from cglab.lab.peer_groups import PeerJob
from cglab.lab.peers_bench import measured


def main(path: Path) -> None:
    """Measures a job and leaves each record as soon as it is there."""
    job = PeerJob.read(path)
    sys.argv[:] = job.command  # what a record tells as its command
    for record in measured(job):
        job.leave(path, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
