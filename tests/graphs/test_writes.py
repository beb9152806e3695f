"""Writes to outside memory are undone after warm-up and capture, and made once by each replay: undeclared ones too."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import cglab
from cglab.graphs.writes import WriteJournal, written_tensors

TRAINED = {
    "batch norm": (lambda: nn.BatchNorm1d(3), (3,)),
    "batch norm of images": (lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (3, 5)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), (3,)),
    "in a stack": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)),
        (3,),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_p28_p43_what_a_module_keeps_from_step_to_step_moves_once_with_each_replay(name):
    """Batch norms move their statistics although their operator's schema declares no write."""
    make, shape = TRAINED[name]
    torch.manual_seed(0)
    module = make().train()
    plain = deepcopy(module)
    slots = {"input": cglab.Slot(pad=0.0)}
    with cglab.capture(module, slots=slots, buckets=(4,), strict=True, clone=True) as captured:
        captured.warm(input=torch.randn(4, *shape))
        same(module, plain, "the capture itself leaves it as it was")
        for _ in range(3):
            x = torch.randn(4, *shape)
            with torch.no_grad():
                assert torch.equal(captured(input=x), plain(x))
            same(module, plain, "a replay moves it as a step does")


def same(module, plain, why):
    for (name, ours), theirs in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), f"{name}: {why}"


def test_statistics_that_are_only_read_are_no_writes():
    statistics = torch.zeros(3), torch.ones(3)
    operator = torch.ops.aten.native_batch_norm.default
    for training, written in ((True, list(statistics)), (False, [])):
        arguments = (torch.randn(4, 3), None, None, *statistics, training, 0.1, 1e-5)
        found = written_tensors(operator, arguments, {})
        assert [id(each) for each in found] == [id(each) for each in written]


@pytest.mark.parametrize("made_inside", [False, True], ids=["plain tensor", "inference tensor"])
def test_p28_p43_writes_in_inference_mode_are_undone_outside_it(made_inside):
    with torch.inference_mode(mode=made_inside):
        kept = torch.zeros(2)
    journal = WriteJournal()
    with torch.inference_mode():
        journal.before([kept])
        kept.add_(1)
    journal.restore()
    assert kept.tolist() == [0, 0]


def test_p28_p43_a_step_in_inference_mode_is_examined_and_captured():
    kept = torch.zeros(2, 2)

    @torch.inference_mode()
    def step(x):
        kept.copy_(x)
        return kept * 2

    assert cglab.doctor(step, torch.ones(2, 2)).healthy
    with cglab.capture(step, slots={"x": cglab.Slot(pad=0.0)}, buckets=(2,), strict=True) as captured:
        captured.warm(x=torch.ones(2, 2))
        assert kept.tolist() == [[0, 0], [0, 0]]
        assert captured(x=torch.full((2, 2), 3.0)).tolist() == [[6, 6], [6, 6]]
