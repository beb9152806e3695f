"""The bucket ledger: phases add up, bytes are counted once, growth is told in words."""

import pytest
import torch

import cglab
from cglab import Slot
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost, explain_growth
from cglab.graphs.recorder import TakeSeconds


def line(size, pool=0, device=0, loaded=0, outputs=0, warmups=1):
    return CaptureCost(
        ShapeKey(size), 0.02, 0.05, pool, device, 20, 0, warmups, loaded_bytes=loaded, output_bytes=outputs,
        seconds=TakeSeconds(0.001, 0.002, 0.007),
    )  # fmt: skip


def test_p29_growth_is_explained_largest_first_with_alike_neighbours_together():
    ledger = [
        line(64, pool=80_000_000, device=10_000_000, loaded=8_000_000, outputs=20_000_000, warmups=2),
        line(32, device=1_000_000), line(16, device=3_000_000),
        line(8, pool=2_000_000), line(4, loaded=1_000_000, device=1_000_000, warmups=2),
    ]  # fmt: skip
    loaded = "of kernels and workspaces loaded by 2 warm-ups"
    largest, middle, small, smallest = explain_growth(ledger)
    assert largest == (
        "64: 80.0 MB of pool, which all later ones share, 2.0 MB of executables, "
        f"20.0 MB of outputs outside the pool, 8.0 MB {loaded}"
    )
    fits = "no pool growth: it fits into what the pool has free"
    assert middle == f"32 to 16 (2 buckets): {fits}, 4.0 MB of executables"
    assert small == "8: 2.0 MB of pool, as blocks fitted no gap that was free, 0.0 MB of executables"
    assert smallest == f"4: {fits}, 0.0 MB of executables, 1.0 MB {loaded}"
    assert explain_growth([]) == []


def test_the_phases_of_a_capture_add_up_to_it():
    row = line(8).as_row()
    phases = row["begin_ms"] + row["record_ms"] + row["end_ms"] + row["instantiate_ms"]
    assert phases == pytest.approx(row["capture_ms"]) and row["record_ms"] == pytest.approx(40)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b52_the_ledger_shows_one_output_buffer_for_all_buckets(device, backend):
    @cglab.eager_break
    def doubled(x):
        return x * 2

    def step(x):
        return (doubled(x) if backend == "breakable" else x * 2) + 1

    with cglab.capture(step, slots={"x": Slot(pad=0.0)}, buckets=(1, 2, 4), backend=backend) as captured:
        captured(x=torch.ones(4, 3, device=device))
        rows = captured.memory()
    assert [row["output_bytes"] for row in rows] == [4 * 3 * 4, 0, 0]
    assert all(row["record_ms"] > 0 for row in rows)
    drivers = [row["begin_ms"] + row["end_ms"] + row["instantiate_ms"] for row in rows]
    assert all(drivers) if device.type == "cuda" else not any(drivers)


@pytest.mark.gpu
def test_a_recorder_may_leave_executables_to_the_first_replay():
    from cglab.graphs.captured import Captured
    from cglab.graphs.cuda import CudaRecorder
    from cglab.graphs.options import Options

    cuda = torch.device("cuda")
    slots = {"x": Slot(shape=(-1, 3), dtype=torch.float32, pad=0.0)}
    captured = Captured(
        "step",
        lambda x: x * 2,
        slots,
        (2, 4),
        cuda,
        Options(strict=True),
        CudaRecorder(cuda, instantiate=False),
    )
    captured.capture()
    (segment,) = captured.recordings.steps_of(4)
    assert segment.address and captured.ledger[0].seconds.instantiate < 1e-4
    x = torch.ones(4, 3, device=cuda)
    assert torch.equal(captured(x=x), x * 2)
    captured.close()
    with pytest.raises(cglab.errors.ClosedError, match="capture it again"):
        _ = segment.address
