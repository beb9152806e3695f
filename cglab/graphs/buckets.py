"""Which sizes are captured, and which of them serves a batch. Pure functions, no device.

``sglang_*`` reproduce SGLang's own lists exactly. The lab's policy (``bucket_list``) is such a list plus the
configured maximum, which is always a bucket (P6, B61), clipped to what the machine can hold (P5, B62). A list
that the user gives is taken as it is, or refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from cglab.errors import BucketError

BucketRule = Callable[[int], list[int]]


def sglang_decode(maximum: int) -> list[int]:
    """SGLang's decode sizes without speculation: 256 gives 36, 512 gives 52."""
    grid = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, maximum + 1, 32)]
    return _with_maximum(grid, maximum)


def sglang_speculative(maximum: int) -> list[int]:
    """SGLang's decode sizes with speculation: 80 gives the 29 of S0's log, 256 gives 51."""
    grid = [
        *range(1, 9),
        *range(10, 33, 2),
        *range(40, 65, 4),
        *range(72, 257, 8),
        *range(272, maximum + 1, 16),
    ]
    return _with_maximum(grid, maximum)


def sglang_prefill(maximum: int) -> list[int]:
    """SGLang's prefill token sizes: 2048 gives 42, 4096 gives 50, 8192 gives 58; the maximum is *not* added."""
    grid = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, maximum + 1, 512),
    ]
    return [size for size in grid if size <= maximum]


def exact_sizes(maximum: int) -> list[int]:
    """Every size from 1 to ``maximum``: what running without padding needs."""
    return list(range(1, maximum + 1))


def _with_maximum(grid: Iterable[int], maximum: int) -> list[int]:
    return sorted({size for size in grid if size <= maximum} | {maximum})


def bucket_list(
    maximum: int,
    rule: BucketRule = sglang_decode,
    *,
    explicit: Sequence[int] | None = None,
    alignment: int = 1,
) -> list[int]:
    """The sizes to capture, ascending, the maximum always among them.

    Args:
        maximum: the largest live size that the buffers can hold.
        rule: makes the list from the maximum; ignored when ``explicit`` is given.
        explicit: the user's own sizes, kept exactly.
        alignment: sizes must be a multiple of it (ranks that split a batch); the rule's are rounded up.

    Raises:
        BucketError: if the list is empty, not of positive whole numbers, above the maximum (B62) or not aligned.
    """
    if maximum < 1 or alignment < 1:
        raise BucketError(f"maximum and alignment must be at least 1, got {maximum} and {alignment}")
    if explicit is not None:
        return checked_sizes(explicit, maximum=maximum, alignment=alignment)
    top = maximum - maximum % alignment
    if top == 0:
        raise BucketError(f"no size is a multiple of {alignment} within the maximum {maximum}")
    aligned = {-(-size // alignment) * alignment for size in [*rule(top), top]}
    return sorted(size for size in aligned if size <= top)


def checked_sizes(explicit: Sequence[int], *, maximum: int | None = None, alignment: int = 1) -> list[int]:
    """A user's own sizes, ascending, or the reason why they cannot be taken.

    Raises:
        BucketError: as ``bucket_list``.
    """
    sizes = list(explicit)
    if not sizes:
        raise BucketError("the list of bucket sizes is empty; give at least one, or none to use the rule")
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong:
        raise BucketError(f"bucket sizes are whole numbers from 1; {wrong[0]!r} is not")
    if len(set(sizes)) != len(sizes):
        raise BucketError(
            f"bucket sizes are given twice: {sorted(s for s in set(sizes) if sizes.count(s) > 1)}"
        )
    over = [size for size in sizes if maximum is not None and size > maximum]
    if over:
        raise BucketError(
            f"bucket {over[0]} is above the maximum of {maximum} that the buffers hold; "
            f"use sizes up to {maximum} or raise the maximum"
        )
    odd = [size for size in sizes if size % alignment]
    if odd:
        raise BucketError(f"bucket {odd[0]} is not a multiple of {alignment}, which this configuration needs")
    return sorted(sizes)


def smallest_bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds ``size`` rows, or None above the largest (P3). ``buckets`` ascend."""
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else None


def padding_waste(size: int, bucket: int) -> float:
    """Computed rows over live rows, less one: 0.0 when the bucket fits exactly."""
    return bucket / size - 1.0


def within_ceiling(size: int, bucket: int, ceiling: float | None) -> bool:
    """Whether ``bucket`` is at most ``ceiling`` times the live size (P7, B67); no ceiling admits all."""
    return ceiling is None or bucket <= ceiling * size
