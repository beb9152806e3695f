"""Where the lab stands, from recorded results alone: every claim, what the sources published beside it, and losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cglab.errors import ResultsError
from cglab.lab.profiles import results_folder
from cglab.lab.recorded import newest
from cglab.lab.step_metrics import UNCAPTURED
from cglab.measure.claims import Claim, PartResult, evaluate, load_claims
from cglab.measure.published import load_published
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.tree import tree_hash

if TYPE_CHECKING:
    import pandas

PEERS: Final = ("token", "first-token", "engines")
"""Benches whose first arm is the lab's own: another that is faster is a loss."""
OURS: Final = ("decode", "growth", "prefill", "ttft", "load", "mtp", "dflash", "pipeline", "dsa_prefill")
"""Benches whose first arm is eager: a captured one that is slower is a loss."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A published figure and the part of a claim that measures the same.

    Attributes:
        table: id of the published table.
        row: name of its row.
        claim: id of the claim.
        part: name of its part.
        scale: what the part's value is multiplied by to be in the published unit.
    """

    table: str
    row: str
    claim: str
    part: str
    scale: float = 1.0


PAIRS: Final = (
    Pair("s0-stated-figures", "throughput change, chat", "G4", "chat, tok/s", 100.0),
    Pair("s0-stated-figures", "TPOT change", "G4", "chat, TPOT", 100.0),
    Pair("s0-stated-figures", "throughput change, summarisation", "G4", "summarisation, tok/s", 100.0),
    Pair(
        "s2-stated-figures", "kernel-busy difference between arms",
        "G5", "deep-narrow, cap 4096, first stage, change of kernel busy", 100.0,
    ),
    Pair(
        "s3-stated-figures", "TTFT change, short fresh prompts",
        "G6", "TTFT, 512 fresh tokens, concurrency 1", 100.0,
    ),
    Pair("s4-stated-figures", "forward occupancy change", "G7", "points over the untimed eager sampler"),
)  # fmt: skip
"""Headline figures of the sources that the lab measures too, on other machines and models than theirs."""


class Standing:
    """What a folder of results says; other machines' records than a GPU's are left out.

    Args:
        folder: of results; None takes ``results`` in the data folder.

    Raises:
        ResultsError: there is no such folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        where = results_folder(folder)
        if not where.exists():
            raise ResultsError(f"no results at {where}; record some with `cglab bench`, or name their folder")
        self.records: Sequence[Record] = load(where).records
        self.claims: tuple[Claim, ...] = load_claims()

    def claims_frame(self) -> pandas.DataFrame:
        """One row a part of every claim: value, target, status, and why where it is not met."""
        import pandas

        return pandas.DataFrame(
            {
                "claim": claim.id, "part": part.name, "value": part.value,
                "wanted": f"{part.comparison} {part.target:g}", "status": part.status, "current": part.current,
                "reason": part.reason,
            }
            for claim in evaluate(self.claims, self.records, tree_hash())
            for part in claim.parts
        )  # fmt: skip

    def published_frame(self) -> pandas.DataFrame:
        """One row a published headline: theirs, ours in the same unit, None where it was not measured."""
        import pandas

        return pandas.DataFrame(self._pairs())

    def losses_frame(self) -> pandas.DataFrame:
        """One row a comparison that the lab's captured arm lost by the rule: to eager, or to a peer."""
        import pandas

        found = [loss for bench in (*OURS, *PEERS) for loss in _losses(bench, self.records)]
        return pandas.DataFrame(found, columns=["bench", "model", "step", "arm", "measure", "ratio", "told"])

    def _pairs(self) -> Iterator[dict[str, Any]]:
        tables, parts = load_published(), self._parts()
        for pair in PAIRS:
            row = next(each for each in tables[pair.table]["rows"] if each["name"] == pair.row)
            part = parts[pair.claim, pair.part]
            yield {
                "source": row["source"], "figure": pair.row, "unit": row["unit"], "published": row["value"],
                "measured": None if part.value is None else part.value * pair.scale, "claim": pair.claim,
            }  # fmt: skip

    def _parts(self) -> dict[tuple[str, str], PartResult]:
        """Values by their first formula: an alternative measures something else."""
        plain = [replace(c, parts=tuple(replace(p, alternative=None) for p in c.parts)) for c in self.claims]
        found = evaluate(plain, self.records, tree_hash())
        return {(claim.id, part.name): part for claim in found for part in claim.parts}


def _losses(bench: str, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    lost = "faster" if bench in PEERS else "slower"
    for record in newest(bench, records).records:
        if bench in OURS and record.arm in UNCAPTURED:
            continue
        for name, verdict in record.metrics.items():
            if not name.endswith("verdict") or verdict != lost:
                continue
            measure = name.removesuffix("verdict").rstrip("_")
            of = f"{measure}_ratio" if measure else next(
                (each for each in ("ratio_to_eager", "ratio_to_ours") if each in record.metrics), "ratio"
            )  # fmt: skip
            step = {
                key: value for key, value in record.workload.items() if key in _STEP and value is not None
            }
            yield {
                "bench": bench, "model": Path(record.model or "").name, "arm": record.arm,
                "step": ", ".join(f"{key} {value}" for key, value in step.items()),
                "measure": measure or "time", "ratio": record.metrics.get(of), "told": record.notes,
            }  # fmt: skip


_STEP: Final = ("batch", "context", "tokens", "cached", "concurrency", "load", "dataset", "cap")
"""What of a workload tells a step."""
