"""What users of a server feel under a load: P50 and P90 of TTFT, TPOT, E2E and rate, with queueing told apart.

Definitions as in the serving benchmarks of SGLang and vLLM: percentiles over requests that came to their own end,
rates over the whole run. P90 of a time is what nine requests in ten stay below; P90 of a rate is what nine users in
ten reach or exceed, so it lies below P50 (S2). A figure that nothing was measured for is None, never NaN or zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from cglab.engine.load import LoadResult
from cglab.errors import InputError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50 and P90 of what was measured; None without samples.

    Attributes:
        p50: half of the requests do as well or better.
        p90: nine in ten do as well or better.
        samples: requests behind it, or gaps for ITL.
    """

    p50: float | None
    p90: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Latency:
    """One run of a load, as its users saw it.

    Attributes:
        completed: requests that came to their own end; the percentiles are theirs.
        errors, cancelled: requests that did not.
        in_flight: requests that had not ended when the run stopped.
        unsent: requests for which no time was left.
        preemptions: how often a request lost its memory and began anew.
        seconds: of the run.
        prompt_tokens: of completed requests, reused ones included.
        reused_tokens: of them, taken from the prefix cache.
        new_tokens: of completed requests.
        queueing_ms: arrival to admission.
        ttft_ms: arrival to first token, queueing included.
        tpot_ms: mean of the tokens after the first.
        itl_ms: gap between two tokens, over all gaps.
        e2e_ms: arrival to end.
        user_tok_s: new tokens a second and user, the inverse of TPOT.
        output_tok_s: new tokens over ``seconds``.
        total_tok_s: prompt and new tokens over ``seconds``.
        total_tok_s_per_device: the same for each device.
        concurrency: requests in flight on average: the sum of E2E over ``seconds``.
    """

    completed: int
    errors: int
    cancelled: int
    in_flight: int
    unsent: int
    preemptions: int
    seconds: float
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    queueing_ms: Percentiles
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    user_tok_s: Percentiles
    output_tok_s: float | None
    total_tok_s: float | None
    total_tok_s_per_device: float | None
    concurrency: float | None

    def as_dict(self) -> dict[str, float | int | None]:
        """Flat figures for a record, such as ``ttft_ms_p50``."""
        flat: dict[str, float | int | None] = {}
        for name, value in asdict(self).items():
            flat |= (
                {f"{name}_{part}": each for part, each in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
        return flat

    def as_frame(self) -> pandas.DataFrame:
        """One row a measure: measure, unit, p50, p90, samples; None where nothing was measured."""
        import pandas

        rows = [(*names, each.p50, each.p90, each.samples) for names, each in self._measures()]
        # Columns of objects: in a column of floats None would become NaN.
        return pandas.DataFrame(rows, columns=["measure", "unit", "p50", "p90", "samples"], dtype=object)

    def _measures(self) -> list[tuple[tuple[str, str], Percentiles]]:
        return [(names, getattr(self, field)) for field, names in _MEASURES.items()]

    def __str__(self) -> str:
        times = ", ".join(
            f"{measure} {each.p50:.4g} / {each.p90:.4g} {unit}"
            for (measure, unit), each in self._measures()
            if each.p50 is not None
        )
        rest = f"{self.errors} errors, {self.cancelled} cancelled, {self.in_flight} in flight, {self.unsent} unsent"
        return f"{self.completed} completed, {rest} in {self.seconds:.4g} s; P50 / P90: {times or 'nothing measured'}"


_MEASURES = {
    "queueing_ms": ("queueing", "ms"),
    "ttft_ms": ("TTFT", "ms"),
    "tpot_ms": ("TPOT", "ms"),
    "itl_ms": ("ITL", "ms"),
    "e2e_ms": ("E2E", "ms"),
    "user_tok_s": ("output rate per user", "tok/s"),
}
"""Name and unit of each field that holds percentiles."""


def latency(result: LoadResult, *, devices: int = 1) -> Latency:
    """Percentiles and rates of one run.

    Args:
        result: from :func:`cglab.engine.load.drive`.
        devices: GPUs that the server ran on.

    Raises:
        InputError: for less than one device.
    """
    if devices < 1:
        raise InputError(f"devices={devices}; a server runs on at least 1")
    done = [each for each in result.requests if each.completed]
    prompts, new = sum(each.prompt_tokens for each in done), sum(len(each.token_times) for each in done)

    def rate(amount: float) -> float | None:
        return amount / result.seconds if result.seconds > 0 else None

    tpot = [each.tpot for each in done if each.tpot is not None]
    total = rate(prompts + new)
    return Latency(
        completed=len(done),
        errors=len(result.ended("error")),
        cancelled=len(result.ended("cancelled")),
        in_flight=len(result.ended(None)),
        unsent=result.unsent,
        preemptions=sum(each.preemptions for each in result.requests),
        seconds=result.seconds,
        prompt_tokens=prompts,
        reused_tokens=sum(each.reused_tokens for each in done),
        new_tokens=new,
        queueing_ms=_times(each.queueing for each in done),
        ttft_ms=_times(each.ttft for each in done),
        tpot_ms=_times(tpot),
        itl_ms=_times(gap for each in done for gap in each.gaps),
        e2e_ms=_times(each.e2e for each in done),
        # A request whose tokens all came in one step has no rate.
        user_tok_s=_percentiles([1 / seconds for seconds in tpot if seconds > 0], high=10),
        output_tok_s=rate(new),
        total_tok_s=total,
        total_tok_s_per_device=None if total is None else total / devices,
        concurrency=rate(sum(each.e2e or 0.0 for each in done)),
    )


def _times(seconds: Iterable[float | None]) -> Percentiles:
    return _percentiles([each * 1e3 for each in seconds if each is not None], high=90)


def _percentiles(samples: list[float], *, high: float) -> Percentiles:
    """P50 and P90, between samples by linear interpolation, as numpy and so the benchmarks do."""
    if not samples:
        return Percentiles(None, None, 0)
    p50, p90 = np.percentile(samples, [50, high])
    return Percentiles(float(p50), float(p90), len(samples))
