"""How a step grows with its batch and with the keys and values that it reads, beside what it cannot go below.

A decode step reads every weight once, works on each request's row, and reads each request's keys and values:

    step = base + row * batch + kv * KV bytes

Fitted over measured steps, each term has a least value that arithmetic gives: the weights over the read bandwidth, the
operations of a row over the rate of a large matrix product, and a byte over the bandwidth. A term above its least is
worse than it must be; a residual says how far the three terms tell the whole growth, so that none hides (a term in
the square of the batch, or in the longest context allowed instead of the live one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cglab.errors import InputError

TERMS = 3


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """One measured step.

    Attributes:
        batch: requests.
        kv_gb: keys and values that it reads, in gigabytes (1e9 bytes).
        step_ms: its time.
    """

    batch: int
    kv_gb: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class GrowthTerms:
    """The three terms, fitted or least.

    Attributes:
        base_ms: a step without requests.
        row_us: what a request adds whatever its length.
        kv_ms_gb: what a gigabyte of keys and values adds.
    """

    base_ms: float
    row_us: float
    kv_ms_gb: float

    def step_ms(self, batch: int, kv_gb: float) -> float:
        """The time of a step by these terms."""
        return self.base_ms + self.row_us * batch / 1e3 + self.kv_ms_gb * kv_gb


@dataclass(frozen=True, slots=True)
class GrowthFit:
    """Fitted terms beside the least ones.

    Attributes:
        found: fitted.
        least: what arithmetic allows.
        residual: largest relative difference between a measured step and the fitted one.
        worst: the point that has it.
    """

    found: GrowthTerms
    least: GrowthTerms
    residual: float
    worst: GrowthPoint

    @property
    def ratios(self) -> dict[str, float]:
        """Each fitted term over its least value; below 1 where the work of a term hides behind that of another."""
        least = asdict(self.least)
        return {name: value / least[name] for name, value in asdict(self.found).items()}

    def __str__(self) -> str:
        found, least, ratios = self.found, self.least, self.ratios
        return (
            f"base {found.base_ms:.3g} ms (weights take {least.base_ms:.3g}, x{ratios['base_ms']:.2f}), "
            f"{found.row_us:.3g} us a request (its operations take {least.row_us:.3g}, x{ratios['row_us']:.2f}), "
            f"{found.kv_ms_gb:.3g} ms a GB of KV (reading takes {least.kv_ms_gb:.3g}, x{ratios['kv_ms_gb']:.2f}); "
            f"off by at most {self.residual:.1%}, at batch {self.worst.batch} with {self.worst.kv_gb:.3g} GB"
        )


def least_terms(
    *, weight_bytes: float, row_operations: float, bandwidth: float, matmul_rate: float
) -> GrowthTerms:
    """What the terms cannot go below.

    Args:
        weight_bytes: that a step reads whatever its batch.
        row_operations: floating-point operations of one request's row in the matrix products.
        bandwidth: bytes a second that the device reads.
        matmul_rate: floating-point operations a second of a large matrix product.
    """
    return GrowthTerms(weight_bytes / bandwidth * 1e3, row_operations / matmul_rate * 1e6, 1e12 / bandwidth)


def fit_growth(points: Sequence[GrowthPoint], least: GrowthTerms) -> GrowthFit:
    """Least squares of the relative error, so that the shortest step counts as much as the longest.

    Args:
        points: measured steps, with batches and bytes that vary apart from each other.
        least: from :func:`least_terms`.

    Raises:
        InputError: if the points cannot tell the terms apart, or a step took no time.
    """
    if any(point.step_ms <= 0 for point in points):
        raise InputError("a step of no time was measured; measure it again")
    steps = np.array([point.step_ms for point in points])
    rows = np.array([(1.0, point.batch, point.kv_gb) for point in points]).reshape(-1, TERMS)
    largest = np.abs(rows).max(
        axis=0, initial=0.0
    )  # columns of one size, or their rank is that of their units
    scale = np.where(largest > 0, largest, 1.0)
    weighted = rows / scale / steps[:, None]
    if len(points) <= TERMS or np.linalg.matrix_rank(weighted, tol=1e-6 * np.abs(weighted).max()) < TERMS:
        raise InputError(
            f"{len(points)} points do not tell {TERMS} terms apart; measure more than {TERMS}, some of one batch at "
            "several contexts and some of several batches"
        )
    base, row, kv = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)[0] / scale
    found = GrowthTerms(float(base), float(row) * 1e3, float(kv))
    off = [abs(found.step_ms(point.batch, point.kv_gb) / point.step_ms - 1) for point in points]
    at = int(np.argmax(off))
    return GrowthFit(found, least, off[at], points[at])
