"""An exception at recorded operations of a captured step: eager right after, capture right after, memory level."""

import pytest
import torch

from cglab.graphs.breaks import BreakCall
from cglab.lab.opening import open_lab
from cglab.lab.recovery import recovery_sweep

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_b15_p28_a_fault_at_the_first_the_last_and_sampled_operations(mode):
    swept = recovery_sweep(CPU, mode, sample=12)
    assert swept.operations > 100 and swept.tried[0] == 0 and swept.tried[-1] == swept.operations - 1
    assert not swept.failed and swept.growth == 0


def test_b15_a_fault_right_before_and_after_every_break():
    """The operation before a break fills its output; the one after starts the next segment."""
    from cglab.graphs import faults
    from cglab.graphs.options import Options
    from cglab.runners.decode import DecodeRunner

    edges = []
    with (
        open_lab("pico-gqa", device="cpu", max_batch=2, max_context=64, buckets=[2]) as lab,
        faults.planned(None) as plan,
    ):
        runner = DecodeRunner(lab.model, lab.engine.kv, lab.group, [2], Options(backend="breakable"))
        original = BreakCall.__init__

        def noted(self, *args, **kwargs):
            edges.append(plan.seen)
            original(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BreakCall, "__init__", noted)
            runner.capture()
        assert len(edges) == lab.config.num_layers
        runner.close()
    indices = sorted({index for edge in edges for index in (edge - 1, edge)})
    swept = recovery_sweep(CPU, "breakable", indices=indices)
    assert not swept.failed and swept.growth == 0


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_b15_a_fault_at_every_operation(mode):
    swept = recovery_sweep(CPU, mode)
    assert len(swept.tried) == swept.operations and not swept.failed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_b15_faults_on_a_gpu(mode):
    swept = recovery_sweep(torch.device("cuda", 0), mode, sample=12)
    assert not swept.failed and swept.growth == 0
