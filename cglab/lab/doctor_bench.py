"""The doctor bench: what an examination costs beside the function that it examines.

The doctor runs a function three or four times with every operation watched, looks through the Python state that it
reaches, and records it once. That is done before a capture and not in a served step, so what is told is an overhead,
as a factor and by operation, and nothing of it is a graph's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from cglab.errors import InputError, no_such
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.graphs.doctor import doctor
from cglab.lab.step_metrics import Progress, silent
from cglab.measure.record import Record, make_record, new_run

ROWS, WIDTH, LAYERS = 8, 64, 24
EXAMINATIONS: Final = 7
Made = tuple[Callable[..., Any], dict[str, Tensor]]


def _pointwise(x: Tensor) -> Tensor:
    for _ in range(LAYERS):
        x = (x * 1.5 + 1).tanh()
    return x


class _Counting(nn.Module):
    """State that changes, which costs one more run that looks after every line."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layers = 0, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.calls += 1
            x = layer(x)
        return x


def _masked(x: Tensor) -> Tensor:
    for _ in range(LAYERS):
        x = x + x[x > 0].sum()
    return x


KINDS: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "pointwise": lambda: _pointwise,
    "linear": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 2, enable_nested_tensor=False
    ),
    "recurrent": lambda: nn.GRU(WIDTH, WIDTH),
    "counting": _Counting,
    "masked": lambda: _masked,
}
"""Clean ones of several makes, one whose Python state changes, and one that reads on the host in every line."""


def doctor_overhead(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    kinds: Sequence[str] = tuple(KINDS),
) -> Iterator[Record]:
    """An examination beside a plain call, for functions of several kinds.

    Args:
        device: where they run.
        quick: once each.
        progress: called with a line for every kind.
        kinds: names in ``KINDS``.

    Yields:
        A record for each: seconds of a call and of an examination, their ratio, and what an operation adds.

    Raises:
        InputError: for an unknown kind.
    """
    if unknown := [name for name in kinds if name not in KINDS]:
        raise InputError(no_such("kind of function", unknown[0], KINDS))
    run, clock = new_run(), clock_for(device, "wall")
    for name in kinds:
        progress(f"the doctor on {name}")
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            function = KINDS[name]()
            x = torch.randn(ROWS, 4, WIDTH).to(device)
        if isinstance(function, nn.Module):
            function.eval().to(device)
        count = 1 if quick else EXAMINATIONS
        with torch.no_grad():
            plain = sample_seconds(partial(function, x), clock, repeats=20 * count, warmup=3)
        report = doctor(function, x)
        examined = sample_seconds(partial(doctor, function, x), clock, repeats=count, warmup=1)
        call, whole = median(plain), median(examined)
        yield make_record(
            bench="doctor", arm=name, device=device, run=run, weights="random", dtype="float32",
            workload={"rows": ROWS, "width": WIDTH},
            samples={"call_us": [each * 1e6 for each in plain], "doctor_ms": [each * 1e3 for each in examined]},
            metrics={
                "call_us": call * 1e6, "doctor_ms": whole * 1e3, "overhead": whole / call,
                "operation_us": (whole - call) * 1e6 / report.operations,
                "operations": float(report.operations), "findings": float(len(report.findings)),
            },
            notes="what an examination takes, once, before a capture; no time of a graph",
        )  # fmt: skip
