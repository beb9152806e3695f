"""The lab's targets in one sentence: which are met, which are not, and which nobody measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cglab.lab.markdown import Block
from cglab.lab.profiles import results_folder
from cglab.measure.claims import ClaimResult, Status, evaluate, load_claims
from cglab.measure.records import read

TOLD: Final[dict[Status, str]] = {"met": "met", "unmet": "not met", "unmeasured": "not measured"}


@dataclass(frozen=True)
class Targets(Block):
    """The sentence on all claims of ``data/claims.toml``, computed from all records of a folder."""

    name: str = "targets"
    bench: str = "decode"

    def text(self, folder: Path | None) -> str:
        """The sentence from the records of a folder."""
        where = folder or results_folder()
        records = read(where).records if where.exists() else ()
        if not records:
            return self.not_yet
        return sentence(evaluate(load_claims(), records, tree=""))  # how old records are is not told here


def sentence(claims: list[ClaimResult]) -> str:
    """How many claims are met, not met and not measured, with their ids."""
    parts = []
    for status, told in TOLD.items():
        if ids := [claim.id for claim in claims if claim.status == status]:
            parts.append(f"{len(ids)} {'is' if len(ids) == 1 else 'are'} {told} ({', '.join(ids)})")
    return f"Of the lab's {len(claims)} targets {', '.join(parts)}."
