"""The only key of a backend's table.

A raw ``int`` never equals a ``ShapeKey``: looking up a size in a table of keys is the fault behind S1's
regression with padding switched off (P1, B59), so the look-up itself refuses anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from cglab.errors import BucketError


@dataclass(frozen=True, slots=True, order=True)
class ShapeKey:
    """Names one recorded shape.

    Attributes:
        size: rows of the bucket: requests for decode, tokens for prefill.
        variant: tells apart recordings of the same size that are not interchangeable (P2).
    """

    size: int
    variant: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise BucketError(f"a shape key needs a size of at least 1, got {self.size!r}")

    def __str__(self) -> str:
        return str(self.size) if self.variant is None else f"{self.size}/{self.variant}"


def require_key(key: object) -> ShapeKey:
    """Returns ``key`` if it is a ShapeKey.

    Raises:
        BucketError: for a raw size, which would silently miss every table (P1).
    """
    if not isinstance(key, ShapeKey):
        raise BucketError(
            f"{key!r} is a {type(key).__name__}, not a ShapeKey: write ShapeKey({key!r}); "
            "a raw size never matches a recorded shape"
        )
    return key
