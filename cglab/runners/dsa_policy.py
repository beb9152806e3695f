"""What of a sparse prefill is recorded, as pure functions: gates with their reasons, and the bucket floor (S3).

S3 records attention, then with it the indexer's preparation; the lab records the selection as well where a step's keys
have a fixed extent (T9b). Each part that stays an eager break has a ``Miss`` that says why. S3's other gates are of
things that the lab does not have, and are told by ``NON_GOALS``; what it has instead of a gate for copies that come
layer by layer is ``GraphGroup.expect``, which waits for all of them before a step (P80).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.models.sparse import Breaks
from cglab.settings import DSA_ATTENTION_SWITCH, DSA_INDEXER_SWITCH

NON_GOALS: Final[Mapping[str, str]] = MappingProxyType({
    "decode context parallelism": "the lab's engine runs on one device",
    "data-parallel attention": "the lab's engine runs on one device",
    "prefill context parallelism": "the lab's engine runs on one device",
    "page-sharded caches": "a cache is whole on its device",
    "two-batch overlap": "a step is one batch",
    "hisparse and k-pool": "index keys are scored one by one, and all of them are on the device",
    "loaders of single layers": "a step waits for all that comes before it begins",
})  # fmt: skip
"""S3's gates that have nothing to gate here, and why."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Why each part of a layer is an eager break; None where it is recorded.

    Attributes:
        attend: absorbed attention with its turn and the latent store (T8).
        prepare: the indexer's projections and its key store (T9).
        select: scores and top-k (T9b).
        experts: routed experts, which S3 never leaves to a break.
    """

    attend: Miss | None = None
    prepare: Miss | None = None
    select: Miss | None = None
    experts: Miss | None = None

    @property
    def breaks(self) -> Breaks:
        """The same as a step asks for them."""
        return Breaks(**{part.name: getattr(self, part.name) is not None for part in fields(self)})

    def below(self, floor: int, size: int) -> Parts:
        """Of a bucket of so many tokens: under the floor nothing that depends on the number of rows is recorded.

        Experts stay as they are: padded or not, they are computed over all rows in every arm.
        """
        if size >= floor:
            return self
        why = Miss(Reason.BELOW_FLOOR, f"bucket {size}, floor {floor}")
        return Parts(self.attend or why, self.prepare or why, self.select or why, self.experts)


def gates(
    *,
    attention: bool = True,
    preparation: bool = True,
    selection: bool = False,
    experts: bool = True,
    switches: Collection[str] = (),
) -> Parts:
    """What is recorded, decided once for every step, captured or not (B81).

    Args:
        attention: the toggle of T8.
        preparation: the toggle of T9.
        selection: whether scores and top-k are recorded over a fixed extent of keys.
        experts: whether routed experts are recorded.
        switches: environment variables that are set to switch something off.
    """
    attend = _why(attention, DSA_ATTENTION_SWITCH, switches)
    prepare = _why(preparation, DSA_INDEXER_SWITCH, switches)
    if attend is not None and prepare is None:
        prepare = Miss(Reason.NEEDS_ATTENTION, f"attention is a break: {attend}")
    # With the selection every break is gone, so that it is recorded last.
    before = prepare or (None if experts else Miss(Reason.BACKEND_EAGER, "experts are a break"))
    select = before if selection else Miss(Reason.LIVE_EXTENT)
    return Parts(attend, prepare, select, None if experts else Miss(Reason.BACKEND_EAGER))


def _why(wanted: bool, switch: str, switches: Collection[str]) -> Miss | None:
    if switch in switches:
        return Miss(Reason.KILL_SWITCH, f"{switch}=1")
    return None if wanted else Miss(Reason.BACKEND_EAGER)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """For which steps the selection is recorded too (T9b); ``lab.selection_rule`` makes it of recorded costs.

    Attributes:
        limits: by room for cached tokens, ascending, the most tokens of such a step, 0 for none; empty without costs.
    """

    limits: tuple[tuple[int, int], ...] = ()

    @property
    def rooms(self) -> dict[int, int]:
        """Rooms in which some step is recorded, and the most tokens of one."""
        return {room: limit for room, limit in self.limits if limit}

    def room_for(self, tokens: int, cached: int) -> int | Miss:
        """The room for cached tokens of the recording that a step replays, or why its selection stays a break.

        Args:
            tokens: fresh tokens of the step.
            cached: cached ones, of all its requests.
        """
        room, limit = next((each for each in self.limits if each[0] >= cached), (0, 0))
        if tokens <= limit:
            return room
        if not self.limits:
            known = "no costs of this model on this kind of device are recorded; cglab bench dsa records them"
        elif room < cached:
            known = "no room for that many was measured"
        else:
            known = f"with room for {room} it won up to {limit}"
        return Miss(Reason.LIVE_EXTENT, f"{tokens} tokens after {cached} cached: {known}")

    def why_break(self, tokens: int, cached: int) -> Miss | None:
        """Why the selection of a step stays a break; None where it is recorded. Arguments as ``room_for``."""
        found = self.room_for(tokens, cached)
        return found if isinstance(found, Miss) else None

    def __str__(self) -> str:
        told = [f"up to {limit} tokens with room for {room} cached" for room, limit in self.rooms.items()]
        return "the selection is recorded " + (", ".join(told) or "nowhere")


def floor_by_rule(buckets: Sequence[int], rows: int) -> int:
    """S3's floor: the smallest bucket of which even the shortest step has more rows than where kernels change.

    Args:
        buckets: token counts, ascending.
        rows: up to so many a library may choose another kernel; half the multiprocessors of a GPU (S3).

    Returns:
        A bucket; one more than the largest where none is, so that every bucket keeps its breaks.
    """
    steps = pairwise((0, *buckets))
    return next((bucket for before, bucket in steps if before + 1 > rows), _above(buckets))


def measured_floor(buckets: Sequence[int], differing: Collection[int]) -> int:
    """The smallest bucket from which every live size of every bucket is bitwise what live rows alone give.

    Args:
        buckets: token counts, ascending.
        differing: those of them in which some live size was not.

    Returns:
        As ``floor_by_rule``.
    """
    last = max(differing, default=0)
    return next((bucket for bucket in buckets if bucket > last), _above(buckets))


def _above(buckets: Sequence[int]) -> int:
    return max(buckets, default=0) + 1


def coverage_of_part(counts: Coverage, why_eager: Callable[[int], Miss | None]) -> Coverage:
    """How often one part was recorded, from the steps of the prefill that it is part of.

    Args:
        counts: of the prefill.
        why_eager: of a bucket: why the part is a break there; None where it is recorded.
    """
    found = Coverage(misses=counts.misses.copy(), last_facts=dict(counts.last_facts))
    found.live_sizes = counts.live_sizes.copy()
    for key, steps in counts.hits.items():
        miss = why_eager(counts.sizes[key])
        if miss is None:
            found.hits[key], found.sizes[key] = steps, counts.sizes[key]
            found.live_rows[key] = counts.live_rows[key]
        else:
            found.misses[miss.reason.name] += steps
            found.last_facts[miss.reason.name] = miss.facts
    return found
