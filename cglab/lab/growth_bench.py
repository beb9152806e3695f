"""The growth bench: a decode step against its batch and its context, and whether a term is worse than it must be.

A cache as long as the longest context is not what a short one needs, so each series has a lab of its own, with as much
cache as its points take. Prompts are not computed: a step takes as long over random keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cglab.engine.workload import steady_decode
from cglab.lab.decode_point import DecodeMeasuring
from cglab.lab.floor import matmul_rate, read_bandwidth
from cglab.lab.opening import PAGE_SIZE, open_lab
from cglab.lab.step_metrics import Progress, silent
from cglab.measure.growth import GrowthFit, GrowthPoint, GrowthTerms, fit_growth, least_terms
from cglab.measure.record import Record, make_record, new_run

FITTED = "full"
"""The arm whose growth is fitted: an eager step is as long as its launches, whatever it computes."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points that share a lab.

    Attributes:
        batches: requests of a step.
        contexts: tokens of each; every batch is measured at every one.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def points(self) -> list[tuple[int, int]]:
        """Batch and context of each step."""
        return [(batch, context) for batch in self.batches for context in self.contexts]

    @property
    def cache_tokens(self) -> int:
        """Room for the largest step, so that no request gives way: whole pages, and one to grow into."""
        return max(batch * (-(-context // PAGE_SIZE) + 2) * PAGE_SIZE for batch, context in self.points)


SERIES = (
    Series((1, 2, 4, 8, 16, 32, 64, 128, 256), (512,)),
    Series((1,), (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)),
    Series(
        (16,), (512, 2048, 8192, 32768)
    ),  # keys and values of 32768 tokens of 16 requests: 77 GB of qwen3-8b
)
QUICK_SERIES = (Series((1, 2, 4), (32,)), Series((1,), (64, 256)), Series((2,), (256,)))


def growth(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """A decode step, eager and captured in turns, at batches of 1 to 256 and contexts of 512 to 65536.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every point.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.

    Yields:
        A record for each arm of each step; then, by model, one with the fitted terms of the captured step.
    """
    on_gpu = device.type == "cuda"
    large = on_gpu and not quick
    names = models or (("qwen3-8b", "qwen3-0.6b") if large else ("pico-gqa",))
    measuring = DecodeMeasuring(
        "growth", new_run(), read_bandwidth(device, 4.0 if on_gpu else 0.2), ("eager", FITTED),
        calls=3 if large else 1, repeats=3,
    )  # fmt: skip
    for name in names:
        made: list[Record] = []
        for series in SERIES if large else QUICK_SERIES:
            for record in _measured(name, series, device, measuring, progress):
                made.append(record)
                yield record
        yield _fitted(made, device, measuring, large=large)


def _measured(
    name: str, series: Series, device: torch.device, measuring: DecodeMeasuring, progress: Progress
) -> Iterator[Record]:
    progress(f"{name}: open for batches {series.batches} at contexts {series.contexts}")
    with open_lab(
        name, device=device, max_batch=max(series.batches), max_context=max(series.contexts),
        cache_tokens=series.cache_tokens, buckets=series.batches,
    ) as lab:  # fmt: skip
        for cached in lab.engine.kv.caches().values():
            cached.normal_()  # a device is faster over zeros
        for batch, context in series.points:
            progress(f"{name}: batch {batch}, context {context}")
            with steady_decode(lab.engine, batch, context, compute=False) as step:
                yield from measuring.records(lab, step)


def _fitted(
    records: Sequence[Record], device: torch.device, measuring: DecodeMeasuring, *, large: bool
) -> Record:
    """The fitted terms of the captured arm, beside the least."""
    last = records[-1]
    dtype = getattr(torch, str(last.dtype))
    rate = matmul_rate(device, dtype, 8192 if large else 512)
    fit = fit_growth(growth_points(records), _least(last, rate, dtype, measuring.bandwidth))
    return make_record(
        bench="growth", arm=FITTED, device=device, run=measuring.run, metrics=_metrics(fit, rate),
        workload={"fitted": "batch and context", "ops": last.workload.get("ops")},
        model=last.model, weights=last.weights, dtype=last.dtype, notes=str(fit),
    )  # fmt: skip


def growth_points(records: Sequence[Record], arm: str = FITTED) -> list[GrowthPoint]:
    """The steps of an arm that were timed, as the fit takes them."""
    points = []
    for record in records:
        step, kv = record.metrics.get("step_ms"), record.metrics.get("kv_bytes")
        if record.arm == arm and isinstance(step, float) and isinstance(kv, float):
            points.append(GrowthPoint(record.workload["batch"], kv / 1e9, step))
    return points


def _least(record: Record, rate: float, dtype: torch.dtype, bandwidth: float) -> GrowthTerms:
    floor, kv = record.metrics["floor_bytes"], record.metrics["kv_bytes"]
    weights = float(floor or 0) - float(kv or 0)
    # Every weight that is read is multiplied once and added once for each row.
    return least_terms(
        weight_bytes=weights,
        row_operations=2 * weights / dtype.itemsize,
        bandwidth=bandwidth,
        matmul_rate=rate,
    )


def _metrics(fit: GrowthFit, rate: float) -> dict[str, float]:
    terms = {name: (getattr(fit.found, name), getattr(fit.least, name)) for name in fit.ratios}
    return {
        **{name: found for name, (found, _) in terms.items()},
        **{f"least_{name}": least for name, (_, least) in terms.items()},
        **{f"{name.partition('_')[0]}_over_least": ratio for name, ratio in fit.ratios.items()},
        "residual": fit.residual, "matmul_tflop_s": rate / 1e12,
    }  # fmt: skip
