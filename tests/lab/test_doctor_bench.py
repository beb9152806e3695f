"""What the doctor costs is told beside the call, as overhead."""

import pytest
import torch

from cglab.errors import InputError
from cglab.lab.doctor_bench import KINDS, LAYERS, doctor_overhead

CPU = torch.device("cpu")


def test_every_kind_has_its_overhead_and_its_findings():
    records = {record.arm: record for record in doctor_overhead(CPU, quick=True)}
    assert set(records) == set(KINDS)
    for name, record in records.items():
        figures = record.metrics
        assert figures["overhead"] == pytest.approx(figures["doctor_ms"] * 1e3 / figures["call_us"])
        assert figures["operations"] >= 5 and (figures["findings"] == 0) == (
            name not in ("counting", "masked")
        )
        assert len(record.samples["doctor_ms"]) == 1 and "no time of a graph" in record.notes
    assert records["linear"].metrics["operations"] >= LAYERS and records["counting"].metrics["findings"] == 1


def test_an_unknown_kind_is_refused():
    with pytest.raises(
        InputError,
        match=r"'linea' is no kind of function \(did you mean linear\?\); good names: pointwise, linear",
    ):
        list(doctor_overhead(CPU, kinds=("linea",)))
