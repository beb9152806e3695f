"""One process of the first-token bench: what ``first_token_bench`` starts several times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from cglab.lab.first_token_bench import measured
from cglab.measure.records import append


def main(path: Path) -> None:
    """Measures a job and leaves each record as soon as it is there."""
    job = json.loads(path.read_text(encoding="utf-8"))
    sys.argv[:] = job.pop("command")  # what a record tells as its command
    for record in measured(torch.device(job.pop("device")), **job):
        append(path.with_suffix(".jsonl"), [record])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
