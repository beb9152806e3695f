"""Which bucket serves a batch, decided from sizes alone. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from cglab.errors import SlotError
from cglab.graphs.buckets import smallest_bucket, within_ceiling
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.slots import Padding, Slot


def live_size(
    name: str, slots: Mapping[str, Slot], values: Mapping[str, Tensor | None], *, default: int
) -> int:
    """The live size that all inputs of a step agree on.

    Args:
        name: of the step, for messages.
        slots: its slots.
        values: its inputs.
        default: the size of a step none of whose slots grows.

    Raises:
        SlotError: for unknown, missing or disagreeing inputs.
    """
    unknown = values.keys() - slots.keys()
    if unknown:
        raise SlotError(
            f"{min(unknown)!r} is a new input, not a slot of {name}: its address would be baked in; "
            f"the slots are {sorted(slots)}"
        )
    sizes: dict[str, int] = {}
    for slot_name, slot in slots.items():
        value = values.get(slot_name)
        if value is None:
            if not slot.optional and slot.pad is not Padding.KEEP:
                raise SlotError(
                    f"slot {slot_name!r} of {name} was given no tensor; only a Slot(optional=True) may be None"
                )
            continue
        rows = slot.rows_of(slot_name, value)
        if rows is not None:
            sizes[slot_name] = rows
    if len(set(sizes.values())) > 1:
        raise SlotError(f"the inputs of {name} disagree on the batch size: {sizes}")
    return next(iter(sizes.values()), default)


def choose_bucket(live: int, buckets: Sequence[int], *, padding: bool, ceiling: float | None) -> int | Miss:
    """The bucket for ``live`` rows, or the reason why none serves them.

    Args:
        live: rows in use.
        buckets: captured sizes, ascending.
        padding: whether a larger bucket may serve.
        ceiling: largest bucket in multiples of the live rows (P7, B67); None admits all.
    """
    if live == 0:
        return Miss(Reason.EMPTY_BATCH)
    if not padding:
        exact = live in buckets
        return live if exact else Miss(Reason.SIZE_NOT_CAPTURED, f"size {live}, captured {list(buckets)}")
    bucket = smallest_bucket(live, buckets)
    if bucket is None:
        return Miss(Reason.ABOVE_LARGEST, f"size {live}, largest bucket {buckets[-1]}")
    if not within_ceiling(live, bucket, ceiling):
        return Miss(Reason.WASTE_CEILING, f"size {live} in bucket {bucket}, ceiling {ceiling}x")
    return bucket
